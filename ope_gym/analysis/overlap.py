"""Measure how far two policies produce the same episodes: an overlap between 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.arguments import whole
from ope_gym.arrays import FloatArray, IntArray, evenly
from ope_gym.policies import Target, UnavailablePolicy
from ope_gym.scale.sources import Episodes, load_source
from ope_gym.weights.behaviours import policy_log_probs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LARGEST = 300.0  # exp of it can still be squared


@dataclass(frozen=True, eq=False)
class Overlap:
    """Hold overlaps between policies; E policies to evaluate, J policies that recorded.

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

    def plot(self) -> Figure:
        """Draw a heat map: policies to evaluate against policies that recorded."""
        from ope_gym.report.figures import overlap_figure

        return overlap_figure(self.matrix, self.evaluated, self.recorded)


def overlap(
    episodes: Episodes, target: Target, *, held_out: bool | None = None, limit: int = 24
) -> Overlap:
    """Compute the squared affinity of whole episodes between policies.

    It is computed for every two recorded policies, and for the target with each of them:

        A_ij = (sum over episodes of sqrt(P_i P_j))^2,  P the probability of an episode's actions

    It is the squared Bhattacharyya coefficient: 1 if two policies are the same, 0 if no episode is
    possible under both. Where j can do all that i does, an episode of j tells in the long run at
    most as much as A_ij episodes of i: ESS / n_j -> 1 / E_j[w^2] <= A_ij by Hölder's inequality.
    Unlike the ESS of a few episodes it also falls when j never shows what i would do.

    The sum is estimated from all episodes against their mixture; from the episodes of j alone where
    the mixture is not known: a policy cannot be asked, or the policy changed during episodes.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`; the recording policy is the one at
            an episode's first step.
        target: the policy of the last row: a policy, the number of a recorded one, or "last".
        held_out: as in `ope_gym.evaluate`.
        limit: with more recording policies than this, only this many are used, evenly spread from
            the first to the last.
    """
    whole("limit", limit, 2, "give at least 2 policies, the first and the last")
    source = load_source(episodes, held_out)
    data, aim = source.data, source.policy(target)
    assert data is not None  # all of it is in memory
    starters = np.unique(data.policy_ids[data.offsets[:-1]])
    if starters.size > limit:
        starters = starters[evenly(starters.size, limit)]
        data = data.select(policies=starters.tolist())
    column = np.searchsorted(starters, data.policy_ids[data.offsets[:-1]])  # (n,)
    counts = np.bincount(column, minlength=starters.size)
    recorded = tuple(f"policy {k}" for k in starters)
    evaluated = (*recorded, "target")

    log_p = np.full((len(evaluated), len(data)), np.nan)  # of whole episodes
    for row, policy, name in zip(
        log_p, [*(data.policies[k] for k in starters), aim], evaluated, strict=True
    ):
        if not isinstance(policy, UnavailablePolicy):
            row[:] = np.add.reduceat(policy_log_probs(policy, name, data), data.offsets[:-1])
    if np.isnan(log_p).any() or np.any(data.schedule_ids >= 0):
        logged = np.add.reduceat(data.log_probs, data.offsets[:-1])
        affinity = _from_own(log_p - logged, column, counts)
    else:
        affinity = _from_all(log_p, counts)
    return Overlap(np.minimum(affinity, 1.0) ** 2, evaluated, recorded, counts)


def _from_own(log_w: FloatArray, column: IntArray, counts: IntArray) -> FloatArray:
    """Return (E, J) means of sqrt(w) over the episodes of each policy."""
    root = np.exp(np.minimum(0.5 * log_w, _LARGEST))
    return np.stack([np.bincount(column, row, minlength=counts.size) / counts for row in root])


def _from_all(log_p: FloatArray, counts: IntArray) -> FloatArray:
    """Return (E, J) means of sqrt(P_i P_j) / M over all episodes, M = sum_k rho_k P_k.

    Scaled so that every recorded policy has affinity 1 with itself; the target only where its mass
    came out above 1, because less than 1 says that the data do not reach all it does.
    """
    n = log_p.shape[1]
    log_m = np.logaddexp.reduce(log_p[:-1] + np.log(counts / n)[:, None], axis=0)
    root = np.exp(np.minimum(0.5 * (log_p - log_m), _LARGEST))  # (E, n)
    norm = np.sqrt(np.mean(root**2, axis=1))
    norm[-1] = max(norm[-1], 1.0)
    root /= norm[:, None]
    return np.asarray(root @ root[:-1].T / n)
