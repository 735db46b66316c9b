"""Draw what the weights of an evaluation look like: effective sample sizes, shares, overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.diagnostics import AMBER_ESS, GREEN_ESS
from ope_gym.inference.estimate import Estimate
from ope_gym.report.canvas import (
    BANDS,
    COLOURS,
    DASHES,
    GREY,
    INK,
    dress,
    legend,
    new_figure,
    shorten,
    title,
)
from ope_gym.report.curves import concentration, distinct, heaviest, joined, weighted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNKNOWN = "#bbbbbb"  # policies that cannot be asked for probabilities


def ess_figure(evaluation: Mapping[str, Estimate]) -> Figure:
    """Draw the effective sample size at each step, one line for estimators whose weights agree.

    The bands are those of the verdict: green from 40, amber from 4, red below.
    """
    shown = weighted(evaluation)
    curves = distinct({name: e.diagnostics.ess_curve for name, e in shown.items()})
    n = next(iter(evaluation.values())).sample.trajectories
    floor, top = 0.7, max(1.3 * n, 1.5 * GREEN_ESS)

    figure = new_figure(5.6, 3.6)  # small, for TensorBoard shows pictures 340 pixels wide
    axes = figure.add_subplot()
    across = axes.get_yaxis_transform()  # x as a share of the width, y in data
    edges = (floor, AMBER_ESS, GREEN_ESS, top)
    for (name, colour), low, high in zip(BANDS, edges[:-1], edges[1:], strict=True):
        axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
        place = 0.995, np.sqrt(low * high)  # the middle of the band on a log axis
        style: dict[str, Any] = {"ha": "right", "va": "center", "color": colour}
        axes.text(*place, name, transform=across, fontsize=8, **style)
    for index, (names, curve) in enumerate(curves):
        axes.plot(
            np.arange(curve.size),
            np.maximum(curve, floor),  # 0, no weight left, is drawn on the lower edge
            label=joined(names),
            marker="o" if curve.size == 1 else "",
            solid_capstyle="round",
            **_line(index),
        )
    axes.axhline(n, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.text(0.005, n, f"{n:,} episodes", transform=across, va="bottom", fontsize=8, color=INK)
    axes.set_yscale("log")
    axes.set_ylim(floor, top)
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    dress(axes, "step of the episode", "effective sample size")
    title(axes, "How many episodes the weights leave")
    legend(figure, ncols=2)
    return figure


def weights_figure(evaluation: Mapping[str, Estimate]) -> Figure:
    """Draw how few episodes hold the last weights, and which behaviours these come from.

    On the left the share of the total weight in the heaviest episodes, against equal weights; on
    the right each behaviour's share of the weight, against its share of the episodes. There is one
    line for estimators whose weights agree.
    """
    shown, sample = weighted(evaluation), next(iter(evaluation.values())).sample
    n, k = sample.trajectories, sample.counts.size
    taken = heaviest(n, 400)
    curves = {name: concentration(e.diagnostics.log_last)[taken - 1] for name, e in shown.items()}
    figure = new_figure(7.6, min(max(4.0, 1.9 + 0.2 * k), 7.0))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    dots: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (1, 2))}
    left.plot(taken / n, taken / n, label="if all episodes weighed the same", **dots)
    grey: dict[str, Any] = {"height": 0.7, "color": "#d6d6d6", "zorder": 1}
    right.barh(range(k), sample.counts / n, label="share of the episodes", **grey)
    for index, (names, curve) in enumerate(distinct(curves)):
        told = (
            f"the heaviest episode holds {100 * curve[0]:.1f} %"
            if curve[-1]
            else "no weight is left"
        )
        marker: dict[str, Any] = {
            "marker": "osD^vP*"[index % 7],
            "zorder": 3,
            "markersize": max(7.5 - index, 4.5),
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
            "clip_on": False,
        }
        label = f"{joined(names)}: {told}"
        left.plot(taken / n, curve, markevery=[0], label=label, **_line(index), **marker)
        shares = shown[names[0]].diagnostics.behaviour_shares
        right.plot(shares, range(k), linestyle="", color=COLOURS[index % len(COLOURS)], **marker)
    left.set_xscale("log")
    left.set(xlim=(min(1 / n, 0.5), 1), ylim=(0, 1))
    right.set(xlim=(0, 1.04 * right.get_xlim()[1]), ylim=(k - 0.4, -0.6))
    every = -(-k // 24)  # label at most 24 behaviours
    labels = [shorten(name.removeprefix("policy "), 16) for name in sample.behaviours[::every]]
    right.set_yticks(range(0, k, every), labels)
    right.locator_params(axis="x", nbins=4)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    left.xaxis.set_minor_formatter(lambda share, _: "")
    dress(left, "heaviest episodes, of all", "share of the total weight")
    dress(right, "share of the total weight", "behaviour")
    right.grid(visible=False, axis="y")
    right.tick_params(axis="y", length=0)
    title(left, "How few episodes hold the weight")
    title(right, "Whose episodes they are")
    legend(figure)
    return figure


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
    shown = np.ma.masked_invalid(matrix)
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="equal")
    axes.set_facecolor(_UNKNOWN)
    if columns <= 16:
        for i, j in np.argwhere(np.isfinite(matrix)):
            ink = "white" if matrix[i, j] > 0.5 else INK
            axes.text(j, i, _share(matrix[i, j]), ha="center", va="center", fontsize=7, color=ink)
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


def _line(index: int) -> dict[str, Any]:
    """Return the style of a line; a line under another one still shows."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": max(2.4 - 0.4 * index, 1.2),
    }


def _share(value: float) -> str:
    """Return two digits without the leading 0: ".07"; "0" below .005."""
    return "1" if value >= 0.995 else f"{value:.2f}".removeprefix("0") if value >= 0.005 else "0"
