"""PoWER: the weighted fit, the choice of rollouts, and learning CartPole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents import Power
from agents.power import fit_sigmoid
from ope_gym.data.schedules import Schedule
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid, Uniform
from tests.test_agents import make_vector, one_step, play, train


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def linear(theta: float) -> LinearSigmoid:
    return LinearSigmoid(np.array([theta]))


def random_episodes(seed: int, lengths: Any) -> Trajectories:
    """Return episodes with two features, random actions and rewards of 1 to 3."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    n = offsets[-1]
    return Trajectories.from_arrays(
        rng.normal(size=(n, 2)),
        rng.integers(2, size=n),
        rng.uniform(1, 3, size=n),
        np.full(n, -np.log(2)),
        offsets=offsets,
        policies=[Uniform(2)],
        terminated=True,
    )


class TestFit:
    def test_one_constant_feature_gives_the_weighted_share(self) -> None:
        weights = np.array([1.0, 2.0, 5.0])
        theta = fit_sigmoid(np.ones((3, 1)), np.array([1, 0, 1]), weights, np.zeros(1), 1e-12)
        assert theta[0] == pytest.approx(logit(6 / 8))

    @pytest.mark.parametrize("start", [0.0, 30.0, -1000.0])
    def test_gradient_vanishes_wherever_it_starts(self, start: float) -> None:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(300, 3)) * [0.1, 1.0, 10.0]
        actions = (rng.random(300) < 1 / (1 + np.exp(-x @ [5.0, 1.0, 0.1]))).astype(np.int64)
        weights = rng.uniform(0, 9, size=300)
        theta = fit_sigmoid(x, actions, weights, np.full(3, start), 0.01, iterations=200)
        miss = actions - 1 / (1 + np.exp(-x @ theta))
        gradient = x.T @ (weights / weights.mean() * miss) - 0.01 * theta
        np.testing.assert_allclose(gradient, 0, atol=1e-4)

    def test_separable_actions_give_a_finite_theta(self) -> None:
        x = np.linspace(-1, 1, 200)[:, None]
        actions = (x[:, 0] > 0).astype(np.int64)
        theta = fit_sigmoid(x, actions, np.ones(200), np.zeros(1), 1e-2)
        assert 10 < theta[0] < 1000
        again = fit_sigmoid(x, actions, np.ones(200), theta, 1e-2)
        assert again[0] == pytest.approx(theta[0], rel=1e-3)


class TestLikelihoodStep:
    def test_only_the_best_rollouts_count(self) -> None:
        episodes = random_episodes(0, lengths=[3, 9, 5, 20, 4])
        best = np.argsort(-episodes.returns())[:2]
        first, second = Power(2, best=2), Power(2, best=5)
        first.learn(episodes)
        second.learn(episodes.select(episodes=best))
        np.testing.assert_allclose(first.theta, second.theta, rtol=1e-12)

    def test_weights_are_returns_or_rewards_to_go(self) -> None:
        episodes = Trajectories.from_arrays(
            np.ones((4, 1)),
            [1, 0, 0, 1],
            [1.0, 2.0, 3.0, 5.0],
            np.full(4, -np.log(2)),
            offsets=[0, 3, 4],
            policies=[Uniform(2)],
            terminated=True,
        )
        by_return = Power(1, ridge=1e-12)
        by_return.learn(episodes)
        assert by_return.theta[0] == pytest.approx(logit((6 + 5) / (6 + 6 + 6 + 5)))
        to_go = Power(1, ridge=1e-12, weighting="reward-to-go")
        to_go.learn(episodes)
        assert to_go.theta[0] == pytest.approx(logit((6 + 5) / (6 + 5 + 3 + 5)))
        discounted = Power(1, ridge=1e-12, gamma=0.5)
        discounted.learn(episodes)  # 1 + 1 + 3/4
        assert discounted.theta[0] == pytest.approx(logit((2.75 + 5) / (3 * 2.75 + 5)))

    def test_unit_of_rewards_does_not_matter(self) -> None:
        first, second = Power(1), Power(1)
        first.learn(one_step([1, 0, 1], [1.0, 2.0, 3.0]))
        second.learn(one_step([1, 0, 1], [1e6, 2e6, 3e6]))
        np.testing.assert_allclose(first.theta, second.theta, rtol=1e-12)

    def test_nothing_to_learn_from_returns_of_zero(self) -> None:
        for agent in (Power(1), Power(1, exploration="parameters")):
            agent.learn(one_step([1, 1], [0.0, 0.0], policy=linear(1.0)))
            assert agent.theta[0] == 0

    def test_negative_returns_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"episode 1 has the return -2.*add a constant"):
            Power(1).learn(one_step([1, 0, 1], [1.0, -2.0, 3.0]))

    def test_theta_starts_at_zero_and_is_read_only(self) -> None:
        agent = Power(4)
        assert agent.policy == LinearSigmoid(np.zeros(4))
        with pytest.raises(ValueError, match="read-only"):
            agent.theta[0] = 1.0


class TestParameterStep:
    def test_reward_weighted_mean_of_the_best_thetas(self) -> None:
        agent = Power(1, exploration="parameters", best=2)
        for theta, rewards in ((1.0, [1.0, 3.0]), (5.0, [6.0]), (-7.0, [0.5])):
            policy = linear(theta)
            agent.learn(one_step([0] * len(rewards), rewards, policy=policy))
        assert agent.theta[0] == pytest.approx((2 * 1.0 + 6 * 5.0) / (2 + 6))

    def test_many_perturbed_policies_in_one_batch(self) -> None:
        agent = Power(1, exploration="parameters", best=2)
        episodes = Trajectories.from_arrays(
            np.ones((3, 1)),
            [0, 1, 0],
            [2.0, 6.0, 0.5],
            np.full(3, -1.0),
            offsets=[0, 1, 2, 3],
            policies=[linear(theta) for theta in (1.0, 5.0, -7.0)],
            policy_ids=[0, 1, 2],
            terminated=True,
        )
        agent.learn(episodes)
        assert agent.theta[0] == pytest.approx(4.0)

    def test_perturbed_anew_by_each_update_only(self) -> None:
        agent = Power(4, exploration="parameters", noise=2.0, seed=1)
        same = Power(4, exploration="parameters", noise=2.0, seed=1)
        assert agent.policy is agent.policy
        assert agent.policy == same.policy
        assert agent.policy != Power(4, exploration="parameters", noise=2.0, seed=2).policy
        draws = np.stack([agent.perturbed().theta for _ in range(2000)])
        assert np.abs(draws.mean(axis=0)).max() < 4 * 2.0 / np.sqrt(2000)
        assert draws.std() == pytest.approx(2.0, rel=4 / np.sqrt(2 * 8000))

    def test_refuses_policies_it_cannot_average(self) -> None:
        agent = Power(1, exploration="parameters")
        with pytest.raises(ValueError, match=r"policy 0 is Uniform.* not a perturbed"):
            agent.learn(one_step([1], [1.0]))

    def test_refuses_a_policy_that_changes_inside_an_episode(self) -> None:
        episodes = Trajectories.from_arrays(
            np.ones((3, 1)),
            [0, 1, 0],
            [2.0, 6.0, 0.5],
            np.full(3, -1.0),
            offsets=[0, 1, 3],
            policies=[linear(1.0), linear(2.0)],
            policy_ids=[0, 0, 1],
            start_clock=[0, 1],
            schedules=[Schedule(np.array([0, 2]), np.array([0, 1], dtype=np.int32))],
            schedule_ids=0,
            terminated=True,
        )
        with pytest.raises(ValueError, match="episode 1, step 1: the policy changes"):
            Power(1, exploration="parameters").learn(episodes)

    def test_an_update_that_fails_changes_nothing(self) -> None:
        agent = Power(1, exploration="parameters")
        first = linear(4.0)
        mixed = Trajectories.from_arrays(
            np.ones((2, 1)),
            [0, 1],
            [9.0, 9.0],
            np.full(2, -1.0),
            offsets=[0, 1, 2],
            policies=[linear(9.0), Uniform(2)],
            policy_ids=[0, 1],
            terminated=True,
        )
        with pytest.raises(ValueError, match="policy 1 is Uniform"):
            agent.learn(mixed)
        agent.learn(one_step([1], [1.0], policy=first))
        assert agent.theta[0] == 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "length"}, "weighting='length' must be"),
        ({"exploration": "none"}, "exploration='none' must be"),
        ({"exploration": "parameters", "weighting": "reward-to-go"}, "weighted by the return"),
        ({"best": 0}, "best=0 must be >= 1"),
        ({"ridge": 0.0}, "ridge=0.0 > 0"),
    ],
)
def test_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Power(2, **options)


@pytest.mark.parametrize(
    ("weighting", "iterations", "floor"), [("return", 10, 35.0), ("reward-to-go", 5, 100.0)]
)
def test_learns_cartpole(weighting: Any, iterations: int, floor: float) -> None:
    """Require the geometric mean over five runs to be 3 standard errors above the floor.

    θ_0 has 22. The logarithm, since weighting by returns leaves some runs at 50 and takes others
    to 500.
    """
    envs = make_vector("CartPole-v1", 30)
    logs = []
    for seed in range(5):
        agent = Power(4, weighting=weighting)
        rng = train(envs, agent, iterations, seed)
        logs.append(np.log(play(envs, agent.policy, rng).returns().mean()))
    assert np.exp(np.mean(logs) - 3 * np.std(logs, ddof=1) / np.sqrt(len(logs))) > floor


def test_learns_cartpole_by_perturbed_parameters() -> None:
    """Update 40 times from one rollout each; θ_0 has a mean return of 22."""
    one, many = make_vector("CartPole-v1", 1), make_vector("CartPole-v1", 100)
    for seed in range(2):
        agent = Power(4, exploration="parameters", seed=seed)
        rng = train(one, agent, 40, seed)
        returns = play(many, LinearSigmoid(agent.theta), rng).returns()
        assert returns.mean() - 4 * returns.std() / np.sqrt(len(returns)) > 25
