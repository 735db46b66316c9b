"""Draw the coverage of intervals against their width."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ope_gym.report.figures import INK, dress
from studies.harness.pictures import BLUE, GREEN, PINK, RED, new_figure
from studies.harness.study import Summary

_COLOURS = {
    "normal": "#999999",
    "ess-t": BLUE,
    "percentile": PINK,
    "bca": GREEN,
    "betting": RED,
}
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def coverage_figure(summary: Summary) -> Figure:
    """Draw coverage against relative width, one panel for each source of data."""
    parts, names = summary["parts"], summary["names"]
    figure = new_figure(3.7 * len(parts), 4.4)
    axes = np.atleast_1d(figure.subplots(1, len(parts), sharey=True))
    for ax, (source, part) in zip(axes, parts.items(), strict=True):
        coverage, error, width = (
            np.array(part[key], dtype=np.float64) for key in ("coverage", "error", "width")
        )
        for k, kind in enumerate(summary["kinds"]):
            for e in range(len(names)):
                if np.isnan(coverage[e, k]):
                    continue
                ax.errorbar(
                    width[e, k],
                    coverage[e, k],
                    3 * np.nan_to_num(error[e, k]),
                    fmt=_MARKS[e % len(_MARKS)],
                    ms=5,
                    lw=1,
                    color=_COLOURS[kind],
                )
        ax.axhline(summary["level"], color=INK, lw=0.8, ls=(0, (2, 2)))
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter(lambda value, _: "")
        ax.set_title(source, loc="left", fontsize=10)
        dress(ax, "median width / width of value ± z SE", "coverage" if ax is axes[0] else "")
    for kind, colour in _COLOURS.items():
        axes[0].plot([], [], "o", color=colour, label=kind)
    for e, name in enumerate(names):
        axes[0].plot([], [], _MARKS[e % len(_MARKS)], color="#bbbbbb", label=name)
    axes[0].legend(fontsize=7, frameon=False, ncols=2, loc="lower right")
    figure.suptitle(f"Coverage ± 3 standard errors, {summary['runs']} runs", fontsize=11)
    return figure
