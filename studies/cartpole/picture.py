"""Draw table 2: the RMSE beside the paper's, the bias, and the RMSE of batches of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from ope_gym.report.figures import INK, dress
from studies.cartpole.claims import PAPER
from studies.harness.pictures import BLUE, GREEN, PINK, RED, dots, legend_below, new_figure
from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINEAR = 10.0  # the axis of biases is linear up to here, logarithmic beyond
_SOURCE_COLOURS = {"fresh": BLUE, "in-sample": RED}


def cartpole_figure(summary: Summary) -> Figure:
    """Draw the RMSE beside the paper's, the bias, and the RMSE of batches of runs."""
    names, sources = summary["names"], summary["sources"]
    figure = new_figure(13.5, 4.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 1.1, 1.1])
    for shift, (label, colour) in zip((0.0, 0.22), _SOURCE_COLOURS.items(), strict=True):
        dots(left, names, sources[label]["rmse_percentiles"], shift, colour, f"ours, {label}")
        y = np.arange(len(names)) + shift
        error = 3 * np.array(sources[label]["bias_error"], dtype=np.float64)
        middle.errorbar(
            sources[label]["bias"], y, xerr=error, fmt="o", ms=4, lw=1.3, color=colour, label=label
        )
    paper = [PAPER.get(name, (np.nan,) * 3) for name in names]
    dots(left, names, paper, -0.22, INK, "paper")
    left.set_xscale("log")
    title = "RMSE, 5th to 95th percentile of a bootstrap over runs"
    left.set_title(title, loc="left", fontsize=10)
    dress(left, "RMSE", "")
    middle.axvline(0.0, color=INK, lw=0.8)
    middle.set_xscale("symlog", linthresh=_LINEAR)
    middle.set_title("Bias ± 3 standard errors", loc="left", fontsize=10)
    dress(middle, f"bias (linear from −{_LINEAR:g} to {_LINEAR:g}, logarithmic beyond)", "")
    for ax in (left, middle):
        ax.set_yticks(np.arange(len(names)), names)
        ax.invert_yaxis()
        legend_below(ax, 3)
    _batches(right, summary)
    variant = f"PoWER with the {summary['weighting']}, exploring by the {summary['exploration']}"
    figure.suptitle(f"{summary['env']}, {variant}, {summary['runs']} runs", fontsize=11)
    return figure


def _batches(ax: Axes, summary: Summary) -> None:
    """Draw the RMSE of each batch of runs, dashed for in-sample data."""
    names = summary["names"]
    for source, line in (("fresh", "o-"), ("in-sample", "o--")):
        batches = np.array(summary["sources"][source]["batch_rmse"], dtype=np.float64)
        at = np.arange(1, len(batches) + 1)
        for name, colour in (("BIS", BLUE), ("BCIS", PINK), ("FIS", RED), ("NFIS", GREEN)):
            label = name if source == "fresh" else None
            ax.plot(at, batches[:, names.index(name)], line, color=colour, ms=3, lw=1, label=label)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(ax, 4)
    size = summary["sources"]["fresh"]["batch_size"]
    title = f"RMSE by batches of {size} runs (dashed: in-sample)"
    ax.set_title(title, loc="left", fontsize=10)
    dress(ax, "batch", "RMSE")
