"""Judge the goals: auto near the best, intervals that cover, alarms that ring when they should."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from studies.harness.claims import Claim, Evidence
from studies.harness.errors import tail
from studies.harness.study import Summary

BEST, NFIS_MEAN, NFIS_CELL = 1.3, 1.05, 1.10  # largest ratios of RMSE
GREEN, ALL, DIRECT = 0.93, 0.90, 0.90  # least coverage
ALARM = {200: 0.70, 1000: 0.95}  # least share of red by the number of episodes
FALSE_ALARM = 0.01  # largest share of red without a fault
MANY = 4.0  # standard errors that decide for the worst of many
_SOURCE = "beyond the paper"


def outside_claims(summary: Summary) -> list[Claim]:
    """Return the claims about groups and about faults, those that the chosen groups allow."""
    groups: dict[str, Any] = summary["groups"]
    markov = {name: g for name, g in groups.items() if not g["hidden"]}
    hidden = {name: g for name, g in groups.items() if g["hidden"]}
    made = [
        _near_the_best(markov, summary["names"].index("auto")),
        *_near_nfis(hidden),
        _covers(groups, "auto", "green", GREEN),
        _covers(groups, "auto", "all", ALL),
        _covers(markov, "DM", "all", DIRECT),
        *_alarms(summary["faults"]),
    ]
    return [claim for claim in made if claim.evidence]


def _near_the_best(groups: dict[str, Any], auto: int) -> Claim:
    """Return the claim that auto is near the best estimator where states are Markov."""
    return Claim(
        _SOURCE,
        f"Where the state is Markov, the RMSE of auto is at most {BEST:g} times that of the best "
        "estimator, as the geometric mean of every group.",
        f"ln({BEST:g} / ratio)",
        tuple(
            _ratio(name, g["to_best_mean"][auto], g["to_best_error"][auto], BEST)
            for name, g in groups.items()
        ),
        "The best is chosen in each cell with the true value known, so no rule can reach 1.",
    )


def _near_nfis(groups: dict[str, Any]) -> list[Claim]:
    """Return the claims that auto costs little where the state is hidden and the model wrong."""
    mean = tuple(
        _ratio(name, g["to_nfis_mean"], g["to_nfis_mean_error"], NFIS_MEAN)
        for name, g in groups.items()
    )
    single = []
    for g in groups.values():
        logs, errors = g["to_nfis"], g["to_nfis_error"]
        order: tuple[Callable[[int], float], ...] = (
            lambda i: logs[i],  # noqa: B023, used at once
            lambda i: (logs[i] - math.log(NFIS_CELL)) / (errors[i] or 1.0),  # noqa: B023
        )
        for i in dict.fromkeys(max(range(len(logs)), key=key) for key in order):
            row = _ratio(g["cells"][i], logs[i], errors[i], NFIS_CELL)
            open_ = tail(g["largest_share"][i])
            single.append(dataclasses.replace(row, limit=MANY, open=open_))
    return [
        Claim(
            _SOURCE,
            f"Where the state is hidden, the RMSE of auto is at most {NFIS_MEAN:g} times that of "
            "NFIS, as the geometric mean of every group.",
            f"ln({NFIS_MEAN:g} / ratio)",
            mean,
            "",
        ),
        Claim(
            _SOURCE,
            f"Where the state is hidden, it is above {NFIS_CELL:g} times that of NFIS in no cell.",
            f"ln({NFIS_CELL:g} / ratio), the cells of each group that contradict it most",
            tuple(single),
            f"Of many ratios some are large by chance, so it takes {MANY:g} standard errors to "
            "decide.",
        ),
    ]


def _covers(groups: dict[str, Any], name: str, colour: str, least: float) -> Claim:
    """Return the claim that intervals of a colour cover in every group."""
    which = "intervals" if colour == "all" else f"{colour} intervals"
    where = " where the state is Markov" if name == "DM" else ""
    rows = []
    for group, g in groups.items():
        found = g["coverage"][name]
        part = found[colour]
        if part["sets"]:
            rows.append(
                Evidence(
                    group,
                    part["coverage"] - least,
                    part["error"],
                    shown=f"{part['coverage']:.3f} (at least {least:g})",
                    note=f"{part['sets']} data sets"
                    + (f"; {found['undefined']:.1%} undefined" if found["undefined"] else ""),
                )
            )
    return Claim(
        _SOURCE,
        f"The 95 % {which} of {name} contain the value at least {least:.0%} of the time in every "
        f"group{where}.",
        f"coverage − {least:g}",
        tuple(rows),
        "",
    )


def _alarms(faults: Iterable[dict[str, Any]]) -> list[Claim]:
    """Return the claims that faults turn the verdict red, and that nothing else does."""
    found: list[Evidence] = []
    false: list[Evidence] = []
    for row in faults:
        if not row["sets"]:
            continue
        door = "arrays" if row["arrays"] else "policies"
        where = f"{row['fault'] or 'no fault'}, {door}, n = {row['n']}"
        if row["fault"]:
            gap, least = row["share"] - ALARM[row["n"]], f"at least {ALARM[row['n']]:g}"
        else:
            gap, least = FALSE_ALARM - row["share"], f"at most {FALSE_ALARM:g}"
        shown = f"{row['share']:.3f} ({least})"
        worst = (min if row["fault"] else max)(row["by_cell"].items(), key=lambda item: item[1])
        note = f"{row['sets']} data sets; {worst[0]}: {worst[1]:.2f}"
        (found if row["fault"] else false).append(
            Evidence(where, gap, row["error"], shown=shown, note=note)
        )
    return [
        Claim(
            _SOURCE,
            f"Faults in the recorded data turn the verdict red in {ALARM[200]:.0%} of the data "
            f"sets of 200 episodes, and in {ALARM[1000]:.0%} of those of 1000.",
            "share of red (missing action: red, or an interval that contains the value) − goal",
            tuple(found),
            "Wrong propensities are the true ones at temperature 1.3. A missing action is one that "
            "the target takes with probability 20 % in one state, and no logger ever takes there; "
            "an interval that allows for it counts as much as red.",
        ),
        Claim(
            _SOURCE,
            f"Without a fault, and with enough data, the verdict is red in at most "
            f"{FALSE_ALARM:.0%} of the data sets.",
            f"{FALSE_ALARM:g} − share of red on the same problems without the fault",
            tuple(false),
            "Each alarm is a test, which is wrong with a small probability. Data are enough from "
            "40 effective episodes on.",
        ),
    ]


def _ratio(where: str, log: float, error: float, most: float) -> Evidence:
    """Return the evidence that a ratio, given as a logarithm, is below a limit."""
    shown = f"{math.exp(log):.3f} (at most {most:g})"
    return Evidence(where, math.log(most) - log, error, shown=shown)
