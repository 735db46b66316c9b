"""The file that a recorder appends its finished episodes to."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any, TypeAlias

import numpy as np

from ope_gym.data import blocks, files, space_json
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories

PolicyChange: TypeAlias = tuple[int, int, bool]
"""Clock, number of the policy that acts from then on, whether an episode was under way."""


class EpisodeFile:
    """Appends policies, changes of the policy and finished episodes to a file.

    Episodes that cannot be written now (the disk is full) stay queued for the next attempt.

    Args:
        path: The file; opened at the first write, and continued if it exists.
        buffer: Knows the spaces and the policies.
        changes: The changes of the policy so far; whoever owns the list appends to it.
    """

    def __init__(
        self, path: blocks.PathLike, buffer: TrajectoryBuffer, changes: list[PolicyChange]
    ) -> None:
        self._path = path
        self._buffer = buffer
        self._changes = changes
        self._writer: BlockWriter | None = None
        self._queue: list[Trajectories] = []

    def add(self, episodes: Trajectories) -> None:
        """Queue episodes, as the buffer keeps them, for the next `write`."""
        # in the file all follow schedule 0, the one of this recorder
        own = np.zeros(len(episodes), dtype=np.int32)
        self._queue.append(dataclasses.replace(episodes, schedule_ids=own))

    def update(self) -> BlockWriter:
        """Open the file if necessary, and append the policies and changes that it lacks."""
        buffer = self._buffer
        env = (buffer.observation_space, buffer.action_space, buffer.horizon)
        if self._writer is None:
            self._require_same_env()
            self._writer = BlockWriter(self._path)
        # Count by what the writer says it has: a call that failed, or that was interrupted after
        # its work was done, must not shift the numbers of the policies.
        writer, done = self._writer, self._writer.appended
        if "spaces" not in done:
            files.write_spaces(writer, *env)
        for policy in buffer.policies[done.get("policy", 0) :]:
            files.write_policy(writer, policy)
        for clock, k, mid_episode in self._changes[done.get("changes", 0) :]:
            files.write_change(writer, k, clock, mid_episode=mid_episode)
        return writer

    def write(self) -> None:
        """Append the queued episodes."""
        try:
            while self._queue:
                writer = self.update()
                before, again = writer.appended.get("episodes", 0), False
                try:
                    files.write_episodes(writer, self._queue[0])
                except Exception as error:
                    again = isinstance(error, OSError)  # any other error would come every time
                    raise
                except BaseException:
                    again = writer.appended.get("episodes", 0) == before
                    raise
                finally:
                    if not again:
                        del self._queue[0]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: the last episodes are in the buffer, but not in the file; the "
                "next write or close tries again, and buffer.save can put them elsewhere",
                os.fspath(self._path),
            ) from error

    def close(self) -> None:
        """Release the file; may be called again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: a copy that goes on recording opens it for itself."""
        return self.__dict__ | {"_writer": None, "_queue": []}

    def _require_same_env(self) -> None:
        """Raise if the file holds episodes of another env: one reader could not read both."""
        path, buffer = self._path, self._buffer
        if not os.path.exists(path) or os.path.getsize(path) < len(blocks.MAGIC):
            return  # it holds no block; the writer checks whether it is one of our files
        ours = space_json.env_to_json(buffer.observation_space, buffer.action_space, buffer.horizon)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a damaged end: the writer warns, too
            for block in blocks.read_blocks(path):
                if block.kind == "spaces" and block.meta != ours:
                    raise ValueError(
                        f"path={os.fspath(path)!r} holds episodes of another environment "
                        f"({block.meta}), this one has {ours}; choose another file"
                    )
