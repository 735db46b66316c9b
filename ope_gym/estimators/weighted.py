"""How each estimator of the table is computed, once its weights and the q model are at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import (
    ESTIMATORS,
    Columns,
    Composition,
    Moments,
    centre,
    column_sums,
    join_single,
    moments,
    standard_error,
)
from ope_gym.inference import intervals
from ope_gym.inference.intervals import Resamples

_APART = 3.0  # standard errors between NFIS and FWDR from which on auto takes less of FWDR
_DOUBT = 0.25  # of a squared standard error beside which a correction counts


@dataclass(eq=False)
class Problem:
    """What estimators are computed from; S steps, n trajectories.

    Args:
        rewards: (S,).
        offsets: (n + 1,).
        ids: (n,) behaviour of each trajectory.
        log_w: by scheme, log weights (S,).
        gamma: discount.
        cap: upper bound of the weights of capped estimators.
        start: (n,) the q model's v at the start; None without a q model.
        residuals: (S,) r - q + gamma v of the next step; None without a q model.
        counts: (K,) trajectories of each behaviour.
        endings: gives (n, K) log-probabilities of whole trajectories under each behaviour.
        rounds: gives what adaptive data need: v at the start (n,) and residuals (S,) of a q that
            learned from earlier behaviours alone, and the behaviours' weights (K,).
    """

    rewards: FloatArray
    offsets: IntArray
    ids: IntArray
    log_w: dict[str, FloatArray]
    gamma: float
    cap: float
    start: FloatArray | None = None
    residuals: FloatArray | None = None
    counts: IntArray | None = None
    endings: Callable[[], FloatArray] | None = None
    rounds: Callable[[], tuple[FloatArray, FloatArray, FloatArray]] | None = None
    _columns: dict[tuple[str, bool, bool], Columns] = field(default_factory=dict, repr=False)

    def columns(self, scheme: str, capped: bool, baseline: bool) -> Columns:
        """Sums over the trajectories, made once for the estimators that share them."""
        key = scheme, capped, baseline
        if key not in self._columns:
            self._columns[key] = column_sums(
                self.log_w[scheme],
                self.pay(baseline),
                self.offsets,
                self.gamma,
                self.cap if capped else None,
            )
        return self._columns[key]

    def pay(self, baseline: bool) -> FloatArray:
        """(S,) the rewards, or what stands for them in a doubly robust estimate."""
        if not baseline:
            return self.rewards
        assert self.residuals is not None  # whoever asks has a q model
        return self.residuals

    @cached_property
    def truncated(self) -> Problem:
        """The same with fused weights cut at sqrt(n) times their mean at each step."""
        columns = self.columns("fused", False, False)
        limit = cut_limits(columns.peak, columns.sums[0], self.offsets.size - 1)
        steps = np.arange(self.rewards.size) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        limit = limit[steps]
        if np.all(self.log_w["fused"] <= limit):
            return self
        cut = np.minimum(self.log_w["fused"], limit)
        return dataclasses.replace(self, log_w={"fused": cut}, _columns={})

    def within_discount(self) -> Problem:
        """The steps that gamma leaves any weight: the first ones alone if gamma is 0."""
        lengths = np.diff(self.offsets)
        counted = int(np.count_nonzero(self.gamma ** np.arange(lengths.max()) > 0))
        if counted == lengths.max():
            return self
        steps = np.arange(self.rewards.size) - np.repeat(self.offsets[:-1], lengths)
        kept, rounds = steps < counted, self.rounds

        def cut_rounds() -> tuple[FloatArray, FloatArray, FloatArray]:
            assert rounds is not None
            start, residuals, weights = rounds()
            return start, residuals[kept], weights

        return dataclasses.replace(
            self,
            rounds=None if rounds is None else cut_rounds,
            rewards=self.rewards[kept],
            offsets=np.concatenate([[0], np.cumsum(np.minimum(lengths, counted))]),
            log_w={scheme: weights[kept] for scheme, weights in self.log_w.items()},
            residuals=None if self.residuals is None else self.residuals[kept],
        )


@dataclass(frozen=True, eq=False)
class Computed:
    """What an estimator found.

    Args:
        moments: value, influence values and the sums behind the diagnostics.
        replicates: makes bootstrap replicates (R,) from draws, `Resamples` as a rule.
        cautions: reasons of its own that make the result amber.
        report: numbers of its own worth showing.
        spread: (n,) the values whose spread is the error, where it is not the influence.
        pooled: the error is that over all trajectories, not inside strata.
    """

    moments: Moments
    replicates: Callable[[Any], FloatArray]
    cautions: tuple[str, ...] = ()
    report: Mapping[str, float] = field(default_factory=dict)
    spread: FloatArray | None = None
    pooled: bool = False


def compute(name: str, problem: Problem) -> Computed:
    """One estimator of the table."""
    composition = ESTIMATORS[name]
    return METHODS[composition.method](problem, composition)


def _weighted(problem: Problem, c: Composition) -> Computed:
    """Plain, normalised, capped, doubly robust: all of the one formula."""
    log_w, pay = problem.log_w[c.scheme], problem.pay(c.baseline)
    columns = problem.columns(c.scheme, c.capped, c.baseline)
    found = moments(log_w, pay, problem.offsets, problem.gamma, columns, normalised=c.normalised)
    start = problem.start if c.baseline else None
    if start is not None:
        mean = float(start.mean())
        moved = start - mean if c.normalised else start
        found = dataclasses.replace(
            found, value=found.value + mean, influence=found.influence + moved
        )

    def replicates(resamples: Resamples) -> FloatArray:
        if not c.normalised:
            return intervals.bootstrap_plain(found.influence, resamples)
        cap = problem.cap if c.capped else None
        drawn = intervals.bootstrap_normalised(
            log_w, cap, pay, problem.offsets, problem.gamma, found.peak, resamples
        )
        return drawn if start is None else drawn + _draw_mean(start, resamples)

    return Computed(found, replicates)


def _direct(problem: Problem, c: Composition) -> Computed:
    """DM: the mean of v at the start. Cost: the fit of q; weakness: as wrong as q."""
    start = problem.start
    assert start is not None  # asked for only with a q model
    n = float(start.size)
    found = Moments(
        float(start.mean()),
        start,
        np.zeros(1),
        np.array([[n], [n], [0.0]]),
        np.zeros(start.size),
        0.0,
    )
    caution = "the interval holds the spread of the starts only, not the error of the q model"
    return Computed(found, lambda resamples: _draw_mean(start, resamples), (caution,))


def _auto(problem: Problem, c: Composition) -> Computed:
    """J = N - c (N - V), N = NFIS, V between FWDR and DM.

        c = h clip(<psi_N, psi_N - psi_W> / |psi_N - psi_W|^2, 0, 1)
        h = min(1, (3 SE_{N-W} / (N - W))^2)
        V = DM + k d,  d = W - DM,  k = d^2 / (d^2 + SE_d^2 / 4)

    W is FWDR with weights cut at sqrt(n) times their mean at each step. The clipped share, from
    influence values of NFIS and FWDR with those weights, centred within behaviours, is how much of
    the correction lowers the variance: a free meter of the q model. With a useless one it is 0, and
    J is NFIS. N and W estimate the same: where they are more than three standard errors apart the
    influence values miss something, episodes that the sample lacks as a rule; then h takes c back,
    and the result says so. W corrects the model by a noisy term d; the smaller d is beside its
    noise, the more of it is left out: most below half a standard error. The error stays that of
    N - c (N - W): what k takes out is not claimed as precision. ESS and verdict are those of the
    weights before the cut. Bootstrap replicates keep c, the amount left out and the cut. The
    clipped share is optimal for NFIS and FWDR that are both cut; N is not cut, so that for N and W
    it is near the optimum, not exactly there. Without a q model J is NFIS.

    Cost: that of NFIS thrice, and the fit of q. Weakness: the error knows nothing of q where no
    episode went, and is too small where a fitted q explains almost everything else (one step,
    little noise, a rare action); k adds a bias of up to a quarter of SE_d.
    """
    weighted = dataclasses.replace(c, method="weighted")
    plain = _weighted(problem, weighted)
    if problem.residuals is None or problem.start is None:
        return plain
    cut = problem.truncated
    calm = plain if cut is problem else _weighted(cut, weighted)
    robust = _weighted(cut, dataclasses.replace(weighted, baseline=True))
    blend = blended(
        plain.moments, calm.moments.influence, robust.moments, problem.start, problem.ids
    )

    def replicates(resamples: Resamples) -> FloatArray:
        return blend.replicates(plain, robust, resamples)

    report = {**blend.report, "truncated": 0.0}
    if cut is not problem:
        report["truncated"] = float(np.mean(problem.log_w[c.scheme] > cut.log_w[c.scheme]))
    return Computed(blend.moments, replicates, blend.cautions, report)


def cut_limits(peak: FloatArray, sums: FloatArray, n: int) -> FloatArray:
    """(T,) log of sqrt(n) times the mean weight at each step, from sums scaled by exp(-peak)."""
    with np.errstate(divide="ignore"):
        return np.asarray(peak + np.log(sums) - 0.5 * np.log(n))


class Blend(NamedTuple):
    """What `auto` makes of NFIS and FWDR: its moments, c, k, c (1 - k) d and h."""

    moments: Moments
    share: float
    kept: float
    left_out: float
    agreed: float

    @property
    def report(self) -> dict[str, float]:
        """The numbers worth showing."""
        return {"c": self.share, "k": self.kept, "left out": self.left_out}

    @property
    def cautions(self) -> tuple[str, ...]:
        """That the two contradict each other, where they do."""
        if self.agreed == 1.0:
            return ()
        apart = "far" if self.agreed == 0.0 else f"{_APART / np.sqrt(self.agreed):.1f}"
        return (
            f"NFIS and FWDR are {apart} standard errors apart: the episodes miss something, or the "
            "q model is wrong there; auto stays near NFIS",
        )

    def replicates(self, plain: Computed, robust: Computed, draws: Any) -> FloatArray:
        """(R,) from those of its parts, with c and what was left out as they are."""
        own = plain.replicates(draws)
        if self.share == 0.0:
            return own
        return (1.0 - self.share) * own + self.share * robust.replicates(draws) - self.left_out


def blended(
    plain: Moments, calm: FloatArray, robust: Moments, start: FloatArray, strata: IntArray
) -> Blend:
    """The recommendation, from its parts; see `_auto`.

    Args:
        plain: NFIS.
        calm: (n,) influence values of NFIS with weights that are cut.
        robust: FWDR with weights that are cut.
        start: (n,) the q model's v at the start.
        strata: (n,) behaviours.
    """
    agreed = agreement(plain.value - robust.value, plain.influence - robust.influence, strata)
    share = agreed * calibration(calm, robust.influence, strata)
    gap = robust.value - float(start.mean())
    kept = believed(gap, robust.influence - start, strata)  # of d: without the spread of starts
    if share == 0.0:
        return Blend(plain, 0.0, kept, 0.0, agreed)
    left_out = share * (1.0 - kept) * gap
    value = (1.0 - share) * plain.value + share * robust.value - left_out
    influence = (1.0 - share) * plain.influence + share * robust.influence
    shown = dataclasses.replace(plain, value=value, influence=influence)
    return Blend(shown, share, kept, left_out, agreed)


def agreement(gap: float, influence: FloatArray, strata: IntArray) -> float:
    """The share h that is left of a correction: below 1 beyond three of its standard errors."""
    error = _relative_error(gap, influence, strata)
    return 1.0 if np.isnan(error) else float(min(1.0, (_APART * error) ** 2))


def believed(gap: float, influence: FloatArray, strata: IntArray) -> float:
    """The share k of a correction that is believed: near 1 where it is larger than its error."""
    error = _relative_error(gap, influence, strata)
    return 1.0 if np.isnan(error) else float(1.0 / (1.0 + _DOUBT * error**2))


def _relative_error(gap: float, influence: FloatArray, strata: IntArray) -> float:
    """Standard error of a gap as a share of it; NaN if there is no gap, or its error is unknown."""
    if not np.isfinite(gap) or gap == 0.0:
        return np.nan
    with np.errstate(over="ignore"):
        return standard_error(influence / gap, strata)  # in this unit squares stay within floats


def _magic(problem: Problem, c: Composition) -> Computed:
    """MAGIC: see `ope_gym.estimators.magic`. Its error is that of FWDR.

    The bias of the blend is only known to lie within FWDR's own interval, so the spread of the
    blend alone, which may be the q model's, says too little.
    """
    from ope_gym.estimators.magic import bootstrap_magic, magic

    log_w, pay, start = problem.log_w[c.scheme], problem.pay(True), problem.start
    assert start is not None  # asked for only with a q model
    columns = problem.columns(c.scheme, False, True)
    shown = _weighted(problem, c).moments
    blended = magic(log_w, pay, problem.offsets, problem.gamma, start, problem.ids, columns)
    found = dataclasses.replace(shown, value=blended.value, influence=blended.influence)
    direct = float(blended.weights[0])
    cautions: tuple[str, ...] = ()
    if direct > 0.5:
        cautions = (f"{direct:.0%} of it is the q model alone, whose error no interval shows",)

    def replicates(resamples: Resamples) -> FloatArray:
        return bootstrap_magic(
            blended, log_w, pay, problem.offsets, problem.gamma, start, columns, resamples
        )

    return Computed(found, replicates, cautions, {"weight of DM": direct}, shown.influence)


def _control_variates(problem: Problem, c: Composition) -> Computed:
    """Compute FIS with control variates: see `ope_gym.estimators.control_variates`."""
    from ope_gym.estimators.control_variates import control_variates, mixture_ratios

    assert problem.endings is not None
    assert problem.counts is not None
    plain = _weighted(problem, c).moments
    last = problem.log_w[c.scheme][problem.offsets[1:] - 1]
    ratios = mixture_ratios(problem.endings(), problem.counts)
    if not np.all(np.isfinite(plain.influence)):
        return Computed(
            plain, lambda resamples: intervals.bootstrap_plain(plain.influence, resamples)
        )
    controlled = control_variates(plain.influence, ratios, last, problem.ids)
    found = dataclasses.replace(plain, value=controlled.value, influence=controlled.influence)
    return Computed(
        found,
        lambda resamples: intervals.bootstrap_plain(controlled.influence, resamples),
        report={"variance of FIS kept": controlled.variance_ratio},
    )


def _adaptive(problem: Problem, c: Composition) -> Computed:
    """Stabilised doubly robust: see `ope_gym.estimators.adaptive`."""
    from ope_gym.estimators.adaptive import adaptive_dr

    assert problem.rounds is not None
    start, residuals, weights = problem.rounds()
    cut = dataclasses.replace(problem, start=start, residuals=residuals, _columns={})
    plain = _weighted(cut, c).moments
    rounds = adaptive_dr(plain.influence, problem.ids, weights)
    found = dataclasses.replace(plain, value=rounds.value, influence=rounds.influence)
    used = weights[np.unique(problem.ids)]
    return Computed(
        found,
        lambda resamples: intervals.bootstrap_plain(rounds.influence, resamples),
        report={"largest over smallest weight of a round": float(used.max() / used.min())},
        pooled=True,  # as the sum of a martingale
    )


def calibration(plain: FloatArray, corrected: FloatArray, strata: IntArray) -> float:
    """The c in [0, 1] for which (1 - c) plain + c corrected varies least within strata."""
    strata = join_single(strata)  # else those of several trajectories decide alone
    base = centre(plain, strata)
    with np.errstate(invalid="ignore"):  # of values that are not finite
        change = base - centre(corrected, strata)
    largest = float(np.abs(change).max())
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    base, change = base / largest, change / largest  # their squares could leave the floats
    size = float(change @ change)
    return float(np.clip(base @ change / size, 0.0, 1.0))


def _draw_mean(values: FloatArray, resamples: Resamples) -> FloatArray:
    """(R,) mean of the drawn values."""
    return np.concatenate([counts @ values for counts in resamples]) / values.size


METHODS: dict[str, Callable[[Problem, Composition], Computed]] = {
    "weighted": _weighted,
    "direct": _direct,
    "auto": _auto,
    "magic": _magic,
    "control variates": _control_variates,
    "adaptive": _adaptive,
}
