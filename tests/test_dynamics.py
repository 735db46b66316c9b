"""DynamicsQ: what it learns of small known systems, and the values it finds in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.models import dynamics
from ope_gym.models.base import Problem, QModel
from ope_gym.models.dynamics import Environment, Played, Steps, fit_ending, learn, sampling
from ope_gym.models.dynamics_q import (
    DynamicsQ,
    DynamicsValues,
    ValueFeatures,
    fit_value,
    recorded_steps,
)
from ope_gym.models.features import monomials
from ope_gym.models.folds import cross_fit
from ope_gym.policies import DiagonalGaussian, LinearSigmoid, Uniform
from studies.cartpole.simulation import mean_return as true_return
from studies.cartpole.simulation import rollouts

Floats = NDArray[np.float64]
HORIZON = 8
TARGET = LinearSigmoid(theta=np.array([1.0, -0.5]), bias=0.3)
SMALL = DynamicsQ(degree=2, cosines=60, episodes=400, rows=4000)

TINY = DynamicsQ(degree=2, cosines=20, episodes=100, rows=1000)


def move(state: Floats, action: int) -> Floats:
    """A linear system: the second number drifts, the first follows it."""
    x, v = state
    push = 0.25 if action else -0.15
    return np.array([x + 0.2 * v + 0.1 * push, 0.9 * v + push])


def reward(state: Floats, action: int) -> float:
    return float(1.0 + 0.5 * state[0] - 0.2 * action)


def over(state: Floats, edge: float) -> bool:
    return bool(abs(state[1]) > edge)


def record(
    episodes: int, seed: int, *, edge: float = 0.6, horizon: int = HORIZON, noise: float = 0.0
) -> Trajectories:
    """Episodes of the linear system under uniform actions."""
    rng = np.random.default_rng(seed)
    states, actions, rewards, offsets, terminated = [], [], [], [0], []
    for _ in range(episodes):
        state, ended, steps = rng.uniform(-0.3, 0.3, 2), False, 0
        while not ended and steps < horizon:
            action = int(rng.integers(2))
            states.append(state)
            actions.append(action)
            rewards.append(reward(state, action) + noise * rng.standard_normal())
            state = move(state, action)
            ended, steps = over(state, edge), steps + 1
        offsets.append(len(states))
        terminated.append(ended)
    return Trajectories.from_arrays(
        np.array(states),
        np.array(actions),
        rewards,
        np.full(len(states), np.log(0.5)),
        offsets=offsets,
        policies=[Uniform(2)],
        terminated=terminated,
        truncated=~np.array(terminated),
        horizon=horizon,
    )


def true_value(state: Floats, gamma: float, edge: float, left: int) -> float:
    """The target's value by walking through all sequences of actions."""
    if left == 0 or over(state, edge):
        return 0.0
    chances = TARGET.probs(state[None])[0]
    return sum(
        float(chances[a])
        * (reward(state, a) + gamma * true_value(move(state, a), gamma, edge, left - 1))
        for a in (0, 1)
    )


def learned(data: Trajectories, degree: int = 2) -> tuple[Environment, Steps, Any]:
    steps, probs = recorded_steps(data, TARGET)
    return learn(steps, degree, ends_by_action=True), steps, probs


def played_by(environment: Environment, starts: Floats, seed: int, **options: Any) -> Played:
    rng = np.random.default_rng(seed)
    act = sampling(TARGET, starts, rng)
    return environment.play(act, starts, horizon=HORIZON, rng=rng, **options)


def walk(rows: list[tuple[Any, ...]], n_actions: int) -> Steps:
    """Steps of (state, action, following, ended), rewards of 1; states after an end are hidden."""
    states, taken, following, ended = (np.array(column) for column in zip(*rows, strict=True))
    following = np.where(ended[:, None], states, following)
    return Steps(states, following, ~ended, taken, np.ones(len(rows)), ended, n_actions)


def chances(environment: Environment, states: Floats) -> Floats:
    """Of the end at states (n, d), whichever action led there."""
    assert environment.ending is not None
    return environment.ending(states)


def problem(seed: int) -> Problem:
    return Problem(TARGET, 1.0, HORIZON, np.random.default_rng(seed))


def fit(data: Trajectories, model: DynamicsQ = TINY, **options: Any) -> DynamicsValues:
    return model.fit(data, replace(problem(1), **options))


def start_values(values: DynamicsValues, starts: Floats) -> Floats:
    q = values.q_all(starts, np.zeros(len(starts), dtype=np.int64))
    return np.asarray(np.einsum("na,na->n", TARGET.probs(starts), q))


@pytest.mark.parametrize(("width", "degree"), [(1, 4), (2, 3), (4, 3), (3, 0)])
def test_monomials_are_all_products(width: int, degree: int) -> None:
    z = np.random.default_rng(0).uniform(0.5, 2.0, (5, width))
    wanted = [
        z[:, list(chosen)].prod(axis=1)
        for k in range(degree + 1)
        for chosen in combinations_with_replacement(range(width), k)
    ]
    found = monomials(z.T, degree)
    assert found.shape == (len(wanted), 5)
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(wanted, axis=0))


def test_ends_are_learned_from_the_steps_near_them() -> None:
    """A part of the steps gives about what all give, also if every fourth is of another kind."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(12_000, 2)) * np.where(np.arange(12_000) % 4, 1.0, 0.1)[:, None]
    ended = rng.random(12_000) < 1.0 / (1.0 + np.exp(-8.0 * (states[:, 0] - 2.0)))
    centre, scale = states.mean(axis=0), states.std(axis=0)
    some = fit_ending(states, ended, centre, scale, (states.min(axis=0), states.max(axis=0)))
    x = some.features(states)
    every = 1.0 / (1.0 + np.exp(-x @ dynamics._logistic(x, ended)))  # from all steps
    found = some(states)
    assert found.sum() == pytest.approx(ended.sum(), rel=0.01)
    assert np.abs(found - every).max() < 0.1
    assert np.abs(found - every)[every < 0.01].max() < 0.01


def test_a_linear_system_is_recovered() -> None:
    model, _, _ = learned(record(60, 0))
    states = np.random.default_rng(5).uniform(-0.4, 0.4, (50, 2))
    following, rewards, _ = model.outcomes(states)
    for a in (0, 1):
        np.testing.assert_allclose(following[a], [move(s, a) for s in states], atol=1e-8)
        np.testing.assert_allclose(rewards[a], [reward(s, a) for s in states], atol=1e-8)


def test_the_edge_is_learned_from_predicted_states() -> None:
    model, _, _ = learned(record(150, 0))
    states = np.random.default_rng(5).uniform(-0.6, 0.6, (400, 2))
    following, _, ending = model.outcomes(states)
    distance = np.abs(following[:, :, 1]) - 0.6
    assert np.all(ending[distance > 0.05] > 0.9)
    assert np.all(ending[distance < -0.05] < 0.1)
    assert np.count_nonzero(distance > 0.05) > 20


def test_where_either_of_two_numbers_ends_the_episode_the_inside_is_safe() -> None:
    """A walk in a box: both limits are met often, and no chance to end is left well inside."""
    rng = np.random.default_rng(0)
    pushes = np.array([[0.3, 0.0], [-0.3, 0.0], [0.0, 0.3], [0.0, -0.3]])
    rows = []
    for _ in range(300):
        state, ended = rng.uniform(-1.0, 1.0, 2), False
        while not ended:
            action = int(rng.integers(4))
            following = state + pushes[action]
            ended = bool(np.abs(following).max() > 1.0)
            rows.append((state, action, following, ended))
            state = following
    model = learn(walk(rows, 4), 1)
    ends = rng.uniform(-0.85, 0.85, (500, 2))
    assert chances(model, ends).mean() < 1e-3
    ends[..., 0] = rng.choice([-1.15, 1.15], 500)
    assert chances(model, ends).mean() > 0.999


def test_a_limit_on_one_side_is_none_on_the_other() -> None:
    """Episodes end to the right of 1; nothing is known beyond what was seen on the left."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        x, ended = rng.uniform(-0.2, 0.2, 1), False
        for _ in range(40):
            action = int(rng.random() < 0.6)
            following = x + (0.1 if action else -0.1)
            ended = bool(following > 1.0)
            rows.append((x, action, following, ended))
            x = following
            if ended:
                break
    steps = walk(rows, 2)
    model = learn(steps, 1)
    places = np.array([model.low[0], steps.states.min(), 0.0, 0.9, 1.1])
    np.testing.assert_allclose(chances(model, places[:, None]), [0, 0, 0, 0, 1], atol=0.02)


def test_a_number_that_ends_nothing_ends_nothing_beyond_its_range_either() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        state, ended = np.array([rng.uniform(-0.5, 0.5), rng.normal()]), False
        while not ended:
            action = int(rng.integers(2))
            x = state[0] + (0.2 if action else -0.2)
            ended = bool(abs(x) > 1.0)
            following = np.array([x, 0.9 * state[1] + 0.4 * rng.normal()])
            rows.append((state, action, following, ended))
            state = following
    model = learn(walk(rows, 2), 1)
    ends = np.zeros((50, 2))
    ends[:, 1] = np.linspace(model.low[1], model.high[1], 50)
    assert chances(model, ends).max() < 0.05


def test_an_action_may_end_an_episode_wherever_it_leads() -> None:
    rng = np.random.default_rng(0)
    states, taken = rng.normal(size=(400, 1)), rng.integers(2, size=400)
    rows = list(zip(states, taken, states + 0.1, taken == 1, strict=True))
    ends = learn(walk(rows, 2), 1, ends_by_action=True).outcomes(states)[2]
    assert ends[0].max() < 0.02
    assert ends[1].min() > 0.98


def test_an_ending_step_may_pay_more_than_others() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        x, ended = rng.uniform(-0.5, 0.5, 1), False
        while not ended:
            action = int(rng.integers(2))
            following = x + (0.2 if action else -0.2)
            ended = bool(abs(following[0]) > 1.0)
            rows.append((x, action, following, ended))
            x = following
    steps = walk(rows, 2)
    paid = 0.5 * steps.states[:, 0] - 0.1 * steps.actions - 20.0 * steps.terminated
    model = learn(replace(steps, rewards=paid), 1)
    assert model.terminal_bonus == pytest.approx(-20.0)
    rewards = model.outcomes(np.array([[0.4]]))[1]
    np.testing.assert_allclose(rewards, [[0.2], [0.1]], atol=1e-9)


def test_real_actions_are_inputs_and_a_rule_without_chance_can_be_played() -> None:
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(2, 300, 1))
    following = 0.5 * states + 0.2 * actions
    truncated = np.zeros(300, dtype=np.bool_)
    paid = -(states[:, 0] ** 2)
    steps = Steps(states, following, ~truncated, actions, paid, truncated, 0)
    model = learn(steps, 2)
    starts = np.array([[1.0], [-0.5]])
    played = model.play(lambda x: -x, starts, horizon=3, rng=rng)
    np.testing.assert_allclose(played.states[4:], 0.3**2 * starts, atol=1e-9)
    np.testing.assert_allclose(played.returns, -(1 + 0.3**2 + 0.3**4) * starts[:, 0] ** 2)
    policy = DiagonalGaussian(np.zeros((1, 1)), np.full(1, 5.0), np.zeros(1))
    bounds = np.full(1, -1.0), np.full(1, 0.5)
    act = sampling(policy, starts.astype(np.float32), rng, bounds)
    np.testing.assert_array_equal(act(starts), 0.5)


def test_the_time_limit_is_no_end() -> None:
    data = record(30, 0, edge=np.inf)
    assert data.truncated.all()
    model, steps, _ = learned(data)
    assert model.ending is None
    assert not model.outcomes(steps.states)[2].any()


def test_an_action_never_taken_moves_like_the_others() -> None:
    _, steps, _ = learned(record(40, 0))
    three = learn(replace(steps, n_actions=3), 1)
    on = ~steps.terminated
    both = monomials(((steps.states - three.centre) / three.scale).T, 1).T[on]
    common = np.linalg.lstsq(both, steps.rewards[on], rcond=None)[0]
    np.testing.assert_allclose(three.coefficients[2, -1], common, atol=1e-8)
    assert np.all(np.isfinite(three.coefficients))


def test_predictions_stay_near_the_recorded_range() -> None:
    model, steps, _ = learned(record(40, 0))
    state = np.full((1, 2), 1e6)
    span = np.ptp(steps.states, axis=0)
    assert np.all(model.outcomes(state)[0] <= steps.states.max(axis=0) + 0.5 * span + 1e-12)


@pytest.mark.parametrize(("gamma", "edge"), [(1.0, 0.6), (0.8, 0.6), (1.0, np.inf)])
def test_value_at_the_start_is_that_of_all_sequences(gamma: float, edge: float) -> None:
    data = record(150, 0, edge=edge)
    values = fit(data, SMALL, gamma=gamma)
    starts = np.asarray(data.observations)[data.offsets[:-1]][:40]
    exact = np.array([true_value(s, gamma, edge, HORIZON) for s in starts])
    found = start_values(values, starts)
    model, _, _ = learned(data)
    played = played_by(model, np.repeat(starts, 50, axis=0), 9, gamma=gamma)
    error = exact.std() / np.sqrt(40) + 2.5 / np.sqrt(2000)  # a return is within 0 … 10
    assert abs(played.returns.mean() - exact.mean()) < 4 * error
    assert abs(found.mean() - exact.mean()) < 0.01 * exact.mean()
    assert np.sqrt(np.mean((found - exact) ** 2)) < 0.04 * exact.mean()


def test_taking_luck_out_makes_the_fit_more_precise() -> None:
    data = record(150, 0)
    model, steps, probs = learned(data)
    starts = steps.states[data.offsets[:-1]]
    exact = np.array([true_value(s, 1.0, 0.6, HORIZON) for s in starts])
    times = np.zeros(len(starts), dtype=np.int64)
    worse = {}
    for luck_out in (True, False):
        errors = []
        for seed in range(3):
            rng = np.random.default_rng(seed)
            played = played_by(model, starts, seed)
            features = ValueFeatures.around(steps.states, HORIZON, 3, 20, rng)
            fit_to: dict[str, Any] = {"played": played, "gamma": 1.0, "rows": 2000, "rng": rng}
            theta = fit_value(model, probs, features, luck_out=luck_out, **fit_to)
            errors.append(np.mean(theta @ features(starts, times) - exact))
        worse[luck_out] = np.sqrt(np.mean(np.square(errors)))
    assert worse[True] < 0.5 * worse[False]


def test_the_last_step_pays_its_reward_and_nothing_follows() -> None:
    data = record(60, 0)
    values = fit(data)
    states = np.random.default_rng(5).uniform(-0.3, 0.3, (20, 2))
    q = values.q_all(states, np.full(20, HORIZON - 1))
    for a in (0, 1):
        np.testing.assert_allclose(q[:, a], [reward(s, a) for s in states], atol=1e-8)
    myopic = fit(data, gamma=0.0).q_all(states, np.zeros(20, dtype=np.int64))
    np.testing.assert_allclose(myopic, q, atol=1e-8)


def test_q_is_the_column_of_q_all() -> None:
    data = record(40, 0)
    values = fit(data)
    everything = values.q_all(data.observations, data.steps)
    taken = np.asarray(data.actions)
    np.testing.assert_array_equal(
        values.q(data.observations, data.actions, data.steps),
        everything[np.arange(data.n_steps), taken],
    )
    assert isinstance(TINY, QModel)


def test_episodes_are_ordered_by_their_length_and_end_at_the_limit() -> None:
    data = record(60, 0)
    model, steps, _ = learned(data)
    times = np.array([0, 3, HORIZON - 1] * 20)
    played = played_by(model, steps.states[:60], 0, times=times)
    rows = played.longest_first()
    assert len(rows) == HORIZON
    for now, later in pairwise(rows):
        m = later.size
        np.testing.assert_array_equal(played.episodes[later], played.episodes[now[:m]])
        np.testing.assert_array_equal(played.times[later], played.times[now[:m]] + 1)
        assert not played.ended[now[:m]].any()
        assert np.all(played.ended[now[m:]] | (played.times[now[m:]] == HORIZON - 1))
        following = model.step(played.states[now[:m]], played.actions[now[:m]])[0]
        np.testing.assert_allclose(played.states[later], following, atol=1e-12)


def test_a_seed_gives_the_same_values() -> None:
    data = record(40, 0)
    first, again, other = (
        fit(data, rng=np.random.default_rng(seed)).q_all(data.observations, data.steps)
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0


def test_an_episode_is_judged_by_the_others_only() -> None:
    data = record(30, 0)
    groups = np.zeros(30, dtype=np.int64)
    mine = np.isin(data.episode_ids, np.arange(0, 30, 2))  # fold 0 of 2
    rewards = np.where(mine, data.rewards.mean(), data.rewards)
    # the same extremes, since values are cut to what all rewards allow
    rewards[np.flatnonzero(mine)[:2]] = data.rewards.min(), data.rewards.max()
    changed = Trajectories.from_arrays(
        data.observations,
        data.actions,
        rewards,
        data.log_probs,
        offsets=data.offsets,
        policies=data.policies,
        terminated=data.terminated,
        truncated=data.truncated,
        horizon=HORIZON,
    )
    found = [cross_fit(TINY, d, groups, problem(2), folds=2) for d in (data, changed)]
    np.testing.assert_array_equal(found[0].q[mine], found[1].q[mine])
    np.testing.assert_array_equal(found[0].v[mine], found[1].v[mine])
    assert np.abs(found[0].q[~mine] - found[1].q[~mine]).max() > 1e-3


def test_residuals_vanish_where_the_model_is_right() -> None:
    data = record(150, 0)
    groups = np.zeros(150, dtype=np.int64)
    base = cross_fit(SMALL, data, groups, problem(2), folds=2)
    e = base.residuals(data.rewards, data.offsets, 1.0)
    assert np.sqrt(np.mean(e**2)) < 0.25 * data.rewards.mean()


def test_the_pole_of_cartpole_from_episodes_of_another_policy() -> None:
    behaviour = LinearSigmoid(np.array([0.0, 0.0, 4.0, 1.0]))
    target = LinearSigmoid(np.array([0.0, 0.5, 10.0, 2.0]))
    rng = np.random.default_rng(0)
    data = rollouts(behaviour, 40, 60, rng)
    truth, error = true_return(target, 2000, 60, rng)
    assert truth > 1.2 * data.returns().mean()
    model = DynamicsQ(episodes=300, cosines=40, rows=5000)
    values = model.fit(data, Problem(target, 1.0, 60, np.random.default_rng(1)))
    starts = np.asarray(data.observations)[data.offsets[:-1]]
    q = values.q_all(starts, np.zeros(len(starts), dtype=np.int64))
    found = np.einsum("na,na->n", target.probs(starts), q)
    spread = found.std() / np.sqrt(40) + 15 / np.sqrt(300)  # of starts, and of played returns
    assert abs(found.mean() - truth) < 3 * (error + spread)


def test_episodes_are_no_longer_than_the_horizon() -> None:
    with pytest.raises(ValueError, match="horizon=3 is less than the longest episode, 8 steps"):
        fit(record(10, 0), horizon=3)


def test_data_it_cannot_learn_from_are_refused() -> None:
    data = record(10, 0)
    gaussian = DiagonalGaussian(weights=np.zeros((1, 2)), bias=np.zeros(1), log_std=np.zeros(1))
    with pytest.raises(ValueError, match="use LinearQ or NetworkQ for continuous"):
        fit(data, SMALL, target=gaussian)

    def other(observations: Any, actions: Any = data.actions) -> Trajectories:
        return Trajectories.from_arrays(
            observations,
            actions,
            data.rewards,
            data.log_probs,
            offsets=data.offsets,
            policies=data.policies,
            terminated=data.terminated,
            truncated=data.truncated,
        )

    with pytest.raises(ValueError, match="use TabularQ for whole numbers"):
        fit(other(np.zeros(data.n_steps, dtype=np.int64)))
    with pytest.raises(ValueError, match="observations are tuple"):
        fit(other((np.zeros(data.n_steps),)))
    broken = np.array(data.observations)
    broken[int(data.offsets[1]) + 1, 0] = np.nan
    with pytest.raises(ValueError, match="at episode 1, step 1"):
        fit(other(broken))
    with pytest.raises(ValueError, match="actions"):
        fit(other(data.observations, np.full(data.n_steps, 2)))
    with pytest.raises(ValueError, match="lower the degree, or use NetworkQ"):
        fit(other(np.zeros((data.n_steps, 60))), SMALL, target=Uniform(2))
    with pytest.raises(ValueError, match="data is empty"):
        fit(data.select(episodes=[]))


def test_all_sequences_agree_with_the_recursion() -> None:
    """The reference itself: a plain sum over sequences of actions."""
    state, total = np.array([0.1, -0.1]), 0.0
    for actions in product((0, 1), repeat=3):
        now, chance, paid = state, 1.0, 0.0
        for a in actions:
            if over(now, 0.6):
                break
            chance *= TARGET.probs(now[None])[0, a]
            paid += reward(now, a)
            now = move(now, a)
        else:
            total += chance * paid
            continue
        pytest.fail("choose a state from which no episode ends within three steps")
    assert total == pytest.approx(true_value(state, 1.0, 0.6, 3))
