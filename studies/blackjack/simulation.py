"""Simulate Blackjack-v1, and Monte-Carlo control on it, in compiled code.

The rules are those of `gym.make("Blackjack-v1")` (sab=True). Random numbers are drawn in the order
of a loop over the environment: two cards of the dealer, two of the player, then one number for each
action and one for each card. Observations are numbered as cells of a table (32, 11, 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agents.blackjack import SHAPE
from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.kernels import compiled
from ope_gym.policies import EpsilonGreedyTable

CELLS = math.prod(SHAPE)
LONGEST = 20  # most steps of a game: with aces alone, soft 12 … 21 and hard 12 … 21


class Control(NamedTuple):
    """Tables learned by Monte-Carlo control, flat over cells."""

    totals: FloatArray  # (CELLS, 2) sums of returns
    visits: IntArray  # (CELLS, 2)
    greedy: IntArray  # (snapshots, CELLS)


def control(epsilons: FloatArray, every: int, rng: np.random.Generator) -> Control:
    """Play one episode for each ε, learn after each, and keep the greedy actions every `every`.

    The results are those of `agents.MonteCarloControl(SHAPE, 2)` if it learns after each episode.
    """
    totals = np.zeros((CELLS, 2))
    visits = np.zeros((CELLS, 2), dtype=np.int64)
    greedy = np.zeros((len(epsilons) // every, CELLS), dtype=np.int64)
    _control(epsilons, every, rng, totals, visits, greedy)
    return Control(totals, visits, greedy)


def rollouts(
    policies: Sequence[EpsilonGreedyTable], episodes: int, rng: np.random.Generator
) -> Trajectories:
    """Return `episodes` fresh episodes of each policy, held out from the learner."""
    greedy = np.stack([np.asarray(policy.greedy).reshape(-1) for policy in policies])
    epsilons = np.array([policy.epsilon for policy in policies])
    n = len(policies) * episodes
    cells = np.empty(n * LONGEST, dtype=np.int64)
    actions, rewards = np.empty_like(cells), np.empty(n)
    offsets = np.zeros(n + 1, dtype=np.int64)
    _rollouts(greedy, epsilons, episodes, rng, cells, actions, offsets, rewards)
    steps = int(offsets[-1])
    paid = np.zeros(steps)
    paid[offsets[1:] - 1] = rewards
    ids = np.repeat(np.arange(len(policies)), episodes)
    step_ids = np.repeat(ids, np.diff(offsets))
    other = 0.5 * epsilons[step_ids]  # the probability of the action that is not greedy
    probs = np.where(actions[:steps] == greedy[step_ids, cells[:steps]], 1.0 - other, other)
    return Trajectories.from_arrays(
        np.unravel_index(cells[:steps], SHAPE),
        actions[:steps],
        paid,
        np.log(probs),
        offsets=offsets,
        policies=policies,
        policy_ids=step_ids,
        terminated=True,
        held_out=True,
    )


def returns(policy: EpsilonGreedyTable, episodes: int, rng: np.random.Generator) -> FloatArray:
    """Return the returns of fresh episodes of a policy, (episodes,)."""
    found: FloatArray = _returns(
        np.asarray(policy.greedy).reshape(-1), policy.epsilon, episodes, rng
    )
    return found


@compiled()
def _card(rng: Any) -> Any:
    """Draw a card: 1 to 10, tens and faces together."""
    return min(int(rng.random() * 13.0) + 1, 10)


@compiled()
def _add(total: Any, ace: Any, card: Any) -> Any:
    """Return sum and usable ace after one more card."""
    total += card
    if card == 1 and total + 10 <= 21:
        return total + 10, 1
    if ace == 1 and total > 21:
        return total - 10, 0
    return total, ace


@compiled()
def _episode(greedy: Any, epsilon: Any, rng: Any, cells: Any, actions: Any, row: Any) -> Any:
    """Play one episode and write its steps from `row` on; return the next row and the reward."""
    shown, hidden = _card(rng), _card(rng)
    dealer, dealer_ace = _add(0, 0, shown)
    dealer, dealer_ace = _add(dealer, dealer_ace, hidden)
    dealer_natural = dealer == 21
    first, second = _card(rng), _card(rng)
    total, ace = _add(0, 0, first)
    total, ace = _add(total, ace, second)
    natural = total == 21
    while True:
        cell = (total * 11 + shown) * 2 + ace
        stick = 0.5 * epsilon if greedy[cell] == 1 else 1.0 - 0.5 * epsilon
        action = 0 if rng.random() < stick else 1
        cells[row] = cell
        actions[row] = action
        row += 1
        if action == 0:
            break
        natural = False
        total, ace = _add(total, ace, _card(rng))
        if total > 21:
            return row, -1.0
    while dealer < 17:
        dealer, dealer_ace = _add(dealer, dealer_ace, _card(rng))
    if natural and not dealer_natural:
        return row, 1.0
    score = dealer if dealer <= 21 else 0
    return row, 1.0 if total > score else -1.0 if total < score else 0.0


@compiled()
def _control(epsilons: Any, every: int, rng: Any, totals: Any, visits: Any, snapshots: Any) -> None:
    """Play and learn in place; see `control`."""
    best = np.zeros(totals.shape[0], dtype=np.int64)
    cells = np.empty(LONGEST, dtype=np.int64)
    actions = np.empty(LONGEST, dtype=np.int64)
    for t in range(epsilons.size):
        steps, reward = _episode(best, epsilons[t], rng, cells, actions, 0)
        for j in range(steps):  # only the last reward is not 0, so it is the return of all steps
            totals[cells[j], actions[j]] += reward
            visits[cells[j], actions[j]] += 1
        for j in range(steps):
            s = cells[j]
            stick = totals[s, 0] / max(visits[s, 0], 1)
            best[s] = 1 if totals[s, 1] / max(visits[s, 1], 1) > stick else 0
        if (t + 1) % every == 0:
            snapshots[(t + 1) // every - 1] = best


@compiled()
def _rollouts(
    greedy: Any,
    epsilons: Any,
    episodes: int,
    rng: Any,
    cells: Any,
    actions: Any,
    offsets: Any,
    rewards: Any,
) -> None:
    """Play episodes of each policy and write them in place; see `rollouts`."""
    row = 0
    for i in range(rewards.size):
        k = i // episodes
        row, rewards[i] = _episode(greedy[k], epsilons[k], rng, cells, actions, row)
        offsets[i + 1] = row


@compiled()
def _returns(greedy: Any, epsilon: float, episodes: int, rng: Any) -> Any:
    """Play episodes of one policy; see `returns`."""
    cells = np.empty(LONGEST, dtype=np.int64)
    actions = np.empty(LONGEST, dtype=np.int64)
    found = np.empty(episodes)
    for i in range(episodes):
        _, found[i] = _episode(greedy, epsilon, rng, cells, actions, 0)
    return found
