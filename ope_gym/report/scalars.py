"""Turn an evaluation into numbers by tag, for dashboards, trackers and logs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ope_gym.estimators.table import ESTIMATORS, by_recommendation
from ope_gym.inference.diagnostics import SCALARS
from ope_gym.inference.estimate import Estimate

if TYPE_CHECKING:
    from ope_gym.results import Evaluation

VERDICTS = ("red", "amber", "green")  # as a scalar: 0, 1, 2


def scalars(evaluation: Evaluation) -> dict[str, float]:
    """Return the finite numbers of an evaluation by tag.

    Tags are `ope/<estimator>/value|low|high` for every estimator. The recommended one also has
    `ope/fresh_episodes` (about how many fresh episodes would be as accurate), `ope/verdict` (0 red,
    1 amber, 2 green), and `diagnostics/<estimator>/` with the names of
    `ope_gym.inference.diagnostics.SCALARS`.
    """
    best = by_recommendation(evaluation)[0]  # whatever its colour: the same all through a run
    numbers: dict[str, float | None] = {}
    for name, e in evaluation.items():
        numbers |= {f"ope/{name}/{end}": value for end, value in band(e).items()}
    e = evaluation[best]
    numbers["ope/fresh_episodes"] = e.fresh_episodes
    numbers["ope/verdict"] = float(VERDICTS.index(e.verdict.colour))
    capped = best in ESTIMATORS and ESTIMATORS[best].capped
    numbers |= {
        f"diagnostics/{best}/{key}": getattr(e.diagnostics, key)
        for key in SCALARS
        if key != "capped_share" or capped
    }
    return {tag: float(n) for tag, n in numbers.items() if n is not None and math.isfinite(n)}


def band(estimate: Estimate) -> dict[str, float]:
    """Return the value and the ends of the interval."""
    ends = estimate.interval
    return {"value": estimate.value, "low": ends.low, "high": ends.high}


def undefined_ends(estimate: Estimate) -> list[str]:
    """Return which of value, low and high are not finite."""
    return [end for end, number in band(estimate).items() if not math.isfinite(number)]
