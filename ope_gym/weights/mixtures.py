"""Many behaviours: partial mixtures, so that cost stays linear in steps.

    w_i,t = P_e,t / sum_{k in g} (n_k / n_g) P_k,t,   g the group of i's behaviour, n_g its episodes

The behaviours are split into groups by their order and their numbers of episodes alone. These
numbers must not depend on outcomes, as for any mixture. Then
each group by itself is a data set with its own mixture, its FIS is unbiased wherever some behaviour
*of the group* can do what the target can, and so is the mean of all; NFIS stays consistent. Groups
of one are basic weights, one group of all is the whole mixture. Evaluating the policies costs steps
times the size of a group, instead of steps times behaviours: with an update per episode, linear
instead of quadratic.

Groups are interleaved: each takes one of every G neighbours, so that each spans the whole training
history and its mixture is a quadrature of the whole one. Contiguous blocks of history lose most of
the precision, since the first block weighs its episodes against the first policies alone:
`docs/scale.md` measures both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy
from ope_gym.policies.estimated import estimated_folds
from ope_gym.verdict import Reason
from ope_gym.weights.behaviours import Behaviours
from ope_gym.weights.formula import log_weights

LIMIT = 256  # behaviours up to which "auto" takes the mixture of all
SIZE = 64  # of the groups beyond


@dataclass(frozen=True, eq=False)
class Part:
    """The trajectories of a group of behaviours.

    Args:
        members: (K_g,) the behaviours.
        episodes: (n_g,) the trajectories.
        rows: (S_g,) their steps.
        data: these trajectories alone; policies keep their numbers.
        behaviours: the members numbered 0, 1, ...
    """

    members: IntArray
    episodes: IntArray
    rows: IntArray
    data: Trajectories
    behaviours: Behaviours


def group_size(mixture: str | int, behaviours: int) -> int:
    """Return the most behaviours a group may have, from the option `mixture`."""
    if mixture == "auto":
        return behaviours if behaviours <= LIMIT else SIZE
    if mixture == "all":
        return behaviours
    return min(int(mixture), behaviours)


def groups_of(behaviours: Behaviours, policies: Sequence[Policy], mixture: str | int) -> IntArray:
    """Return (K,) the group of each behaviour: its mixtures are of the behaviours of one group.

    Where propensities were estimated, a group is a fold: all models in it left the same episodes
    out, and weigh no others.

    Args:
        behaviours: who recorded the episodes.
        policies: the recorded ones, by number.
        mixture: the option, see `ope_gym.options.Weighting`.
    """
    if mixture == "auto":
        folds = estimated_folds([policies[plan[0][1]] for plan in behaviours.plans])
        if folds is not None:
            return np.unique(folds, return_inverse=True)[1].astype(np.int64)
    size = group_size(mixture, len(behaviours.plans))
    return interleaved(behaviours.counts, size)


def interleaved(counts: IntArray, size: int) -> IntArray:
    """Return (K,) the group of each behaviour: the fewest groups, each across all history.

    Of every G neighbours each group takes one; the one with the most trajectories goes to the group
    that has the fewest so far, which keeps groups alike where the counts differ.

    Args:
        counts: (K,) trajectories of each behaviour, in the order of training.
        size: most behaviours of a group.
    """
    behaviours = counts.size
    groups = -(-behaviours // size)
    result, totals = np.empty(behaviours, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    for begin in range(0, behaviours, groups):
        some = begin + np.argsort(-counts[begin : begin + groups], kind="stable")
        fewest = np.argsort(totals, kind="stable")[: some.size]
        result[some] = fewest
        totals[fewest] += counts[some]
    return result


def parts(data: Trajectories, behaviours: Behaviours, groups: IntArray) -> Iterator[Part]:
    """Yield the groups one after the other.

    Args:
        data: all trajectories.
        behaviours: theirs.
        groups: (K,) from `interleaved`, or any other numbers 0, 1, ...
    """
    of_episode = groups[behaviours.ids]
    order, by_group = np.argsort(of_episode, kind="stable"), np.argsort(groups, kind="stable")
    present, firsts = np.unique(of_episode[order], return_index=True)
    stops = np.cumsum(np.bincount(groups))
    local = np.empty(groups.size, dtype=np.int64)
    local[by_group] = np.arange(groups.size) - np.repeat(
        stops - np.diff(stops, prepend=0), np.diff(stops, prepend=0)
    )
    for group, episodes in zip(present, np.split(order, firsts[1:]), strict=True):
        members = by_group[stops[group - 1] if group else 0 : stops[group]]
        ids = local[behaviours.ids[episodes]]
        begin, lengths = data.offsets[:-1][episodes], data.lengths[episodes]
        rows = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
        rows += np.arange(rows.size)
        yield Part(
            members, episodes, rows, data.select(episodes=episodes), behaviours.part(members, ids)
        )


def partial_log_weights(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    schemes: Iterable[str],
    *,
    density: bool = False,
    reward_model: tuple[FloatArray, FloatArray] | None = None,
    first: int = 0,
) -> tuple[dict[str, FloatArray], Reason | None]:
    """Compute log weights (S,) for a target with log-probability 0, each group by itself.

    Adding a target's own prefix sums gives its weights.

    Args:
        data: all trajectories.
        behaviours: theirs.
        groups: (K,) group of each behaviour.
        schemes: names from `ope_gym.weights.formula.SCHEMES`.
        density: as in `log_weights`.
        reward_model: mean (S,) and variance (S,), as in `log_weights`.
        first: number of the first trajectory, for messages.

    Returns:
        The weights, and the first logged number that its policy contradicts.
    """
    wanted: list[str] = list(schemes)
    mismatch: Reason | None = None
    result = {scheme: np.empty(data.n_steps) for scheme in wanted}
    for part in parts(data, behaviours, groups):
        rows = part.behaviours.rows(part.data, episodes=first + part.episodes)
        model = None if reward_model is None else tuple(x[part.rows] for x in reward_model)
        log_ws = log_weights(
            np.zeros(part.rows.size),
            rows,
            part.behaviours.ids,
            part.data.offsets,
            wanted,
            counts=part.behaviours.counts,
            density=density,
            reward_model=model,  # type: ignore[arg-type]
            names=(part.members, first + part.episodes),
        )
        for scheme, log_w in log_ws.items():
            result[scheme][part.rows] = log_w
        mismatch = mismatch or rows.mismatch
    return result, mismatch
