"""Draw the distribution of a policy's returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.report.canvas import COLOURS, DASHES, dress, legend, new_figure, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def distribution_figure(
    curves: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    level: float,
    marks: Mapping[str, float],
) -> Figure:
    """Draw a distribution function with its band, and some returns as vertical lines.

    Args:
        curves: returns, and there the function and the edges of its band, (m,) each.
        level: with which the whole function lies inside the band.
        marks: returns by name; those that are not finite are left out.
    """
    x, value, low, high = curves
    figure = new_figure(5.6, 3.6)
    axes = figure.add_subplot()
    edge = 0.03 * max(float(np.ptp(x)), 1e-9)
    at = np.concatenate([[x[0] - edge], x, [x[-1] + edge]])

    def reach(curve: FloatArray, first: float) -> FloatArray:
        return np.concatenate([[first], curve, curve[-1:]])

    half = float(np.max(high - value)) if np.isfinite(high).all() else 0.0
    axes.fill_between(
        at,
        reach(low, 0.0),
        reach(high, half),
        step="post",
        color=COLOURS[0],
        alpha=0.18,
        linewidth=0,
        label=f"{100 * level:g} % band of the whole function",
    )
    axes.step(at, reach(value, 0.0), where="post", color=COLOURS[0], linewidth=1.4)
    for index, (name, mark) in enumerate(marks.items()):
        if np.isfinite(mark):
            style = {"color": COLOURS[index + 1], "linestyle": DASHES[index + 1]}
            axes.axvline(mark, linewidth=1.2, label=f"{name}: {mark:.4g}", **style)  # type: ignore[arg-type]
    axes.set_ylim(0.0, 1.0)
    axes.margins(x=0.0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    dress(axes, "return", "episodes with at most this return")
    title(axes, "The distribution of returns")
    legend(figure, ncols=3)
    return figure
