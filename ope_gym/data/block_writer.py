"""Write files of blocks: crash-safe appending, and replacing a file as a whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym.data.blocks import (
    AHEAD,
    ALIGNMENT,
    BLOCK_MAGIC,
    GAP,
    HEADER,
    LAST_BYTE,
    MAGIC,
    MOST_JSON,
    FileCut,
    PathLike,
    require_regular,
    tail_start,
    walk,
    zeros_from,
)
from ope_gym.data.spaces import NUMERIC_DTYPES

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_JOIN_BELOW = 2**20  # a small block is one write: the system call costs more than the copy
_TAIL = GAP * 2 // 5  # bytes of a tail, at most: the block of its episodes then mostly fits the gap
_PIECE = 2**20  # bytes that are copied at once
_SYNC = 1.0  # seconds after which a tail may have come to the disk without a sync


class BlockWriter:
    """Append blocks to a file; the operating system has each of them when `append` returns.

    A new file is started, a good one continued, and what a crash left of the last block removed
    first. The file is locked against other writers for as long as it is open.

    `append_ahead` is for what will be appended once more later, with more of its kind: it costs
    little, and readers find it until the next `append`, which takes its place.

    Args:
        path: The file.
        after: An earlier writer, closed by now, of the same file. If nobody has changed the file
            since, it is not read again, and `appended` counts on.

    Attributes:
        appended: How many blocks of each kind this writer has written.
    """

    def __init__(self, path: PathLike, *, after: BlockWriter | None = None) -> None:
        require_regular(path)
        self.path = Path(path)
        self.appended: dict[str, int] = {}
        self._end = 0  # where the next block begins
        self._last = 0  # checksum of the last block
        self._left: _State | None = None  # the file when it was closed
        self._torn = False  # whether a failed write may have left bytes behind the last block
        self._tail: _Tail | None = None  # what was written ahead
        self._synced = time.monotonic()
        self._nameless = False  # whether the file was deleted, and its path is taken
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        # Unbuffered: after a failed write no bytes may be left behind for a later flush.
        self._file = os.fdopen(os.open(self.path, flags, 0o666), "r+b", buffering=0)
        try:
            if not _lock(self._file):
                raise RuntimeError(
                    f"{self.path} is open in another writer; close that one or choose another file"
                )
            # A save may have put another file in this place after we opened ours and before we
            # locked it; our blocks would go to a file without a name.
            if sys.platform != "win32" and not os.path.samestat(
                os.fstat(self._file.fileno()), os.stat(self.path)
            ):
                raise RuntimeError(
                    f"{self.path} was replaced by another file while it was opened; open it again"
                )
            if after is not None and after._left == _state(self._file):
                self._end, self._last, self._tail = after._end, after._last, after._tail
                self.appended = dict(after.appended)
            else:
                self._end = self._find_end()
        except BaseException:
            self._file.close()
            raise

    def _find_end(self) -> int:
        """Return where the next block goes: behind the last whole block of the file."""
        head, end = self._file.read(len(MAGIC)), os.fstat(self._file.fileno()).st_size
        if head != MAGIC and MAGIC.startswith(head[: zeros_from(self._file, end)]):
            # new, or cut, by a crash or by zeros, before its first block
            self._file.truncate(0)
            self._file.seek(0)
            _write_all(self._file, MAGIC)
            return len(MAGIC)
        self._file.seek(0)
        end = len(MAGIC)
        # A reader with a buffer of its own, as the writer's file has none.
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            try:
                for block in walk(reader, self.path, whole=2**20):
                    if block.kind == AHEAD:
                        start = block.offset if self._tail is None else self._tail.start
                        self._tail = _Tail(start, block.end, block.checksum)
                    else:
                        end, self._last = block.end, block.checksum
            except FileCut as cut:
                warnings.warn(
                    f"{self.path} ended inside its last block: {cut.dropped} bytes from byte "
                    f"{cut.offset} on were removed",
                    UserWarning,
                    stacklevel=4,
                )
        self._file.truncate(end if self._tail is None else self._tail.end)
        return end

    def append(
        self, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        """Write one block; after an error or an interrupt the file is as it was before.

        Args:
            kind: What the block is.
            meta: Further JSON fields.
            arrays: Named arrays of numbers or truth values.
        """
        if self._file.closed:
            raise ValueError(f"the writer of {self.path} is closed")
        entries, payload, length = _lay_out(arrays)
        fields = {"kind": kind, "after": self._last, **meta, "arrays": entries}
        text = _ENCODER.encode(fields).encode()
        if len(text) > MOST_JSON:
            raise ValueError(
                f"{self.path}: the JSON of a {kind!r} block has {len(text):,} bytes, a file "
                f"may hold {MOST_JSON:,}; use fewer columns, or a space with fewer parts and bounds"
            )
        head, text, head_crc = _frame(self._end, text, payload, length)
        parts = [head, text, *payload]
        if length < _JOIN_BELOW:
            parts = [b"".join(parts)]
        end, count = self._end + len(head) + len(text) + length, self.appended.get(kind, 0) + 1
        try:
            self._keep_name()
            if self._torn:  # an earlier write and its clean-up failed
                self._clean_up()
            if self._tail is not None and end > self._tail.start:
                self._torn = True
                self._make_room(end)
            self._file.seek(self._end)
            self._torn = True
            for part in parts:
                _write_all(self._file, part)
            # In one statement without a call, so that no interrupt can arrive between the parts:
            # the block counts as written with all that follows from it, or not at all.
            self._torn, self._end, self._last = self._tail is not None, end, head_crc
            self._tail, self.appended[kind] = None, count
        except BaseException as error:
            if self._torn:
                with contextlib.suppress(OSError):
                    self._clean_up()
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = os.fspath(self.path)
            raise
        if self._torn:
            self._cut_off()

    def _keep_name(self) -> None:
        """Write the file to its path again if somebody has deleted it, and it lives on in here."""
        if self._nameless or os.fstat(self._file.fileno()).st_nlink or sys.platform == "win32":
            return
        words = f"{self.path} was deleted while it was written to"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            new = os.fdopen(os.open(self.path, flags, 0o666), "r+b", buffering=0)
        except FileExistsError:
            self._nameless = True
            words += (
                ", and another file has taken its place: nothing more can be recorded in it; "
                "buffer.save can put the episodes elsewhere"
            )
        else:
            try:
                _lock(new)
                self._file.seek(0)
                shutil.copyfileobj(self._file, new, _PIECE)
                self._file, old = new, self._file
            except BaseException:
                new.close()
                self.path.unlink()
                raise
            old.close()
            words += ": all that it held was written there again"
        warnings.warn(words, UserWarning, stacklevel=3)

    def _clean_up(self) -> None:
        """Remove what a failed write has left, and put a tail where it belongs."""
        tail = self._tail
        if tail is None:
            self._file.truncate(self._end)
        else:
            self._file.seek(self._end)
            if any(self._file.read(HEADER.size)):
                # The block may be whole: without its header it is none, and the tail counts.
                self._file.seek(self._end)
                _write_all(self._file, bytes(HEADER.size))
            self._file.truncate(self._move(tail, tail_start(self._end)).end)
        self._torn = False

    def _make_room(self, end: int) -> None:
        """Copy the tail behind the place of a large block, which may then overwrite the first."""
        assert self._tail is not None
        self._move(self._tail, tail_start(end))
        self._sync()

    def _move(self, tail: _Tail, start: int) -> _Tail:
        """Copy the tail to a byte of the file; the new one counts when it is whole."""
        if tail.start == start:
            return tail
        self._file.seek(tail.start)
        data = _read_all(self._file, tail.end - tail.start)
        self._file.seek(start)
        _write_all(self._file, data)
        self._tail = _Tail(start, start + len(data), tail.last)
        return self._tail

    @property
    def ahead(self) -> bool:
        """Whether the file holds episodes that are not in a block yet."""
        return self._tail is not None

    def append_ahead(self, fields: str, payload: bytes) -> bool:
        """Write a block ahead of an ordinary one, or return False if there is no room for more.

        Args:
            fields: JSON fields of the block, without the braces around them.
            payload: Its payload.
        """
        if self._torn:  # bytes of a failed write
            self._clean_up()
        start = tail_start(self._end)
        _, at, last = self._tail or (start, start, self._last)
        if at + len(payload) - start > _TAIL:  # now: the checksum of large ones takes long
            return False
        text = f'{{"kind":"{AHEAD}","end":{self._end},"after":{last},{fields}}}'.encode()
        head, text, checksum = _frame(at, text, (payload,), len(payload))
        block = b"".join((head, text, payload))
        end = at + len(block)
        if end - start > _TAIL:
            return False
        if self._file.tell() != at:
            self._file.seek(at)
        _write_all(self._file, block)
        self._tail = _Tail(start, end, checksum)
        return True

    def drop_ahead(self) -> None:
        """Cut off what was written ahead, because nobody wants it."""
        self._tail, self._torn = None, True
        self._cut_off()

    def _cut_off(self) -> None:
        """Remove what is behind the last block; if that fails, the next write tries again."""
        self._sync()
        with contextlib.suppress(OSError):
            self._file.truncate(self._end)
            self._torn = False

    def _sync(self) -> None:
        """Bring what was written to the disk, before a tail that may be there is overwritten.

        Not more than once a second: a younger tail would not have survived a power cut either. An
        error may not be passed over: the system reports only once that it could not write.
        """
        if time.monotonic() - self._synced > _SYNC:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                reason = (
                    f"{os.strerror(error.errno or errno.EIO)}: the disk has not taken all that was "
                    "written, and the file may lack episodes after a power cut"
                )
                raise OSError(error.errno, reason, os.fspath(self.path)) from error
            self._synced = time.monotonic()

    @property
    def closed(self) -> bool:
        """Whether the file was released."""
        return self._file.closed

    def close(self) -> None:
        """Bring everything to the disk and release the file; may be called again."""
        if not self._file.closed:
            try:
                # Written blocks survive the death of the process, but not a power cut, until the
                # system has them on the disk. Once, at the end: a sync for every block would
                # take longer than most episodes.
                self._keep_name()
                os.fsync(self._file.fileno())
                if not self._torn:
                    self._left = _state(self._file)
            finally:
                _unlock(self._file)
                self._file.close()

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Tail(NamedTuple):
    """Where the blocks begin and end that were written ahead, and the checksum of the last."""

    start: int
    end: int
    last: int


def _frame(
    at: int, text: bytes, payload: Sequence[bytes | memoryview], length: int
) -> tuple[bytes, bytes, int]:
    """Return the header and the padded JSON of a block that begins at byte `at`, and its CRC."""
    text += b" " * (-(at + HEADER.size + len(text)) % ALIGNMENT)
    crc = zlib.crc32(text)
    for part in payload:
        crc = zlib.crc32(part, crc)
    head = struct.pack("<IIQI", BLOCK_MAGIC, len(text), length, crc)
    checksum = zlib.crc32(head)
    return head + struct.pack("<I", checksum), text, checksum


_State: TypeAlias = tuple[int, int, int, int]


def _state(file: Any) -> _State:
    """Return what differs if another file took this one's place, or somebody wrote to it."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _lay_out(
    arrays: Mapping[str, NDArray[Any]],
) -> tuple[dict[str, Any], list[bytes | memoryview], int]:
    """Return the JSON entries of arrays, the pieces of the payload, and its length."""
    entries: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    length = 0
    for name, value in arrays.items():
        array = np.asarray(value, order="C")
        dtype = array.dtype.newbyteorder("<")
        if dtype.str not in NUMERIC_DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, which a file cannot hold")
        padding = -length % ALIGNMENT
        entries[name] = {
            "dtype": dtype.str,
            "shape": list(array.shape),
            "offset": length + padding,
        }
        data = array.astype(dtype, copy=False).reshape(-1).view(np.uint8)
        pieces += [bytes(padding), data.data]
        length += padding + array.nbytes
    if length:
        pieces.append(LAST_BYTE)
        length += len(LAST_BYTE)
    return entries, pieces, length


def _write_all(file: Any, data: bytes | memoryview) -> None:
    done = file.write(data)
    while done < len(data):  # a raw write may take only a part
        done += file.write(memoryview(data)[done:])


def _read_all(file: Any, size: int) -> bytes:
    data = b""
    while piece := file.read(size - len(data)):  # a raw read may give only a part
        data += piece
    return data


def _lock(file: Any) -> bool:
    """Lock the file and return True, also where there are no locks; False if another has it."""
    try:
        if sys.platform == "win32":
            file.seek(2**62)  # far behind all data: readers must not meet the lock
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            finally:
                file.seek(0)
        else:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # e.g. a network file system without locks
    return True


def _unlock(file: Any) -> None:
    """Release the lock now: a process that was forked meanwhile has the file open, too."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _put(temporary: Path, target: Path) -> bool:
    """Give a new file its name; return False if a recorder or another save took it meanwhile."""
    try:
        # a link, unlike a rename, never replaces a file that is there
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        os.replace(temporary, target)
    else:
        temporary.unlink()
    return True


def _replace(temporary: Path, target: Path, path: PathLike) -> None:
    """Put a new file in the place of an old one, or raise if a recorder is writing to that."""
    with contextlib.ExitStack() as held:
        shutil.copymode(target, temporary)
        if sys.platform != "win32":
            with contextlib.suppress(PermissionError):
                old = held.enter_context(open(target, "rb"))
                if not _lock(old):
                    raise RuntimeError(
                        f"cannot save {path}: a recorder is writing to it, and its later "
                        "episodes would be lost; close it or save to another file"
                    )
        # Under the lock of the old file: a recorder that opens it now is refused, instead of
        # writing to a file that is about to lose its name.
        os.replace(temporary, target)


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BlockWriter]:
    """Give a writer of a new file, which takes the place of `path` at the end, if all went well."""
    with in_place_of(path) as temporary, BlockWriter(temporary) as writer:
        yield writer


@contextlib.contextmanager
def in_place_of(path: PathLike) -> Iterator[Path]:
    """Give the name of a new file, which takes the place of `path` at the end, if all went well.

    The new file is complete and on the disk before it gets its name, if its writer brings it there:
    whoever opens `path`, at any time and after any crash, finds the old file or the new one.
    """
    target = Path(os.path.realpath(path))
    require_regular(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot save {path}: the folder {target.parent} does not exist")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if target.exists() or not _put(temporary, target):
            _replace(temporary, target, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            reason = f"cannot save, {os.strerror(error.errno)}; what was there is as it was"
            raise OSError(error.errno, reason, os.fspath(path)) from error
        raise
    if sys.platform != "win32":  # a name is on the disk when its folder is
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
