r"""The file format: blocks of named arrays, one after the other.

A file is `b"OPEGYM\x00\x01"` and blocks. A block is a header (little-endian: u32 magic, u32 length
of the JSON, u64 length of the payload, u32 CRC of JSON and payload, u32 CRC of the header so far),
JSON `{"kind": ..., "arrays": {name: {"dtype", "shape", "offset"}}, ...}` padded with blanks so that
the payload starts at a multiple of 64 bytes of the file, and the payload: raw little-endian C-order
arrays, each at a multiple of 64, and a last byte that is not zero: zeros at the end of a file are
never a block's own, but what a power cut left. The JSON also names, as `after`, the CRC of the
header before, so that a missing, doubled or foreign block is noticed. There is no pickle: opening a
file runs no code. This module reads blocks, `block_writer` writes them.

While a recorder writes, a file may also have a tail: blocks of kind `ahead`, a cheap one for each
finished episode, from a multiple of `GAP` on that lies at least `GAP` bytes behind the last
ordinary block. The first names that block as `after`, and where it ends as `end`. From time to time
an ordinary block with the same episodes is written into the gap, and then the tail is cut off: at
each moment the episodes are in the block or in the tail. Before a block that is larger than the
gap, the tail is copied to a multiple of `GAP` behind the end of that block.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym.data.spaces import NUMERIC_DTYPES

MAGIC = b"OPEGYM\x00\x01"
ALIGNMENT = 64
BLOCK_MAGIC = 0x4B4C424F
HEADER = struct.Struct("<IIQII")
LAST_BYTE = b"U"  # of a payload; to be mistaken for a zero it needs four flipped bits
# Errors of code that takes JSON of the wrong shape apart.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
KEEP_THE_REST = "keep them by Trajectories.load(path, recover=True).save(new_path)"
MOST_JSON = 2**20  # bytes of the JSON of a block: as Python objects it takes up to forty times more
GAP = 2**20  # bytes between the last block and a tail, at least; a tail has fewer
AHEAD = "ahead"  # kind of the blocks of a tail
_PIECE = 2**20  # bytes of a payload that are checked at once
_PATIENCE = 100  # changes of a file during one look at its end: a recorder is not that fast

PathLike: TypeAlias = str | os.PathLike[str]


class DamagedFileError(ValueError):
    """Raised for a file that ope_gym did not write so; the damage begins at byte `offset`."""

    def __init__(self, path: PathLike, offset: int, reason: str, remedy: str) -> None:
        super().__init__(path, offset, reason, remedy)  # pickle calls the class with these
        self.offset = offset

    def __str__(self) -> str:
        path, offset, reason, remedy = self.args
        return f"{os.fspath(path)}: {reason} (byte {offset}); {remedy}"


class ChecksumError(ValueError):
    """Raised for a block whose bytes are not those that were written."""


def require_regular(path: PathLike) -> None:
    """Raise if a path names a pipe, a device or a socket: opening one may wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever opens it says what is wrong
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{os.fspath(path)} is a pipe, a device or a socket, and episodes are kept in regular "
            "files, which can be read twice: copy it to a file, or choose another path"
        )


class Entry(NamedTuple):
    """Where an array lies in the payload of its block."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Block:
    """One block of an open file; its arrays are read-only.

    Args:
        kind: What the block holds.
        meta: Further JSON fields.
        entries: Where its arrays lie, by name.
        offset: Byte of the file where the block begins.
        start: Byte where its payload begins.
        end: Byte where it ends.
        checksum: CRC of its header, which the next block names.
        file: The open file.
        payload: The payload, or None to read arrays from the file when they are asked for.
    """

    kind: str
    meta: dict[str, Any]
    entries: dict[str, Entry]
    offset: int
    start: int
    end: int
    checksum: int
    file: BinaryIO = field(repr=False)
    payload: bytes | None = field(repr=False)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays, by name."""
        return {name: self.array(name) for name in self.entries}

    def entry(self, name: str) -> Entry:
        """Return where an array lies, or raise if the block has none of that name."""
        if name not in self.entries:
            raise ValueError(f"it has no array {name!r}")
        return self.entries[name]

    def array(self, name: str) -> NDArray[Any]:
        """Return a whole array."""
        entry = self.entry(name)
        return self._read(name, entry.dtype, entry.shape, entry.offset)

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Return rows begin:end of an array, without reading the others."""
        dtype, shape, offset = self.entry(name)
        if not shape or not 0 <= begin <= end <= shape[0]:
            raise ValueError(f"array {name!r} of shape {shape} has no rows {begin} to {end}")
        width = np.dtype(dtype).itemsize * math.prod(shape[1:])
        return self._read(name, dtype, (end - begin, *shape[1:]), offset + begin * width)

    def _read(self, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
        if (count := math.prod(shape)) == 0:
            return np.empty(shape, dtype=dtype)
        data = self.payload
        if data is None:
            self.file.seek(self.start + offset)
            data, offset = self.file.read(count * np.dtype(dtype).itemsize), 0
        stored = "|u1" if dtype == "|b1" else dtype
        flat: NDArray[Any] = np.frombuffer(data, dtype=stored, count=count, offset=offset)
        if dtype == "|b1":
            if flat.max() > 1:
                raise ValueError(f"array {name!r} has truth values other than 0 and 1")
            flat = flat.view(np.bool_)
        return flat.reshape(shape).astype(flat.dtype.newbyteorder("="), copy=False)


class FileCut(Exception):
    """Raised where a file ends inside the block that begins at `offset`."""

    def __init__(self, offset: int, dropped: int) -> None:
        super().__init__(f"the file ends inside its last block, at byte {offset}")
        self.offset, self.dropped = offset, dropped


# Reading blocks ------------------------------------------------------------------------------


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the JSON of a block holds {name}, which is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_blocks(path: PathLike, *, recover: bool = False) -> Iterator[Block]:
    """Yield the blocks of a file, each checked before it is handed out; see `scan`."""
    require_regular(path)
    with open(path, "rb") as file:
        yield from scan(file, path, recover=recover)


def scan(
    file: BinaryIO, path: PathLike, *, recover: bool = False, whole: int | None = None
) -> Iterator[Block]:
    """Yield the blocks of an open file, each checked before it is handed out.

    A file that ends inside its last block, as a crash leaves it, gives all blocks before it and a
    warning. So does one whose last block ends in zeros, as a power cut leaves it.

    Args:
        file: The file, at its beginning.
        path: Its name in messages.
        recover: Whether damage ends the file with a warning, instead of a `DamagedFileError`.
        whole: Payloads of more bytes are checked, but not held in memory; None holds all.
    """
    try:
        yield from walk(file, path, whole)
    except FileCut as cut:
        warnings.warn(
            f"{os.fspath(path)} ends inside its last block: {cut.dropped} bytes from byte "
            f"{cut.offset} on were dropped (a run was interrupted, or is still writing)",
            UserWarning,
            stacklevel=4,
        )
    except DamagedFileError as error:
        if not recover or error.offset == 0:  # at byte 0 it is not our file at all
            raise
        warnings.warn(f"recovered what precedes the damage: {error}", stacklevel=4)


def walk(file: BinaryIO, path: PathLike, whole: int | None = None) -> Iterator[Block]:
    """Yield the blocks like `scan`, but raise `FileCut` where the file is cut."""
    _check_magic(file, path)
    size = os.fstat(file.fileno()).st_size
    offset, last, kinds, patience = len(MAGIC), 0, list[str](), _PATIENCE
    while offset < size:
        try:
            block = read_block(file, offset, size, last, whole=whole)
        except (FileCut, *MALFORMED) as error:
            tail = tail_of(file, size)
            found = _read_tail(file, tail, offset, size, last)
            now = os.fstat(file.fileno()).st_size
            if now != size and patience:  # a recorder has put a block in the place of its tail
                size, patience = now, patience - 1
                continue
            if found:
                yield from found
                end = found[-1].end
                if end < size <= found[0].offset + GAP:  # further behind, a copy of it was begun
                    raise FileCut(end, size - end) from error
                return
            if tail is not None and tail.end < offset:
                return  # a tail whose episodes are in the block before
            if isinstance(error, FileCut):
                raise
            if isinstance(error, ChecksumError) and _ends_in_zeros(file, offset, size):
                raise FileCut(offset, size - offset) from error
            remedy = (
                f"{len(kinds)} blocks before it are readable ({kinds.count('episodes')} of "
                f"episodes): {KEEP_THE_REST}"
            )
            raise DamagedFileError(path, offset, what_is_wrong(error), remedy) from error
        yield block
        kinds.append(block.kind)
        offset, last, patience = block.end, block.checksum, _PATIENCE


class Tail(NamedTuple):
    """Where a tail begins, and where the ordinary blocks before it end."""

    start: int
    end: int


def tail_start(end: int) -> int:
    """Return where a tail begins behind ordinary blocks that end at a byte."""
    return (-(-end // GAP) + 1) * GAP


def tail_of(file: BinaryIO, size: int) -> Tail | None:
    """Return the tail at the end of a file of `size` bytes, None if it has none."""
    return _tail_at(file, (size - 1) // GAP * GAP, size)


def _tail_at(file: BinaryIO, start: int, size: int) -> Tail | None:
    try:
        meta = _DECODER.decode(_read_frame(file, start, size).text.decode())
        end = meta["end"] if meta["kind"] == AHEAD else None
    except (FileCut, *MALFORMED):
        return None
    return Tail(start, end) if isinstance(end, int) and tail_start(end) <= start else None


def settled_size(file: BinaryIO) -> int:
    """Return the size of a file without its tail, which a recorder may cut off at any time."""
    size = os.fstat(file.fileno()).st_size
    tail = tail_of(file, size) if size else None
    file.seek(0)
    return size if tail is None else tail.end


def _read_tail(file: BinaryIO, tail: Tail | None, end: int, size: int, last: int) -> list[Block]:
    """Return the blocks of the tail behind ordinary blocks, up to the first that is not whole.

    Before a large block takes the place of a tail, it is copied behind that. One of the two is
    whole at each moment, and counts.

    Args:
        file: The file.
        tail: What is at its end.
        end: Where the ordinary blocks end.
        size: Bytes of the file.
        last: Checksum of the last ordinary block.
    """
    found: list[Block] = []
    for copy in (tail, _tail_at(file, tail_start(end), size)):
        if copy is not None and copy.end == end:
            found = max(found, _tail_blocks(file, copy.start, size, last), key=len)
    return found


def _tail_blocks(file: BinaryIO, offset: int, size: int, last: int) -> list[Block]:
    found: list[Block] = []
    while offset < size:
        try:
            block = read_block(file, offset, size, last)
        except (FileCut, *MALFORMED):
            break
        if block.kind != AHEAD:
            break
        found.append(block)
        offset, last = block.end, block.checksum
    return found


def _ends_in_zeros(file: BinaryIO, offset: int, size: int) -> bool:
    """Return whether all is zero from somewhere inside the block at `offset` to the end.

    A file system that has noted the new size of a file, but not its contents, when the power goes
    gives zeros for what is missing. Of a tail it may have lost the beginning alone.
    """
    try:
        end = _read_frame(file, offset, size).end
    except ChecksumError:
        end = offset + HEADER.size
    start = tail_start(offset)
    if 0 < size - start <= GAP and zeros_from(file, start) < min(end, start):
        file.seek(start)
        rest = file.read(size - start)
        begun = HEADER.pack(BLOCK_MAGIC, 0, 0, 0, 0).startswith(rest.rstrip(b"\0")[:4])
        return begun or b'"kind":"ahead"' in rest
    return zeros_from(file, size) < end


def zeros_from(file: BinaryIO, size: int) -> int:
    """Return the byte from which a file of `size` bytes is all zero; its size if it is not."""
    end = size
    while end:
        begin = max(end - _PIECE, 0)
        file.seek(begin)
        rest = file.read(end - begin).rstrip(b"\0")
        if rest:
            return begin + len(rest)
        end = begin
    return 0


def _check_magic(file: BinaryIO, path: PathLike) -> None:
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        newer = magic[:-1] == MAGIC[:-1]
        reason = f"format version {magic[-1]} is not known" if newer else "not an ope_gym file"
        remedy = "update ope_gym" if newer else "check the path; nothing in it is readable"
        raise DamagedFileError(path, 0, reason, remedy)


def what_is_wrong(error: Exception) -> str:
    """Return the message of an error of `MALFORMED`, for people."""
    return (
        str(error) if type(error) in (ValueError, ChecksumError) else f"malformed block, {error!r}"
    )


def read_block(
    file: BinaryIO,
    offset: int,
    size: int,
    last: int | None = None,
    *,
    whole: int | None = None,
    verify: bool = True,
) -> Block:
    """Return the block at a byte of the file; ValueError says what is wrong with it.

    Args:
        file: The open file.
        offset: The byte.
        size: Bytes of the file.
        last: Checksum of the block before it, 0 if there is none; None if it is not known.
        whole: A payload of more bytes is checked, but not held in memory; None holds all.
        verify: Whether to compare the contents with their checksum.
    """
    frame = _read_frame(file, offset, size)
    crc, length, payload = zlib.crc32(frame.text), frame.end - frame.start, None
    if whole is None or length <= whole:
        payload = file.read(length)
        if len(payload) < length:
            raise FileCut(offset, size - offset)
        crc = zlib.crc32(payload, crc) if verify else crc
    elif verify:
        while length:
            piece = file.read(min(length, _PIECE))
            if not piece:
                raise FileCut(offset, size - offset)
            crc, length = zlib.crc32(piece, crc), length - len(piece)
    if verify and crc != frame.contents:
        raise ChecksumError("the contents of a block do not match their checksum")
    block = _parse(frame, offset, last, file, payload)
    if payload is not None:
        block.arrays  # noqa: B018, refuse damaged ones now, while it is known where they are
    return block


class _Frame(NamedTuple):
    """The JSON text of a block, where its payload lies, CRC of both, CRC of the header."""

    text: bytes
    start: int
    end: int
    contents: int
    checksum: int


def _read_frame(file: BinaryIO, offset: int, size: int) -> _Frame:
    file.seek(offset)
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise FileCut(offset, size - offset)
    magic, json_length, payload_length, contents, checksum = HEADER.unpack(head)
    if zlib.crc32(head[:-4]) != checksum or magic != BLOCK_MAGIC:
        raise ChecksumError("the header of a block does not match its checksum")
    start = offset + HEADER.size + json_length
    end = start + payload_length
    if end > size:  # before anything of that length is allocated
        raise FileCut(offset, size - offset)
    if json_length > MOST_JSON + ALIGNMENT:
        raise ValueError(f"the JSON of a block has {json_length:,} bytes, more than {MOST_JSON:,}")
    text = file.read(json_length)
    if len(text) < json_length:
        raise FileCut(offset, size - offset)
    return _Frame(text, start, end, contents, checksum)


def _parse(
    frame: _Frame, offset: int, last: int | None, file: BinaryIO, payload: bytes | None
) -> Block:
    if frame.start % ALIGNMENT:
        raise ValueError(f"the payload of a block is not at a multiple of {ALIGNMENT}")
    meta = _DECODER.decode(frame.text.decode())  # json.loads would guess the encoding of bytes
    if not isinstance(meta, dict):
        raise ValueError("the JSON of a block is not an object")
    kind, described = meta.pop("kind", None), meta.pop("arrays", None)
    if not isinstance(kind, str) or not isinstance(described, dict):
        raise ValueError(f"a block is of kind {kind!r} and has arrays {described!r}")
    # blocks of the first files did not name the one before them
    if meta.pop("after", last) != last and last is not None:
        raise ValueError("a block does not follow the one that it was written after")
    length = frame.end - frame.start
    entries = {name: _read_entry(name, entry, length) for name, entry in described.items()}
    if sum(map(_n_bytes, entries.values())) > length:  # each would become an array of its own
        raise ValueError("the arrays of a block lie in the same bytes")
    return Block(kind, meta, entries, offset, frame.start, frame.end, frame.checksum, file, payload)


def _n_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * int(np.dtype(entry.dtype).itemsize)


def _read_entry(name: str, entry: Any, length: int) -> Entry:
    """Return where an array lies; ValueError if a payload of this length cannot hold it."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "offset"} <= entry.keys():
        raise ValueError(f"array {name!r} is described by {entry!r}")
    dtype, shape, offset = entry["dtype"], entry["shape"], entry["offset"]
    if not isinstance(dtype, str) or dtype not in NUMERIC_DTYPES:
        raise ValueError(f"array {name!r} has the unknown dtype {dtype!r}")
    numbers = [*shape, offset] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"array {name!r} has the impossible shape {shape} or offset {offset}")
    if offset % ALIGNMENT or offset + math.prod(shape) * np.dtype(dtype).itemsize > length:
        raise ValueError(f"array {name!r} of shape {shape} does not fit into its block")
    return Entry(dtype, tuple(shape), offset)
