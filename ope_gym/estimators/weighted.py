"""The weighted estimators: plain or normalised, capped or not, doubly robust or not.

They need sums of the weights over all trajectories at each step. Sums at step t are divided by
exp(M_t), M_t the log of the largest weight so far. When chunks are merged the larger M_t wins, and
the sums of the other chunk are multiplied by exp(M_old - M_new) <= 1 (by its square for sum w^2),
so nothing overflows. Another chunk may have longer episodes: beyond its own longest one all
trajectories of a chunk have ended and keep their last weight, so its sums are extended by the sums
of its last weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, longest_of, step_numbers
from ope_gym.estimators.reductions import (
    Arrays,
    Column,
    Reduction,
    Starts,
    Steps,
    Weighted,
    discounts,
)
from ope_gym.estimators.table import Composition
from ope_gym.inference.bootstrap import ReplicateSums, Resamples
from ope_gym.inference.computed import Computed, Weights

_NONE = np.empty(0)


@dataclass(frozen=True, eq=False)
class Setting:
    """The facts that the estimators of one evaluation share; n trajectories, K behaviours.

    Args:
        trajectories: n.
        groups: (n,) the groups inside which influence values are centred.
        rounds: (n,) behaviour of each trajectory.
        counts: (K,) trajectories of each behaviour.
        gamma: discount.
        cap: upper bound of the weights of capped estimators.
        has_q: whether there is a q model.
        draws: Bootstrap draws; None without a bootstrap.
        errors: whether influence values are wanted, not the values alone.
    """

    trajectories: int
    groups: IntArray
    rounds: IntArray
    counts: IntArray
    gamma: float = 1.0
    cap: float = 10.0
    has_q: bool = False
    draws: Resamples | None = None
    errors: bool = True

    def column(self, c: Composition) -> Column:
        """Return which weights an estimator uses, and what they multiply."""
        return Column(c.scheme, self.cap if c.capped else None, c.baseline)

    def drawn(self, influence: FloatArray) -> FloatArray | None:
        """Return replicates (R,) of the mean of influence values; None without a bootstrap."""
        return None if self.draws is None else self.draws.means(influence)


def weighted(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute a plain or normalised, capped or not, doubly robust or not, weighted estimate.

    Basic, fused and optimal weights: Nedelec, Le Roux & Perchet (2017),
    https://arxiv.org/abs/1704.00773. With a q model: DR of Jiang & Li (2016),
    https://arxiv.org/abs/1511.03722; WDR of Thomas & Brunskill (2016),
    https://arxiv.org/abs/1604.00923.
    """
    return (yield from weigh_column(setting.column(c), c.normalised, setting))


def weigh_column(column: Column, normalised: bool, setting: Setting) -> Steps[Computed]:
    """Compute the weighted estimate of one column."""
    wanted: tuple[Reduction, ...] = (StepSums(column, setting.gamma),)
    totals, *starts = yield (*wanted, Starts()) if column.baseline else wanted
    start = starts[0] if starts else None
    if normalised:
        return (yield from normalise(column, totals, start, setting))
    with np.errstate(invalid="ignore"):
        value = float(totals.psi.mean())
    computed = _computed(value, totals.psi, totals)
    if start is not None:
        computed = dataclasses.replace(
            computed, value=value + float(start.mean()), influence=totals.psi + start
        )
    return dataclasses.replace(computed, replicates=setting.drawn(computed.influence))


def normalise(
    column: Column, totals: StepTotals, start: FloatArray | None, setting: Setting
) -> Steps[Computed]:
    """Compute the normalised estimate of a column whose sums are known.

    With a q model (`start`, its v at the start) the mean of v is added, and drawn anew with the
    rest in the bootstrap.
    """
    gamma, columns = setting.gamma, totals.columns
    value = columns.value(gamma)
    if not setting.errors:
        return _computed(value + (0.0 if start is None else float(start.mean())), _NONE, totals)
    wanted: tuple[Reduction, ...] = (Influence(column, gamma, columns, setting.trajectories),)
    if setting.draws is not None and np.isfinite(value):
        payer = Payer(discounts(gamma, columns.peak.size)[:, None])
        wanted = (*wanted, Replicates(column, columns, setting.draws, payer))
    influence, *drawn = yield wanted
    computed = _computed(value, influence, totals)
    if drawn:
        computed = dataclasses.replace(computed, replicates=drawn[0][:, 0])
    if start is None:
        return computed
    mean = float(start.mean())
    moved = dataclasses.replace(computed, value=value + mean, influence=influence + (start - mean))
    if computed.replicates is None or setting.draws is None:
        return moved
    return dataclasses.replace(moved, replicates=computed.replicates + setting.draws.means(start))


def _computed(value: float, influence: FloatArray, totals: StepTotals) -> Computed:
    return Computed(value, influence, totals.weights)


# Sums at each step ------------------------------------------------------------------------------

_FAR = 1e300  # stands for infinity where that less itself would be NaN


@dataclass(frozen=True, eq=False)
class Columns:
    """Sums of the weights over trajectories at each step; T is the longest episode.

    Args:
        peak: (T,) M_t, log of the largest weight at t; -inf if all weights are zero.
        sums: (3, T) sum w, sum w^2, sum w r at t, with weights scaled by exp(-M_t).
    """

    peak: FloatArray
    sums: FloatArray

    def value(self, gamma: float) -> float:
        """Return J = sum_t gamma^t (sum w r) / (sum w); NaN if some step has no weight."""
        if not np.all(self.sums[0] > 0):
            return np.nan
        return float(np.sum(discounts(gamma, self.peak.size) * self.sums[2] / self.sums[0]))

    def __add__(self, other: Columns) -> Columns:
        peak = np.maximum(self.peak, other.peak)
        return Columns(peak, self._rescaled(peak) + other._rescaled(peak))

    def _rescaled(self, peak: FloatArray) -> FloatArray:
        """Return the sums scaled by other peaks."""
        # where both are -inf the sums are 0 already
        change = np.subtract(self.peak, peak, out=np.zeros_like(peak), where=self.peak != peak)
        return np.asarray(self.sums * np.exp(np.array([[1.0], [2.0], [1.0]]) * change))

    def extended(self, horizon: int, ended: Columns) -> Columns:
        """Return the columns of more steps, at which the trajectories have ended."""
        more = horizon - self.peak.size
        return Columns(
            np.append(self.peak, np.repeat(ended.peak, more)),
            np.hstack([self.sums, np.repeat(ended.sums, more, axis=1)]),
        )


@dataclass(frozen=True, eq=False)
class StepTotals:
    """The answer to `StepSums`.

    Args:
        columns: sums of the weights at each step.
        psi: (n,) plain influence values sum_t gamma^t w r; NaN if all weights are zero.
        weights: as an estimate hands them over.
        clipped_share: share of the steps whose weight was above the clip.
    """

    columns: Columns
    psi: FloatArray
    weights: Weights
    clipped_share: float


@dataclass(frozen=True)
class StepSums:
    """Sum the weights at each step, and along each trajectory.

    Args:
        column: which weights.
        gamma: discount.
    """

    column: Column
    gamma: float
    in_threads: ClassVar[bool] = True

    def part(self, chunk: Weighted) -> _StepState:
        """Sum over a chunk."""
        (log_w, pay, offsets), log_cap = self.column.of(chunk), self.column.log_cap
        columns, ended, psi = _column_sums(log_w, pay, offsets, self.gamma, log_cap)
        peak = columns.peak
        if peak.max() > 700.0:  # beyond float64: infinite, and the verdict says so
            psi = _overflowing(np.minimum(log_w, log_cap), pay, offsets, self.gamma)
        elif peak.max() == -np.inf:  # nothing here, but other chunks may have weights
            psi = np.zeros(psi.size)
        last = np.minimum(log_w.take(offsets[1:] - 1), log_cap)
        capped = clipped = 0
        if self.column.cap is not None:
            capped = int(np.count_nonzero(log_w > log_cap))
        if self.column.clip is not None:
            clipped = int(np.count_nonzero(chunk.log_weights[self.column.scheme] > log_w))
        counts = np.array([log_w.size, capped, clipped])
        return _StepState(columns, ended, Arrays(psi), Arrays(last), counts)

    def total(self, merged: _StepState) -> StepTotals:
        """Return the sums over all trajectories."""
        columns, psi = merged.columns, merged.psi.joined()
        if columns.peak.max() == -np.inf:  # no weight at all is no estimate, not one of 0
            psi = np.full(psi.size, np.nan)
        steps, capped, clipped = merged.counts.tolist()
        weights = Weights(columns.sums, merged.log_last.joined(), capped / steps)
        return StepTotals(columns, psi, weights, clipped / steps)


@dataclass
class _StepState:
    """Sums over the chunks so far.

    Args:
        columns: sums at each step.
        ended: sums at a step at which all trajectories have ended.
        psi: plain influence values.
        log_last: last log weights.
        counts: steps, steps whose weight was clipped by the cap, and by the clip.
    """

    columns: Columns
    ended: Columns
    psi: Arrays
    log_last: Arrays
    counts: IntArray

    def merge(self, other: _StepState) -> None:
        """Add the sums of later chunks."""
        horizon = max(self.columns.peak.size, other.columns.peak.size)
        parts = (x.columns.extended(horizon, x.ended) for x in (self, other))
        self.columns = next(parts) + next(parts)
        self.ended = self.ended + other.ended
        self.psi.merge(other.psi)
        self.log_last.merge(other.log_last)
        self.counts = self.counts + other.counts


def _column_sums(
    log_w: FloatArray, pay: FloatArray, offsets: IntArray, gamma: float, log_cap: float
) -> tuple[Columns, Columns, FloatArray]:
    """Return the sums of a chunk, those after all its ends, and plain influence values (n,)."""
    from ope_gym import kernels

    n, horizon = offsets.size - 1, longest_of(offsets)
    if horizon == 1:  # many bandits have a million of them, and need no loops over steps
        top = np.array([min(float(log_w.max()), log_cap)])
        w = _scaled(log_w, log_cap, top[0])
        total, square, paid = w.sum(), w @ w, w @ pay
        ended = Columns(top, np.array([[total], [square], [0.0]]))
        w *= pay
        w *= _exp_of(top)
        return Columns(top, np.array([[total], [square], [paid]])), ended, w
    peak, gone = np.full(horizon, -np.inf), np.full(horizon + 1, -np.inf)
    kernels.peaks(log_w, log_cap, offsets, peak, gone)
    peak = np.maximum(peak, np.maximum.accumulate(gone)[:-1])
    sums, last, psi = np.zeros((4, horizon)), np.zeros((2, horizon + 1)), np.empty(n)
    steps = np.stack([peak, discounts(gamma, horizon) * _exp_of(peak)])
    kernels.column_sums(log_w, log_cap, pay, offsets, steps, gone, sums, last, psi)
    # the trajectories that have ended by t keep their last weights
    power = np.array([[1.0], [2.0]])
    with np.errstate(divide="ignore"):
        kept = np.logaddexp.accumulate(np.log(last) + power * gone, axis=1)
    sums[:2] += np.exp(kept[:, :-1] - power * np.maximum(peak, -_FAR))
    top = gone.max(keepdims=True)
    after = np.append(np.exp(kept[:, -1:] - power * np.maximum(top, -_FAR)), [[0.0]], axis=0)
    return Columns(peak, sums[:3]), Columns(top, after), psi


def _exp_of(peak: FloatArray) -> FloatArray:
    """Return exp(M_t) within floats; 1 where no weight is above 0."""
    return np.exp(np.minimum(np.where(peak > -np.inf, peak, 0.0), 700.0))


def _scaled(log_w: FloatArray, log_cap: float, peak: float) -> FloatArray:
    """Return weights divided by exp(peak), at most exp(log_cap) each; zeros if all are."""
    return np.exp(np.minimum(log_w, log_cap) - max(peak, -_FAR))


def _overflowing(log_w: FloatArray, pay: FloatArray, offsets: IntArray, gamma: float) -> FloatArray:
    """Compute influence values of plain weights some of which exceed the largest float."""
    steps = step_numbers(offsets)
    with np.errstate(all="ignore"):
        discount = np.log(discounts(gamma, int(np.diff(offsets).max())))
        paid = np.exp(log_w + discount[steps]) * pay
        paid[pay == 0] = 0.0
        return np.add.reduceat(paid, offsets[:-1])


@dataclass(frozen=True)
class Influence:
    """Compute normalised influence values: (n,), or (m, n) of m stretches of steps.

    psi_i = sum_t gamma^t n w_i,t / W_t (r_i,t - R_t), with W_t and R_t from the sums over all
    trajectories, which the pass before made.

    Args:
        column: which weights.
        gamma: discount.
        columns: the sums over all trajectories.
        trajectories: n.
        ends: one past the last step of each stretch; empty for one value over all steps.
    """

    column: Column
    gamma: float
    columns: Columns
    trajectories: int
    ends: tuple[int, ...] = ()
    in_threads: ClassVar[bool] = True

    def part(self, chunk: Weighted) -> Arrays:
        """Compare the trajectories of a chunk with the means over all."""
        log_w, pay, offsets = self.column.of(chunk)
        psi = normalised_influence(
            log_w,
            self.column.log_cap,
            pay,
            offsets,
            self.columns,
            discounts(self.gamma, self.columns.peak.size) * self.trajectories,
            self.ends,
        )
        return Arrays(psi if self.ends else psi[0])

    def total(self, merged: Arrays) -> FloatArray:
        """Return the values of all trajectories."""
        return merged.joined()


def normalised_influence(
    log_w: FloatArray,
    log_cap: float,
    pay: FloatArray,
    offsets: IntArray,
    columns: Columns,
    counted: FloatArray,
    ends: tuple[int, ...] = (),
) -> FloatArray:
    """Return influence values (m, n) of m stretches of steps; NaN if some step has no weight.

    Args:
        log_w: (S,) log weights.
        log_cap: upper bound put on them.
        pay: (S,) what they multiply.
        offsets: (n + 1,).
        columns: the sums over all trajectories.
        counted: (T,) gamma^t times the number of all trajectories.
        ends: one past the last step of each stretch; empty for one over all steps.
    """
    from ope_gym import kernels

    peak, sums = columns.peak, columns.sums
    psi = np.full((max(len(ends), 1), offsets.size - 1), np.nan)
    if np.all(sums[0] > 0):
        factor, mean = counted / sums[0], sums[2] / sums[0]
        if peak.size == 1:
            psi[0] = factor * _scaled(log_w, log_cap, peak[0]) * (pay - mean)
            return psi
        cuts = np.array(ends or (peak.size,), dtype=np.int64)
        steps, scratch = np.stack([factor, mean, peak]), np.empty((2, peak.size))
        kernels.segment_influence(log_w, log_cap, pay, offsets, steps, cuts, scratch, psi)
    return psi


@dataclass(frozen=True, eq=False)
class Payer:
    """How much (T, m) the mean reward of each step counts; compared by identity."""

    shares: FloatArray


@dataclass(frozen=True)
class Replicates:
    """Compute (R, m) bootstrap replicates of sums of normalised mean rewards.

    Args:
        column: which weights.
        columns: the sums over all trajectories.
        draws: Bootstrap draws.
        payer: what the mean reward of each step counts.
    """

    column: Column
    columns: Columns
    draws: Resamples
    payer: Payer

    def part(self, chunk: Weighted) -> ReplicateSums:
        """Sum the weights of a chunk in every replicate."""
        log_w, pay, offsets = self.column.of(chunk)
        log_w = np.minimum(log_w, self.column.log_cap)
        return ReplicateSums.of(self.draws, chunk.first, log_w, pay, offsets, self.columns.peak)

    def total(self, merged: ReplicateSums) -> FloatArray:
        """Divide the sums; NaN where some step of a replicate has no weight at all."""
        return merged.paid(self.payer.shares)

    def slice(self, trajectories: slice) -> Replicates:
        """Keep the draws of some trajectories."""
        return dataclasses.replace(self, draws=self.draws.part(trajectories))
