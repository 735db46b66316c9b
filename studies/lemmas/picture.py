"""Draw how the variances of BIS, FIS, OUIS and the optimum compare over random problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ope_gym.report.figures import INK, dress
from studies.harness.pictures import BLUE, GREEN, RED, new_figure
from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def lemmas_figure(summary: Summary) -> Figure:
    """Draw distributions of ratios of variances over random problems."""
    figure = new_figure(13.5, 4.0)
    axes = figure.subplots(1, 4, sharey=True)
    levels = np.array(summary["levels"])
    for family, colour in zip(summary["families"], (BLUE, RED, GREEN), strict=True):
        for ax, ratio in zip(axes, ("FIS / BIS", "OUIS / FIS", "optimum / FIS"), strict=False):
            ax.plot(summary["ratios"][family][ratio], levels, color=colour, label=family)
            ax.set_title(f"Var {ratio.replace(' / ', ' / Var ')}", loc="left", fontsize=10)
    for kind, colour in zip(summary["multi_step"], (RED, BLUE, GREEN), strict=True):
        found = summary["multi_step"][kind]["quantiles"]
        axes[3].plot(found, levels, color=colour, label=f"rewards: {kind}")
    axes[3].set_title("Var FIS / Var BIS, several steps", loc="left", fontsize=10)
    axes[1].set(xscale="log", xlim=(0.2, 20), xticks=[0.2, 0.5, 1, 2, 5, 10, 20])
    axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[1].xaxis.set_minor_formatter(lambda value, _: "")
    for ax in axes:
        ax.axvline(1.0, color=INK, lw=0.8, ls=(0, (2, 2)))
        ax.set_ylim(0, 1)
        ax.legend(fontsize=7, frameon=False, loc="lower right" if ax is axes[1] else "upper left")
        dress(ax, "ratio", "share of problems below" if ax is axes[0] else "")
    return figure
