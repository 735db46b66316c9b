"""Find episodes that are copies of earlier ones, however these were shuffled.

Two episodes are alike if they began with the same observation, took the same actions and earned the
same. That happens by chance, too: where few things can happen, or where a policy hardly explores.
How probable it is, the recorded probabilities of the actions tell. Let an episode begin as earlier
ones did, D of them different, and take the actions of one of these. Let p be the probability that
its policy gave to these actions, at the observations on its way. Then 1 / p times the chance to
take them is 1 on average over these ways, whatever the environment does. So whoever bets a share b
of his wealth against every such repeat, evenly on the D, owns

    E = product of (1 - b) + b / (D p)  over the episodes that repeat one,
                   (1 - b)              over those that do not,

which is at most 1 in expectation if episodes are drawn anew: E of 1,000 has a probability of at
most 1 / 1,000. Copies make a fortune: of episodes of 100 steps p is next to 0, and where
observations are real numbers, only copies begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, blocks, step_numbers
from ope_gym.data.trajectories import Trajectories

_COMPARED = 1 << 16  # episodes of many that are compared: enough to find any copies that matter
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_BETS = np.array([0.5, 0.1, 0.01])  # shares b, for many and for few copies; E is their average
_SURE = np.log(1000.0)  # E above which chance is no explanation
_HARM = 1.05  # factor of a standard error above which copies are worth an alarm


def episode_marks(data: Trajectories, returns: FloatArray) -> FloatArray:
    """Return (4, n) marks of episodes, by which `copies` finds those that are alike.

    They are hashes of the first observation, of the actions and what they earned, and of the first
    action, 64 bits each, and the log-probability of all actions: 0 where it is unknown.

    Args:
        data: episodes.
        returns: (n,) what they earned.
    """
    first = data.offsets[:-1]
    seen, done = (batches.leaves(tree) for tree in (data.observations, data.actions))
    marks = np.empty((4, first.size))
    start, whole, action = marks[:3].view(np.uint64)
    logs = data.log_probs
    if data.n_steps == first.size:  # one step each
        chosen = _hash(done, slice(None))
        whole[:] = chosen
    else:
        chosen = _in_their_places(done, step_numbers(data.offsets))
        np.add.reduceat(chosen, first, out=whole)
        logs = np.add.reduceat(logs, first)
    start[:], action[:] = _hash(seen, first), chosen.take(first)
    whole ^= returns.view(np.uint64) * _ODD
    marks[3] = np.nan_to_num(logs)
    return marks


def _in_their_places(done: Sequence[NDArray[Any]], steps: IntArray) -> NDArray[np.uint64]:
    """Return (S,) hashes of actions times an odd number for each place in an episode."""
    random = np.random.default_rng(0).integers(1 << 62, size=int(steps.max(initial=0)) + 1)
    places = (2 * random + 1).astype(np.uint64)
    chosen = _hash(done, slice(None))
    for rows in blocks(steps.size):
        chosen[rows] *= places[steps[rows]]
    return chosen


def copies(marks: FloatArray, continuous: bool) -> int:
    """Return how many episodes repeat others and should not; 0 if chance may explain them.

    Args:
        marks: (4, n) of `episode_marks`.
        continuous: whether actions are real numbers, whose densities say little of repeats: p is
            then the share of the different episodes that begin with that action; if only one of
            them does, by Good and Turing's estimate.
    """
    start, whole, action = marks[:3].view(np.uint64)
    # of many, those of some first observations: all that begin alike are among them, or none
    some = np.flatnonzero(start <= np.uint64(2**64 * min(_COMPARED / start.size, 1 - 2**-53)))
    if some.size < _COMPARED / 2:  # few different first observations
        some = np.arange(start.size)
    if np.unique(start[some]).size == some.size:  # as a rule, where these are real numbers
        return 0
    order = some[np.lexsort((whole[some], start[some]))]
    new_start = np.diff(start[order], prepend=~start[order[:1]]) != 0
    new = new_start | (np.diff(whole[order], prepend=np.uint64(0)) != 0)
    group, kind = np.cumsum(new_start) - 1, np.cumsum(new) - 1
    different = np.bincount(group, new)[group]
    chance = marks[3][order]
    if continuous:
        _, which, counts = np.unique(action[order][new], return_inverse=True, return_counts=True)
        once, twice = (np.count_nonzero(counts == times) for times in (1, 2))
        share = np.where(counts == 1, 2.0 * (twice + 1) / (once + 1), counts) / which.size
        chance = np.log(share)[which][kind]
    odds = -np.log(different) - chance  # log of 1 / (D p)
    repeats = ~new
    won = np.logaddexp(np.log1p(-_BETS), np.log(_BETS) + odds[repeats][:, None]).sum(axis=0)
    lost = np.count_nonzero(new & ~new_start) * np.log1p(-_BETS)
    if np.logaddexp.reduce(won + lost) - np.log(_BETS.size) < _SURE:
        return 0
    beyond = repeats * -np.expm1(np.minimum(0.0, -odds))  # what chance does not explain
    earlier = np.arange(order.size) - np.flatnonzero(new)[kind]  # how many equal ones there are
    # a class of c copies counts c^2 times in a squared error, but has c terms in its estimate
    harm = np.sqrt(1.0 + 2.0 * float(beyond @ earlier) / order.size)
    return round(float(beyond.sum()) * start.size / order.size) if harm > _HARM else 0


def _hash(leaves: Sequence[NDArray[Any]], chosen: IntArray | slice) -> NDArray[np.uint64]:
    """Return a hash of some rows of arrays, a number each."""
    size = leaves[0].shape[0] if isinstance(chosen, slice) else chosen.size
    hashes = np.zeros(size, dtype=np.uint64)
    for rows in blocks(size):
        part = hashes[rows]
        for leaf in leaves:
            some = leaf[rows] if isinstance(chosen, slice) else leaf[chosen[rows]]
            some = np.ascontiguousarray(some).reshape(len(some), -1).view(np.uint8)
            width = next(width for width in (8, 4, 2, 1) if some.shape[1] % width == 0)
            for words in some.view(f"u{width}").T if some.size else ():
                part ^= words
                part *= _ODD
                part ^= part >> np.uint64(32)
    return hashes
