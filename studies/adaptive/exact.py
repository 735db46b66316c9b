"""Compute exact biases under adaptive policies: sums over all histories, each evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np

from ope_gym import Trajectories, evaluate
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.policies import SoftmaxLinear

History: TypeAlias = tuple[tuple[int, float], ...]  # (action, reward) of each round
EXACT = ("BIS", "FIS", "OUIS", "NBIS", "NFIS", "NOUIS", "EA")


def estimates(
    policies: FloatArray,
    ids: IntArray,
    actions: IntArray,
    rewards: FloatArray,
    target: FloatArray,
    names: Sequence[str],
    *,
    held_out: bool = False,
) -> list[tuple[float, float, float]]:
    """Return (value, low, high) of each estimator on one-step data, by the library.

    Args:
        policies: (K, A) probabilities of the behaviour policies.
        ids: (n,) which of them drew.
        actions: (n,) drawn.
        rewards: (n,) that followed.
        target: (A,) probabilities of the target.
        names: of the estimators.
        held_out: whether the target is independent of these data.
    """
    data = Trajectories.from_arrays(
        np.zeros((ids.size, 0)),
        actions,
        rewards,
        np.log(policies[ids, actions]),
        offsets=np.arange(ids.size + 1),
        policies=[_policy(p) for p in policies],
        policy_ids=ids,
        terminated=True,
        held_out=held_out,
    )
    found = evaluate(data, _policy(target), estimators=names)
    return [(e.value, e.interval.low, e.interval.high) for e in found.values()]


def _policy(probs: FloatArray) -> SoftmaxLinear:
    """Return a policy with these probabilities whatever the observation."""
    return SoftmaxLinear(np.zeros((probs.size, 0)), np.log(probs))


@cache
def stopped_estimates(ones: int) -> FloatArray:
    """Return EA and BIS for a single action that paid 1 `ones` times and then 0."""
    rewards = np.append(np.ones(ones), 0.0)
    zeros = np.zeros(ones + 1, dtype=np.int64)
    found = estimates(np.ones((1, 1)), zeros, zeros, rewards, np.ones(1), ["EA", "BIS"])
    return np.array([value for value, _, _ in found])


def bias_over_histories(
    rounds: int,
    policy: Callable[[History], FloatArray],
    pays: FloatArray,
    target: FloatArray,
    *,
    fixed: bool = False,
) -> FloatArray:
    """Return the exact biases (7,) of the estimators `EXACT` after rounds of one draw each.

    Args:
        rounds: number of draws.
        policy: gives the probabilities (A,) of the next action after a history.
        pays: (A,) probability of reward 1; otherwise it is 0.
        target: (A,) probabilities of the target.
        fixed: whether the policies follow another history, independent of the data, with the same
            distribution.
    """
    value, total = float(target @ pays), np.zeros(len(EXACT))
    outcomes = [(a, r) for a in range(pays.size) for r in (0.0, 1.0) if r == 0 or pays[a] > 0]
    histories = list(itertools.product(outcomes, repeat=rounds))
    for plan in histories if fixed else [None]:
        for history in histories:
            led_by = history if plan is None else plan
            policies = np.stack([policy(led_by[:t]) for t in range(rounds)])
            chance = _chance(history, policies, pays)
            if plan is not None:
                chance *= _chance(plan, policies, pays)
            if chance > 0:
                actions, rewards = (np.array(part) for part in zip(*history, strict=True))
                found = estimates(
                    policies, np.arange(rounds), actions, rewards.astype(float), target, EXACT
                )
                total += chance * np.array([v for v, _, _ in found])
    return total - value


def _chance(history: History, policies: FloatArray, pays: FloatArray) -> float:
    """Return the probability of a history."""
    return math.prod(
        float(policies[t, a]) * float(pays[a] if r else 1 - pays[a])
        for t, (a, r) in enumerate(history)
    )


@cache
def two_round_bias(*, adaptive: bool) -> FloatArray:
    """Return biases if the second draw repeats a winner, and leaves a loser, with probability .9.

    Both actions are Bernoulli(1/2), so that J = 1/2.
    """

    def policy(history: History) -> FloatArray:
        if not history:
            return np.array([0.5, 0.5])
        action, reward = history[0]
        stay = 0.9 if reward else 0.1
        return np.where(np.arange(2) == action, stay, 1 - stay)

    half = np.array([0.5, 0.5])
    return bias_over_histories(2, policy, half, half, fixed=not adaptive)


@cache
def soft_stop_bias(rounds: int) -> FloatArray:
    """Return biases in the paper's example with a policy that acts rarely after a 0, not never.

    Acting pays Bernoulli(1/2), idling 0. The target acts with .9, so J = 0.45.
    """

    def policy(history: History) -> FloatArray:
        stopped = any(action == 1 and reward == 0 for action, reward in history)
        act = 0.1 if stopped else 0.9
        return np.array([1 - act, act])

    return bias_over_histories(rounds, policy, np.array([0.0, 0.5]), np.array([0.1, 0.9]))
