"""Change Parquet, CSV and Minari data at random, and load them: an error, or what is in them.

    nice python -m benchmarks.fuzz_tables --tries 2000 --seed 1

Parquet files of ours have checksums: changed bytes must be an error, or change nothing. Changed
headers, columns and cells must be an error of ours, or be read. Findings are other exceptions,
other numbers after changed bytes, and what `ope-gym info` prints other than lines of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz import change_bytes, digest, originals
from ope_gym import minari
from ope_gym.cli import main as command
from ope_gym.data.tables.header import sealed
from ope_gym.data.trajectories import Trajectories

_CELLS = ("", "nan", "inf", "1e999", "-1", "0.5", "x", "9" * 30, "\x1b[2J", '"', "\0", "٣", "True")
_VALUES = (None, 0, -1, 2**62, 0.5, 1e308, "", "x" * 300, [], {}, [[[]]], "\x1b[2J", True, "|O")
_OURS = (ValueError, TypeError, OSError, ImportError)
_NAME = "fuzz/box-v0"


def mutated(rng: random.Random, value: Any) -> Any:
    """Return JSON of another content at one place."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        rest = {k: x for k, x in value.items() if k != name}
        return rest if rng.random() < 0.15 else rest | {name: mutated(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(rng, value[i]), *value[i + 1 :]]
    return rng.choice(_VALUES)


def change_csv(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    for _ in range(rng.choice((1, 1, 2, 5))):
        row = rng.randrange(len(lines))
        cells = lines[row].split(",")
        kind = rng.randrange(5)
        if kind < 2:
            cells[rng.randrange(len(cells))] = rng.choice(_CELLS)
        elif kind == 2:
            cells = cells[:-1] if rng.random() < 0.5 else [*cells, "7"]
        elif kind == 3:
            rng.shuffle(cells)
        lines[row : row + 1] = [",".join(cells)] * (2 if kind == 4 else 1)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "cells"


def change_parquet(path: Path, rng: random.Random) -> str:
    if rng.random() < 0.4:
        change_bytes(path, rng)
        return "bytes"
    table = pq.read_table(path)
    if rng.random() < 0.6:
        facts = mutated(rng, json.loads(table.schema.metadata[b"ope_gym"]))
        if isinstance(facts, dict) and rng.random() < 0.8:
            with contextlib.suppress(ValueError):
                facts = sealed(facts)
        pq.write_table(table.replace_schema_metadata({"ope_gym": json.dumps(facts)}), path)
        return "header"
    i = rng.randrange(table.num_columns)
    cells, kind = table.column(i).to_pylist(), rng.randrange(4)
    with contextlib.suppress(pa.ArrowException):
        if kind == 0:
            table = table.remove_column(i)
        elif kind == 1:
            names = [rng.choice((x, x, "\x1b[31mname", "")) for x in table.column_names]
            table = table.rename_columns(names)
        else:
            new = [None, -1, 2**31, float("nan"), 0.5, "x"]
            cells[rng.randrange(len(cells))] = rng.choice(new)
            table = table.set_column(i, table.column_names[i], pa.array(cells))
    pq.write_table(table, path)
    return "columns"


def change_minari(folder: Path, rng: random.Random) -> str:
    import h5py

    path = rng.choice([x for x in folder.rglob("*") if x.is_file() and x.stat().st_size])
    if path.suffix == ".json" and rng.random() < 0.6:
        facts = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(mutated(rng, facts)), encoding="utf-8")
    elif path.suffix == ".hdf5" and rng.random() < 0.6:
        with h5py.File(path, "r+") as file:
            names: list[str] = []
            file.visit(names.append)
            name = rng.choice(names)
            node = file[name]
            values = node[...] if isinstance(node, h5py.Dataset) and node.ndim else np.zeros(0)
            if values.size and rng.random() < 0.7:
                bad = (np.nan, np.inf, 1e300) if values.dtype.kind == "f" else (99, 3)
                values.flat[rng.randrange(values.size)] = rng.choice(bad)
                node[...] = values
            else:
                del file[name]
    else:
        change_bytes(path, rng)
    return "parts"


def printed(path: Path) -> Iterator[str]:
    """Yield what is wrong with the words of `ope-gym info`."""
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        code = command(["info", str(path)])
    if code not in (0, 2) or "\x1b" in words.getvalue() or "-X dev" in words.getvalue():
        yield f"info ends with {code}: {words.getvalue()[:200]!r}"


def outcome(load: Callable[[], Trajectories], original: str, change: str) -> str:
    try:
        same = digest(load()) == original
    except _OURS:
        return "error"
    except BaseException as error:
        return f"FOUND {type(error).__name__}: {str(error)[:150]}"
    return "same" if same else "FOUND other numbers" if change == "bytes" else "read"


def csv_of(data: Trajectories, path: Path) -> None:
    """Write steps of whole-number observations as a log of others."""
    columns = {
        "episode": data.episode_ids,
        "step": data.steps,
        "observation": data.observations,
        "action": data.actions,
        "reward": data.rewards,
    }
    rows = [
        ",".join(map(repr, row))
        for row in zip(*(x.tolist() for x in columns.values()), strict=True)
    ]
    path.write_text("\n".join([",".join(columns), *rows]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results, findings = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = [Trajectories.load(path) for path in originals(folder)]
        whole[0].to_parquet(folder / "whole.parquet")
        csv_of(whole[0], folder / "whole.csv")
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "whole.minari")
        minari.to_minari(whole[3], _NAME)
        for number in range(arguments.tries):
            rng = random.Random(arguments.seed * 10**9 + number)
            kind = ("parquet", "csv", "minari")[number % 3]
            path = folder / f"forged.{kind}"
            if kind == "minari":
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(folder / "whole.minari", path)
                os.environ["MINARI_DATASETS_PATH"] = str(path)
                change, original = change_minari(path, rng), ""
                result = outcome(lambda: minari.from_minari(_NAME), original, change)
            else:
                shutil.copy(folder / f"whole.{kind}", path)
                change = (change_csv if kind == "csv" else change_parquet)(path, rng)
                original = digest(Trajectories.from_frame(folder / f"whole.{kind}"))
                result = outcome(lambda p=path: Trajectories.from_frame(p), original, change)
                if number % 5 == 0:
                    findings += printed(path)
            results[f"{kind}, {change}: {result}"] += 1
    for line, count in sorted(results.items()):
        print(f"{line:<60}{count:8,}")
    print(*findings, f"{arguments.tries:,} tries, {len(findings)} findings of info", sep="\n")


if __name__ == "__main__":
    main()
