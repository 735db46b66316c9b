"""Reproduce figure 1 and table 1: one behaviour policy, 20 scaled Bernoulli actions.

A reward is Z / √p with probability p, else 0: r̄² = p Z² and V = (1 − p) Z², so that p is
r̄² / (r̄² + V). The moments of BIS, NIS, EA and ω* are exact; the simulation checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from studies.bandit.claims import bandit_claims
from studies.bandit.exact import crossings, exact_moments, table_1, unit_moments
from studies.bandit.simulation import NAMES, Problem, estimates, given_counts, library, tally
from studies.harness.errors import mean_and_error
from studies.harness.markdown import number, table
from studies.harness.study import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

CHECKED = 0.02  # share of runs, besides the first, that the library does again in part


@dataclass(frozen=True)
class Bandit(Study):
    """Compare the MSE of BIS, NIS, EA and ω* as a function of p."""

    actions: int = 20
    sizes: tuple[int, ...] = (50, 100, 200, 500, 1000)
    probabilities: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 0.99, 1.0)

    def __post_init__(self) -> None:
        if self.actions < 4 or self.actions % 2:
            raise ValueError(f"actions={self.actions} must be an even number from 4 on")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes={list(self.sizes)} must be whole numbers from 1 on, ascending")
        grid = self.probabilities
        if list(grid) != sorted(set(grid)) or not 0 < grid[0] <= grid[-1] <= 1:
            raise ValueError(f"probabilities={list(grid)} must be above 0, up to 1, ascending")

    def run(self, seeds: Seeds) -> Runs:
        """Return errors (R, 4, N, p), and what the counts alone say at r̄ = Z and V = Z².

        These are means and variances given the counts (R, 3, N), and whether every action was drawn
        (R, N). `library` (R,) is the largest difference from the library where a run checks it.
        """
        problem, sizes, grid = self._grids()
        policy, top = problem.policy, int(sizes[-1])
        actions, luck = np.empty((len(seeds), top), dtype=np.int64), np.empty((len(seeds), top))
        checks = np.empty((len(seeds), 3))
        for row, seed in enumerate(seeds):
            rng = np.random.default_rng(seed)
            actions[row] = np.searchsorted(policy.cumsum()[:-1], rng.random(top), side="right")
            luck[row] = rng.random(top)
            checks[row] = rng.random(3)
        counts, wins = tally(actions, luck, sizes, grid, self.actions)
        values = estimates(problem, sizes, grid, counts, wins)
        truth = (problem.target @ problem.scale) * np.sqrt(grid)
        means, internal = given_counts(problem, counts)
        gap = np.full(len(seeds), np.nan)
        first = [seed.spawn_key[-1] == 0 for seed in seeds]
        for r in np.flatnonzero((checks[:, 0] < CHECKED) | first):
            i, j = int(checks[r, 1] * sizes.size), int(checks[r, 2] * grid.size)
            rewards = problem.scale[actions[r]] * (luck[r] < grid[j]) / np.sqrt(grid[j])
            one = library(problem, float(grid[j]), actions[r, : sizes[i]], rewards[: sizes[i]])
            gap[r] = np.abs(values[r, :, i, j] - one).max()
        return {
            "errors": values - truth,
            "means": means,
            "internal": internal,
            "library": gap,
            "complete": np.asarray((counts > 0).all(axis=-1)),
        }

    def _grids(self) -> tuple[Problem, IntArray, FloatArray]:
        """Return the problem, N and p as arrays."""
        return Problem(self.actions), np.array(self.sizes), np.array(self.probabilities)

    def summarise(self, runs: Runs) -> Summary:
        """Return simulated and exact MSE, V_int and V_path, crossings of curves, and table 1."""
        problem, sizes, grid = self._grids()
        squares = runs["errors"] ** 2
        exact = exact_moments(problem, sizes, grid)
        odds = np.geomspace(0.01, 1000.0, 80)  # p / (1 − p)
        fine = np.append(odds / (1 + odds), 1.0)
        left = {name: squares[:, NAMES.index(name)] for name in NAMES}  # (R, N, p)
        pairs = [("NIS", "EA"), ("BIS", "NIS"), ("EA", "BIS")]
        differences = {f"{a} - {b}": mean_and_error(left[a] - left[b]) for a, b in pairs}
        mse, error = mean_and_error(squares)
        checked = runs["library"][np.isfinite(runs["library"])]
        spread = np.abs(runs["means"][:, 2] - problem.target @ problem.scale)  # of EA, (R, N)
        path = runs["means"].var(axis=0, ddof=1 if len(squares) > 1 else 0)
        units = [unit_moments(problem, n).values() for n in self.sizes]
        return {
            "runs": len(squares),
            "sizes": sizes,
            "probabilities": grid,
            "mse": mse,  # (4, N, p), and so are the next
            "mse_error": np.maximum(error, _rare(problem, sizes, grid, len(squares))),
            "exact_mse": exact[0] ** 2 + exact[1] + exact[2],
            "internal": mean_and_error(runs["internal"]),  # at p → 0; (2, 3, N) with its error
            "path": [path, _variance_error(runs["means"])],  # at p = 1; (2, 3, N)
            "exact_internal": [[u.internal for u in row] for row in zip(*units, strict=True)],
            "exact_path": [[u.path for u in row] for row in zip(*units, strict=True)],
            "differences": differences,
            "curves": {"p": fine, "moments": exact_moments(problem, sizes, fine)},
            "crossings": crossings(problem, sizes),
            "table_1": table_1(problem, sizes),
            "library": [checked.max() if checked.size else np.nan, checked.size],
            "complete": [runs["complete"].sum(axis=0), (spread * runs["complete"]).max(axis=0)],
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge section 2.2, table 1, and how far their statements reach."""
        return bandit_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate the MSE by N and p, where the curves cross, and table 1."""
        pairs = ("EA, BIS", "EA, NIS", "NIS, BIS")
        return "\n".join(
            [
                "Exact MSE × 1000, simulated in brackets.",
                "",
                *table(["N", "p", *NAMES], _mse_rows(summary)),
                "",
                "The p at which two curves cross; the first is better above it.",
                "",
                *table(
                    ["N", *pairs],
                    [
                        [n, *(_crossing(summary["crossings"][pair][i]) for pair in pairs)]
                        for i, n in enumerate(summary["sizes"])
                    ],
                ),
                "",
                "Table 1: the weight that NIS gives to an action, over paths that have it "
                "k times (exact mean ± standard deviation), beside the paper's entry.",
                "",
                *table(
                    ["N", "π_test", "k / (π N)", "paper's entry", "its approximation", "ω_NIS"],
                    _table_1_rows(summary),
                ),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw figure 1 with log axes, V_int and V_path, and table 1."""
        from studies.bandit.picture import bandit_figure

        return bandit_figure(summary)


def _mse_rows(summary: Summary) -> Iterator[list[object]]:
    """Yield N, p and the MSEs of all estimators, for a few p."""
    grid, mse = summary["probabilities"], summary["exact_mse"]
    for i, n in enumerate(summary["sizes"]):
        for j in sorted({0, len(grid) // 4, len(grid) // 2, len(grid) - 2, len(grid) - 1}):
            found = [(mse[z][i][j], summary["mse"][z][i][j]) for z in range(len(NAMES))]
            cells = [f"{_thousandths(exact)} ({_thousandths(seen)})" for exact, seen in found]
            yield [n, f"{grid[j]:g}", *cells]


def _table_1_rows(summary: Summary) -> Iterator[list[object]]:
    """Yield the rows of table 1 for the smallest and the largest N."""
    for row in summary["table_1"]:
        if row["n"] in (summary["sizes"][0], summary["sizes"][-1]):
            yield [
                row["n"],
                f"{row['target']:g}",
                f"{row['ratio']:.2f}",
                f"{row['entry']:.3f}",
                f"{row['formula']:.3f}",
                f"{row['mean']:.3f} ± {row['deviation']:.3f}",
            ]


def _thousandths(value: float) -> str:
    """Format a number × 1000; less than 1e-15 is rounding."""
    return number(1000 * value if value > 1e-15 else 0.0)


def _crossing(p: float | None) -> str:
    """Format the p of a crossing."""
    return "none" if p is None else number(p)


def _rare(problem: Problem, sizes: IntArray, grid: FloatArray, runs: int) -> FloatArray:
    """Return the part (4, N, p) of the MSE's standard error that is due to actions never drawn.

    Only EA suffers from them. If they occur in fewer than one of R runs, the spread of the runs may
    not show it.
    """
    missing = (1 - problem.policy) ** sizes[:, None]  # (N, A)
    loss = (problem.target * problem.scale) ** 2 * grid[:, None]  # (p, A)
    error = np.zeros((4, sizes.size, grid.size))
    error[2] = np.sqrt((missing[:, None] * loss**2).sum(axis=-1) / runs)
    return error


def _variance_error(values: FloatArray) -> FloatArray:
    """Return the standard error of the variance over runs, from the fourth moment."""
    squares = (values - values.mean(axis=0)) ** 2
    return np.asarray(squares.std(axis=0) / np.sqrt(len(values)))
