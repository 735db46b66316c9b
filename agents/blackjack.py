"""Exact values of policies of Blackjack-v1 by dynamic programming over its infinite deck.

The rules are those of `gym.make("Blackjack-v1")`, which has sab=True: a natural (ace and ten as the
first two cards) beats every other hand except a natural. A policy observes (sum, dealer's card,
usable ace), where a natural looks like any other soft 21; here it is a state of its own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arrays import FloatArray
from ope_gym.policies import EpsilonGreedyTable, FinitePolicy

SHAPE = (32, 11, 2)  # of a table over observations; most cells never occur

_CARDS = np.arange(1, 11)
_DECK = np.array([1.0] * 9 + [4.0]) / 13.0  # P(card)

# The player's (sum, usable ace), ordered so that a hit leads to an earlier hand, or to a bust.
_HANDS = (
    *((total, 0) for total in range(21, 11, -1)),
    *((total, 1) for total in range(21, 11, -1)),
    *((total, 0) for total in range(11, 3, -1)),
)
_NUMBER = {hand: number for number, hand in enumerate(_HANDS)}
_SUMS, _ACES = np.array(_HANDS).T  # (28,) each
_SOFT_21 = _NUMBER[21, 1]


class Optimum(NamedTuple):
    """The largest value, and a policy that attains it."""

    value: float
    policy: EpsilonGreedyTable


def value(policy: FinitePolicy, gamma: float = 1.0) -> float:
    """Return the expected (discounted) return of a policy.

    Args:
        policy: Observes tuples (sum, dealer's card, usable ace); action 1 is a hit.
        gamma: Discount of each step.
    """
    seen = (np.repeat(_SUMS, 10), np.tile(_CARDS, len(_SUMS)), np.repeat(_ACES, 10))
    hit = policy.probs(seen)[:, 1].reshape(-1, 10)
    return float(_start_value(hit[:, None], gamma)[0])


def values(hit: ArrayLike, gamma: float = 1.0) -> FloatArray:
    """Return the expected (discounted) returns of many policies at once.

    Args:
        hit: (…, 32, 11, 2) probability of a hit at every observation; cells that never occur may
            hold any number. For an EpsilonGreedyTable it is ε/2 + (1 - ε) · greedy.
        gamma: Discount of each step.

    Returns:
        (…), one value a policy.
    """
    table = np.asarray(hit, dtype=np.float64)
    if table.shape[-3:] != SHAPE:
        raise ValueError(f"hit has shape {table.shape}: the last axes must be {SHAPE}")
    flat = table.reshape(-1, *SHAPE)
    used = flat[:, _SUMS, :, _ACES][..., _CARDS]  # (28, K, 10)
    wrong = ~((used >= 0) & (used <= 1))
    if wrong.any():
        s, k, card = np.argwhere(wrong)[0]
        raise ValueError(
            f"hit{[int(_SUMS[s]), int(_CARDS[card]), int(_ACES[s])]} of policy {k} is "
            f"{used[s, k, card]}: it must be a probability"
        )
    return _start_value(used, gamma).reshape(table.shape[:-3])


def optimal(gamma: float = 1.0) -> Optimum:
    """Return the best value, and a deterministic policy that attains it; ties go to stick.

    It is best also among policies that could tell a natural, because sticking on one is best.
    """
    rules = _rules()
    best = np.empty((len(_HANDS), 10))
    table = np.zeros(SHAPE, dtype=np.int64)
    for s, (total, ace) in enumerate(_HANDS):
        after_hit = gamma * (rules.moves[s, :s] @ best[:s]) - rules.bust[s]
        best[s] = np.maximum(after_hit, rules.stick[s])
        table[total, _CARDS, ace] = after_hit > rules.stick[s]
    return Optimum(float(values(table, gamma)), EpsilonGreedyTable(table, 0.0, 2))


class _Rules(NamedTuple):
    moves: FloatArray  # (28, 28) P(next hand | hit)
    bust: FloatArray  # (28,) P(bust | hit)
    stick: FloatArray  # (28, 10) expected reward for each card of the dealer
    stick_natural: FloatArray  # (10,)
    start: FloatArray  # (28,) P(first two cards), naturals apart
    start_natural: float


def _start_value(hit: FloatArray, gamma: float) -> FloatArray:
    """Return (K,) the values of policies with hit probabilities (28, K, 10)."""
    rules = _rules()
    moves = gamma * rules.moves
    state = np.empty(hit.shape)
    flat = state.reshape(len(state), -1)  # (28, K·10), the same memory
    for s in range(len(state)):
        after_hit = (moves[s, :s] @ flat[:s] - rules.bust[s]).reshape(-1, 10)
        state[s] = rules.stick[s] + hit[s] * (after_hit - rules.stick[s])
        if s == _SOFT_21:  # a natural is observed as a soft 21, and after a hit it is no better
            natural = rules.stick_natural + hit[s] * (after_hit - rules.stick_natural)
    by_card = (rules.start @ flat).reshape(-1, 10) + rules.start_natural * natural
    return np.asarray(by_card @ _DECK)


@cache
def _rules() -> _Rules:
    moves, bust = np.zeros((len(_HANDS), len(_HANDS))), np.zeros(len(_HANDS))
    for s, hand in enumerate(_HANDS):
        for card, p in zip(_CARDS, _DECK, strict=True):
            after = _add(hand, int(card))
            if after[0] > 21:
                bust[s] += p
            else:
                moves[s, _NUMBER[after]] += p
    start = np.zeros(len(_HANDS))
    for first, p in zip(_CARDS, _DECK, strict=True):
        for second, q in zip(_CARDS, _DECK, strict=True):
            start[_NUMBER[_add(_add((0, 0), int(first)), int(second))]] += p * q
    start_natural = start[_SOFT_21]  # two cards make 21 in no other way
    start[_SOFT_21] = 0.0
    scores = np.array([_dealer(_add((0, 0), int(card))) for card in _CARDS])  # (10, 22)
    stick = np.array([[s[:t].sum() - s[t + 1 :].sum() for s in scores] for t in _SUMS])
    ten_or_ace = np.zeros(10)
    ten_or_ace[[0, 9]] = _DECK[[9, 0]]  # P(the dealer has a natural, too | card)
    return _Rules(moves, bust, stick, 1.0 - ten_or_ace, start, float(start_natural))


def _add(hand: tuple[int, int], card: int) -> tuple[int, int]:
    """Return (sum, usable ace) after one more card; an ace counts 11 as long as it can."""
    total, ace = hand
    total += card
    if card == 1 and total + 10 <= 21:  # a hand that has a usable ace is above 11
        return total + 10, 1
    return (total - 10, 0) if ace and total > 21 else (total, ace)


@cache
def _dealer(hand: tuple[int, int]) -> FloatArray:
    """Return (22,) the probabilities of the dealer's score; he draws up to 17, a bust is 0."""
    if hand[0] >= 17:
        return np.asarray(np.arange(22) == (hand[0] if hand[0] <= 21 else 0), dtype=np.float64)
    followed = [p * _dealer(_add(hand, int(c))) for c, p in zip(_CARDS, _DECK, strict=True)]
    return np.asarray(np.sum(followed, axis=0))
