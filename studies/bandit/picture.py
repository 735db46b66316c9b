"""Draw figure 1 and table 1 of the paper: exact lines and simulated points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.report.figures import INK, dress
from studies.harness.pictures import BLUE, GREEN, RED, new_figure
from studies.harness.study import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"BIS": BLUE, "NIS": RED, "EA": GREEN, "ω*": INK}
_SEEN = (3e-7, 0.06)  # range of the axes of MSEs and variances


def bandit_figure(summary: Summary) -> Figure:
    """Draw MSE, V_int and V_path against p for each N, and below the weights of table 1."""
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
    """Draw the weights of table 1, one panel for each probability of the target."""
    ratio = np.linspace(0.3, 2.3, 100)
    for ax, mass in zip(axes, (0.01, 0.5, 0.99), strict=True):
        entry = {0.01: ratio, 0.5: 2 / (1 + 1 / ratio), 0.99: np.ones_like(ratio)}[mass]
        ax.plot(ratio, entry, color=INK, label="paper's entry")
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
