"""Visits of the target in q models: derivatives of the value, and plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray, folds_within
from ope_gym.models import Baseline, LinearQ, TabularQ
from ope_gym.models.base import Problem
from ope_gym.models.folds import cross_fit
from ope_gym.models.process import Process
from ope_gym.weights.answers import Answers
from tests.builders import Table, buffer_of, recorded
from tests.small_mdps import Path

Moves = dict[tuple[int, int, int], float]  # how often (s, a, s') was seen


# The influence of an episode is the derivative of DM with respect to its weight.


def coarse(observations: Any) -> FloatArray:
    """Return features that do not tell two of the three states apart."""
    return np.stack([np.ones(len(observations)), np.asarray(observations) == 1], axis=1)


MODELS = {
    "table": TabularQ(),
    "table without time": TabularQ(time=False),
    "linear": LinearQ(coarse, ridge=0.0, pull=0.0, time=1, nearness=0.0),
    "linear, near": LinearQ(coarse, ridge=0.0, pull=0.0, time=0, nearness=0.5),
}


def fitted(model: Any, data: Trajectories, problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Return v at the starts and what the residuals add, (n,) each; nothing is held out."""
    values = model.fit(data, problem)
    seen, offsets = np.asarray(data.observations), data.offsets
    q = values.q_all(seen, data.steps)
    target: Any = problem.target
    v = (target.probs(seen) * q).sum(axis=1)
    visits = values.visits(Answers(target, data), np.arange(data.n_steps))
    ratio, residuals = visits.ratio, visits.residuals
    if residuals is None:
        own = Baseline(q[np.arange(seen.size), np.asarray(data.actions)], v)
        residuals = own.residuals(data.rewards, offsets, problem.gamma)
    return v[offsets[:-1]], np.add.reduceat(ratio * residuals, offsets[:-1])


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("name", MODELS)
def test_the_influence_is_the_derivative_of_dm(name: str, gamma: float) -> None:
    """Central differences: each episode 60 times, one of them once more or less; O(1 / 60^2)."""
    r, copies, n = recorded(3, (14, 16), actions=2, horizon=5), 60, 30
    problem = Problem(r.target, gamma, 5, np.random.default_rng(0))
    start, added = fitted(MODELS[name], r.trajectories, problem)
    influence = start + added - start.mean()
    assert added.mean() == pytest.approx(0.0, abs=1e-10)  # MDR without folds is DM
    every = np.tile(np.arange(n), copies)
    for i in range(0, n, 5):
        more, less = (
            fitted(MODELS[name], r.trajectories.select(episodes=episodes), problem)[0].mean()
            for episodes in (np.append(every, i), np.delete(every, i))
        )
        slope = n * copies * (more - less) / 2.0
        assert slope == pytest.approx(influence[i], abs=2e-3 * np.abs(influence).max())


# The process against plain loops.


def random_process(seed: int, gamma: float, full: bool = False) -> tuple[Process, Moves, IntArray]:
    """Return a process, its transitions and their codes; unless full, with gaps of every kind.

    State 0 was never seen, state 1 never left; some actions were never taken, or not followed.
    """
    rng, n_states, n_actions = np.random.default_rng(seed), 5, 3
    counts = rng.integers(0, 4, (n_states, n_actions, n_states + 1))
    further = rng.integers(0, 3, (n_states, n_actions))
    if full:
        counts += 1
    else:
        counts[rng.random((n_states, n_actions)) < 0.3] = 0
        counts[:2], further[0], further[1] = 0, 0, 2
        counts[2, 0], further[2, 0], further[2, 1] = 0, 0, 1
    seen = (counts.sum(axis=2) + further).astype(np.float64)
    listed = rng.random(counts.shape) < 0.3  # other folds may have seen these
    listed |= counts > 0
    codes = np.flatnonzero(listed.ravel())
    paid = np.where(seen > 0, rng.normal(size=seen.shape) * seen, 0.0)
    probs = rng.dirichlet(np.ones(n_actions), n_states)
    process = Process.of(codes, counts.ravel()[codes].astype(float), seen, paid, probs, gamma)
    places = (np.unravel_index(code, counts.shape) for code in codes)
    moves = {(int(s), int(a), int(to)): float(counts[s, a, to]) for s, a, to in places}
    return process, moves, codes


def filled(values: FloatArray, weight: FloatArray) -> FloatArray:
    """Fill what has no weight with the plain mean of the state, else the weighted mean of all."""
    found = values.copy()
    for s in range(len(values)):
        known = [a for a in range(values.shape[1]) if weight[s, a] > 0]
        for a in range(values.shape[1]):
            if a not in known:
                inside = [values[s, b] for b in known]
                whole = math.fsum((weight * values).ravel()) / weight.sum()
                found[s, a] = math.fsum(inside) / len(inside) if known else whole
    return found


def plain_q(process: Process, moves: Moves, v: Sequence[float]) -> FloatArray:
    """Return r + gamma sum p v by loops over transitions."""
    ahead = np.zeros(process.seen.shape)
    for (s, a, to), count in moves.items():
        if to < len(v) and count:
            ahead[s, a] += count / process.moved[s, a] * v[to]
    ahead = filled(ahead, process.moved)
    return filled(process.rewards + process.gamma * ahead, process.seen)


def plain_values(process: Process, moves: Moves, horizon: int) -> list[list[float]]:
    """Return v_0 … v_horizon."""
    found = [[0.0] * len(process.seen)]
    for _ in range(horizon):
        q = plain_q(process, moves, found[-1])
        found.append([math.fsum(p * x) for p, x in zip(process.probs, q, strict=True)])
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("horizon", [1, 2, 7, 50])
def test_values_and_q_against_plain_loops(horizon: int, seed: int, gamma: float) -> None:
    process, moves, _ = random_process(seed, gamma, full=seed == 2)
    expected = plain_values(process, moves, horizon)
    found = process.values(horizon)
    assert len(found) == horizon
    for j, v in enumerate(found):
        np.testing.assert_allclose(v, expected[j], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(process.q(v), plain_q(process, moves, expected[j]), rtol=1e-11)


def spread_out(probs: FloatArray, known: NDArray[np.bool_]) -> FloatArray:
    """Give the probability of what is not known to what is, in equal parts."""
    found = np.zeros_like(probs)
    for s in range(len(probs)):
        heirs = np.flatnonzero(known[s])
        for a in range(probs.shape[1]):
            found[s, [a] if known[s, a] else heirs] += probs[s, a] / (
                1 if known[s, a] else max(heirs.size, 1)
            )
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize(
    ("full", "horizon"), [*((full, T) for full in (True, False) for T in (1, 2, 9)), (True, None)]
)
def test_visits_against_plain_loops(full: bool, horizon: int | None, gamma: float) -> None:
    """The fixed point is the horizon beyond which nothing changes."""
    process, moves, codes = random_process(4, gamma, full)
    n_states, n_actions = process.seen.shape
    start = np.random.default_rng(1).dirichlet(np.ones(n_states))
    paid = spread_out(process.probs, process.seen > 0)
    share = spread_out(paid, process.moved > 0)
    values = plain_values(process, moves, horizon or 900)
    pair, to = np.divmod(codes, n_states + 1)
    visits, extra, x = np.zeros(process.seen.shape), dict.fromkeys(moves, 0.0), start
    for t in range(horizon or 900):
        v = [*values[(horizon or 900) - t - 1], 0.0]
        q, later = plain_q(process, moves, v[:-1]), np.zeros(n_states)
        for s in range(n_states):
            for a in range(n_actions):
                seen = process.seen[s, a] > 0
                visits[s, a] += gamma**t * x[s] * (paid if seen else process.probs)[s, a]
        for (s, a, s2), count in moves.items():
            if process.seen[s, a] == 0:
                guess = process.probs[s, a] * (gamma * v[s2] - q[s, a])
                extra[s, a, s2] += gamma**t * x[s] * guess
                continue
            ahead = q[s, a] - process.rewards[s, a] if process.moved[s, a] else 0.0
            extra[s, a, s2] += gamma**t * x[s] * share[s, a] * (gamma * v[s2] - ahead)
            if s2 < n_states and count:
                later[s2] += x[s] * share[s, a] * count / process.moved[s, a]
        x = later
    found = process.visits(start, to, pair, horizon)
    np.testing.assert_allclose(found[0].reshape(visits.shape), visits, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[1], list(extra.values()), rtol=1e-9, atol=1e-12)


def test_values_that_have_converged_are_computed_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, moves, _ = random_process(2, 0.5, full=True)
    expected, calls, backup = plain_values(process, moves, 300), list[int](), Process.backup

    def counted(self: Process, v: FloatArray) -> FloatArray:
        calls.append(1)
        return backup(self, v)

    monkeypatch.setattr(Process, "backup", counted)
    found = process.values(300)
    assert len(calls) < 120
    for j in (0, 1, 5, 20, 100, 299):
        np.testing.assert_allclose(found[j], expected[j], rtol=1e-12, atol=1e-14)


def test_residuals_at_the_fixed_point_are_those_of_the_step() -> None:
    """Also where no other fold has seen the state, which then has the mean of all steps."""
    r = recorded(5, (4, 4), states=12, actions=2)
    problem = Problem(r.target, 0.9, 500, np.random.default_rng(0))
    data, groups = r.trajectories, np.zeros(8, dtype=np.int64)
    found = cross_fit(TabularQ(time=False), data, groups, problem, folds=4)
    assert found.visits is not None
    fold, pair = folds_within(groups, 4)[data.episode_ids], np.asarray(data.observations)
    alone = [set(fold[pair == s]) for s in pair]
    assert any(len(folds) == 1 for folds in alone)
    own = found.residuals(data.rewards, data.offsets, 0.9)
    visited, averaged = found.visits.ratio > 0, found.visits.residuals
    assert visited.mean() > 0.5
    assert averaged is not None
    np.testing.assert_allclose(averaged[visited], own[visited], atol=1e-10)


def test_an_action_that_only_one_fold_has_seen() -> None:
    """Ten one-step episodes in five folds, the second action once: ratios by hand."""
    taken = np.array([0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    paths = [Path((0,), (int(a),), (2.0 + a,), 1.0) for a in taken]
    data = buffer_of(paths, [0] * 10, [np.array([[0.9, 0.1]])], horizon=1).view()
    groups = np.zeros(10, dtype=np.int64)
    problem = Problem(Table(np.array([[0.4, 0.6]])), 1.0, 1, np.random.default_rng(0))
    found = cross_fit(TabularQ(), data, groups, problem)
    assert found.visits is not None
    fold = folds_within(groups, 5)
    same = fold == fold[3]  # learned without it: the first action stands for both
    expected = np.where(same, 1.0, 0.4) * 10 / 9
    expected[3] = 0.6 * 10 * same.mean()  # corrects the guess of its own fold alone
    np.testing.assert_allclose(found.visits.ratio, expected)
