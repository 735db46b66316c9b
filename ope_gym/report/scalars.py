"""Turn an evaluation into numbers by tag, for dashboards and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.diagnostics import SCALARS
from ope_gym.inference.estimate import Estimate


def scalars(evaluation: Mapping[str, Estimate]) -> dict[str, float]:
    """Return all finite numbers of an evaluation by tag.

    Tags are `ope/<estimator>/value|low|high` and `diagnostics/<estimator>/` with the names in
    `ope_gym.inference.diagnostics.SCALARS`.
    """
    found: dict[str, float | None] = {}
    for name, e in evaluation.items():
        capped = name in ESTIMATORS and ESTIMATORS[name].capped
        found |= {f"ope/{name}/{end}": number for end, number in band(e).items()}
        found |= {
            f"diagnostics/{name}/{key}": getattr(e.diagnostics, key)
            for key in SCALARS
            if key != "capped_share" or capped
        }
    return {tag: float(n) for tag, n in found.items() if n is not None and math.isfinite(n)}


def band(estimate: Estimate) -> dict[str, float]:
    """Return the value and the ends of the interval."""
    ends = estimate.interval
    return {"value": estimate.value, "low": ends.low, "high": ends.high}


def undefined_ends(estimate: Estimate) -> list[str]:
    """Return which of value, low and high are not finite."""
    return [end for end, number in band(estimate).items() if not math.isfinite(number)]
