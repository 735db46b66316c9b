"""Give all pictures one style: plain `Figure` objects, so that no window opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from ope_gym.report.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, RED, GREEN, PINK = COLOURS[:4]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def legend_below(axes: Axes, columns: int) -> None:
    """Put the legend below the axes, where it covers nothing."""
    axes.legend(
        fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns
    )


def dots(
    ax: Axes,
    names: Sequence[str],
    percentiles: Sequence[Sequence[float]],
    shift: float,
    colour: str,
    label: str,
) -> None:
    """Draw the 50th percentile as a dot, the 5th and 95th as the ends of a line."""
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
