"""Turn an evaluation into numbers by tag, for dashboards and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.estimate import Estimate


def scalars(evaluation: Mapping[str, Estimate]) -> dict[str, float]:
    """Return all finite numbers of an evaluation by tag.

    Tags are `ope/<estimator>/value|low|high` and `diagnostics/<estimator>/ess|max_share|
    mean_weight|pareto_k|capped_share|support_violations`.
    """
    found: dict[str, float | None] = {}
    for name, e in evaluation.items():
        d, capped = e.diagnostics, name in ESTIMATORS and ESTIMATORS[name].capped
        found |= {f"ope/{name}/{end}": number for end, number in band(e).items()}
        diagnostics = {
            "ess": d.ess,
            "max_share": d.max_share,
            "mean_weight": d.mean_weight,
            "pareto_k": d.pareto_k,
            "capped_share": d.capped_share if capped else None,
            "support_violations": d.support_violations,
        }
        found |= {f"diagnostics/{name}/{key}": number for key, number in diagnostics.items()}
    return {tag: float(n) for tag, n in found.items() if n is not None and math.isfinite(n)}


def band(estimate: Estimate) -> dict[str, float]:
    """Return the value and the ends of the interval."""
    ends = estimate.interval
    return {"value": estimate.value, "low": ends.low, "high": ends.high}


def undefined_ends(estimate: Estimate) -> list[str]:
    """Return which of value, low and high are not finite."""
    return [end for end, number in band(estimate).items() if not math.isfinite(number)]
