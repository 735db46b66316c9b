"""Draw the RMSE of estimators with a q model relative to NFIS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = {"auto": "#0072B2", "FWDR": "#E69F00", "DM": "#009E73", "MAGIC": "#CC79A7"}
_GRID = {"exact q": "#009E73", "fitted q": "#0072B2", "shifted q": "#CC79A7", "wrong q": "#D55E00"}


def beyond_figure(summary: Summary) -> Figure:
    """Draw ratios on the paper's data (left), and of auto over the grid by q model (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    names, cases = summary["names"], summary["cases"]
    ratio, low, high = (np.array(summary[key]) for key in ("ratio", "low", "high"))
    rows = [i for i, case in enumerate(cases) if case[0] != "grid"]
    for j, (name, colour) in enumerate(_SHOWN.items()):
        if name not in names:
            continue
        e = names.index(name)
        y = np.arange(len(rows)) + 0.18 * (j - 1.5)
        spread = np.abs(np.stack([ratio[rows, e] - low[rows, e], high[rows, e] - ratio[rows, e]]))
        left.errorbar(
            ratio[rows, e],
            y,
            xerr=spread,
            fmt="o",
            color=colour,
            label=name,
            markersize=4,
            capsize=2,
            linewidth=1.2,
        )
    left.axvline(1.0, color="0.4", linewidth=1)
    left.set_xscale("log")
    left.set_yticks(np.arange(len(rows)), [f"{cases[i][1]}\n{cases[i][2]}" for i in rows])
    left.invert_yaxis()
    left.set_xlabel("RMSE relative to NFIS (log scale), 95 % interval")
    left.set_title("the paper's data")
    left.legend(frameon=False, loc="best")
    auto = names.index("auto")
    for q, colour in _GRID.items():
        inside = [i for i, case in enumerate(cases) if case[0] == "grid" and case[2] == q]
        order = sorted(inside, key=lambda i: ratio[i, auto])
        x = np.arange(len(order))
        right.plot(x, ratio[order, auto], "o-", color=colour, label=q, markersize=3)
        right.fill_between(x, low[order, auto], high[order, auto], color=colour, alpha=0.15)
    right.axhline(1.0, color="0.4", linewidth=1)
    right.set_xlabel("regime of the grid, sorted")
    right.set_ylabel("RMSE of auto relative to NFIS")
    right.set_title("auto on small MDPs")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is left else "y", alpha=0.25)
    return figure
