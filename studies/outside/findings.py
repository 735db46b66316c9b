"""Turn the runs of the study into ratios of RMSE, coverage by colour, and shares of alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from studies.harness.errors import largest_share, resample
from studies.harness.study import Runs
from studies.outside.cells import Cell

AS_GOOD_AS_EXACT = 0.01  # of NFIS's RMSE: smaller ones count as this, for nobody would notice
ROUNDING = 1e-9  # relative: an interval of an exact estimate is as wide as a rounding error
ENOUGH = 40.0  # effective episodes from which on a red verdict needs another reason than few data
RED = 2.0


def found_groups(
    runs: Runs, cells: Sequence[Cell], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the findings of each group without faults."""
    squares = (runs["value"] - runs["truth"][..., None]) ** 2
    again = resample(len(squares))  # (B, R)
    found = {}
    for group in dict.fromkeys(cell.group for cell in cells if cell.group != "faults"):
        inside = [i for i, cell in enumerate(cells) if cell.group == group]
        part = {name: array[:, inside] for name, array in runs.items()}
        found[group] = {
            "hidden": cells[inside[0]].hidden,
            "cells": [str(cells[i]) for i in inside],
            **_ratios(squares[:, inside], again, names, part),
            "coverage": {name: _coverage(part, again, e) for e, name in enumerate(names)},
            "by_cell": _by_cell(part, names.index("auto")),
            "width": _width(part, names),
            "free": _free(part),
            "red": _share(part["colour"][..., names.index("auto")] == RED, part["ess"] >= ENOUGH),
        }
    return found


def found_faults(runs: Runs, cells: Sequence[Cell], auto: int) -> list[dict[str, Any]]:
    """Return how often verdicts met the fault, by fault, door and number of episodes.

    Without a fault only data sets with enough effective episodes count: with fewer, red is right.
    A missing action is also met by an interval that knows of it, and so contains the value.
    """
    rows: dict[tuple[str, bool, int], list[int]] = {}
    for i, cell in enumerate(cells):
        if cell.group == "faults":
            rows.setdefault((cell.fault, cell.arrays, cell.n), []).append(i)
    made = []
    for (fault, arrays, n), inside in rows.items():
        red = runs["colour"][:, inside, auto] == RED  # (R, cells)
        counts = runs["ess"][:, inside] >= (0.0 if fault else ENOUGH)
        held = _holds({name: array[:, inside] for name, array in runs.items()}, auto)
        met = red | (held == 1.0) if fault == "missing action" else red
        share, sets = _share(met, counts)
        made.append(
            {
                "fault": fault,
                "arrays": arrays,
                "n": n,
                "red": _share(red, counts)[0],
                "share": share,
                "error": _binomial(share, sets),
                "sets": sets,
                "coverage": _mean(held),
                "by_cell": {
                    str(cells[i]): _share(met[:, k], counts[:, k])[0]
                    for k, i in enumerate(inside)
                    if counts[:, k].any()
                },
            }
        )
    return made


def _ratios(
    squares: FloatArray, again: FloatArray, names: Sequence[str], part: Runs
) -> dict[str, Any]:
    """Return RMSEs relative to the best in each cell and to NFIS, and geometric means.

    Standard errors are of logarithms, from a bootstrap over runs; which estimator is the best is
    decided on all runs.
    """
    mse = squares.mean(axis=0)  # (C, E)
    redrawn = np.einsum("br,rce->bce", again, squares)
    nfis, auto = names.index("NFIS"), names.index("auto")
    logs, logs_again = _log_rmse(mse, nfis), _log_rmse(redrawn, nfis)
    best = np.argmin(logs, axis=1)
    rows = np.arange(len(best))
    to_best = logs - logs[rows, best][:, None]  # (C, E)
    to_best_again = logs_again - logs_again[:, rows, best][..., None]
    to_nfis = logs[:, auto] - logs[:, nfis]
    to_nfis_again = logs_again[:, :, auto] - logs_again[:, :, nfis]
    few = len(squares) < 2

    def error(values: FloatArray) -> FloatArray:
        return np.asarray(values.std(axis=0) * (math.nan if few else 1.0))

    return {
        "rmse": np.exp(logs),
        "best": [names[e] for e in best],
        "to_best": to_best,
        "to_best_mean": to_best.mean(axis=0),
        "to_best_error": error(to_best_again.mean(axis=1)),
        "to_nfis": to_nfis,
        "to_nfis_error": error(to_nfis_again),
        "to_nfis_mean": float(to_nfis.mean()),
        "to_nfis_mean_error": float(error(to_nfis_again.mean(axis=1))),
        "largest_share": largest_share((part["value"] - part["truth"][..., None])[..., auto]),
    }


def _log_rmse(mse: FloatArray, nfis: int) -> FloatArray:
    """Return ln RMSE (..., E), at least that of `AS_GOOD_AS_EXACT`."""
    floor = AS_GOOD_AS_EXACT**2 * np.maximum(mse[..., nfis : nfis + 1], 1e-300)
    return np.asarray(0.5 * np.log(np.maximum(mse, floor)))


def _coverage(part: Runs, again: FloatArray, e: int) -> dict[str, Any]:
    """Return coverage by colour and of all data sets with an interval, with standard errors."""
    held, colour = _holds(part, e), part["colour"][..., e]
    defined = ~np.isnan(held)
    made: dict[str, Any] = {"undefined": float(1.0 - defined.mean())}
    picked = {name: colour == k for k, name in enumerate(("green", "amber", "red"))}
    for name, some in (*picked.items(), ("all", np.ones_like(defined))):
        use = some & defined
        covered = np.where(use, held, 0.0).sum(axis=1)  # (R,)
        count = use.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            redrawn = (again @ covered) / (again @ count)
        share = float(covered.sum() / count.sum()) if count.sum() else math.nan
        spread = float(redrawn.std()) if count.sum() and np.isfinite(redrawn).all() else math.nan
        if spread == 0.0 or math.isnan(spread):  # all alike, or too rare to draw from
            spread = _binomial(share, int(count.sum()))
        made[name] = {
            "share": float(some.mean()),
            "sets": int(count.sum()),
            "coverage": share,
            "error": spread if len(again[0]) > 1 else math.nan,
        }
    return made


def _by_cell(part: Runs, auto: int) -> list[float]:
    """Return the coverage of auto in each cell."""
    held = _holds(part, auto)
    return [_mean(held[:, i]) for i in range(held.shape[1])]


def _holds(part: Runs, e: int) -> FloatArray:
    """Return whether intervals contain the value (R, C), NaN where there is none."""
    low, high, truth = part["low"][..., e], part["high"][..., e], part["truth"]
    slack = ROUNDING * np.maximum(np.abs(truth), 1.0)
    inside = (low - slack <= truth) & (truth <= high + slack)
    return np.where(np.isnan(low) | np.isnan(high), math.nan, inside.astype(np.float64))


def _width(part: Runs, names: Sequence[str]) -> float:
    """Return the median width of auto's intervals relative to those of NFIS."""
    auto, nfis = (
        part["high"][..., names.index(name)] - part["low"][..., names.index(name)]
        for name in ("auto", "NFIS")
    )
    known = np.isfinite(auto) & np.isfinite(nfis) & (nfis > 0)
    return float(np.median(auto[known] / nfis[known])) if known.any() else math.nan


def _free(part: Runs) -> float:
    """Return the coverage of the intervals whatever the model, where auto rests on it."""
    ends = part["free_low"], part["free_high"]
    with np.errstate(invalid="ignore"):
        inside = (ends[0] <= part["truth"]) & (part["truth"] <= ends[1])
        return _share(inside, np.isfinite(ends[0] + ends[1]) & (part["share"] >= 0.5))[0]


def _share(hit: NDArray[np.bool_], among: NDArray[np.bool_]) -> tuple[float, int]:
    """Return how often there is a hit where it counts, and the number of these data sets."""
    count = int(among.sum())
    return float((hit & among).sum() / count) if count else math.nan, count


def _mean(values: FloatArray) -> float:
    """Return the mean of what is not NaN; NaN if nothing is."""
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else math.nan


def _binomial(share: float, count: int) -> float:
    """Return the standard error of a share; that of one event in so many if all are alike."""
    if not count or math.isnan(share):
        return math.nan
    return max(math.sqrt(share * (1.0 - share) / count), 1.0 / (2.0 + count))
