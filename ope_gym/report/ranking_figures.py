"""The picture of a ranking: values with intervals, and who may be the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ope_gym.inference.regimes import label
from ope_gym.report.figures import BANDS, INK, dress, new_figure
from ope_gym.report.text import chance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ope_gym.analysis.ranked import Ranked, Ranking

_MARKERS = {"green": "o", "amber": "D", "red": "X"}  # told apart without colour as well
_SHADE = "#7f9db9"


def ranking_figure(ranking: Ranking, *, limit: int = 30) -> Figure:
    """Policies from the best down: values with intervals on the left, P(best) on the right.

    Args:
        ranking: to draw.
        limit: policies drawn; the rest is told in words.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; draw at least 1 policy")
    shown = list(ranking.values())[:limit]
    row = 0.3 if len(shown) <= 14 else 0.2
    figure = new_figure(7.0, 1.5 + row * max(len(shown), 3))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
    _values(left, shown)
    _chances(right, shown)
    left.set_yticks(range(len(shown)), [_short(r.name) for r in shown])
    left.set_ylim(len(shown) - 0.4, -0.6)
    first = shown[0].estimate
    left.set_title(
        f"Value by {first.name}, {first.interval.level:.0%} intervals",
        loc="left",
        fontsize=10,
        color=INK,
    )
    right.set_title("P(best)", loc="left", fontsize=10, color=INK)
    left.tick_params(axis="y", length=0)
    regimes = {label(r.estimate.sample.regime): None for r in shown}
    note = f"dotted: the best estimate; data: {' / '.join(regimes)}"
    if len(shown) < len(ranking):
        note += f"; {len(ranking) - len(shown):,} lower policies are not drawn"
    figure.supxlabel(note, fontsize=8, color="#666666", x=0.02, ha="left")
    return figure


def _values(axes: Axes, shown: list[Ranked]) -> None:
    best = shown[0].estimate.value
    if np.isfinite(best):
        axes.axvline(best, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    for colour, ink in BANDS[::-1]:
        rows = [y for y, r in enumerate(shown) if r.estimate.verdict.colour == colour]
        rows = [y for y in rows if np.isfinite(shown[y].estimate.value)]
        if not rows:
            continue
        for y in rows:
            ends = shown[y].estimate.interval
            axes.plot(
                [ends.low, ends.high],
                [y, y],
                color=ink,
                linewidth=2.2,
                alpha=0.55,
                solid_capstyle="round",
                zorder=2,
            )
        axes.scatter(
            [shown[y].estimate.value for y in rows],
            rows,
            color=ink,
            s=34,
            label=colour,
            marker=_MARKERS[colour],
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
        )
    low, high = _window(shown)
    axes.set_xlim(low, high)
    for y, r in enumerate(shown):
        if not np.isfinite(r.estimate.value):
            axes.text(low, y, " no estimate", va="center", fontsize=8, color="#666666")
    dress(axes, "value", "")
    axes.grid(visible=False, axis="y")
    axes.legend(
        loc="best",
        frameon=True,
        framealpha=0.85,
        edgecolor="none",
        fontsize=8,
        title="verdict",
        title_fontsize=8,
        borderpad=0.2,
    )


def _window(shown: list[Ranked]) -> tuple[float, float]:
    """Ends of the axis: around all values and what is not absurdly wide of the intervals."""
    values = np.array([r.estimate.value for r in shown])
    ends = np.array([(r.estimate.interval.low, r.estimate.interval.high) for r in shown])
    width = ends[:, 1] - ends[:, 0]
    usual = np.nanmedian(width) if np.isfinite(width).any() else 0.0
    kept = ends[np.isfinite(width) & (width <= 6 * usual)].ravel()
    seen = np.concatenate([values[np.isfinite(values)], kept])
    if not seen.size:
        return 0.0, 1.0
    margin = 0.06 * (np.ptp(seen) or max(abs(float(seen[0])), 1.0))
    return float(seen.min() - margin), float(seen.max() + margin)


def _chances(axes: Axes, shown: list[Ranked]) -> None:
    chances = np.nan_to_num([r.probability_best for r in shown])
    axes.barh(range(len(shown)), chances, height=0.62, color=_SHADE, zorder=2)
    for y, r in enumerate(shown):
        text = "?" if np.isnan(r.probability_best) else chance(r.probability_best)
        axes.text(chances[y] + 0.03, y, text, va="center", fontsize=7.5, color=INK)
    axes.set_xlim(0, 1.42)
    axes.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    dress(axes, "", "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelleft=False)


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"
