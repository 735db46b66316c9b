"""The protocol of agents, the choice of an agent for an env, and the softmax-linear agent.

`python -m tests.test_agents` prints the returns that the docstrings of `agents` state.
"""

from __future__ import annotations

import doctest
import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

import agents
from agents import Agent, GaussianPower, MonteCarloControl, Power, SoftmaxLinearAgent, make_agent
from agents.contract import centred_rewards_to_go, rewards_to_go
from agents.softmax_linear import mean_kl, natural_step
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid, Policy, SoftmaxLinear, Uniform

VectorEnv = gym.vector.VectorEnv[Any, Any, Any]
Floats = NDArray[np.float64]


def make_vector(name: str, n: int) -> VectorEnv:
    mode = "vector_entry_point" if name.startswith("CartPole") else "sync"
    return gym.make_vec(name, num_envs=n, vectorization_mode=mode)


def play(envs: VectorEnv, policy: Policy, rng: np.random.Generator) -> Trajectories:
    """Play the first episode of each sub-env."""
    seen, _ = envs.reset(seed=int(rng.integers(2**31)))
    alive = np.ones(envs.num_envs, dtype=bool)
    rows: list[tuple[Any, ...]] = []
    ended, cut = np.zeros_like(alive), np.zeros_like(alive)
    while alive.any():
        done = policy.sample(seen, rng)
        next_seen, rewards, terminated, truncated, _ = envs.step(done)
        rows.append((np.array(seen), done, rewards, alive.copy()))
        ended |= alive & terminated
        cut |= alive & truncated
        alive &= ~(terminated | truncated)
        seen = next_seen
    # (T, n, …) to (n, T, …), without the rows after the end of an episode
    x, a, r, played = (np.swapaxes(np.stack(column), 0, 1) for column in zip(*rows, strict=True))
    offsets = np.concatenate([[0], np.cumsum(played.sum(axis=1))])
    x, a, r = x[played], a[played], r[played]
    return Trajectories.from_arrays(
        x,
        a,
        r,
        policy.log_prob(x, a),
        offsets=offsets,
        policies=[policy],
        terminated=ended,
        truncated=cut,
    )


def train(envs: VectorEnv, agent: Agent, iterations: int, seed: int) -> np.random.Generator:
    """Learn from one batch of rollouts an iteration; return the generator for further draws."""
    rng = np.random.default_rng(seed)
    for _ in range(iterations):
        agent.learn(play(envs, agent.policy, rng))
    return rng


def one_step(
    actions: Any, rewards: Any, *, policy: Policy | None = None, held_out: Any = False
) -> Trajectories:
    """Return episodes of one step each, at x = (1,)."""
    n = len(actions)
    return Trajectories.from_arrays(
        np.ones((n, 1)),
        actions,
        rewards,
        np.full(n, -np.log(2)),
        offsets=np.arange(n + 1),
        policies=[policy or Uniform(2)],
        terminated=True,
        held_out=held_out,
    )


MAKERS: dict[str, Callable[[], Agent]] = {
    "power": lambda: Power(1),
    "power-parameters": lambda: Power(1, exploration="parameters"),
    "softmax": lambda: SoftmaxLinearAgent(1, 2),
    "monte-carlo": lambda: MonteCarloControl((), 2),  # a bandit
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Agent]:
    return MAKERS[request.param]


class TestContract:
    def test_is_an_agent_with_a_policy(self, make: Callable[[], Agent]) -> None:
        agent = make()
        assert isinstance(agent, Agent)
        assert isinstance(agent.policy, Policy)

    def test_only_learning_changes_the_policy(self, make: Callable[[], Agent]) -> None:
        agent = make()
        before = agent.policy
        x = np.ones((1, 1))
        kept = before.log_prob(x, np.array([0]))
        assert agent.policy is before
        agent.learn(one_step([0, 1, 1], [0.0, 2.0, 2.0], policy=before))
        assert agent.policy != before
        assert before.log_prob(x, np.array([0])) == kept

    def test_same_data_same_policies(self, make: Callable[[], Agent]) -> None:
        first, second = make(), make()
        for _ in range(3):
            assert first.policy == second.policy
            for agent in (first, second):
                agent.learn(one_step([0, 1, 1, 0], [1.0, 2.0, 3.0, 0.0], policy=agent.policy))

    def test_no_episodes_no_change(self, make: Callable[[], Agent]) -> None:
        agent = make()
        before = agent.policy
        agent.learn(one_step([0], [1.0]).select(episodes=[]))
        assert agent.policy == before

    def test_refuses_held_out_episodes(self, make: Callable[[], Agent]) -> None:
        agent = make()
        episodes = one_step([0, 1], [1.0, 2.0], policy=agent.policy, held_out=[False, True])
        with pytest.raises(ValueError, match=r"episode 1 is held out.*select\(held_out=False\)"):
            agent.learn(episodes)
        agent.learn(episodes.select(held_out=False))

    @pytest.mark.parametrize("name", ["contract", "monte_carlo", "power", "softmax_linear"])
    def test_examples_in_docstrings(self, name: str) -> None:
        assert doctest.testmod(importlib.import_module(f"agents.{name}")).failed == 0


class TestRewardsToGo:
    def test_inside_each_episode(self) -> None:
        episodes = Trajectories.from_arrays(
            np.zeros((6, 1)),
            np.zeros(6, dtype=int),
            [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            np.zeros(6),
            offsets=[0, 3, 4, 6],
            policies=[Uniform(2)],
            terminated=True,
        )
        np.testing.assert_array_equal(rewards_to_go(episodes), [7, 6, 4, 8, 48, 32])
        np.testing.assert_array_equal(rewards_to_go(episodes, 0.5), [3, 4, 4, 8, 32, 32])
        for i, expected in enumerate([[3, 4, 4], [8], [32, 32]]):
            alone = episodes.select(episodes=[i])
            np.testing.assert_array_equal(rewards_to_go(alone, 0.5), expected)
        # steps 0, 1, 2 have the means (7 + 8 + 48) / 3, (6 + 32) / 2, 4
        np.testing.assert_array_equal(
            centred_rewards_to_go(episodes, 1.0), [-14, -13, 0, -13, 27, 13]
        )


class TestMakeAgent:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("CartPole-v1", Power),
            ("Blackjack-v1", MonteCarloControl),
            ("Acrobot-v1", SoftmaxLinearAgent),
            ("MountainCar-v0", SoftmaxLinearAgent),
            ("FrozenLake-v1", MonteCarloControl),
            ("Pendulum-v1", GaussianPower),
        ],
    )
    def test_supported(self, name: str, kind: type) -> None:
        env = gym.make(name)
        agent = make_agent(env)
        assert type(agent) is kind
        seen, _ = env.reset(seed=0)
        batch = tuple(np.array([s]) for s in seen) if isinstance(seen, tuple) else np.array([seen])
        (action,) = agent.policy.sample(batch, np.random.default_rng(0))
        assert env.action_space.contains(np.asarray(action, env.action_space.dtype))

    def test_vector_env(self) -> None:
        agent = make_agent(make_vector("CartPole-v1", 3))
        assert isinstance(agent, Power)
        assert agent.policy == LinearSigmoid(np.zeros(4))

    def test_a_cartpole_with_more_actions_is_no_cartpole(self) -> None:
        env: Any = SimpleNamespace(
            observation_space=gym.spaces.Box(-1, 1, (4,)),
            action_space=gym.spaces.Discrete(3),
            spec=SimpleNamespace(id="CartPole-v1"),
        )
        assert isinstance(make_agent(env), SoftmaxLinearAgent)

    def test_options_are_passed_on(self) -> None:
        env = gym.make("CartPole-v1")
        agent = make_agent(env, gamma=0.9)
        assert isinstance(agent, Power)
        assert agent.gamma == 0.9

    @pytest.mark.parametrize(
        ("seen", "done"),
        [
            (gym.spaces.Box(-1, 1, (4, 4)), gym.spaces.Discrete(2)),
            (gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2, start=1)),
            (gym.spaces.MultiDiscrete([1000, 1001]), gym.spaces.Discrete(4)),
            (gym.spaces.Discrete(16), gym.spaces.Box(-1, 1, (1,))),
        ],
    )
    def test_the_error_lists_what_is_supported(
        self, seen: gym.Space[Any], done: gym.Space[Any]
    ) -> None:
        env: Any = SimpleNamespace(observation_space=seen, action_space=done, spec=None)
        with pytest.raises(ValueError, match=r"no small agent for .*they take discrete"):
            make_agent(env)

    def test_names_are_exported(self) -> None:
        assert all(hasattr(agents, name) for name in agents.__all__)


def random_batch(
    seed: int, n_actions: int = 3, width: int = 2
) -> tuple[Floats, Floats, NDArray[np.int64], Floats]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(40, width))
    probs = rng.dirichlet(np.ones(n_actions), size=40)
    return z, probs, rng.integers(n_actions, size=40), rng.normal(size=40)


class TestSoftmaxLinear:
    def test_step_is_fisher_inverse_times_gradient(self) -> None:
        z, probs, actions, advantages = random_batch(0)
        gradient, fisher = np.zeros(6), np.zeros((6, 6))
        for x, p, a, advantage in zip(z, probs, actions, advantages, strict=True):
            scores = [np.outer(np.eye(3)[b] - p, x).ravel() for b in range(3)]  # ∇ log π(b|x)
            gradient += scores[a] * advantage / 40
            fisher += sum(p[b] * np.outer(scores[b], scores[b]) for b in range(3)) / 40
        direction = np.linalg.solve(fisher + 0.1 * np.eye(6), gradient)
        expected = direction * np.sqrt(2 * 0.03 / (gradient @ direction))
        step = natural_step(z, probs, actions, advantages, kl=0.03, damping=0.1)
        np.testing.assert_allclose(step.ravel(), expected, rtol=1e-10)

    def test_step_is_as_long_as_asked(self) -> None:
        z, _, actions, advantages = random_batch(1)
        old = SoftmaxLinear(np.ones((3, 2)))
        step = natural_step(z, old.probs(z), actions, advantages, kl=1e-4, damping=1e-9)
        new = SoftmaxLinear(old.weights + step)
        assert mean_kl(old.probs(z), new.probs(z)) == pytest.approx(1e-4, rel=0.02)

    def test_units_of_rewards_and_observations_do_not_matter(self) -> None:
        envs, rng = make_vector("CartPole-v1", 10), np.random.default_rng(3)
        plain, other = SoftmaxLinearAgent(4, 2), SoftmaxLinearAgent(4, 2)
        scale, shift = np.array([1e-3, 1.0, 7.0, 1e4]), np.array([3.0, 0.0, -2.0, 50.0])
        for _ in range(3):
            episodes = play(envs, plain.policy, rng)
            x = np.asarray(episodes.observations, dtype=np.float64)
            changed = Trajectories.from_arrays(
                x * scale + shift,
                episodes.actions,
                episodes.rewards * 100,
                episodes.log_probs,
                offsets=episodes.offsets,
                policies=episodes.policies,
                terminated=True,
            )
            plain.learn(episodes)
            other.learn(changed)
            ours, theirs = plain.policy.probs(x), other.policy.probs(x * scale + shift)
            np.testing.assert_allclose(ours, theirs, atol=1e-8)
        assert plain.policy != SoftmaxLinearAgent(4, 2).policy

    def test_no_step_is_far_beyond_the_trust_region(self) -> None:
        agent = SoftmaxLinearAgent(1, 2, kl=5.0)  # too far for the quadratic approximation
        before = agent.policy
        agent.learn(one_step([0, 1, 1], [0.0, 2.0, 2.0]))
        x = np.ones((1, 1))
        assert 0 < mean_kl(before.probs(x), agent.policy.probs(x)) <= 7.5

    @pytest.mark.parametrize("gamma", [1.0, 0.9])
    def test_no_step_where_all_returns_are_equal(self, gamma: float) -> None:
        agent = SoftmaxLinearAgent(2, 3, gamma=gamma)
        envs = make_vector("MountainCar-v0", 7)
        agent.learn(play(envs, Uniform(3), np.random.default_rng(0)))
        assert agent.policy == SoftmaxLinear(np.zeros((3, 2)))

    def test_the_weight_of_a_constant_feature_stays(self) -> None:
        agent = SoftmaxLinearAgent(1, 2)
        agent.learn(one_step([0, 1, 1], [0.0, 2.0, 2.0]))
        np.testing.assert_array_equal(agent.policy.weights, np.zeros((2, 1)))
        assert agent.policy.probs(np.ones((1, 1)))[0, 1] > 0.5

    @pytest.mark.parametrize("options", [{"kl": 0.0}, {"damping": 0.0}])
    def test_refuses_options(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be above 0"):
            SoftmaxLinearAgent(1, 2, **options)

    def test_learns_cartpole(self) -> None:
        envs = make_vector("CartPole-v1", 30)
        finals = []
        for seed in range(4):
            agent = SoftmaxLinearAgent(4, 2)
            rng = train(envs, agent, 7, seed)
            finals.append(play(envs, agent.policy, rng).returns().mean())
        # the uniform policy has 22
        assert np.mean(finals) - 4 * np.std(finals, ddof=1) / np.sqrt(len(finals)) > 60
        assert min(finals) > 60

    def test_learns_acrobot(self) -> None:
        envs = make_vector("Acrobot-v1", 20)
        agent = SoftmaxLinearAgent(6, 3)
        rng = train(envs, agent, 3, seed=0)
        returns = play(envs, agent.policy, rng).returns()
        # the uniform policy has about -499; one of the first 20 episodes must reach the goal
        assert returns.mean() - 4 * returns.std(ddof=1) / np.sqrt(len(returns)) > -400


class TestGaussianPower:
    def test_the_fit_is_weighted_least_squares(self) -> None:
        x, rng = np.linspace(-1.0, 1.0, 40)[:, None], np.random.default_rng(0)
        agent = GaussianPower(1, [-4.0], [4.0], ridge=1e-12)
        actions = agent.policy.sample(x, rng)
        rewards = rng.random(40)
        agent.learn(
            Trajectories.from_arrays(
                x,
                actions,
                rewards,
                agent.policy.log_prob(x, actions),
                offsets=np.arange(41),
                policies=[agent.policy],
                terminated=True,
            )
        )
        weights = np.maximum(rewards - rewards.mean(), 0.0)
        design = np.column_stack([x, np.ones(40)]) * np.sqrt(weights)[:, None]
        slope, intercept = np.linalg.lstsq(design, actions[:, 0] * np.sqrt(weights))[0]
        fitted = agent.policy
        np.testing.assert_allclose([fitted.weights[0, 0], fitted.bias[0]], [slope, intercept])
        left = (actions - fitted.mean(x))[:, 0]
        std = np.sqrt(weights @ left**2 / weights.sum())
        np.testing.assert_allclose(np.exp(fitted.log_std), [std])

    def test_it_goes_on_exploring(self) -> None:
        agent = GaussianPower(1, [-np.inf], [np.inf])
        for _ in range(3):
            agent.learn(one_step([[0.3], [0.3], [-0.3]], [2.0, 2.0, 0.0], policy=agent.policy))
        np.testing.assert_allclose(np.exp(agent.policy.log_std), [0.2])
        np.testing.assert_allclose(agent.policy.mean(np.ones((1, 1))), [[0.3]])

    def test_learns_to_balance(self) -> None:
        pytest.importorskip("mujoco")
        envs = make_vector("InvertedPendulum-v5", 10)
        agent = GaussianPower(4, [-3.0], [3.0])
        rng = train(envs, agent, 8, seed=0)
        returns = play(envs, agent.policy, rng).returns()  # 6 in the beginning
        assert returns.mean() - 4 * returns.std(ddof=1) / np.sqrt(len(returns)) > 20


def measure(
    label: str,
    name: str,
    make: Callable[[], Agent],
    *,
    seeds: int,
    iterations: int = 10,
    rollouts: int = 30,
) -> None:
    """Print the mean return of the policy after so many batches of so many rollouts."""
    envs, fresh = make_vector(name, rollouts), make_vector(name, 100)
    finals = []
    for seed in range(seeds):
        agent = make()
        rng = train(envs, agent, iterations, seed)
        final = LinearSigmoid(agent.theta) if isinstance(agent, Power) else agent.policy
        finals.append(play(fresh, final, rng).returns().mean())
    print(
        f"{label} on {name} after {iterations} batches of {rollouts}, {seeds} seeds: "
        f"{np.mean(finals):.0f} ± {np.std(finals, ddof=1):.0f} between seeds, "
        f"{min(finals):.0f} to {max(finals):.0f}",
        flush=True,
    )


if __name__ == "__main__":
    cartpole, acrobot, car = "CartPole-v1", "Acrobot-v1", "MountainCar-v0"
    measure("return", cartpole, lambda: Power(4), seeds=20)
    measure("reward-to-go", cartpole, lambda: Power(4, weighting="reward-to-go"), seeds=20)
    streams = iter(range(20))
    measure(
        "parameters",
        cartpole,
        lambda: Power(4, exploration="parameters", seed=next(streams)),
        seeds=20,
        iterations=300,
        rollouts=1,
    )
    for n in (10, 20):
        measure("softmax", cartpole, lambda: SoftmaxLinearAgent(4, 2), seeds=20, iterations=n)
        measure("softmax", acrobot, lambda: SoftmaxLinearAgent(6, 3), seeds=8, iterations=n)
    hopper, pendulum = "Hopper-v5", "InvertedPendulum-v5"
    for n in (0, 10):
        for name, width, high in ((pendulum, 4, [3.0]), (hopper, 11, np.ones(3))):
            made = functools.partial(GaussianPower, width, -np.array(high), high)
            measure("gaussian", name, made, seeds=3, iterations=n)
    measure("softmax", car, lambda: SoftmaxLinearAgent(2, 3), seeds=4)
