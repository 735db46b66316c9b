"""A bootstrap that does not depend on how trajectories are cut into chunks.

How often replicate b draws trajectory i is a Poisson number made from a hash of (seed, b, i). So
the split of the trajectories into chunks changes no replicate, and two evaluations of the same
trajectories with one seed share their draws.

Inside each stratum the drawn numbers are scaled to the number n_k of its trajectories, as if n_k
were drawn from it. If nothing is drawn from one, as can happen to a small one, the trajectory with
the largest hash is drawn once. Of N drawn from n_k with spread s_k (divisor n_k - 1) the mean has

    variance  s_k^2 (n_k - 1) / n_k  E[1 / max(N, 1)],   N ~ Poisson(lambda_k)

which is the s_k^2 / n_k of the standard error if E[1 / max(N, 1)] = 1 / (n_k - 1): lambda_k solves
this for small strata, up from 0 for n_k = 2, and is n_k for the others, where it hardly differs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.errors import join_single

_ELEMENTS = 1 << 22  # of a block of (replicates, trajectories) or (trajectories, steps)
_KEEP = 1 << 26  # draws that are kept, a byte each
_SMALL = 32  # trajectories of a stratum up to which the rate of its draws is solved for


@lru_cache(maxsize=1)
def _limits() -> NDArray[np.uint64]:
    """Return (sizes, 18) limits that turn 53 uniform bits u into a Poisson number.

    The number is the count of limits of its row that u reaches: the limits are the distribution
    function times 2^53. One row for each size of a stratum up to `_SMALL`, with the rate of
    `_rates`; the last row is for all larger strata.
    """
    rates = np.append(_rates(), 1.0)[:, None]
    j = np.arange(17)
    shares = np.exp(-rates) * rates**j / np.array([math.factorial(i) for i in j])
    below = np.minimum(np.cumsum(shares, axis=1), 1.0) * 2.0**53
    whole = np.full((len(rates), 1), 1 << 53, dtype=np.uint64)
    return np.hstack([below.astype(np.uint64), whole])


def _rates() -> FloatArray:
    """Return (_SMALL + 1,) mean draws of a trajectory in strata of 0, 1, ... trajectories.

    E[1 / max(N, 1)] falls from 1 at lambda = 0, so bisection finds where it is 1 / (n - 1).
    """
    sizes, j = np.arange(3.0, _SMALL + 1), np.arange(1.0, 6 * _SMALL)
    factorials = np.cumsum(np.log(j))
    low, high = np.zeros(sizes.size), 2 * sizes
    for _ in range(60):
        mean = (low + high) / 2
        terms = np.exp(j * np.log(mean)[:, None] - mean[:, None] - factorials) / j
        above = np.exp(-mean) + terms.sum(axis=1) > 1 / (sizes - 1)
        low, high = np.where(above, mean, low), np.where(above, high, mean)
    return np.append([0.0, 0.0, 0.0], high / sizes)


class PoissonDraws:
    """The draws of all replicates, made again whenever they are needed.

    Args:
        strata: (n,) stratum of each; single ones are joined to a neighbour.
        replicates: how many.
        seed: of the draws.

    Attributes:
        first: how many trajectories come before these.
        sizes: (strata,) trajectories of each.
        drawn: (R, strata) how many each replicate draws; of none, -1 - the place of the one that
            is taken instead.
    """

    def __init__(self, strata: IntArray, replicates: int, seed: int) -> None:
        from ope_gym.inference.draw_kernels import draw_strata

        self.strata, self.replicates, self.seed, self.first = (
            join_single(strata),
            replicates,
            seed,
            0,
        )
        self._keys = np.random.SeedSequence(seed).generate_state(replicates, np.uint64)
        self.sizes = np.bincount(self.strata)
        self.drawn = np.full((replicates, self.sizes.size), np.iinfo(np.int64).min)
        kept = self.strata.size if replicates * self.strata.size <= _KEEP else 0
        self._counts = np.empty((replicates, kept), dtype=np.uint8)
        draw_strata(self.strata, self._keys, _limits(), self._rows, self.drawn, self._counts)

    @property
    def _rows(self) -> IntArray:
        """(strata,) row of the limits for each stratum."""
        return np.minimum(self.sizes, _SMALL + 1)

    def part(self, episodes: slice) -> PoissonDraws:
        """Return the draws of some trajectories in a row, with the sizes of their strata alone."""
        found = copy.copy(self)
        found.first = self.first + episodes.start
        used, found.strata = np.unique(self.strata[episodes], return_inverse=True)
        found.sizes, found.drawn = self.sizes[used], self.drawn[:, used]
        found._counts = self._counts[:, episodes]
        return found

    def factors(self, begin: int, end: int) -> FloatArray:
        """Return (R, end - begin) how much each replicate counts trajectories begin..end-1."""
        from ope_gym.inference.draw_kernels import scale_counts

        counts, strata = self._drawn_from(begin, end), self.strata[begin:end]
        found = np.empty(counts.shape)
        scale_counts(self.first + begin, strata, self.sizes, self.drawn, counts, found)
        return found

    def _drawn_from(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return (R, end - begin) how often each replicate draws trajectories begin..end-1."""
        if self._counts.shape[1]:
            return self._counts[:, begin:end]
        from ope_gym.inference.draw_kernels import draw_again

        counts = np.empty((self.replicates, end - begin), dtype=np.uint8)
        strata = self.strata[begin:end]
        draw_again(self.first + begin, strata, self._keys, _limits(), self._rows, counts)
        return counts

    def pooled(self) -> PoissonDraws:
        """Return draws from all trajectories together, not inside strata."""
        one = np.zeros_like(self.strata)
        return PoissonDraws(one, self.replicates, self.seed)

    def blocks(self, elements: int) -> Iterator[FloatArray]:
        """Yield (r, n) how much some replicates count each trajectory, `elements` at a time."""
        rows = max(1, elements // self.strata.size)
        for begin in range(0, self.replicates, rows):
            some, block = copy.copy(self), slice(begin, begin + rows)
            some._keys, some.drawn = self._keys[block], self.drawn[block]
            some._counts, some.replicates = self._counts[block], some._keys.size
            yield some.factors(0, self.strata.size)

    def means(self, values: FloatArray) -> FloatArray:
        """Return (R,) the mean of values (n,) in each replicate."""
        total, width = np.zeros(self.replicates), max(1, _ELEMENTS // self.replicates)
        for begin in range(0, values.size, width):
            end = min(begin + width, values.size)
            total += self.factors(begin, end) @ values[begin:end]
        return total / values.size


def replicate_whole(
    draws: PoissonDraws,
    log_w: FloatArray,
    log_cap: float,
    rewards: FloatArray,
    offsets: IntArray,
    peak: FloatArray,
    payer: FloatArray,
) -> FloatArray:
    """Return (R, m) replicates, sum_t (sum w r / sum w)_t payer[t], of all trajectories at once.

    Steps are done in blocks, so that memory does not grow with replicates times steps, as it does
    where the sums over several chunks have to be merged (`Replicated`). NaN where some step of a
    replicate has no weight at all.

    Args:
        draws: how much each replicate counts each trajectory.
        log_w: (S,) log weights.
        log_cap: upper bound of these.
        rewards: (S,).
        offsets: (n + 1,).
        peak: (T,) log of the largest weight at each step.
        payer: (T, m) what the mean reward of each step counts.
    """
    n, horizon = offsets.size - 1, peak.size
    width = max(1, min(horizon, _ELEMENTS // max(n, draws.replicates)))
    result = np.zeros((draws.replicates, payer.shape[1]))
    for t0 in range(0, horizon, width):
        steps = np.arange(t0, min(t0 + width, horizon))
        dense = _dense(log_w, log_cap, rewards, offsets, peak, steps)
        begin = 0
        for factors in draws.blocks(_ELEMENTS):
            rows = slice(begin, begin + len(factors))
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = (factors @ dense[1]) / (factors @ dense[0])
            result[rows] += mean @ payer[t0 : t0 + mean.shape[1]]
            begin = rows.stop
    return result


def _dense(
    log_w: FloatArray,
    log_cap: float,
    rewards: FloatArray,
    offsets: IntArray,
    peak: FloatArray,
    steps: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Return w / exp(M_t) and that times r, (n, steps): a rectangle for matrix products.

    An ended trajectory keeps its last weight and pays 0.
    """
    rows, stop = offsets[:-1, None] + steps, offsets[1:, None]
    inside = np.minimum(rows, stop - 1)
    with np.errstate(invalid="ignore"):  # NaN where no trajectory has any weight
        weights = np.exp(np.minimum(log_w[inside], log_cap) - peak[steps])
    return weights, weights * np.where(rows < stop, rewards[inside], 0.0)


@dataclass
class Replicated:
    """Sums of w and w r at each step in each replicate, over the trajectories so far.

    Memory is (2, replicates, longest episode).

    Args:
        sums: (2, R, T), with weights scaled by exp(-peak).
    """

    sums: FloatArray

    @classmethod
    def of(
        cls,
        draws: PoissonDraws,
        begin: int,
        log_w: FloatArray,
        log_cap: float,
        rewards: FloatArray,
        offsets: IntArray,
        peak: FloatArray,
    ) -> Replicated:
        """Sum over the trajectories of a chunk, a block of them at a time.

        Args:
            draws: how much each replicate counts each trajectory.
            begin: place of the first trajectory among those of the draws.
            log_w: (S,) log weights.
            log_cap: upper bound of these.
            rewards: (S,).
            offsets: (n + 1,).
            peak: (T,) log of the largest weight at each step, over all trajectories.
        """
        found = cls(np.zeros((2, draws.replicates, peak.size)))
        longest = int(np.diff(offsets).max())
        width = max(1, _ELEMENTS // max(draws.replicates, longest))
        for first in range(0, offsets.size - 1, width):
            rows = offsets[first : first + width + 1]
            part = slice(rows[0], rows[-1])
            factors = draws.factors(begin + first, begin + first + rows.size - 1)
            found._add(factors, log_w[part], log_cap, rewards[part], rows - rows[0], peak)
        return found

    def _add(
        self,
        factors: FloatArray,
        log_w: FloatArray,
        log_cap: float,
        rewards: FloatArray,
        offsets: IntArray,
        peak: FloatArray,
    ) -> None:
        longest = int(np.diff(offsets).max())
        dense = _dense(log_w, log_cap, rewards, offsets, peak, np.arange(longest))
        self.sums[:, :, :longest] += factors @ dense
        last = np.minimum(log_w[offsets[1:] - 1], log_cap)
        top = float(last.max())
        if top > -np.inf and longest < peak.size:  # beyond, all keep their last weight
            kept = factors @ np.exp(last - top)
            self.sums[0, :, longest:] += np.outer(kept, np.exp(top - peak[longest:]))

    def merge(self, other: Replicated) -> None:
        """Add the sums over other trajectories."""
        self.sums += other.sums

    def paid(self, payer: FloatArray) -> FloatArray:
        """Return (R, m) sum_t (sum w r / sum w)_t payer[t]; NaN where a step has no weight."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((self.sums[1] / self.sums[0]) @ payer)


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


def make_draws(strata: IntArray, replicates: int, seed: int) -> PoissonDraws | None:
    """Return the draws of a bootstrap; None if there are no replicates to draw."""
    return PoissonDraws(strata, replicates, seed) if replicates else None
