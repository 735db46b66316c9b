"""Figures of an evaluation, drawn with matplotlib, the extra `plots` of the package.

They are plain `Figure` objects on an Agg canvas: no window, no pyplot, no global state.
`figure.savefig("forest.png")` writes one; a notebook shows it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.diagnostics import AMBER_ESS, GREEN_ESS
from ope_gym.inference.regimes import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ope_gym.analysis.overlap import Overlap
    from ope_gym.results import Estimate, Evaluation

# colour-blind safe (Okabe and Ito), dark enough for thin lines on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
BANDS = (("red", "#B5301C"), ("amber", "#D98A00"), ("green", "#008A65"))  # unlike in brightness
_MARKERS = {"green": "o", "amber": "D", "red": "X"}  # and told apart without any colour
_WORDS = {
    "green": "green: can be trusted",
    "amber": "amber: with care",
    "red": "red: not to be trusted",
}
INK, _GREY, _GRID = "#333333", "#666666", "#d9d9d9"
_WIDEST = 3.0  # times the reach of the others: an interval beyond would blow up the axis


def forest_figure(
    *evaluations: Evaluation, truth: float | None = None, truth_error: float = 0.0
) -> Figure:
    """Estimates with their intervals, one row an estimator; evaluations side by side, on one axis.

    Markers tell the verdicts, the numbers on the right the effective sample sizes. An interval that
    would blow up the axis is cut, ends in an arrow, and is written out below; so is what is
    undefined.

    Args:
        evaluations: to draw; several share their axis, say of one target on held-out data and on
            data that it was trained on.
        truth: the value, if it is known from elsewhere.
        truth_error: standard error of the truth; the band is two of them on either side.
    """
    if not evaluations:
        raise ValueError("evaluations is empty: give at least one to draw")
    if truth is not None and not math.isfinite(truth):
        raise ValueError(f"truth is {truth}; give a finite value, or None if it is unknown")
    if not (math.isfinite(truth_error) and truth_error >= 0):
        raise ValueError(f"truth_error is {truth_error}; give its standard error, 0 if it is exact")
    everything = [estimate for evaluation in evaluations for estimate in evaluation.values()]
    band = [] if truth is None else [truth - 2 * truth_error, truth + 2 * truth_error]
    window = _window(everything, band)
    rows = max(len(evaluation) for evaluation in evaluations)
    figure = new_figure(6.0 if len(evaluations) == 1 else 4.9 * len(evaluations), 2.1 + 0.27 * rows)
    panels = figure.subplots(1, len(evaluations), squeeze=False)[0]
    for axes, evaluation in zip(panels, evaluations, strict=True):
        axes.set_xlim(*window)
        axes.set_ylim(rows - 0.4, -0.6)
        if truth is not None:
            _truth(axes, truth, truth_error)
        _rows(axes, evaluation)
        _head(axes, evaluation)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        texts,
        loc="outside lower left",
        ncols=2 * len(panels),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        columnspacing=1.4,
        handletextpad=0.6,
    )
    return figure


def _truth(axes: Axes, truth: float, error: float) -> None:
    told = f"truth {truth:.5g}" + (f" ± {2 * error:.2g} (two standard errors)" if error else "")
    axes.axvline(truth, color=INK, linewidth=1.1, label=told, zorder=1.5)
    if error:
        axes.axvspan(
            truth - 2 * error, truth + 2 * error, color=INK, alpha=0.16, linewidth=0, zorder=1.4
        )


def _rows(axes: Axes, evaluation: Evaluation) -> None:
    """The estimates from the top down, and below in words what cannot be drawn."""
    left, right = axes.get_xlim()
    cut, unknown = [], []
    for y, (name, e) in enumerate(evaluation.items()):
        ink = dict(BANDS)[e.verdict.colour]
        low, high = e.interval.low, e.interval.high
        if y % 2:
            axes.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
        ess = e.diagnostics.ess
        _column(axes, y, f"{ess:.1f}" if ess < 100 else f"{ess:,.0f}")
        if not math.isfinite(e.value):
            axes.text(
                0.015,
                y,
                "undefined",
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
                fontstyle="italic",
                color=_GREY,
            )
            unknown.append(f"{name} (value)")
            continue
        if math.isnan(low) or math.isnan(high):
            unknown.append(f"{name} (interval)")
            low = high = e.value
        elif min(low, e.value) < left or max(high, e.value) > right:
            cut.append(f"{name} {e.value:.4g} [{low:.4g}, {high:.4g}]")
        if low < high:
            axes.plot(
                np.clip([low, high], left, right),
                [y, y],
                color=ink,
                linewidth=2.2,
                alpha=0.65,
                solid_capstyle="butt",
                marker="|",
                zorder=2,
            )
        if min(low, e.value) < left:
            axes.plot(left, y, marker=4, color=ink, markersize=8, clip_on=False, zorder=3)
        if max(high, e.value) > right:
            axes.plot(right, y, marker=5, color=ink, markersize=8, clip_on=False, zorder=3)
        if left <= e.value <= right:
            axes.plot(
                e.value,
                y,
                marker=_MARKERS[e.verdict.colour],
                color=ink,
                markersize=7,
                markeredgecolor="white",
                markeredgewidth=0.4,
                zorder=4,
            )
    for colour, ink in BANDS[::-1]:
        axes.plot(
            [],
            [],
            marker=_MARKERS[colour],
            color=ink,
            linestyle="",
            markersize=6.5,
            label=_WORDS[colour],
        )
    notes = [("cut at the axis, see the arrows: ", cut), ("undefined: ", unknown)]
    dress(axes, "value of the policy", "")
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(evaluation)), list(evaluation))
    axes.tick_params(axis="y", length=0, labelsize=9)
    _column(axes, -0.8, "ESS", fontweight="bold")
    told = [textwrap.fill(head + _listed(names), 80) for head, names in notes if names]
    if told:
        axes.annotate(
            "\n".join(told),
            (0, 0),
            (0, -34),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=_GREY,
        )


def _column(axes: Axes, y: float, text: str, **style: Any) -> None:
    """A cell of the column to the right of the axes."""
    axes.annotate(
        text,
        (1, y),
        (38, 0),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8,
        color=INK,
        **style,
    )


def _head(axes: Axes, evaluation: Evaluation) -> None:
    """The regime of the data in bold, and below it how much there is of them."""
    sample, interval = evaluation.sample, next(iter(evaluation.values())).interval
    behaviours = int(np.count_nonzero(sample.counts))
    title = axes.set_title(
        f"Data: {label(sample.regime)}",
        loc="left",
        pad=25,
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    if sample.regime == "in-sample":
        title.set(color="white", bbox={"facecolor": dict(BANDS)["red"], "linewidth": 0, "pad": 4})
    axes.annotate(
        f"{sample.trajectories:,} episodes, {sample.steps:,} steps, {behaviours:,} "
        f"behaviour{'' if behaviours == 1 else 's'}; "
        f"{100 * interval.level:g}% intervals ({interval.method})",
        (0, 1),
        (0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=_GREY,
    )


def _window(estimates: Sequence[Estimate], known: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis: around what is known and all estimates but those that reach much further.

    An estimate reaches from the median value to the furthest end of its interval. The start is the
    reach at a third of the weighted ones, at least a tenth of the median; then reaches are taken in
    order as long as none is `_WIDEST` times the one before. The narrow interval of "DM" and missing
    ones are no measure.
    """
    shown = [e for e in estimates if math.isfinite(e.value)]
    if not shown:
        return (known[0] - 1.0, known[-1] + 1.0) if known else (0.0, 1.0)
    spans = np.array([(e.value, e.interval.low, e.interval.high) for e in shown])
    measure = [
        not (_direct(e.name) or np.isnan(row).any()) for e, row in zip(shown, spans, strict=True)
    ]
    spans = np.where(np.isnan(spans), spans[:, :1], spans)
    middle = float(np.median([*spans[:, 0], *known]))
    with np.errstate(over="ignore"):
        away = np.abs(spans - middle)
    reach = away.max(axis=1)
    usual = np.sort(reach[measure] if any(measure) else reach)
    most = max(float(usual[(usual.size - 1) // 3]), 0.1 * abs(middle))
    for further in np.sort(reach):
        most = max(most, float(further)) if further <= _WIDEST * most else most
    # of what is cut, the value or one end may still be near
    kept = np.concatenate([spans[(away <= 2 * most) & np.isfinite(away)], known])
    margin = 0.05 * float(np.ptp(kept)) or max(0.05 * abs(middle), 0.5)
    return float(kept.min() - margin), float(kept.max() + margin)


def _listed(items: Sequence[str], most: int = 6) -> str:
    """The first items in words, not to be broken inside; and how many more there are."""
    more = len(items) - most
    told = "; ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in items[:most])
    return told + (f"; and {more} more" if more > 0 else "")


def ess_figure(evaluation: Evaluation) -> Figure:
    """Effective sample size at each step, one line for estimators whose weights agree.

    The bands are those of the verdict: green from 40, amber from 10, red below.
    """
    curves = _distinct({name: e.diagnostics.ess_curve for name, e in _weighted(evaluation).items()})
    n = evaluation.sample.trajectories
    floor, top = 0.7, max(1.3 * n, 1.5 * GREEN_ESS)

    figure = new_figure(5.6, 3.6)  # small, for TensorBoard shows pictures 340 pixels wide
    axes = figure.add_subplot()
    edges = (floor, AMBER_ESS, GREEN_ESS, top)
    for (name, colour), low, high in zip(BANDS, edges[:-1], edges[1:], strict=True):
        axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
        axes.text(
            0.995,
            np.sqrt(low * high),
            name,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8,
            color=colour,
        )
    for index, (names, curve) in enumerate(curves):
        steps = np.arange(curve.size)
        axes.plot(
            steps,
            np.maximum(curve, floor),  # 0, no weight left, is drawn on the lower edge
            label=_names(names),
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[index // len(_COLOURS) % len(_DASHES)],
            marker="o" if curve.size == 1 else "",
            linewidth=max(2.4 - 0.4 * index, 1.2),  # a line under another one still shows
            solid_capstyle="round",
        )
    axes.axhline(n, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.text(
        0.005,
        n,
        f"{n:,} episodes",
        transform=axes.get_yaxis_transform(),
        ha="left",
        va="bottom",
        fontsize=8,
        color=INK,
    )
    axes.set_yscale("log")
    axes.set_ylim(floor, top)
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    dress(axes, "step of the episode", "effective sample size")
    axes.set_title("How many episodes the weights leave", loc="left", fontsize=11, color=INK)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return figure


def weights_figure(evaluation: Evaluation) -> Figure:
    """How few episodes hold the last weights, and which behaviours these come from.

    On the left the share of the total weight in the heaviest episodes, against equal weights; on
    the right each behaviour's share of the weight, against its share of the episodes. There is one
    line for estimators whose weights agree.
    """
    weighted, sample = _weighted(evaluation), evaluation.sample
    n, k = sample.trajectories, sample.counts.size
    taken = np.unique(np.geomspace(1, n, 400).round().astype(np.int64))  # of the heaviest episodes
    curves = {
        name: _concentration(e.diagnostics.log_last)[taken - 1] for name, e in weighted.items()
    }
    figure = new_figure(7.6, min(max(4.0, 1.9 + 0.2 * k), 7.0))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    left.plot(
        taken / n,
        taken / n,
        color=INK,
        linewidth=1.2,
        linestyle=(0, (1, 2)),
        label="if all episodes weighed the same",
    )
    right.barh(
        range(k),
        sample.counts / n,
        height=0.7,
        color="#d6d6d6",
        zorder=1,
        label="share of the episodes",
    )
    for index, (names, curve) in enumerate(_distinct(curves)):
        style: dict[str, Any] = {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": "osD^vP*"[index % 7],
            "zorder": 3,
            "markersize": max(7.5 - index, 4.5),
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
            "clip_on": False,
        }
        told = f"the heaviest episode holds {curve[0]:.1%}" if curve[-1] else "no weight is left"
        left.plot(
            taken / n,
            curve,
            linewidth=max(2.4 - 0.4 * index, 1.2),
            markevery=[0],
            linestyle=_DASHES[index // len(_COLOURS) % len(_DASHES)],
            label=f"{_names(names)}: {told}",
            **style,
        )
        shares = weighted[names[0]].diagnostics.behaviour_shares
        right.plot(shares, range(k), linestyle="", **style)
    left.set_xscale("log")
    left.set(xlim=(min(1 / n, 0.5), 1), ylim=(0, 1))
    right.set(xlim=(0, 1.04 * right.get_xlim()[1]), ylim=(k - 0.4, -0.6))
    every = -(-k // 24)  # label at most 24 behaviours
    right.set_yticks(range(0, k, every), [_short(name) for name in sample.behaviours[::every]])
    right.locator_params(axis="x", nbins=4)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    left.xaxis.set_minor_formatter(lambda share, _: "")
    dress(left, "heaviest episodes, of all", "share of the total weight")
    dress(right, "share of the total weight", "behaviour")
    right.grid(visible=False, axis="y")
    right.tick_params(axis="y", length=0)
    left.set_title("How few episodes hold the weight", loc="left", fontsize=11, color=INK)
    right.set_title("Whose episodes they are", loc="left", fontsize=11, color=INK)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _concentration(log_weights: FloatArray) -> FloatArray:
    """(n,) share of the total weight in the heaviest 1, 2, … episodes; 0 if no weight is left."""
    top = float(log_weights.max())
    if top == -np.inf:
        return np.zeros(log_weights.size)
    held = np.cumsum(np.sort(np.exp(log_weights - top))[::-1])
    return np.asarray(held / held[-1])


def overlap_figure(overlap: Overlap) -> Figure:
    """Heat map of an overlap: policies to evaluate against policies that recorded."""
    rows, columns = overlap.matrix.shape
    side = min(0.36, 7.0 / columns)
    figure = new_figure(max(4.2, 2.0 + side * columns), max(3.0, 1.4 + side * rows))
    axes = figure.add_subplot()
    shown = np.ma.masked_invalid(overlap.matrix)
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="equal")
    axes.set_facecolor("#bbbbbb")  # policies that cannot be asked
    if columns <= 16:
        for i, j in np.argwhere(np.isfinite(overlap.matrix)):
            value = overlap.matrix[i, j]
            axes.text(
                j,
                i,
                _share(value),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if value > 0.5 else INK,
            )
    axes.axhline(rows - 1.5, color="white", linewidth=4)  # the target stands apart
    axes.set_xticks(range(columns), [name.removeprefix("policy ") for name in overlap.recorded])
    axes.set_yticks(range(rows), [name.removeprefix("policy ") for name in overlap.evaluated])
    dress(axes, "policy that recorded", "policy to evaluate")
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=8 if columns <= 16 else 6)
    axes.set_title("Overlap of policies", loc="left", fontsize=11, color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    figure.supxlabel(
        "squared Bhattacharyya coefficient of whole episodes:\n1 the same, 0 nothing in common",
        fontsize=8,
        color="#666666",
        x=0.02,
        ha="left",
    )
    return figure


def _weighted(evaluation: Evaluation) -> dict[str, Estimate]:
    """The estimates that rest on weights; all of them if none does."""
    return {n: e for n, e in evaluation.items() if not _direct(n)} or dict(evaluation)


def _direct(name: str) -> bool:
    return name in ESTIMATORS and ESTIMATORS[name].method == "direct"


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


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; an error that names the extra where matplotlib is missing."""
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
    """Labels, and no more ink than needed."""
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _names(names: Sequence[str], most: int = 6) -> str:
    """Names that share a line; the first of many."""
    return ", ".join(names if len(names) <= most else [*names[: most - 1], "…"])


def _short(name: str) -> str:
    name = name.removeprefix("policy ")
    return name if len(name) <= 16 else f"{name[:15]}…"


def _share(value: float) -> str:
    """Two digits without the leading 0: ".07"; "0" below .005."""
    return "1" if value >= 0.995 else f"{value:.2f}".removeprefix("0") if value >= 0.005 else "0"
