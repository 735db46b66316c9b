"""Run a study with several workers, go on after a stop, and write the results to files.

The numbers of a run depend only on the seed, the study's name and the number of the run; the number
of workers, the size of chunks and `--runs` do not change them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import ope_gym
from ope_gym.files import write_file
from ope_gym.scale.ray import WorkerError
from ope_gym.scale.workers import Workers
from studies.harness.kept import fingerprint, folder_of, read_runs, spans_of, write_runs
from studies.harness.markdown import study_section, tidy
from studies.harness.seeds import Span, seeds_of
from studies.harness.study import Runs, Study, Summary


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
        study: the study with its settings.
        out: folder of the results; finished runs are kept in its subfolder `chunks`.
        runs: how many runs; the study's own number by default.
        seed: seed of all random numbers.
        workers: number of processes; 1 runs everything in this one.
        ray: run on a Ray cluster instead: True, or its address.
        progress: whether to show a progress bar.

    Returns:
        The content of LABEL.json, see `label`.
    """
    count = study.plan.runs if runs is None else runs
    if count < 1 or workers < 1 or seed < 0:
        raise ValueError(f"{runs=}, {workers=}, {seed=}: give at least 1, 1 and 0")
    data = collect(study, out, runs=count, seed=seed, workers=workers, ray=ray, progress=progress)
    summary = plain(study.summarise(data), missing=math.nan)
    claims = [claim.with_runs(count) for claim in study.claims(summary)]
    picture = _draw(study, summary, out)
    result = {
        "study": study.name,
        "label": label(study),
        "title": f"{study.name}: {study.plan.title}",
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
    write_file(out / f"{result['label']}.json", text)
    write_file(out / f"{result['label']}.md", study_section(result, picture))
    return result


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
    """Return the arrays of all runs; those that an earlier call finished come from their files."""
    folder = folder_of(study, out, seed)
    folder.mkdir(parents=True, exist_ok=True)
    spans = spans_of(study, runs)
    kept = {span: data for span in spans if (data := read_runs(folder, span)) is not None}
    todo = [span for span in spans if span not in kept]
    done = runs - sum(stop - start for start, stop in todo)
    if progress and not sys.stderr.isatty():
        _say(f"{label(study)}: {done} of {runs} runs found")
    bar = tqdm(
        total=runs, initial=done, desc=label(study), unit="run", disable=None if progress else True
    )
    run = partial(_run, study, seed, fingerprint(study, seed) if ray else "")
    with bar, closing(Workers(workers, ray).in_order(run, todo)) as results:
        for span, data in zip(todo, results, strict=True):
            write_runs(folder, span, data)
            kept[span] = data
            bar.update(span[1] - span[0])
    return {name: np.concatenate([kept[span][name] for span in spans]) for name in kept[spans[0]]}


def _run(study: Study, seed: int, code: str, span: Span) -> Runs:
    """Do the runs of a span in a worker.

    Raises:
        WorkerError: If `code` is given and is not the fingerprint of the worker's own code.
    """
    if code and code != (here := fingerprint(study, seed)):
        raise WorkerError(
            f"{study.name}: a Ray worker has other code or settings ({here} instead of {code}): "
            "put the same checkout on every node"
        )
    return study.run(seeds_of(seed, span, study.name))


def changed(study: Study) -> dict[str, str]:
    """Return the settings that differ from the defaults, written as --set takes them."""
    values, usual = (plain(dataclasses.asdict(s)) for s in (study, type(study)()))
    return {
        name: json.dumps(value, separators=(",", ":"), ensure_ascii=False).strip('"')
        for name, value in values.items()
        if value != usual[name]
    }


def label(study: Study) -> str:
    """Return the name of the study's files: its own name and the settings that were changed."""
    parts = [f"{name}-{value}" for name, value in changed(study).items()]
    text = re.sub(r"[^\w.\-]+", "_", "-".join([study.name, *parts])).rstrip("_")
    return text if len(text) <= 100 else f"{text[:80]}-{fingerprint(study, 0)}"


def plain(value: Any, missing: float | None = None) -> Any:
    """Return arrays as lists, numpy numbers as Python's, and `missing` for what is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(item, missing) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item, missing) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return missing if isinstance(value, float) and not math.isfinite(value) else value


def _draw(study: Study, summary: Summary, out: Path) -> str | None:
    """Write the picture and return its file name, or None without matplotlib."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        _say(
            f"{study.name}: no picture without matplotlib: "
            'pip install -e ".[plots]" -c constraints.txt'
        )
        return None
    name = f"{label(study)}.png"
    study.picture(summary).savefig(out / name)
    return name


def _say(text: str) -> None:
    """Print a line to stderr without breaking a progress bar."""
    tqdm.write(text, file=sys.stderr)
