"""Measure how often intervals hold the truth if propensities are estimated, and if recorded.

The data sets of the small MDPs are evaluated with the policies that acted, and with what
`fit_behaviour` makes of their actions alone: once as if this were known, and once as it is, with
the error of the estimated propensities in the intervals. The truth is exact.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym import evaluate, fit_behaviour
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import UnknownPolicy
from studies.harness.claims import Claim, Evidence
from studies.harness.errors import standard_errors
from studies.harness.markdown import table
from studies.harness.seeds import streams
from studies.harness.small_grid import LOGGERS, grid
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("auto", "NFIS", "FIS", "NBIS", "BIS", "FWDR", "DR")
KINDS = ("recorded", "taken as known", "estimated")
COLOURS = ("green", "amber", "red")


@dataclass(frozen=True)
class Propensities(Study):
    """Draw in each run a data set for some regimes of the grid."""

    level: float = 0.95
    every: int = 24  # a run takes every 24th regime of the grid, starting at random
    grid_seed: int = 2
    model: str = "logit"

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0 or self.every < 1:
            raise ValueError(
                f"level={self.level}, every={self.every}: a level is between 0 and 1, every is at "
                "least 1"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return coverage, errors and colours, (regimes, kinds, estimators) each."""
        regimes = grid(self.grid_seed)
        shape = (len(regimes), len(KINDS), len(NAMES))
        holds, off, colour = (np.full(shape, math.nan) for _ in range(3))
        first, *rngs = streams(seed, 1 + len(regimes))
        for r in range(int(first.integers(self.every)), len(regimes), self.every):
            data, target, truth = regimes[r].simulate(rngs[r])
            fitted = fit_behaviour(forgotten(data), model=self.model).trajectories
            for k, episodes in enumerate((data, taken_as_known(fitted), fitted)):
                found = evaluate(episodes, target, NAMES, level=self.level)
                for e, name in enumerate(NAMES):
                    estimate = found[name]
                    holds[r, k, e] = truth in estimate.interval
                    off[r, k, e] = (estimate.value - truth) / regimes[r].horizon
                    colour[r, k, e] = COLOURS.index(estimate.verdict.colour)
        return {"holds": holds, "off": off, "colour": colour}

    def summarise(self, runs: Runs) -> Summary:
        """Return coverage and errors in all, by loggers and where the estimate is not red."""
        holds = runs["holds"]
        loggers = np.array([regime.loggers for regime in grid(self.grid_seed)])
        whole = np.ones(holds.shape, dtype=np.bool_)
        masks = {"all": whole, "not red": np.broadcast_to((runs["colour"] < 2), holds.shape)}
        masks |= {
            name: np.broadcast_to((loggers == name)[:, None, None], holds.shape) for name in LOGGERS
        }
        return {
            "runs": len(holds),
            "level": self.level,
            "model": self.model,
            "sets": int(np.isfinite(holds[:, :, 0, 0]).sum()),
            "parts": {name: _described(holds, runs["off"], mask) for name, mask in masks.items()},
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge coverage with estimated propensities."""
        level, parts = summary["level"], summary["parts"]
        rows = [
            Evidence(
                f"{name}, {where}",
                part["holds"][2][e] - level + 0.02,
                part["error"][2][e],
                note=f"{part['holds'][2][e]:.1%}; recorded {part['holds'][0][e]:.1%}, "
                f"taken as known {part['holds'][1][e]:.1%}",
            )
            for where, part in ((where, parts[where]) for where in ("all", "not red"))
            for e, name in enumerate(NAMES)
        ]
        return [
            Claim(
                "our extension",
                "With estimated propensities, intervals contain the value at least as often as "
                "they say, less two percentage points.",
                f"coverage − {level - 0.02:.0%}",
                tuple(rows),
                "The loggers act on their observations alone here, so the fitted model can be "
                "right.",
            )
        ]

    def table(self, summary: Summary) -> str:
        """Tabulate coverage and errors by loggers."""
        rows = []
        for name, part in summary["parts"].items():
            for k, kind in enumerate(KINDS):
                cover = [_percent(value) for value in part["holds"][k]]
                errors = [f"{x:.3g}" for x in part["rmse"][k]] if k != 1 else [""] * len(NAMES)
                rows.append([name, kind, *cover, *errors])  # the values of the last two are equal
        heads = [*NAMES, *(f"RMSE {name}" for name in NAMES)]
        return "\n".join(
            [
                f"{summary['runs']} runs, {summary['sets']} held-out data sets of small MDPs. The "
                f"first columns say how often {summary['level']:.0%} intervals contain the value: "
                "with the recorded propensities; with those that "
                f"fit_behaviour(model={summary['model']!r}) estimates from the same actions, taken "
                "as if they were known; and with the error of these estimates in the intervals. "
                "Then comes the root mean square error, divided by the horizon. Rows are by kind "
                'of loggers; "not red" leaves out the estimates whose verdict is red.',
                "",
                *table(["part", "propensities", *heads], rows),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the coverage of each estimator."""
        from studies.harness.pictures import BLUE, GREEN, RED, legend_below, new_figure

        figure = new_figure(5.0, 3.2)
        axes = figure.add_subplot()
        part = summary["parts"]["all"]
        for k, (kind, colour) in enumerate(zip(KINDS, (BLUE, GREEN, RED), strict=True)):
            places = np.arange(len(NAMES)) + 0.15 * (k - 1)
            style: dict[str, Any] = {"fmt": "o", "ms": 4, "color": colour, "label": kind}
            error = 2 * np.array(part["error"][k])
            axes.errorbar(places, part["holds"][k], yerr=error, **style)
        axes.axhline(summary["level"], color="black", linewidth=0.8)
        axes.set_xticks(range(len(NAMES)), NAMES, fontsize=8)
        axes.set_ylabel("coverage ± 2 standard errors", fontsize=8)
        legend_below(axes, 3)
        return figure


def forgotten(data: Trajectories) -> Trajectories:
    """Return the same episodes as someone has them who recorded no probabilities."""
    unknown = tuple(UnknownPolicy() for _ in data.policies)
    return dataclasses.replace(data, policies=unknown, log_probs=np.full(data.n_steps, np.nan))


def taken_as_known(data: Trajectories) -> Trajectories:
    """Return episodes with the same estimated policies, as if nothing were open about them."""
    policies = (dataclasses.replace(p, scatter=None) for p in data.policies)  # type: ignore[type-var]
    return dataclasses.replace(data, policies=tuple(policies))


def _described(holds: Any, off: Any, mask: Any) -> dict[str, Any]:
    """Return coverage, its error and the root mean square error, (kinds, estimators) each."""
    found: dict[str, Any] = {"holds": [], "error": [], "rmse": []}
    for k in range(len(KINDS)):
        row: dict[str, list[float]] = {name: [] for name in found}
        for e in range(len(NAMES)):
            chosen = np.where(mask[:, :, k, e], holds[:, :, k, e], math.nan)  # (runs, regimes)
            some = chosen[np.isfinite(chosen).any(axis=1)]
            squares = np.where(np.isfinite(chosen), off[:, :, k, e] ** 2, math.nan)
            row["holds"].append(float(np.nanmean(some)) if some.size else math.nan)
            error = float(standard_errors(np.nanmean(some, axis=1))) if some.size else math.nan
            row["error"].append(error)
            row["rmse"].append(float(np.sqrt(np.nanmean(squares))) if some.size else math.nan)
        for name, values in row.items():
            found[name].append(values)
    return found


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1%}"
