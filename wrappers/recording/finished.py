"""Finished episodes on their way into the buffer, many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories

if TYPE_CHECKING:
    from wrappers.recording.session import Recorder


Given: TypeAlias = tuple[NDArray[np.float64], NDArray[np.bool_]] | None
"""(S,) log-probabilities from the loop and (S,) where it gave them; None if nowhere."""


@dataclass(frozen=True)
class Finished:
    """Columns of finished episodes; `numbers` count episodes in the order of their start."""

    observations: Tree
    actions: Tree
    rewards: NDArray[np.float64]  # (S,)
    given: Given
    lengths: NDArray[np.int64]  # (n,)
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    start_clock: NDArray[np.int64]
    numbers: NDArray[np.int64]
    envs: NDArray[np.int64] | None = None  # (n,) sub-envs

    @property
    def clocks(self) -> NDArray[np.int64]:
        """(S,) clock of each step."""
        ends = np.cumsum(self.lengths)
        return np.arange(len(self.rewards)) + np.repeat(
            self.start_clock - ends + self.lengths, self.lengths
        )

    def name(self, i: int) -> str:
        """The i-th episode in a message."""
        sub_env = "" if self.envs is None else f" (sub-env {self.envs[i]})"
        return f"episode {self.numbers[i]}{sub_env}"


class LiveBuffer(TrajectoryBuffer):
    """A buffer that, before it is read, takes what its recorder has finished meanwhile.

    Many short episodes cost much less together than one by one. So they wait, unseen.
    """

    recorder: Recorder | None = None

    def _pull(self) -> None:
        if self.recorder is not None:
            self.recorder.drain()

    def view(self) -> Trajectories:
        """Everything recorded so far, as read-only columns."""
        self._pull()
        return super().view()

    def extend(self, trajectories: Trajectories | TrajectoryBuffer) -> None:
        """See `TrajectoryBuffer.extend`."""
        self._pull()
        super().extend(trajectories)

    def clear(self) -> None:
        """See `TrajectoryBuffer.clear`."""
        try:
            self._pull()
        finally:
            super().clear()

    def __len__(self) -> int:
        self._pull()
        return super().__len__()
