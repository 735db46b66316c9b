"""Finished episodes on their way into the buffer, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.batches import Tree


class Gathered(NamedTuple):
    """Finished episodes, with their steps in the form in which a session has them.

    Args:
        steps: Batch of S rows: the four columns, or records of them.
        facts: (7, n) sub-env, clock at the start, length, terminated, truncated, held out, and
            number, which counts episodes by their start.
    """

    steps: Tree
    facts: NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Sequence[Gathered]) -> Gathered:
        """Return the episodes of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        steps, facts = zip(*parts, strict=True)
        return cls(batches.concatenate(steps), np.concatenate(facts, axis=1))

    def episode(self, i: int) -> Gathered:
        """Return the i-th of these episodes."""
        end = int(self.facts[2, : i + 1].sum())
        rows = slice(end - int(self.facts[2, i]), end)
        return Gathered(batches.take(self.steps, rows), self.facts[:, i : i + 1])


@dataclass(frozen=True)
class Finished:
    """Columns of n finished episodes with S steps.

    Args:
        observations: Batch of S rows.
        actions: Batch of S rows.
        rewards: (S,).
        log_probs: (S,) that the loop gave, NaN where it gave none.
        facts: As in `Gathered`.
        vector: Whether messages name the sub-env.
    """

    observations: Tree
    actions: Tree
    rewards: NDArray[np.float64]
    log_probs: NDArray[np.float64]
    facts: NDArray[np.int64]
    vector: bool

    @property
    def start_clock(self) -> NDArray[np.int64]:
        """(n,) clock at the start."""
        starts: NDArray[np.int64] = self.facts[1]
        return starts

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) steps."""
        lengths: NDArray[np.int64] = self.facts[2]
        return lengths

    @property
    def ends(self) -> dict[str, NDArray[np.bool_]]:
        """(n,) terminated, truncated and held out, by these names."""
        names = ("terminated", "truncated", "held_out")
        return dict(zip(names, self.facts[3:6].astype(bool), strict=True))

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
        sub_env = f" (sub-env {self.facts[0, i]})" if self.vector else ""
        return f"episode {self.facts[6, i]}{sub_env}"
