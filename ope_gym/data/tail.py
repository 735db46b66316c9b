"""Tails: ended episodes on their way into a file, which outlive the process at once.

A transaction for each episode takes 25 µs and more; a short write to a file takes 1 µs, and the
death of the process takes neither back. So a recorder writes what has ended, as it came, to
`FILE-tail1` beside the file. From time to time all of it goes into the file, checked and with the
propensities of its policies, in one transaction that also says which batch of the tail this was.
The next batch overwrites the tail from its start. Each recorder has a tail of its own, with a lock;
a tail without a lock is that of a killed one, and whoever opens the file next takes its latest
batch in, unless the file says that it has it.

SQLite reads a damaged log up to the damage, and says nothing of what follows. Each entry therefore
counts the episodes and changes of policy of its loop that the file has before it. Where the number
of the batch shows a gap, a warning says how many episodes are missing; if changes are, too, nobody
knows who acted in the batch, and it stays where it is.

A tail is a row of entries: head, layout, rows of episodes, columns as in a chunk. It ends where the
batch or the CRC-32 of an entry is not the expected one: a power cut may have torn it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ope_gym.data.schema import Ints

if sys.platform != "win32":
    import fcntl

MOST_BYTES = 2**22  # of a batch: more than a second of fast environments, and little for any disk
_MOST_TAILS = 8  # recorders of one file that have one; further ones write transactions
_HEAD = struct.Struct("<8qI")
_open_tails: weakref.WeakSet[Tail] = weakref.WeakSet()


class Entry(NamedTuple):
    """Episodes that ended together.

    Args:
        owner: Number of the recorder in the table `tails`.
        batch: Number of the batch.
        episodes: Episodes of its loop in the file when the batch began.
        changes: Changes of the policy of its loop in the file.
        layout: Layout of the columns.
        roster: (n, 5) rows of the episodes as `read_roster` returns them.
        data: Columns.
    """

    owner: int
    batch: int
    episodes: int
    changes: int
    layout: str
    roster: Ints
    data: bytes


def tails_of(path: str) -> list[str]:
    """Return the tails that a file may have, and that are there."""
    return [name for name in _names(path) if os.path.exists(name)]


def _names(path: str) -> list[str]:
    if sys.platform == "win32":  # it has no locks that a fork does not inherit
        return []
    return [f"{path}-tail{i}" for i in range(1, _MOST_TAILS + 1)]


class Tail:
    """A tail that this process has locked.

    Args:
        name: Path of the tail.
        create: Whether to make it.

    Raises:
        BlockingIOError: If a recorder has it.
    """

    def __init__(self, name: str, *, create: bool) -> None:
        self.name = name
        self.owner = secrets.randbits(62)
        self.batch = 0  # the first batch begins when the file knows the owner
        self.episodes = self.changes = 0  # of its loop, in the file
        self._at = 0
        mode = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._fd = os.open(name, mode | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # no link, no pipe
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", name)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_ino != os.stat(name).st_ino:  # its owner has just removed it
                raise BlockingIOError
        except BaseException:
            os.close(self._fd)
            raise
        _open_tails.add(self)

    @classmethod
    def new(cls, path: str) -> Tail | None:
        """Return an empty tail for a file; None where there can be none."""
        for name in _names(path):
            try:
                tail = cls(name, create=True)
            except BlockingIOError:
                continue
            except OSError:  # a full disk, a folder that cannot be written, no locks
                return None
            if not os.fstat(tail._fd).st_size:
                return tail
            tail.close()  # of a killed recorder, and it could not be taken in
        return None

    def append(self, layout: str, roster: Ints, data: bytes) -> bool:
        """Write an entry; return whether it is there."""
        text = layout.encode()
        payload = b"".join((text, roster.tobytes(), data))
        counts = (self.owner, self.batch, self.episodes, self.changes)
        numbers = (*counts, len(text), 40 * len(roster), len(data), len(roster))
        entry = _HEAD.pack(*numbers, _checksum(numbers, payload)) + payload
        if self._at + len(entry) > MOST_BYTES:
            return False
        try:
            written = os.pwrite(self._fd, entry, self._at)
        except OSError:
            return False
        if written < len(entry):  # a full disk
            return False
        self._at += written
        return True

    def begin_batch(self, episodes: int) -> None:
        """Begin the next batch: the file has all entries so far, which are so many episodes."""
        self.batch, self._at = self.batch + 1, 0
        self.episodes += episodes

    @property
    def pending(self) -> bool:
        """Whether the file lacks an entry."""
        return self._at > 0

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the latest batch."""
        content = os.pread(self._fd, MOST_BYTES, 0)
        at, expected = 0, None
        while at + _HEAD.size <= len(content):
            *numbers, crc = _HEAD.unpack_from(content, at)
            owner, batch, episodes, changes, *sizes, n = numbers
            begin, end = at + _HEAD.size, at + _HEAD.size + sum(sizes)
            if min(sizes) < 0 or end > len(content) or n < 1 or sizes[1] != 40 * n:
                return
            right = crc == _checksum(numbers, content[begin:end])
            if not right or expected not in (None, (owner, batch)):
                return
            expected = owner, batch
            rows, data = begin + sizes[0], end - sizes[2]
            roster = np.frombuffer(content[rows:data], "<i8").reshape(-1, 5).astype(np.int64)
            layout, columns = content[begin:rows].decode(), content[data:end]
            yield Entry(owner, batch, episodes, changes, layout, roster, columns)
            at = end

    def remove(self) -> None:
        """Delete it, and release it."""
        if self._fd >= 0:
            os.unlink(self.name)
        self.close()

    def close(self) -> None:
        """Release it; what is in it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _checksum(numbers: Sequence[int], payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_HEAD.pack(*numbers, 0)))


def _leave_to_parent() -> None:
    """Close the tails of a parent process in its fork, or its lock would outlive it."""
    for tail in list(_open_tails):
        tail.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
