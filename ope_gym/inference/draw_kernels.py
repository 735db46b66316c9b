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
    """A hash of 64 bits in which every bit of x moves all bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@compiled()
def _uniform(place: int, key: Any) -> Any:
    """Return 53 random bits for a trajectory and a replicate."""
    return _mix(np.uint64(place) ^ key) >> _11


@compiled()
def _count(u: Any, limits: Any, row: int) -> int:
    """How often a replicate draws a trajectory with the uniform number u."""
    count = 0
    while u >= limits[row, count]:
        count += 1
    return count


@compiled()
def draw_strata(strata: Any, keys: Any, limits: Any, rows: Any, drawn: Any) -> None:
    """Write to (R, strata) how many each replicate draws; of none, -1 - the smallest u."""
    for b in range(keys.size):
        for i in range(strata.size):
            k = strata[i]
            u = _uniform(i, keys[b])
            count = _count(u, limits, rows[k])
            if count > 0:
                drawn[b, k] = max(drawn[b, k], 0) + count
            elif drawn[b, k] <= 0:
                drawn[b, k] = max(drawn[b, k], -1 - np.int64(u))


@compiled()
def scaled(
    first: int,
    strata: Any,
    keys: Any,
    limits: Any,
    rows: Any,
    sizes: Any,
    drawn: Any,
    out: Any,
) -> None:
    """Write to (R, n) by how much each replicate counts each trajectory."""
    for b in range(keys.size):
        for i in range(strata.size):
            k = strata[i]
            u, total = _uniform(first + i, keys[b]), drawn[b, k]
            if total > 0:
                out[b, i] = sizes[k] * _count(u, limits, rows[k]) / total
            else:
                out[b, i] = sizes[k] if -1 - np.int64(u) == total else 0.0
