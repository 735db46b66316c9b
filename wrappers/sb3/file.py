"""The file of a training run, which an interrupted run leaves behind, too."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from ope_gym.data.blocks import PathLike
from ope_gym.data.trajectories import Trajectories

_GROWTH = 1.25  # by which the record grows before it is written again: linear work in all


class RecordFile:
    """Writes everything recorded now and then, at the end, and when the process ends before that.

    Args:
        path: A new file; refused now, not after hours of training, if it cannot be written.
        record: Gives everything recorded so far.
    """

    def __init__(self, path: PathLike, record: Callable[[], Trajectories]) -> None:
        name = os.fspath(path)
        folder = os.path.dirname(os.path.abspath(name))
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"path={name!r}: its folder does not exist, make it first")
        if os.path.exists(name):
            raise FileExistsError(
                f"path={name!r} exists already: remove it, or choose another name"
            )
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"path={name!r}: its folder is not writable, choose another one")
        self._path = path
        self._record = record
        self._saved = 0  # steps

    def open(self) -> None:
        """From now on an error or Ctrl-C that ends the process does not lose the record."""
        atexit.unregister(self._save)  # of a run that broke off
        atexit.register(self._save)

    def grow(self, steps: int) -> None:
        """Write if the record, of so many steps, has grown enough."""
        if steps >= _GROWTH * self._saved:
            self._save()
            self._saved = steps

    def close(self, steps: int) -> None:
        """The record is complete, for now."""
        atexit.unregister(self._save)
        self._save()
        self._saved = steps

    def _save(self) -> None:
        self._record().save(self._path)
