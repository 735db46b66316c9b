"""Compute exact biases and variances of BIS, NIS, EA and ω* on the bandit, and table 1."""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from studies import oracle
from studies.bandit.integrals import moments_nis, moments_optimal, weight_nis_given_count
from studies.bandit.simulation import Problem


def unit_moments(problem: Problem, n: int) -> dict[str, oracle.Moments]:
    """Return the moments of BIS, NIS and EA at r̄ = Z and V = Z².

    At p the bias is √p times, V_int (1 − p) times and V_path p times as large.
    """
    given = (problem.policy, n, problem.target, problem.scale, problem.scale**2)
    return {
        "BIS": oracle.moments_bis(*given),
        "NIS": moments_nis(*given),
        "EA": oracle.moments_ea(*given),
    }


def exact_moments(problem: Problem, sizes: IntArray, grid: FloatArray) -> FloatArray:
    """Return bias, V_int and V_path of all estimators, (3, 4, N, p)."""
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
    """Return the p in (0, 1) at which two MSEs are equal, by N; they are straight lines in p."""
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
    """Return the weight that NIS gives to action K/2, which the target takes with ε, ½, 1 − ε."""
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
