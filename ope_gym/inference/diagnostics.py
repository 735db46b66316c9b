"""How far an estimate can be trusted: effective sample size, weight shares, a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, finite, group_sums
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import spread_of
from ope_gym.inference.intervals import ess_t

COLOURS = ("green", "amber", "red")  # of verdicts
GREEN_ESS, AMBER_ESS = 40.0, 4.0
GREEN_SHARE = 0.05  # of one episode in the weights
GREEN_INFLUENCE = 0.1  # of one episode in the squared standard error
NOTED_LOSS, RED_LOSS = 0.005, 0.02  # of the target's episodes: those that leave the support
AMBER_MISSING, RED_MISSING = 0.2, 0.4  # of the weight: 1 - mean weight
NOTED_MEAN = 1.01  # mean weight above which propensities look wrong
# the numbers that dashboards and logs follow over the training
SCALARS = ("ess", "max_share", "mean_weight", "pareto_k", "capped_share", "support_violations")
_DETERMINISTIC = (
    "the policy is deterministic, so an episode counts only up to the first action that the policy "
    "would not take: evaluate the policy that explores, ask for DM and MDR, or play fresh episodes"
)
_TIE = 1e-9  # of an effective sample size: a difference that is rounding
_SUGGESTING = 1 << 14  # values that suggest how large the largest are
_USEFUL = 0.5  # effective episodes that one of another policy must add to be worth collecting


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
    def mean_weight_interval(self) -> tuple[float, float]:
        """The interval that contains the expected weight, but for a chance of 1 in 1,000.

        It has no upper end where one weight makes up more than 5 % of the error: larger ones may be
        missing.
        """
        if not np.isfinite(self.mean_weight * self.log_last.size):
            return -np.inf, np.inf
        spread = spread_of(np.exp(self.log_last))
        size, shape = self.log_last.size, spread.tails
        found = ess_t(self.mean_weight, spread.cautious, size, 0.999, shape)
        if np.isnan(found.low):
            return -np.inf, np.inf
        return found.low, np.inf if shape.largest > GREEN_SHARE else found.high

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

    Two different things can speak against a number: something is wrong or missing (an alarm), or
    nothing is wrong but there are too few data (precision).

    Args:
        colour: "green", "amber" or "red".
        reasons: why, in words: first the alarms, then what there is too little of.
        advice: what would help, in words; empty if nothing is needed.
        alarms: those of the reasons that say what is wrong or missing; empty if nothing is.
        precision: how much the episodes tell, in words.
        notes: what a careful reader should know, though it does not change the colour.
    """

    colour: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    precision: str = ""
    notes: tuple[str, ...] = ()

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
    ess_curve, log_last = computed.ess, computed.log_last
    least = float(ess_curve.min())
    step = int(np.argmax(ess_curve <= least * (1.0 + _TIE)))  # the first, whatever is rounded
    top, last = computed.top, computed.last
    _, total, square = group_sums(behaviour_ids, last, behaviours)
    weight = computed.sums[0]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return Diagnostics(
            ess=least,
            ess_step=step,
            ess_curve=ess_curve,
            behaviour_shares=total / max(float(total.sum()), np.finfo(np.float64).tiny),
            behaviour_ess=np.divide(total**2, square, out=np.zeros(behaviours), where=square > 0),
            max_share=float(np.max(np.where(weight > 0, 1.0 / weight, 1.0))),
            mean_weight=float(np.exp(top) * total.sum() / last.size),
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

    If there are many, only those above a level that a sample of them suggests are searched.
    """
    some = values[:: max(1, values.size // _SUGGESTING)]
    place = some.size - min(some.size, 2 * size * some.size // values.size + 2)
    high = values[values >= np.partition(some, place)[place]]
    kept = high if high.size >= size else values
    return np.partition(kept, kept.size - size)[kept.size - size :]


@dataclass(frozen=True)
class Findings:
    """Hold what is known about an estimate beside its weights.

    Args:
        value: the estimate; NaN if the weights do not support one.
        error: its standard error; NaN if undefined.
        fresh_episodes: how many of the target would tell as much; NaN if unknown.
        alarms: reasons that make the result red.
        cautions: reasons that make it amber.
        notes: remarks that leave the colour alone.
        in_sample: whether only fresh or held-out episodes can repair it.
        effective: effective number of episodes where the estimate rests on a model more than on the
            weights; None where it rests on the weights.
        certain: whether the target is deterministic, and the estimate has weights.
        value_alone: whether no error was asked for.
        guess: standard error of a value drawn evenly from those that the recorded rewards allow.
        unsupported: whether the target takes actions that no recorded policy takes.
    """

    value: float
    error: float
    fresh_episodes: float = np.nan
    alarms: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_sample: bool = False
    effective: float | None = None
    certain: bool = False
    value_alone: bool = False
    guess: float = np.inf
    unsupported: bool = False


def judge(
    diagnostics: Diagnostics,
    findings: Findings,
    behaviour_counts: IntArray,
    names: Sequence[str],
) -> Verdict:
    """Judge an estimate: red for an alarm or no usable evidence, green for a calibrated interval.

    Green needs an effective sample size of 40, no episode with more than 5 % of the weights or more
    than 10 % of the squared error, and nothing that speaks against it. Amber is between.

    Args:
        diagnostics: of the estimate.
        findings: what else is known.
        behaviour_counts: (K,) n_k.
        names: (K,) names of the behaviours.
    """
    d, trajectories = diagnostics, int(behaviour_counts.sum())
    red, amber = list(findings.alarms), list(findings.cautions)
    if findings.effective is None:
        _weight_alarms(d, np.isfinite(findings.value), red, amber)
    elif d.ess < GREEN_ESS:
        amber.append(
            f"rests on the q model: with an effective sample size of {d.ess:.1f}, the weights "
            "can hardly confirm it"
        )
    lost = d.missing_mass or 0.0
    if lost > NOTED_LOSS:
        (red if lost > RED_LOSS else amber).append(
            f"in {100 * lost:.1f} % of its episodes the target takes an action that no usable "
            "behaviour policy ever takes"
        )
    alarms = tuple(red + amber)
    scarce, few = _scarcity(d, findings, trajectories)
    colour = "red" if red or scarce else "amber" if amber or few else "green"
    notes = findings.notes
    if findings.value_alone:
        notes += ("judged by the weights alone, as no error was asked for",)
    if d.support_violations and lost <= NOTED_LOSS:
        notes += (
            f"at {d.support_violations} visited steps the target may take an action that no usable "
            "behaviour policy takes, but it rarely does",
        )
    precision = _precision(d, findings.fresh_episodes, trajectories)
    return Verdict(
        colour,
        (*red, *scarce, *amber, *few) or (precision,),
        () if colour == "green" else _advice(d, findings, behaviour_counts, names),
        alarms,
        precision,
        notes,
    )


def _weight_alarms(d: Diagnostics, known: bool, red: list[str], amber: list[str]) -> None:
    """Add what the weights say about wrong propensities and missing mass.

    A mean weight clearly above 1 speaks of wrong propensities, one clearly below 1 of missing mass,
    which plain estimates lack and normalised ones guess. Clipped weights look better than they are:
    amber, and red if much of the weight is missing.
    """
    capped = d.capped_share > 0
    # the interval, which takes a pass over the weights, is made only where it could matter: it
    # holds the mean
    if d.mean_weight > NOTED_MEAN and d.mean_weight_interval[0] > NOTED_MEAN:
        amber.append(
            f"the mean weight is {d.mean_weight:.2f} instead of 1: a propensity or a behaviour "
            "may be wrong"
        )
    missing = known and d.uncovered > AMBER_MISSING and not capped
    if missing and d.mean_weight_interval[1] < 1.0:
        (red if d.uncovered > RED_MISSING else amber).append(
            f"the mean weight is {d.mean_weight:.2f} instead of 1: the data miss much of what the "
            "target does"
        )
    if capped:
        (red if d.uncovered > AMBER_MISSING else amber).append(
            f"{100 * d.capped_share:.1f} % of the weights were clipped at the cap, leaving a mean "
            f"weight of {d.mean_weight:.2f}: a bias that no interval shows"
        )


def _scarcity(d: Diagnostics, findings: Findings, trajectories: int) -> tuple[list[str], list[str]]:
    """Say what there is too little of: for any use, and for a calibrated interval."""
    scarce: list[str] = []
    few: list[str] = []
    model = findings.effective is not None
    ess = d.ess if findings.effective is None else findings.effective
    if np.isnan(findings.value) and d.ess == 0:
        scarce.append(
            f"no episode supports the target from step {d.ess_step} on: all weights are 0"
        )
    elif not np.isfinite(findings.value):
        scarce.append("the weights overflow: use a normalised or capped estimator")
    elif ess == 0:
        scarce.append(f"from step {d.ess_step} on all weights are 0: later rewards do not count")
    elif trajectories == 1:
        scarce.append("there is only one trajectory: its error cannot be estimated")
    elif ess < AMBER_ESS:
        scarce.append(f"{_counting(ess, trajectories, d.ess_step)}: too few to use")
    elif ess < GREEN_ESS:
        few.append(f"{_counting(ess, trajectories, d.ess_step)}; {GREEN_ESS:g} would be enough")
    if ess >= AMBER_ESS and findings.fresh_episodes < AMBER_ESS and findings.error > 0.0:
        scarce.append(
            f"no more accurate than {findings.fresh_episodes:.1f} fresh episodes: too few to use"
        )
    if findings.error >= findings.guess and not scarce:
        scarce.append(
            "no more accurate than a guess between the worst and the best return that the recorded "
            "rewards allow"
        )
    if np.isinf(findings.error):
        scarce.append("the squares of the rewards overflow: divide all rewards by one number")
    elif (
        np.isnan(findings.error)
        and np.isfinite(findings.value)
        and trajectories > 1
        and not findings.value_alone
    ):
        scarce.append("one trajectory per behaviour: their spread cannot be estimated")
    if scarce or trajectories == 1:
        return scarce, few
    if findings.error == 0:
        few.append("all episodes agree, so the error is unknown: a rare outcome may be missing")
    elif d.influence_share > GREEN_INFLUENCE and ess >= GREEN_ESS:
        few.append(
            f"one episode makes up {100 * d.influence_share:.0f} % of the squared error: a few "
            "extreme returns decide the value, and others may be missing"
        )
    missing = d.uncovered > AMBER_MISSING and d.capped_share == 0 and not model
    if missing and d.mean_weight_interval[1] >= 1.0:
        few.append(
            f"the mean weight is {d.mean_weight:.2f} instead of 1: episodes with large weights may "
            "be missing by chance"
        )
    if d.max_share > GREEN_SHARE and not model:
        few.append(f"one episode holds {100 * d.max_share:.1f} % of the weight")
    return scarce, few


def _counting(ess: float, trajectories: int, step: int) -> str:
    """Say how many episodes are left in effect."""
    size = f"{ess:.1f}" if ess < AMBER_ESS else f"{ess:.0f}"
    if GREEN_ESS - 0.5 <= ess < GREEN_ESS:  # not "40; 40 would be enough"
        size = f"{np.floor(10 * ess) / 10:.1f}"
    if ess > 0.9 * trajectories and trajectories < GREEN_ESS:
        return f"there are only {_episodes(trajectories)}"
    return f"the effective sample size falls to {size} of {trajectories:,} episodes at step {step}"


def _precision(d: Diagnostics, fresh: float, trajectories: int) -> str:
    """Say how much the episodes tell."""
    said = f"effective sample size {d.ess:.0f} of {trajectories:,} episodes"
    if not np.isfinite(fresh):
        return said
    return f"as sure as about {fresh:,.0f} fresh episodes of the target ({said})"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [finite(number) for number in value.tolist()]
    return finite(value) if isinstance(value, float) else value


def _episodes(number: int, more: str = "") -> str:
    return f"{number} {more}episode{'' if number == 1 else 's'}"


def _advice(
    d: Diagnostics, findings: Findings, counts: IntArray, names: Sequence[str]
) -> tuple[str, ...]:
    """Say how many episodes to collect, and with which policy; empty if more would not help."""
    target = "with the target policy itself"
    if any("estimated propensit" in alarm for alarm in findings.alarms):
        return ("fit the propensities with another model, or with more of what the loggers saw",)
    if any("propensit" in alarm for alarm in findings.alarms):
        return (
            "check that log_prob is the natural logarithm of the probability that the policy that "
            "acted gave to the action when it acted",
        )
    if findings.in_sample:
        return (f"collect about {GREEN_ESS:g} fresh episodes {target}, or hold some out",)
    have = min(d.ess, findings.fresh_episodes) if np.isfinite(findings.fresh_episodes) else d.ess
    if findings.certain and have < GREEN_ESS:
        return (_DETERMINISTIC,)
    if have < GREEN_ESS:
        missing = GREEN_ESS - have
        gain = d.behaviour_ess / np.maximum(counts, 1)  # effective sample size an episode adds
        best = int(np.argmax(gain * d.behaviour_shares))
        plain = ", " not in names[best]  # a policy, not a sequence of policies
        enough = gain[best] >= _USEFUL and not findings.unsupported
        if counts.sum() > 1 and enough and plain:
            number = int(np.ceil(missing / gain[best]))
            # a fold of a logger is no one to collect from
            whose = names[best].rpartition(" (fold ")[0] or names[best]
            return (f"collect about {_episodes(number, 'more ')} of {whose}",)
        return (f"collect about {_episodes(int(np.ceil(missing)))} {target}",)
    if d.influence_share > GREEN_INFLUENCE:
        number = int(np.ceil(have * (d.influence_share / GREEN_INFLUENCE - 1.0)))
        return (f"collect about {_episodes(number)} {target}",)
    return ()
