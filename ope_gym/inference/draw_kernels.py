"""Compiled loops of the bootstrap: hashes of trajectories, and Poisson numbers made from them.

Importing this module imports numba; `ope_gym.inference.bootstrap` does so when it first draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ope_gym.kernels import compiled

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled()
def _mix(x: Any) -> Any:
    """A hash of 64 bits in which every bit of x moves all bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@compiled()
def absorb(words: Any, offsets: Any, hashes: Any) -> None:
    """Add the rows (S, m) of each trajectory to its hash (n,)."""
    for i in range(offsets.size - 1):
        h = hashes[i]
        for row in range(offsets[i], offsets[i + 1]):
            for j in range(words.shape[1]):
                h = (h ^ words[row, j]) * _GOLDEN
                h ^= h >> _31
        hashes[i] = _mix(h + _GOLDEN)


@compiled()
def mix_all(hashes: Any, added: Any) -> Any:
    """Hash of (hashes, added) (n,)."""
    out = np.empty_like(hashes)
    for i in range(hashes.size):
        out[i] = _mix(hashes[i] ^ _mix(added[i] * _GOLDEN + _GOLDEN))
    return out


@compiled()
def _uniform(identity: Any, key: Any) -> Any:
    """53 bits."""
    return _mix(identity ^ key) >> _11


@compiled()
def _count(u: Any, limits: Any, row: int) -> int:
    """How often a replicate draws a trajectory with the uniform number u."""
    count = 0
    while u >= limits[row, count]:
        count += 1
    return count


@compiled()
def draw_strata(
    identities: Any, strata: Any, keys: Any, limits: Any, rows: Any, drawn: Any
) -> None:
    """Write to (R, strata) how many each replicate draws; of none, -1 - the smallest u."""
    for b in range(keys.size):
        for i in range(identities.size):
            k = strata[i]
            u = _uniform(identities[i], keys[b])
            count = _count(u, limits, rows[k])
            if count > 0:
                drawn[b, k] = max(drawn[b, k], 0) + count
            elif drawn[b, k] <= 0:
                drawn[b, k] = max(drawn[b, k], -1 - np.int64(u))


@compiled()
def scaled(
    identities: Any,
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
        for i in range(identities.size):
            k = strata[i]
            u, total = _uniform(identities[i], keys[b]), drawn[b, k]
            if total > 0:
                out[b, i] = sizes[k] * _count(u, limits, rows[k]) / total
            else:
                out[b, i] = sizes[k] if -1 - np.int64(u) == total else 0.0
