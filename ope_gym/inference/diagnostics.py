"""Describe the weights of an estimate: effective sample size, shares, tail, support."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, finite
from ope_gym.inference.computed import Weights
from ope_gym.inference.errors import spread_of

# the numbers that dashboards and logs follow over the training
SCALARS = ("ess", "max_share", "mean_weight", "pareto_k", "capped_share", "support_violations")
_TIE = 1e-9  # of an effective sample size: a difference that is rounding
_SUGGESTING = 1 << 14  # values that suggest how large the largest are


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """A description of the weights of an estimate; T is the longest episode, K the behaviours.

    Args:
        ess: smallest effective sample size over the steps.
        ess_step: the step at which it is reached.
        ess_curve: (T,) effective sample size at each step.
        behaviour_shares: (K,) share of the last weights that each behaviour holds.
        behaviour_ess: (K,) effective sample size of the last weights inside each behaviour.
        max_share: largest share of one trajectory in the weights of any step.
        mean_weight: mean of the last weights; 1 in expectation for plain weights.
        pareto_k: tail index of the last weights; shown, but not used in the verdict.
        capped_share: share of the weights that were clipped at the cap.
        log_last: (n,) log of the last weight of each trajectory, after the cap; -inf for 0.
        influence_share: largest share of one trajectory in the squared standard error; NaN without
            an error. A rare or extreme return may decide the value although the weights are even.
        support_violations: visited steps at which the target may act as no usable behaviour could;
            None if unknown.
        missing_mass: share of the target's episodes that take such an action; None if unknown.
        calibration: (P,) Z score of each recorded policy's propensities, NaN where it cannot be
            computed; None if unknown.
    """

    ess: float
    ess_step: int
    ess_curve: FloatArray
    behaviour_shares: FloatArray
    behaviour_ess: FloatArray
    max_share: float
    mean_weight: float
    pareto_k: float
    capped_share: float
    log_last: FloatArray
    influence_share: float = np.nan
    support_violations: int | None = None
    missing_mass: float | None = None
    calibration: FloatArray | None = None

    @cached_property
    def mean_weight_error(self) -> float:
        """Standard error of the mean weight; infinite if that cannot be said."""
        with np.errstate(over="ignore"):
            error = spread_of(np.exp(self.log_last)).cautious
        return error if np.isfinite(error) else np.inf

    @property
    def uncovered(self) -> float:
        """1 - mean weight: the target's mass that the data do not reach, if clearly above 0."""
        return 1.0 - self.mean_weight

    def to_dict(self) -> dict[str, Any]:
        """Return all but the weights as plain numbers and lists; undefined numbers are None."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "log_last"}
        return {
            name: _plain(value) for name, value in {**shown, "uncovered": self.uncovered}.items()
        }


def weight_diagnostics(
    weights: Weights,
    behaviour_ids: IntArray,
    behaviours: int,
    support_violations: int | None = None,
    missing_mass: float | None = None,
    calibration: FloatArray | None = None,
) -> Diagnostics:
    """Describe the weights of an estimate.

    Args:
        weights: Weights of the estimate.
        behaviour_ids: (n,) behaviour of each trajectory.
        behaviours: K.
        support_violations: Field of `Diagnostics`.
        missing_mass: Field of `Diagnostics`.
        calibration: Field of `Diagnostics`.
    """
    ess_curve, log_last = weights.ess, weights.log_last
    least = float(ess_curve.min())
    step = int(np.argmax(ess_curve <= least * (1.0 + _TIE)))  # the first, whatever is rounded
    last = weights.last
    total, square = (np.bincount(behaviour_ids, x, behaviours) for x in (last, last * last))
    weight = weights.sums[0]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return Diagnostics(
            ess=least,
            ess_step=step,
            ess_curve=ess_curve,
            behaviour_shares=total / max(float(total.sum()), np.finfo(np.float64).tiny),
            behaviour_ess=np.divide(total**2, square, out=np.zeros(behaviours), where=square > 0),
            max_share=float(np.max(np.where(weight > 0, 1.0 / weight, 1.0))),
            mean_weight=weights.mean,
            pareto_k=pareto_k(last),
            capped_share=weights.capped_share,
            log_last=log_last,
            support_violations=support_violations,
            missing_mass=missing_mass,
            calibration=calibration,
        )


def pareto_k(weights: FloatArray) -> float:
    """Fit a generalised Pareto tail (Zhang and Stephens) to the weights; NaN if they are few.

    The tail is the largest min(n / 5, 3 sqrt n) weights, as in Pareto-smoothed importance sampling.
    """
    n = weights.size
    size = int(min(n / 5, 3 * np.sqrt(n)))
    if size < 5:
        return np.nan
    largest = np.sort(_largest(weights, size + 1))
    tail = largest[1:] - largest[0]
    if tail[0] <= 0 or tail[-1] <= tail[0]:
        return np.nan
    grid = 30 + int(np.sqrt(size))
    quartile = tail[int(size / 4 + 0.5) - 1]
    theta = 1 / tail[-1] + (1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))) / (3 * quartile)
    k = np.log1p(-theta[:, None] * tail).mean(axis=1)
    profile = size * (np.log(-theta / k) - k - 1)
    share = np.exp(profile - profile.max())
    best = np.sum(theta * share) / share.sum()
    return float((np.log1p(-best * tail).sum() + 5.0) / (size + 10.0))  # weak prior at k = 1/2


def _largest(values: FloatArray, size: int) -> FloatArray:
    """Return the `size` largest values, in no order.

    Of many, only those above a level that a sample suggests are searched: 40 times as fast as
    `np.partition` of a million weights, which would take as long as the rest of an evaluation.
    """
    some = values[:: max(1, values.size // _SUGGESTING)]
    place = some.size - min(some.size, 2 * size * some.size // values.size + 2)
    high = values[values >= np.partition(some, place)[place]]
    kept = high if high.size >= size else values
    return np.partition(kept, kept.size - size)[kept.size - size :]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [finite(number) for number in value.tolist()]
    return finite(value) if isinstance(value, float) else value
