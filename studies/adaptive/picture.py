"""Draw the biases of policies and targets that depend on the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.report.figures import INK, dress
from studies.harness.pictures import BLUE, GREEN, RED, legend_below, new_figure
from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def adaptive_figure(summary: Summary) -> Figure:
    """Draw biases: act less after a 0, the two-round example, a target learned from the data."""
    figure = new_figure(12.5, 4.2)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.1, 1.2, 1.5])
    rounds = summary["soft_stop"]["rounds"]
    for name, colour in (("EA", GREEN), ("BIS", BLUE), ("FIS", RED)):
        left.plot(rounds, summary["soft_stop"]["bias"][name], "o-", color=colour, label=name, ms=4)
    left.axhline(summary["stopped"]["exact"] - 0.5, color=GREEN, ls="--", lw=1)
    left.text(
        rounds[0],
        summary["stopped"]["exact"] - 0.5,
        "EA, stops for ever: ½ − ln 2",
        fontsize=7,
        va="bottom",
        color=GREEN,
    )
    left.set_xticks(rounds)
    left.set_title("Act less after the first 0", loc="left", fontsize=10)
    dress(left, "rounds", "exact bias")
    _bars(
        middle,
        summary["two_rounds"]["names"],
        {
            "policies fixed in advance": (summary["two_rounds"]["fixed"], None, GREEN),
            "second learned from first": (summary["two_rounds"]["adaptive"], None, RED),
        },
    )
    middle.set_title("Two rounds (no bar: 0)", loc="left", fontsize=10)
    dress(middle, "", "exact bias")
    learned = summary["learned"]
    _bars(
        right,
        learned["names"],
        {
            "held out": (learned["held_out"][0], learned["held_out"][1], GREEN),
            "in-sample": (learned["in_sample"][0], learned["in_sample"][1], RED),
        },
    )
    right.set_title("Target learned from data (± 3 standard errors)", loc="left", fontsize=10)
    dress(right, "", "bias")
    for ax in (left, middle, right):
        ax.axhline(0.0, color=INK, lw=0.8)
        legend_below(ax, 3)
    return figure


def _bars(
    ax: Axes,
    names: Sequence[str],
    groups: dict[str, tuple[Sequence[float], Sequence[float] | None, str]],
) -> None:
    """Draw groups of bars, with three standard errors where they are given."""
    x = np.arange(len(names))
    for g, (label, (values, errors, colour)) in enumerate(groups.items()):
        bars = None if errors is None else 3 * np.array(errors, dtype=np.float64)
        ax.bar(x + 0.4 * g - 0.2, values, 0.38, yerr=bars, color=colour, label=label, ecolor=INK)
    ax.set_xticks(x, names, rotation=60)
