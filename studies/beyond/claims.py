"""Judge whether `auto` is better than NFIS."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from studies.harness.claims import FEWEST, Claim, Evidence
from studies.harness.errors import tail
from studies.harness.study import Summary

MEAN, DYNAMICS, WRONG, GRID = 0.75, 0.4, 1.05, 1.1  # largest ratios of RMSE to NFIS
MANY = 4.0  # standard errors that decide for the worst of many


def beyond_claims(summary: Summary) -> list[Claim]:
    """Return claims about ratios of RMSE, as logarithms with paired bootstrap errors."""
    auto = summary["names"].index("auto")
    ratio = np.array(summary["ratio"])[:, auto]
    error = np.array(summary["log_error"])[:, auto]
    share = np.array(summary["largest_share"])  # of one run, in auto or NFIS
    cases = summary["cases"]

    def below(i: int, limit: float) -> Evidence:
        _, setting, q = cases[i]
        return Evidence(
            f"{setting}, {q}",
            math.log(limit / ratio[i]),
            float(error[i]),
            shown=f"{ratio[i]:.3f} (at most {limit:g})",
            note=f"{summary['runs'][i]} runs; the largest has {share[i]:.0%} of the squares",
            open=tail(share[i]) if summary["runs"][i] >= FEWEST else f"fewer than {FEWEST} runs",
        )

    linear = [i for i, case in enumerate(cases) if case[2] == "linear q"]
    mean, mean_error = summary["geometric"]
    inside = [i for i, case in enumerate(cases) if case[0] == "grid"]
    worst = (
        max(inside, key=lambda i: ratio[i]),
        max(inside, key=lambda i: math.log(ratio[i] / GRID) / (float(error[i]) or 1.0)),
    )
    source = "beyond the paper"
    return [
        Claim(
            source,
            "With a linear q, auto is better than NFIS on every CartPole setting",
            "ln(1 / ratio of RMSE)",
            tuple(below(i, 1.0) for i in linear),
            "",
        ),
        Claim(
            source,
            f"and its geometric mean there is at most {MEAN:g} of NFIS",
            f"ln({MEAN:g} / ratio)",
            (
                Evidence(
                    "four settings",
                    math.log(MEAN / mean),
                    mean_error,
                    shown=f"{mean:.3f} (at most {MEAN:g})",
                ),
            ),
            "",
        ),
        Claim(
            source,
            f"With a learned dynamics model as q, auto is at most {DYNAMICS:g} of NFIS",
            f"ln({DYNAMICS:g} / ratio)",
            tuple(below(i, DYNAMICS) for i, case in enumerate(cases) if case[2] == "dynamics q"),
            "",
        ),
        Claim(
            source,
            "A deliberately wrong dynamics model costs no more than 5 %",
            f"ln({WRONG:g} / ratio)",
            tuple(below(i, WRONG) for i, case in enumerate(cases) if case[2] == "wrong dynamics q"),
            "Left and right are swapped in the episodes that the model learns from.",
        ),
        Claim(
            source,
            f"Nowhere in the grid is auto above {GRID:g} of NFIS, whatever the q",
            f"ln({GRID:g} / ratio), the two of {len(inside)} that contradict it most",
            tuple(dataclasses.replace(below(i, GRID), limit=MANY) for i in dict.fromkeys(worst)),
            f"Of {len(inside)} ratios some are large by chance: {MANY:g} standard errors are "
            "needed to decide.",
        ),
    ]
