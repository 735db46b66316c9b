"""Importance weights of trajectory prefixes: one formula, three schemes.

    log w_i,t = log P_e - log P_b(i) + log f(P_b(i)) - log sum_k rho_k f(P_k)

P_k,t is the probability of the actions up to step t under behaviour k, P_e under the target, b(i)
the behaviour of trajectory i, rho_k = n_k / n.

| scheme  | f(p)         | in the paper |
|---------|--------------|--------------|
| basic   | 1            | BIS          |
| fused   | p            | FIS: the mixture of prefix products, never a product of mixtures |
| optimal | p / (1 - a p) | OUIS, a = r^2 / (r^2 + V); a = 1 for deterministic rewards |

The paper writes the last one as p / (r^2 (1 - p) + V): the same up to a factor r^2 + V that cancels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LOG_PROB_TOLERANCE = 1e-9  # how far above 0 the log of a probability may round
_BLOCK = 1 << 21  # elements of (behaviours, steps) evaluated or handed to a thread at once


class LogProbRows(Protocol):
    """Per-step log-probabilities under K behaviours, made block by block: never all at once."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, S)."""
        ...

    def block(self, start: int, stop: int) -> FloatArray:
        """(K, stop - start) of the steps start..stop-1, C-contiguous."""
        ...


@dataclass(frozen=True)
class Prefixes:
    """Logs of prefix probabilities on the recorded trajectories, each (S,).

    Args:
        target: log P_e.
        own: log P_b(i).
        mixture: log sum_k rho_k P_k; empty unless a scheme needs it.
        optimal: log f(P_b)/P_b - log sum_k rho_k f(P_k); empty unless a scheme needs it.
    """

    target: FloatArray
    own: FloatArray
    mixture: FloatArray
    optimal: FloatArray


SCHEMES: dict[str, Callable[[Prefixes], FloatArray]] = {
    "basic": lambda prefix: prefix.target - prefix.own,
    "fused": lambda prefix: prefix.target - prefix.mixture,
    "optimal": lambda prefix: prefix.target + prefix.optimal,
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
) -> dict[str, FloatArray]:
    """Log weights (S,) of each scheme; the arguments are as validated by `evaluate_log_probs`.

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
    """
    wanted = list(schemes)
    if counts is None:
        counts = np.bincount(behaviour_ids, minlength=behaviour_log_probs.shape[0])
    a = None
    if "optimal" in wanted:
        a = reward_parameter(reward_model, target_log_probs.size, density)
    limit = np.finfo(np.float64).max if density else LOG_PROB_TOLERANCE
    prefixes = prefix_log_probs(
        target_log_probs,
        behaviour_log_probs,
        behaviour_ids,
        offsets,
        counts,
        mixture=any(scheme != "basic" for scheme in wanted),
        a=a,
        limit=float(limit),
    )
    return {scheme: SCHEMES[scheme](prefixes) for scheme in wanted}


def reward_parameter(
    reward_model: tuple[FloatArray, FloatArray] | None, steps: int, density: bool = False
) -> FloatArray:
    """a = r^2 / (r^2 + V) (S,): 1 for deterministic rewards, 0 (fused) where nothing is paid."""
    if density:
        return np.zeros(steps)
    if reward_model is None:
        return np.ones(steps)
    square, variance = np.square(reward_model[0]), reward_model[1]
    total = square + variance
    return np.divide(square, total, out=np.zeros(steps), where=total > 0)


def prefix_log_probs(
    target_log_probs: FloatArray,
    behaviour_log_probs: FloatArray | LogProbRows,
    behaviour_ids: IntArray,
    offsets: IntArray,
    counts: IntArray,
    *,
    mixture: bool,
    a: FloatArray | None,
    limit: float,
) -> Prefixes:
    """Prefix log-probabilities of target, own behaviour and mixture, in one pass over (K, S)."""
    from ope_gym import kernels

    steps = target_log_probs.size
    target, own = np.empty(steps), np.empty(steps)
    kernels.cumulate(target_log_probs, offsets, target)
    empty = np.empty(0)
    mix = np.empty(steps) if mixture else empty
    optimal = np.empty(steps) if a is not None else empty
    behaviour_ids = behaviour_ids.astype(np.int64, copy=False)
    with np.errstate(divide="ignore"):
        log_rho = np.log(counts / counts.sum())

    def run(chunk: tuple[int, int]) -> None:
        begin, end = chunk
        rows = slice(int(offsets[begin]), int(offsets[end]))
        shift, block = 0, behaviour_log_probs
        if not (isinstance(block, np.ndarray) and block.flags.c_contiguous):
            shift, block = rows.start, _block(behaviour_log_probs, rows.start, rows.stop)
        if mixture:
            good = kernels.prefixes(
                block, shift, begin, end, behaviour_ids, offsets, log_rho, limit,
                empty if a is None else a, own, mix, optimal,
            )  # fmt: skip
        else:
            ids = np.repeat(behaviour_ids[begin:end], np.diff(offsets[begin : end + 1]))
            taken = block[ids, np.arange(rows.start - shift, rows.stop - shift)]
            good = bool(np.all(taken <= limit))
            kernels.cumulate(taken, offsets[begin : end + 1] - rows.start, own[rows])
        if not good:
            _refuse(block[:, rows.start - shift : rows.stop - shift], rows.start, offsets, limit)

    chunks = list(_chunks(offsets, behaviour_log_probs.shape[0]))
    workers = min(len(chunks), _cores()) if isinstance(behaviour_log_probs, np.ndarray) else 1
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, chunks))
    else:
        for chunk in chunks:
            run(chunk)
    return Prefixes(target, own, mix, optimal)


def _block(source: FloatArray | LogProbRows, start: int, stop: int) -> FloatArray:
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source[:, start:stop], dtype=np.float64)
    return source.block(start, stop)


def _chunks(offsets: IntArray, behaviours: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole trajectories of about _BLOCK elements each."""
    begin, n = 0, offsets.size - 1
    while begin < n:
        stop = int(offsets[begin]) + max(1, _BLOCK // behaviours)
        end = max(begin + 1, int(np.searchsorted(offsets, stop, side="right")) - 1)
        yield begin, min(end, n)
        begin = end


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _refuse(block: FloatArray, start: int, offsets: IntArray, limit: float) -> None:
    """Raise the error for the first entry that is NaN or above the limit."""
    behaviour, column = (int(index) for index in np.argwhere(~(block <= limit))[0])
    episode = int(np.searchsorted(offsets, start + column, side="right")) - 1
    step = start + column - int(offsets[episode])
    raise bad_log_prob(
        "behaviour_log_probs", float(block[behaviour, column]), episode, step, f" of {behaviour=}"
    )


def bad_log_prob(
    name: str, value: float, episode: int, step: int, whose: str = ""
) -> ValueError:
    """The error for a log-probability that cannot be one."""
    remedy = (
        "the log of a probability is at most 0; for densities of continuous actions pass density=True"
        if value > 0
        else "check the policy that produced it"
    )
    return ValueError(f"{name} is {value!r}{whose} at episode {episode}, step {step}: {remedy}")
