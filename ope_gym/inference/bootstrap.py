"""The bootstrap: trajectories drawn anew inside strata, the whole estimator recomputed each time.

From the n_k trajectories of a stratum n_k - 1 are drawn, and each counts n_k / (n_k - 1) times: the
mean of a replicate then has the variance s_k^2 / n_k of the standard error, s_k^2 with the divisor
n_k - 1, for strata of any size. (Drawing all n_k would leave s_k^2 (n_k - 1) / n_k^2, half of that
for two trajectories.)

Trajectories are drawn in blocks of neighbours, each by a generator of its own, from the seed and
the number of the block. So a task can draw its own trajectories, two evaluations of the same
trajectories with one seed share their draws, and memory holds a few blocks.

Reference: Rao & Wu (1988), Resampling inference with complex survey data,
https://doi.org/10.1080/01621459.1988.10478591.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.errors import join_single, joined

_BLOCK = 1024  # trajectories that are drawn from together
_ELEMENTS = 1 << 22  # of a block of (replicates, trajectories) or (trajectories, steps)
_KEEP = 1 << 26  # numbers of draws that are kept, a byte each


class Resamples:
    """How much each of R replicates counts each of n trajectories.

    Args:
        strata: (n,) stratum of each; single ones of a block are joined, unless all strata have one.
        replicates: R.
        seed: Seed of the draws.
    """

    def __init__(self, strata: IntArray, replicates: int, seed: int) -> None:
        self.replicates, self.seed = replicates, seed
        self._size, self._begin, self._strata = strata.size, 0, strata
        self._lone = int(np.bincount(strata).max()) < 2  # no spread can be seen
        self._drawn: dict[int, tuple[NDArray[np.uint8], FloatArray]] = {}

    def part(self, trajectories: slice) -> Resamples:
        """Return what a task needs for some trajectories in a row; they keep their numbers."""
        begin = self._range(self._block_of(trajectories.start))[0]
        end = self._range(self._block_of(trajectories.stop - 1))[1]
        part = copy.copy(self)
        part._begin, part._drawn = begin, {}
        part._strata = self._strata[begin - self._begin : end - self._begin]
        return part

    def factors(self, begin: int, end: int) -> FloatArray:
        """Return (R, end - begin) how much each replicate counts trajectories begin..end-1."""
        factors = np.empty((self.replicates, end - begin))
        for block in range(self._block_of(begin), self._block_of(end - 1) + 1):
            counts, scale = self._block(block)
            first = self._range(block)[0]
            some = slice(max(begin - first, 0), end - first)
            size = scale[some].size
            place = max(first - begin, 0)
            np.multiply(counts[:, some], scale[some], out=factors[:, place : place + size])
        return factors

    def _block(self, block: int) -> tuple[NDArray[np.uint8], FloatArray]:
        """Return counts (R, m) of the trajectories of a block, and what each of them is worth."""
        if block not in self._drawn:
            if (len(self._drawn) + 1) * self.replicates * _BLOCK > _KEEP:
                self._drawn.clear()
            first, stop = self._range(block)
            rng = np.random.default_rng([self.seed, block])
            strata = self._strata[first - self._begin : stop - self._begin]
            strata = strata if self._lone else _with_neighbours(strata)
            self._drawn[block] = draw(strata, self.replicates, rng)
        return self._drawn[block]

    def _block_of(self, trajectory: int) -> int:
        """Return the block of a trajectory; a last one would never vary alone, so it joins."""
        return min(trajectory // _BLOCK, max(self._size - 2, 0) // _BLOCK)

    def _range(self, block: int) -> tuple[int, int]:
        """Return the first trajectory of a block, and one past its last."""
        last = block == self._block_of(self._size - 1)
        return block * _BLOCK, self._size if last else (block + 1) * _BLOCK

    def pooled(self) -> Resamples:
        """Return draws from all trajectories together, not inside strata."""
        return Resamples(np.zeros_like(self._strata), self.replicates, self.seed)

    def by_replicates(self) -> Iterator[FloatArray]:
        """Yield (r, n) how much some replicates count each trajectory, a block of them a time."""
        blocks = [self._block(i) for i in range(self._block_of(self._size - 1) + 1)]
        counts, scale = (np.concatenate(x, axis=-1) for x in zip(*blocks, strict=True))
        rows = max(1, _ELEMENTS // self._size)
        for begin in range(0, self.replicates, rows):
            yield counts[begin : begin + rows] * scale

    def means(self, values: FloatArray) -> FloatArray:
        """Return (R,) the mean of values (n,) in each replicate."""
        total = np.zeros(self.replicates)
        for begin in range(0, values.size, _BLOCK):
            some = values[begin : begin + _BLOCK]
            total += self.factors(begin, begin + some.size) @ some
        return total / values.size


def _with_neighbours(strata: IntArray) -> IntArray:
    """Join strata (m,) of one trajectory inside a block: drawn alone, it would never vary."""
    strata = join_single(joined(strata))
    return strata if np.bincount(strata).max() > 1 else np.zeros_like(strata)


def draw(
    strata: IntArray, replicates: int, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], FloatArray]:
    """Draw from each stratum one trajectory less than it has; from a single one, that one.

    Args:
        strata: (m,) stratum of each trajectory.
        replicates: R.
        rng: source of the draws.

    Returns:
        How often each replicate draws each trajectory (R, m), and what a draw is worth (m,).
    """
    strata, m = join_single(strata), strata.size
    sizes = np.bincount(strata)
    draws = np.maximum(sizes - 1, 1)
    members, first = np.argsort(strata, kind="stable"), np.cumsum(sizes) - sizes
    stratum = np.repeat(np.arange(sizes.size), draws)  # of each draw
    counts = np.empty((replicates, m), dtype=np.uint8)
    for some in np.array_split(counts, -(-counts.size // _ELEMENTS)):
        chosen = rng.random((len(some), stratum.size))
        chosen *= sizes[stratum]
        chosen += first[stratum]
        places = np.take(members, chosen.astype(np.int64), mode="clip")
        places += m * np.arange(len(some))[:, None]
        some[:] = np.bincount(places.ravel(), minlength=some.size).reshape(some.shape)
    return counts, (sizes / draws)[strata]


@dataclass
class ReplicateSums:
    """Sums of w and w r at each step in each replicate, over the trajectories so far.

    Args:
        sums: (2, R, T), with weights scaled by exp(-M_t), M_t the largest log weight at t.
    """

    sums: FloatArray

    @classmethod
    def of(
        cls,
        draws: Resamples,
        first: int,
        log_w: FloatArray,
        rewards: FloatArray,
        offsets: IntArray,
        peak: FloatArray,
    ) -> ReplicateSums:
        """Sum over the trajectories of a chunk, a block of them at a time.

        Args:
            draws: how much each replicate counts each trajectory.
            first: number of the first trajectory.
            log_w: (S,) log weights.
            rewards: (S,).
            offsets: (n + 1,).
            peak: (T,) M_t, over all trajectories.
        """
        sums = np.zeros((2, draws.replicates, peak.size))
        width = max(1, _ELEMENTS // max(draws.replicates, peak.size))
        for begin in range(0, offsets.size - 1, width):
            some = offsets[begin : begin + width + 1]
            factors = draws.factors(first + begin, first + begin + some.size - 1)
            for total, columns in zip(sums, rectangles(log_w, rewards, some, peak), strict=True):
                total += factors @ columns
        return cls(sums)

    def merge(self, other: ReplicateSums) -> None:
        """Add the sums over other trajectories."""
        self.sums += other.sums

    def paid(self, payer: FloatArray) -> FloatArray:
        """Return (R, m) sum_t (sum w r / sum w)_t payer[t]; NaN where a step has no weight."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((self.sums[1] / self.sums[0]) @ payer)


def rectangles(
    log_w: FloatArray, rewards: FloatArray, offsets: IntArray, peak: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return w / exp(M_t) and that times r, each (n, T), for matrix products.

    An ended trajectory keeps its last weight and pays 0.

    Args:
        log_w: (S,) log weights.
        rewards: (S,).
        offsets: (n + 1,) of these trajectories.
        peak: (T,) M_t.
    """
    rows, stop = offsets[:-1, None] + np.arange(peak.size), offsets[1:, None]
    inside = np.minimum(rows, stop - 1)
    with np.errstate(invalid="ignore"):  # NaN where no trajectory has any weight
        weights = np.exp(log_w[inside] - peak)
    return weights, weights * np.where(rows < stop, rewards[inside], 0.0)


def fingerprint(
    returns: FloatArray, log_probs: FloatArray, lengths: IntArray, ids: IntArray
) -> tuple[float, ...]:
    """Return the sum of all returns, and sums by the places of trajectories: equal for equal data.

    Rewards and lengths alone may agree by chance (CartPole pays 1); log-probabilities do not, and
    those of the trajectories `marked` are enough.

    Args:
        returns: (n,) sum of the rewards of each trajectory.
        log_probs: (m,) log-probability of the last action of each marked one.
        lengths: (m,) its steps.
        ids: (m,) its behaviour.
    """
    columns = (returns[marked(returns.size)], log_probs, lengths, ids)
    places = np.arange(0.5, len(ids))
    return (float(returns.sum()), *(float((places * column).sum()) for column in columns))


def marked(trajectories: int) -> slice:
    """Choose the trajectories of a fingerprint: all, or at least 1,024 of many.

    Their rows lie far apart, so each costs a wait for memory.
    """
    return slice(None, None, max(1, trajectories >> 10))


def make_draws(strata: IntArray, replicates: int, seed: int) -> Resamples | None:
    """Return the draws of a bootstrap; None if there are no replicates to draw."""
    return Resamples(strata, replicates, seed) if replicates else None
