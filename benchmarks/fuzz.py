"""Change files of episodes at random, and load them: an error of ours or the same numbers.

    nice python benchmarks/fuzz.py --mutations 20000 --seed 1 --seconds 600

A third of the mutations changes bytes, a third rows through SQL, and a third rows with checksums
made right again. What loads after one of the first two kinds must have the numbers of the original,
to the last bit; forgeries may have others. Any exception but our own is a finding, and so are more
than 64 MiB of memory or 20 s for one file, and the death of the process that loads.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import sqlite3
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces as S

from ope_gym import batches
from ope_gym.data import database, stored
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schema import BY_EPISODE, BY_STEP
from ope_gym.data.trajectories import Trajectories, read_chunks
from ope_gym.files import DamagedFileError
from ope_gym.policies import LinearSigmoid, Uniform

_MOST_BYTES = 64 * 2**20
_MOST_SECONDS = 20
_TABLES = ("environment", "policies", "policy_arrays", "changes", "episodes", "chunks")
_TEXTS = ("", "0", "9999999999", "-", "[" * 300, '"', "null", "{}", "]}", "<f8", "|O")
_VALUES = (0, -1, 7, 2**31, 2**62, -(2**62), 0.5, 1e300, None, "x", b"\0")
_BATCH = 500  # mutations of one process
_HOSTILE = (
    "CREATE VIEW v AS SELECT * FROM episodes",
    "CREATE TRIGGER t AFTER UPDATE ON chunks BEGIN DELETE FROM episodes; END",
    "CREATE INDEX i ON episodes (length)",
    "DROP TABLE changes",
    "ALTER TABLE episodes RENAME COLUMN length TO long",
    "PRAGMA user_version = 2",
    "PRAGMA application_id = 7",
    "PRAGMA page_size = 512; VACUUM",
)


def originals(folder: Path) -> list[Path]:
    """Save files of several kinds."""
    kinds: list[Any] = [
        S.Discrete(5),
        S.Dict(a=S.Box(-9, 9, (3,)), b=S.Tuple([S.Discrete(4), S.MultiBinary(2)])),
        S.Tuple([S.Text(5), S.Sequence(S.Discrete(3))]),
        S.Box(0, 255, (20, 20), np.uint8),
    ]
    paths = []
    for i, space in enumerate(kinds):
        space.seed(i)
        buffer = TrajectoryBuffer(space, S.Discrete(2), horizon=9)
        ids = [buffer.add_policy(p) for p in (Uniform(2), LinearSigmoid(np.ones(4)), Uniform(2))]
        rng, clock = np.random.default_rng(i), 0
        for episode in range(12):
            n = int(rng.integers(1, 9))
            k = ids[episode % 2]
            buffer.change_policy(k, clock, mid_episode=episode == 5)
            seen = stored.spaces.stack(space, [space.sample() for _ in range(n)])
            buffer.append(
                seen,
                rng.integers(2, size=n),
                rng.normal(size=n),
                np.log(rng.random(n)),
                k,
                terminated=bool(episode % 3),
                truncated=not episode % 3,
                held_out=episode % 4 == 0,
                start_clock=clock,
            )
            clock += n
        paths.append(folder / f"{i}.ope")
        buffer.save(paths[-1])
    return paths


def digest(data: Trajectories) -> str:
    """Return a digest of all columns, policies, schedules and spaces."""
    described = (data.policies, data.schedules, data.horizon, data.observation_space)
    found = hashlib.sha256(repr(described).encode())
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        for leaf in batches.leaves(getattr(data, name)):
            found.update(leaf.tobytes() if leaf.dtype != object else repr(leaf.tolist()).encode())
    return found.hexdigest()


# Mutations -----------------------------------------------------------------------------------


def change_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 4))):
        at, size = rng.randrange(len(data)), rng.choice((1, 2, 8, 100, 4096))
        kind = rng.randrange(6)
        if kind < 2:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + size] = rng.randbytes(size)
        elif kind == 3:
            data[at : at + size] = bytes(size)
        elif kind == 4:
            other = rng.randrange(len(data))
            data[at : at + size] = data[other : other + size]
        elif len(data) > 5000:
            del data[at if rng.random() < 0.5 else len(data) - size :]
    path.write_bytes(data)


def value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, bytes) and rng.random() < 0.7:
        data = bytearray(old or b"x")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data)) + 1))])
    if isinstance(old, str) and rng.random() < 0.7:
        at = rng.randrange(len(old) + 1)
        more = rng.choice(_TEXTS)
        return old[:at] + more + old[at + rng.randrange(3) :]
    near = (old + rng.choice((-1, 1)),) if isinstance(old, int | float) else ()
    return rng.choice((*near, *near, *_VALUES))


def change_rows(path: Path, rng: random.Random, *, seal: bool) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.Error), db:
        if not seal and rng.random() < 0.05:
            db.executescript(rng.choice(_HOSTILE))
        for _ in range(rng.choice((1, 1, 1, 3))):
            table = rng.choice(_TABLES)
            rows = db.execute(f"SELECT * FROM {table}").fetchall()
            names = [x[1] for x in db.execute(f"PRAGMA table_info({table})")]
            if not rows:
                continue
            row, i = rng.choice(rows), rng.randrange(len(names))
            here = " AND ".join(f"{name} IS ?" for name in names)
            if rng.random() < 0.8:
                change = f"UPDATE {table} SET {names[i]} = ? WHERE {here}"
                db.execute(change, (value(rng, row[i]), *row))
            elif rng.random() < 0.5:
                db.execute(f"DELETE FROM {table} WHERE {here}", row)
            else:
                new = [value(rng, x) if j == i or j == 0 else x for j, x in enumerate(row)]
                db.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(new))})", new)
        if seal:
            with contextlib.suppress(Exception):
                reseal(db)


def reseal(db: sqlite3.Connection) -> None:
    """Make all checksums right."""
    crc = 0
    for k, kind in db.execute("SELECT id, kind FROM policies ORDER BY id").fetchall():
        arrays = "SELECT name, npy FROM policy_arrays WHERE policy = ? ORDER BY name"
        crc = database.crc_of_policy(k, kind, db.execute(arrays, (k,)).fetchall(), crc)
    changes = db.execute("SELECT id, loop, clock, policy, mid_episode FROM changes ORDER BY id")
    table = np.array(changes.fetchall(), dtype=np.int64)
    row = db.execute("SELECT * FROM environment").fetchone()
    sums = (database.crc_of_text(*row[:4]), crc, database.crc_of_numbers(table))
    db.execute("UPDATE environment SET crc = ?, policies_crc = ?, changes_crc = ?", sums)
    for found in db.execute(database.CHUNK).fetchall():
        chunk = database.ChunkRow._make(found)
        stop = chunk.first_episode + chunk.episodes
        roster = database.read_roster(db, chunk.first_episode, stop)
        db.execute(
            "UPDATE chunks SET crc = ?, episodes_crc = ? WHERE first_step = ?",
            (chunk.checksum(), database.crc_of_numbers(roster), chunk.first_step),
        )


# Loading -------------------------------------------------------------------------------------


@contextlib.contextmanager
def limits() -> Iterator[list[int]]:
    """Give the bytes that were needed at most; raise after too long."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, grown = resident("VmRSS"), [0]
    signal.alarm(_MOST_SECONDS)
    try:
        yield grown
    finally:
        signal.alarm(0)
        grown[0] = resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(name))


def outcome(path: Path, kind: str, expected: str) -> str:
    """Load a file, and say what came of it; findings begin with FOUND."""
    with warnings.catch_warnings(), limits() as grown:
        warnings.simplefilter("ignore")
        try:
            found, way = expected, random.randrange(3)
            if way == 0:
                found = digest(Trajectories.load(path))
            elif way == 1:
                Trajectories.load(path, recover=True)  # as much as there is
            else:
                list(read_chunks(stored.read_stored(path), 5))
            said = "same" if found == expected else "other" if kind == "sealed" else "FOUND other"
        except (DamagedFileError, OSError):
            said = "error"
        except BaseException as error:
            said = f"FOUND {traceback.format_exception_only(error)[-1][:200]!r}"
    return said if grown[0] <= _MOST_BYTES else f"FOUND {grown[0] / 2**20:.0f} MiB"


def run(folder: Path, paths: list[Path], digests: list[str], first: int, seed: int) -> Counter[str]:
    """Try some mutations in a process of their own."""
    results, report = Counter[str](), folder / "report"
    report.write_text("", encoding="utf-8")
    child = os.fork()
    if not child:
        with report.open("a", encoding="utf-8") as file:
            for number in range(first, first + _BATCH):
                rng = random.Random(seed * 10**9 + number)
                i, kind = rng.randrange(len(paths)), ("bytes", "rows", "sealed")[number % 3]
                path = folder / "mutant"
                path.write_bytes(paths[i].read_bytes())
                if kind == "bytes":
                    change_bytes(path, rng)
                else:
                    change_rows(path, rng, seal=kind == "sealed")
                file.write(f"{kind}: {outcome(path, kind, digests[i])}\n")
                file.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    results.update(report.read_text(encoding="utf-8").splitlines())
    if status:
        results[f"FOUND process ended with {os.waitstatus_to_exitcode(status)} after {first}"] += 1
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="stop after so long")
    arguments = parser.parse_args()
    results, end = Counter[str](), time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = originals(folder)
        digests = [digest(Trajectories.load(path)) for path in paths]
        for first in range(0, arguments.mutations, _BATCH):
            results += run(folder, paths, digests, first, arguments.seed)
            if time.monotonic() > end:
                break
    for line, count in sorted(results.items()):
        print(f"{line:<60}{count:8,}")
    print(f"{sum(results.values()):,} mutations")


if __name__ == "__main__":
    main()
