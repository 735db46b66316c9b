"""Files of a run: its best model, and evaluations.npz as EvalCallback writes it, and more.

Each is written as a whole, and one that cannot be written, as on a full disk, ends no training: a
warning says so once, and the next evaluation tries again.

EvalCallback's keys are `timesteps` (n,), `results` and `ep_lengths` (n, episodes), and `successes`
where the environment tells. `results` are the returns of the fresh episodes; without any they are
the values, one a row, and `ep_lengths` are unknown (NaN). Ours are `value`, `low`, `high` and
`standard_error` (n,), and the same of the settled values with their `settled_timesteps`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from ope_gym.files import in_place_of, write_file
from ope_gym.online import FreeEstimate
from wrappers.sb3.episodes import Played

__all__ = ["Patience", "SavedModels", "make_folder", "save_evaluations"]

_Model: TypeAlias = tuple[bytes, bytes | None]
"""Bytes of a saved model, and of the VecNormalize that it was trained with, if any."""

_COLUMNS = ("value", "low", "high", "standard_error")


class Patience:
    """Warns of what cannot be written, once until it can be, in place of ending the training."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextlib.contextmanager
    def writing(self, what: str, *, fatal: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        """Warn of errors of the file system in this block, but for the fatal ones."""
        try:
            yield
        except fatal:
            raise
        except OSError as error:
            if what not in self._failing:
                self._failing.add(what)
                warnings.warn(
                    f"{what} cannot be written now: {error}. The training goes on, and the next "
                    "evaluation tries again",
                    UserWarning,
                    stacklevel=5,
                )
        else:
            self._failing.discard(what)


def make_folder(folder: str | None, patience: Patience) -> None:
    """Make a folder if it is not there; one that can never be made is an error."""
    if folder is not None:
        mistakes = (FileExistsError, NotADirectoryError, PermissionError)
        with patience.writing(folder, fatal=mistakes):
            os.makedirs(folder, exist_ok=True)


def save_evaluations(
    folder: str,
    evaluations: Sequence[FreeEstimate],
    settled: Sequence[FreeEstimate],
    played: Sequence[Played],
) -> None:
    """Write evaluations.npz anew.

    Args:
        folder: where it goes.
        evaluations: of the run.
        settled: values, later.
        played: the fresh episodes of each evaluation, or none at all.
    """
    columns: dict[str, Any] = {"timesteps": [e.timesteps for e in evaluations]}
    if played:
        columns["results"] = [p.returns for p in played]
        columns["ep_lengths"] = [p.lengths for p in played]
        if any(p.successes for p in played):
            columns["successes"] = _padded([p.successes for p in played])
    else:
        columns["results"] = [[e.value] for e in evaluations]
        columns["ep_lengths"] = [[np.nan] for _ in evaluations]
    for name in _COLUMNS:
        columns[name] = [getattr(e, name) for e in evaluations]
        columns[f"settled_{name}"] = [getattr(e, name) for e in settled]
    columns["settled_timesteps"] = [e.timesteps for e in settled]
    content = io.BytesIO()
    np.savez(content, **columns)
    os.makedirs(folder, exist_ok=True)
    write_file(os.path.join(folder, "evaluations.npz"), content.getvalue())


def _padded(rows: list[list[bool]]) -> NDArray[Any]:
    """Return rows of unequal length as a table; what is missing is NaN."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return np.array(rows)
    return np.array([[*map(float, row), *[np.nan] * (width - len(row))] for row in rows])


class SavedModels:
    """Keeps the best model in a file, and those in memory that may still turn out to be the best.

    The statistics of a VecNormalize are part of a policy: they go to a file beside the model, as
    `VecNormalize.load` reads it.

    Args:
        folder: Where `best_model.zip` goes; None to keep nothing.
        patience: Patience with a disk that is full.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, patience: Patience) -> None:
        self.folder = None if folder is None else os.fspath(folder)
        self._patience = patience
        self._held: dict[int, _Model] = {}  # by timesteps
        self._due: _Model | None = None  # the best, if its file has not been written yet
        stem = os.path.join(self.folder or "", "best_model")
        self._path, self._statistics = f"{stem}.zip", f"{stem}_vecnormalize.pkl"
        self._beside = False  # whether the statistics of a VecNormalize are beside the model

    @property
    def where(self) -> str:
        """Where the best model is, in a sentence; "" if it is not kept."""
        if self.folder is None:
            return ""
        if self._due is not None:
            return f"It could not be written to {self._path}."
        beside = f", its VecNormalize in {self._statistics}" if self._beside else ""
        return f"It is in {self._path}{beside}."

    def keep(self, model: Any, timesteps: int) -> None:
        """Keep a model as it is now."""
        if self.folder is not None:
            content, env = io.BytesIO(), model.get_vec_normalize_env()
            model.save(content)
            statistics = None if env is None else cloudpickle.dumps(env)
            self._held[timesteps] = content.getvalue(), statistics

    def promote(self, timesteps: int | None) -> None:
        """Let a model that was kept be the best."""
        self._due = self._held.get(timesteps, self._due) if timesteps is not None else None

    def begin_again(self, best: int | None) -> None:
        """Keep only the best of those before, at a time of -1."""
        self._held = {-1: self._held[best]} if best is not None and best in self._held else {}

    def write(self, held: set[int]) -> None:
        """Write the best model if its file is an older one, and drop all models but those held."""
        self._held = {t: model for t, model in self._held.items() if t in held}
        if self.folder is None or self._due is None:
            return
        model, statistics = self._due
        with self._patience.writing(self._path):
            os.makedirs(self.folder, exist_ok=True)
            with _alone_in(self.folder), in_place_of(self._path) as temporary:
                temporary.write_bytes(model)
                if statistics is not None:
                    write_file(self._statistics, statistics)
                elif os.path.exists(self._statistics):  # that of an earlier run would mislead
                    os.unlink(self._statistics)
            self._beside, self._due = statistics is not None, None


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Keep other trainings from replacing files of a folder, so that pairs stay together."""
    if sys.platform == "win32":  # no locks of folders there
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
