"""Pictures of tables 2 and 3: errors beside the paper's, biases, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.claims_blackjack import PAPER as TABLE_3
from studies.claims_cartpole import PAPER as TABLE_2
from studies.frame import Summary
from studies.pictures import BLACK, BLUE, GREEN, PINK, RED, dress, legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cartpole_figure(summary: Summary) -> Figure:
    """RMSE beside the paper's, bias, and the RMSE of batches of runs."""
    names, sources = summary["names"], summary["sources"]
    figure = new_figure(13.5, 4.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 1.1, 1.1])
    for shift, (label, colour) in zip((0.0, 0.22), _SOURCE_COLOURS.items(), strict=True):
        _dots(left, names, sources[label]["rmse_percentiles"], shift, colour, f"ours, {label}")
        y = np.arange(len(names)) + shift
        error = 3 * np.array(sources[label]["bias_error"], dtype=np.float64)
        middle.errorbar(
            sources[label]["bias"], y, xerr=error, fmt="o", ms=4, lw=1.3, color=colour, label=label
        )
    paper = [TABLE_2.get(name, (np.nan,) * 3) for name in names]
    _dots(left, names, paper, -0.22, BLACK, "paper")
    left.set_xscale("log")
    title = "RMSE, 5th to 95th percentile of a bootstrap over runs"
    left.set_title(title, loc="left", fontsize=10)
    dress(left, "RMSE", "")
    middle.axvline(0.0, color=BLACK, lw=0.8)
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
    """RMSE of each batch of runs: fresh data as full, in-sample data as dashed lines."""
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


_LINEAR = 10.0  # biases up to here are on a linear scale
_SOURCE_COLOURS = {"fresh": BLUE, "in-sample": RED}


def _dots(
    ax: Axes,
    names: Sequence[str],
    percentiles: Sequence[Sequence[float]],
    shift: float,
    colour: str,
    label: str,
) -> None:
    """The 50th percentile as a dot, the 5th and 95th as the ends of a line."""
    low, middle, high = np.array(percentiles, dtype=np.float64).T
    y = np.arange(len(names)) + shift
    ax.errorbar(
        middle,
        y,
        xerr=[middle - low, high - middle],
        fmt="o",
        ms=4,
        lw=1.3,
        color=colour,
        label=label,
    )


def blackjack_figure(summary: Summary) -> Figure:
    """MSE beside the paper's, and paired differences, for both schedules."""
    names, schedules = summary["names"], summary["schedules"]
    figure = new_figure(13.5, 4.4)
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    for s, (ax, name) in enumerate(zip(axes, schedules, strict=False)):
        _dots(ax, names, schedules[name]["mse_percentiles"], 0.12, BLUE, "ours")
        _dots(ax, names, [TABLE_3[name][e] for e in names], -0.12, BLACK, "paper")
        plain = summary["plain"][s]
        label = f"{summary['games']:,} games of the target"
        ax.axvline(plain, color=GREEN, lw=1, ls="--", label=label)
        ax.set_xscale("log")
        ax.set_yticks(np.arange(len(names)), names)
        ax.invert_yaxis()
        title = f"MSE with {name}, 5th to 95th percentile of a bootstrap"
        ax.set_title(title, loc="left", fontsize=10)
        legend_below(ax, 3)
        dress(ax, "MSE", "")
    shown = [
        ("BIS", "FIS"),
        ("FIS", "OUIS"),
        ("NBIS", "NOUIS"),
        ("NOUIS", "NFIS"),
        ("BIS", "NBIS"),
        ("FIS", "NFIS"),
        ("OUIS", "NBIS"),
    ]
    right = axes[2]
    for shift, colour, (name, found) in zip(
        (-0.1, 0.1), (BLUE, RED), schedules.items(), strict=True
    ):
        at = [(names.index(a), names.index(b)) for a, b in shown]
        value = [1000 * found["pairs"]["difference"][i][j] for i, j in at]
        error = [3000 * found["pairs"]["difference_error"][i][j] for i, j in at]
        y = np.arange(len(shown)) + shift
        right.errorbar(value, y, xerr=error, fmt="o", ms=4, lw=1.3, color=colour, label=name)
    right.axvline(0.0, color=BLACK, lw=0.8)
    right.set_yticks(np.arange(len(shown)), [f"{a} − {b}" for a, b in shown])
    right.invert_yaxis()
    legend_below(right, 2)
    right.set_title("Differences of MSE ± 3 standard errors", loc="left", fontsize=10)
    dress(right, "MSE − MSE, thousandths; the paper says: positive", "")
    figure.suptitle(f"Blackjack-v1, {summary['runs']} runs", fontsize=11)
    return figure
