"""The answers of a policy about recorded steps, so that it is asked for each of them once.

The weights and the q model want the same probabilities of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy
from ope_gym.weights.behaviours import ROWS, policy_log_probs, stack_log_probs, stacks

_KEPT = 1 << 22  # probabilities that are kept; the policy is asked again for those of more


class Answers:
    """The probabilities of a target at the recorded steps of some episodes.

    Args:
        target: the policy to evaluate.
        data: the episodes.

    Attributes:
        near: Tempered weights (S,) of the steps that LinearQ was fitted with, by exponent.
    """

    def __init__(self, target: Policy, data: Trajectories) -> None:
        self.target, self.data = target, data
        self.near: dict[float, FloatArray] = {}
        self._log_probs: FloatArray | None = None

    def about(self, data: Trajectories) -> Answers:
        """Return the same answers about the same steps, whoever is said to have recorded them."""
        answers = Answers(self.target, data)
        answers._log_probs = self.log_probs
        return answers

    @property
    def log_probs(self) -> FloatArray:
        """(S,) log-probabilities of the recorded actions."""
        # before Python 3.12 a cached_property would have threads wait for each other
        if self._log_probs is None:
            self._log_probs = policy_log_probs(self.target, "target", self.data)
        return self._log_probs

    def probs(self, rows: IntArray | slice) -> FloatArray:
        """Return the probabilities (n, A) of all actions at some steps, of a finite target."""
        return self.columns(rows).T

    def columns(self, rows: IntArray | slice) -> FloatArray:
        """Return the same as (A, n), those of each action in one piece."""
        if self._all is None:
            return np.ascontiguousarray(self._ask(rows).T)
        return self._all[:, rows] if isinstance(rows, slice) else self._all.take(rows, axis=1)

    @cached_property
    def _all(self) -> FloatArray | None:
        """(A, S) at all steps; None if these are too many to keep."""
        steps = self.data.n_steps
        actions = self._ask(slice(0, 1)).shape[1]
        if steps * actions > _KEPT:
            return None
        probs = np.empty((actions, steps))
        for start in range(0, steps, ROWS):
            rows = slice(start, min(start + ROWS, steps))
            probs[:, rows] = self._ask(rows).T
        return probs

    def _ask(self, rows: IntArray | slice) -> FloatArray:
        seen = batches.take(self.data.observations, rows)
        return np.asarray(self.target.probs(seen), dtype=np.float64)  # type: ignore[attr-defined]


def ask_together(answers: Sequence[Answers]) -> None:
    """Ask targets for their log-probabilities all at once, if they are of a class that offers it.

    If any of them cannot answer, nothing is kept: each will say by itself what is wrong.
    """
    targets, data = [one.target for one in answers], answers[0].data
    if not stacks(targets):
        return
    with suppress(ValueError):
        table = stack_log_probs(targets, data.observations, data.actions, range(len(targets)))
        for one, log_probs in zip(answers, table, strict=True):
            one._log_probs = log_probs
