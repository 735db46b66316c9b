"""Epsilon-greedy Monte-Carlo control.

`python -m tests.test_monte_carlo` prints the values that its docstring states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from agents import MonteCarloControl, blackjack, epsilon_1, epsilon_2
from agents.monte_carlo import count_visits, table_shape
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import EpsilonGreedyTable, Uniform

BLACKJACK = (32, 11, 2)


def chain(*episodes: Sequence[tuple[int, int, float]]) -> Trajectories:
    """Return episodes from lists of (state, action, reward)."""
    rows = [row for episode in episodes for row in episode]
    states, actions, rewards = (np.array(column) for column in zip(*rows, strict=True))
    return Trajectories.from_arrays(
        states,
        actions,
        rewards,
        np.full(len(rows), -np.log(2)),
        offsets=np.cumsum([0, *(len(episode) for episode in episodes)]),
        policies=[Uniform(2)],
        terminated=True,
    )


def play_blackjack(
    env: gym.Env[Any, Any], policy: EpsilonGreedyTable, rng: np.random.Generator, n: int = 1
) -> Trajectories:
    """Play n episodes of Blackjack-v1."""
    rows: list[tuple[int, ...]] = []
    actions: list[int] = []
    rewards: list[float] = []
    offsets = [0]
    for _ in range(n):
        seen, _ = env.reset()
        ended = False
        while not ended:
            explore = rng.random() < policy.epsilon
            actions.append(int(rng.integers(2)) if explore else int(policy.greedy[seen]))
            rows.append(seen)
            seen, reward, ended, _, _ = env.step(actions[-1])
            rewards.append(float(reward))
        offsets.append(len(rows))
    observations = tuple(np.array(rows).T)
    return Trajectories.from_arrays(
        observations,
        actions,
        rewards,
        policy.log_prob(observations, np.array(actions)),
        offsets=offsets,
        policies=[policy],
        terminated=True,
    )


def train_blackjack(agent: MonteCarloControl, batches: int, n: int, seed: int) -> None:
    env, rng = gym.make("Blackjack-v1"), np.random.default_rng(seed)
    env.reset(seed=seed)
    for _ in range(batches):
        agent.learn(play_blackjack(env, agent.policy, rng, n))


def greedy(agent: MonteCarloControl) -> EpsilonGreedyTable:
    return EpsilonGreedyTable(agent.policy.greedy, 0.0, 2)


class TestSchedules:
    def test_values(self) -> None:
        assert [epsilon_1(t) for t in (1, 500)] == [1.0, pytest.approx(2 / (2 + np.log(500)))]
        assert [epsilon_2(t) for t in (1, 500, 5000, 5001)] == pytest.approx(
            [1 - 0.95 / 5000, 0.905, 0.05, 0.05]
        )
        assert epsilon_2(10, n_iter=20) == pytest.approx(0.525)

    def test_snapshot_has_the_epsilon_of_the_next_episode(self) -> None:
        agent = MonteCarloControl((3,), 2, epsilon=partial(epsilon_2, n_iter=10))
        assert agent.policy.epsilon == pytest.approx(1 - 0.095)
        agent.learn(chain([(0, 0, 1.0)], [(1, 0, 1.0)], [(2, 0, 1.0)]))
        assert agent.policy.epsilon == pytest.approx(1 - 0.95 * 4 / 10)


class TestLearn:
    def test_every_visit_counts_and_averages_run_on(self) -> None:
        agent = MonteCarloControl((3,), 2)
        agent.learn(chain([(0, 1, 1.0), (0, 1, 2.0), (1, 0, 4.0)]))
        np.testing.assert_array_equal(agent.q, [[0, 6.5], [4, 0], [0, 0]])  # (7 + 6) / 2
        agent.learn(chain([(0, 1, -10.0)], [(1, 0, -8.0)]))
        np.testing.assert_array_equal(agent.q, [[0, 1], [-2, 0], [0, 0]])  # (13 - 10) / 3
        np.testing.assert_array_equal(agent.policy.greedy, [1, 1, 0])

    def test_discount(self) -> None:
        agent = MonteCarloControl((2,), 2, gamma=0.5)
        agent.learn(chain([(0, 1, 1.0), (1, 1, 2.0)]))
        np.testing.assert_array_equal(agent.q, [[0, 2], [0, 2]])

    def test_ties_go_to_the_lowest_action(self) -> None:
        agent = MonteCarloControl((1,), 2)
        assert agent.policy.greedy[0] == 0
        agent.learn(chain([(0, 1, 1.0)]))
        assert agent.policy.greedy[0] == 1
        agent.learn(chain([(0, 0, 1.0)]))
        assert agent.policy.greedy[0] == 0

    def test_grouping_and_order_of_episodes_do_not_matter(self) -> None:
        rng = np.random.default_rng(0)
        numbers = rng.integers(0, [3, 2, 3], size=(60, 3)).tolist()
        rows = [(state, action, reward - 1.0) for state, action, reward in numbers]
        episodes = [rows[i : i + 4] for i in range(0, 60, 4)]
        together, apart = MonteCarloControl((3,), 2), MonteCarloControl((3,), 2)
        together.learn(chain(*episodes))
        for episode in reversed(episodes):
            apart.learn(chain(episode))
        assert together.policy == apart.policy
        np.testing.assert_array_equal(together.q, apart.q)

    def test_the_greedy_action_maximises_q(self) -> None:
        agent = MonteCarloControl(BLACKJACK, 2)
        train_blackjack(agent, 300, 1, seed=1)
        assert agent.policy == EpsilonGreedyTable.from_q(agent.q, epsilon_1(301))

    def test_tables_of_many_runs_are_one_table(self) -> None:
        rng = np.random.default_rng(0)
        states, actions = rng.integers(5, size=(3, 40)), rng.integers(2, size=(3, 40))
        returns = rng.normal(size=(3, 40))

        def tables(n: int) -> tuple[Any, Any, Any]:
            return np.zeros((n, 2)), np.zeros((n, 2), np.int64), np.zeros(n, np.int64)

        joint = tables(15)
        runs = 5 * np.arange(3)[:, None]
        count_visits(*joint, (states + runs).ravel(), actions.ravel(), returns.ravel())
        for run in range(3):
            own = tables(5)
            count_visits(*own, states[run], actions[run], returns[run])
            for ours, theirs in zip(own, joint, strict=True):
                np.testing.assert_array_equal(ours, theirs[5 * run : 5 * run + 5])

    def test_observations_outside_the_table(self) -> None:
        agent = MonteCarloControl((2,), 2)
        with pytest.raises(ValueError, match=r"observations\[0\]\[0\] is 2: it must be in 0 … 1"):
            agent.learn(chain([(2, 0, 1.0)]))
        assert agent.episodes_seen == 0


class TestTableShape:
    def test_discrete_and_tuples(self) -> None:
        assert table_shape(gym.make("Blackjack-v1").observation_space) == BLACKJACK
        assert table_shape(gym.spaces.Discrete(16)) == (16,)
        assert table_shape(gym.spaces.MultiDiscrete([3, 4])) == (3, 4)

    @pytest.mark.parametrize(
        "space",
        [
            gym.spaces.Box(0, 1, (2,)),
            gym.spaces.Discrete(3, start=1),
            gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(0, 1)]),
        ],
    )
    def test_other_spaces_have_none(self, space: gym.Space[Any]) -> None:
        assert table_shape(space) is None


def test_comes_near_the_optimum_of_blackjack() -> None:
    """Learn from 500 batches of 10 episodes; the uniform policy is 0.351 below the optimum."""
    best = blackjack.optimal().value
    for seed in range(2):
        agent = MonteCarloControl(BLACKJACK, 2)
        train_blackjack(agent, 500, 10, seed)
        assert 0 < best - blackjack.value(greedy(agent)) < 0.12
        # exploration costs something, too
        assert blackjack.value(agent.policy) < blackjack.value(greedy(agent))


if __name__ == "__main__":
    best = blackjack.optimal().value
    for schedule in (epsilon_1, epsilon_2):
        table = []
        for seed in range(20):
            agent, row = MonteCarloControl(BLACKJACK, 2, epsilon=schedule), []
            env, rng = gym.make("Blackjack-v1"), np.random.default_rng(seed)
            env.reset(seed=seed)
            for t in range(1, 20_001):
                agent.learn(play_blackjack(env, agent.policy, rng))
                if t in (300, 1000, 5000, 20_000):
                    row += [best - blackjack.value(greedy(agent))]
                    row += [best - blackjack.value(agent.policy)]
            table.append(row)
        print(schedule.__name__, "after 300, 1000, 5000, 20000 episodes: greedy, as it acts")
        print(np.mean(table, axis=0).reshape(-1, 2).round(4).tolist())
        print("deviations", np.std(table, axis=0).reshape(-1, 2).round(4).tolist())
