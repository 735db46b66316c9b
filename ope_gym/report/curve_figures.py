"""Draw curves and matrices: effective sample sizes, overlaps, distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.report.canvas import (
    COLOURS,
    DASHES,
    GREY,
    INK,
    dress,
    legend,
    new_figure,
    title,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overlap_figure(matrix: FloatArray, evaluated: Sequence[str], recorded: Sequence[str]) -> Figure:
    """Draw a heat map of overlaps: policies to evaluate against policies that recorded.

    Args:
        matrix: (E, J) overlaps, NaN where unknown; see `ope_gym.analysis.overlap`.
        evaluated: (E,) names of the rows; the last is the target.
        recorded: (J,) names of the columns.
    """
    rows, columns = matrix.shape
    side = min(0.36, 7.0 / columns)
    figure = new_figure(max(4.2, 2.0 + side * columns), max(3.0, 1.4 + side * rows))
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(matrix), vmin=0, vmax=1, cmap="Blues", aspect="equal")
    axes.set_facecolor("#bbbbbb")  # of policies that cannot be asked for probabilities
    if columns <= 16:
        for i, j in np.argwhere(np.isfinite(matrix)):
            ink = "white" if matrix[i, j] > 0.5 else INK
            share = f"{matrix[i, j]:.2f}".removeprefix("0").removesuffix(".00") or "0"
            axes.text(j, i, share, ha="center", va="center", fontsize=7, color=ink)
    axes.axhline(rows - 1.5, color="white", linewidth=4)  # the target stands apart
    axes.set_xticks(range(columns), [name.removeprefix("policy ") for name in recorded])
    axes.set_yticks(range(rows), [name.removeprefix("policy ") for name in evaluated])
    dress(axes, "policy that recorded", "policy to evaluate")
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=8 if columns <= 16 else 6)
    title(axes, "Overlap of policies")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    meaning = (
        "squared Bhattacharyya coefficient of whole episodes:\n1 the same, 0 nothing in common"
    )
    figure.supxlabel(meaning, fontsize=8, color=GREY, x=0.02, ha="left")
    return figure


def distribution_figure(
    curves: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    level: float,
    marks: Mapping[str, float],
) -> Figure:
    """Draw a distribution function with its band, and some returns as vertical lines.

    Args:
        curves: Returns, and there the function and the edges of its band, (m,) each.
        level: Confidence level of the band: the whole function lies inside with it.
        marks: Returns by name; those that are not finite are left out.
    """
    x, value, low, high = curves
    edge = 0.03 * max(float(np.ptp(x)), 1e-9)
    at = np.concatenate([[x[0] - edge], x, [x[-1] + edge]])
    half = float(np.max(high - value)) if np.isfinite(high).all() else 0.0
    # before the first return the function is 0, and after the last it stays
    reach = [np.concatenate([[s], c, c[-1:]]) for c, s in ((value, 0), (low, 0), (high, half))]
    figure = new_figure(5.6, 3.6)
    axes = figure.add_subplot()
    label = f"{100 * level:g} % band of the whole function"
    band: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.18, "linewidth": 0, "label": label}
    axes.fill_between(at, reach[1], reach[2], step="post", **band)
    axes.step(at, reach[0], where="post", color=COLOURS[0], linewidth=1.4)
    for index, (name, mark) in enumerate(marks.items(), start=1):
        if np.isfinite(mark):
            line: dict[str, Any] = {"color": COLOURS[index], "linestyle": DASHES[index]}
            axes.axvline(mark, linewidth=1.2, label=f"{name}: {mark:.4g}", **line)
    axes.set_ylim(0.0, 1.0)
    axes.margins(x=0.0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    dress(axes, "return", "episodes with at most this return")
    title(axes, "The distribution of returns")
    legend(figure, ncols=3)
    return figure
