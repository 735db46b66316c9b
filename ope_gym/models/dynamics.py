"""DynamicsQ: learn how the environment moves, and evaluate the target inside what was learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.model_values import (
    Played,
    Probs,
    ValueFeatures,
    fit_value,
    learn_metric,
    mean_return,
    play,
)
from ope_gym.models.transition_model import Steps, TransitionModel, fit_transitions
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.numerics import choices

_SLOPES = 3000  # played states at which the slope of V is taken
_WIDEST = 1000  # monomials of a state


@dataclass(frozen=True)
class DynamicsQ:
    """q from a learned model of the environment.

        q(s, a, t) = r(s, a) + γ P(on | s, a) V(s + f_a(s), t + 1)

    f, r and the chance of the end are learned from the recorded steps, V from episodes of the
    target played in that model (see `transition_model` and `model_values`).

    Use it where states are a few real numbers that move smoothly, as those of a mechanical system:
    it learns from all steps of all policies alike, and reaches states that the target visits but
    the data do not. Weakness: transitions are taken as their mean, so noise of the environment is
    not in the model; a state that is not Markov (frames, hidden parts) misleads it; an end that no
    recorded episode met is unknown to it. Cost: O(S F² + episodes · length · A · G) with F
    monomials of the state and G value features; one to two seconds for 20,000 steps of CartPole.

    Args:
        degree: of the polynomials of the transitions.
        value_degree: of the polynomials of V.
        cosines: random cosine features of V.
        episodes: played from recorded first states; a quarter more from any recorded state.
        rows: played steps that V is fitted to.
        members: models from resampled episodes, for `DynamicsValues.uncertainty`.
    """

    degree: int = 3
    value_degree: int = 3
    cosines: int = 200
    episodes: int = 800
    rows: int = 30_000
    members: int = 5

    def __post_init__(self) -> None:
        least = dict(degree=1, value_degree=0, cosines=0, episodes=1, rows=1, members=2)
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {bound}")

    def fit(
        self,
        data: Trajectories,
        target: Policy,
        *,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> DynamicsValues:
        """Learn from all episodes of `data`; an episode lasts at most `horizon` steps."""
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma={gamma} must be between 0 and 1")
        if not len(data):
            raise ValueError("data is empty: DynamicsQ learns from recorded episodes")
        if horizon < (longest := int(data.lengths.max())):
            raise ValueError(f"horizon={horizon} is less than the longest episode, {longest} steps")
        steps, probs, actions = _recorded(data, target)
        if (width := comb(steps.states.shape[1] + self.degree, self.degree)) > _WIDEST:
            raise ValueError(
                f"observations of {steps.states.shape[1]} numbers have {width} monomials of "
                f"degree={self.degree}, more than {_WIDEST}: lower the degree, or use NetworkQ"
            )
        model = fit_transitions(steps, actions, self.degree)
        first = data.offsets[:-1][np.arange(self.episodes) % len(data)]
        begin = np.append(first, rng.integers(data.n_steps, size=self.episodes // 4))
        played = play(
            model,
            probs,
            steps.states[begin],
            data.steps[begin],
            gamma=gamma,
            horizon=horizon,
            rng=rng,
        )
        features, theta = self._value(model, played, gamma, horizon, rng)
        rewards = data.rewards
        lowest, highest = min(rewards.min(), 0.0), max(rewards.max(), 0.0)
        bounds = np.outer([lowest, highest], annuity(gamma, horizon))
        seed = int(rng.integers(1 << 62))

        def resampled() -> FloatArray:
            return self._members(data, target, steps.states[first], gamma, horizon, seed)

        return DynamicsValues(model, features, theta, gamma, horizon, bounds, resampled)

    def _value(
        self,
        model: TransitionModel,
        played: list[Played],
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> tuple[ValueFeatures, FloatArray]:
        """φ and θ: first roughly, to learn the directions that matter, then with luck taken out."""
        states = np.concatenate([step.states for step in played])
        times = np.concatenate([step.times for step in played])
        features = ValueFeatures.around(states, horizon, self.value_degree, self.cosines, rng)
        theta = fit_value(
            model, features, played, gamma=gamma, rows=self.rows, rng=rng, luck_out=False
        )
        some = rng.integers(len(states), size=_SLOPES)
        metric = learn_metric(features, theta, states[some], times[some])
        features = ValueFeatures.around(
            states, horizon, self.value_degree, self.cosines, rng, metric
        )
        return features, fit_value(model, features, played, gamma=gamma, rows=self.rows, rng=rng)

    def _members(
        self,
        data: Trajectories,
        target: Policy,
        starts: FloatArray,
        gamma: float,
        horizon: int,
        seed: int,
    ) -> FloatArray:
        """(members,) mean value at `starts` in models of resampled episodes, with the same luck."""
        rng = np.random.default_rng(seed)
        found = np.empty(self.members)
        times = np.zeros(len(starts), dtype=np.int64)
        for member in range(self.members):
            again = data.select(episodes=rng.integers(len(data), size=len(data)))
            steps, probs, actions = _recorded(again, target)
            model = fit_transitions(steps, actions, self.degree)
            played = play(
                model,
                probs,
                starts,
                times,
                gamma=gamma,
                horizon=horizon,
                rng=np.random.default_rng(seed),
            )
            found[member] = mean_return(played, gamma)
        return found


@dataclass(frozen=True, eq=False)
class DynamicsValues:
    """A fitted q.

    Args:
        model: what was learned of the environment.
        features: φ of V.
        theta: (F,) V = φ·θ.
        gamma: discount.
        horizon: longest possible episode.
        bounds: (2, horizon + 1) least and largest return by the number of steps left.
        resampled: gives the mean value at the start in each member of the ensemble.
    """

    model: TransitionModel
    features: ValueFeatures
    theta: FloatArray
    gamma: float
    horizon: int
    bounds: FloatArray
    resampled: Callable[[], FloatArray]

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """(n, A) expected return of the target from step `steps` on, after every action."""
        following, rewards, ending = self.model.step(_states(observations))
        after = np.stack([self.value(states, steps + 1) for states in following])
        return np.asarray((rewards + self.gamma * (1.0 - ending) * after).T)

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """(n,) the same after `actions`."""
        everything = self.q_all(observations, steps)
        chosen = choices(actions, len(everything), everything.shape[1])
        return np.asarray(everything[np.arange(len(everything)), chosen])

    def value(self, states: FloatArray, steps: IntArray) -> FloatArray:
        """(n,) V before the action of step `steps`, within what the rewards seen allow."""
        low, high = self.bounds[:, np.maximum(self.horizon - steps, 0)]
        return np.clip(self.theta @ self.features(states, steps), low, high)

    @cached_property
    def starts(self) -> FloatArray:
        """(members,) mean value at the recorded first states, in models of resampled episodes."""
        return self.resampled()

    @property
    def uncertainty(self) -> float:
        """Standard deviation of the value at the start among models of resampled episodes.

        It sees what the data leave open, not what no model of this kind can express.
        """
        return float(self.starts.std(ddof=1))


def _states(observations: Tree) -> FloatArray:
    found = np.asarray(observations)
    return found.reshape(len(found), -1).astype(np.float64)


def _recorded(data: Trajectories, target: Policy) -> tuple[Steps, Probs, int]:
    """The steps as arrays, the target's probabilities of states, and the number of actions."""
    seen = data.observations
    if not isinstance(seen, np.ndarray) or seen.dtype.kind != "f":
        kind = seen.dtype if isinstance(seen, np.ndarray) else type(seen).__name__
        raise ValueError(
            f"observations are {kind}: DynamicsQ needs one array of real numbers; use TabularQ "
            "for whole numbers, LinearQ or NetworkQ for others"
        )
    if not isinstance(target, FinitePolicy):
        raise ValueError(
            f"target is {target!r}, which has no probs: DynamicsQ needs finitely many actions; "
            "use LinearQ or NetworkQ for continuous ones"
        )
    shape, kind = seen.shape[1:], seen.dtype

    def probs(states: FloatArray) -> FloatArray:
        return target.probs(states.reshape(-1, *shape).astype(kind))

    states = _states(seen)
    wrong = ~np.all(np.isfinite(states), axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"observations have {states[row].tolist()} at episode {int(data.episode_ids[row])}, "
            f"step {int(data.steps[row])}: DynamicsQ needs finite numbers"
        )
    actions = probs(states[:1]).shape[1]
    taken = choices(data.actions, data.n_steps, actions)
    last, ended = np.zeros((2, data.n_steps), dtype=np.bool_)
    last[data.offsets[1:] - 1] = True
    ended[data.offsets[1:] - 1] = data.terminated
    return Steps(states, taken, data.rewards, ended, last), probs, actions
