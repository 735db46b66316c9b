"""Draw how far auto is from the best in each cell, and how often its intervals cover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from studies.harness.study import Summary
from studies.outside.claims import ALL, BEST, GREEN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"green": "#009E73", "amber": "#E69F00", "red": "#D55E00", "all": "0.3"}


def outside_figure(summary: Summary) -> Figure:
    """Draw ratios of auto and NFIS to the best (left), and coverage by colour (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names, groups = summary["names"], summary["groups"]
    for name, colour, shift in (("NFIS", "0.6", 0.15), ("auto", "#0072B2", -0.15)):
        e = names.index(name)
        for row, g in enumerate(groups.values()):
            ratio = np.exp(np.array(g["to_best"])[:, e])
            label = name if row == 0 else None
            y = np.full(len(ratio), row + shift)
            left.plot(ratio, y, "o", color=colour, markersize=3, alpha=0.6, label=label)
            left.plot(np.exp(g["to_best_mean"][e]), row + shift, "|", color=colour, markersize=14)
    left.axvline(BEST, color="0.4", linewidth=1, linestyle=":")
    left.set_xscale("log")
    left.set_xlabel("RMSE relative to the best of each cell (log scale); bar: geometric mean")
    for name, colour in _COLOURS.items():
        parts = [g["coverage"]["auto"][name] for g in groups.values()]
        rows = [row for row, part in enumerate(parts) if part["sets"]]
        covered = [parts[row]["coverage"] for row in rows]
        errors = [2 * np.nan_to_num(parts[row]["error"]) for row in rows]
        shift = 0.12 * (list(_COLOURS).index(name) - 1.5)
        right.errorbar(
            covered,
            np.array(rows) + shift,
            xerr=errors,
            fmt="o",
            color=colour,
            label=name,
            markersize=4,
            capsize=2,
        )
    for level in (GREEN, ALL):
        right.axvline(level, color="0.4", linewidth=1, linestyle=":")
    right.set_xlim(right=1.01)
    right.set_xlabel("coverage of auto's 95 % interval ± 2 standard errors")
    for axes in (left, right):
        labels = [f"{name}{' (hidden)' if g['hidden'] else ''}" for name, g in groups.items()]
        axes.set_yticks(np.arange(len(groups)), labels)
        axes.set_ylim(max(len(groups), 1) - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        if groups:
            axes.legend(frameon=False, loc="best")
    return figure
