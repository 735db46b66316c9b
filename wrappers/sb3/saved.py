"""Files of a run: its best model, and evaluations.npz as EvalCallback writes it, and more.

EvalCallback's keys are `timesteps` (n,), `results` and `ep_lengths` (n, episodes), and `successes`
where the environment tells. `results` are the returns of the fresh episodes; without any they are
the values, one a row, and `ep_lengths` are unknown (NaN). Ours are `value`, `low`, `high` and
`standard_error` (n,), and the same of the settled values with their `settled_timesteps`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.online import FreeEstimate
from wrappers.sb3.fresh import Played

__all__ = ["SavedModels", "save_evaluations"]

_COLUMNS = ("value", "low", "high", "standard_error")


def save_evaluations(
    folder: str,
    evaluations: Sequence[FreeEstimate],
    settled: Sequence[FreeEstimate],
    played: Sequence[Played],
) -> None:
    """Write evaluations.npz anew; a process that is killed leaves the old one or the new one.

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
    path = os.path.join(folder, "evaluations.npz")
    half = f"{path}.part.npz"
    np.savez(half, **columns)
    os.replace(half, path)


def _padded(rows: list[list[bool]]) -> NDArray[Any]:
    """Return rows of unequal length as a table; what is missing is NaN."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return np.array(rows)
    return np.array([[*map(float, row), *[np.nan] * (width - len(row))] for row in rows])


class SavedModels:
    """Keeps the best model in a file, and those in memory that may still turn out to be the best.

    Args:
        folder: where `best_model.zip` goes; None to keep nothing.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else os.fspath(folder)
        self._held: dict[int, bytes] = {}  # by timesteps

    @property
    def path(self) -> str | None:
        """The file of the best model."""
        return None if self._folder is None else os.path.join(self._folder, "best_model.zip")

    def make_folder(self) -> None:
        """Make the folder if it is not there."""
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)

    def keep(self, model: Any, timesteps: int, *, best: bool, pending: bool) -> None:
        """Keep a model as it is now.

        Args:
            model: any algorithm.
            timesteps: of the training.
            best: whether it is the best so far, and goes to the file.
            pending: whether more may be known of it later.
        """
        if self._folder is None or not (best or pending):
            return
        data = io.BytesIO()
        model.save(data)
        if best:
            self._write(data.getvalue())
        if pending:
            self._held[timesteps] = data.getvalue()

    def promote(self, timesteps: int) -> None:
        """Write a model that has turned out to be the best."""
        if timesteps in self._held:
            self._write(self._held[timesteps])

    def hold(self, timesteps: set[int]) -> None:
        """Drop all models but these."""
        self._held = {t: data for t, data in self._held.items() if t in timesteps}

    def _write(self, data: bytes) -> None:
        assert self.path is not None
        half = f"{self.path}.part"
        with open(half, "wb") as file:
            file.write(data)
        os.replace(half, self.path)
