"""Free evaluation: life tables, advantages, learned environments, and the loop around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.distributions import Distribution, Independent, Normal

from ope_gym.online import FreeEvaluation
from ope_gym.online.advantages import Actions, Sums, ValueFit, best_span, noise_of
from ope_gym.online.rules import (
    Comparison,
    Entry,
    Evidence,
    Simulated,
    TrackRecord,
    Value,
    bias_of,
    blend,
)
from ope_gym.online.simulation import Learned, Task
from ope_gym.online.stream import Stream, Window
from ope_gym.policies import GaussianMlp, LinearSigmoid
from ope_gym.policies.mlp import Network
from ope_gym.policies.torch import TorchPolicy
from ope_gym.report.free_values import in_words

HORIZON = 30


class Push:
    """A point in two dimensions that an action pushes left or right; it ends beyond a limit.

    s = (x, u): u' = 0.9 u + 0.1 push, x' = x + u'; pays 1 a step; over at |x| > 1. The push is
    2 a - 1 for actions 0 and 1; a real number is the push itself, between -1 and 1.
    """

    def __init__(self, n: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.n, self.state, self.age = n, self.start(n), np.zeros(n, dtype=int)

    def start(self, n: int) -> np.ndarray:
        return self.rng.uniform(-0.3, 0.3, (n, 2)).astype(np.float32)

    def rollout(self, policy: Any, steps: int) -> tuple[np.ndarray, ...]:
        rows: list[tuple[np.ndarray, ...]] = []
        for _ in range(steps):
            seen = self.state.copy()
            actions = policy.sample(seen, self.rng)
            push = np.clip(actions[:, 0], -1, 1) if actions.ndim == 2 else 2 * actions - 1
            speed = 0.9 * seen[:, 1] + 0.1 * push
            following = np.stack([seen[:, 0] + speed, speed], axis=1).astype(np.float32)
            self.age += 1
            terminated = np.abs(following[:, 0]) > 1.0
            truncated = ~terminated & (self.age >= HORIZON)
            done = terminated | truncated
            self.age[done] = 0
            self.state = np.where(done[:, None], self.start(self.n), following)
            rows.append((seen, actions, np.ones(self.n), terminated, truncated, following))
        return tuple(np.stack(column) for column in zip(*rows, strict=True))


def value_of(policy: Any, seed: int = 99, episodes: int = 4000) -> tuple[float, float]:
    """Return the mean return by fresh episodes, and its standard error."""
    columns = Push(episodes, seed).rollout(policy, HORIZON)
    rewards, terminated = columns[2], columns[3]
    over = np.cumsum(terminated, axis=0) - terminated > 0  # an end came before
    paid = np.where(over, 0.0, rewards).sum(axis=0)
    return float(paid.mean()), float(paid.std() / np.sqrt(episodes))


def window_of(lengths: list[int], rewards: list[float], groups: int = 3) -> Window:
    """Return whole episodes, one after the other, in an order that mixes groups."""
    step = np.concatenate([np.arange(n) for n in lengths])
    size = step.size
    ended = np.zeros(size, dtype=bool)
    ended[np.cumsum(lengths) - 1] = True
    return Window(
        observations=np.zeros((size, 1)),
        following=np.zeros((size, 1)),
        actions=np.zeros(size, dtype=int),
        rewards=np.resize(np.array(rewards), size),
        ended=ended,
        step=step,
        place=step,
        clock=np.arange(size),
        group=np.repeat(np.arange(len(lengths)) % groups, lengths),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4))
def test_the_life_table_of_whole_episodes_is_their_mean_return(seed: int, groups: int) -> None:
    """Each age has its own interval here, so nothing is smoothed: also without each group."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 200).tolist()
    window = window_of(lengths, rng.normal(size=97).tolist(), groups)
    found = window.life_table(window.rewards[None])[:, 0]
    episode = np.repeat(np.arange(200), lengths)
    returns = np.bincount(episode, window.rewards)
    group = np.arange(200) % groups
    left = [returns[group != g].mean() for g in range(groups) if (group != g).any()]
    np.testing.assert_allclose(found, [returns.mean(), *left][: len(found)], rtol=1e-10)


def test_a_life_table_sees_episodes_that_are_cut_at_both_ends() -> None:
    """Ages 0 and 1 of some and 2 and 3 of others make one life, by plain loops."""
    rng = np.random.default_rng(0)
    env, policy = Push(8, 0), LinearSigmoid(np.array([-2.0, -1.0]))
    stream = Stream(8, 10_000)
    stream.add(*env.rollout(policy, 700))
    window = stream.window(100, 500)
    values = np.stack([window.rewards, rng.normal(size=window.size)])
    alive, expected = 1.0, np.zeros(2)
    for age in range(int(window.step.max()) + 1):  # 3,200 steps: every age is an interval
        rows = window.step == age
        expected += alive * values[:, rows].mean(axis=1)
        alive *= 1.0 - window.ended[rows].mean()
    np.testing.assert_allclose(window.life_table(values)[0], expected, rtol=1e-10)
    truth, error = value_of(policy)
    spread = np.std(window.life_table(window.rewards[None])[1:, 0]) * np.sqrt(7)
    assert abs(expected[0] - truth) < 4 * np.hypot(spread, error)


def test_the_mean_of_whole_episodes_of_a_window_is_too_low_where_a_life_table_is_not() -> None:
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    truth, error = value_of(policy)
    tables, naive = [], []
    for seed in range(40):
        stream = Stream(8, 10_000)
        stream.add(*Push(8, seed).rollout(policy, 100))
        window = stream.window(40, 75)
        tables.append(window.life_table(window.rewards[None])[0, 0])
        last = window.ended & (window.clock - window.step >= 40)
        naive.append(np.mean(window.step[last] + 1.0))
    noise = np.hypot(np.std(tables) / np.sqrt(40), error)
    assert abs(np.mean(tables) - truth) < 4 * noise
    assert np.mean(naive) < truth - 4 * np.hypot(np.std(naive) / np.sqrt(40), error)


# The stream --------------------------------------------------------------------------------


def by_mode(mode: str) -> Window:
    """Return the same three episodes of one environment as each autoreset mode shows them."""
    lengths = (3, 1, 4)
    stream = Stream(1, 1000)
    rows: list[tuple[float, float, bool, bool]] = []  # observation, following, ended, skip
    for episode, length in enumerate(lengths):
        for t in range(length):
            here = 10.0 * episode + t
            rows.append((here, here + 1.0, t == length - 1, False))
        if mode == "next_step":  # the call after an end is a reset
            rows.append((10.0 * episode + length, 10.0 * (episode + 1), False, True))
    seen, following, ended, skip = (np.array(x)[:, None] for x in zip(*rows, strict=True))
    zeros = np.zeros_like(ended)
    rewards = np.where(skip, 0.0, 1.0)
    stream.add(seen, zeros, rewards, ended, zeros, following, skip if skip.any() else None)
    return stream.window(0, stream.clock)


def test_a_stream_is_the_same_in_every_autoreset_mode() -> None:
    """SAME_STEP and DISABLED hand over one row a step; NEXT_STEP has rows that are resets."""
    same, following = by_mode("same_step"), by_mode("next_step")
    for name in ("observations", "following", "rewards", "ended", "step", "place"):
        np.testing.assert_array_equal(getattr(same, name), getattr(following, name), name)
    assert same.step.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_stream_does_not_depend_on_how_rollouts_are_cut(cuts: list[int]) -> None:
    columns = Push(3, 1).rollout(LinearSigmoid(np.array([-1.0, -1.0])), sum(cuts))
    whole, parts = Stream(3, 10_000), Stream(3, 10_000)
    whole.add(*columns)
    at = 0
    for size in cuts:
        parts.add(*(column[at : at + size] for column in columns))
        at += size
    a, b = (stream.window(0, sum(cuts)) for stream in (whole, parts))
    for name in vars(a):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
    np.testing.assert_array_equal(whole.starts(), parts.starts())


def test_a_stream_forgets_old_steps_and_steps_of_unknown_episodes() -> None:
    columns = Push(2, 1).rollout(LinearSigmoid(np.array([-1.0, -1.0])), 600)
    stream = Stream(2, 300)
    for at in range(0, 600, 300):
        stream.add(*(column[at : at + 300] for column in columns))
    assert stream.first_clock == 300
    assert stream.window(0, 600).clock.min() == 300
    lost = Stream(2, 1000)
    lost.lose_track()
    lost.add(*columns)
    ended = columns[3] | columns[4]
    first = [int(np.argmax(ended[:, i])) + 1 for i in range(2)]
    window = lost.window(0, 600)
    assert window.size == sum(600 - f for f in first)


# The ways to a value -------------------------------------------------------------------------


def drifting(seed: int, rollouts: int = 6) -> tuple[Stream, list[LinearSigmoid]]:
    """Return a stream of policies that get better from rollout to rollout."""
    env, stream = Push(8, seed), Stream(8, 10_000)
    policies = [LinearSigmoid(np.array([-0.3, -0.3]) * (1 + k)) for k in range(rollouts)]
    for policy in policies:
        stream.add(*env.rollout(policy, 100))
    return stream, policies


def test_actions_have_mean_0_under_the_policy() -> None:
    """The mean over the actions, by their probabilities, vanishes at every step."""
    stream, policies = drifting(0, 2)
    window, rng = stream.window(0, 200), np.random.default_rng(0)
    features = np.ones((window.size, 2))
    features[:, 1] = window.observations[:, 0]
    total = np.zeros((window.size, 3))
    for action in (0, 1):
        taken = Window(**{**vars(window), "actions": np.full(window.size, action)})
        probs = policies[1].probs(window.observations)[:, [action]]
        actions = Actions.of(policies[1], taken, rng)
        total[:, :2] += probs * actions.psi(features)
        total[:, 2] += probs[:, 0] * actions.distances
    np.testing.assert_allclose(total, 0.0, atol=1e-12)


def test_a_greedy_policy_is_as_far_away_as_the_one_that_acts_deviates_from_it() -> None:
    """Finite actions: the share of others; real ones: their distance in standard deviations."""
    stream, policies = drifting(0, 1)
    window, rng = stream.window(0, 100), np.random.default_rng(0)
    greedy = Greedy(policies[0])
    other = window.actions != greedy.sample(window.observations, rng)
    np.testing.assert_allclose(Actions.of(greedy, window, rng).distances, other)
    network = Network(((np.ones((1, 2), dtype=np.float32), np.zeros(1, dtype=np.float32)),))
    acting = GaussianMlp(network, np.log([0.5], dtype=np.float32))
    moved = Window(
        **{**vars(window), "actions": acting.mean(window.observations) + 1.0}  # 2 deviations
    )
    actions = Actions.of(Mean(acting), moved, rng, explorer=acting)
    np.testing.assert_allclose(actions.centred, 2.0)
    assert actions.squares == pytest.approx(4.0)
    np.testing.assert_allclose(actions.distances, 3.0)


def test_advantages_move_the_value_to_the_policy_that_is_asked_for() -> None:
    """The value of the last policy, from steps of all six: nearer than that of the mixture."""
    plain, moved = [], []
    for seed in range(12):
        stream, policies = drifting(seed)
        window = stream.window(0, 600)
        fit = ValueFit.of(window, horizon=HORIZON, gamma=1.0, starts=stream.starts())
        actions = Actions.of(policies[-1], window, np.random.default_rng(0))
        sums = fit.advantages(actions.psi(fit.features)).sums(0, 600)
        assert sums is not None
        plain.append(sums.value(0.0))
        moved.append(sums.value(1.0))
    truth, _ = value_of(policies[-1])
    assert np.mean(plain) < truth - 4 * np.std(plain) / np.sqrt(12)
    assert abs(np.mean(moved) - truth) < 0.5 * abs(np.mean(plain) - truth)
    assert np.std(moved) < np.std(plain)


class Greedy:
    """The most probable action of a policy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def probs(self, observations: np.ndarray) -> np.ndarray:
        probs = self.policy.probs(observations)
        return np.asarray(probs == probs.max(axis=1, keepdims=True), dtype=float)

    def sample(self, observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(self.probs(observations).argmax(axis=1))


class Mean:
    """The mean action of a normal policy; it tells its moments only."""

    def __init__(self, policy: GaussianMlp) -> None:
        self.policy = policy

    def sample(self, observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(self.policy.mean(observations))

    def action_moments(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = self.policy.mean(observations)
        return mean, np.zeros_like(mean)


def simulated(stream: Stream, policy: Any, paid_less: float = 0.0, gamma: float = 1.0) -> Simulated:
    """Return the value of a policy in what was learned, corrected by the last 300 steps."""
    whole = stream.window(0, 600)
    paid = Window(**{**vars(whole), "rewards": whole.rewards - paid_less})
    learned = Learned.of(paid, 0, policy, Task(HORIZON, gamma, None))
    assert learned is not None
    window, starts = stream.window(300, 600), stream.starts()

    def correct(terms: Any) -> Value:
        sums = terms.sums(300, 600)
        return Value(sums.base, sums.error(0.0) ** 2)

    return learned.tested(policy, starts, correct, window, np.random.default_rng(0))


def test_a_learned_environment_that_moves_as_the_real_one_needs_no_correction() -> None:
    stream, policies = drifting(3)
    played = simulated(stream, policies[-1])
    truth, error = value_of(policies[-1])
    assert abs(played.raw.mean - truth) < 4 * np.hypot(np.sqrt(played.raw.square), error)
    assert played.corrected is not None
    assert abs(played.corrected.mean - played.raw.mean) < 0.1 * truth  # not quite a logistic edge
    assert played.unseen < 0.1


def test_a_wrong_environment_is_betrayed_by_its_correction() -> None:
    """Rewards that are 0.5 too low at every step come back, step by step."""
    stream, policies = drifting(3)
    played = simulated(stream, policies[-1], paid_less=0.5)
    truth, _ = value_of(policies[-1])
    assert played.raw.mean < 0.6 * truth
    assert played.corrected is not None
    assert abs(played.corrected.mean - truth) < 0.35 * abs(played.raw.mean - truth)


def sums_of(value: float, error: float, steps: int) -> Sums:
    left = value + error / np.sqrt(7 / 8 * 8) * np.array([1.0, -1.0] * 4)
    return Sums(value, 0.0, np.stack([left, np.zeros(8)], axis=1), steps)


def test_a_wider_window_is_taken_unless_it_differs_by_more_than_noise() -> None:
    narrow, wide = sums_of(10.0, 4.0, 100), sums_of(11.0, 2.0, 400)
    assert narrow.error(0.5) == pytest.approx(4.0)
    chosen, square = best_span([narrow, wide], 0.5)
    assert chosen is wide
    assert square == pytest.approx(4.0)
    far = sums_of(25.0, 2.0, 400)
    chosen, square = best_span([narrow, far], 0.5)
    assert chosen is narrow
    assert square == pytest.approx(16.0)


def test_the_noise_of_a_window_is_its_own_where_returns_vary_more_lately() -> None:
    narrow, wide = sums_of(10.0, 6.0, 100), sums_of(11.0, 2.0, 400)
    np.testing.assert_allclose(noise_of([narrow, wide], 0.5), [36.0, 4.0])
    calm = sums_of(10.0, 1.0, 100)
    np.testing.assert_allclose(noise_of([calm, wide], 0.5), [16.0, 4.0])


def trained(seed: int) -> list[tuple[float, float, float, bool]]:
    """Return truth, value, error and kind of each estimate of a short training."""
    env, free = Push(8, seed), FreeEvaluation(8, horizon=HORIZON, seed=seed)
    truths, found = [], []
    for k in range(22):
        policy = LinearSigmoid(np.array([-0.3, -0.3]) * (1 + 0.3 * k))
        free.follow(policy)
        free.add(*env.rollout(policy, 128))
        found += free.settle()
        if k % 4 == 1:
            truths.append(value_of(policy, episodes=1000)[0])
            estimate = free.evaluate(k)
            assert estimate is not None
            found.append(estimate)
    where = {k: truths[k // 4] for k in range(1, 22, 4)}
    return [(where[e.timesteps], e.value, e.standard_error, e.settled) for e in found]


def test_values_of_a_training_are_right_within_their_errors() -> None:
    rows = np.array([row for seed in range(3) for row in trained(seed)])
    truth, value, error, settled = rows.T
    assert settled.sum() >= 9
    z = (value - truth) / np.hypot(error, 0.2)
    assert np.mean(np.abs(z) < 3) >= 0.9
    assert np.sqrt(np.mean((value - truth)[settled == 1] ** 2)) < 1.0  # of about 20 steps


def test_what_cannot_be_followed_is_refused_at_once() -> None:
    free = FreeEvaluation(2)
    with pytest.raises(TypeError, match=r"policy is <function .* has no sample"):
        free.follow(lambda observations: observations)  # type: ignore[arg-type]
    free.follow(nn.Linear(2, 2))  # type: ignore[arg-type]  # as wherever a policy is expected
    assert free.evaluate() is None  # no episode has ended


def test_fresh_episodes_are_added_to_what_is_free() -> None:
    env, policy = Push(8, 0), LinearSigmoid(np.array([-1.0, -1.0]))
    free = FreeEvaluation(8, horizon=HORIZON)
    free.follow(policy)
    free.add(*env.rollout(policy, 128))
    alone = free.evaluate(1)
    free.follow(policy)
    pooled = free.evaluate(1, fresh=np.full(50, 12.0) + np.arange(50) % 2)
    assert alone is not None
    assert pooled is not None
    assert "fresh" in pooled.shares
    assert pooled.standard_error < alone.standard_error
    assert abs(pooled.value - 12.5) < abs(alone.value - 12.5)


# The rules -----------------------------------------------------------------------------------


def evidence_of(near: float, error: float, **more: Any) -> Evidence:
    """Return evidence of a run whose returns went from 0 to 500, with a spread of 50."""
    known = {"last": None, "distance": 0.0, "spread": 50.0, "limits": (0.0, 500.0)}
    return Evidence(near=Value(near, error**2), low=0.0, high=500.0, **{**known, **more})


def played(raw: float, rough: float, corrected: float, unseen: float = 0.0) -> Simulated:
    values = (Value(x, 4.0) for x in (raw, rough, corrected))
    raw_value, rough_value, corrected_value = values
    return Simulated(raw_value, 50.0, unseen, (0.0, 500.0), rough_value, corrected_value)


def value_by(evidence: Evidence, **more: Evidence) -> Any:
    record = TrackRecord()
    record.entries.append(Entry({"acting": evidence, **more}))
    return record.value(0, "greedy" if more else "acting")


def test_ways_that_rest_on_the_same_steps_do_not_make_each_other_surer() -> None:
    value, shares = blend({"a": Value(1.0, 4.0), "b": Value(3.0, 4.0)})
    assert value == pytest.approx((2.0, 4.0))
    assert shares == {"a": 0.5, "b": 0.5}


def test_a_bias_is_what_tests_show_beyond_their_noise() -> None:
    """Many differences of 50 with noise 30 are a bias of 40; without any, it is small."""
    many = [Comparison(50.0, 900.0, 1.0)] * 200
    assert np.sqrt(bias_of(many, 500.0)) == pytest.approx(40.0, rel=0.05)
    noise = [Comparison(30.0, 900.0, 1.0)] * 200
    assert np.sqrt(bias_of(noise, 500.0)) < 10.0
    assert np.sqrt(bias_of([], 500.0)) < 0.05 * 500.0


def test_a_simulation_that_passes_its_tests_decides_and_one_that_fails_does_not() -> None:
    seen = evidence_of(100.0, 20.0, distance=50.0)
    right = value_by(evidence_of(100.0, 20.0, distance=50.0, simulated=played(400, 402, 399)))
    wrong = value_by(evidence_of(100.0, 20.0, distance=50.0, simulated=played(400, 150, 399)))
    assert right.shares["simulation"] > 0.9
    assert wrong.shares.get("simulation", 0.0) < 0.5
    assert abs(right.value.mean - 400) < 20
    assert value_by(seen).shares == {"seen": 1.0}


def test_a_simulation_may_lie_beyond_all_returns_and_what_was_seen_may_not() -> None:
    known = {"limits": (0.0, 200.0), "distance": 100.0}
    assert value_by(evidence_of(260.0, 5.0, **known)).value.mean == 200.0
    jumped = value_by(evidence_of(150.0, 20.0, **known, simulated=played(480, 481, 480)))
    assert jumped.value.mean > 400
    assert jumped.limits == (0.0, 500.0)  # of the played returns


def test_a_simulation_that_plays_where_nothing_was_recorded_is_not_used() -> None:
    acting = evidence_of(100.0, 20.0, simulated=played(110, 111, 110))
    greedy = evidence_of(100.0, 20.0, distance=50.0, simulated=played(400, 400, 400, unseen=0.5))
    assert value_by(acting, greedy=greedy).shares == {"seen": 1.0}


def test_a_greedy_simulation_is_tested_on_the_policy_that_acts() -> None:
    greedy = evidence_of(100.0, 20.0, distance=50.0, simulated=played(400, 400, 400))
    good, bad = (
        value_by(evidence_of(100.0, 20.0, simulated=simulation), greedy=greedy)
        for simulation in (played(110, 111, 110), played(110, 300, 110))
    )
    assert good.value.square < bad.value.square


def test_values_at_once_are_as_unsure_as_earlier_ones_were_wrong() -> None:
    """The errors of four earlier values, of 100 each, are expected of the fifth."""
    squares = []
    for apart in (0.0, 100.0):
        record = TrackRecord()
        for _ in range(4):
            late = {"acting": evidence_of(200.0 + apart, 5.0)}
            record.entries.append(Entry({"acting": evidence_of(200.0, 5.0)}, late))
        record.entries.append(Entry({"acting": evidence_of(300.0, 5.0)}))
        squares.append(record.value(4, "acting").value.square)
    assert squares[0] < 20**2
    assert 50**2 < squares[1] < 250**2


def test_equal_returns_leave_an_error_once_settled() -> None:
    """All returns are 500, and no window shows any noise."""
    sure = evidence_of(500.0, 0.0, last=Value(500.0, 0.0), spread=0.0)
    record = TrackRecord()
    record.entries.append(Entry({"acting": sure}, {"acting": sure}))
    value = record.value(0, "acting", settled=True).value
    assert value.mean == 500.0
    assert value.square == pytest.approx(2 * 5.0**2)  # a hundredth of the range, twice


def test_policies_far_from_those_that_acted_are_unsure() -> None:
    """|V - V_acted| ≤ √(s² X), of which a tenth is left once advantages have corrected."""
    near, far = (value_by(evidence_of(200.0, 5.0, distance=x)).value.square for x in (0.0, 40.0))
    assert far - near == pytest.approx(0.1 * 50.0**2 * 40.0)


# The loop ------------------------------------------------------------------------------------


def constant(envs: int, horizon: int, clocks: int, *, gamma: float = 1.0) -> FreeEvaluation:
    """Return what was recorded where each step pays 1 and nothing ends but by the time limit."""
    free = FreeEvaluation(envs, horizon=horizon, gamma=gamma)
    policy, rng = LinearSigmoid(np.array([1.0, 0.0])), np.random.default_rng(0)
    free.follow(policy)
    states = rng.normal(size=(clocks + 1, envs, 2)).astype(np.float32)
    shape = clocks, envs
    over = np.broadcast_to((np.arange(clocks) % horizon == horizon - 1)[:, None], shape)
    actions = rng.integers(2, size=shape)
    free.add(states[:-1], actions, np.ones(shape), np.zeros(shape), over, states[1:])
    return free


@pytest.mark.parametrize(("envs", "horizon"), [(128, 500), (64, 1000), (8, 500)])
def test_many_environments_do_not_shorten_episodes(envs: int, horizon: int) -> None:
    """A window of 32,768 steps is shorter than an episode of all 128 environments."""
    free = constant(envs, horizon, 2 * horizon + 100)
    found = free.evaluate()
    assert found is not None
    assert found.value == pytest.approx(horizon, rel=0.01)
    assert found.low <= horizon <= found.high
    assert found.steady


def test_a_discount_counts_from_the_first_step_on() -> None:
    free = constant(8, 50, 1024, gamma=0.9)
    found = free.evaluate()
    assert found is not None
    assert found.value == pytest.approx((1 - 0.9**50) / 0.1, rel=0.01)
    raw = simulated(drifting(3)[0], drifting(3)[1][-1], gamma=0.9).raw
    assert raw.mean == pytest.approx((1 - 0.9**HORIZON) / 0.1, rel=0.2)


def test_there_is_no_value_before_an_episode_has_ended() -> None:
    free = constant(8, 500, 320)
    assert free.evaluate() is None


def test_few_episodes_have_wide_bands_and_claim_no_more_than_themselves() -> None:
    free, env = FreeEvaluation(2, horizon=HORIZON), Push(2, 0)
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    found = []
    for _ in range(6):
        free.follow(policy)
        columns = env.rollout(policy, 30)
        free.add(*columns)
        found += [e for e in (free.evaluate(),) if e is not None]
    few = [e for e in found if e.few]
    assert 0 < len(few) < len(found)
    for e in few:
        assert e.ended is not None
        assert e.fresh_episodes <= e.ended
        half = stats.t.ppf(0.975, max(e.ended - 1, 1)) * e.standard_error
        assert e.low <= e.possible(e.value - half) + 1e-9
        assert e.high >= e.possible(e.value + half) - 1e-9
    assert found[0].ended == 2  # returns that a mean may well lie beyond
    assert found[0].bounds[1] - found[0].bounds[0] > 10 * found[0].spread


def test_values_of_long_ago_are_not_settled_from_other_steps() -> None:
    free, env = FreeEvaluation(8, horizon=HORIZON), Push(8, 0)
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    for timesteps in (1, 2):
        free.follow(policy)
        free.add(*env.rollout(policy, 128))
        assert free.evaluate(timesteps) is not None
        columns = env.rollout(policy, 300)
        for _ in range(30):
            free.add(*columns)
    assert [e.timesteps for e in free.settle()] == []


def test_each_evaluation_has_its_own_place() -> None:
    free, env = FreeEvaluation(8, horizon=HORIZON), Push(8, 0)
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    free.follow(policy)
    for timesteps in range(4):
        free.add(*env.rollout(policy, 128))
        free.evaluate(timesteps)
    free.add(*env.rollout(policy, 1024))
    assert free.settle() == []  # they come with the next evaluation
    free.evaluate(4)
    assert [e.timesteps for e in free.settle()] == [0, 1, 2, 3]
    assert free.settle() == []


def test_settled_values_come_by_themselves_where_evaluations_are_rare() -> None:
    free, env = FreeEvaluation(8, horizon=HORIZON), Push(8, 0)
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    free.follow(policy, Greedy(policy))
    free.add(*env.rollout(policy, 128))
    at_once = free.evaluate(1), free.evaluate(1, deterministic=True)
    free.add(*env.rollout(policy, 2048))
    settled = free.settle()
    assert [(e.deterministic, e.settled) for e in settled] == [(False, True), (True, True)]
    for before, after, truth in zip(
        at_once, settled, (value_of(policy)[0], value_of(Greedy(policy))[0]), strict=True
    ):
        assert before is not None
        assert before.deterministic == after.deterministic
        assert abs(after.value - truth) < 4 * after.standard_error


def test_the_greedy_policy_is_valued_from_steps_of_the_one_that_acts() -> None:
    free, env = FreeEvaluation(8, horizon=HORIZON), Push(8, 0)
    policy = LinearSigmoid(np.array([-1.0, -1.0]))
    free.follow(policy)
    free.add(*env.rollout(policy, 512))
    with pytest.raises(ValueError, match="needs the greedy policy"):
        free.evaluate(1, deterministic=True)
    free.follow(policy, Greedy(policy))
    acting, greedy = free.evaluate(1), free.evaluate(1, deterministic=True)
    assert acting is not None
    assert greedy is not None
    truth, error = value_of(Greedy(policy))
    assert truth - value_of(policy)[0] > 5.0  # of about 20 steps
    assert abs(greedy.value - truth) < 4 * np.hypot(greedy.standard_error, error)
    assert abs(greedy.value - truth) < 1.0


def test_returns_alone_tell_a_value_where_nothing_else_can_be_modelled() -> None:
    """Dicts and recurrent policies: rewards and lengths are all there is."""
    env, policy = Push(8, 0), LinearSigmoid(np.array([-1.0, -1.0]))
    free = FreeEvaluation(8, horizon=HORIZON)
    free.follow(None)
    _, _, *columns, _ = env.rollout(policy, 512)
    free.add(None, None, *columns)
    found = free.evaluate(1)
    assert found is not None
    assert found.shares == {"seen": 1.0}
    assert free.basis.code == "free_returns"
    free.follow(policy, Greedy(policy))
    greedy = free.evaluate(2, deterministic=True)
    assert greedy is not None
    assert not greedy.known
    assert "not known: no environment could be learned" in in_words(greedy)
    truth, error = value_of(policy)
    assert abs(found.value - truth) < 4 * np.hypot(found.standard_error, error)


def test_episodes_that_are_cut_early_end_in_the_learned_environment_too() -> None:
    """A step in twenty is the last one, whatever the state: 1 / 0.05 steps, up to the limit."""
    rng, policy = np.random.default_rng(0), LinearSigmoid(np.array([-3.0, -3.0]))
    env, free = Push(8, 0), FreeEvaluation(8, horizon=HORIZON)
    rows: list[tuple[np.ndarray, ...]] = []
    for _ in range(1024):
        columns = list(env.rollout(policy, 1))
        cut = (rng.random((1, 8)) < 0.05) & ~columns[3]
        columns[4] = columns[4] | cut
        env.age[cut[0]] = 0
        env.state = np.where(cut[0][:, None], env.start(8), env.state)
        rows.append(tuple(columns))
    free.follow(policy)
    free.add(*(np.concatenate(column) for column in zip(*rows, strict=True)))
    found = free.evaluate()
    assert found is not None
    ended = np.concatenate([row[3] | row[4] for row in rows])
    truth = ended.size / ended.sum()  # steps of an episode
    assert abs(found.value - truth) < 4 * found.standard_error
    simulation = free.record.entries[-1].early["acting"].simulated
    assert simulation is not None
    assert abs(simulation.raw.mean - truth) < 0.15 * truth


def test_rewards_that_are_no_numbers_are_named() -> None:
    rows = np.zeros((4, 3))
    rows[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"rewards\[2, 1\] is nan"):
        FreeEvaluation(3).add(np.zeros((4, 3, 2)), np.zeros((4, 3)), rows, *[np.zeros((4, 3))] * 3)


class Normals(nn.Module):
    """A normal distribution of one action around a linear function of the observation."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__()
        self.mean = nn.Linear(2, 1)
        with torch.no_grad():
            self.mean.weight[:] = torch.tensor(weights)
            self.mean.bias[:] = 0.0

    def forward(self, x: torch.Tensor) -> Distribution:
        return Independent(Normal(self.mean(x), 0.5), 1)


def test_a_module_over_real_actions_is_worth_what_the_same_network_in_numpy_is() -> None:
    weights = np.array([[-1.0, -2.0]], dtype=np.float32)
    network = GaussianMlp(
        Network(((weights, np.zeros(1, dtype=np.float32)),)), np.log([0.5], dtype=np.float32)
    )
    columns = Push(8, 0).rollout(network, 256)
    values = []
    for policy in (network, TorchPolicy(Normals(weights))):
        free = FreeEvaluation(8, horizon=HORIZON, action_bounds=(-np.ones(1), np.ones(1)))
        free.follow(policy)
        free.add(*columns)
        estimate = free.evaluate()
        assert estimate is not None
        assert "simulation" in estimate.shares
        values.append((estimate.value, estimate.standard_error))
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    truth, error = value_of(network)
    assert abs(values[0][0] - truth) < 4 * np.hypot(values[0][1], error)


def test_a_loop_that_has_not_begun_has_no_value() -> None:
    free = FreeEvaluation(2)
    with pytest.raises(RuntimeError, match="call follow"):
        free.evaluate()
    free.follow(LinearSigmoid(np.ones(2)))
    assert free.evaluate() is None


def test_wrong_arguments_are_named() -> None:
    free = FreeEvaluation(3)
    with pytest.raises(ValueError, match=r"rewards have shape \(4, 2\): need \(steps, 3\)"):
        free.add(*(np.zeros((4, 2)) for _ in range(6)))
    rows = np.zeros((4, 3))
    with pytest.raises(ValueError, match=r"actions have shape \(4, 1\)"):
        free.add(rows, np.zeros((4, 1)), rows, rows, rows, rows)
