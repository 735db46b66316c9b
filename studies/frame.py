"""What all studies share: runs in parallel that survive a kill, and results as files.

Run i of a study draws from `SeedSequence(seed).spawn(…)[i]` and nothing else, so that its numbers
depend neither on the number of workers, nor on how runs are put together, nor on `--runs`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import json
import math
import multiprocessing
import os
import threading
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import ope_gym
from studies.claims import Claim, claim_section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Seeds: TypeAlias = Sequence[np.random.SeedSequence]
Runs: TypeAlias = dict[str, NDArray[Any]]  # the first axis of each array is the run
Summary: TypeAlias = dict[str, Any]  # what a study found: plain data, as JSON holds it
Span: TypeAlias = tuple[int, int]  # runs start … stop - 1

_LIBRARY = ("ope_gym", "agents", "wrappers")  # a change of these makes finished runs stale


@dataclasses.dataclass(frozen=True)
class Study(ABC):
    """An experiment: many independent runs, and what follows from them.

    A subclass is a frozen dataclass whose fields are its settings; it is sent to the workers, so
    its module is imported there. Only `run` may take time: the rest is done again from its arrays
    when a command is given again. `claims`, `table` and `picture` get the summary as plain data.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    runs: ClassVar[int]  # unless --runs says otherwise
    chunk: ClassVar[int]  # runs handed to a worker at once and kept in one file

    @abstractmethod
    def run(self, seeds: Seeds) -> Runs:
        """The results of one run for each seed, each from its own seed alone."""

    @abstractmethod
    def summarise(self, runs: Runs) -> Summary:
        """All runs in numbers; arrays become lists."""

    @abstractmethod
    def claims(self, summary: Summary) -> list[Claim]:
        """What the paper says, and whether it holds."""

    @abstractmethod
    def table(self, summary: Summary) -> str:
        """The results as Markdown."""

    @abstractmethod
    def picture(self, summary: Summary) -> Figure:
        """The results as a figure; matplotlib is imported here and not before."""


def conduct(
    study: Study,
    out: Path,
    *,
    runs: int | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Run a study, or what is left of it, and write NAME.json, NAME.md and NAME.png to `out`.

    Args:
        study: what to run.
        out: folder of the results; finished runs are kept in its folder `chunks`.
        runs: how many; the study's own number by default.
        seed: of all random numbers.
        workers: processes; 1 runs everything in this one.
        progress: show a bar.

    Returns:
        The content of NAME.json.
    """
    count = study.runs if runs is None else runs
    if count < 1 or workers < 1 or seed < 0:
        raise ValueError(f"{runs=}, {workers=}, {seed=}: give at least 1, 1 and 0")
    data = collect(study, out, runs=count, seed=seed, workers=workers, progress=progress)
    summary = plain(study.summarise(data), missing=math.nan)
    picture = _draw(study, summary, out)
    result = {
        "study": study.name,
        "title": study.title,
        "runs": count,
        "seed": seed,
        "version": ope_gym.__version__,
        "settings": plain(dataclasses.asdict(study)),
        "changed": _changed(study),
        "summary": plain(summary),
        "table": study.table(summary),
        "claims": [plain(claim.to_dict()) for claim in study.claims(summary)],
        "picture": picture,
    }
    text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(out / f"{study.name}.json", text.encode())
    write_atomically(out / f"{study.name}.md", study_section(result, picture).encode())
    return result


def collect(
    study: Study, out: Path, *, runs: int, seed: int, workers: int = 1, progress: bool = True
) -> Runs:
    """The arrays of all runs; those that an earlier call finished are read from their files."""
    folder = out / "chunks" / f"{study.name}-{fingerprint(study, seed)}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = read_chunks(folder, runs)
    todo = list(_missing(sorted(kept), runs, study.chunk))
    done = runs - sum(stop - start for start, stop in todo)
    with tqdm(
        total=runs, initial=done, desc=study.name, unit="run", disable=None if progress else True
    ) as bar:
        for span, data in _results(study, seed, todo, workers):
            _write_chunk(folder, span, data)
            kept[span] = data
            bar.update(span[1] - span[0])
    spans = sorted(kept)
    names = kept[spans[0]]
    return {name: np.concatenate([kept[span][name] for span in spans]) for name in names}


def seeds_of(seed: int, span: Span) -> list[np.random.SeedSequence]:
    """The seeds of runs start … stop - 1: those that SeedSequence(seed).spawn gives."""
    return [np.random.SeedSequence(seed, spawn_key=(run,)) for run in range(*span)]


def fingerprint(study: Study, seed: int) -> str:
    """Equal for equal settings, seed and code: then finished runs can be used again.

    The code is that of the library and of all files of the study, NAME*.py.
    """
    known = hashlib.sha256()
    settings = {"seed": seed, "numpy": np.__version__, **dataclasses.asdict(study)}
    known.update(json.dumps(plain(settings), sort_keys=True).encode())
    root = Path(__file__).parent.parent
    files = [path for part in _LIBRARY for path in sorted((root / part).glob("*.py"))]
    own = Path(inspect.getfile(type(study)))
    for path in [*files, own, *sorted(own.parent.glob(f"{study.name}_*.py"))]:
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


def _results(
    study: Study, seed: int, todo: Sequence[Span], workers: int
) -> Iterator[tuple[Span, Runs]]:
    """Chunks as they finish."""
    if workers == 1 or len(todo) < 2:
        for span in todo:
            yield span, study.run(seeds_of(seed, span))
        return
    # spawn: the parent may have threads (numba, BLAS), which do not survive a fork
    pool = ProcessPoolExecutor(
        min(workers, len(todo)), multiprocessing.get_context("spawn"), _die_with_parent
    )
    try:
        futures = {pool.submit(study.run, seeds_of(seed, span)): span for span in todo}
        while futures:
            finished, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in finished:
                yield futures.pop(future), future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _die_with_parent() -> None:
    """Workers of a killed command would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _changed(study: Study) -> dict[str, str]:
    """The settings that are not the study's own, as --set takes them."""
    values, usual = (plain(dataclasses.asdict(s)) for s in (study, type(study)()))
    return {name: json.dumps(v).strip('"') for name, v in values.items() if v != usual[name]}


def study_section(result: dict[str, Any], picture: str | None) -> str:
    """Markdown of a study: its tables, picture and claims."""
    command = f"python -m studies {result['study']} --runs {result['runs']} --seed {result['seed']}"
    command += "".join(f" --set {name}={value}" for name, value in result["changed"].items())
    parts = [
        f"## {result['title']}",
        f"`{command}`, ope_gym {result['version']}.",
        result["table"],
    ]
    if picture:
        parts.append(f"![{result['title']}]({picture})")
    parts += [claim_section(claim) for claim in result["claims"]]
    return "\n\n".join(parts) + "\n"


# --- files ------------------------------------------------------------------------------------


def read_chunks(folder: Path, runs: int) -> dict[Span, Runs]:
    """Finished chunks that do not overlap, cut to `runs` runs; damaged files are ignored."""
    kept: dict[Span, Runs] = {}
    reached = 0
    for path in sorted(folder.glob("*.npz")):
        start, stop = (int(part) for part in path.stem.split("-"))
        if start < reached or start >= runs:
            continue
        damage = (ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile)
        with suppress(*damage), path.open("rb") as raw, np.load(raw) as file:
            data = {name: file[name] for name in file.files}
            if data and all(len(array) == stop - start for array in data.values()):
                reached = min(stop, runs)
                kept[start, reached] = {
                    name: array[: reached - start] for name, array in data.items()
                }
    return kept


def _write_chunk(folder: Path, span: Span, data: Runs) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **data)  # type: ignore[arg-type]
    write_atomically(folder / f"{span[0]:08d}-{span[1]:08d}.npz", file.getvalue())


def write_atomically(path: Path, content: bytes) -> None:
    """All of the file or, if killed, nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    os.replace(partial, path)


def _missing(kept: Sequence[Span], runs: int, chunk: int) -> Iterator[Span]:
    """The runs that are in no kept span, in chunks."""
    begin = 0
    for start, stop in [*kept, (runs, runs)]:
        while begin < start:
            end = min(begin + chunk, start)
            yield begin, end
            begin = end
        begin = stop


def _draw(study: Study, summary: Summary, out: Path) -> str | None:
    """Write the picture; its file name, or None without matplotlib."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        tqdm.write(f'{study.name}: no picture without matplotlib: pip install "ope-gym[plots]"')
        return None
    out.mkdir(parents=True, exist_ok=True)
    name = f"{study.name}.png"
    study.picture(summary).savefig(out / name)
    return name


def plain(value: Any, missing: float | None = None) -> Any:
    """Arrays as lists, numpy numbers as Python's, `missing` for what is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(item, missing) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item, missing) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return missing if isinstance(value, float) and not math.isfinite(value) else value
