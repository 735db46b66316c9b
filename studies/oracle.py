"""Compute exact biases and variances of estimators for one-step problems with A actions.

Notation: behaviour policy π_k draws n_k actions, ρ_k = n_k / n; rewards have mean r̄(a) and variance
V(a). The α family (several policies) is (1/n) Σ_i α_k(a_i) π_e(a_i) / π_k(a_i) r_i, k = k(i), with
Σ_k ρ_k α_k(a) = 1 (BIS: α = 1). The ω family (one policy) is Σ_a ω(a, counts) π_e(a) r̂(a), with
r̂ = 0 for an action that was never drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arrays import FloatArray, IntArray

Row: TypeAlias = ArrayLike  # (A,), one number for each action
Table: TypeAlias = ArrayLike  # (K, A), one row for each behaviour policy
Counts: TypeAlias = ArrayLike | None  # (K,), draws of each behaviour policy; None: one each


@dataclass(frozen=True)
class Moments:
    """Bias, and variance from the rewards (`internal`) and from the drawn actions (`path`)."""

    bias: float
    internal: float
    path: float

    @property
    def variance(self) -> float:
        """Return V_int + V_path, by the law of total variance."""
        return self.internal + self.path

    @property
    def mse(self) -> float:
        """Return bias² + V_int + V_path."""
        return self.bias**2 + self.variance


# --- several behaviour policies: the α family -----------------------------------------------


def alpha_fis(policies: Table, counts: Counts = None) -> FloatArray:
    """Return α_k = π_k / Σ_j ρ_j π_j, (K, A); 0 where no behaviour policy takes the action."""
    pi = _table(policies)
    return _shares(pi, _rho(pi, counts))


def alpha_ouis(
    policies: Table, counts: Counts = None, *, mean: Row = 1.0, variance: Row = 0.0
) -> FloatArray:
    """Return α_k = f(π_k) / Σ_j ρ_j f(π_j) with f(p) = p / (r̄² (1 − p) + V), (K, A).

    At a pole (V = 0, π_k = 1) the policies with probability 1 share all the weight; where
    r̄ = V = 0 any α will do and the fused one is returned. Contrary to the paper this is not the
    optimum of the family: its proof drops the covariances between the actions of one draw. See
    `optimal_alpha`.
    """
    pi = _table(policies)
    rho, square, spread = _rho(pi, counts), np.asarray(mean) ** 2, np.asarray(variance)
    rest = np.where(square + spread > 0, square * (1 - pi) + spread, 1.0)  # (K, A)
    pole = (rest == 0) & (rho[:, None] > 0)
    f = np.divide(pi, rest, out=np.zeros_like(pi), where=rest > 0)
    return _shares(np.where(pole.any(axis=0), pole, f), rho)


def variance_alpha(
    alpha: Table, policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> float:
    """Return n⁻² Σ_k n_k [Σ_a α_k² π_e² (r̄² + V) / π_k − (Σ_a α_k π_e r̄)²], over the support.

    The sum is around the mean of each draw, so that nothing cancels. It corrects three misprints in
    the paper's difference of variances: (r̄² + V) instead of (r̄ + V) in BIS, r̄ π_i instead of r̄² π_i
    in the square of FIS, and J² / N instead of Σ_i J² / N.
    """
    pi = _table(policies)
    n = _counts(pi, counts)
    w = np.divide(np.asarray(alpha) * np.asarray(target), pi, out=np.zeros_like(pi), where=pi > 0)
    drawn = w * np.asarray(mean)  # (K, A), the term's mean when the action is drawn
    centre = (pi * drawn).sum(axis=1, keepdims=True)
    each = (pi * ((drawn - centre) ** 2 + w**2 * np.asarray(variance))).sum(axis=1)
    return float(n @ each / n.sum() ** 2)


def bias_alpha(
    alpha: Table, policies: Table, target: Row, mean: Row, counts: Counts = None
) -> float:
    """Return the bias Σ_a (Σ_k ρ_k α_k(a) 1[π_k(a) > 0] − 1) π_e(a) r̄(a)."""
    pi = _table(policies)
    reached = _rho(pi, counts) @ np.where(pi > 0, np.asarray(alpha), 0.0)
    return float(((reached - 1) * np.asarray(target) * np.asarray(mean)).sum())


def variance_bis(
    policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> float:
    """Return Var BIS = n⁻² Σ_i Σ_a π_e² (r̄² + V) / π_i − J² / n."""
    return variance_alpha(1.0, policies, target, mean, variance, counts)


def variance_fis(
    policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> float:
    """Return Var FIS = Σ_a π_e² (r̄² + V) / Σ_j π_j − Σ_i (Σ_a π_e r̄ π_i / Σ_j π_j)².

    It is never above Var BIS. Over several steps the same is true of per-decision estimators if
    later rewards are not expected to undo earlier ones (all of one sign, or only the last not 0).
    """
    return variance_alpha(alpha_fis(policies, counts), policies, target, mean, variance, counts)


def variance_ouis(
    policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> float:
    """Return Var OUIS with the true r̄ and V in its weights; it can exceed Var FIS."""
    alpha = alpha_ouis(policies, counts, mean=mean, variance=variance)
    return variance_alpha(alpha, policies, target, mean, variance, counts)


def variance_optimal(
    policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> float:
    """Return the least variance of the unbiased α family."""
    alpha = optimal_alpha(policies, target, mean, variance, counts)
    return variance_alpha(alpha, policies, target, mean, variance, counts)


def optimal_alpha(
    policies: Table, target: Row, mean: Row, variance: Row, counts: Counts = None
) -> FloatArray:
    """Return the unbiased α of least variance, (K, A): a convex quadratic programme.

    It minimises Var over all α with Σ_k ρ_k α_k(a) = 1 and α_k(a) = 0 where π_k(a) = 0, including
    covariances. Where α does not matter (π_e = 0, or r̄ = V = 0) it is the fused one.

    Raises:
        ValueError: If no behaviour policy takes an action that contributes to the value.
    """
    pi, fused = _table(policies), alpha_fis(policies, counts)
    rho, e, r = _rho(pi, counts), np.asarray(target, dtype=np.float64), np.asarray(mean)
    second = e**2 * (r**2 + np.asarray(variance))  # (A,)
    free = (pi > 0) & (rho[:, None] > 0) & (second > 0)
    for action in np.flatnonzero((second > 0) & ~free.any(axis=0)):
        raise ValueError(
            f"policies: no behaviour policy takes action {action}, the target does with "
            f"probability {e[action]:g}; no unbiased estimator exists, add a policy that takes it"
        )
    k, a = np.nonzero(free)
    # In x = α √(ρ q), q = π_e² (r̄² + V) / π_k, the objective is |x|² − Σ_k ⟨u_k, x_k⟩² with
    # |u_k| ≤ 1, and the rows of the constraint have length 1: lstsq sees a well-scaled system.
    q = second[a] / pi[k, a]
    u = (e * r)[a] / np.sqrt(q)
    hessian = np.eye(k.size) - np.where(k[:, None] == k, np.outer(u, u), 0.0)
    constraint = (np.unique(a)[:, None] == a) * np.sqrt(rho[k] / q)
    length = np.sqrt((constraint**2).sum(axis=1, keepdims=True))
    constraint /= length
    kkt = np.block([[hessian, constraint.T], [constraint, np.zeros((length.size,) * 2)]])
    right = np.concatenate([np.zeros(k.size), 1 / length[:, 0]])
    alpha = np.where(second > 0, 0.0, fused)
    alpha[k, a] = np.linalg.lstsq(kkt, right, rcond=None)[0][: k.size] / np.sqrt(rho[k] * q)
    return np.asarray(alpha)


# --- one behaviour policy: the ω family -----------------------------------------------------


def weights_bis(counts: Row, policy: Row) -> FloatArray:
    """Return ω_BIS = k / (N π)."""
    k, pi = np.asarray(counts, dtype=np.float64), np.asarray(policy, dtype=np.float64)
    return np.asarray(np.divide(k, k.sum() * pi, out=np.zeros_like(pi), where=pi > 0))


def weights_nis(counts: Row, policy: Row, target: Row) -> FloatArray:
    """Return ω_NIS = ω_BIS / Σ_a π_e ω_BIS; nan if the target takes none of the drawn actions."""
    basic = weights_bis(counts, policy)
    total = float((np.asarray(target) * basic).sum())
    return np.asarray(basic / (total if total > 0 else np.nan))


def optimal_weights(counts: Row, mean: Row, variance: Row, target: Row) -> FloatArray:
    """Return the weights ω* of least MSE given the counts, (A,).

    ω* = k r̄ / (π_e V) · J / (1 + Σ_a k r̄² / V) with J = Σ π_e r̄ (the paper's proof prints π for
    π_e); the sum is over actions with k > 0 and π_e > 0, the others get weight 0. If some of these
    have V = 0 ≠ r̄, the MSE can be 0; of the weights that reach it these are the nearest to 1: EA,
    if all actions were drawn.
    """
    k, r = np.asarray(counts, dtype=np.float64), np.asarray(mean, dtype=np.float64)
    v, e = np.asarray(variance, dtype=np.float64), np.asarray(target, dtype=np.float64)
    value, omega = (e * r).sum(), np.zeros_like(e)
    known = (k > 0) & (e > 0) & (v == 0)
    noisy = (k > 0) & (e > 0) & (v > 0)
    omega[known] = 1.0
    m = (e * r)[known]
    if m.any():
        omega[known] += (value - m.sum()) / (m**2).sum() * m
    elif noisy.any():
        least = v[noisy].min()  # both sides of the fraction times min V: a tiny V cannot overflow
        c = k[noisy] * r[noisy] * (least / v[noisy])
        omega[noisy] = c / e[noisy] * value / (least + (c * r[noisy]).sum())
    return omega


def mse_given_counts(weights: Row, counts: Row, mean: Row, variance: Row, target: Row) -> float:
    """Return the MSE given the counts, (Σ_{k>0} ω π_e r̄ − J)² + Σ_{k>0} ω² π_e² V / k."""
    bias, internal = _given_counts(weights, counts, mean, variance, target)
    return bias**2 + internal


def moments_bis(policy: Row, n: int, target: Row, mean: Row, variance: Row) -> Moments:
    """Return the moments of BIS from n draws of one policy.

    V_int = Σ π_e² V / (N π), V_path = (Σ π_e² r̄² / π − (Σ π_e r̄)²) / N, over the support.
    """
    path = variance_alpha(1.0, policy, target, mean, 0.0, [n])
    internal = variance_alpha(1.0, policy, target, 0.0, variance, [n])
    return Moments(bias_alpha(1.0, policy, target, mean), internal, path)


def moments_ea(policy: Row, n: int, target: Row, mean: Row, variance: Row) -> Moments:
    """Return the moments of the empirical average, with r̂ = 0 for an action that was never drawn.

    With z = 1[k = 0], P(z_a = 1) = (1 − π_a)^N: bias −Σ π_e r̄ E[z], V_int = Σ π_e² V E[1/k; k > 0],
    V_path = Var(Σ π_e r̄ z). The paper's V_path = 0 (and no bias) needs every action to be drawn.
    """
    pi, e = np.asarray(policy, dtype=np.float64), np.asarray(target, dtype=np.float64)
    m, missing = e * np.asarray(mean), (1 - pi) ** n
    both = np.maximum(1 - pi[:, None] - pi, 0.0) ** n  # P(z_a = z_b = 1) for a ≠ b
    np.fill_diagonal(both, missing)
    path = m @ (both - np.outer(missing, missing)) @ m
    internal = (e**2 * np.asarray(variance) * mean_inverse_count(pi, n)).sum()
    return Moments(float(-m @ missing), float(internal), max(float(path), 0.0))


def mean_inverse_count(policy: Row, n: int) -> FloatArray:
    """Return E[1/k; k > 0] for k ~ Binomial(n, π), (A,).

    It is Σ_{i=1}^n q^{n−i} (1 − q^i) / i with q = 1 − π.
    """
    pi, i = np.asarray(policy, dtype=np.float64)[..., None], np.arange(1, n + 1)
    with np.errstate(divide="ignore"):
        lost = -np.expm1(i * np.log1p(-pi))
    return np.asarray(((1 - pi) ** (n - i) * lost / i).sum(axis=-1))


def moments_by_enumeration(
    weights: Callable[[IntArray], ArrayLike],
    policy: Row,
    n: int,
    target: Row,
    mean: Row,
    variance: Row,
) -> Moments:
    """Return the moments of any weights ω(counts): a sum over all C(n + A − 1, n) count vectors."""
    pi = np.asarray(policy, dtype=np.float64)
    found = []
    for counts in count_vectors(n, pi.size):
        p = _multinomial(counts, pi)
        if p > 0:
            found.append((p, *_given_counts(weights(counts), counts, mean, variance, target)))
    chance, bias, internal = np.array(found).T
    centre = float(chance @ bias)
    return Moments(centre, float(chance @ internal), float(chance @ (bias - centre) ** 2))


def count_vectors(n: int, actions: int) -> Iterator[IntArray]:
    """Yield all vectors of `actions` non-negative integers with sum n."""
    if actions == 1:
        yield np.array([n], dtype=np.int64)
        return
    for first in range(n + 1):
        for rest in count_vectors(n - first, actions - 1):
            yield np.concatenate([[first], rest])


def mean_ea_stopped_at_zero(p: float = 0.5) -> float:
    """Return E[r̂] of a Bernoulli(p) action drawn until its first 0: 1 + (1 − p) ln(1 − p) / p.

    At p = 1/2 it is 1 − ln 2, so the bias is 1/2 − ln 2 < 0 (the paper prints the other sign).
    """
    return float(1 + (1 - p) / p * np.log1p(-p))


# --- helpers --------------------------------------------------------------------------------


def _table(policies: Table) -> FloatArray:
    """Return an array (K, A), also for a single policy (A,)."""
    return np.atleast_2d(np.asarray(policies, dtype=np.float64))


def _counts(pi: FloatArray, counts: Counts) -> FloatArray:
    return np.ones(len(pi)) if counts is None else np.asarray(counts, dtype=np.float64)


def _rho(pi: FloatArray, counts: Counts) -> FloatArray:
    """Return the share of each policy in the draws, (K,)."""
    n = _counts(pi, counts)
    return np.asarray(n / n.sum())


def _shares(f: FloatArray, rho: FloatArray) -> FloatArray:
    """Return f scaled so that Σ_k ρ_k f_k(a) = 1, or 0 where no policy takes the action."""
    total = rho @ f
    return np.divide(f, total, out=np.zeros(f.shape), where=total > 0)


def _multinomial(counts: IntArray, pi: FloatArray) -> float:
    """Return the probability of a vector of counts."""
    left = np.cumsum(counts[::-1])[::-1]
    ways = prod(comb(int(n), int(k)) for n, k in zip(left, counts, strict=True))
    return float(ways * np.prod(pi**counts))


def _given_counts(
    weights: Row, counts: Row, mean: Row, variance: Row, target: Row
) -> tuple[float, float]:
    """Return bias and V_int of the weights given the counts."""
    k, e = np.asarray(counts, dtype=np.float64), np.asarray(target, dtype=np.float64)
    term = np.where(k > 0, np.asarray(weights) * e, 0.0)
    bias = ((term - e) * np.asarray(mean)).sum()
    return float(bias), float((term**2 * np.asarray(variance) / np.maximum(k, 1)).sum())
