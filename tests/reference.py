"""A slow reference of the estimators: the definitions as plain loops over python floats.

It shares no code with the library. Every sum is `math.fsum` or a compensated running sum and every
weight stays a logarithm until it is used, so that a disagreement is about the definition and not
about rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Real = float | Fraction
Rows = list[list[float]]  # one list per trajectory, one number per step


class Data(NamedTuple):
    """What `evaluate_log_probs` takes: S steps, n trajectories, K behaviours."""

    target_log_probs: NDArray[np.float64]  # (S,)
    behaviour_log_probs: NDArray[np.float64]  # (K, S)
    behaviour_ids: NDArray[np.int64]  # (n,)
    rewards: NDArray[np.float64]  # (S,)
    offsets: NDArray[np.int64]  # (n + 1,)


@dataclass(frozen=True)
class Reference:
    """Everything the library reports about one estimator."""

    value: float
    influence: list[float]
    standard_error: float
    ess_curve: list[float]
    ess: float
    max_share: float
    mean_weight: float


def reward_share(mean: Sequence[float], variance: Sequence[float]) -> list[Fraction]:
    """a = r̄² / (r̄² + V), exactly; 0 where both are 0."""
    shares = []
    for r, v in zip(mean, variance, strict=True):
        square, spread = Fraction(float(r)) ** 2, Fraction(float(v))
        shares.append(square / (square + spread) if square + spread else Fraction(0))
    return shares


def rows(values: Sequence[float] | NDArray[np.float64], offsets: NDArray[np.int64]) -> Rows:
    """The column cut into one list per trajectory."""
    return [
        [float(values[s]) for s in range(int(offsets[i]), int(offsets[i + 1]))]
        for i in range(len(offsets) - 1)
    ]


def prefix_sums(logs: list[float]) -> list[float]:
    """Running sums with the rounding error carried along (Neumaier); −inf stays −inf."""
    sums, total, carry = [], 0.0, 0.0
    for x in logs:
        new = total + x
        if math.isinf(new):
            total, carry = new, 0.0
        else:
            carry += (total - new) + x if abs(total) >= abs(x) else (x - new) + total
            total = new
        sums.append(total + carry)
    return sums


def log_sum_exp(logs: list[float]) -> float:
    """log Σ exp, −inf for an empty or all −inf list."""
    top = max(logs, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(x - top) for x in logs))


def log_f(scheme: str, log_p: float, a: Real) -> float:
    """The logarithm of f(p): 1, p, or p / (1 − a p); +inf at the pole p = a = 1."""
    if scheme == "basic":
        return 0.0
    if scheme == "fused" or log_p == -math.inf:
        return log_p
    # 1 − a p = (1 − a) + a (1 − p), both terms non-negative: nothing cancels.
    rest = float(1 - a) - float(a) * math.expm1(log_p)
    return log_p - math.log(rest) if rest > 0 else math.inf


def log_weight(
    scheme: str, log_target: float, log_p: list[float], own: int, rho: list[float], a: Real = 1
) -> float:
    """log w = log P_e − log P_b + log f(P_b) − log Σ_k ρ_k f(P_k) at one step of one trajectory."""
    used = [k for k in range(len(rho)) if rho[k] > 0]
    f = {k: log_f(scheme, log_p[k], a) for k in used}
    certain = [k for k in used if f[k] == math.inf]
    if certain:  # the limit: behaviours that could do nothing else take all the weight
        if own not in certain:
            return -math.inf
        return log_target - math.log(math.fsum(rho[k] for k in certain))
    mixture = log_sum_exp([math.log(rho[k]) + f[k] for k in used])
    if log_target == -math.inf:
        return -math.inf
    return log_target - log_p[own] + f[own] - mixture


def log_weights(scheme: str, data: Data, a: Sequence[Real] | None = None) -> Rows:
    """The log weights of every trajectory at every step, for "basic", "fused" or "optimal"."""
    target = [prefix_sums(x) for x in rows(data.target_log_probs, data.offsets)]
    behaviours = [
        [prefix_sums(x) for x in rows(column, data.offsets)] for column in data.behaviour_log_probs
    ]
    n, ids = len(data.behaviour_ids), [int(k) for k in data.behaviour_ids]
    rho = [ids.count(k) / n for k in range(len(behaviours))]
    result = []
    for i in range(n):
        result.append(
            [
                log_weight(
                    scheme,
                    target[i][t],
                    [prefix[i][t] for prefix in behaviours],
                    ids[i],
                    rho,
                    1 if a is None else a[int(data.offsets[i]) + t],
                )
                for t in range(len(target[i]))
            ]
        )
    return result


def capped(logs: Rows, cap: float | None) -> Rows:
    """min(w, cap) as logarithms; small weights are never raised."""
    if cap is None:
        return logs
    return [[min(x, math.log(cap)) for x in row] for row in logs]


def at(row: list[float], t: int) -> float:
    """The log weight at step t: an ended trajectory keeps its last one."""
    return row[min(t, len(row) - 1)]


def shares(logs: Rows, t: int) -> list[float]:
    """w_i,t / Σ_j w_j,t over all n trajectories; nan where every weight is zero."""
    now = [at(row, t) for row in logs]
    top = max(now)
    if top == -math.inf:
        return [math.nan] * len(now)
    relative = [math.exp(x - top) for x in now]
    total = math.fsum(relative)
    return [w / total for w in relative]


def exp(x: float) -> float:
    """exp with inf instead of an OverflowError."""
    return math.exp(x) if x < 709.78 else math.inf


def horizon(logs: Rows) -> int:
    """The number of steps of the longest trajectory."""
    return max(len(row) for row in logs)


def reward_at(row: list[float], t: int) -> float:
    """The reward at step t: 0 after the end."""
    return row[t] if t < len(row) else 0.0


def influence(logs: Rows, rewards: Rows, gamma: float, normalised: bool) -> list[float]:
    """Plain ψ_i = Σ_t γ^t w r; normalised Σ_t γ^t n w̃_i,t (r_i,t − R̂_t), over the whole horizon."""
    n = len(logs)
    if not normalised:
        return [
            math.fsum(
                gamma**t * exp(x) * r for t, (x, r) in enumerate(zip(log, reward, strict=True))
            )
            for log, reward in zip(logs, rewards, strict=True)
        ]
    terms: Rows = [[] for _ in range(n)]
    for t in range(horizon(logs)):
        share, now = shares(logs, t), [reward_at(row, t) for row in rewards]
        mean = math.fsum(w * r for w, r in zip(share, now, strict=True))
        for i in range(n):
            terms[i].append(gamma**t * n * share[i] * (now[i] - mean))
    return [math.fsum(row) for row in terms]


def value(logs: Rows, rewards: Rows, gamma: float, normalised: bool) -> float:
    """Plain (1/n) Σ_i Σ_t γ^t w r; normalised Σ_t γ^t Σ_i w̃_i,t r_i,t."""
    if not normalised:
        return math.fsum(influence(logs, rewards, gamma, False)) / len(logs)
    return math.fsum(
        gamma**t * w * reward_at(row, t)
        for t in range(horizon(logs))
        for w, row in zip(shares(logs, t), rewards, strict=True)
    )


def standard_error(psi: list[float], behaviour_ids: Sequence[int] | NDArray[np.int64]) -> float:
    """SE² = Σ_k ρ_k² s_k² / n_k within behaviours; nan where one has a single trajectory."""
    n, ids = len(psi), [int(k) for k in behaviour_ids]
    parts = []
    for k in sorted(set(ids)):
        own = [x for x, b in zip(psi, ids, strict=True) if b == k]
        if len(own) < 2:
            return math.nan
        mean = math.fsum(own) / len(own)
        variance = math.fsum((x - mean) ** 2 for x in own) / (len(own) - 1)
        parts.append((len(own) / n) ** 2 * variance / len(own))
    return math.sqrt(math.fsum(parts))


def ess_curve(logs: Rows) -> list[float]:
    """(Σw)² / Σw² per step; 0 where every weight is zero."""
    curve = []
    for t in range(horizon(logs)):
        squares = math.fsum(w * w for w in shares(logs, t))
        curve.append(0.0 if math.isnan(squares) else 1.0 / squares)
    return curve


def max_share(logs: Rows) -> float:
    """The largest share any trajectory has at any step."""
    return max((w for t in range(horizon(logs)) for w in shares(logs, t)), default=math.nan)


def mean_weight(logs: Rows) -> float:
    """The mean over trajectories of the weight each one ends with."""
    return math.fsum(exp(row[-1]) for row in logs) / len(logs)


def evaluate(
    scheme: str,
    data: Data,
    *,
    cap: float | None = None,
    normalised: bool = False,
    gamma: float = 1.0,
    a: Sequence[Real] | None = None,
) -> Reference:
    """All of the above for one estimator."""
    logs, rewards = capped(log_weights(scheme, data, a), cap), rows(data.rewards, data.offsets)
    psi, curve = influence(logs, rewards, gamma, normalised), ess_curve(logs)
    return Reference(
        value=value(logs, rewards, gamma, normalised),
        influence=psi,
        standard_error=standard_error(psi, data.behaviour_ids),
        ess_curve=curve,
        ess=min(curve),
        max_share=max_share(logs),
        mean_weight=mean_weight(logs),
    )


ESTIMATORS: dict[str, tuple[str, bool, bool]] = {  # name: scheme, normalised, capped
    "BIS": ("basic", False, False),
    "BCIS": ("basic", False, True),
    "NBIS": ("basic", True, False),
    "NBCIS": ("basic", True, True),
    "FIS": ("fused", False, False),
    "FCIS": ("fused", False, True),
    "NFIS": ("fused", True, False),
    "NFCIS": ("fused", True, True),
    "OUIS": ("optimal", False, False),
    "NOUIS": ("optimal", True, False),
}


def estimate(
    name: str,
    data: Data,
    *,
    gamma: float = 1.0,
    cap: float = 10.0,
    a: Sequence[Real] | None = None,
) -> Reference:
    """The reference of a named estimator."""
    scheme, normalised, is_capped = ESTIMATORS[name]
    limit = cap if is_capped else None
    return evaluate(scheme, data, cap=limit, normalised=normalised, gamma=gamma, a=a)
