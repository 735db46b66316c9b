"""Test the search for copies of episodes: those that were shuffled, and those that chance makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Compute, Trajectories, evaluate
from ope_gym.policies import LinearSigmoid
from ope_gym.preparing.copies import copies, episode_marks
from ope_gym.preparing.weighing import has_densities
from tests.builders import LogProbOnly

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A table of probabilities (contexts, actions); the context is the first observation."""

    table: Array

    def probs(self, observations: Any) -> Any:
        return self.table[np.asarray(observations)[:, 0].astype(int) % len(self.table)]

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return np.log(self.probs(observations)[np.arange(len(actions)), np.asarray(actions)])

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return (rng.random((len(observations), 1)) > self.probs(observations).cumsum(1)).sum(axis=1)


def count(data: Trajectories) -> int:
    returns = np.add.reduceat(data.rewards, data.offsets[:-1])
    return copies(episode_marks(data, returns), has_densities(data))


def made(n: int, steps: int, sure: float, seed: int = 4, contexts: int = 0) -> Trajectories:
    """Return episodes with real observations, or with few; one action has probability `sure`."""
    rng = np.random.default_rng(seed)
    policy = Rows(np.array([[sure, 1.0 - sure]]))
    seen = rng.integers(contexts, size=n * steps) if contexts else rng.normal(size=n * steps)
    observations = seen[:, None].astype(float)
    actions = policy.sample(observations, rng)
    return Trajectories.from_arrays(
        observations,
        actions,
        rng.integers(2, size=n * steps).astype(float),
        policy.log_prob(observations, actions),
        offsets=np.arange(n + 1) * steps,
        policies=[policy],
        terminated=True,
    )


def times(data: Trajectories, copies: int, seed: int = 0) -> Trajectories:
    """Return so many copies of all episodes, shuffled."""
    rng = np.random.default_rng(seed)
    return data.merge(*[data] * (copies - 1)).select(episodes=rng.permutation(copies * len(data)))


@pytest.mark.parametrize("contexts", [0, 20])
@pytest.mark.parametrize(("n", "steps", "sure"), [(100, 50, 0.99), (60, 30, 0.5), (70_000, 3, 0.5)])
def test_shuffled_copies_are_found(n: int, steps: int, sure: float, contexts: int) -> None:
    data = made(n, steps, sure, contexts=contexts)
    assert count(data) == 0
    if contexts and n > 1_000:
        return  # so many short episodes of few contexts: copies are no more than chance makes
    for copies_made in (2, 4):
        found = count(times(data, copies_made)) / (copies_made - 1) / n
        assert 0.3 < found <= 1.01  # some of those that hardly explore are alike by chance


def test_copies_of_single_steps_are_found_by_their_real_observations() -> None:
    data = made(300, 1, 0.5)
    assert count(data) == 0
    assert count(times(data, 4)) == pytest.approx(450, abs=20)  # half of these, by chance


def test_a_few_copies_harm_little() -> None:
    data = made(200, 20, 0.5)
    assert count(data.merge(data.select(episodes=range(5)))) == 0
    assert count(data.merge(data.select(episodes=range(50)))) == 50
    once = data.select(episodes=[0])
    assert count(data.merge(*[once] * 10)) == 10  # of one episode they harm more


@pytest.mark.parametrize("what", ["observations", "actions", "rewards"])
def test_episodes_that_begin_act_or_earn_otherwise_are_no_copies(what: str) -> None:
    data = made(60, 30, 0.5)
    column = np.array(getattr(data, what))
    column[::30] = 1 - column[::30]
    changed: dict[str, Any] = {what: column}
    assert count(data.merge(dataclasses.replace(data, **changed))) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("logger", ["even", "decided"])
def test_users_who_come_back_are_no_copies(logger: str, seed: int) -> None:
    """One step, 200 contexts, few outcomes; a logger that hardly explores always does the same."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(3), size=200)
    if logger == "decided":
        table = 0.998 * np.eye(3)[rng.integers(3, size=200)] + 0.002 / 3
    policy, n = Rows(table), 2_000
    contexts = rng.integers(200, size=(n, 1)).astype(float)
    actions = policy.sample(contexts, rng)
    data = Trajectories.from_arrays(
        contexts,
        actions,
        (rng.random(n) < 0.3).astype(float),
        policy.log_prob(contexts, actions),
        offsets=np.arange(n + 1),
        policies=[policy],
        terminated=True,
    )
    assert count(data) == 0


@pytest.mark.parametrize("sure", [0.5, 0.9, 0.999])
def test_walks_that_start_alike_in_an_environment_without_chance_are_no_copies(sure: float) -> None:
    """The observation is the step; all start at 0, and after 6 steps it is over."""
    rng, n, steps = np.random.default_rng(0), 500, 6
    policy = Rows(np.array([[sure, 1.0 - sure]]))
    observations = np.tile(np.arange(float(steps)), n)[:, None]
    actions = policy.sample(observations, rng)
    data = Trajectories.from_arrays(
        observations,
        actions,
        actions.astype(float),
        policy.log_prob(observations, actions),
        offsets=np.arange(n + 1) * steps,
        policies=[policy],
        terminated=True,
    )
    assert count(data) == 0


@pytest.mark.parametrize("kind", ["prices", "clipped", "all alike"])
def test_real_actions_that_recur_are_no_copies(kind: str) -> None:
    """Few contexts, few prices, few outcomes; the density of a price says nothing of repeats."""
    rng, n = np.random.default_rng(0), 300
    contexts, rewards = rng.integers(3, size=n), rng.random(n) < 0.3
    actions = rng.choice([9.99, 14.99, 19.99], size=n)
    if kind == "clipped":
        actions = np.clip(rng.normal(size=n), -1.0, 1.0)
    elif kind == "all alike":
        contexts, actions, rewards = np.zeros(n, dtype=int), np.zeros(n), np.ones(n, dtype=bool)
    assert count(priced(contexts, actions, rewards)) == 0
    fresh = priced(contexts, rng.normal(size=n), rewards)
    assert count(fresh) == 0
    assert count(times(fresh, 2)) > 0.5 * n


def priced(contexts: Array, actions: Array, rewards: Array) -> Trajectories:
    n = len(actions)
    return Trajectories.from_arrays(
        contexts[:, None].astype(float),
        actions[:, None],
        rewards.astype(float),
        np.full(n, 3.0),
        offsets=np.arange(n + 1),
        policies=[LogProbOnly(lambda seen, acted: np.full(len(acted), 3.0))],
        terminated=True,
    )


def test_copies_are_said_and_never_green_in_memory_and_in_files(tmp_path: Path) -> None:
    even, target = LinearSigmoid(np.zeros(1)), LinearSigmoid(np.array([0.2]))
    data = dataclasses.replace(made(200, 5, 0.5), policies=(even,))
    once = evaluate(data, target, "NFIS", origin="fixed")["NFIS"].verdict
    assert once.colour == "green"
    path = tmp_path / "a.ope"
    times(data, 2).save(path)
    for episodes, compute in ((times(data, 2), Compute()), (path, Compute(block_steps=100))):
        twice = evaluate(episodes, target, "NFIS", origin="fixed", compute=compute)["NFIS"]
        assert twice.verdict.colour == "amber"
        assert "of 400 episodes repeat earlier ones exactly" in str(twice.verdict)
