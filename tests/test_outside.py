"""The test bed of problems like those of others: exact values, and simulations that agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from ope_gym import evaluate, evaluate_log_probs
from studies.outside import cells as cells_module
from studies.outside import grids
from studies.outside.cells import Cell, cells, fault_cells
from studies.outside.finite import Setup, TablePolicy, softmax

FINITE = {cell.name: cell for cell in cells() if cell.group != "heavy tails"}
N = 4000
RARE = {"saturated": (500.0, 1 / 500), "rare reward": (100.0, 1 / 80)}


@pytest.fixture(scope="module", autouse=True)
def short_trainings() -> Iterator[None]:
    """Let learners of tables be poor ones: what is tested here does not ask for better."""
    cells_module._setup.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "_UPDATES", dict.fromkeys(grids._UPDATES, 200))
        yield
    cells_module._setup.cache_clear()


def finite(cell: Cell) -> Setup:
    setup = cell.setup
    assert isinstance(setup, Setup)
    return setup


@pytest.mark.parametrize("name", FINITE)
def test_the_truth_is_the_mean_return_of_the_target(name: str) -> None:
    """Within 4 standard errors of fresh episodes."""
    setup = finite(FINITE[name])
    n = 400 if setup.process.horizon > 300 else N
    fresh = Setup(setup.process, setup.target[None], setup.target)
    data = fresh.simulate(n, np.random.default_rng(3))
    returns = np.add.reduceat(data.rewards, data.offsets[:-1])
    error = max(returns.std() / np.sqrt(n), 1e-9)
    if name in RARE:  # so few events that their own spread is no guide: that of a Poisson count
        size, chance = RARE[name]
        error = size * np.sqrt(chance / n)
    assert abs(returns.mean() - setup.truth) < 4 * error
    assert fresh.truth == setup.truth


def test_the_truth_by_enumeration_uses_the_hidden_state() -> None:
    """All paths of the two-step problem whose states look alike, added up by hand."""
    setup = finite(next(c for c in cells() if c.name == "ModelFail 2"))
    process, probs = setup.process, setup.target[0]
    value = 0.0
    for first, middle in itertools.product(range(2), range(2)):
        state = process.moves[0, first, middle]
        paid = process.rewards[state, 0, 0]  # whatever is done there
        value += probs[first] * process.chances[0, first, middle] * paid
    assert setup.truth == pytest.approx(value, abs=1e-12)
    assert set(process.seen.tolist()) == {0}


def test_the_truth_of_a_random_process_by_a_plain_loop() -> None:
    setup = finite(next(c for c in fault_cells() if c.name == "small MDP, 10 steps"))
    process = replace(setup.process, horizon=3)

    def ahead(state: int, left: int) -> float:
        total = 0.0
        for action, outcome in itertools.product(range(3), range(6)):
            chance = setup.target[process.seen[state], action]
            chance *= process.chances[state, action, outcome]
            later = ahead(process.moves[state, action, outcome], left - 1) if left > 1 else 0.0
            total += chance * (process.rewards[state, action, outcome] + later)
        return total

    by_hand = sum(process.start[s] * ahead(s, 3) for s in range(6))
    assert process.value(setup.target) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", ["graph 4, slips, N(0, 1), sparse", "hidden mood", "Taxi-v4"])
def test_actions_are_as_frequent_as_the_policies_say(name: str) -> None:
    cell = next(c for c in cells() if (c.name, c.loggers, c.n) == (name, 8, 1000))
    setup = finite(cell)
    data = setup.simulate(1000, np.random.default_rng(5))
    seen, actions = np.asarray(data.observations), np.asarray(data.actions)
    ids = np.asarray(data.policy_ids)
    for k in range(8):
        mine = ids == k
        expected = setup.loggers[k][seen[mine]]
        counts = np.bincount(actions[mine], minlength=expected.shape[1])
        error = np.sqrt((expected * (1.0 - expected)).sum(axis=0)) + 1e-9
        assert np.all(np.abs(counts - expected.sum(axis=0)) < 4.5 * error)
        logs = data.policies[k].log_prob(seen[mine], actions[mine])
        np.testing.assert_array_equal(logs, data.log_probs[mine])


def test_transitions_and_rewards_follow_the_process() -> None:
    """Slips of a graph, and ends that are told from the time limit."""
    cell = next(c for c in cells() if c.name == "graph 16, slips, dense" and c.n == 1000)
    data = cell.simulate(np.random.default_rng(0))[0]
    assert np.all(data.lengths == 16)
    assert data.terminated.all()
    state, action = np.asarray(data.observations), np.asarray(data.actions)
    inside = np.setdiff1d(np.arange(data.n_steps), data.offsets[1:] - 1)
    went_up = state[inside + 1] % 2 == 1
    slipped = np.mean(went_up != (action[inside] == 0))
    assert abs(slipped - 0.25) < 4 * np.sqrt(0.25 * 0.75 / inside.size)
    ring = next(c for c in cells() if c.name == "ring of 20, 200 steps")
    assert ring.simulate(np.random.default_rng(0))[0].truncated.all()


def test_tables_of_gymnasium_are_read_as_they_are() -> None:
    inside = gymnasium.make("FrozenLake8x8-v1").unwrapped
    setup = finite(next(c for c in cells() if c.name == "FrozenLake8x8-v1"))
    after = np.zeros(64)
    for chance, state, _, _ in inside.P[10][2]:  # type: ignore[attr-defined]
        after[state] += chance
    found = np.zeros(64)
    np.add.at(found, setup.process.moves[10, 2], setup.process.chances[10, 2])
    np.testing.assert_allclose(found, after)
    assert setup.process.horizon == 100


def test_seeds_change_processes_and_policies_but_not_the_list() -> None:
    for one, other in zip(cells(0), cells(1), strict=True):
        assert (one.name, one.n, one.loggers) == (other.name, other.n, other.loggers)
        assert one.setup.truth != other.setup.truth


def test_cells_cover_loggers_sizes_and_both_kinds_of_states() -> None:
    listed = cells()
    assert len(set(map(str, listed))) == len(listed)
    assert {cell.n for cell in listed} == {50, 200, 1000}
    assert {cell.group for cell in listed if cell.hidden} == {
        *("hidden graph", "ModelFail", "memory", "aliased")
    }
    for name in {cell.name for cell in listed}:
        assert min(c.loggers for c in listed if c.name == name) == 1
        assert max(c.loggers for c in listed if c.name == name) >= 5


def test_faults() -> None:
    listed = fault_cells()
    wrong = next(c for c in listed if c.fault == "wrong propensities" and not c.arrays)
    setup = finite(wrong)
    data = wrong.simulate(np.random.default_rng(0))[0]
    believed = data.policies[0]
    assert isinstance(believed, TablePolicy)
    np.testing.assert_allclose(believed.table, softmax(np.log(setup.loggers[0]) / 1.3))
    whole = finite(replace(wrong, fault=""))
    np.testing.assert_array_equal(whole.loggers, setup.loggers)
    assert whole.truth == setup.truth
    gone = finite(replace(wrong, fault="missing action"))
    state, action = np.argwhere(gone.loggers[0] == 0)[0]
    assert np.all(gone.loggers[:, state, action] == 0)
    assert gone.target[state, action] == pytest.approx(0.2)
    np.testing.assert_allclose(gone.target.sum(axis=1), 1.0)
    np.testing.assert_allclose(gone.loggers.sum(axis=2), 1.0)


def test_both_doors_accept_a_cell() -> None:
    cell = next(c for c in cells() if c.name == "ModelWin 20" and c.loggers == 8)
    data, target, _ = cell.simulate(np.random.default_rng(0))
    by_policy = evaluate(data, target, ["NFIS", "auto", "FWDR", "DM"])
    seen, actions = data.observations, data.actions
    by_array = evaluate_log_probs(
        target.log_prob(seen, actions),
        np.stack([p.log_prob(seen, actions) for p in data.policies]),
        data.policy_ids[data.offsets[:-1]],
        data.rewards,
        data.offsets,
        ["NFIS"],
    )
    assert by_array["NFIS"].value == pytest.approx(by_policy["NFIS"].value)
