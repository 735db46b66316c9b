"""Draw estimates with their intervals: of one policy by several estimators, or a ranking.

An interval that would blow up the axis is cut and ends in an arrow, as in the OPE tab.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arguments import real, whole
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.regimes import label
from ope_gym.report import text
from ope_gym.report.canvas import BANDS, GREY, INK, dress, legend, new_figure, title
from ope_gym.report.curves import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = {"green": "o", "amber": "D", "red": "X"}  # told apart without any colour as well
_WORDS = {
    "green": "green: nothing visible speaks against it",
    "amber": "amber: with care",
    "red": "red: not to be trusted",
}
_WIDEST = 3.0  # times the usual reach of an interval: those beyond would blow up the axis


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
    regimes = dict.fromkeys(label(e.sample.regime) for e in shown.values())
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
    axes.set_yticks(range(len(estimates)), [shorten(name, 28) for name in estimates])
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
    head = axes.set_title(f"Data: {label(sample.regime)}", loc="left", pad=25, **bold)
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
