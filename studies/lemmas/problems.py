"""Compute variances of BIS, FIS, OUIS and the optimum by summing over all data sets.

A plain estimator is the mean of ψ_i = Σ_t w_i,t r_i,t. Given the shares of the behaviour policies ψ
depends on one trajectory alone, so one call of the library on a list of all trajectories gives
every ψ, and the estimate on any data set is a mean of such numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ope_gym import Weighting, evaluate_log_probs
from ope_gym.arrays import FloatArray
from studies import oracle

NAMES = ("BIS", "FIS", "OUIS", "optimum")


@dataclass(frozen=True)
class Problem:
    """A problem of one step: policies (K, A) draw n_k actions each; rewards are r̄ ± √V, evenly."""

    policies: FloatArray
    counts: FloatArray
    target: FloatArray
    mean: FloatArray
    variance: FloatArray


# --- one step ---------------------------------------------------------------------------------


def closed_forms(problem: Problem) -> FloatArray:
    """Return the variances of BIS, FIS, OUIS (with the true r̄ and V) and the family's optimum."""
    given = (problem.policies, problem.target, problem.mean, problem.variance, problem.counts)
    forms = (oracle.variance_bis, oracle.variance_fis, oracle.variance_ouis)
    found = np.array([*(form(*given) for form in forms), oracle.variance_optimal(*given)])
    return np.where(found > 1e-12 * found[0], found, 0.0)  # less than this is rounding


def internal_variances(problem: Problem) -> FloatArray:
    """Return the least V_int of the family, and V_int of FIS: equal, according to section 3.2."""
    noise = np.maximum(problem.variance, 1.0)
    given = (problem.policies, problem.target, np.zeros_like(noise), noise, problem.counts)
    return np.array([oracle.variance_optimal(*given), oracle.variance_fis(*given)])


def enumerated(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Return bias and variance of BIS, FIS, OUIS and the optimum over all data sets."""
    terms = library_terms(problem)
    given = (problem.policies, problem.target, problem.mean, problem.variance, problem.counts)
    rewards = _rewards(problem)
    alpha = oracle.optimal_alpha(*given)
    terms["optimum"] = (alpha * problem.target / problem.policies)[..., None] * rewards
    n = problem.counts.sum()
    owners = np.repeat(np.arange(len(problem.counts)), problem.counts.astype(int))
    chances = [np.repeat(problem.policies[k] / 2, 2) for k in owners]
    chance = reduce(np.multiply.outer, chances)
    moments = []
    for name in NAMES:
        value = reduce(np.add.outer, [terms[name][k].ravel() / n for k in owners])
        mean = float((chance * value).sum())
        moments.append((mean, float((chance * (value - mean) ** 2).sum())))
    found = np.array(moments).T
    return found[0] - problem.target @ problem.mean, found[1]


def library_terms(problem: Problem) -> dict[str, FloatArray]:
    """Return ψ (K, A, 2) of every draw: behaviour policy, action, sign of the deviation."""
    k, a = problem.policies.shape
    # n_k copies of each draw of behaviour k, so that the shares are those of the problem
    ids = np.repeat(np.arange(k), 2 * a * problem.counts.astype(int))
    copies = [np.tile(np.arange(2 * a), int(count)) for count in problem.counts]
    actions, signs = np.divmod(np.concatenate(copies), 2)
    with np.errstate(divide="ignore"):
        target, behaviours = np.log(problem.target), np.log(problem.policies)
    found = evaluate_log_probs(
        target[actions],
        behaviours[:, actions],
        ids,
        _rewards(problem)[actions, signs],
        np.arange(ids.size + 1),
        estimators=NAMES[:3],
        weighting=Weighting(reward_model=(problem.mean[actions], problem.variance[actions])),
    )
    first = np.searchsorted(ids, np.arange(k))
    rows = first[:, None] + np.arange(2 * a)
    return {name: e.influence[rows].reshape(k, a, 2) for name, e in found.items()}


def _rewards(problem: Problem) -> FloatArray:
    """Return the two rewards of each action, (A, 2)."""
    deviation = np.sqrt(problem.variance)
    return np.stack([problem.mean - deviation, problem.mean + deviation], axis=1)


def printed_difference(problem: Problem) -> FloatArray:
    """Return Var BIS − Var FIS as the appendix prints its first line, and with its errors mended.

    Printed: (r̄ + V) for (r̄² + V), Σ_i J² / N for J² / N, and r̄² π_i for r̄ π_i in a square.
    """
    pi = np.repeat(problem.policies, problem.counts.astype(int), axis=0)  # (N, A)
    n, e, r, v = len(pi), problem.target, problem.mean, problem.variance
    total, value = pi.sum(axis=0), e @ r
    harmonic = (1 / pi).sum(axis=0) / n**2
    fused = (e**2 * (r**2 + v) / total).sum()
    printed = (e**2 * (r + v) * harmonic).sum() - n * value**2 / n - fused
    printed += (((e * r**2 * pi / total).sum(axis=1)) ** 2).sum()
    mended = (e**2 * (r**2 + v) * harmonic).sum() - value**2 / n - fused
    mended += (((e * r * pi / total).sum(axis=1)) ** 2).sum()
    return np.array([printed, mended])


def printed_identity(problem: Problem) -> FloatArray:
    """Return N⁻² ΣΣ a_j / a_i, as printed, over Σ 1/a_i Σ a_j, and the latter over N².

    The proof needs the second to be at least 1.
    """
    a = np.repeat(problem.policies, problem.counts.astype(int), axis=0)
    product = (1 / a).sum(axis=0) * a.sum(axis=0)
    printed = (a[None] / a[:, None]).sum(axis=(0, 1)) / len(a) ** 2
    return np.array([float((printed / product).max()), float((product / len(a) ** 2).min())])


# --- several steps ----------------------------------------------------------------------------


def random_steps(rng: np.random.Generator) -> FloatArray:
    """Return Var BIS and Var FIS of a random problem for three kinds of rewards, (3, 2)."""
    horizon = int(rng.integers(2, 4))
    stay = rng.uniform(0.05, 0.95, size=(int(rng.integers(2, 4)), horizon))
    target = rng.uniform(0.05, 0.95, size=horizon)
    rewards = rng.normal(size=(2**horizon, horizon))
    for path, t in itertools.product(range(2**horizon), range(horizon)):
        rewards[path, t] = rewards[path >> (horizon - 1 - t) << (horizon - 1 - t), t]
    last = np.where(np.arange(horizon) == horizon - 1, rewards, 0.0)
    return np.array([step_variances(stay, target, r) for r in (rewards, np.abs(rewards), last)])


def step_variances(stay: FloatArray, target: FloatArray, rewards: FloatArray) -> FloatArray:
    """Return the variances of per-decision BIS and FIS from one episode of each policy.

    Args:
        stay: (K, T) probability of action 0 at each step.
        target: (T,) that of the target.
        rewards: (2^T, T) on each path. Path 0 takes action 0 always; the lowest bit of a path's
            number is its last action.
    """
    behaviours, horizon = stay.shape
    paths = np.array(list(itertools.product((0, 1), repeat=horizon)))  # (2^T, T)
    with np.errstate(divide="ignore"):
        own = np.log(np.where(paths == 0, stay[:, None], 1 - stay[:, None]))  # (K, 2^T, T)
        wanted = np.log(np.where(paths == 0, target, 1 - target))
    ids = np.repeat(np.arange(behaviours), len(paths))
    found = evaluate_log_probs(
        np.tile(wanted.ravel(), behaviours),
        np.tile(own.reshape(behaviours, -1), (1, behaviours)),
        ids,
        np.tile(rewards.ravel(), behaviours),
        np.arange(0, ids.size * horizon + 1, horizon),
        estimators=["BIS", "FIS"],
    )
    chance = np.exp(own.sum(axis=2))  # (K, 2^T)
    variances = []
    for estimate in found.values():
        terms = estimate.influence.reshape(chance.shape)
        mean = (chance * terms).sum(axis=1, keepdims=True)
        variances.append((chance * (terms - mean) ** 2).sum() / behaviours**2)
    return np.array(variances)


EXAMPLE = Problem(
    policies=np.array([[0.9, 0.1], [0.5, 0.5]]),
    counts=np.ones(2),
    target=np.array([0.5, 0.5]),
    mean=np.ones(2),
    variance=np.zeros(2),
)
UNDONE = (  # the second step takes back the reward of the first
    np.array([[0.9, 0.5], [0.5, 0.9]]),
    np.array([1.0, 1.0]),
    np.tile([1.0, -1.0], (4, 1)),
)
