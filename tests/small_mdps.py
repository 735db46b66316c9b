"""Finite decision problems small enough to enumerate: truths without sampling.

Episodes end early with a probability that depends on state and action, rewards are random, and
everything a policy does not decide is one number per path: P(path | π) = dynamics · ∏ π(a|s).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference import Data

Policy = NDArray[np.float64]  # (states, actions)


@dataclass(frozen=True)
class MDP:
    """S states, A actions, R possible rewards, at most `horizon` steps."""

    start: NDArray[np.float64]  # (S,)
    moves: NDArray[np.float64]  # (S, A, S + 1), the last column is the end of the episode
    rewards: NDArray[np.float64]  # (R,)
    reward_probs: NDArray[np.float64]  # (S, A, R)
    horizon: int

    @property
    def reward_mean(self) -> NDArray[np.float64]:
        """r̄(s, a), (S, A)."""
        return np.asarray(self.reward_probs @ self.rewards)

    @property
    def reward_variance(self) -> NDArray[np.float64]:
        """V(s, a), (S, A)."""
        spread = (self.rewards - self.reward_mean[..., None]) ** 2
        return np.asarray((self.reward_probs * spread).sum(-1))


@dataclass(frozen=True)
class Path:
    """One possible episode and the probability of all that the policy does not decide."""

    states: tuple[int, ...]
    actions: tuple[int, ...]
    rewards: tuple[float, ...]
    dynamics: float

    def probability(self, policy: Policy) -> float:
        """P(path | policy)."""
        chosen = (float(policy[s, a]) for s, a in zip(self.states, self.actions, strict=True))
        return self.dynamics * math.prod(chosen)


def random_mdp(
    rng: np.random.Generator,
    *,
    states: int = 2,
    actions: int = 2,
    horizon: int = 3,
    rewards: Sequence[float] = (-1.0, 2.0),
) -> MDP:
    """Random starts, moves, endings and reward probabilities."""
    return MDP(
        start=rng.dirichlet(np.ones(states)),
        moves=rng.dirichlet(np.ones(states + 1), size=(states, actions)),
        rewards=np.asarray(rewards, dtype=np.float64),
        reward_probs=rng.dirichlet(np.ones(len(rewards)), size=(states, actions)),
        horizon=horizon,
    )


def bandit(mean: Sequence[float]) -> MDP:
    """One step, one state, deterministic rewards."""
    return MDP(
        start=np.ones(1),
        moves=np.broadcast_to([0.0, 1.0], (1, len(mean), 2)).copy(),
        rewards=np.asarray(mean, dtype=np.float64),
        reward_probs=np.eye(len(mean))[None],
        horizon=1,
    )


def random_policy(rng: np.random.Generator, mdp: MDP, *, peak: float = 1.0) -> Policy:
    """A random table; the smaller `peak`, the closer its rows to one action."""
    states, actions = mdp.moves.shape[:2]
    table = rng.dirichlet(np.full(actions, peak), size=states)
    return np.asarray(0.02 / actions + 0.98 * table)


def paths(mdp: MDP) -> list[Path]:
    """Every episode the dynamics allow under some policy."""
    found: list[Path] = []
    last = mdp.start.size  # the index that means "the episode ends"

    def extend(path: Path, state: int) -> None:
        for action, (r, p_r) in itertools.product(
            range(mdp.moves.shape[1]), enumerate(map(float, mdp.rewards))
        ):
            for to, p_to in enumerate(map(float, mdp.moves[state, action])):
                p = path.dynamics * float(mdp.reward_probs[state, action, r]) * p_to
                longer = Path(
                    (*path.states, state), (*path.actions, action), (*path.rewards, p_r), p
                )
                if p == 0.0:
                    continue
                if to == last or len(longer.states) == mdp.horizon:
                    found.append(longer)
                else:
                    extend(longer, to)

    for state, p in enumerate(map(float, mdp.start)):
        extend(Path((), (), (), p), state)
    return merge_endings(found)


def merge_endings(found: list[Path]) -> list[Path]:
    """At the horizon the next state does not matter: equal records become one path."""
    total: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], list[float]] = {}
    for path in found:
        total.setdefault((path.states, path.actions, path.rewards), []).append(path.dynamics)
    return [Path(*record, math.fsum(p)) for record, p in total.items()]


def value(mdp: MDP, policy: Policy, gamma: float) -> float:
    """J(π) by backward recursion."""
    ahead = np.zeros(mdp.start.size + 1)
    for _ in range(mdp.horizon):
        q = mdp.reward_mean + gamma * mdp.moves @ ahead  # (S, A)
        ahead = np.append((policy * q).sum(1), 0.0)
    return float(mdp.start @ ahead[:-1])


def arrays(
    episodes: Sequence[Path], ids: Sequence[int], target: Policy, behaviours: Sequence[Policy]
) -> Data:
    """Episodes with the numbers of their behaviours as the arrays of the door."""
    states = np.concatenate([p.states for p in episodes]).astype(np.int64)
    actions = np.concatenate([p.actions for p in episodes]).astype(np.int64)
    with np.errstate(divide="ignore"):
        logs = [np.log(policy[states, actions]) for policy in (target, *behaviours)]
    return Data(
        target_log_probs=logs[0],
        behaviour_log_probs=np.stack(logs[1:]),
        behaviour_ids=np.asarray(ids, dtype=np.int64),
        rewards=np.concatenate([p.rewards for p in episodes]),
        offsets=np.cumsum([0, *(len(p.states) for p in episodes)]),
    )


def reward_model(
    mdp: MDP, episodes: Sequence[Path]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """r̄ and V at every step of the episodes, (S,) each."""
    states = np.concatenate([p.states for p in episodes]).astype(np.int64)
    actions = np.concatenate([p.actions for p in episodes]).astype(np.int64)
    return mdp.reward_mean[states, actions], mdp.reward_variance[states, actions]


@dataclass(frozen=True)
class Population:
    """Every episode of every behaviour in one data set, in proportions that keep ρ_k = n_k / n.

    A plain ψ depends on its own episode and on ρ alone, so one call of an estimator on `data` gives
    each ψ that any data set with these counts can contain; `chance` is the probability of each
    under its behaviour (0 for copies).
    """

    data: Data
    episodes: list[Path]
    chance: NDArray[np.float64]  # (rows,)
    counts: tuple[int, ...]

    def moments(self, psi: NDArray[np.float64]) -> tuple[float, float]:
        """Mean and variance of (1/n) Σ_i ψ_i over all data sets with these counts."""
        n = sum(self.counts)
        mean, variance = [], []
        for k, count in enumerate(self.counts):
            own = self.data.behaviour_ids == k
            p, x = self.chance[own], psi[own]
            centre = math.fsum(p * x)
            mean.append(count / n * centre)
            variance.append(count / n**2 * math.fsum(p * (x - centre) ** 2))
        return math.fsum(mean), math.fsum(variance)


def population(
    mdp: MDP, target: Policy, behaviours: Sequence[Policy], counts: Sequence[int]
) -> Population:
    """All episodes each behaviour can produce; behaviour k's block is repeated counts[k] times."""
    possible = [[p for p in paths(mdp) if p.probability(b) > 0] for b in behaviours]
    size = max(map(len, possible))
    episodes: list[Path] = []
    ids: list[int] = []
    chance: list[float] = []
    for k, (own, count) in enumerate(zip(possible, counts, strict=True)):
        for j in range(size * count):  # impossible episodes are left out: copies keep ρ right
            episodes.append(own[j % len(own)])
            ids.append(k)
            chance.append(own[j].probability(behaviours[k]) if j < len(own) else 0.0)
    data = arrays(episodes, ids, target, behaviours)
    return Population(data, episodes, np.asarray(chance), tuple(counts))


def data_sets(
    mdp: MDP, behaviours: Sequence[Policy], ids: Sequence[int]
) -> Iterator[tuple[tuple[Path, ...], float]]:
    """Every data set (one episode per entry of `ids`) with its probability: tiny problems only."""
    every = paths(mdp)
    for chosen in itertools.product(every, repeat=len(ids)):
        p = math.prod(x.probability(behaviours[k]) for x, k in zip(chosen, ids, strict=True))
        if p > 0:
            yield chosen, p
