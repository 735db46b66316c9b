"""How far an estimate can be trusted: effective sample size, weight shares, a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, finite
from ope_gym.inference.computed import Computed

GREEN_ESS, AMBER_ESS, GREEN_SHARE = 40.0, 10.0, 0.05
AMBER_MISSING, RED_MISSING = 0.2, 0.4  # of the weight: 1 - mean weight
# the numbers that dashboards and logs follow over the training
SCALARS = ("ess", "max_share", "mean_weight", "pareto_k", "capped_share", "support_violations")
_EXCESS = 4.0  # standard errors by which the mean weight may exceed 1


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
        pareto_k: tail index of the last weights; shown, but never the judge.
        capped_share: share of the weights that were clipped at the cap.
        log_last: (n,) log of the last weight of each trajectory, after the cap; -inf for 0.
        support_violations: visited steps at which the target may act as no usable behaviour could;
            None if unknown.
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
    support_violations: int | None = None
    calibration: FloatArray | None = None

    @property
    def mean_weight_error(self) -> float:
        """Standard error of the mean weight, from the spread of the last weights."""
        with np.errstate(over="ignore", invalid="ignore"):
            spread = float(np.std(np.exp(self.log_last)))
        return spread / float(np.sqrt(self.log_last.size)) if np.isfinite(spread) else np.inf

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


@dataclass(frozen=True)
class Verdict:
    """A judgement on whether to trust an estimate.

    Args:
        colour: "green", "amber" or "red".
        reasons: why, in words.
        advice: what would help, in words; empty if nothing is needed.
    """

    colour: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.colour}: " + "; ".join(self.reasons + self.advice)


def weight_diagnostics(
    computed: Computed,
    behaviour_ids: IntArray,
    behaviours: int,
    support_violations: int | None = None,
    calibration: FloatArray | None = None,
) -> Diagnostics:
    """Describe the weights of an estimate.

    Args:
        computed: what the estimator computed.
        behaviour_ids: (n,) behaviour of each trajectory.
        behaviours: K.
        support_violations: see `Diagnostics`.
        calibration: see `Diagnostics`.
    """
    from ope_gym import kernels

    ess_curve, log_last = computed.ess, computed.log_last
    step = int(np.argmin(ess_curve))
    top = float(log_last.max())
    last = kernels.exponentials(log_last, top if np.isfinite(top) else 0.0)  # largest is 1
    total = np.bincount(behaviour_ids, last, minlength=behaviours)
    square = np.bincount(behaviour_ids, last**2, minlength=behaviours)
    weight = computed.sums[0]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return Diagnostics(
            ess=float(ess_curve[step]),
            ess_step=step,
            ess_curve=ess_curve,
            behaviour_shares=total / max(float(total.sum()), np.finfo(np.float64).tiny),
            behaviour_ess=np.divide(total**2, square, out=np.zeros(behaviours), where=square > 0),
            max_share=float(np.max(np.where(weight > 0, 1.0 / weight, 1.0))),
            mean_weight=float(np.exp(top) * last.mean()),
            pareto_k=pareto_k(last),
            capped_share=computed.capped_share,
            log_last=log_last,
            support_violations=support_violations,
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
    largest = np.sort(np.partition(weights, n - size - 1)[n - size - 1 :])
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


def judge(
    diagnostics: Diagnostics,
    value: float,
    error: float,
    behaviour_counts: IntArray,
    names: Sequence[str],
    *,
    notes: Sequence[str] = (),
    cautions: Sequence[str] = (),
) -> Verdict:
    """Judge an estimate: green for ESS >= 40 and no share above 5 %, red below ESS 10.

    A mean weight well below 1 makes it amber, then red: the part of the target that no episode
    shows is missing from plain estimates, and guessed by normalised ones. A clipped weight makes
    it amber, since clipped weights look better than they are, and red if much of the weight is
    missing.

    Args:
        diagnostics: of the estimate.
        value: the estimate; NaN if the weights do not support one.
        error: its standard error; NaN if undefined.
        behaviour_counts: (K,) n_k.
        names: (K,) names of the behaviours.
        notes: further reasons that make the result red.
        cautions: further reasons that make it amber.
    """
    d, trajectories = diagnostics, int(behaviour_counts.sum())
    red: list[str] = list(notes)
    amber: list[str] = list(cautions)
    if np.isnan(value) and d.ess == 0:
        red.append(f"no episode supports the target from step {d.ess_step} on: all weights are 0")
    elif not np.isfinite(value):
        red.append("the weights overflow: take a normalised or capped estimator")
    elif d.ess == 0:
        red.append(f"from step {d.ess_step} on all weights are 0: later rewards are not seen")
    elif d.ess < AMBER_ESS:
        red.append(f"effective sample size {d.ess:.1f} at step {d.ess_step} is below {AMBER_ESS:g}")
    elif d.ess < GREEN_ESS:
        amber.append(f"effective sample size {d.ess:.0f} at step {d.ess_step}, below {GREEN_ESS:g}")
    if trajectories == 1:
        red.append("one trajectory only: its error cannot be known")
    elif np.isnan(error) and np.isfinite(value):
        red.append("one trajectory per behaviour: their spread cannot be known")
    if d.max_share > GREEN_SHARE and trajectories > 1 and not red:
        amber.append(f"one episode holds {d.max_share:.1%} of the weight")
    if error == 0 and trajectories > 1:
        amber.append("all episodes agree, so no spread is seen: rare outcomes would not show")
    if d.mean_weight > 1.01 and d.mean_weight > 1.01 + _EXCESS * d.mean_weight_error:
        amber.append(
            f"the mean weight is {d.mean_weight:.2f} instead of 1: a propensity or a behaviour "
            "may be wrong"
        )
    capped = d.capped_share > 0
    if np.isfinite(value) and d.uncovered > AMBER_MISSING and trajectories > 1 and not capped:
        (red if d.uncovered > RED_MISSING else amber).append(
            f"the mean weight is {d.mean_weight:.2f} instead of 1: the data miss much of what the "
            "target does"
        )
    if capped:
        (red if d.uncovered > AMBER_MISSING else amber).append(
            f"{d.capped_share:.1%} of the weights were clipped at the cap, leaving a mean "
            f"weight of {d.mean_weight:.2f}: a bias that no interval shows"
        )
    if d.support_violations:
        amber.append(
            f"at {d.support_violations} visited steps the target may take an action that no usable "
            "behaviour policy takes"
        )
    colour = "red" if red else "amber" if amber else "green"
    reasons = tuple(red + amber) or (f"effective sample size {d.ess:.0f}",)
    advice = () if d.ess >= GREEN_ESS else (_advice(d, behaviour_counts, names),)
    return Verdict(colour, reasons, advice)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [finite(number) for number in value.tolist()]
    return finite(value) if isinstance(value, float) else value


def _advice(d: Diagnostics, counts: IntArray, names: Sequence[str]) -> str:
    """Name the episodes to collect to reach a green effective sample size."""
    gain = d.behaviour_ess / np.maximum(counts, 1)  # effective sample size an episode adds
    best = int(np.argmax(gain * d.behaviour_shares))
    missing = GREEN_ESS - d.ess
    if counts.sum() < 2 or gain[best] < 0.05:
        return f"collect about {int(np.ceil(missing))} episodes of the target itself"
    return f"collect about {int(np.ceil(missing / gain[best]))} more episodes of {names[best]}"
