"""Compiled loops of the bootstrap: Poisson numbers made from a hash of replicate and trajectory.

Importing this module imports numba; `ope_gym.inference.bootstrap` does so when it first draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ope_gym.kernels import compiled

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled()
def _mix(x: Any) -> Any:
    """Return a hash of 64 bits: every bit of x moves all bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@compiled()
def _uniform(place: int, key: Any) -> Any:
    """Return 53 random bits for a trajectory and a replicate."""
    return _mix(np.uint64(place) ^ key) >> _11


@compiled()
def _count(u: Any, limits: Any, row: int) -> int:
    """Return how often a replicate draws a trajectory with the uniform number u.

    The first comparisons are sums, since a branch on random numbers is predicted badly.
    """
    count = 0
    for j in range(4):
        count += u >= limits[row, j]
    while count >= 4 and u >= limits[row, count]:
        count += 1
    return count


@compiled()
def draw_strata(strata: Any, keys: Any, limits: Any, rows: Any, drawn: Any, counts: Any) -> None:
    """Draw all replicates.

    Args:
        strata: (n,).
        keys: (R,) of the replicates.
        limits: (sizes, 18), see `ope_gym.inference.bootstrap`.
        rows: (strata,) of the limits.
        drawn: (R, strata) written: how many each replicate draws from each stratum; where that is
            none, -1 - the place of the trajectory with the largest hash.
        counts: (R, n) written: how often each replicate draws each trajectory; of no column if
            they are not to be kept.
    """
    keep = counts.shape[1] > 0
    largest = np.empty(drawn.shape[1], dtype=np.uint64)
    for b in range(keys.size):
        largest[:] = 0
        for i in range(strata.size):
            k = strata[i]
            u = _uniform(i, keys[b])
            count = _count(u, limits, rows[k])
            if keep:
                counts[b, i] = count
            if count > 0:
                drawn[b, k] = max(drawn[b, k], 0) + count
            elif drawn[b, k] <= 0 and u >= largest[k]:
                largest[k] = u
                drawn[b, k] = -1 - i


@compiled()
def draw_again(first: int, strata: Any, keys: Any, limits: Any, rows: Any, counts: Any) -> None:
    """Write to (R, m) how often each replicate draws the trajectories from `first` on."""
    for b in range(keys.size):
        for i in range(strata.size):
            counts[b, i] = _count(_uniform(first + i, keys[b]), limits, rows[strata[i]])


@compiled()
def scale_counts(first: int, strata: Any, sizes: Any, drawn: Any, counts: Any, out: Any) -> None:
    """Write to (R, m) by how much each replicate counts the trajectories from `first` on.

    Counts are scaled to the size of their stratum. If a replicate draws none of a stratum, the
    trajectory at place -1 - drawn stands for all of it.
    """
    for b in range(counts.shape[0]):
        for i in range(strata.size):
            total = drawn[b, strata[i]]
            if total > 0:
                out[b, i] = sizes[strata[i]] * counts[b, i] / total
            else:
                out[b, i] = sizes[strata[i]] if first + i == -1 - total else 0.0
