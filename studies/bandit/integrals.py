"""Compute exact moments of ratios of counts as integrals over one variable.

A sum D = Σ_i x(a_i) over n draws from π has E[e^(−sD)] = φ(s)^n, φ(s) = Σ_a π(a) e^(−s x(a)), and
1/D = ∫ e^(−sD) ds, 1/D² = ∫ s e^(−sD) ds: the moments of normalised importance sampling and of the
optimal weights need no sum over all vectors of counts. In ln s the integrand is analytic in a strip
of width π, so that the trapezoidal rule is exact to rounding.
"""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import FloatArray
from studies.oracle import Moments

_STEP = 0.05
_NODES = np.exp(np.arange(-50.0, 40.0, _STEP))  # s
_LENGTHS = _STEP * _NODES  # ds


def moments_nis(
    policy: FloatArray, n: int, target: FloatArray, mean: FloatArray, variance: FloatArray
) -> Moments:
    """Return bias, V_int and V_path of normalised importance sampling from n draws of one policy.

    With w = π_e / π: E[Σ w r̄ / D] = ∫ n A φ^(n−1) ds, A = E[w r̄ e^(−sw)], its square from
    ∫ s (n B φ^(n−1) + n (n−1) A² φ^(n−2)) ds, B = E[w² r̄² e^(−sw)], and V_int = ∫ s n C φ^(n−1) ds,
    C = E[w² V e^(−sw)].

    Args:
        policy: (A,) π, positive where the target is.
        n: number of draws.
        target: (A,) π_e, positive where the policy is: otherwise the ratio can be 0 / 0.
        mean: (A,) r̄.
        variance: (A,) V.
    """
    if ((policy > 0) != (target > 0)).any():
        raise ValueError("target must take the actions that policy takes, and no others")
    w = np.divide(target, policy, out=np.zeros_like(policy), where=policy > 0)
    decay = policy * np.exp(-np.outer(_NODES, w))  # (nodes, A)
    phi = decay.sum(axis=1)
    a, b, c = decay @ (w * mean), decay @ (w * mean) ** 2, decay @ (w**2 * variance)
    last, both = n * phi ** (n - 1), n * (n - 1) * phi ** max(n - 2, 0)
    first = float(_LENGTHS @ (a * last))
    second = float((_LENGTHS * _NODES) @ (b * last + a**2 * both))
    internal = float((_LENGTHS * _NODES) @ (c * last))
    return Moments(first - float(target @ mean), internal, max(second - first**2, 0.0))


def moments_optimal(
    policy: FloatArray, n: int, target: FloatArray, mean: FloatArray, variance: FloatArray
) -> Moments:
    """Return bias, V_int and V_path of the weights ω* of least MSE, which know r̄ and V.

    With C = Σ_a k r̄² / V the conditional mean is J C / (1 + C), and the variance J² C / (1 + C)².
    """
    ratio = np.divide(mean**2, variance, out=np.where(mean != 0, np.inf, 0.0), where=variance > 0)
    ratio = np.where(target > 0, ratio, 0.0)
    with np.errstate(over="ignore"):
        decay = np.exp(-np.multiply.outer(_NODES, ratio)) @ policy
    inner = np.exp(-_NODES) * decay**n  # E[e^(−s (1 + C))]
    first, second = float(_LENGTHS @ inner), float((_LENGTHS * _NODES) @ inner)
    value = float(target @ mean) ** 2
    bias = -float(target @ mean) * first
    return Moments(bias, value * max(first - second, 0.0), value * max(second - first**2, 0.0))


def weight_nis_given_count(
    policy: FloatArray, n: int, target: FloatArray, action: int, count: int
) -> tuple[float, float]:
    """Return mean and deviation of ω_NIS(action) over paths that have the action `count` times.

    ω = (k / π) / (k π_e / π + D), D the sum of w over the other n − k draws.
    """
    others = np.delete(policy, action) / (1.0 - policy[action])
    w = np.delete(target, action) / np.delete(policy, action)
    phi = np.exp(-np.outer(_NODES, w)) @ others
    own = count / policy[action]
    inner = np.exp(-_NODES * own * target[action]) * phi ** (n - count)
    first, second = float(_LENGTHS @ inner), float((_LENGTHS * _NODES) @ inner)
    return own * first, own * float(np.sqrt(max(second - first**2, 0.0)))
