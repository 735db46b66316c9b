"""Keep finished runs in files START-STOP.npz, so that a stopped study can go on."""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from studies.harness.seeds import Span
from studies.harness.study import Runs

_DAMAGE = (ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile)


def read_chunks(folder: Path, runs: int) -> tuple[dict[Span, Runs], int]:
    """Return finished chunks, without overlaps and up to run `runs`, and count damaged files."""
    kept: dict[Span, Runs] = {}
    reached = damaged = 0
    for path in sorted(folder.glob("*.npz")):
        named = re.fullmatch(r"(\d+)-(\d+)", path.stem)
        if not named:  # another program's file
            continue
        start, stop = int(named[1]), int(named[2])
        if start < reached or start >= runs:
            continue
        data = _read(path, stop - start)
        if data is None:
            damaged += 1
            continue
        reached = min(stop, runs)
        kept[start, reached] = {name: array[: reached - start] for name, array in data.items()}
    return kept, damaged


def _read(path: Path, runs: int) -> Runs | None:
    """Return the arrays of a file, or None if it is damaged or has another number of runs."""
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            data = {name: file[name] for name in file.files}
    except _DAMAGE:
        return None
    return data if data and all(len(array) == runs for array in data.values()) else None


def write_chunk(folder: Path, span: Span, data: Runs) -> None:
    """Write the runs of a span to their file."""
    file = io.BytesIO()
    np.savez_compressed(file, **data)  # type: ignore[arg-type]
    write_atomically(folder / f"{span[0]:08d}-{span[1]:08d}.npz", file.getvalue())


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole file, or leave it as it was if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    os.replace(partial, path)


def missing(kept: Sequence[Span], runs: int, chunk: int) -> Iterator[Span]:
    """Yield the runs that are in no kept span, in chunks."""
    begin = 0
    for start, stop in [*kept, (runs, runs)]:
        while begin < start:
            end = min(begin + chunk, start)
            yield begin, end
            begin = end
        begin = stop
