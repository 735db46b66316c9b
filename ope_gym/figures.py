"""Figures of an evaluation, drawn with matplotlib (`pip install "ope-gym[plots]"`).

They are plain `Figure` objects on an Agg canvas: no window, no pyplot, no global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ope_gym.diagnostics import AMBER_ESS, GREEN_ESS
from ope_gym.overlap import Overlap
from ope_gym.results import Evaluation
from ope_gym.weights import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour-blind safe (Okabe and Ito), dark enough for thin lines on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_BANDS = (("red", "#c0392b"), ("amber", "#d99000"), ("green", "#2e8b57"))
_INK, _GRID = "#333333", "#d9d9d9"


def ess_figure(evaluation: Evaluation) -> Figure:
    """Effective sample size at each step, one line for estimators whose weights agree.

    The bands are those of the verdict: green from 40, amber from 10, red below.
    """
    curves = _distinct({name: e.diagnostics.ess_curve for name, e in evaluation.items()})
    n = evaluation.sample.trajectories
    floor, top = 0.7, max(1.3 * n, 1.5 * GREEN_ESS)

    figure = _figure(5.6, 3.6)  # small, for TensorBoard shows pictures 340 pixels wide
    axes = figure.add_subplot()
    edges = (floor, AMBER_ESS, GREEN_ESS, top)
    for (name, colour), low, high in zip(_BANDS, edges[:-1], edges[1:], strict=True):
        axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
        axes.text(
            0.995, np.sqrt(low * high), name, transform=axes.get_yaxis_transform(),
            ha="right", va="center", fontsize=8, color=colour,
        )  # fmt: skip
    for index, (names, curve) in enumerate(curves):
        steps = np.arange(curve.size)
        axes.plot(
            steps,
            np.maximum(curve, floor),  # 0, no weight left, is drawn on the lower edge
            label=", ".join(names),
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[index // len(_COLOURS) % len(_DASHES)],
            marker="o" if curve.size == 1 else "",
            linewidth=1.6,
            solid_capstyle="round",
        )
    axes.axhline(n, color=_INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.text(
        0.005, n, f"{n:,} episodes", transform=axes.get_yaxis_transform(),
        ha="left", va="bottom", fontsize=8, color=_INK,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(floor, top)
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _dress(axes, "step of the episode", "effective sample size")
    axes.set_title("How many episodes the weights leave", loc="left", fontsize=11)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return figure


def overlap_figure(overlap: Overlap) -> Figure:
    """Heat map of an overlap: policies to evaluate against policies that recorded."""
    rows, columns = overlap.matrix.shape
    side = min(0.36, 7.0 / columns)
    figure = _figure(max(4.2, 2.0 + side * columns), max(3.0, 1.4 + side * rows))
    axes = figure.add_subplot()
    shown = np.ma.masked_invalid(overlap.matrix)
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="equal")
    axes.set_facecolor("#bbbbbb")  # policies that cannot be asked
    if columns <= 16:
        for i, j in np.argwhere(np.isfinite(overlap.matrix)):
            value = overlap.matrix[i, j]
            axes.text(
                j, i, _share(value), ha="center", va="center", fontsize=7,
                color="white" if value > 0.55 else _INK,
            )  # fmt: skip
    axes.axhline(rows - 1.5, color="white", linewidth=4)  # the target stands apart
    axes.set_xticks(range(columns), [name.removeprefix("policy ") for name in overlap.recorded])
    axes.set_yticks(range(rows), [name.removeprefix("policy ") for name in overlap.evaluated])
    _dress(axes, "policy that recorded", "policy to evaluate")
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=8 if columns <= 16 else 6)
    axes.set_title("Overlap of policies", loc="left", fontsize=11)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=_INK, length=0)
    figure.supxlabel(
        "squared Bhattacharyya coefficient of whole episodes:\n"
        "1 the same, 0 nothing in common",
        fontsize=8, color="#666666", x=0.02, ha="left",
    )  # fmt: skip
    return figure


def _distinct(curves: dict[str, FloatArray]) -> list[tuple[list[str], FloatArray]]:
    """Names of the curves that nobody could tell apart, with one of them."""
    groups: list[tuple[list[str], FloatArray]] = []
    for name, curve in curves.items():
        for names, other in groups:
            if curve.shape == other.shape and np.allclose(curve, other, rtol=0.01):
                names.append(name)
                break
        else:
            groups.append(([name], curve))
    return groups


def render(figure: Figure) -> NDArray[np.uint8]:
    """The figure as pixels, (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.array(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "ope-gym[plots]"') from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_INK, fontsize=9)
    axes.set_ylabel(y, color=_INK, fontsize=9)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _share(value: float) -> str:
    """Two digits without the leading 0: ".07"; "0" below .005."""
    return "1" if value >= 0.995 else f"{value:.2f}".removeprefix("0") if value >= 0.005 else "0"
