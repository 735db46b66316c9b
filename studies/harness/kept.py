"""Keep finished runs in files START-STOP.npz, so that a stopped study can go on.

Their folder is named after what made them: settings, seed and code. Claims, pictures and the words
of reports do not count, so that a better sentence there costs no new run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ope_gym.files import write_file
from studies.harness.seeds import Span
from studies.harness.study import Runs, Study

_ROOT = Path(__file__).parents[2]
_CODE = ("ope_gym", "agents", "wrappers", "studies")
_AFTER = {"claims", "errors", "markdown", "picture", "pictures", "registry", "report", "runner"}
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile)


def fingerprint(study: Study, seed: int) -> str:
    """Return a hash that is equal for equal settings, seed and code."""
    made = {"seed": seed, "numpy": np.__version__, "code": _code(), **dataclasses.asdict(study)}
    text = json.dumps({"study": study.name, **made}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """Return a hash of all source files that runs may depend on."""
    known = hashlib.sha256()
    for path in (path for part in _CODE for path in sorted((_ROOT / part).rglob("*.py"))):
        if path.stem not in _AFTER or "studies" not in path.parts:
            known.update(path.read_bytes())
    return known.hexdigest()


def folder_of(study: Study, out: Path, seed: int) -> Path:
    """Return the folder in which finished runs are kept."""
    return out / "chunks" / f"{study.name}-{fingerprint(study, seed)}"


def spans_of(study: Study, runs: int) -> list[Span]:
    """Return the chunks of so many runs; they begin at the same runs for any number of them."""
    chunk = study.plan.chunk
    return [(start, min(start + chunk, runs)) for start in range(0, runs, chunk)]


def read_runs(folder: Path, span: Span) -> Runs | None:
    """Return the runs of a span; None if no file has them all, or it is damaged."""
    start, stop = span
    for path in folder.glob(f"{start:08d}-*.npz"):
        try:
            with path.open("rb") as raw, np.load(raw) as file:
                data: dict[str, Any] = {name: file[name] for name in file.files}
        except _DAMAGE:
            continue
        if data and all(len(array) >= stop - start for array in data.values()):
            return {name: array[: stop - start] for name, array in data.items()}
    return None


def write_runs(folder: Path, span: Span, data: Runs) -> None:
    """Write the runs of a span to their file, as a whole or not at all."""
    file = io.BytesIO()
    np.savez_compressed(file, **data)  # type: ignore[arg-type]
    write_file(folder / f"{span[0]:08d}-{span[1]:08d}.npz", file.getvalue())
