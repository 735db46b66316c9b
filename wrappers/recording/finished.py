"""Columns of finished episodes on their way into the buffer, many episodes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.batches import Tree


@dataclass(frozen=True)
class Finished:
    """Columns of n finished episodes with S steps; `numbers` count episodes by their start."""

    observations: Tree
    actions: Tree
    rewards: NDArray[np.float64]  # (S,)
    log_probs: NDArray[np.float64]  # (S,) that the loop gave, NaN where it gave none
    lengths: NDArray[np.int64]  # (n,)
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    start_clock: NDArray[np.int64]
    numbers: NDArray[np.int64]
    envs: NDArray[np.int64] | None = None  # (n,) sub-envs

    def clocks(self) -> NDArray[np.int64]:
        """Return (S,) the clock of each step."""
        ends = np.cumsum(self.lengths)
        return np.arange(len(self.rewards)) + np.repeat(
            self.start_clock - ends + self.lengths, self.lengths
        )

    def locate(self, row: int) -> tuple[int, int]:
        """Return which of the n episodes a row belongs to, and its step in that episode."""
        ends = np.cumsum(self.lengths)
        i = int(np.searchsorted(ends, row, side="right"))
        return i, int(row - ends[i] + self.lengths[i])

    def name(self, i: int) -> str:
        """Return how messages name the i-th of these episodes."""
        sub_env = "" if self.envs is None else f" (sub-env {self.envs[i]})"
        return f"episode {self.numbers[i]}{sub_env}"
