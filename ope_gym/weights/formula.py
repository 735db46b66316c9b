"""Importance weights of trajectory prefixes: one formula, three schemes.

    log w_i,t = log P_e - log P_b(i) + log f(P_b(i)) - log sum_k rho_k f(P_k)

P_k,t is the probability of the actions up to step t under behaviour k, P_e under the target, b(i)
the behaviour of trajectory i, rho_k = n_k / n.

| scheme  | f(p)         | in the paper |
|---------|--------------|--------------|
| basic   | 1            | BIS          |
| fused   | p            | FIS: the mixture of prefix products, never a product of mixtures |
| optimal | p / (1 - a p) | OUIS, a = r^2 / (r^2 + V); a = 1 for deterministic rewards |

The paper writes the last one as p / (r^2 (1 - p) + V): the same but for a factor that cancels.

Reference: Nedelec, Le Roux & Perchet (2017), A comparative study of counterfactual estimators,
https://arxiv.org/abs/1704.00773.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arrays import (
    LOG_PROB_TOLERANCE,
    FloatArray,
    IntArray,
    bad_log_prob,
    check_column,
    check_finite,
    check_log_probs,
    in_threads,
    place,
)

# Elements of (behaviours, steps) evaluated or handed to a thread at once: 4 MiB, most of which are
# still in a cache when they are summed.
_BLOCK = 1 << 19
_STEPS = 1 << 16  # and steps
_THREADS = 1 << 22  # elements from which threads are worth their start
_LARGEST_DENSITY = 1e300  # log of it; leaves room for sums


class LogProbRows(Protocol):
    """Per-step log-probabilities under K behaviours, made block by block: never all at once."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, S)."""
        ...

    def block(self, start: int, stop: int) -> FloatArray:
        """Return (K, stop - start) of the steps start..stop-1, C-contiguous."""
        ...


# log f(P_b) - log sum_k rho_k f(P_k) of each scheme
SCHEMES: dict[str, Callable[[Prefixes], FloatArray]] = {
    "basic": lambda prefix: np.zeros(1),
    "fused": lambda prefix: -prefix.mixture,
    "optimal": lambda prefix: prefix.optimal,
}


def log_weights(
    target_log_probs: FloatArray,
    behaviour_log_probs: FloatArray | LogProbRows,
    behaviour_ids: IntArray,
    offsets: IntArray,
    schemes: Iterable[str],
    *,
    counts: IntArray | None = None,
    reward_model: tuple[FloatArray, FloatArray] | None = None,
    density: bool = False,
    names: tuple[IntArray, IntArray] | None = None,
) -> dict[str, FloatArray]:
    """Compute the log weights (S,) of each scheme; log-probabilities are checked on the way.

    Args:
        target_log_probs: (S,) log-probability of the taken actions under the target.
        behaviour_log_probs: (K, S) the same under each behaviour, or a source of such blocks.
        behaviour_ids: (n,) behaviour of each trajectory.
        offsets: (n + 1,) trajectory i is rows offsets[i]:offsets[i + 1].
        schemes: names from `SCHEMES`.
        counts: (K,) trajectories of each behaviour, if other than those in `behaviour_ids`.
        reward_model: mean (S,) and variance (S,) of the reward given its prefix, for "optimal".
        density: the actions are continuous: log densities may exceed 0, and "optimal" is "fused",
            because a single path has probability 0.
        names: (K,) and (n,) numbers of the behaviours and the trajectories, for error messages
            about a part of the data.
    """
    steps, ids = target_log_probs.size, behaviour_ids.astype(np.int64, copy=False)
    if counts is None:
        counts = np.bincount(ids, minlength=behaviour_log_probs.shape[0])
    limit = _LARGEST_DENSITY if density else LOG_PROB_TOLERANCE
    result = {scheme: np.empty(steps) for scheme in schemes}
    a = reward_parameter(reward_model, steps, density) if "optimal" in result else np.empty(0)

    def weigh(begin: int, end: int) -> None:
        start, stop = int(offsets[begin]), int(offsets[end])
        target, inside = target_log_probs[start:stop], offsets[begin : end + 1] - start
        if not target.max() <= limit:  # also for NaN
            check_log_probs(target_log_probs, "target_log_probs", offsets, density)
        first, rows = start, behaviour_log_probs
        if not (isinstance(rows, np.ndarray) and rows.flags.c_contiguous):
            first, rows = 0, block_of(behaviour_log_probs, start, stop)
        rho, own = counts / counts.sum(), ids[begin:end]
        try:
            prefix = Prefixes(target, rows, first, own, inside, rho, limit, a[start:stop])
            for scheme, log_w in result.items():
                np.add(prefix.ratio, SCHEMES[scheme](prefix), out=log_w[start:stop])
        except BadEntryError:
            block = rows[:, first : first + stop - start]
            raise _refusal(block, start, ids, offsets, limit, names) from None

    chunks = list(chunks_of(offsets, behaviour_log_probs.shape[0]))
    # policies need not be thread-safe, and few elements are not worth a thread
    if isinstance(behaviour_log_probs, np.ndarray) and behaviour_log_probs.size >= _THREADS:
        in_threads(lambda chunk: weigh(*chunk), chunks)
    else:
        for begin, end in chunks:
            weigh(begin, end)
    return result


def reward_parameter(
    reward_model: tuple[FloatArray, FloatArray] | None, steps: int, density: bool = False
) -> FloatArray:
    """Return a = r^2 / (r^2 + V) (S,): 1 if deterministic, 0 (fused) if nothing is paid."""
    if density:
        return np.zeros(steps)
    if reward_model is None:
        return np.ones(steps)
    mean, deviation = np.abs(reward_model[0]), np.sqrt(reward_model[1])
    with np.errstate(divide="ignore", over="ignore"):  # by their ratio: squares could underflow
        ratio = np.divide(deviation, mean, out=np.full(steps, np.inf), where=mean > 0)
        return np.asarray(1.0 / (1.0 + ratio**2))


def block_of(source: FloatArray | LogProbRows, start: int, stop: int) -> FloatArray:
    """Return (K, stop - start) of steps start..stop-1, from an array or a source of blocks."""
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source[:, start:stop], dtype=np.float64)
    return source.block(start, stop)


def chunks_of(offsets: IntArray, behaviours: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole trajectories of about _BLOCK elements of (behaviours, steps) each.

    They depend on the data alone, so that results do not depend on the number of cores.
    """
    begin, n = 0, offsets.size - 1
    size = max(1, min(_BLOCK // behaviours, _STEPS))
    while begin < n:
        stop = int(offsets[begin]) + size
        end = max(begin + 1, int(np.searchsorted(offsets, stop, side="right")) - 1)
        yield begin, min(end, n)
        begin = end


def _refusal(
    block: FloatArray,
    start: int,
    ids: IntArray,
    offsets: IntArray,
    limit: float,
    names: tuple[IntArray, IntArray] | None,
) -> ValueError:
    """Return the error for the first entry that is NaN or above the limit, or -inf but executed."""
    rows = np.arange(start, start + block.shape[1])
    episodes = np.searchsorted(offsets, rows, side="right") - 1
    bad = ~(block <= limit)
    columns = np.arange(block.shape[1])
    bad[ids[episodes], columns] |= np.isneginf(block[ids[episodes], columns])
    behaviour, column = (int(index) for index in np.argwhere(bad)[0])
    episode, value = int(episodes[column]), float(block[behaviour, column])
    step = start + column - int(offsets[episode])
    if names is not None:
        behaviour, episode = int(names[0][behaviour]), int(names[1][episode])
    return bad_log_prob("behaviour_log_probs", value, episode, step, f" of {behaviour=}")


def check_reward_model(
    model: str | tuple[ArrayLike, ArrayLike], steps: int, offsets: IntArray
) -> str | tuple[FloatArray, FloatArray]:
    """Return a reward model with arrays that fit the data, or raise."""
    if isinstance(model, str):
        return model
    mean = check_column(model[0], "reward_model mean", steps)
    variance = check_column(model[1], "reward_model variance", steps)
    check_finite(mean, "reward_model mean", offsets)
    check_finite(variance, "reward_model variance", offsets)
    negative = np.flatnonzero(variance < 0)
    if negative.size:
        episode, step = place(int(negative[0]), offsets)
        raise ValueError(
            f"reward_model variance is {variance[negative[0]]} at episode {episode}, step {step}: "
            "a variance is not negative"
        )
    return mean, variance


_TILE = 256  # steps whose prefixes under two behaviours stay in the first-level cache
_NEGLIGIBLE = -40.0  # log of a p below which f(p) is p in float64
_RANGE = 1e-280, 1e280  # sums of exponentials that have neither underflowed nor been cut off


class BadEntryError(Exception):
    """A log-probability is NaN or too large, or that of an executed action is -inf."""


class Prefixes:
    """Prefix probabilities on some trajectories in a row, m steps, made when they are asked for.

    Args:
        target: (m,) log-probability of the taken action under the target.
        log_probs: (K, columns) the same under each behaviour.
        first: column of the first step.
        ids: own behaviour b of each trajectory.
        offsets: Offsets of the trajectories, from 0 to m.
        rho: (K,) share of the trajectories of each behaviour.
        limit: largest log-probability allowed.
        a: (m,) the reward parameter of "optimal".

    Attributes:
        ratio: (m,) log P_e - log P_b.
    """

    def __init__(
        self,
        target: FloatArray,
        log_probs: FloatArray,
        first: int,
        ids: IntArray,
        offsets: IntArray,
        rho: FloatArray,
        limit: float,
        a: FloatArray,
    ) -> None:
        from ope_gym import kernels  # loads numba

        self._log_probs, self._first, self._offsets = log_probs, first, offsets
        self._rho, self._limit, self._a = rho, limit, a
        self._own_steps, self.ratio = np.empty((2, target.size))
        kernels.own_ratios(target, log_probs, first, ids, offsets, self._own_steps, self.ratio)
        if not (self._own_steps.min() > -np.inf and self._own_steps.max() <= limit):
            raise BadEntryError

    @cached_property
    def own(self) -> FloatArray:
        """(m,) log P_b."""
        from ope_gym import kernels

        return np.asarray(kernels.prefix_sums(self._own_steps, self._offsets))

    @cached_property
    def mixture(self) -> FloatArray:
        """(m,) log sum_k rho_k P_k / P_b."""
        from ope_gym import kernels

        single = self._offsets.size - 1 == self.ratio.size
        starts = np.zeros(0 if single else self.ratio.size, dtype=np.bool_)
        if not single:
            starts[self._offsets[:-1]] = True
        rho = np.append(self._rho, 0.0)
        sums, rows = np.empty(self.ratio.size), np.empty((2, _TILE))
        if not kernels.relative_mixture(
            self._log_probs, self._first, self._own_steps, starts, rho, self._limit, rows, sums
        ):
            raise BadEntryError
        if sums.min() > _RANGE[0] and sums.max() < _RANGE[1]:
            return np.asarray(np.log(sums, out=sums))
        lost = ~((sums > _RANGE[0]) & (sums < _RANGE[1]))
        sums[lost] = 1.0
        return self._in_logs(np.log(sums, out=sums), np.flatnonzero(lost))

    def _in_logs(self, mixture: FloatArray, lost: IntArray) -> FloatArray:
        """Do the trajectories of these steps again, however far apart their behaviours are."""
        with np.errstate(divide="ignore"):
            log_rho = np.log(self._rho)[:, None]
        for i in np.unique(np.searchsorted(self._offsets, lost, side="right") - 1):
            start, stop = self._offsets[i : i + 2].tolist()
            steps = self._log_probs[:, self._first + start : self._first + stop]
            prefixes = log_rho + np.cumsum(steps, axis=1)
            mixture[start:stop] = np.logaddexp.reduce(prefixes, axis=0) - self.own[start:stop]
        return mixture

    @property
    def optimal(self) -> FloatArray:
        """(m,) log f(P_b) - log sum_k rho_k f(P_k), f(p) = p / (1 - a p)."""
        from ope_gym import kernels

        extra, certain, scratch = np.zeros((3, self.ratio.size))
        kernels.optimal_extra(
            self._log_probs,
            self._first,
            self._offsets,
            self._rho,
            self._a,
            extra,
            certain,
            scratch,
        )
        result = -self.mixture  # f(p) is p where p is negligible, and where a is 0
        differs = (extra > 0.0) | (certain > 0.0) | (self.own > _NEGLIGIBLE)
        some = np.flatnonzero(differs & (self._a > 0.0))
        own, mixture, a, sure = self.own[some], self.mixture[some], self._a[some], certain[some]
        rest = (1.0 - a) - a * np.expm1(own)  # 1 - a P_b
        with np.errstate(divide="ignore", invalid="ignore"):
            finite = -np.log(rest) - np.logaddexp(mixture, np.log(extra[some]) - own)
            limit = np.where(rest <= 0.0, -np.log(sure), -np.inf)  # f is infinite where a p = 1
        result[some] = np.where(sure > 0.0, limit, finite)
        return result
