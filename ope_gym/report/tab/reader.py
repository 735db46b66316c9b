"""Read what the OPE tab shows through TensorBoard's data provider.

A series is any scalar `ope/<name>/value`, with `/low` and `/high` if they are there: estimators as
well as `provisional`, `settled` and `fresh`. Estimators without scalars are read from the documents
of the evaluations. A return is `rollout/return`, `rollout/ep_rew_mean` or
`eval/mean_reward`. Sub-runs `rollouts` and `fresh` belong to the run above them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tensorboard.data.provider import RunTagFilter

PLUGIN = "ope"  # as in ope_gym.report.documents, which this process need not import
POINTS = 1000  # of a series at most
RETURNS = ("rollout/return", "rollout/ep_rew_mean", "eval/mean_reward")
_PARTS = ("rollouts", "fresh")
_SERIES = re.compile(r"ope/(.+)/(value|low|high|verdict)")
_NUMBERS = ("ope/fresh_episodes", "ope/verdict")
_FREE = ("provisional", "settled", "fresh")  # kinds of free values of a training loop
_VERDICTS = ("red", "amber", "green")  # as numbers: 0, 1, 2
_BEST = 5  # policies that are listed


@dataclass
class Found:
    """Where the series of one run are: (run, tag) of every column, by series."""

    series: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    returns: dict[str, tuple[str, str]] = field(default_factory=dict)
    numbers: dict[str, tuple[str, str]] = field(default_factory=dict)
    documents: bool = False
    recorded: dict[str, None] = field(default_factory=dict)  # estimators that have no scalars


class Reader:
    """Answer the requests of the page for one experiment.

    Args:
        provider: data provider of TensorBoard.
        context: of the request.
        experiment: its id.
    """

    def __init__(self, provider: Any, context: Any, experiment: str) -> None:
        self._provider = provider
        self._where: dict[str, Any] = {"ctx": context, "experiment_id": experiment}

    def runs(self) -> dict[str, Any]:
        """Return the runs with what there is to tick, the latest first."""
        times = {
            run.run_name: run.start_time or 0.0 for run in self._provider.list_runs(**self._where)
        }
        found = self._found()
        order = sorted(found, key=lambda run: (-times.get(run, 0.0), run))
        return {
            "runs": [
                {
                    "name": run,
                    "series": [*found[run].series, *found[run].recorded],
                    "returns": list(found[run].returns),
                    "documents": found[run].documents,
                }
                for run in order
            ]
        }

    def series(self, runs: Collection[str], names: Collection[str]) -> dict[str, Any]:
        """Return the points of some runs: the series and returns of these names, and the verdicts.

        Every one is `{"step": [...], "value": [...], "low": [...], ...}`, in the order of steps.
        """
        found = {run: f for run, f in self._found().items() if run in runs}
        columns: dict[tuple[str, str, str], dict[str, tuple[str, str]]] = {}
        for run, f in found.items():
            wanted = {name: ends for name, ends in f.series.items() if name in names}
            columns |= {(run, "series", name): ends for name, ends in wanted.items()}
            for name, place in f.returns.items():
                if name in names:
                    columns[run, "returns", name] = {"value": place}
            for name, place in f.numbers.items():
                columns[run, "numbers", name.removeprefix("ope/")] = {"value": place}
        read = self._read_scalars({place for ends in columns.values() for place in ends.values()})
        answer: dict[str, Any] = {
            run: {"series": {}, "returns": {}, "numbers": {}} for run in found
        }
        for (run, kind, name), ends in columns.items():
            answer[run][kind][name] = _joined({end: read[place] for end, place in ends.items()})
        for run, f in found.items():
            if unread := [name for name in f.recorded if name in names]:
                answer[run]["series"] |= self._recorded(run, unread)
        return answer

    def details(self, run: str, step: int | None) -> dict[str, Any]:
        """Return the documents of a run nearest to a step, or its last ones.

        There is an `evaluation`, a `ranking`, and of a training loop the `free` values of one
        policy by their kind. Each has the `step` it belongs to: TensorBoard does not keep all of
        many. `record` says how the free values of the run have turned out so far.
        """
        kept = self._documents(run)
        free = _nearest([document for kind in _FREE for document in kept[kind]], step)
        if free is not None:
            same = {kind: [d for d in kept[kind] if d[0] == free["step"]] for kind in _FREE}
            found = {kind: _nearest(documents, None) for kind, documents in same.items()}
            free = {"step": free["step"], **found}
        return {
            "evaluation": _nearest(kept["details"], step),
            "ranking": _nearest(kept["ranking"], step),
            "free": free,
            "record": self._record(run) if free is not None else None,
        }

    def _documents(self, run: str) -> dict[str, list[tuple[int, float, bytes]]]:
        """Return step, time and content of the documents of a run, by kind."""
        read = self._provider.read_tensors(
            **self._where,
            plugin_name=PLUGIN,
            downsample=POINTS,
            run_tag_filter=RunTagFilter(runs=[run]),
        )
        kept: dict[str, list[tuple[int, float, bytes]]] = {
            kind: [] for kind in ("details", "ranking", *_FREE)
        }
        for tag, data in read.get(run, {}).items():
            kind = tag.split("/")[1]
            if kind in kept:
                kept[kind] += [(d.step, d.wall_time, d.numpy.item()) for d in data]
        return kept

    def _recorded(self, run: str, names: Collection[str]) -> dict[str, dict[str, list[Any]]]:
        """Return the series of estimators that only the documents of the evaluations hold."""
        columns: dict[str, dict[str, dict[int, Any]]] = {
            name: {end: {} for end in ("value", "low", "high", "verdict")} for name in names
        }
        for step, _, content in sorted(self._documents(run)["details"]):
            for name, row in _estimates(content).items():
                if name in columns and row["value"] is not None:
                    for end, column in columns[name].items():
                        column[step] = row[end]
        return {name: _joined(ends) for name, ends in columns.items()}

    def _record(self, run: str) -> dict[str, Any]:
        """Return how many values stayed within their band, and the best policies so far."""
        series = self.series({run}, _FREE)[run]["series"]
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

    def _found(self) -> dict[str, Found]:
        """List all runs with anything to show."""
        scalars = self._provider.list_scalars(**self._where, plugin_name="scalars")
        tensors = self._provider.list_tensors(**self._where, plugin_name=PLUGIN)
        found: dict[str, Found] = {}
        for run, tags in scalars.items():
            for tag in tags:
                place, of = (run, tag), found.setdefault(_owner(run, scalars), Found())
                if tag in RETURNS:
                    of.returns[tag] = place
                elif tag in _NUMBERS:
                    of.numbers[tag] = place
                elif match := _SERIES.fullmatch(tag):
                    of.series.setdefault(match[1], {})[match[2]] = place
        for run, tags in tensors.items():
            of = found.setdefault(run, Found())
            of.documents = True
            for listed in tags.values():
                of.recorded |= dict.fromkeys(json.loads(listed.plugin_content or b"[]"))
        for f in found.values():
            f.series = {name: ends for name, ends in f.series.items() if "value" in ends}
            f.recorded = {name: None for name in f.recorded if name not in f.series}
        return {run: f for run, f in found.items() if f.series or f.documents}

    def _read_scalars(
        self, places: Collection[tuple[str, str]]
    ) -> dict[tuple[str, str], dict[int, float]]:
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
def _estimates(content: bytes) -> dict[str, dict[str, Any]]:
    """Return value, ends and verdict of the estimates in a document, by name."""
    return {
        row["name"]: {
            "value": row["value"],
            "low": row["low"],
            "high": row["high"],
            "verdict": _VERDICTS.index(row["verdict"]),
        }
        for row in json.loads(content)["estimates"]
    }


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


def _nearest(documents: list[tuple[int, float, bytes]], step: int | None) -> Any:
    """Return the document of the nearest step, the last written one where there are several."""
    if not documents:
        return None
    aim = max(found for found, _, _ in documents) if step is None else step
    found, _, content = min(documents, key=lambda d: (abs(d[0] - aim), -d[0], -d[1]))
    return {"step": found, **json.loads(content)}
