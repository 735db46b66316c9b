"""How far the episodes of one policy speak about another: an overlap between 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.likelihood import policy_log_probs
from ope_gym.policies import Policy, UnavailablePolicy
from ope_gym.weights import FloatArray, IntArray

if TYPE_CHECKING:
    from ope_gym.buffer import TrajectoryBuffer
    from ope_gym.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class Overlap:
    """Overlaps between policies; E policies to evaluate, J policies that recorded.

    Args:
        matrix: (E, J) overlap of the evaluated policy (row) with the recording one (column), NaN
            where the evaluated policy cannot be asked for probabilities.
        evaluated: (E,) names; the last is the target.
        recorded: (J,) names.
        counts: (J,) episodes of each recording policy.
    """

    matrix: FloatArray
    evaluated: tuple[str, ...]
    recorded: tuple[str, ...]
    counts: IntArray


def overlap(
    trajectories: Trajectories | TrajectoryBuffer, target: Policy, *, limit: int = 24
) -> Overlap:
    """Squared affinity of whole episodes between every two recorded policies, and with the target.

        A_ij = ((1 / n_j) sum sqrt(w))^2,  w = P_i(episode) / P_j(episode),  over the episodes of j

    It estimates the squared Bhattacharyya coefficient of the two distributions of episodes: 1 if
    they are the same, 0 if no episode is possible under both. An episode of j is worth at most
    A_ij / mean(w) episodes of i: ESS / n_j <= A_ij / mean(w) by Hölder's inequality. Unlike the
    ESS of a few episodes it also falls when j never shows what i would do: all w are small then.

    Args:
        trajectories: recorded episodes; the recording policy is the one at an episode's first step.
        target: the policy of the last row.
        limit: with more recording policies than this, as many are taken, evenly spread from the
            first to the last.
    """
    if limit < 2:
        raise ValueError(f"limit is {limit}; give at least 2 policies, the first and the last")
    data = trajectories.view()
    if len(data) == 0:
        raise ValueError("trajectories has no episode: there is nothing to compare policies on")
    starters = np.unique(data.policy_ids[data.offsets[:-1]])
    if starters.size > limit:
        spread = np.linspace(0, starters.size - 1, limit).round().astype(np.int64)
        starters = starters[spread]
        data = data.select(policies=starters.tolist())
    column = np.searchsorted(starters, data.policy_ids[data.offsets[:-1]])  # (n,)
    counts = np.bincount(column, minlength=starters.size)
    names = tuple(f"policy {k}" for k in starters)

    matrix = np.full((starters.size + 1, starters.size), np.nan)
    policies = [data.policies[k] for k in starters]
    for row, policy, name in zip(matrix, [*policies, target], [*names, "target"], strict=True):
        if isinstance(policy, UnavailablePolicy):
            continue
        ratio = policy_log_probs(policy, name, data) - data.log_probs
        log_w = np.add.reduceat(ratio, data.offsets[:-1])
        with np.errstate(over="ignore"):
            root = np.bincount(column, np.exp(0.5 * log_w), minlength=starters.size)
        row[:] = np.minimum(root / counts, 1.0) ** 2  # above 1 by chance only
    return Overlap(matrix, (*names, "target"), names, counts)
