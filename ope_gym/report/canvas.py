"""Provide what all figures share: an empty figure, axes with little ink, colours.

Figures are for papers; the screen has the OPE tab. They are plain `Figure` objects: no window, no
pyplot, no global state. `figure.savefig("forest.png")` writes one. They need matplotlib, the extra
`plots` of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour-blind safe (Okabe and Ito), dark enough for thin lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
BANDS = {"red": "#B5301C", "amber": "#D98A00", "green": "#008A65"}  # unlike in brightness
INK, GREY, _GRID = "#333333", "#666666", "#d9d9d9"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; without matplotlib, raise and name the extra that brings it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib: pip install -e ".[plots]" -c constraints.txt'
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)  # inches around the axes
    return figure


def dress(axes: Axes, x: str, y: str) -> None:
    """Label the axes, and leave out all ink that is not needed."""
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def title(axes: Axes, text: str, pad: float = 6.0) -> None:
    """Write a title so many points above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=pad)


def legend(figure: Figure, **style: Any) -> None:
    """Put the legend below the axes."""
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, labelcolor=INK, **style)
