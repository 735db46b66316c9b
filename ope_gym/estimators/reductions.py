"""Sums over trajectories that can be made chunk by chunk and merged.

An estimator asks for reductions. A reduction makes a part from each chunk of weighted trajectories;
parts are merged in the order of the chunks, and the total is taken once, at the end: estimates of
chunks are never averaged. So an estimator is written once, and runs over one chunk in memory, over
files, over processes or on a cluster.

Sums of weights at step t are divided by exp(M_t), M_t the log of the largest weight so far. When
parts are merged the larger M_t wins, and the sums of the other part are multiplied by
exp(M_old - M_new) <= 1 (by its square for sum w^2), so nothing overflows. Another chunk may have
longer episodes: beyond its own longest one all trajectories of a chunk have ended and keep their
last weight, so its sums are extended by the sums of its last weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import (
    FloatArray,
    IntArray,
    annuity,
    cuts_of,
    longest_of,
    offsets_of,
    step_numbers,
)
from ope_gym.inference.bootstrap import ReplicateSums, Resamples
from ope_gym.inference.outcomes import tally

T = TypeVar("T")
_FAR = 1e300  # stands for infinity where that less itself would be NaN
LARGEST = 600.0  # log of the largest weight: a bound that keeps all sums within floats


@dataclass(frozen=True, eq=False)
class Weighted:
    """Some trajectories after weighing: S steps, n trajectories.

    Args:
        offsets: (n + 1,).
        rewards: (S,).
        log_weights: by scheme, (S,).
        residuals: (S,) r - q + gamma v of the next step; None without a q model.
        start: (n,) the q model's v at the start; None without a q model.
        direct: (n,) v at the start of a q that was learned from all episodes; None without one.
        visits: (2, S) ratio of the target's visits to the recorded ones, and the residual at these
            visits; None where they are unknown.
        past: columns (S, p) of the actions and (S, m) of other things that a step shows, by which
            later residuals might be predicted; None where they are unknown.
        step_ratios: (S,) log pi / mu of each action by itself; None where nobody asks for them. The
            weights are no substitute: they stay 0 after an action that the target never takes.
        unit: the largest reward of all chunks, by which squares of rewards stay within floats.
        first: how many trajectories come before these.
        whole: by name, makes what an estimator needs of all trajectories at once.
        episodes: the recorded trajectories themselves; None where they were not kept.
        kept: by name, numbers made of these trajectories that do not depend on the target; the
            same dictionary for all targets.
        last_clipped: by scheme and clip, the log weights that were asked for last.
    """

    offsets: IntArray
    rewards: FloatArray
    log_weights: Mapping[str, FloatArray]
    residuals: FloatArray | None = None
    start: FloatArray | None = None
    direct: FloatArray | None = None
    visits: FloatArray | None = None
    past: tuple[NDArray[Any], NDArray[Any]] | None = None
    step_ratios: FloatArray | None = None
    unit: float = 1.0
    first: int = 0
    whole: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    episodes: Any = None
    kept: dict[Any, Any] = field(default_factory=dict)
    last_clipped: dict[tuple[str, Clip], FloatArray] = field(default_factory=dict, init=False)

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """Return what `make` does of numbers that do not depend on the target, made once."""
        if name not in self.kept:
            self.kept[name] = make()
        found: T = self.kept[name]
        return found

    def clipped(self, scheme: str, clip: Clip) -> FloatArray:
        """Return log weights (S,) after a clip; those of the last one are kept, for all who ask."""
        found = self.last_clipped.get((scheme, clip))
        if found is None:
            found = np.minimum(self.log_weights[scheme], clip.limit.take(self.steps))
            self.last_clipped.clear()
            self.last_clipped[scheme, clip] = found
        return found

    @property
    def steps(self) -> IntArray:
        """(S,) number of each step in its trajectory."""
        return self.once("steps", lambda: step_numbers(self.offsets))


def within_discount(chunk: Weighted, gamma: float) -> Weighted:
    """Keep the steps that gamma leaves any weight: the first ones alone if gamma is 0."""
    if gamma == 1.0:
        return chunk
    lengths = np.diff(chunk.offsets)
    counted = int(np.count_nonzero(gamma ** np.arange(lengths.max()) > 0))
    if counted == lengths.max():
        return chunk
    kept = step_numbers(chunk.offsets) < counted
    return dataclasses.replace(
        chunk,
        rewards=chunk.rewards[kept],
        offsets=offsets_of(np.minimum(lengths, counted)),
        log_weights={scheme: log_w[kept] for scheme, log_w in chunk.log_weights.items()},
        residuals=None if chunk.residuals is None else chunk.residuals[kept],
        visits=None,  # of all steps, each of which speaks for the first ones, too
        past=None,
        step_ratios=None if chunk.step_ratios is None else chunk.step_ratios[kept],
    )


def pieces(chunk: Weighted, steps: int) -> list[Weighted]:
    """Cut a chunk into pieces of about so many steps; they are views, and lack what is whole."""
    return [_piece(chunk, begin, end) for begin, end in cuts_of(chunk.offsets, steps)]


def _piece(chunk: Weighted, begin: int, end: int) -> Weighted:
    """Return trajectories begin..end-1 of a chunk."""
    start, stop = int(chunk.offsets[begin]), int(chunk.offsets[end])

    def steps(column: FloatArray | None) -> FloatArray | None:
        return None if column is None else column[..., start:stop]

    def trajectories(column: FloatArray | None) -> FloatArray | None:
        return None if column is None else column[begin:end]

    return Weighted(
        chunk.offsets[begin : end + 1] - start,
        chunk.rewards[start:stop],
        {scheme: log_w[start:stop] for scheme, log_w in chunk.log_weights.items()},
        residuals=steps(chunk.residuals),
        start=trajectories(chunk.start),
        direct=trajectories(chunk.direct),
        visits=steps(chunk.visits),
        step_ratios=steps(chunk.step_ratios),
        unit=chunk.unit,
        first=chunk.first + begin,
    )


class Reduction(Protocol):
    """A request for a total over all trajectories; frozen, so that equal ones are answered once.

    One that holds numbers of all trajectories also has `slice(trajectories)`, which keeps those
    that a task needs. One with `in_threads = True` is made of `pieces` of a large chunk, several
    at a time. One with a static `parts(requests, chunks)` makes those of several targets together.
    """

    def part(self, chunk: Weighted) -> Any:
        """Return the part of a chunk: an object with `merge(other)`, for the next chunk's."""
        ...

    def total(self, merged: Any) -> Any:
        """Return the answer, from the parts of all chunks merged in order."""
        ...


class Arrays:
    """Arrays (n,) of the chunks so far, in order; with more axes, trajectories are the last."""

    def __init__(self, array: FloatArray) -> None:
        self.parts = [array]

    def merge(self, other: Arrays) -> None:
        """Append the arrays of later chunks."""
        self.parts += other.parts

    def joined(self) -> FloatArray:
        """Return one array for all trajectories."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=-1)


@dataclass(frozen=True, eq=False)
class Clip:
    """An upper bound (T,) on the log weights of each step; compared by identity."""

    limit: FloatArray


@dataclass(frozen=True)
class Column:
    """A choice of weights, and of the numbers they multiply.

    Args:
        scheme: of the weights.
        cap: upper bound of the weights, None without one.
        baseline: weights multiply the residuals of the q model, not the rewards.
        clip: upper bounds of each step, None without any.
    """

    scheme: str
    cap: float | None = None
    baseline: bool = False
    clip: Clip | None = None

    @property
    def log_cap(self) -> float:
        """The log of the cap, inf without one."""
        return np.inf if self.cap is None else float(np.log(self.cap))

    def of(self, chunk: Weighted) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return log weights (S,) before the cap, what they multiply (S,), and the offsets."""
        log_w, pay = chunk.log_weights[self.scheme], chunk.rewards
        if self.clip is not None:
            log_w = chunk.clipped(self.scheme, self.clip)
        if self.baseline:
            assert chunk.residuals is not None  # whoever asks has a q model
            pay = chunk.residuals
        return log_w, pay, chunk.offsets


@dataclass(frozen=True, eq=False)
class Columns:
    """Sums of the weights over all trajectories at each step; T is the longest episode.

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


def discounts(gamma: float, horizon: int) -> FloatArray:
    """Return gamma^t (T,)."""
    return np.asarray(np.float64(gamma) ** np.arange(horizon))


@dataclass(frozen=True, eq=False)
class StepTotals:
    """The answer to `StepSums`.

    Args:
        columns: sums of the weights at each step.
        psi: (n,) plain influence values sum_t gamma^t w r; NaN if all weights are zero.
        log_last: (n,) log of each trajectory's last weight, after the cap.
        capped_share: share of the steps whose weight was clipped by the cap.
        clipped_share: share of the steps whose weight was above the clip.
    """

    columns: Columns
    psi: FloatArray
    log_last: FloatArray
    capped_share: float
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

    def part(self, chunk: Weighted) -> _StepParts:
        """Sum over a chunk."""
        log_w, pay, offsets = self.column.of(chunk)
        log_cap = self.column.log_cap
        peak, sums, psi = _column_sums(log_w, pay, offsets, self.gamma, log_cap)
        if peak.max() > 700.0:  # beyond float64: infinite, and the verdict says so
            psi = _overflowing(np.minimum(log_w, log_cap), pay, offsets, self.gamma)
        elif peak.max() == -np.inf:  # nothing here, but other chunks may have weights
            psi = np.zeros(psi.size)
        last = log_w if peak.size == 1 else log_w[offsets[1:] - 1]
        last = last if np.isinf(log_cap) else np.minimum(last, log_cap)
        clipped = 0
        if self.column.clip is not None:
            clipped = int(np.count_nonzero(chunk.log_weights[self.column.scheme] > log_w))
        capped = 0 if np.isinf(log_cap) else int(np.count_nonzero(log_w > log_cap))
        counts = np.array([log_w.size, capped, clipped])
        return _StepParts.of(peak, sums, psi, last, counts)

    def total(self, merged: _StepParts) -> StepTotals:
        """Return the sums over all trajectories."""
        psi = merged.psi.joined()
        if merged.peak.max() == -np.inf:  # no weight at all is no estimate, not an estimate of 0
            psi = np.full(psi.size, np.nan)
        steps, capped, clipped = merged.counts.tolist()
        columns, last = Columns(merged.peak, merged.sums), merged.log_last.joined()
        return StepTotals(columns, psi, last, capped / steps, clipped / steps)


@dataclass
class _StepParts:
    """Sums over the chunks so far; T is the longest episode of these.

    Args:
        peak: (T,) M_t.
        sums: (3, T) scaled by exp(-M_t).
        last_peak: log of the largest last weight.
        last: (2,) sum w, sum w^2 of the last weights, scaled by exp(-last_peak).
        psi: plain influence values.
        log_last: last log weights.
        counts: steps, steps whose weight was clipped by the cap, and by the clip.
    """

    peak: FloatArray
    sums: FloatArray
    last_peak: float
    last: FloatArray
    psi: Arrays
    log_last: Arrays
    counts: IntArray

    @classmethod
    def of(
        cls,
        peak: FloatArray,
        sums: FloatArray,
        psi: FloatArray,
        log_last: FloatArray,
        counts: IntArray,
    ) -> _StepParts:
        """Hold the sums of one chunk."""
        both = Arrays(psi), Arrays(log_last)
        if peak.size == 1:  # first weights are last weights
            return cls(peak, sums, peak[0], sums[:2, 0], *both, counts)
        top = float(log_last.max())
        scaled = np.exp(log_last - top) if top > -np.inf else np.zeros(1)
        last = np.array([scaled.sum(), np.sum(scaled**2)])  # not BLAS: its threads change bits
        return cls(peak, sums, top, last, *both, counts)

    def merge(self, other: _StepParts) -> None:
        """Add the sums of later chunks."""
        horizon = max(self.peak.size, other.peak.size)
        both = [part._extended(horizon) for part in (self, other)]
        peak = np.maximum(both[0][0], both[1][0])
        top = max(self.last_peak, other.last_peak)
        self.sums = sum((_rescaled(sums, old, peak) for old, sums in both), np.zeros(()))
        self.last = sum(
            (_rescaled(p.last, np.array(p.last_peak), np.array(top)) for p in (self, other)),
            np.zeros(()),
        )
        self.peak, self.last_peak = peak, top
        self.psi.merge(other.psi)
        self.log_last.merge(other.log_last)
        self.counts = self.counts + other.counts

    def _extended(self, horizon: int) -> tuple[FloatArray, FloatArray]:
        """Return peaks and sums of `horizon` steps: an episode that has ended pays nothing."""
        more = horizon - self.peak.size
        if more == 0:
            return self.peak, self.sums
        after = np.append(self.last, 0.0)
        return (
            np.append(self.peak, np.full(more, self.last_peak)),
            np.hstack([self.sums, np.repeat(after[:, None], more, axis=1)]),
        )


def _rescaled(sums: FloatArray, old: FloatArray, new: FloatArray) -> FloatArray:
    """Rescale sums of w, w^2 (and w r) from weights divided by exp(old) to exp(new)."""
    # where both are -inf the sums are 0 already
    shrink = np.exp(np.subtract(old, new, out=np.zeros_like(old), where=old != new))
    found = sums * shrink
    found[1] = sums[1] * (shrink * shrink)
    return np.asarray(found)


def _column_sums(
    log_w: FloatArray, pay: FloatArray, offsets: IntArray, gamma: float, log_cap: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return peaks (T,), sums (3, T) and plain influence values (n,) of a chunk."""
    from ope_gym import kernels

    n, horizon = offsets.size - 1, longest_of(offsets)
    if horizon == 1:  # many bandits have a million of them, and need no loops over steps
        top = np.array([min(float(log_w.max()), log_cap)])
        w = _scaled(log_w, log_cap, top[0])
        sums = np.array([[w.sum()], [np.sum(w * w)], [np.sum(w * pay)]])
        return top, sums, w * pay * _exp_of(top)
    peak, gone = np.full(horizon, -np.inf), np.full(horizon + 1, -np.inf)
    kernels.peaks(log_w, log_cap, offsets, peak, gone)
    peak = np.maximum(peak, np.maximum.accumulate(gone)[:-1])
    sums, ended, psi = np.zeros((3, horizon)), np.zeros((2, horizon + 1)), np.empty(n)
    paid, weight = discounts(gamma, horizon) * _exp_of(peak), np.empty(horizon)
    kernels.column_sums(log_w, log_cap, pay, offsets, peak, gone, paid, weight, sums, ended, psi)
    # the trajectories that have ended by t keep their last weights
    power = np.array([[1.0], [2.0]])
    with np.errstate(divide="ignore"):
        kept = np.logaddexp.accumulate(np.log(ended) + power * gone, axis=1)[:, :-1]
    sums[:2] += np.exp(kept - power * np.maximum(peak, -_FAR))
    return peak, sums, psi


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
        floor, tail = np.empty((2, peak.size))  # scratch
        kernels.segment_influence(
            log_w, log_cap, pay, offsets, factor, mean, peak, cuts, floor, tail, psi
        )
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
        draws: of the bootstrap.
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


@dataclass(frozen=True)
class Starts:
    """Collect the q model's v at the start of each trajectory, (n,).

    Args:
        direct: from the q that was learned from all episodes, if there is one.
    """

    direct: bool = False

    def part(self, chunk: Weighted) -> Arrays:
        """Return the values of a chunk."""
        assert chunk.start is not None  # whoever asks has a q model
        return Arrays(chunk.direct if self.direct and chunk.direct is not None else chunk.start)

    def total(self, merged: Arrays) -> FloatArray:
        """Return the values of all trajectories."""
        return merged.joined()


@dataclass(frozen=True)
class Returns:
    """Collect the discounted return of each trajectory, (n,)."""

    gamma: float

    def part(self, chunk: Weighted) -> Arrays:
        """Return those of a chunk."""
        made = chunk.once(
            ("returns", self.gamma), lambda: tally(chunk.rewards, chunk.offsets, self.gamma)[1]
        )
        return Arrays(made)

    def total(self, merged: Arrays) -> FloatArray:
        """Return those of all trajectories."""
        return merged.joined()


@dataclass(frozen=True)
class Whole:
    """Ask for something that needs all trajectories at once: they must be in one chunk."""

    name: str

    def part(self, chunk: Weighted) -> Any:
        """Compute it from the only chunk."""
        return chunk.whole[self.name]()

    def total(self, merged: Any) -> Any:
        """Return it unchanged."""
        return merged


@dataclass(frozen=True)
class Bets:
    """Sum discounted weighted rewards above the lowest, and below the highest, possible: (2, n).

    After its end a trajectory is paid 0 with its last weight until the horizon.

    Args:
        column: which weights.
        gamma: discount.
        reward_range: lowest and highest possible reward.
        horizon: longest possible episode.
    """

    column: Column
    gamma: float
    reward_range: tuple[float, float]
    horizon: int

    def part(self, chunk: Weighted) -> Arrays:
        """Sum along the trajectories of a chunk."""
        log_w, rewards, offsets = self.column.of(chunk)
        self._check(rewards, offsets, chunk.first)
        lengths = np.diff(offsets)
        weights = np.exp(np.minimum(log_w, min(self.column.log_cap, LARGEST)))
        discount = discounts(self.gamma, self.horizon + 1)[step_numbers(offsets)]
        left = annuity(self.gamma, self.horizon)
        after = weights[offsets[1:] - 1] * (left[self.horizon] - left[lengths])
        low, high = min(self.reward_range[0], 0.0), max(self.reward_range[1], 0.0)
        paid = [
            np.add.reduceat(weights * gain * discount, offsets[:-1]) + after * idle
            for gain, idle in ((rewards - low, -low), (high - rewards, high))
        ]
        return Arrays(np.stack(paid))

    def total(self, merged: Arrays) -> FloatArray:
        """Return the sums of all trajectories."""
        return merged.joined()

    def _check(self, rewards: FloatArray, offsets: IntArray, first: int) -> None:
        """Raise if a reward lies outside the range, or an episode is longer than the horizon."""
        from ope_gym.arrays import place

        low, high = self.reward_range
        outside = np.flatnonzero((rewards < low) | (rewards > high))
        if outside.size:
            episode, step = place(int(outside[0]), offsets)
            raise ValueError(
                f"reward_range is {self.reward_range}, but the reward is {rewards[outside[0]]} at "
                f"episode {first + episode}, step {step}: widen it"
            )
        lengths = np.diff(offsets)
        if lengths.max() > self.horizon:
            raise ValueError(
                f"horizon is {self.horizon}, but episode {first + int(lengths.argmax())} has "
                f"{lengths.max()} steps: give the longest possible"
            )
