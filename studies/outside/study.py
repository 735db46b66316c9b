"""Report on problems like those that others test on: is `auto` near the best, and true to itself.

Each run draws one data set for each cell of `studies.outside.cells`, and all estimators see the
same data. Some cells have a fault in what was recorded, which the verdict should find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym import Evaluation, Trajectories, evaluate, evaluate_log_probs
from ope_gym.arrays import FloatArray
from ope_gym.policies import Policy
from studies.harness.seeds import streams
from studies.harness.study import Runs, Study, Summary
from studies.outside.cells import REPORT_SEED, Cell, cells, fault_cells
from studies.outside.claims import outside_claims
from studies.outside.findings import found_faults, found_groups
from studies.outside.tables import outside_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("NFIS", "auto", "FWDR", "DM", "MDR", "MAGIC")  # the box
COLOURS = ("green", "amber", "red")
ALARMED = ("NFIS", "auto")  # all that is asked of a cell with a fault, or of its twin without


@dataclass(frozen=True)
class Outside(Study):
    """Measure errors, coverage by colour, and alarms, group by group."""

    problems: int = REPORT_SEED  # seed of processes, loggers and targets
    groups: tuple[str, ...] = ("all",)  # or some of them, to save time

    def __post_init__(self) -> None:
        known = {cell.group for cell in (*cells(), *fault_cells())}
        unknown = set(self.groups) - known - {"all"}
        if unknown or self.problems < 0:
            raise ValueError(
                f"groups={self.groups}, problems={self.problems}: groups are {sorted(known)}, and "
                "the seed of the problems is at least 0"
            )

    @property
    def cells(self) -> list[Cell]:
        """Return the cells of the chosen groups, those for alarms last."""
        listed = [*cells(self.problems), *fault_cells(self.problems)]
        return [cell for cell in listed if self.groups == ("all",) or cell.group in self.groups]

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return arrays (cells, E): values, ends of intervals and colours, NaN if not asked for.

        And (cells,): true values, the effective sample size of NFIS, the ends of the interval of
        auto that holds whatever the model, and the share of the model in auto.
        """
        listed = self.cells
        shape = (len(listed), len(NAMES))
        value, low, high, colour = np.full((4, *shape), math.nan)
        truth, ess, free_low, free_high, share = np.full((5, len(listed)), math.nan)
        for i, (cell, rng) in enumerate(zip(listed, streams(seed, len(listed)), strict=True)):
            data, target, truth[i] = cell.simulate(rng)
            found = evaluated(cell, data, target)
            ess[i] = found["NFIS"].diagnostics.ess
            auto = found["auto"]
            share[i] = auto.share
            if auto.model_free is not None:
                free_low[i], free_high[i] = auto.model_free.low, auto.model_free.high
            for e, name in enumerate(NAMES):
                if name in found:
                    one = found[name]
                    value[i, e] = one.value
                    low[i, e], high[i, e] = one.interval.low, one.interval.high
                    colour[i, e] = COLOURS.index(one.verdict.colour)
        return {
            "value": value,
            "low": low,
            "high": high,
            "colour": colour,
            "truth": truth,
            "ess": ess,
            "free_low": free_low,
            "free_high": free_high,
            "share": share,
        }

    def summarise(self, runs: Runs) -> Summary:
        """Return ratios of RMSE, coverage by colour and alarms."""
        listed = self.cells
        return {
            "runs": len(runs["truth"]),
            "names": NAMES,
            "problems": self.problems,
            "groups": found_groups(runs, listed, NAMES),
            "faults": found_faults(runs, listed, NAMES.index("auto")),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge the goals for auto, intervals and alarms."""
        return outside_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate errors, coverage and alarms by group, and the worst cells."""
        return outside_tables(summary)

    def picture(self, summary: Summary) -> Figure:
        """Draw the errors of auto and the coverage by group."""
        from studies.outside.picture import outside_figure

        return outside_figure(summary)


def evaluated(cell: Cell, data: Trajectories, target: Policy) -> Evaluation:
    """Evaluate the target with the policies, or with arrays of log-probabilities alone."""
    asked: Sequence[str] = ALARMED if cell.group == "faults" else NAMES
    if not cell.arrays:
        return evaluate(data, target, asked)
    seen, actions = data.observations, data.actions
    behaviours: FloatArray = np.stack([p.log_prob(seen, actions) for p in data.policies])
    return evaluate_log_probs(
        target.log_prob(seen, actions),
        behaviours,
        data.policy_ids[data.offsets[:-1]],
        data.rewards,
        data.offsets,
        asked,
        regime="held-out",
    )
