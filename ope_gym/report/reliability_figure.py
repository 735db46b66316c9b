"""Draw estimated probabilities against the frequencies of the actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ope_gym.arrays import FloatArray
from ope_gym.report.canvas import COLOURS, dress, legend, new_figure, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reliability_figure(predicted: FloatArray, observed: FloatArray, error: FloatArray) -> Figure:
    """Draw a reliability curve; right probabilities lie on the diagonal.

    Args:
        predicted: (B,) mean estimated probability in each bin.
        observed: (B,) share of the actions that were taken.
        error: (B,) standard error of that share.
    """
    figure = new_figure(4.4, 4.0)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1.0, label="right")
    axes.errorbar(
        predicted,
        observed,
        yerr=2 * error,
        fmt="o-",
        ms=4,
        linewidth=1.2,
        color=COLOURS[0],
        label="left-out steps ± 2 standard errors",
    )
    dress(axes, "estimated probability", "share of the actions that were taken")
    title(axes, "Estimated propensities")
    legend(figure, ncols=2)
    return figure
