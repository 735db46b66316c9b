"""Figure 1 and table 1: one behaviour, K = 20 scaled Bernoulli actions; BIS, NIS, EA and ω*.

r = Z / √p with probability p, else 0: r̄² = p Z², V = (1 − p) Z², so p is r̄² / (r̄² + V). All four
have exact moments; the simulation checks them. It computes the estimators from counts, since a call
of the library for each of half a million data sets would take hours; the library does some of them
again, and must find the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ope_gym import SoftmaxLinear, Trajectories, evaluate
from ope_gym.arrays import FloatArray, IntArray
from studies import oracle
from studies.bandit.claims import bandit_claims
from studies.bandit.integrals import moments_nis, moments_optimal, weight_nis_given_count
from studies.harness.errors import mean_and_error
from studies.harness.markdown import number
from studies.harness.study import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("BIS", "NIS", "EA", "ω*")
CHECKED = 0.02  # share of runs, besides the first, that the library does again in part


@dataclass(frozen=True)
class Problem:
    """The bandit of section 2.3, Z(K) = Z(0) = 0.

    >>> Problem(20).scale[[0, 9, 18, 19]]
    array([0.05, 0.5 , 0.05, 0.  ])
    """

    actions: int

    @property
    def policy(self) -> FloatArray:
        """(A,) π(i) = 2 i / (K (K + 1))."""
        return 2.0 * np.arange(1, self.actions + 1) / (self.actions * (self.actions + 1))

    @property
    def target(self) -> FloatArray:
        """(A,) 0.475 for the actions K/2 and K, the rest shared."""
        probs = np.full(self.actions, 0.05 / (self.actions - 2))
        probs[[self.actions // 2 - 1, self.actions - 1]] = 0.475
        return probs

    @property
    def scale(self) -> FloatArray:
        """(A,) Z(i) = i / K up to K/2, then Z(K − i)."""
        i = np.arange(1, self.actions + 1)
        return np.asarray(np.minimum(i, self.actions - i) / self.actions)


@dataclass(frozen=True)
class Bandit(Study):
    """MSE as a function of p."""

    name: ClassVar[str] = "bandit"
    title: ClassVar[str] = "bandit: one behaviour, 20 actions (figure 1, table 1)"
    runs: ClassVar[int] = 10_000
    chunk: ClassVar[int] = 500
    takes: ClassVar[str] = "half a minute"

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
        """Errors (R, 4, N, p); means and V_int given counts (R, 3, N) at Z; all actions drawn."""
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
        return Problem(self.actions), np.array(self.sizes), np.array(self.probabilities)

    def summarise(self, runs: Runs) -> Summary:
        """Simulated and exact MSE, V_int, V_path; where curves cross; table 1."""
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
        """Section 2.2, i to iii, and what the exact curves say of the rest."""
        return bandit_claims(summary)

    def table(self, summary: Summary) -> str:
        """MSE by N and p, where the curves cross, and table 1."""
        grid, mse = summary["probabilities"], summary["exact_mse"]
        lines = [
            "Exact MSE × 1000, simulated in brackets.",
            "",
            "| N | p | BIS | NIS | EA | ω* |",
            "|---|---|---|---|---|---|",
        ]
        for i, n in enumerate(summary["sizes"]):
            for j in sorted({0, len(grid) // 4, len(grid) // 2, len(grid) - 2, len(grid) - 1}):
                pairs = [(mse[z][i][j], summary["mse"][z][i][j]) for z in range(4)]
                cells = [f"{_thousandths(exact)} ({_thousandths(seen)})" for exact, seen in pairs]
                lines.append(f"| {n} | {grid[j]:g} | {' | '.join(cells)} |")
        lines += [
            "",
            "The p at which two curves cross; the first is better above it.",
            "",
            "| N | EA, BIS | EA, NIS | NIS, BIS |",
            "|---|---|---|---|",
        ]
        for i, n in enumerate(summary["sizes"]):
            found = [summary["crossings"][key][i] for key in ("EA, BIS", "EA, NIS", "NIS, BIS")]
            lines.append(f"| {n} | {' | '.join(_crossing(p) for p in found)} |")
        lines += [
            "",
            "Table 1: the weight that NIS gives to an action, over paths that have it "
            "k times (exact mean ± standard deviation), beside the paper's entry.",
            "",
            "| N | π_test | k / (π N) | paper's entry | its approximation | ω_NIS |",
            "|---|---|---|---|---|---|",
        ]
        for row in summary["table_1"]:
            if row["n"] in (summary["sizes"][0], summary["sizes"][-1]):
                lines.append(
                    f"| {row['n']} | {row['target']:g} | {row['ratio']:.2f} | "
                    f"{row['entry']:.3f} | {row['formula']:.3f} | "
                    f"{row['mean']:.3f} ± {row['deviation']:.3f} |"
                )
        return "\n".join(lines)

    def picture(self, summary: Summary) -> Figure:
        """Figure 1 with log axes, V_int and V_path, and table 1."""
        from studies.bandit.picture import bandit_figure

        return bandit_figure(summary)


def _thousandths(value: float) -> str:
    return number(1000 * value if value > 1e-15 else 0.0)


def _crossing(p: float | None) -> str:
    return "none" if p is None else number(p)


# --- simulation -------------------------------------------------------------------------------


def tally(
    actions: IntArray, luck: FloatArray, sizes: IntArray, grid: FloatArray, n_actions: int
) -> tuple[IntArray, IntArray]:
    """Draws (R, N, A) and successes (R, N, p, A) of each action among the first N draws.

    A draw succeeds at p if its luck is below p: the same luck for all p, the same path for all N.
    """
    runs, top = actions.shape
    part = np.searchsorted(sizes, np.arange(top), side="right")
    level = np.searchsorted(grid, luck, side="right")  # succeeds from grid[level] on
    shape = (runs, sizes.size, grid.size + 1, n_actions)
    cell = np.ravel_multi_index((np.arange(runs)[:, None], part[None], level, actions), shape)
    cells = np.bincount(cell.ravel(), minlength=int(np.prod(shape))).reshape(shape).cumsum(axis=1)
    return cells.sum(axis=2), cells[:, :, :-1].cumsum(axis=2)


def estimates(
    problem: Problem,
    sizes: IntArray,
    grid: FloatArray,
    counts: IntArray,
    wins: IntArray,
) -> FloatArray:
    """(R, 4, N, p) values of BIS, NIS, EA and ω*: the library's formulas on counts."""
    k = counts[:, :, None].astype(np.float64)  # (R, N, 1, A)
    p, scale = grid[:, None], problem.scale
    paid = wins * scale / np.sqrt(p)  # Σ r of each action
    w = problem.target / problem.policy
    basic = (w * paid).sum(axis=-1)
    average = (problem.target * paid / np.maximum(k, 1)).sum(axis=-1)
    value = (problem.target @ scale) * np.sqrt(grid)
    # Σ_a ω* π_e r̂ = J Σ k (r̂ / r̄) / (V / r̄² + Σ k) over Z > 0; k r̂ / r̄ is successes / p
    pays = scale > 0
    total = (1 - grid) / grid + (k * pays).sum(axis=-1)
    best = value * (wins * pays).sum(axis=-1) / grid / np.where(total > 0, total, 1.0)
    return np.stack([basic / sizes[:, None], basic / (w * k).sum(axis=-1), average, best], axis=1)


def given_counts(problem: Problem, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Mean and variance (R, 3, N) of BIS, NIS and EA given the counts, for r̄ = Z and V = Z²."""
    k = counts.astype(np.float64)
    basic = k / (problem.policy * k.sum(axis=-1, keepdims=True))
    normal = basic / (problem.target * basic).sum(axis=-1, keepdims=True)
    omega = np.stack([basic, normal, (k > 0) * 1.0], axis=1)  # (R, 3, N, A)
    term = omega * problem.target * problem.scale
    return term.sum(axis=-1), (term**2 / np.maximum(k, 1)[:, None]).sum(axis=-1)


def library(problem: Problem, p: float, actions: IntArray, rewards: FloatArray) -> FloatArray:
    """BIS, NIS, EA by `ope_gym.evaluate` and ω* by `studies.oracle` on one data set."""
    n, none = actions.size, np.zeros((problem.actions, 0))
    behaviour = SoftmaxLinear(none, np.log(problem.policy))
    data = Trajectories.from_arrays(
        np.zeros((n, 0)),
        actions,
        rewards,
        np.log(problem.policy[actions]),
        offsets=np.arange(n + 1),
        policies=[behaviour],
        terminated=True,
    )
    target = SoftmaxLinear(none, np.log(problem.target))
    found = evaluate(data, target, estimators=["BIS", "NBIS", "EA"])
    counts = np.bincount(actions, minlength=problem.actions)
    mean = np.bincount(actions, rewards, minlength=problem.actions) / np.maximum(counts, 1)
    omega = oracle.optimal_weights(
        counts, problem.scale * np.sqrt(p), (1 - p) * problem.scale**2, problem.target
    )
    return np.array([*(e.value for e in found.values()), (omega * problem.target) @ mean])


# --- exact ------------------------------------------------------------------------------------


def unit_moments(problem: Problem, n: int) -> dict[str, oracle.Moments]:
    """Of BIS, NIS and EA at r̄ = Z, V = Z²; at p: bias √p, V_int (1 − p) and V_path p times it."""
    given = (problem.policy, n, problem.target, problem.scale, problem.scale**2)
    return {
        "BIS": oracle.moments_bis(*given),
        "NIS": moments_nis(*given),
        "EA": oracle.moments_ea(*given),
    }


def exact_moments(problem: Problem, sizes: IntArray, grid: FloatArray) -> FloatArray:
    """(3, 4, N, p): bias, V_int, V_path."""
    found = np.empty((3, 4, sizes.size, grid.size))
    for i, n in enumerate(sizes.tolist()):
        for z, unit in enumerate(unit_moments(problem, n).values()):
            factors = [unit.bias * np.sqrt(grid), unit.internal * (1 - grid), unit.path * grid]
            found[:, z, i] = factors
        for j, p in enumerate(grid.tolist()):
            mean, variance = problem.scale * np.sqrt(p), (1 - p) * problem.scale**2
            best = moments_optimal(problem.policy, n, problem.target, mean, variance)
            found[:, 3, i, j] = best.bias, best.internal, best.path
    return found


def crossings(problem: Problem, sizes: IntArray) -> dict[str, list[float | None]]:
    """The p in (0, 1) where two MSEs are equal, by N: they are straight lines in p."""
    found: dict[str, list[float | None]] = {"EA, BIS": [], "EA, NIS": [], "NIS, BIS": []}
    for n in sizes.tolist():
        unit = unit_moments(problem, n)
        for key, roots in found.items():
            first, second = (unit[name] for name in key.split(", "))
            at_0 = first.internal - second.internal
            at_1 = first.bias**2 + first.path - second.bias**2 - second.path
            roots.append(at_0 / (at_0 - at_1) if at_0 > 0 > at_1 else None)
    return found


def table_1(problem: Problem, sizes: IntArray) -> list[dict[str, float]]:
    """The weight that NIS gives to action K/2, which the target takes with ε, 1/2, 1 − ε."""
    action, policy, rows = problem.actions // 2 - 1, problem.policy, []
    for n in sizes.tolist():
        expected = policy[action] * n
        for mass in (0.01, 0.5, 0.99):
            target = np.full(problem.actions, (1 - mass) / (problem.actions - 1))
            target[action] = mass
            for multiple in (0.5, 1.0, 1.5, 2.0):
                k = max(1, round(multiple * expected))
                mean, deviation = weight_nis_given_count(policy, n, target, action, k)
                entries = {0.01: k / expected, 0.5: 2 / (1 + expected / k), 0.99: 1.0}
                rows.append(
                    {
                        "n": n,
                        "target": mass,
                        "ratio": k / expected,
                        "entry": entries[mass],
                        "formula": k / (k * mass + (1 - mass) * expected),
                        "mean": mean,
                        "deviation": deviation,
                    }
                )
    return rows


def _rare(problem: Problem, sizes: IntArray, grid: FloatArray, runs: int) -> FloatArray:
    """(4, N, p) standard error that actions never drawn give to the MSE of EA.

    If this happens in fewer than one run of R, no run may show it, nor their spread.
    """
    missing = (1 - problem.policy) ** sizes[:, None]  # (N, A)
    loss = (problem.target * problem.scale) ** 2 * grid[:, None]  # (p, A)
    error = np.zeros((4, sizes.size, grid.size))
    error[2] = np.sqrt((missing[:, None] * loss**2).sum(axis=-1) / runs)
    return error


def _variance_error(values: FloatArray) -> FloatArray:
    """Standard error of the variance over runs, from the fourth moment."""
    squares = (values - values.mean(axis=0)) ** 2
    return np.asarray(squares.std(axis=0) / np.sqrt(len(values)))
