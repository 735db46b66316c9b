"""The two families of stored policies: finitely many actions, and normal actions.

A class of a family gives probabilities, or a mean and deviations; the rest follows from them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree
from ope_gym.policies.base import Snapshot
from ope_gym.policies.numerics import HALF_LOG_2PI, choices, parts, sample_rows


class Finite(Snapshot):
    """Base of policies over actions 0 … A-1; a subclass gives `probs` or `log_table`."""

    def probs(self, observations: Tree) -> FloatArray:
        """Return the probability of every action, shape (n, A)."""
        return np.exp(self.log_table(observations))

    def log_table(self, observations: Tree) -> FloatArray:
        """Return the log-probability of every action, -inf where it is impossible; (n, A)."""
        with np.errstate(divide="ignore"):
            return np.log(self.probs(observations))

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log-probability of each action, shape (n,)."""
        log_probs = self.log_table(observations)
        return log_probs[np.arange(len(log_probs)), choices(actions, *log_probs.shape)]

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one action a row; one uniform number each decides."""
        return sample_rows(self.probs(observations), rng)


class Gaussian(Snapshot):
    """Base of policies over actions of m parts, a ~ N(mean(x), diag exp(log_std)²); a density."""

    log_std: NDArray[np.floating]  # (m,)

    def mean(self, observations: Tree) -> FloatArray:
        """Return the mean of each part of the action, shape (n, m)."""
        raise NotImplementedError

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log density of each action, shape (n,)."""
        given = np.asarray(actions)
        flat = given.reshape(len(given), math.prod(given.shape[1:]))
        chosen = parts(flat, batches.length(observations), self.log_std.size)
        standardised = (chosen - self.mean(observations)) / self._std
        return np.asarray(-0.5 * np.square(standardised).sum(axis=1) - self._log_scale)

    def sample(self, observations: Tree, rng: np.random.Generator) -> FloatArray:
        """Draw one normal number for each part of the action, shape (n, m)."""
        mean = self.mean(observations)
        return mean + self._std * rng.standard_normal(mean.shape)

    def action_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of each part of the action, (n, m) each."""
        mean = self.mean(observations)
        return mean, np.broadcast_to(np.square(self._std), mean.shape)

    def log_prob_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of the log density of the policy's own actions.

        The log density is a constant minus half a χ²_m: -m/2 on average, variance m/2.
        """
        n, m = batches.length(observations), self.log_std.size
        return np.full(n, -0.5 * m - self._log_scale), np.full(n, 0.5 * m)

    @property
    def _std(self) -> FloatArray:
        return np.exp(self.log_std.astype(np.float64))

    @property
    def _log_scale(self) -> float:
        return float(self.log_std.sum(dtype=np.float64)) + self.log_std.size * HALF_LOG_2PI
