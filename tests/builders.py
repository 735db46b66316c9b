"""Recorded data for tests: tabular policies, episodes of small MDPs, arrays of both doors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from ope_gym import Betting, Bootstrap, Compute, Evaluation, Weighting, evaluate_log_probs
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Snapshot, register_policy
from ope_gym.weights.behaviours import behaviours_of
from tests import small_mdps
from tests.reference import Data

Floats = NDArray[np.float64]


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class Table(Snapshot):
    """Any probabilities (states, actions) for one Discrete observation."""

    kind: ClassVar[str] = "test-table"
    table: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.table, dtype=np.float64))

    def probs(self, observations: Any) -> Floats:
        return np.asarray(self.table[np.asarray(observations)])

    def log_prob(self, observations: Any, actions: Any) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.table[observations, actions]))

    def sample(self, observations: Any, rng: np.random.Generator) -> NDArray[np.int64]:
        rows = self.probs(observations).cumsum(axis=1)
        return np.asarray((rng.random((len(rows), 1)) > rows).sum(axis=1))


class LogProbOnly:
    """A policy that keeps to itself what else it could do."""

    def __init__(self, log_prob: Callable[[Any, Any], Any]) -> None:
        self._log_prob = log_prob

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return self._log_prob(observations, actions)

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        raise NotImplementedError


def draw(rng: np.random.Generator, mdp: small_mdps.MDP, policy: Floats) -> small_mdps.Path:
    """One episode; its `dynamics` is left 1, nobody asks for it."""
    states: list[int] = []
    actions: list[int] = []
    rewards: list[float] = []
    state = int(rng.choice(mdp.start.size, p=mdp.start))
    while len(states) < mdp.horizon and state < mdp.start.size:
        action = int(rng.choice(policy.shape[1], p=policy[state]))
        states.append(state)
        actions.append(action)
        rewards.append(float(rng.choice(mdp.rewards, p=mdp.reward_probs[state, action])))
        state = int(rng.choice(mdp.start.size + 1, p=mdp.moves[state, action]))
    return small_mdps.Path(tuple(states), tuple(actions), tuple(rewards), 1.0)


def buffer_of(
    episodes: Sequence[small_mdps.Path],
    ids: Sequence[int],
    policies: Sequence[Floats],
    *,
    horizon: int | None = None,
    held_out: bool = False,
) -> TrajectoryBuffer:
    """The episodes as a training loop with tabular policies would have recorded them."""
    states, actions = policies[0].shape
    buffer = TrajectoryBuffer(spaces.Discrete(states), spaces.Discrete(actions), horizon=horizon)
    numbers = [buffer.add_policy(Table(policy)) for policy in policies]
    for path, k in zip(episodes, ids, strict=True):
        chosen = Table(policies[k]).log_prob(list(path.states), list(path.actions))
        buffer.append(
            np.array(path.states),
            np.array(path.actions),
            path.rewards,
            chosen,
            numbers[k],
            terminated=True,
            held_out=held_out,
        )
    return buffer


@dataclass(frozen=True)
class Recorded:
    """A small MDP, the policies that acted in it, a target, and what was recorded."""

    mdp: small_mdps.MDP
    policies: list[Floats]
    target: Table
    trajectories: Trajectories

    @property
    def arrays(self) -> Data:
        return arrays_of(self.trajectories, self.target)


def recorded(
    seed: int,
    counts: Sequence[int] = (5, 3, 8),
    *,
    states: int = 3,
    actions: int = 3,
    horizon: int = 6,
    rewards: Sequence[float] = (-1.0, 2.0, 0.5),
    early: bool = True,
    held_out: bool = False,
) -> Recorded:
    """Random policies and episodes, the behaviours' episodes in random order."""
    rng = np.random.default_rng(seed)
    mdp = small_mdps.random_mdp(
        rng, states=states, actions=actions, horizon=horizon, rewards=rewards
    )
    if not early:
        mdp.moves[..., -1] = 0.0
        mdp.moves[...] /= mdp.moves.sum(axis=-1, keepdims=True)
    policies = [small_mdps.random_policy(rng, mdp) for _ in counts]
    target = small_mdps.random_policy(rng, mdp)
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    episodes = [draw(rng, mdp, policies[k]) for k in ids]
    buffer = buffer_of(episodes, ids.tolist(), policies, horizon=horizon, held_out=held_out)
    return Recorded(mdp, policies, Table(target), buffer.view())


def arrays_of(data: Trajectories, target: Table) -> Data:
    """What a person with the same recording would hand to the other door."""
    behaviours = behaviours_of(data)
    rows = np.stack(
        [
            data.policies[k].log_prob(data.observations, data.actions)
            for ((_, k),) in behaviours.plans
        ]
    )
    return Data(
        target.log_prob(data.observations, data.actions),
        rows,
        behaviours.ids,
        data.rewards,
        data.offsets,
    )


def pick(data: Data, episodes: ArrayLike) -> Data:
    """The chosen trajectories, in that order and with repetitions."""
    chosen = np.asarray(episodes)
    rows = np.concatenate([np.arange(data.offsets[i], data.offsets[i + 1]) for i in chosen])
    lengths = np.diff(data.offsets)[chosen]
    return Data(
        data.target_log_probs[rows],
        np.ascontiguousarray(data.behaviour_log_probs[:, rows]),
        data.behaviour_ids[chosen],
        data.rewards[rows],
        np.concatenate([[0], np.cumsum(lengths)]),
    )


def one_step(
    target: Sequence[float],
    behaviours: Sequence[Sequence[float]],
    ids: Sequence[int],
    rewards: Sequence[float],
) -> Data:
    """One-step episodes by the probabilities of their actions."""
    with np.errstate(divide="ignore"):
        return Data(
            np.log(np.asarray(target, dtype=np.float64)),
            np.log(np.asarray(behaviours, dtype=np.float64)),
            np.asarray(ids, dtype=np.int64),
            np.asarray(rewards, dtype=np.float64),
            np.arange(len(ids) + 1),
        )


def value_of(name: str, data: Data, **options: Any) -> float:
    return float(evaluate_log_probs(*data, name, **plain_options(**options))[name].value)


def assert_same(a: Evaluation, b: Evaluation, *, rtol: float = 1e-12) -> None:
    """Equal numbers in every field, but for rounding."""
    assert list(a) == list(b)
    for name, one in a.items():
        other = b[name]
        numbers = [
            (
                e.value,
                e.standard_error,
                e.interval.low,
                e.interval.high,
                e.diagnostics.ess,
                e.diagnostics.max_share,
                e.diagnostics.mean_weight,
                e.diagnostics.pareto_k,
            )
            for e in (one, other)
        ]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=rtol, atol=rtol, err_msg=name)
        for field in ("ess_curve", "behaviour_shares", "behaviour_ess"):
            np.testing.assert_allclose(
                getattr(one.diagnostics, field), getattr(other.diagnostics, field), rtol=rtol
            )
        np.testing.assert_allclose(one.influence, other.influence, rtol=rtol, atol=rtol)
        assert one.verdict.colour == other.verdict.colour
        assert (one.replicates is None) == (other.replicates is None)
        if one.replicates is not None and other.replicates is not None:
            np.testing.assert_allclose(one.replicates, other.replicates, rtol=rtol, atol=rtol)


def plain_options(**found: Any) -> dict[str, Any]:
    """Translate plain options (cap, resamples, workers, ...) to the option classes."""

    def taken(*names: str) -> dict[str, Any]:
        return {name: found.pop(name) for name in names if name in found}

    if weighting := taken("cap", "mixture", "reward_model"):
        found["weighting"] = Weighting(**weighting)
    if "chunk_steps" in found:
        found["block_steps"] = found.pop("chunk_steps")
    if compute := taken("block_steps", "workers", "ray", "progress"):
        found["compute"] = Compute(**compute)
    drawn, bounds = taken("resamples"), taken("reward_range", "horizon")
    if found.get("interval") in ("percentile", "bca"):
        found["interval"] = Bootstrap(**drawn, method=found["interval"])
    if found.get("interval") == "betting":
        found["interval"] = Betting(**bounds)
    return found
