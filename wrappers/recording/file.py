"""The file that one or several sessions append their finished episodes to."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.database import LostFileError, SeenFile
from ope_gym.data.schedules import PolicyTable
from ope_gym.data.schema import Ints
from ope_gym.data.store import Store
from ope_gym.data.stored import read_stored, take_in_tails
from ope_gym.data.trajectories import Trajectories
from ope_gym.files import DamagedFileError, PathLike, require_regular
from ope_gym.stopping import held_back

# A full or failing disk, or another writer that takes long: it may pass.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN)

PolicyChange: TypeAlias = tuple[int, int, bool]
"""Clock, number of the policy that acts from then on, whether an episode was under way."""


def check_path(path: PathLike, append: bool | None, *, stacklevel: int) -> None:
    """Raise if nothing can or should be recorded there; warn if it continues an older record.

    Args:
        path: The file.
        append: Whether to continue a file that exists; None continues it with a warning.
        stacklevel: Stack level of the warning.
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
    require_regular(name)
    exists = os.path.exists(name)
    for what, place in (("it", name), ("its folder", folder)):
        if os.path.exists(place) and not os.access(place, os.W_OK):
            raise PermissionError(f"path={name!r}: {what} is not writable, choose another one")
    if append or not exists:
        return
    if append is not None:
        raise FileExistsError(f"path={name!r} exists and append=False: choose another file")
    if os.path.getsize(name) and (episodes := len(read_stored(name))):
        warnings.warn(
            f"path={name!r} exists: new episodes are appended to the {episodes:,} of earlier runs, "
            "and a script that ran before with the same seed records the same ones again. Give "
            "append=True if you want that, or choose another file; append=False refuses it",
            UserWarning,
            stacklevel=stacklevel,
        )


@dataclass
class _Loop:
    """One session that writes to the file; its number is that of its loop there.

    Args:
        buffer: Its episodes and policies.
        changes: The changes of its policy so far; whoever owns the list appends to it.
        numbers: The numbers of its policies in the store.
        noted: How many of its changes the store knows of.
    """

    buffer: TrajectoryBuffer
    changes: list[PolicyChange]
    numbers: list[int] = field(default_factory=list)
    noted: int = 0


class EpisodeFile:
    """Appends policies, changes of the policy and finished episodes to a file.

    A disk that is full ends no training: a warning says so, and the episodes follow when there is
    room. If somebody deletes, replaces or cuts the file, all episodes of the buffers are written to
    a new one.

    Args:
        path: The file; opened at the first write, and continued if it exists.
        patient: Whether `close` warns, too, of episodes that could not be written.
    """

    def __init__(self, path: PathLike, *, patient: bool = False) -> None:
        self._path = os.fspath(path)
        self._patient = patient
        self._failing = False  # whether the last attempt failed, and a warning said so
        self._loops: list[_Loop] = []
        self._policies = PolicyTable()
        self._queue: list[tuple[int, Trajectories]] = []  # for a file that cannot be opened now
        self._store: Store | None = None

    def join(self, buffer: TrajectoryBuffer, changes: list[PolicyChange]) -> int:
        """Let a session write to the file, and return its number.

        Args:
            buffer: Knows its spaces, which all sessions share, and its policies.
            changes: The changes of its policy so far; whoever owns the list appends to it.
        """
        self._loops.append(_Loop(buffer, changes))
        return len(self._loops) - 1

    def append(self, loop: int, episodes: Trajectories) -> None:
        """Write finished episodes, as the buffer of a session keeps them."""
        self._queue.append((loop, episodes))
        self.write()

    @property
    def answers(self) -> bool:
        """Whether every reader can ask the policies in the file for propensities."""
        return self._store is not None and self._store.answers

    def keep(self, loop: int, layout: str, data: bytes, facts: Ints, policies: Ints | int) -> bool:
        """Make finished episodes safe before they are checked, see `Store.keep`."""
        if self._store is None or self._queue:
            return False
        if len(self._loops) > 1:  # a session alone has the numbers of the store
            numbers = self._loops[loop].numbers
            if isinstance(policies, int):
                policies = numbers[policies]
            else:
                policies = np.array([numbers[k] for k in policies.tolist()])
        return self._store.keep(layout, data, facts, policies, loop)

    def write(self) -> None:
        """Write the policies, changes and episodes that the file lacks."""
        with held_back(), self._attempt():
            self._write_all()

    def close(self) -> None:
        """Write what the file lacks, and release it; a later write opens it again."""
        if self._store is not None and self._store.inherited:
            return
        for loop in self._loops:
            len(loop.buffer)  # hands over what waits
        with held_back(), self._attempt(last=True):
            self._write_all()
            if self._store is not None:
                self._store.close()

    def __del__(self) -> None:
        """Release the file of a training that an error ended, and that nobody closed."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: a copy that goes on recording opens it for itself."""
        loops = [_Loop(loop.buffer, loop.changes) for loop in self._loops]
        fresh = {"_store": None, "_queue": [], "_policies": PolicyTable(), "_loops": loops}
        return self.__dict__ | fresh

    def _write_all(self) -> None:
        """Write what is missing, to another file if this one was lost."""
        try:
            self._write()
        except (LostFileError, DamagedFileError) as error:
            if self._store is None:  # it could not be opened
                raise
            self._begin_another(error)
            self._write()

    def _write(self) -> None:
        if self._store is None:
            if not any(loop.buffer.policies for loop in self._loops):
                return  # no file is made for nothing
            if os.path.exists(self._path):
                take_in_tails(SeenFile.unread(self._path))
            buffer = self._loops[0].buffer
            self._store = Store(
                self._path, buffer.observation_space, buffer.action_space, buffer.horizon
            )
        self._note(self._store)
        while self._queue:
            loop, episodes = self._queue.pop(0)
            ids = episodes.policy_ids
            if len(self._loops) > 1:  # a session alone has the numbers of the store
                ids = np.array(self._loops[loop].numbers, dtype=np.int32)[ids]
            own = np.where(episodes.start_clock < 0, -1, loop).astype(np.int32)
            written = dataclasses.replace(episodes, policy_ids=ids, schedule_ids=own)
            self._store.append(written, kept=loop)
        self._store.flush()

    def _note(self, store: Store) -> None:
        """Number the policies and changes of all sessions in the order in which they came."""
        for number, loop in enumerate(self._loops):
            for policy in loop.buffer.policies[len(loop.numbers) :]:
                k = self._policies.add(policy)
                loop.numbers.append(k)
                if k == store.policies:
                    store.add_policy(policy)
            for clock, k, mid_episode in loop.changes[loop.noted :]:
                store.change(number, clock, loop.numbers[k], mid_episode=mid_episode)
                loop.noted += 1

    def _begin_another(self, error: Exception) -> None:
        """Let all that is in memory go to a new file, because the old one is lost."""
        assert self._store is not None
        self._store.release()
        old, self._path = self._path, _free_path(self._path)
        self._store, self._policies = None, PolicyTable()
        for loop in self._loops:
            loop.numbers, loop.noted = [], 0
        # not those that still wait to be handed over: these follow by themselves
        views = [(i, TrajectoryBuffer.view(loop.buffer)) for i, loop in enumerate(self._loops)]
        self._queue = [(i, view) for i, view in views if len(view)]
        warnings.warn(
            f"{old} is lost, {getattr(error, 'strerror', None) or error}: all "
            f"{sum(len(view) for _, view in views):,} episodes that are in memory were written to "
            f"{self._path}, which takes its place; others of it are gone",
            UserWarning,
            stacklevel=5,
        )

    @contextlib.contextmanager
    def _attempt(self, *, last: bool = False) -> Iterator[None]:
        """Warn of the first error of a full or failing disk in place of raising it."""
        try:
            yield
        except OSError as error:
            waiting = sum(len(episodes) for _, episodes in self._queue)
            if self._store is not None:
                waiting += self._store.waiting
            elif not self._queue:  # the file was never made
                waiting = sum(TrajectoryBuffer.__len__(loop.buffer) for loop in self._loops)
            reason = (
                f"{error.strerror or error}: {waiting} episodes are in the buffer, but not in the "
                "file; the next write or close tries again, and buffer.save can put episodes "
                "elsewhere"
            )
            if error.errno not in _PASSING or (last and not self._patient):
                raise OSError(error.errno, reason, self._path) from error
            if not self._failing:
                self._failing = True
                warnings.warn(f"{self._path}: {reason}", UserWarning, stacklevel=5)
        else:
            self._failing = False


def _free_path(path: str) -> str:
    """Return the path if no file has it, or else one like it."""
    stem, suffix = os.path.splitext(path)
    names = (path, *(f"{stem}-{i}{suffix}" for i in range(2, 1000)))
    return next(name for name in names if not os.path.exists(name))
