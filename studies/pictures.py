"""The studies' pictures, from their summaries: plain `Figure` objects, no window, no pyplot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from studies.frame import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# colour-blind safe (Okabe and Ito)
BLUE, RED, GREEN, PINK, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#333333"
_COLOURS = {"BIS": BLUE, "NIS": RED, "EA": GREEN, "ω*": BLACK}
_GRID = "#d9d9d9"
_SEEN = (3e-7, 0.06)  # MSEs and variances of the bandit


def bandit_figure(summary: Summary) -> Figure:
    """MSE, and V_int and V_path, against p for each N; below the weights of table 1."""
    sizes = summary["sizes"]
    figure = new_figure(3.0 * max(len(sizes), 3), 11.0)
    top, bottom = figure.subfigures(2, 1, height_ratios=[3, 1.1], squeeze=False)[:, 0]
    axes = top.subplots(3, len(sizes), sharex=True, sharey="row", squeeze=False)
    fine = np.array(summary["curves"]["p"])[:-1]  # without 1, for an axis of log odds
    moments = np.array(summary["curves"]["moments"])[..., :-1]  # (3, 4, N, p)
    for i, n in enumerate(sizes):
        mse = moments[0, :, i] ** 2 + moments[1, :, i] + moments[2, :, i]
        for z, (name, colour) in enumerate(_COLOURS.items()):
            axes[0, i].plot(fine, mse[z], color=colour, label=name)
            seen, error = (np.array(summary[key][z][i]) for key in ("mse", "mse_error"))
            inside = np.array(summary["probabilities"]) < 1
            at = np.array(summary["probabilities"])[inside]
            axes[0, i].errorbar(at, seen[inside], 3 * error[inside], fmt="o", ms=3, color=colour)
            if name == "ω*":
                continue
            axes[1, i].plot(fine, mse[z] / mse[0], color=colour, label=f"{name} / BIS")
            axes[2, i].plot(fine, moments[1, z, i], color=colour, label=f"V_int {name}")
            axes[2, i].plot(fine, moments[2, z, i], "--", color=colour, label=f"V_path {name}")
        axes[0, i].set(xscale="logit", yscale="log", ylim=_SEEN)
        axes[1, i].set(ylim=(0, 1.35))
        axes[2, i].set(yscale="log", ylim=_SEEN)
        axes[0, i].set_title(f"N = {n}", loc="left", fontsize=10)
        dress(axes[0, i], "", "MSE" if i == 0 else "")
        dress(axes[1, i], "", "MSE / MSE(BIS)" if i == 0 else "")
        dress(axes[2, i], "p = r̄² / (r̄² + V)", "variance" if i == 0 else "")
        axes[2, i].set_xticks([0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
        axes[2, i].xaxis.set_major_formatter(lambda p, _: f"{p:g}".removeprefix("0"))
        axes[2, i].xaxis.set_minor_formatter(lambda p, _: "")
    for row in range(3):
        axes[row, 0].legend(fontsize=7, frameon=False, loc="lower left", ncols=1 + row // 2)
    path = np.array(summary["exact_path"])[2]
    below = [str(n) for n, value in zip(sizes, path, strict=True) if value < _SEEN[0]]
    unseen = f"; V_path of EA is below the axis for N = {', '.join(below)}" if below else ""
    top.suptitle(
        "Figure 1 on axes of logs and log odds: lines exact, points simulated ± 3 standard errors"
        + unseen,
        fontsize=11,
    )
    _weights(bottom.subplots(1, 3, squeeze=False)[0], summary)
    bottom.suptitle(
        "Table 1: the weight of NIS given k, exact mean ± standard deviation over paths",
        fontsize=11,
    )
    return figure


def _weights(axes: Sequence[Axes], summary: Summary) -> None:
    ratio = np.linspace(0.3, 2.3, 100)
    for ax, mass in zip(axes, (0.01, 0.5, 0.99), strict=True):
        entry = {0.01: ratio, 0.5: 2 / (1 + 1 / ratio), 0.99: np.ones_like(ratio)}[mass]
        ax.plot(ratio, entry, color=BLACK, label="paper's entry")
        chosen = sorted({summary["sizes"][0], summary["sizes"][-1]})
        for n, colour, shift in zip(chosen, (RED, BLUE), (-0.01, 0.01), strict=False):
            rows = [r for r in summary["table_1"] if r["n"] == n and r["target"] == mass]
            ax.errorbar(
                [row["ratio"] + shift for row in rows],
                [row["mean"] for row in rows],
                [row["deviation"] for row in rows],
                fmt="o",
                ms=4,
                lw=1.2,
                color=colour,
                label=f"N = {n}",
            )
        ax.set_ylim(0, 2.6)
        ax.set_title(f"π_test = {mass:g}", loc="left", fontsize=10)
        dress(ax, "k / (π N)", "ω_NIS" if mass == 0.01 else "")
    axes[0].legend(fontsize=7, frameon=False, loc="upper left")


def lemmas_figure(summary: Summary) -> Figure:
    """Distributions of ratios of variances over random problems."""
    figure = new_figure(13.5, 4.0)
    axes = figure.subplots(1, 4, sharey=True)
    levels = np.array(summary["levels"])
    for family, colour in zip(summary["families"], (BLUE, RED, GREEN), strict=True):
        for ax, ratio in zip(axes, ("FIS / BIS", "OUIS / FIS", "optimum / FIS"), strict=False):
            ax.plot(summary["ratios"][family][ratio], levels, color=colour, label=family)
            ax.set_title(f"Var {ratio.replace(' / ', ' / Var ')}", loc="left", fontsize=10)
    for kind, colour in zip(summary["multi_step"], (RED, BLUE, GREEN), strict=True):
        found = summary["multi_step"][kind]["quantiles"]
        axes[3].plot(found, levels, color=colour, label=f"rewards: {kind}")
    axes[3].set_title("Var FIS / Var BIS, several steps", loc="left", fontsize=10)
    axes[1].set(xscale="log", xlim=(0.2, 20), xticks=[0.2, 0.5, 1, 2, 5, 10, 20])
    axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[1].xaxis.set_minor_formatter(lambda value, _: "")
    for ax in axes:
        ax.axvline(1.0, color=BLACK, lw=0.8, ls=(0, (2, 2)))
        ax.set_ylim(0, 1)
        ax.legend(fontsize=7, frameon=False, loc="lower right" if ax is axes[1] else "upper left")
        dress(ax, "ratio", "share of problems below" if ax is axes[0] else "")
    return figure


def adaptive_figure(summary: Summary) -> Figure:
    """Biases: stop at the first zero, the two-round example, a target learned from the data."""
    figure = new_figure(12.5, 4.2)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.1, 1.2, 1.5])
    rounds = summary["soft_stop"]["rounds"]
    for name, colour in (("EA", GREEN), ("BIS", BLUE), ("FIS", RED)):
        left.plot(rounds, summary["soft_stop"]["bias"][name], "o-", color=colour, label=name, ms=4)
    left.axhline(summary["stopped"]["exact"] - 0.5, color=GREEN, ls="--", lw=1)
    left.text(
        rounds[0],
        summary["stopped"]["exact"] - 0.5,
        "EA, stops for ever: ½ − ln 2",
        fontsize=7,
        va="bottom",
        color=GREEN,
    )
    left.set_xticks(rounds)
    left.set_title("Act less after the first 0", loc="left", fontsize=10)
    dress(left, "rounds", "exact bias")
    _bars(
        middle,
        summary["two_rounds"]["names"],
        {
            "policies fixed in advance": (summary["two_rounds"]["fixed"], None, GREEN),
            "second learned from first": (summary["two_rounds"]["adaptive"], None, RED),
        },
    )
    middle.set_title("Two rounds (no bar: 0)", loc="left", fontsize=10)
    dress(middle, "", "exact bias")
    learned = summary["learned"]
    _bars(
        right,
        learned["names"],
        {
            "held out": (learned["held_out"][0], learned["held_out"][1], GREEN),
            "in-sample": (learned["in_sample"][0], learned["in_sample"][1], RED),
        },
    )
    right.set_title("Target learned from data (± 3 standard errors)", loc="left", fontsize=10)
    dress(right, "", "bias")
    for ax in (left, middle, right):
        ax.axhline(0.0, color=BLACK, lw=0.8)
        legend_below(ax, 3)
    return figure


def _bars(
    ax: Axes,
    names: Sequence[str],
    groups: dict[str, tuple[Sequence[float], Sequence[float] | None, str]],
) -> None:
    x = np.arange(len(names))
    for g, (label, (values, errors, colour)) in enumerate(groups.items()):
        bars = None if errors is None else 3 * np.array(errors, dtype=np.float64)
        ax.bar(x + 0.4 * g - 0.2, values, 0.38, yerr=bars, color=colour, label=label, ecolor=BLACK)
    ax.set_xticks(x, names, rotation=60)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in the house style."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def legend_below(axes: Axes, columns: int) -> None:
    """A legend that covers nothing."""
    axes.legend(
        fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns
    )


def dress(axes: Axes, x: str, y: str) -> None:
    """Labels, a pale grid, no frame."""
    axes.set_xlabel(x, color=BLACK, fontsize=9)
    axes.set_ylabel(y, color=BLACK, fontsize=9)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=BLACK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
