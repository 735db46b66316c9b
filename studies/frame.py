"""What all studies share: runs in parallel that survive a kill, and results as files.

The numbers of a run depend on the seed, the study's name and the number of the run, and neither on
the number of workers, nor on how runs are put together, nor on `--runs`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from tqdm import tqdm

import ope_gym
from studies.chunks import Runs, missing, read_chunks, write_atomically, write_chunk
from studies.claims import Claim, claim_section, claims_table, tidy
from studies.fingerprint import fingerprint
from studies.seeds import Span, seeds_of
from studies.workers import results_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Runs", "Seeds", "Span", "Study", "Summary", "collect", "conduct", "seeds_of"]

Seeds: TypeAlias = Sequence[np.random.SeedSequence]
Summary: TypeAlias = dict[str, Any]  # what a study found: plain data, as JSON holds it


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
    takes: ClassVar[str] = ""  # roughly, with two workers

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
    ray: bool | str = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Run a study, or what is left of it, and write LABEL.json, .md and .png to `out`.

    Args:
        study: what to run.
        out: folder of the results; finished runs are kept in its folder `chunks`.
        runs: how many; the study's own number by default.
        seed: of all random numbers.
        workers: processes; 1 runs everything in this one.
        ray: run on a Ray cluster instead, see `ope_gym.scale.workers.start_workers`.
        progress: show a bar.

    Returns:
        The content of LABEL.json; the label is the study's name and what is not its default.
    """
    count = study.runs if runs is None else runs
    if count < 1 or workers < 1 or seed < 0:
        raise ValueError(f"{runs=}, {workers=}, {seed=}: give at least 1, 1 and 0")
    data = collect(study, out, runs=count, seed=seed, workers=workers, ray=ray, progress=progress)
    summary = plain(study.summarise(data), missing=math.nan)
    claims = [claim.with_runs(count) for claim in study.claims(summary)]
    picture = _draw(study, summary, out)
    result = {
        "study": study.name,
        "label": label(study),
        "title": study.title,
        "runs": count,
        "seed": seed,
        "version": ope_gym.__version__,
        "fingerprint": fingerprint(study, seed),
        "settings": plain(dataclasses.asdict(study)),
        "changed": changed(study),
        "summary": plain(summary),
        "table": tidy(study.table(summary)),
        "claims": [plain(claim.to_dict()) for claim in claims],
        "picture": picture,
    }
    text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(out / f"{result['label']}.json", text.encode())
    write_atomically(out / f"{result['label']}.md", study_section(result, picture).encode())
    return result


def folder_of(study: Study, out: Path, seed: int) -> Path:
    """Where finished runs are kept."""
    return out / "chunks" / f"{study.name}-{fingerprint(study, seed)}"


def collect(
    study: Study,
    out: Path,
    *,
    runs: int,
    seed: int,
    workers: int = 1,
    ray: bool | str = False,
    progress: bool = True,
) -> Runs:
    """The arrays of all runs; those that an earlier call finished are read from their files."""
    folder = folder_of(study, out, seed)
    folder.mkdir(parents=True, exist_ok=True)
    kept, damaged = read_chunks(folder, runs)
    chunk = min(study.chunk, math.ceil(runs / workers))  # few runs, too, keep all workers busy
    todo = list(missing(sorted(kept), runs, chunk))
    done = runs - sum(stop - start for start, stop in todo)
    if damaged:
        _say(f"{study.name}: damaged files in {folder}, ignored and done anew: {damaged}")
    if progress and not sys.stderr.isatty():
        _say(f"{label(study)}: {done} of {runs} runs found")
    bar = tqdm(
        total=runs, initial=done, desc=label(study), unit="run", disable=None if progress else True
    )
    with bar, closing(results_of(study, seed, todo, workers, ray)) as results:
        for span, data in results:
            write_chunk(folder, span, data)
            kept[span] = data
            bar.update(span[1] - span[0])
    spans = sorted(kept)
    names = kept[spans[0]]
    return {name: np.concatenate([kept[span][name] for span in spans]) for name in names}


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


# --- results ----------------------------------------------------------------------------------


def changed(study: Study) -> dict[str, str]:
    """The settings that are not the study's own, as --set takes them."""
    values, usual = (plain(dataclasses.asdict(s)) for s in (study, type(study)()))
    return {
        name: json.dumps(value, separators=(",", ":"), ensure_ascii=False).strip('"')
        for name, value in values.items()
        if value != usual[name]
    }


def label(study: Study) -> str:
    """Name of the study's files: other settings do not overwrite the results of the default."""
    parts = [f"{name}-{value}" for name, value in changed(study).items()]
    text = re.sub(r"[^\w.\-]+", "_", "-".join([study.name, *parts])).rstrip("_")
    return text if len(text) <= 100 else f"{text[:80]}-{fingerprint(study, 0)}"


def study_section(result: dict[str, Any], picture: str | None, *, brief: bool = False) -> str:
    """Markdown of a study: its tables, picture and claims; `brief` only says their verdicts."""
    name, settings = result["label"], result["changed"]
    command = f"python -m studies {result['study']} --runs {result['runs']} --seed {result['seed']}"
    command += "".join(f" --set '{field}={value}'" for field, value in settings.items())
    title = result["title"] + "".join(f", {f} = {v}" for f, v in settings.items())
    parts = [
        f'<a id="{name}"></a>\n\n{"###" if brief else "##"} {title}',
        f"`{command}`, ope_gym {result['version']}, code and settings {result['fingerprint']}.",
        result["table"],
    ]
    if picture:
        parts.append(f"![{title}]({picture})")
    if brief:
        parts.append(claims_table(result["claims"]))
    else:
        sections = enumerate(result["claims"], start=1)
        parts += [claim_section(claim, f"{name}-{i}") for i, claim in sections]
    return "\n\n".join(parts) + "\n"


def _draw(study: Study, summary: Summary, out: Path) -> str | None:
    """Write the picture; its file name, or None without matplotlib."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        _say(
            f"{study.name}: no picture without matplotlib: "
            'pip install -e ".[plots]" -c constraints.txt'
        )
        return None
    out.mkdir(parents=True, exist_ok=True)
    name = f"{label(study)}.png"
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
