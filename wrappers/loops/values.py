"""Values of the policy of any training loop, now and then, from the steps that it takes anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ope_gym.online import FreeEstimate, FreeEvaluation
from ope_gym.report.free_values import FreeWriter, in_words

__all__ = ["FreeValues"]


class FreeValues:
    """Takes the steps of a loop, and values the policy that took the latest ones.

        values = FreeValues(lambda: TorchPolicy(actor), num_envs=8, horizon=500)
        for rollout in training:
            values.add(**steps)  # prints a line where a value is due
            learn(rollout)

    Provisional values are in `evaluations`, those that are settled later in `settled`.

    Args:
        snapshot: Function that returns the policy as it is now, frozen.
        num_envs: Environments side by side.
        horizon: Time limit of an episode; None if there is none.
        eval_freq: Timesteps between evaluations, at least.
        log: Folder of a TensorBoard run, or the `SummaryWriter` of the loop.
        verbose: 0 prints nothing, 1 a line for each evaluation.
        options: Further arguments of `ope_gym.online.FreeEvaluation`.
    """

    def __init__(
        self,
        snapshot: Callable[[], Any],
        num_envs: int,
        *,
        horizon: int | None,
        eval_freq: int = 10_000,
        log: Any = None,
        verbose: int = 1,
        **options: Any,
    ) -> None:
        self.free = FreeEvaluation(num_envs, horizon=horizon, **options)
        self.evaluations: list[FreeEstimate] = []
        self.settled: list[FreeEstimate] = []
        self.timesteps = 0
        self.policy: Any = None  # the last one that was valued
        self._snapshot, self._eval_freq, self._verbose = snapshot, eval_freq, verbose
        self._writer = None if log is None else FreeWriter(log)
        self._due = eval_freq

    def add(self, **steps: Any) -> FreeEstimate | None:
        """Take steps (T, N, ...), as `FreeEvaluation.add` does; return a value if one is due."""
        self.free.add(**steps)
        skipped = 0 if steps.get("skip") is None else int(np.count_nonzero(steps["skip"]))
        self.timesteps += np.asarray(steps["rewards"]).size - skipped
        if self.timesteps < self._due:
            return None
        self._due = self.timesteps + self._eval_freq
        return self.evaluate()

    def evaluate(self) -> FreeEstimate | None:
        """Value the policy as it is now; None while no episode has ended."""
        self.policy = self._snapshot()
        self.free.follow(self.policy)
        estimate = self.free.evaluate(self.timesteps)
        new = self.free.settle()
        self.settled += new
        if estimate is None:
            return None
        self.evaluations.append(estimate)
        if self._verbose:
            words = in_words(estimate, self.free.level)
            print(f"{self.timesteps:,} timesteps: {words}", flush=True)
        if self._writer is not None:
            for value in (estimate, *new):
                self._writer.add(value)
        return estimate
