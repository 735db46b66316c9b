"""Files that several processes read: each must find the file that the first one saw."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ope_gym.data.blocks import PathLike, require_regular, settled_size

_ENDS = 1 << 16  # bytes at either end of a file that tell it from others


class Mark(NamedTuple):
    """Tell a file from others by its size and a digest of both its ends."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class SeenFile:
    """Remember a file as one process saw it, so that workers can tell if they find another.

    Args:
        name: The path as it was given, for messages.
        path: The absolute path: workers may have another working directory.
        node: The machine where it was seen.
        mark: Its mark, None if it cannot be read there; workers may still find it.
    """

    name: str
    path: str
    node: str
    mark: Mark | None

    @classmethod
    def of(cls, path: PathLike) -> SeenFile:
        """Return the file as this process sees it."""
        found = cls.unread(path)
        require_regular(path)
        with suppress(OSError), open(found.path, "rb") as file:
            found = dataclasses.replace(found, mark=mark_of(file))
        return found

    @classmethod
    def unread(cls, path: PathLike) -> SeenFile:
        """Return a file at which nobody has looked yet."""
        return cls(os.fspath(path), os.path.abspath(path), platform.node(), None)

    def marked(self) -> SeenFile:
        """Return the file with its mark, which this process takes if it is the first to see it."""
        if self.mark is not None:
            return self
        with self.open() as file:
            return dataclasses.replace(self, mark=mark_of(file), node=platform.node())

    def open(self) -> BinaryIO:
        """Open the file, or raise if it is not the one that was seen; it may have grown."""
        here = platform.node()
        require_regular(self.path)
        try:
            file = open(self.path, "rb")  # noqa: SIM115, the caller closes it
        except OSError as error:
            words = error.strerror or str(error)
            if self.mark is not None or here != self.node:
                words += f" on {here} at {self.path}; all nodes need the file at the same path"
            raise OSError(error.errno, words, self.name) from error
        if self.mark is not None and mark_of(file, self.mark.size) != self.mark:
            file.close()
            raise ValueError(
                f"{self.name}: on {here} {self.path} is another file than the one that {self.node} "
                "saw at first; all nodes need the same files, which must not change meanwhile"
            )
        return file


def mark_of(file: BinaryIO, size: int | None = None) -> Mark:
    """Return the mark of a file, or of its first `size` bytes; the file is then at its start."""
    size = settled_size(file) if size is None else size
    digest = hashlib.blake2b(file.read(min(size, _ENDS)), digest_size=16)
    file.seek(max(0, size - _ENDS))
    digest.update(file.read(min(size, _ENDS)))
    file.seek(0)
    return Mark(size, digest.digest())
