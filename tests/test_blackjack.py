"""Exact values of Blackjack-v1 against an enumeration of hands with Gymnasium's own rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.toy_text import blackjack as gymnasium_rules
from numpy.typing import NDArray

from agents import blackjack
from ope_gym.policies import EpsilonGreedyTable, Uniform

rules: Any = gymnasium_rules  # it has no types
Floats = NDArray[np.float64]
Hand = tuple[int, ...]  # sorted cards
DECK = [(card, rules.deck.count(card) / 13) for card in range(1, 11)]


def random_policy(seed: int) -> EpsilonGreedyTable:
    rng = np.random.default_rng(seed)
    return EpsilonGreedyTable(rng.integers(2, size=blackjack.SHAPE), rng.uniform(), 2)


def hit_table(policy: EpsilonGreedyTable) -> Floats:
    return np.asarray(policy.epsilon / 2 + (1 - policy.epsilon) * policy.greedy, dtype=np.float64)


def outcome(hand: Hand) -> tuple[int, bool]:
    """Return what decides a game: the score, and whether the hand is a natural."""
    return rules.score(list(hand)), rules.is_natural(list(hand))


@cache
def dealer_outcomes(hand: Hand) -> dict[tuple[int, bool], float]:
    """Return the outcomes of a dealer's hand with their probabilities."""
    if rules.sum_hand(list(hand)) >= 17:
        return {outcome(hand): 1.0}
    found: dict[tuple[int, bool], float] = {}
    for card, p in DECK:
        for end, q in dealer_outcomes(tuple(sorted((*hand, card)))).items():
            found[end] = found.get(end, 0.0) + p * q
    return found


@cache
def stick_reward(score: int, natural: bool, shown: int) -> float:
    """Return the expected reward of a stick; the dealer always takes a second card."""
    total = 0.0
    for hidden, p in DECK:
        for (dealer, other), q in dealer_outcomes(tuple(sorted((shown, hidden)))).items():
            total += p * q * (1.0 if natural and not other else rules.cmp(score, dealer))
    return total


def enumerated_value(
    decide: Callable[[float, float, tuple[int, int, int]], float], gamma: float = 1.0
) -> float:
    """Walk through all hands; `decide` gives their value from those of stick and hit."""

    @cache
    def value(player: Hand, shown: int) -> float:
        after_hit = 0.0
        for card, p in DECK:
            after = tuple(sorted((*player, card)))
            after_hit += p * (-1.0 if rules.is_bust(list(after)) else gamma * value(after, shown))
        seen = (rules.sum_hand(list(player)), shown, rules.usable_ace(list(player)))
        return decide(stick_reward(*outcome(player), shown), after_hit, seen)

    return math.fsum(
        p * q * r * value(tuple(sorted((first, second))), shown)
        for first, p in DECK
        for second, q in DECK
        for shown, r in DECK
    )


def mix(hit: Floats) -> Callable[[float, float, tuple[int, int, int]], float]:
    return lambda stick, after_hit, seen: stick + hit[seen] * (after_hit - stick)


@pytest.mark.parametrize(("seed", "gamma"), [(0, 1.0), (1, 0.7)])
def test_equals_the_enumeration_of_hands(seed: int, gamma: float) -> None:
    policy = random_policy(seed)
    expected = enumerated_value(mix(hit_table(policy)), gamma)
    assert blackjack.value(policy, gamma) == pytest.approx(expected, abs=1e-12)


def test_optimum_equals_the_enumeration_of_hands() -> None:
    gamma = 0.9  # without a discount it is known: see the next test
    # here each hand decides for itself, also a natural, which a policy cannot observe
    expected = enumerated_value(lambda stick, after_hit, seen: max(stick, after_hit), gamma)
    best = blackjack.optimal(gamma)
    assert best.value == pytest.approx(expected, abs=1e-12)
    assert blackjack.value(best.policy, gamma) == pytest.approx(best.value, abs=1e-15)


def test_optimum_is_the_known_one() -> None:
    value, policy = blackjack.optimal()
    assert value == pytest.approx(-0.0431131, abs=1e-7)
    first_stick = [policy.greedy[12:22, card, 0].argmin() + 12 for card in range(1, 11)]
    assert first_stick == [17, 13, 13, 12, 12, 12, 17, 17, 17, 17]
    first_soft_stick = [policy.greedy[12:22, card, 1].argmin() + 12 for card in range(1, 11)]
    assert first_soft_stick == [19, 18, 18, 18, 18, 18, 18, 18, 19, 19]


def test_no_single_change_improves_the_optimum() -> None:
    value, policy = blackjack.optimal()
    changed = np.repeat(policy.greedy.reshape(1, -1), policy.greedy.size, axis=0)
    np.fill_diagonal(changed, 1 - changed.diagonal())
    found = blackjack.values(changed.reshape(-1, *blackjack.SHAPE))
    assert found.max() <= value + 1e-12
    # 18 hard and 10 soft sums occur with ten cards of the dealer; other cells change nothing
    assert (found < value - 1e-12).sum() == 280


def test_values_of_many_policies_equal_those_of_each() -> None:
    policies = [random_policy(seed) for seed in range(6)]
    tables = np.stack([hit_table(policy) for policy in policies]).reshape(2, 3, *blackjack.SHAPE)
    found = blackjack.values(tables)
    assert found.shape == (2, 3)
    expected = [blackjack.value(policy) for policy in policies]
    np.testing.assert_allclose(found.ravel(), expected, rtol=0, atol=1e-14)
    assert blackjack.values(tables[1, 2]).shape == ()


def test_any_finite_policy() -> None:
    expected = blackjack.values(np.full(blackjack.SHAPE, 0.5))
    assert blackjack.value(Uniform(2)) == pytest.approx(float(expected), abs=1e-14)


@pytest.mark.parametrize("always", [0, 1])
def test_rollouts_of_gymnasium_agree(always: int) -> None:
    """Compare a good and a bad policy with rollouts, within 4 standard errors."""
    env = gym.make("Blackjack-v1")
    assert env.unwrapped.sab  # type: ignore[attr-defined]
    table = blackjack.optimal().policy.greedy.copy()
    table[17, :, 0] = always  # hard 17 is frequent
    returns = []
    env.reset(seed=5)
    for _ in range(4000):
        seen, _ = env.reset()
        ended = False
        while not ended:
            seen, reward, ended, _, _ = env.step(int(table[seen]))
        returns.append(float(reward))
    exact = blackjack.value(EpsilonGreedyTable(table, 0.0, 2))
    assert abs(np.mean(returns) - exact) < 4 * np.std(returns) / np.sqrt(len(returns))


def test_refuses_other_tables() -> None:
    with pytest.raises(ValueError, match=r"hit has shape \(3, 4\).*\(32, 11, 2\)"):
        blackjack.values(np.zeros((3, 4)))
    table = np.zeros(blackjack.SHAPE)
    table[0, 0, 0] = np.nan  # never occurs
    blackjack.values(table)
    table[12, 1, 0] = 1.5
    with pytest.raises(ValueError, match=r"hit\[12, 1, 0\] of policy 0 is 1.5"):
        blackjack.values(table)
