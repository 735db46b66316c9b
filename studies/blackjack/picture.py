"""Draw table 3: the MSE beside the paper's, and paired differences of MSEs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ope_gym.report.figures import INK, dress
from studies.blackjack.claims import PAPER
from studies.harness.pictures import BLUE, GREEN, RED, dots, legend_below, new_figure
from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blackjack_figure(summary: Summary) -> Figure:
    """Draw the MSE beside the paper's, and paired differences, for both schedules."""
    names, schedules = summary["names"], summary["schedules"]
    figure = new_figure(13.5, 4.4)
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    for s, (ax, name) in enumerate(zip(axes, schedules, strict=False)):
        dots(ax, names, schedules[name]["mse_percentiles"], 0.12, BLUE, "ours")
        dots(ax, names, [PAPER[name][e] for e in names], -0.12, INK, "paper")
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
    right.axvline(0.0, color=INK, lw=0.8)
    right.set_yticks(np.arange(len(shown)), [f"{a} − {b}" for a, b in shown])
    right.invert_yaxis()
    legend_below(right, 2)
    right.set_title("Differences of MSE ± 3 standard errors", loc="left", fontsize=10)
    dress(right, "MSE − MSE, thousandths; the paper says: positive", "")
    figure.suptitle(f"Blackjack-v1, {summary['runs']} runs", fontsize=11)
    return figure
