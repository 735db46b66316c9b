"""The file that one or several sessions append their finished episodes to."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ope_gym.data import blocks, files, space_json
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.reader import read_layout
from ope_gym.data.schedules import PolicyTable
from ope_gym.data.schema import join
from ope_gym.data.trajectories import Trajectories
from ope_gym.stopping import held_back

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # a full or failing disk: it may pass

PolicyChange: TypeAlias = tuple[int, int, bool]
"""Clock, number of the policy that acts from then on, whether an episode was under way."""


def check_path(path: blocks.PathLike, append: bool | None, *, stacklevel: int) -> None:
    """Raise if nothing can or should be recorded there; warn if it continues an older record.

    Args:
        path: The file.
        append: Whether to continue a file that exists; None continues it with a warning.
        stacklevel: Of the warning.
    """
    name = os.fspath(path)
    if not name:
        raise ValueError("path='' names no file: give the name of one, or leave path out")
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # e.g. a name that is too long, or links in a circle
        words = f"path={name!r}: {error.strerror}, choose another one"
        raise type(error)(error.errno, words) from error
    folder = os.path.dirname(os.path.realpath(name))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"path={name!r}: its folder does not exist, make it first")
    if os.path.isdir(name):
        raise IsADirectoryError(f"path={name!r} is a folder: give the name of a file in it")
    blocks.require_regular(name)
    exists = os.path.exists(name)
    if not os.access(name if exists else folder, os.W_OK):
        what = "it" if exists else "its folder"
        raise PermissionError(f"path={name!r}: {what} is not writable, choose another one")
    if append or not exists:
        return
    if append is not None:
        raise FileExistsError(f"path={name!r} exists and append=False: choose another file")
    if os.path.getsize(name) and (found := _episodes_in(name)):
        warnings.warn(
            f"path={name!r} exists: new episodes are appended to {found} of earlier runs, and a "
            "script that ran before with the same seed records the same ones again. Give "
            "append=True if you want that, or choose another file; append=False refuses it",
            UserWarning,
            stacklevel=stacklevel,
        )


def _episodes_in(name: str) -> str:
    """Return how many episodes a file has, in words; nothing if there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            n = sum(len(section.lengths) for section in read_layout(name))
    except blocks.DamagedFileError as error:
        if error.offset == 0:  # it is no file of ours
            raise
        return "those"  # the writer says more
    return f"the {n:,}" if n else ""


@dataclass
class _Loop:
    """One session that writes to the file; its number is that of its schedule there.

    Args:
        buffer: Knows its policies.
        changes: The changes of its policy so far; whoever owns the list appends to it.
        hand_over: Adds the episodes that it has written ahead.
        numbers: The numbers of its policies in the file.
        noted: How many of its changes the file knows of.
    """

    buffer: TrajectoryBuffer
    changes: list[PolicyChange]
    hand_over: Callable[[], None]
    numbers: list[int] = field(default_factory=list)
    noted: int = 0


class EpisodeFile:
    """Appends policies, changes of the policy and finished episodes to a file.

    Episodes that cannot be written now (the disk is full) stay queued for the next attempt. A
    session may write finished episodes ahead and add them later, many at a time: a block for each
    costs more than most episodes.

    Args:
        path: The file; opened at the first write, and continued if it exists.
        patient: Whether errors of the disk are warnings, for a training that must go on. A path
            that cannot be opened for another reason than a full or failing disk is an error.
    """

    def __init__(self, path: blocks.PathLike, *, patient: bool = False) -> None:
        self._path = path
        self._patient = patient
        self._opened = False  # whether it could be opened once
        self._failing = False  # whether the last attempt failed, and a warning said so
        self._loops: list[_Loop] = []
        self._policies = PolicyTable()
        self._changes: list[tuple[int, PolicyChange]] = []  # with the number of the loop
        self._writer: BlockWriter | None = None
        self._queue: list[Trajectories] = []
        self._complete = False  # whether the open file has all policies and changes

    def join(
        self,
        buffer: TrajectoryBuffer,
        changes: list[PolicyChange],
        hand_over: Callable[[], None],
    ) -> int:
        """Let a session write to the file, and return its number.

        Args:
            buffer: Knows its spaces, which all sessions share, and its policies.
            changes: The changes of its policy so far; whoever owns the list appends to it.
            hand_over: Adds the episodes that it has written ahead, and writes.
        """
        self._loops.append(_Loop(buffer, changes, hand_over))
        return len(self._loops) - 1

    def write_ahead(
        self, loop: int, policy: int, columns: list[files.RawColumn], steps: int, episodes: bytes
    ) -> bool:
        """Write episodes that will be added later; return False if they must be added now.

        Args:
            loop: Number of the session.
            policy: Number there of the policy that acted.
            columns: See `files.write_ahead`.
            steps: See there.
            episodes: See there.
        """
        writer, known = self._writer, self._loops[loop].numbers
        if writer is None or self._queue or not self._complete or policy >= len(known):
            return False
        try:
            return files.write_ahead(writer, known[policy], columns, steps, episodes)
        except OSError:  # to add them now fails, too, and says why
            return False

    def add(self, loop: int, episodes: Trajectories) -> None:
        """Queue episodes, as the buffer of a session keeps them, for the next `write`."""
        self._note()
        own = np.full(len(episodes), loop, dtype=np.int32)
        ids = episodes.policy_ids
        if len(self._loops) > 1:  # a session alone has its own numbers
            ids = np.array(self._loops[loop].numbers, dtype=np.int32)[ids]
        self._queue.append(dataclasses.replace(episodes, policy_ids=ids, schedule_ids=own))

    def update(self) -> None:
        """Open the file if necessary, and append the policies and changes that it lacks."""
        self._note()
        if self._writer is not None and self._writer.ahead:
            done = self._writer.appended
            known = len(self._policies.policies), len(self._changes)
            if (done.get("policy", 0), done.get("changes", 0)) == known:
                return
            self.write()
        with self._attempt():
            self._update()

    def write(self) -> None:
        """Append the queued episodes, and all that were written ahead."""
        if self._writer is not None and self._writer.ahead:
            for loop in self._loops:
                loop.hand_over()  # returns at once if it is the caller
        with self._attempt():
            while self._queue:
                writer = self._ready_for_episodes()
                before, again = writer.appended.get("episodes", 0), False
                try:
                    files.write_episodes(writer, self._queue[0])
                except BaseException as error:
                    # errors of other kinds would come every time
                    passing = isinstance(error, OSError) or not isinstance(error, Exception)
                    again = passing and writer.appended.get("episodes", 0) == before
                    raise
                finally:
                    if not again:
                        del self._queue[0]
            if self._writer is not None and self._writer.ahead:
                self._writer.drop_ahead()  # episodes that the sessions have refused

    def finish(self) -> None:
        """Append all that the file lacks, and release it."""
        try:
            self.update()
            self.write()
        finally:
            self.close()

    def close(self) -> None:
        """Release the file; may be called again, and a later write opens it again."""
        self._complete = False
        if self._writer is not None:
            with self._attempt():
                self._writer.close()

    def __del__(self) -> None:
        """Release the file of a training that an error ended, and that nobody closed."""
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: a copy that goes on recording opens it for itself."""
        return self.__dict__ | {"_writer": None, "_queue": [], "_complete": False}

    def _note(self) -> None:
        """Number the policies and changes of all sessions in the order in which they came.

        An interrupt between two lines does no harm: equal policies have one number, and a change
        to the policy that acts already is none.
        """
        for number, loop in enumerate(self._loops):
            for policy in loop.buffer.policies[len(loop.numbers) :]:
                loop.numbers.append(self._policies.add(policy))
            for clock, k, mid_episode in loop.changes[loop.noted :]:
                self._changes.append((number, (clock, loop.numbers[k], mid_episode)))
                loop.noted += 1

    def _ready_for_episodes(self) -> BlockWriter:
        """Return a writer that has all policies of the first queued episodes."""
        writer = self._writer
        if writer is None or writer.closed or not writer.ahead:
            return self._update()
        # The next block takes the place of all that was written ahead.
        self._queue[:] = [join(self._queue)] if len(self._queue) > 1 else self._queue
        if self._queue[0].policy_ids.max() < writer.appended.get("policy", 0):
            return writer
        return self._update()

    def _update(self) -> BlockWriter:
        self._complete = False
        self._note()
        if self._writer is None or self._writer.closed:
            if self._writer is None:
                self._require_same_env()
            with held_back():  # a writer that nobody keeps would lock the file
                self._writer = self._open()
                self._opened = True
        # Count by what the writer says it has: a call that failed, or that was interrupted after
        # its work was done, must not shift the numbers of the policies.
        writer, done = self._writer, self._writer.appended
        if "spaces" not in done:
            files.write_spaces(writer, *self._env())
        for policy in self._policies.policies[done.get("policy", 0) :]:
            files.write_policy(writer, policy)
        for loop, (clock, k, mid_episode) in self._changes[done.get("changes", 0) :]:
            files.write_change(writer, k, clock, mid_episode=mid_episode, schedule=loop)
        self._complete = True
        return writer

    def _open(self) -> BlockWriter:
        """Open the file; put what a killed run has written ahead into a block of its section."""
        writer = BlockWriter(self._path, after=self._writer)
        if writer.ahead and not writer.appended:
            try:
                found = read_layout(self._path)[-1].written_ahead()
                if found is None:
                    writer.drop_ahead()
                else:
                    files.write_episodes(writer, found)
            except BaseException:
                writer.close()
                raise
        return writer

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Explain errors of the disk; if patient, warn of the first in place of raising it."""
        try:
            yield
        except OSError as error:
            waiting = sum(map(len, self._queue))
            patient = self._patient and (self._opened or error.errno in _PASSING)
            if not waiting and not patient:
                raise
            what = f"{waiting} episodes are in the buffer, but not in the file"
            reason = (
                f"{error.strerror or error}: {what if waiting else 'the file cannot be written'}; "
                "the next write or close tries again, and buffer.save can put episodes elsewhere"
            )
            if not patient:
                raise OSError(error.errno, reason, os.fspath(self._path)) from error
            if not self._failing:
                self._failing = True
                warnings.warn(f"{os.fspath(self._path)}: {reason}", UserWarning, stacklevel=4)
        else:
            self._failing = False

    def _env(self) -> tuple[Any, Any, int | None]:
        buffer = self._loops[0].buffer
        return buffer.observation_space, buffer.action_space, buffer.horizon

    def _require_same_env(self) -> None:
        """Raise if the file holds episodes of another env: one reader could not read both."""
        path = self._path
        if not os.path.exists(path):
            return
        ours = space_json.env_to_json(*self._env())
        with warnings.catch_warnings(), contextlib.suppress(blocks.DamagedFileError):
            # of a damaged file the writer warns, or raises, too
            warnings.simplefilter("ignore", UserWarning)
            for block in blocks.read_blocks(path):
                if block.kind == "spaces" and block.meta != ours:
                    raise ValueError(
                        f"path={os.fspath(path)!r} holds episodes of another environment "
                        f"({block.meta}), this one has {ours}; choose another file"
                    )
