"""Sums over trajectories that can be made part by part: `update`, `merge`, `finalise`.

Weights at step t are held as sums scaled by exp(-M_t), M_t the log of the largest weight so far: a
larger one rescales what is there, and nothing overflows. Estimates of parts are never averaged:
parts are merged as sums, and every ratio is taken once, at the end.

The longest episode of a part says nothing about the others. Beyond it all trajectories of the part
keep their last weight, so its sums are extended by the sums of its last weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import Columns, Moments, column_sums, moments


@dataclass
class ColumnSums:
    """Sums of the weights at each step over all trajectories so far; T is the longest episode.

    Args:
        peak: (T,) M_t, log of the largest weight at t.
        sums: (3, T) sum w, sum w^2, sum w r at t, with weights scaled by exp(-M_t).
        last_peak: log of the largest last weight.
        last: (2,) sum w, sum w^2 of the last weights, scaled by exp(-last_peak).
    """

    peak: FloatArray = field(default_factory=lambda: np.empty(0))
    sums: FloatArray = field(default_factory=lambda: np.empty((3, 0)))
    last_peak: float = -np.inf
    last: FloatArray = field(default_factory=lambda: np.zeros(2))

    def update(self, columns: Columns, log_last: FloatArray) -> None:
        """Add some trajectories by their sums and the logs (n,) of their last weights."""
        top = float(log_last.max())
        scaled = np.exp(log_last - top) if top > -np.inf else np.zeros(1)
        last = np.array([scaled.sum(), np.sum(scaled**2)])  # not BLAS: its threads change bits
        self.merge(ColumnSums(columns.peak, columns.sums, top, last))

    def merge(self, other: ColumnSums) -> None:
        """Add the trajectories of another; the order does not matter, but for rounding."""
        horizon = max(self.peak.size, other.peak.size)
        both = [part._extended(horizon) for part in (self, other)]
        peak = np.maximum(both[0].peak, both[1].peak)
        top = max(self.last_peak, other.last_peak)
        self.sums = sum((_scaled(part.sums, part.peak, peak) for part in both), np.zeros(()))
        self.last = sum(
            (_scaled(part.last, np.array(part.last_peak), np.array(top)) for part in both),
            np.zeros(()),
        )
        self.peak, self.last_peak = peak, top

    def _extended(self, horizon: int) -> ColumnSums:
        more = horizon - self.peak.size
        if more == 0:
            return self
        after = np.append(self.last, 0.0)  # an episode that has ended pays nothing
        return ColumnSums(
            np.append(self.peak, np.full(more, self.last_peak)),
            np.hstack([self.sums, np.repeat(after[:, None], more, axis=1)]),
            self.last_peak,
            self.last,
        )


def _scaled(sums: FloatArray, old: FloatArray, new: FloatArray) -> FloatArray:
    """Sums of w, w^2 (and w r) of weights scaled by exp(-old), as if scaled by exp(-new)."""
    empty = np.isneginf(old)
    shrink = np.where(empty, 0.0, np.exp(np.where(empty, 0.0, old - np.where(empty, 0.0, new))))
    factors = np.stack([shrink, shrink**2, shrink])
    return np.asarray(sums * factors[: len(sums)])


@dataclass
class WeightSums:
    """The weights of one scheme, capped or not: what plain and normalised estimators share.

    Args:
        gamma: discount.
        cap: upper bound of the weights, None without one.
        columns: sums at each step.
        psi: (n,) in parts, plain influence values sum_t gamma^t w r.
        log_last: (n,) in parts, log of each trajectory's last weight, after the cap.
        steps: how many.
        capped: at how many of them the cap met the weight.
    """

    gamma: float
    cap: float | None
    columns: ColumnSums = field(default_factory=ColumnSums)
    psi: list[FloatArray] = field(default_factory=list)
    log_last: list[FloatArray] = field(default_factory=list)
    steps: int = 0
    capped: int = 0

    def update(self, log_w: FloatArray, rewards: FloatArray, offsets: IntArray) -> None:
        """Add trajectories: log weights (S,), rewards (S,), offsets (n + 1,)."""
        columns = column_sums(log_w, rewards, offsets, self.gamma, self.cap)
        found = moments(log_w, rewards, offsets, self.gamma, columns)
        weightless = columns.peak.max() == -np.inf  # nothing here, but others may have weights
        self.columns.update(columns, found.log_last)
        self.psi.append(np.zeros(found.influence.size) if weightless else found.influence)
        self.log_last.append(found.log_last)
        self.steps += log_w.size
        self.capped += int(np.count_nonzero(log_w > columns.log_cap))

    def merge(self, other: WeightSums) -> None:
        """Add the trajectories of another, after the own."""
        self.columns.merge(other.columns)
        self.psi += other.psi
        self.log_last += other.log_last
        self.steps += other.steps
        self.capped += other.capped

    def finalise(self, influence: FloatArray | None = None) -> Moments:
        """Value, influence and sums; normalised if its influence values (n,) are given."""
        columns = self.columns
        log_last = np.concatenate(self.log_last)
        if influence is None:
            psi = np.concatenate(self.psi)
            if columns.peak.max() == -np.inf:  # no weight at all is no estimate, not a value of 0
                psi = np.full(psi.size, np.nan)
            with np.errstate(invalid="ignore"):
                value = float(psi.mean())
        else:
            psi, value = influence, normalised_value(columns, self.gamma)
        share = self.capped / self.steps
        return Moments(value, psi, columns.peak, columns.sums, log_last, share)


def normalised_value(columns: ColumnSums, gamma: float) -> float:
    """J = sum_t gamma^t (sum w r) / (sum w); NaN if some step has no weight."""
    if not np.all(columns.sums[0] > 0):
        return np.nan
    discount = np.float64(gamma) ** np.arange(columns.peak.size)
    return float(np.sum(discount * columns.sums[2] / columns.sums[0]))


@dataclass
class InfluenceSums:
    """Normalised influence values, of a later pass that knows the sums over all trajectories.

    Args:
        gamma: discount.
        cap: upper bound of the weights, None without one.
        columns: the final sums of all n trajectories.
        trajectories: n.
        psi: (n,) in parts.
    """

    gamma: float
    cap: float | None
    columns: ColumnSums
    trajectories: int
    psi: list[FloatArray] = field(default_factory=list)

    def update(self, log_w: FloatArray, rewards: FloatArray, offsets: IntArray) -> None:
        """Add trajectories: log weights (S,), rewards (S,), offsets (n + 1,)."""
        from ope_gym import kernels

        psi, columns = np.full(offsets.size - 1, np.nan), self.columns
        if np.all(columns.sums[0] > 0):
            discount = np.float64(self.gamma) ** np.arange(columns.peak.size)
            log_cap = np.inf if self.cap is None else float(np.log(self.cap))
            kernels.normalised_influence(
                log_w, log_cap, rewards, offsets, discount, columns.peak, columns.sums, psi
            )
            psi *= self.trajectories / psi.size  # the kernel takes these for all there are
        self.psi.append(psi)

    def merge(self, other: InfluenceSums) -> None:
        """Add the trajectories of another, after the own."""
        self.psi += other.psi

    def finalise(self) -> FloatArray:
        """(n,)."""
        return np.concatenate(self.psi)
