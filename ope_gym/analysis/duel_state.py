"""The state of a duel in a file: its terms, and a row for each episode, in a SQLite database.

Saving adds the rows of new episodes in one transaction, which costs the same however many there
are. What was saved is on the disk: neither a killed process nor a full disk loses any of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ope_gym.data.database import connect, explained
from ope_gym.files import in_place_of, require_regular

_SCHEMA = """
CREATE TABLE duel (terms TEXT NOT NULL); -- JSON: the rules, and digests of the policies
CREATE TABLE episodes (
    number INTEGER PRIMARY KEY,          -- from 0, in the order in which they were added
    round INTEGER NOT NULL,
    policy TEXT NOT NULL,                -- a or b
    kind TEXT NOT NULL,                  -- how it was added: trajectories or returns
    total REAL NOT NULL,                 -- its return
    log_ratio REAL NOT NULL              -- log p_a - log p_b of its actions
);
"""
_INSERT = "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?)"


class Row(NamedTuple):
    """An episode in the file, beside its number."""

    round: int
    policy: str
    kind: str
    total: float
    log_ratio: float


def holds_state(path: str | os.PathLike[str]) -> bool:
    """Return whether there is something to go on with; an empty file is a new one."""
    require_regular(path)
    return os.path.isdir(path) or (os.path.exists(path) and os.path.getsize(path) > 0)


def create(path: str | Path, terms: dict[str, Any], episodes: Sequence[Row]) -> None:
    """Write a new file, which takes the place of an old one as a whole."""
    with (
        in_place_of(path) as temporary,
        explained(str(path)),
        contextlib.closing(connect(str(temporary), "mode=rwc")) as db,
    ):
        db.executescript(_SCHEMA)
        db.execute("BEGIN")
        db.execute("INSERT INTO duel VALUES (?)", [json.dumps(terms)])
        db.executemany(_INSERT, ((i, *row) for i, row in enumerate(episodes)))
        db.execute("COMMIT")


def append(path: str | Path, first: int, episodes: Sequence[Row]) -> None:
    """Add episodes, numbered from `first` on."""
    with explained(str(path)), contextlib.closing(connect(str(path), "mode=rw")) as db:
        db.execute("BEGIN IMMEDIATE")
        (last,) = db.execute("SELECT coalesce(max(number), -1) FROM episodes").fetchone()
        if last + 1 != first:
            raise RuntimeError(
                f"{path} holds {last + 1} episodes where {first} are expected: another duel goes "
                "on with it; give each a file of its own"
            )
        db.executemany(_INSERT, ((first + i, *row) for i, row in enumerate(episodes)))
        db.execute("COMMIT")


def read(path: str | Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the terms and the episodes of a file; raise ValueError if it holds no duel."""
    try:
        with explained(str(path)), contextlib.closing(connect(str(path), "mode=rw")) as db:
            (terms,) = db.execute("SELECT terms FROM duel").fetchone()
            columns = ", ".join(Row._fields)
            rows = db.execute(f"SELECT {columns} FROM episodes ORDER BY number").fetchall()
            terms = {name: dict(json.loads(terms)[name]) for name in ("rules", "policies")}
            return terms, [Row(k, a, kind, float(x), float(y)) for k, a, kind, x, y in rows]
    except (ValueError, TypeError, LookupError) as error:
        raise foreign(path) from error


def foreign(path: str | Path) -> ValueError:
    """Return the error for a file that holds no duel."""
    return ValueError(f"{path} is not the state of a duel: give another file, or remove it")
