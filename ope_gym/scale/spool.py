"""The weights of tasks in files of a folder, for the pass that needs them again."""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ope_gym.data.blocks import PathLike
from ope_gym.estimators.reductions import Weighted


@contextmanager
def scratch_folder(scratch: PathLike | None) -> Iterator[Path | None]:
    """Make a new folder in `scratch` for one evaluation, and remove it after the block.

    Enter it before the workers that use it start: they have then ended when it is removed; those
    of a Ray cluster may take a little longer.
    """
    if scratch is None:
        yield None
        return
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="ope_gym-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise OSError(
            f"scratch is {os.fspath(scratch)!r}: {error.strerror}; give a folder that can be "
            "written"
        ) from error
    with folder as name:
        yield Path(name).absolute()


class Spool:
    """The weighted chunks of one task; without the folder they are dropped.

    A file is there whole or not at all, and a worker that finds none computes the weights again.
    So workers may lack the folder, or be killed while they write.

    Args:
        folder: on a disk with room for all, or None.
        task: number of the task.
    """

    def __init__(self, folder: Path | None, task: int) -> None:
        self._path = None if folder is None else folder / f"{task}.weights"
        self._file: BinaryIO | None = None

    def __enter__(self) -> Spool:
        """Begin to write; a worker on another machine may have no such folder, and must not."""
        if self._path is not None and self._path.parent.is_dir():
            self._file = self._partial().open("wb")
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._file is None or self._path is None:
            return
        with self._writing():
            self._file.close()
            if kind is None:
                os.replace(self._partial(), self._path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise errors that name the folder; numpy gives those of a full disk no number."""
        try:
            yield
        except OSError as error:
            assert self._path is not None
            reason = error.strerror or str(error)
            if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
                reason = "the disk is full"
            raise OSError(
                f"scratch is {os.fspath(self._path.parent.parent)!r}: {reason}; give a folder on a "
                "disk with room for 8 bytes a step for each weighting scheme and for the reward, "
                "about 100 more with a q model, or none: the weights are then computed twice"
            ) from error

    def _partial(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{platform.node()}.{os.getpid()}")

    def add(self, chunk: Weighted) -> None:
        """Append a chunk."""
        if self._file is None:
            return
        past = (None, None) if chunk.past is None else chunk.past
        optional = {
            "residuals": chunk.residuals,
            "start": chunk.start,
            "direct": chunk.direct,
            "unit": np.array(chunk.unit),
            "visits": chunk.visits,
            "past actions": past[0],
            "past": past[1],
            "step ratios": chunk.step_ratios,
        }
        columns = {name: array for name, array in optional.items() if array is not None}
        columns["rewards"] = chunk.rewards
        columns |= {f"log {scheme}": log_w for scheme, log_w in chunk.log_weights.items()}
        with self._writing():
            for array in (np.array(list(columns)), np.array(chunk.first), chunk.offsets):
                np.save(self._file, array)
            for array in columns.values():
                np.save(self._file, array)

    def chunks(self) -> Iterator[Weighted] | None:
        """Return all chunks, in order; None if they are not here."""
        if self._path is None or not self._path.exists():
            return None
        return _chunks(self._path)


def _chunks(path: Path) -> Iterator[Weighted]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while file.tell() < size:
            names, first, offsets = _read(file), int(_read(file)), _read(file)
            columns = {str(name): _read(file) for name in names}
            log_w = {name[4:]: x for name, x in columns.items() if name.startswith("log ")}
            yield Weighted(
                offsets,
                columns["rewards"],
                log_w,
                residuals=columns.get("residuals"),
                start=columns.get("start"),
                direct=columns.get("direct"),
                visits=columns.get("visits"),
                past=(columns["past actions"], columns["past"]) if "past" in columns else None,
                step_ratios=columns.get("step ratios"),
                unit=float(columns["unit"]),
                first=first,
            )


def _read(file: BinaryIO) -> NDArray[Any]:
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise OSError(f"{file.name} in the folder `scratch` was cut short") from error
