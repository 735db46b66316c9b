"""Prefix probabilities of trajectories under the target and all behaviours, in logs.

Importing this module imports numba; `ope_gym.weights.formula` does so when it first weighs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ope_gym import kernels
from ope_gym.arrays import FloatArray, IntArray

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
        self._log_probs, self._first, self._offsets = log_probs, first, offsets
        self._rho, self._limit, self._a = rho, limit, a
        self._own_steps, self.ratio = np.empty((2, target.size))
        kernels.own_ratios(target, log_probs, first, ids, offsets, self._own_steps, self.ratio)
        if not (self._own_steps.min() > -np.inf and self._own_steps.max() <= limit):
            raise BadEntryError

    @cached_property
    def own(self) -> FloatArray:
        """(m,) log P_b."""
        return np.asarray(kernels.prefix_sums(self._own_steps, self._offsets))

    @cached_property
    def mixture(self) -> FloatArray:
        """(m,) log sum_k rho_k P_k / P_b."""
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
