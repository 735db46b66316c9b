"""Columns that grow in place, so that a view of all episodes costs as much as the new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data.schema import BY_EPISODE, BY_STEP, C, freeze, join

DERIVED = ("lengths", "first_policies")  # follow from the columns, and are asked for often


class GrowingColumns(Generic[C]):
    """Episodes with room behind them for those that come.

    Rows are added and never changed, so that columns of earlier days share their memory with those
    of today. Where the room does not suffice, all rows move to twice the room: each is copied about
    twice in its life.

    Args:
        first: No episodes; has the spaces.

    Attributes:
        all: All episodes so far. Whoever adds some sets it to what `joined` returned: in one
            statement with what else depends on it, so that no interrupt comes between.
    """

    def __init__(self, first: C) -> None:
        self.all = first
        self._rooms: dict[tuple[Any, ...], NDArray[Any]] = {}  # the arrays behind the columns

    def joined(self, parts: Sequence[C]) -> C:
        """Return what `all` is to be with more episodes, of the same spaces; read-only."""
        if not len(self.all):  # not copied before there are more
            return join([self.all, *parts])
        new = join(parts)
        offsets = new.offsets[1:] + self.all.offsets[-1]
        changed = {"offsets": self._longer(("offsets",), self.all.offsets, offsets)} | {
            name: self._longer((name,), getattr(self.all, name), getattr(new, name))
            for name in (*BY_STEP, *BY_EPISODE)
        }
        found = freeze(dataclasses.replace(self.all, **changed))
        for name in DERIVED:
            vars(found)[name] = self._longer((name,), getattr(self.all, name), getattr(new, name))
            vars(found)[name].setflags(write=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave the room out: a copy has its own."""
        return {"all": self.all, "_rooms": {}}

    def _longer(self, place: tuple[Any, ...], old: Tree, new: Tree) -> Tree:
        """Return a batch with the rows of both."""
        if isinstance(old, tuple):
            return tuple(self._longer((*place, i), x, new[i]) for i, x in enumerate(old))
        if isinstance(old, dict):
            return {key: self._longer((*place, key), x, new[key]) for key, x in old.items()}
        n, dtype, room = len(old) + len(new), np.promote_types(old.dtype, new.dtype), None
        if old.shape[1:] == new.shape[1:]:
            room = self._rooms.get(place)
        if room is None or len(room) < n or room.dtype != dtype:
            room = np.empty((2 * n, *old.shape[1:]), dtype)
            np.concatenate([old, new], out=room[:n])  # raises if their rows differ in shape
            self._rooms[place] = room
        else:
            room[len(old) : n] = new
        return room[:n]
