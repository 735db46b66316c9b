"""Read what the OPE tab shows through TensorBoard's data provider.

A series is any scalar `ope/<name>/value`, with `/low` and `/high` if they are there: estimators as
well as `provisional`, `settled` and `fresh`. Estimators without scalars are read from the documents
of the evaluations. A return is `rollout/return`, `rollout/ep_rew_mean` or
`eval/mean_reward`. Sub-runs `rollouts` and `fresh` belong to the run above them.

Anybody may have written a run. What cannot be read is left out, and `details` says so.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from tensorboard.data.provider import RunTagFilter

from ope_gym.report.tab.shapes import VERDICTS, parse

PLUGIN = "ope"  # as in ope_gym.report.documents, which this process need not import
POINTS = 1000  # of a series at most
SHOWN = 40  # series of a run that are listed with it; `names` finds the others
MATCHES = 200  # names in an answer of `names`
RETURNS = ("rollout/return", "rollout/ep_rew_mean", "eval/mean_reward")
_PARTS = ("rollouts", "fresh")
_SERIES = re.compile(r"ope/(.+)/(value|low|high|verdict)")
_NUMBERS = ("ope/fresh_episodes", "ope/verdict")
_FREE = ("provisional", "settled", "fresh")  # kinds of free values of a training loop
_FIRST = (*_FREE, "auto", "NFIS")  # listed first
_KINDS = {"details": "evaluation", "ranking": "ranking", **{kind: kind for kind in _FREE}}
_BEST = 5  # policies that are listed

Place: TypeAlias = tuple[str, str]  # run and tag
Document: TypeAlias = tuple[int, float, Any]  # step, time and content


@dataclass
class Contents:
    """Contents of one run: the places of its scalars, and whether it has documents."""

    series: dict[str, dict[str, Place]] = field(default_factory=dict)  # by name, then by column
    returns: dict[str, Place] = field(default_factory=dict)
    numbers: dict[str, Place] = field(default_factory=dict)
    documents: bool = False
    recorded: dict[str, None] = field(default_factory=dict)  # estimators that have no scalars

    @property
    def names(self) -> list[str]:
        """All series, those first that matter most."""
        everything = {**self.series, **self.recorded}
        first = [name for name in _FIRST if name in everything]
        return [*first, *(name for name in everything if name not in _FIRST)]


@dataclass(frozen=True)
class Listing:
    """Contents of all runs, and until when they need not be listed again."""

    contents: dict[str, Contents]
    until: float


class Reader:
    """Answer the requests of the page for one experiment.

    Args:
        provider: Data provider of TensorBoard.
        context: Context of the request.
        experiment: Id of the experiment.
        listings: What was listed before, by experiment; kept between requests.
    """

    def __init__(
        self, provider: Any, context: Any, experiment: str, listings: dict[str, Listing]
    ) -> None:
        self._provider, self._listings = provider, listings
        self._where: dict[str, Any] = {"ctx": context, "experiment_id": experiment}

    def runs(self) -> dict[str, Any]:
        """Return the runs with what there is to tick, the latest first."""
        times = {
            run.run_name: run.start_time or 0.0 for run in self._provider.list_runs(**self._where)
        }
        contents = self._contents()
        return {
            "runs": [
                {
                    "name": run,
                    "series": contents[run].names[:SHOWN],
                    "more": max(len(contents[run].names) - SHOWN, 0),
                    "returns": list(contents[run].returns),
                    "documents": contents[run].documents,
                }
                for run in sorted(contents, key=lambda run: (-times.get(run, 0.0), run))
            ]
        }

    def names(self, run: str, part: str) -> dict[str, Any]:
        """Return the series of a run whose names contain some letters, and how many there are."""
        everything = self._contents().get(run, Contents()).names
        matches = [name for name in everything if part.lower() in name.lower()]
        return {"names": matches[:MATCHES], "count": len(matches)}

    def series(self, runs: Collection[str], names: Collection[str]) -> dict[str, Any]:
        """Return the points of some runs: the series and returns of these names, and the verdicts.

        Every one is `{"step": [...], "value": [...], "low": [...], ...}`, in the order of steps.
        """
        contents = {run: of for run, of in self._contents().items() if run in runs}
        columns: dict[tuple[str, str, str], dict[str, Place]] = {}
        for run, of in contents.items():
            for name in names:
                if name in of.series:
                    columns[run, "series", name] = of.series[name]
                if name in of.returns:
                    columns[run, "returns", name] = {"value": of.returns[name]}
            for name, place in of.numbers.items():
                columns[run, "numbers", name.removeprefix("ope/")] = {"value": place}
        read = self._read_scalars({place for ends in columns.values() for place in ends.values()})
        answer: dict[str, Any] = {
            run: {"series": {}, "returns": {}, "numbers": {}} for run in contents
        }
        for (run, kind, name), ends in columns.items():
            answer[run][kind][name] = _joined({end: read[place] for end, place in ends.items()})
        for run, of in contents.items():
            if recorded := [name for name in names if name in of.recorded]:
                answer[run]["series"] |= self._recorded(run, recorded)
        return answer

    def details(self, run: str, step: int | None) -> dict[str, Any]:
        """Return the documents of a run nearest to a step, or its last ones.

        There is an `evaluation`, a `ranking`, and of a training loop the `free` values of one
        policy by their kind. Each has the `step` it belongs to: TensorBoard does not keep all of
        many. `record` says how the free values of the run have turned out so far, and `problem` why
        a document cannot be read.
        """
        problems: list[str] = []
        try:
            documents = self._documents(run)
        except Exception as error:  # whatever TensorBoard raises over a tensor that is none
            documents = {kind: [] for kind in _KINDS}
            problems.append(f"its tensors ({error})")

        def read(kind: str, step: int | None) -> dict[str, Any] | None:
            try:
                return _nearest(documents[kind], step, _KINDS[kind])
            except ValueError as error:
                problems.append(f"{_KINDS[kind]} ({error})")
                return None

        steps = {at for kind in _FREE for at, _, _ in documents[kind]}
        free: dict[str, Any] | None = None
        if steps:
            nearest = _nearest_step(steps, step)
            for kind in _FREE:
                documents[kind] = [d for d in documents[kind] if d[0] == nearest]
            values = {kind: read(kind, None) for kind in _FREE}
            free = {"step": nearest, **values} if any(values.values()) else None
        return {
            "evaluation": read("details", step),
            "ranking": read("ranking", step),
            "free": free,
            "record": self._record(run) if free is not None else None,
            "problem": f"cannot be read: {'; '.join(problems)}" if problems else None,
        }

    def _documents(self, run: str) -> dict[str, list[Document]]:
        """Return step, time and content of the documents of a run, by kind."""
        read = self._provider.read_tensors(
            **self._where,
            plugin_name=PLUGIN,
            downsample=POINTS,
            run_tag_filter=RunTagFilter(runs=[run]),
        )
        documents: dict[str, list[Document]] = {kind: [] for kind in _KINDS}
        for tag, data in read.get(run, {}).items():
            kind = [*tag.split("/"), ""][1]
            if kind in documents:
                documents[kind] += [(d.step, d.wall_time, _content(d.numpy)) for d in data]
        return documents

    def _recorded(self, run: str, names: Collection[str]) -> dict[str, dict[str, list[Any]]]:
        """Return the series of estimators that only the documents of the evaluations hold."""
        columns: dict[str, dict[str, dict[int, Any]]] = {
            name: {end: {} for end in ("value", "low", "high", "verdict")} for name in names
        }
        try:
            documents = sorted(self._documents(run)["details"], key=lambda d: d[:2])
        except Exception:  # `details` says what is wrong
            documents = []
        for step, _, content in documents:
            for name, row in _estimates(content).items():
                if name in columns and row["value"] is not None:
                    for end, column in columns[name].items():
                        column[step] = row[end]
        return {name: _joined(ends) for name, ends in columns.items()}

    def _record(self, run: str) -> dict[str, Any]:
        """Return how many values stayed within their band, and the best policies so far."""
        series = self.series({run}, _FREE).get(run, {"series": {}})["series"]
        early, late, fresh = (_rows(series.get(kind, {"step": []})) for kind in _FREE)
        pairs = [(early[step], late[step]["value"]) for step in late if step in early]
        known = early | late or fresh
        latest = [{"settled": step in late, **row} for step, row in known.items()]
        banded = [row for row in latest if row["low"] is not None and row["high"] is not None]
        return {
            "within": sum(
                a["low"] is not None and a["high"] is not None and a["low"] <= b <= a["high"]
                for a, b in pairs
            ),
            "settled": len(pairs),
            "policies": len(latest),
            "best": sorted(banded, key=lambda row: (-row["low"], row["step"]))[:_BEST],
        }

    def _contents(self) -> dict[str, Contents]:
        """List all runs with anything to show.

        TensorBoard takes 20 us a tag to list them, so of very many tags the last listing serves for
        ten times as long as it took.
        """
        now = time.monotonic()
        listing = self._listings.get(self._where["experiment_id"])
        if listing is None or listing.until < now:
            contents = self._list()
            listing = Listing(contents, 11 * time.monotonic() - 10 * now)
            self._listings[self._where["experiment_id"]] = listing
        return listing.contents

    def _list(self) -> dict[str, Contents]:
        scalars = self._provider.list_scalars(**self._where, plugin_name="scalars")
        tensors = self._provider.list_tensors(**self._where, plugin_name=PLUGIN)
        contents: dict[str, Contents] = {}
        for run, tags in scalars.items():
            of = contents.setdefault(_owner(run, scalars), Contents())
            for tag in tags:
                if tag in RETURNS:
                    of.returns[tag] = run, tag
                elif tag in _NUMBERS:
                    of.numbers[tag] = run, tag
                elif match := _SERIES.fullmatch(tag):
                    of.series.setdefault(match[1], {})[match[2]] = run, tag
        for run, tags in tensors.items():
            of = contents.setdefault(run, Contents())
            of.documents = True
            for listed in tags.values():
                of.recorded |= dict.fromkeys(_listed(listed.plugin_content))
        for of in contents.values():
            of.series = {name: ends for name, ends in of.series.items() if "value" in ends}
            of.recorded = {name: None for name in of.recorded if name not in of.series}
        return {run: of for run, of in contents.items() if of.series or of.documents}

    def _read_scalars(self, places: Collection[Place]) -> dict[Place, dict[int, float]]:
        """Return the points of tags by step; where a step was written twice, the last."""
        if not places:
            return {}
        chosen = RunTagFilter(runs={run for run, _ in places}, tags={tag for _, tag in places})
        read = self._provider.read_scalars(
            **self._where, plugin_name="scalars", downsample=POINTS, run_tag_filter=chosen
        )
        return {
            (run, tag): {
                d.step: d.value
                for d in sorted(read.get(run, {}).get(tag, ()), key=lambda d: d.wall_time)
                if math.isfinite(d.value)
            }
            for run, tag in places
        }


@lru_cache(maxsize=4096)
def _estimates(content: Any) -> dict[str, dict[str, Any]]:
    """Return value, ends and verdict of the estimates in a document, by name; or nothing."""
    try:
        rows = parse(content, "evaluation")["estimates"]
    except ValueError:
        return {}
    return {
        row["name"]: {
            **{end: row[end] for end in ("value", "low", "high")},
            "verdict": VERDICTS.index(row["verdict"]),
        }
        for row in rows
    }


def _listed(content: bytes) -> Iterator[str]:
    """Yield the estimators that a tag says its documents hold."""
    try:
        names = json.loads(content or b"[]")
    except (ValueError, RecursionError):
        return
    yield from (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _content(array: Any) -> Any:
    """Return the text in a tensor; None if it holds anything else."""
    item = array.item() if array.size == 1 else None
    return item if isinstance(item, bytes | str) else None


def _owner(run: str, runs: Collection[str]) -> str:
    """Return the run that a sub-run belongs to, or the run itself."""
    parent, _, part = run.rpartition("/")
    parent = parent or "."
    return parent if part in _PARTS and parent in runs else run


def _joined(columns: Mapping[str, Mapping[int, float]]) -> dict[str, list[Any]]:
    """Turn columns by step into lists, with None where a value has no such end."""
    steps = sorted(columns["value"])
    points = {end: [column.get(step) for step in steps] for end, column in columns.items()}
    return {"step": steps, **points}


def _rows(columns: Mapping[str, list[Any]]) -> dict[int, dict[str, Any]]:
    """Turn the lists of a series into rows by step."""
    return {
        step: {"step": step, "low": None, "high": None}
        | {end: column[k] for end, column in columns.items()}
        for k, step in enumerate(columns["step"])
    }


def _nearest_step(steps: Collection[int], step: int | None) -> int:
    """Return the step nearest to one, the later of two; the last by default."""
    return max(steps) if step is None else min(steps, key=lambda other: (abs(other - step), -other))


def _nearest(documents: list[Document], step: int | None, kind: str) -> dict[str, Any] | None:
    """Return the document of the nearest step, the last written one where there are several."""
    if not documents:
        return None
    nearest = _nearest_step({written for written, _, _ in documents}, step)
    _, _, content = max((d for d in documents if d[0] == nearest), key=lambda d: d[1])
    return {**parse(content, kind), "step": nearest}
