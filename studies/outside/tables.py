"""Write the findings of the study as tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from studies.harness.markdown import table
from studies.harness.study import Summary

_WORST = 8


def outside_tables(summary: Summary) -> str:
    """Return tables of errors, coverage and alarms, and of the cells where auto is worst."""
    parts = [_errors(summary), _coverage(summary), _alarms(summary), _worst(summary)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _errors(summary: Summary) -> list[str]:
    """Tabulate geometric means of RMSE relative to the best in each cell."""
    names, auto = summary["names"], summary["names"].index("auto")
    rows = []
    for group, g in summary["groups"].items():
        to_best = np.array(g["to_best"])
        rows.append(
            [
                group,
                "hidden" if g["hidden"] else "Markov",
                len(g["cells"]),
                *(_times(log) for log in g["to_best_mean"]),
                _times(to_best[:, auto].max()),
                _times(g["to_nfis_mean"]),
                _times(max(g["to_nfis"])),
            ]
        )
    if not rows:
        return []
    return [
        f"{summary['runs']} runs on problems of seed {summary['problems']}. A cell is a problem "
        "with a number of loggers and of episodes. The table has the RMSE of each estimator as a "
        "multiple of that of the best one in the cell, as the geometric mean over the cells of a "
        "group; then the largest such multiple of auto; and the same for auto relative to NFIS. An "
        "RMSE below a hundredth of that of NFIS counts as a hundredth of it.",
        "",
        *table(
            [
                "group",
                "state",
                "cells",
                *names,
                "auto, largest",
                "auto / NFIS",
                "auto / NFIS, largest",
            ],
            rows,
        ),
    ]


def _coverage(summary: Summary) -> list[str]:
    """Tabulate coverage by colour for auto, and in all for the other estimators."""
    others = [name for name in summary["names"] if name != "auto"]
    rows = []
    for group, g in summary["groups"].items():
        found = g["coverage"]["auto"]
        colours = [_colour(found[name]) for name in ("green", "amber", "red")]
        plain = [_percent(g["coverage"][name]["all"]["coverage"]) for name in others]
        red, sets = g["red"]
        alarms = f"{_percent(red)} of {sets}" if sets else ""
        whole = _percent(found["all"]["coverage"])
        shape = [f"{g['width']:.2f}", _times(g["to_nfis_mean"]), _percent(g["free"])]
        undefined = _percent(found["undefined"])
        rows.append([group, *colours, whole, *shape, undefined, *plain, alarms])
    if not rows:
        return []
    return [
        "How often 95 % intervals contain the value. For auto: by colour of the verdict, with the "
        "share of data sets that have this colour; in all; how wide its intervals are and how "
        "large its errors, relative to NFIS; the second interval, where auto rests on the model; "
        "and the share of data sets without an interval. Then the other estimators, and how many "
        "of the data sets with 40 or more effective episodes are red.",
        "",
        *table(
            [
                *("group", "green", "amber", "red", "auto", "width / NFIS", "RMSE / NFIS"),
                *("whatever the model", "undefined", *others, "red, ESS ≥ 40"),
            ],
            rows,
        ),
    ]


def _alarms(summary: Summary) -> list[str]:
    """Tabulate the share of red verdicts for each fault."""
    rows = [
        [
            row["fault"] or "none",
            "arrays" if row["arrays"] else "policies",
            row["n"],
            _percent(row["red"]),
            _percent(row["share"]),
            _percent(min(row["by_cell"].values())),
            _percent(max(row["by_cell"].values())),
            _percent(row["coverage"]),
        ]
        for row in sorted(summary["faults"], key=lambda r: (r["fault"], r["arrays"], r["n"]))
        if row["sets"]
    ]
    if not rows:
        return []
    cells = ["met, lowest cell", "met, highest cell"]
    head = ["fault", "given as", "n", "red", "met", *cells, "coverage of auto"]
    return [
        "Alarms: the share of data sets whose verdict for auto is red; without a fault, of those "
        "with 40 or more effective episodes. A fault is met by a red verdict, a missing action "
        "also by an interval that contains the value.",
        "",
        *table(head, rows),
    ]


def _worst(summary: Summary) -> list[str]:
    """Tabulate the cells in which auto is farthest from the best, and those it covers least."""
    auto, listed = summary["names"].index("auto"), []
    for g in summary["groups"].values():
        for i, name in enumerate(g["cells"]):
            listed.append((name, g["to_best"][i][auto], g["best"][i], g["by_cell"][i]))
    if not listed:
        return []
    far = sorted(listed, key=lambda row: -row[1])[:_WORST]
    low = sorted((row for row in listed if not math.isnan(row[3])), key=lambda row: row[3])
    return [
        *table(
            ["cells where auto is farthest from the best", "auto / best", "the best", "coverage"],
            [(name, _times(log), best, _percent(held)) for name, log, best, held in far],
        ),
        "",
        *table(
            ["cells that auto covers least", "coverage"],
            [(name, _percent(held)) for name, _, _, held in low[:_WORST]],
        ),
    ]


def _colour(part: dict[str, Any]) -> str:
    """Format coverage, and the share of data sets of the colour."""
    if not part["sets"]:
        return ""
    return f"{_percent(part['coverage'])} (of {_percent(part['share'])})"


def _times(log: float) -> str:
    """Format a ratio given as a logarithm."""
    return "" if math.isnan(log) else f"{math.exp(log):.2f}"


def _percent(value: float) -> str:
    """Format a share; empty if it is undefined."""
    if math.isnan(value):
        return ""
    return f"{100 * value:.1f} %" if 0 < value < 1 else f"{100 * value:.0f} %"
