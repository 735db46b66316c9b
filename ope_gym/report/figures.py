"""Draw figures for papers: estimates with their intervals, rankings, overlaps, distributions.

The screen has the OPE tab; figures are plain `Figure` objects: no window, no pyplot, no global
state. `figure.savefig("forest.png")` writes one. They need matplotlib, the extra `plots`. An
interval that would blow up the axis is cut and ends in an arrow, as in the tab.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arguments import real, whole
from ope_gym.arrays import FloatArray
from ope_gym.inference.estimate import Estimate, regime_label
from ope_gym.report import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour-blind safe (Okabe and Ito), dark enough for thin lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
BANDS = {"red": "#B5301C", "amber": "#D98A00", "green": "#008A65"}  # unlike in brightness
INK, GREY, _GRID = "#333333", "#666666", "#d9d9d9"

_MARKERS = {"green": "o", "amber": "D", "red": "X"}  # told apart without any colour as well
_WORDS = {
    "green": "green: nothing visible speaks against it",
    "amber": "amber: with care",
    "red": "red: not to be trusted",
}
_WIDEST = 3.0  # times the usual reach of an interval: those beyond would blow up the axis


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


def forest_figure(
    *evaluations: Mapping[str, Estimate], truth: float | None = None, truth_error: float = 0.0
) -> Figure:
    """Draw estimates with their intervals, one row for each estimator.

    Markers show the verdicts, the numbers on the right the effective sample sizes.

    Args:
        evaluations: Evaluations to draw side by side on one axis, say of one target on held-out
            data and on data that it was trained on.
        truth: Value of the policy, if it is known from elsewhere.
        truth_error: Standard error of the truth; the band is two of them on either side.
    """
    if not evaluations:
        raise ValueError("evaluations is empty: give at least one to draw")
    if truth is not None:
        real("truth", truth, "give a finite value, or None if it is unknown")
    known = "give its standard error, 0 if it is exact"
    real("truth_error", truth_error, known, lambda x: 0.0 <= x < math.inf)
    band = [] if truth is None else [truth - 2 * truth_error, truth + 2 * truth_error]
    limits = _limits([e for evaluation in evaluations for e in evaluation.values()], band)
    rows = max(len(evaluation) for evaluation in evaluations)
    figure = new_figure(6.0 if len(evaluations) == 1 else 4.9 * len(evaluations), 1.9 + 0.27 * rows)
    panels = figure.subplots(1, len(evaluations), squeeze=False)[0]
    for axes, evaluation in zip(panels, evaluations, strict=True):
        if truth is not None:
            _truth(axes, truth, truth_error)
        _rows(axes, evaluation, limits, rows)
        _column(axes, "ESS", [text.episodes(e.diagnostics.ess) for e in evaluation.values()])
        _head(axes, next(iter(evaluation.values())))
    _legend(figure, panels)
    return figure


def ranking_figure(
    estimates: Mapping[str, Estimate], chances: Sequence[float], *, limit: int = 30
) -> Figure:
    """Draw policies from the best down: values with intervals, and P(best) on the right.

    Args:
        estimates: Estimates by name of the policy, the best first.
        chances: Probability of each to be the best; NaN if unknown.
        limit: Policies drawn; the number of the others is told in words.
    """
    whole("limit", limit, expected="draw at least 1 policy")
    shown = dict(list(estimates.items())[:limit])
    best = next(iter(shown.values()))
    row = 0.3 if len(shown) <= 14 else 0.2
    figure = new_figure(6.0, 2.0 + row * max(len(shown), 3))
    axes = figure.add_subplot()
    if np.isfinite(best.value):
        axes.axvline(best.value, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    _rows(axes, shown, _limits(list(shown.values()), []), len(shown))
    _column(axes, "P(best)", ["?" if np.isnan(p) else text.chance(p) for p in chances[:limit]])
    title(axes, f"Value by {best.name}, {100 * best.interval.level:g} % intervals", 25)
    _legend(figure, [axes])
    regimes = dict.fromkeys(regime_label(e.sample.regime) for e in shown.values())
    note = f"dotted: the best estimate; data: {' / '.join(regimes)}"
    if len(shown) < len(estimates):
        note += f"; {len(estimates) - len(shown):,} lower policies are not drawn"
    _beside(axes, note, (0, 1), (0, 8), color=GREY)
    return figure


def _truth(axes: Axes, truth: float, error: float) -> None:
    """Draw a line at the truth, and a band of two standard errors on either side."""
    told = f"truth {truth:.5g}" + (f" ± {2 * error:.2g} (two standard errors)" if error else "")
    axes.axvline(truth, color=INK, linewidth=1.1, label=told, zorder=1.5)
    if error:
        ends = truth - 2 * error, truth + 2 * error
        axes.axvspan(*ends, color=INK, alpha=0.16, linewidth=0, zorder=1.4)


def _rows(
    axes: Axes, estimates: Mapping[str, Estimate], limits: tuple[float, float], rows: int
) -> None:
    """Draw the estimates from the top down, on an axis for so many rows."""
    axes.set_xlim(*limits)
    axes.set_ylim(rows - 0.4, -0.6)
    for y, e in enumerate(estimates.values()):
        if math.isfinite(e.value):
            _interval(axes, y, e)
        else:
            style: dict[str, Any] = {"va": "center", "fontstyle": "italic", "color": GREY}
            across = axes.get_yaxis_transform()
            axes.text(0.015, y, "undefined", transform=across, fontsize=8, **style)
    dress(axes, "value of the policy", "")
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(estimates)), [text.shorten(name, 28) for name in estimates])
    axes.tick_params(axis="y", length=0, labelsize=9)


def _interval(axes: Axes, y: int, e: Estimate) -> None:
    """Draw a value and its interval, if it has one; an arrow shows where it leaves the axis."""
    ink = BANDS[e.verdict.colour]
    left, right = axes.get_xlim()
    low, high = e.interval.low, e.interval.high
    if math.isnan(low) or math.isnan(high):
        low = high = e.value
    if low < high:
        line: dict[str, Any] = {"linewidth": 2.2, "alpha": 0.65, "solid_capstyle": "butt"}
        axes.plot(np.clip([low, high], left, right), [y, y], "|-", color=ink, zorder=2, **line)
    arrow: dict[str, Any] = {"color": ink, "markersize": 8, "clip_on": False, "zorder": 3}
    if min(low, e.value) < left:
        axes.plot(left, y, marker=4, **arrow)
    if max(high, e.value) > right:
        axes.plot(right, y, marker=5, **arrow)
    if left <= e.value <= right:
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 4}
        axes.plot(e.value, y, _MARKERS[e.verdict.colour], color=ink, markersize=7, **edge)


def _column(axes: Axes, head: str, cells: Sequence[str]) -> None:
    """Write a column to the right of the axes, a cell for each row."""
    _beside(axes, head, (1, 1), (44, 3), ha="right", fontweight="bold")
    for y, cell in enumerate(cells):
        across = axes.get_yaxis_transform()  # x as a share of the width, y in data
        _beside(axes, cell, (1, y), (44, 0), xycoords=across, ha="right", va="center")


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Explain the truth, if it is drawn, and the markers, below the axes."""
    for colour, words in _WORDS.items():
        marker: dict[str, Any] = {"marker": _MARKERS[colour], "markersize": 6.5, "linestyle": ""}
        panels[0].plot([], [], color=BANDS[colour], label=words, **marker)
    handles, labels = panels[0].get_legend_handles_labels()
    ncols = 2 * len(panels) if len(handles) > 3 else 3  # one line without the truth
    gaps = {"columnspacing": 1.4, "handletextpad": 0.6}
    legend(figure, handles=handles, labels=labels, ncols=ncols, **gaps)


def _head(axes: Axes, first: Estimate) -> None:
    """Write the regime of the data in bold, and below it how much data there is."""
    sample, interval = first.sample, first.interval
    bold: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "color": INK}
    head = axes.set_title(f"Data: {regime_label(sample.regime)}", loc="left", pad=25, **bold)
    if sample.regime == "in-sample":
        head.set(color="white", bbox={"facecolor": BANDS["red"], "linewidth": 0, "pad": 4})
    told = f"{text.size(sample)}; {100 * interval.level:g} % intervals ({interval.method})"
    _beside(axes, told, (0, 1), (0, 8), color=GREY)


def _beside(
    axes: Axes, words: str, place: tuple[float, float], shift: tuple[float, float], **style: Any
) -> None:
    """Write text at a place of the axes, shifted by so many points."""
    usual: dict[str, Any] = {"xycoords": "axes fraction", "fontsize": 8, "color": INK}
    axes.annotate(words, place, shift, textcoords="offset points", **usual | style)


def _limits(estimates: Sequence[Estimate], known: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis: values and ends within three times the usual reach.

    An estimate reaches from the median value to the further end of its interval; a third of them
    reach less far than the usual one.

    Args:
        estimates: Estimates to be drawn.
        known: Values that must be inside.
    """
    spans = [
        (e.value, e.interval.low, e.interval.high) for e in estimates if math.isfinite(e.value)
    ]
    numbers = np.array(spans).reshape(-1, 3)
    values = np.sort([*numbers[:, 0], *known])
    if not values.size:
        return 0.0, 1.0
    middle = float(values[values.size // 2])
    with np.errstate(over="ignore"):
        away = np.abs(numbers - middle)
    reaches = np.sort(away.max(axis=1)[np.isfinite(away).all(axis=1)])
    usual = float(reaches[-(-(reaches.size - 1) // 3)]) if reaches.size else 0.1 * abs(middle)
    near = [*numbers[away <= _WIDEST * usual], middle, *known]
    margin = 0.05 * float(np.ptp(near)) or max(0.05 * abs(middle), 0.5)
    return float(np.min(near)) - margin, float(np.max(near)) + margin


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
