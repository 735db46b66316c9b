"""NFRIS: a closed form, plain loops for what the scores predict, derivatives by differences."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import evaluate
from ope_gym.arrays import step_numbers
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.reductions import discounts
from ope_gym.policies import LinearSigmoid
from ope_gym.weights.behaviours import behaviours_of, follow_plans, gather_plans
from ope_gym.weights.scores import Scores, state_features
from tests import reference
from tests.builders import LogProbOnly, Recorded, Table, recorded

Floats = NDArray[np.float64]
Blocks = dict[tuple[int, int], Floats]  # by policy and state


def scores_of(data: Trajectories, gamma: float = 1.0) -> Scores:
    discount = discounts(gamma, int(data.lengths.max()))
    return Scores(data, behaviours_of(data), discount[step_numbers(data.offsets)])


# --- plain loops --------------------------------------------------------------------------------


def newton(data: Recorded, gamma: float) -> tuple[Blocks, Blocks]:
    """Return (F + I / A)^-1 and eta for each policy and state."""
    seen, actions = data.mdp.start.size, data.policies[0].shape[1]
    rows = data.trajectories
    inverse: Blocks = {}
    eta: Blocks = {}
    for k, policy in enumerate(data.policies):
        for s in range(seen):
            mu, information, score = policy[s], np.eye(actions) / actions, np.zeros(actions)
            for state, action, by, t in zip(
                rows.observations, rows.actions, rows.policy_ids, rows.steps, strict=True
            ):
                if (state, by) == (s, k):
                    information += gamma ** (2 * t) * (np.diag(mu) - np.outer(mu, mu))
                    score += gamma**t * (np.eye(actions)[action] - mu)
            inverse[k, s] = np.linalg.inv(information)
            eta[k, s] = inverse[k, s] @ score
    return inverse, eta


def moved_value(data: Recorded, share: float, gamma: float) -> float:
    """Return NFIS against the moved tables."""
    rows, (_, eta) = data.trajectories, newton(data, gamma)
    logs = np.empty((len(data.policies), rows.n_steps))
    for k, policy in enumerate(data.policies):
        for u, (s, a, t) in enumerate(
            zip(rows.observations, rows.actions, rows.steps, strict=True)
        ):
            table = policy[s] * np.exp(share * gamma**t * eta[k, s])
            logs[k, u] = math.log(table[a] / table.sum())
    moved = data.arrays._replace(behaviour_log_probs=logs)
    return reference.estimate("NFIS", moved, gamma=gamma).value


def predicted(data: Recorded, gamma: float, *, leave_out: bool) -> Floats:
    """Return h (n,), step by step and episode by episode."""
    rows, arrays = data.trajectories, data.arrays
    n, counts = len(rows), np.bincount(arrays.behaviour_ids)
    logs = reference.log_weights("fused", arrays)
    paid = reference.rows(arrays.rewards, arrays.offsets)
    horizon = max(map(len, logs))
    inverse, _ = newton(data, gamma)
    slope = {key: np.zeros((n, len(m))) for key, m in inverse.items()}  # by episode
    for t in range(horizon):
        weights = reference.shares(logs, t)
        mean = sum(w * reference.reward_at(r, t) for w, r in zip(weights, paid, strict=True))
        for j in range(n):
            pay = gamma**t * weights[j] * (reference.reward_at(paid[j], t) - mean)
            steps = range(arrays.offsets[j], min(arrays.offsets[j] + t + 1, arrays.offsets[j + 1]))
            path = np.array(
                [
                    counts[k] / n * math.exp(sum(arrays.behaviour_log_probs[k, u] for u in steps))
                    for k in range(len(counts))
                ]
            )
            for k, share in enumerate(path / path.sum()):
                for u in steps:
                    s = int(rows.observations[u])
                    surplus = np.eye(len(inverse[k, s]))[rows.actions[u]] - data.policies[k][s]
                    slope[k, s][j] += pay * share * gamma ** rows.steps[u] * surplus
    h = np.zeros(n)
    for i in range(n):
        for u in range(arrays.offsets[i], arrays.offsets[i + 1]):
            k, s = int(rows.policy_ids[u]), int(rows.observations[u])
            surplus = np.eye(len(inverse[k, s]))[rows.actions[u]] - data.policies[k][s]
            others = slope[k, s].sum(axis=0) - (slope[k, s][i] if leave_out else 0.0)
            h[i] += n * gamma ** rows.steps[u] * others @ inverse[k, s] @ surplus
    return h


def pay_of(data: Recorded, gamma: float) -> Floats:
    """Return what each step adds beyond the mean, the steps after an end with the last one."""
    arrays = data.arrays
    logs = reference.log_weights("fused", arrays)
    paid = reference.rows(arrays.rewards, arrays.offsets)
    pay = np.zeros(arrays.rewards.size)
    for t in range(max(map(len, logs))):
        weights = reference.shares(logs, t)
        mean = sum(w * reference.reward_at(r, t) for w, r in zip(weights, paid, strict=True))
        for j, (w, r) in enumerate(zip(weights, paid, strict=True)):
            row = min(arrays.offsets[j] + t, arrays.offsets[j + 1] - 1)
            pay[row] += gamma**t * w * (reference.reward_at(r, t) - mean)
    return pay


def clear(psi: Floats, h: Floats, ids: NDArray[np.int64]) -> float:
    """Return the slope of psi on h inside behaviours, less its standard error, within [0, 1]."""
    y, x = [], []
    for i, k in enumerate(ids):
        peers = [j for j in range(len(ids)) if ids[j] == k]
        y.append(psi[i] - sum(psi[j] for j in peers) / len(peers))
        x.append(h[i] - sum(h[j] for j in peers) / len(peers))
    size = sum(b * b for b in x)
    if size < 1e-20:
        return 0.0
    slope = sum(a * b for a, b in zip(y, x, strict=True)) / size
    error = math.sqrt(sum((b * (a - slope * b)) ** 2 for a, b in zip(y, x, strict=True))) / size
    return float(min(max(slope - error, 0.0), 1.0))


# --- the fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [(7, 3), (1, 9), (10, 0)])
def test_a_bandit_of_two_actions_has_a_closed_form(taken: tuple[int, int]) -> None:
    """With two actions there is one score, s = 1[a = 1] - mu_1, of variance v = mu_0 mu_1."""
    mu, aim, n = np.array([0.6, 0.4]), np.array([0.2, 0.8]), sum(taken)
    actions = np.repeat([0, 1], taken)
    rewards = np.linspace(0.0, 1.0, n)
    data = Trajectories.from_arrays(
        np.zeros(n, dtype=np.int64),
        actions,
        rewards,
        np.log(mu[actions]),
        offsets=np.arange(n + 1),
        policies=[Table(mu[None])],
        terminated=True,
    )
    weights = (aim / mu)[actions] / (aim / mu)[actions].sum()
    value = float(weights @ rewards)
    pay, score = weights * (rewards - value), actions - mu[1]
    others = pay @ score - pay * score
    h = n * others * score / (n * mu[0] * mu[1] + 0.25)  # the ridge I / 2 along (-1, 1) / sqrt(2)
    np.testing.assert_allclose(scores_of(data).predicted(pay), h, rtol=1e-12, atol=1e-15)
    share = clear(n * pay, h, np.zeros(n, dtype=np.int64))
    found = evaluate(data, Table(aim[None]), "NFRIS")["NFRIS"]
    assert found.report["c"] == pytest.approx(share, rel=1e-9)
    assert found.value == pytest.approx(value - share * h.mean(), rel=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_predictions_are_those_of_plain_loops(gamma: float) -> None:
    data = recorded(4, (6, 4, 7), horizon=5)
    got = scores_of(data.trajectories, gamma).predicted(pay_of(data, gamma))
    want = predicted(data, gamma, leave_out=True)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_predictions_are_the_derivative_of_the_estimate() -> None:
    """With its own episode, the mean of h is how fast the estimate falls along the step."""
    data, small = recorded(4, (6, 4, 7), horizon=5), 1e-4
    rise = (moved_value(data, small, 0.9) - moved_value(data, -small, 0.9)) / (2 * small)
    assert predicted(data, 0.9, leave_out=False).mean() == pytest.approx(-rise, rel=1e-6)


# --- the estimator ------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_nfris_is_that_of_plain_loops(gamma: float) -> None:
    data = recorded(5, (20, 12, 16), states=1, horizon=2)
    found = evaluate(data.trajectories, data.target, ["NFIS", "NFRIS"], gamma=gamma)
    psi, ids = found["NFIS"].influence, data.arrays.behaviour_ids
    h = predicted(data, gamma, leave_out=True)
    share = clear(psi, h, ids)
    assert 0.0 < share < 1.0
    got = found["NFRIS"]
    assert got.report["c"] == pytest.approx(share, rel=1e-9)
    want = found["NFIS"].value - share * h.mean()
    assert got.value == pytest.approx(want, rel=1e-12)
    error = reference.standard_error((psi - share * h).tolist(), ids)
    assert got.standard_error == pytest.approx(error, rel=1e-9)


def test_policies_without_probabilities_of_all_actions_keep_theirs() -> None:
    data = recorded(6, (8, 8), horizon=4)
    rows = data.trajectories
    hidden = Trajectories.from_arrays(
        rows.observations,
        rows.actions,
        rows.rewards,
        rows.log_probs,
        offsets=rows.offsets,
        policies=[LogProbOnly(Table(p).log_prob) for p in data.policies],
        policy_ids=rows.policy_ids,
        terminated=True,
    )
    found = evaluate(hidden, data.target, ["NFIS", "NFRIS"])
    assert found["NFRIS"].report["c"] == 0.0
    assert found["NFRIS"].value == found["NFIS"].value
    assert found["NFRIS"].standard_error == found["NFIS"].standard_error


def test_gathering_by_policy_is_the_transpose_of_following_plans() -> None:
    """<follow(x), y> = <x, gather(y)>, also where the policy changes during episodes."""
    data = recorded(7, (3, 2, 4))
    behaviours = behaviours_of(data.trajectories)
    plans = (((0, 0), (2, 1)), ((0, 1),), ((0, 0), (1, 1), (3, 2)))
    mixed = type(behaviours)(
        behaviours.ids, behaviours.counts, plans, behaviours.strata, behaviours.policies, True
    )
    steps = np.array([0, 1, 2, 3, 0, 1])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, steps.size))
    left = np.sum(follow_plans(x, mixed, steps) * y)
    assert left == pytest.approx(np.sum(x * gather_plans(y, mixed, steps)), rel=1e-12)


def test_features_are_states_or_numbers() -> None:
    cell, x = state_features(np.array([3, 1, 3]))
    assert cell.tolist() == [1, 0, 1]
    assert x.tolist() == [[1.0], [1.0], [1.0]]
    cell, x = state_features(np.array([[0.0, 5.0], [2.0, 5.0]]))  # a constant says nothing
    assert cell.tolist() == [0, 0]
    np.testing.assert_allclose(x, [[1, -1, -np.tanh(1)], [1, 1, np.tanh(1)]])
    assert state_features(np.zeros((2, 1000)))[1].tolist() == [[1.0], [1.0]]


def test_less_noise_than_nfis_on_a_bandit_and_honest_about_it() -> None:
    """Rewards without noise: 200 data sets of 40 episodes, ratio of RMSEs and coverage."""
    rng = np.random.default_rng(0)
    theta, aim = (LinearSigmoid(np.array([value])) for value in (0.5, -1.0))
    grid = np.linspace(-1.0, 1.0, 2001)[:, None]
    truth = float(np.mean(aim.probs(grid)[:, 1] * (1.0 + grid[:, 0])))
    errors, covered = np.empty((200, 2)), np.empty(200)
    for i in range(200):
        x = rng.uniform(-1.0, 1.0, (40, 1))
        actions = theta.sample(x, rng)
        data = Trajectories.from_arrays(
            x,
            actions,
            actions * (1.0 + x[:, 0]),
            theta.log_prob(x, actions),
            offsets=np.arange(41),
            policies=[theta],
            terminated=True,
        )
        found = evaluate(data, aim, ["NFIS", "NFRIS"])
        errors[i] = [found[name].value - truth for name in ("NFIS", "NFRIS")]
        interval = found["NFRIS"].interval
        covered[i] = interval.low <= truth <= interval.high
    squares = errors**2
    gain = squares[:, 0] - squares[:, 1]
    assert gain.mean() > 3 * gain.std() / np.sqrt(200)
    assert covered.mean() >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 200)
