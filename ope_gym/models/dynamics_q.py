"""DynamicsQ: learn how the environment moves, and evaluate the target inside what was learned.

The learned environment is that of `ope_gym.models.dynamics`. The target's value V(s, t) = φ(s, t)·θ
in it is fitted to the returns of episodes played there, after what luck gave is taken out. With q
and v made from V in the model, m_u = q(s_u, a_u) - v(s_u) has mean 0 whatever θ is, so

    y_t = sum_{u >= t} γ^(u-t) sum_a π(a|s_u) r(s_u, a)
    x_t = φ(s_t) + sum_{u >= t} γ^(u-t+1) [1(on) φ(s_{u+1}) - sum_a π(a|s_u) P(on|s_u, a) φ(s'_a)]

satisfy y_t = x_t·θ without any noise if V is right, and otherwise up to what φ cannot express.
Least squares of y on x is stable for γ = 1, unlike sweeps of fitted values, and far less noisy than
regressing returns on φ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym.arguments import whole
from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Problem, QModel, of_chosen
from ope_gym.models.dynamics import Environment, Played, Steps, learn, sampling
from ope_gym.models.features import monomials
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.numerics import choices

_SLOPES = 3000  # played states at which the slope of V is taken
_WIDEST = 1000  # monomials of a state
_CLIP = 4.0  # standard deviations at which states are clipped
_RIDGE = 1e-3  # penalty of the coefficients of V
_WIDTH = 2.0  # of a wave before the metric is known, in standard deviations
_SHIFT = 0.05  # for slopes of V, in standard deviations

Probs: TypeAlias = Callable[[FloatArray], FloatArray]
"""From states (n, d) to probabilities (n, A)."""


@dataclass(frozen=True)
class DynamicsQ(QModel):
    """q from a learned model of the environment.

        q(s, a, t) = r(s, a) + γ P(on | s, a) V(s + f_a(s), t + 1)

    f, r and the probability that the episode goes on are learned from the recorded steps, V from
    episodes of the target that are played in this model (see above).

    Use it where states are a few real numbers that move smoothly, as those of a mechanical system:
    it learns from all steps of all policies alike, and reaches states that the target visits but
    the data do not. Weakness: it predicts the mean next state, so it leaves out the noise of the
    environment; a state that is not Markov (frames, hidden parts) misleads it; it does not know of
    endings that no recorded episode reached. Cost: O(S F² + episodes · length · A · G) with F
    monomials of the state and G value features; one to two seconds for 20,000 steps of CartPole.

    Args:
        degree: degree of the polynomials of the transitions.
        value_degree: degree of the polynomials of V.
        cosines: number of random cosine features of V.
        episodes: how many are played from recorded first states; a quarter more start from any
            recorded state.
        rows: number of played steps that V is fitted to.
    """

    degree: int = 3
    value_degree: int = 3
    cosines: int = 200
    episodes: int = 800
    rows: int = 30_000

    def __post_init__(self) -> None:
        least = dict(degree=1, value_degree=0, cosines=0, episodes=1, rows=1)
        for name, bound in least.items():
            whole(name, getattr(self, name), bound)

    def fit(self, data: Trajectories, problem: Problem) -> DynamicsValues:
        """Learn from all episodes of `data`."""
        gamma, horizon, rng = problem.gamma, problem.horizon, problem.rng
        if not len(data):
            raise ValueError("data is empty: DynamicsQ learns from recorded episodes")
        if horizon < (longest := int(data.lengths.max())):
            raise ValueError(f"horizon={horizon} is less than the longest episode, {longest} steps")
        steps, probs = recorded_steps(data, problem.target)
        if (width := comb(steps.width + self.degree, self.degree)) > _WIDEST:
            raise ValueError(
                f"observations of {steps.width} numbers have {width} monomials of "
                f"degree={self.degree}, more than {_WIDEST}: lower the degree, or use NetworkQ"
            )
        environment = learn(steps, self.degree, ends_by_action=True)
        first = data.offsets[:-1][np.arange(self.episodes) % len(data)]
        begin = np.append(first, rng.integers(data.n_steps, size=self.episodes // 4))
        played = environment.play(
            sampling(problem.target, data.observations, rng),
            steps.states[begin],
            times=data.steps[begin],
            gamma=gamma,
            horizon=horizon,
            rng=rng,
        )
        features, theta = self._value(environment, probs, played, problem)
        lowest, highest = min(data.rewards.min(), 0.0), max(data.rewards.max(), 0.0)
        bounds = np.outer([lowest, highest], annuity(gamma, horizon))
        return DynamicsValues(environment, features, theta, gamma, horizon, bounds)

    def _value(
        self, environment: Environment, probs: Probs, played: Played, problem: Problem
    ) -> tuple[ValueFeatures, FloatArray]:
        """Fit φ and θ: first roughly, to learn along which directions V changes."""
        horizon, rng = problem.horizon, problem.rng
        states, shape = played.states, (horizon, self.value_degree, self.cosines, rng)
        fit = partial(
            fit_value,
            environment,
            probs,
            played=played,
            gamma=problem.gamma,
            rows=self.rows,
            rng=rng,
        )
        features = ValueFeatures.around(states, *shape)
        theta = fit(features, luck_out=False)
        some = rng.integers(len(states), size=_SLOPES)
        metric = learn_metric(features, theta, states[some], played.times[some])
        features = ValueFeatures.around(states, *shape, metric)
        return features, fit(features)


@dataclass(frozen=True, eq=False)
class DynamicsValues(ActionValues):
    """The fitted q of DynamicsQ.

    Args:
        environment: what was learned.
        features: φ of V.
        theta: (F,) V = φ·θ.
        gamma: discount.
        horizon: longest possible episode.
        bounds: (2, horizon + 1) least and largest return by the number of steps left.
    """

    environment: Environment
    features: ValueFeatures
    theta: FloatArray
    gamma: float
    horizon: int
    bounds: FloatArray

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return the expected return (n, A) from step `steps` on, after every action."""
        following, rewards, ends = self.environment.outcomes(_states(observations))
        after = np.stack([self.value(states, steps + 1) for states in following])
        rewards = rewards + self.environment.terminal_bonus * ends
        return np.asarray((rewards + self.gamma * (1.0 - ends) * after).T)

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return the expected return (n,) from step `steps` on, after `actions`."""
        return of_chosen(self.q_all(observations, steps), actions)

    def value(self, states: FloatArray, steps: IntArray) -> FloatArray:
        """Return V (n,) before the action of step `steps`, clipped to what the rewards allow."""
        low, high = self.bounds[:, np.maximum(self.horizon - steps, 0)]
        return np.clip(self.theta @ self.features(states, steps), low, high)


@dataclass(frozen=True, eq=False)
class ValueFeatures:
    """φ(s, t): products of z and random cosines of z; z is the standardised state and time left.

    Zero when no time is left.

    Args:
        centre: (d,) of the states.
        scale: (d,) of the states.
        horizon: longest possible episode.
        degree: Degree of the products.
        waves: (cosines, d + 1) directions of the cosines.
        phases: (cosines,).
    """

    centre: FloatArray
    scale: FloatArray
    horizon: int
    degree: int
    waves: NDArray[np.float32]
    phases: NDArray[np.float32]

    @classmethod
    def around(
        cls,
        states: FloatArray,
        horizon: int,
        degree: int,
        cosines: int,
        rng: np.random.Generator,
        metric: FloatArray | None = None,
    ) -> ValueFeatures:
        """Return features for `states`; a metric (d + 1, d + 1) stretches some directions."""
        if metric is None:
            metric = np.eye(states.shape[1] + 1) / _WIDTH
        waves = rng.standard_normal((cosines, states.shape[1] + 1)) @ metric.T
        phases = rng.uniform(0.0, 2 * np.pi, cosines)
        scale = states.std(axis=0)
        return cls(
            states.mean(axis=0),
            np.where(scale > 0, scale, 1.0),
            horizon,
            degree,
            waves.astype(np.float32),
            phases.astype(np.float32),
        )

    def __call__(self, states: FloatArray, times: IntArray) -> NDArray[np.float32]:
        """Return the features (F, n): a row a feature, which is faster."""
        out = self.of(self.coordinates(states, times))
        out[:, times >= self.horizon] = 0.0
        return out

    def coordinates(self, states: FloatArray, times: IntArray) -> NDArray[np.float32]:
        """Return the standardised state and time left, z (d + 1, n)."""
        z = np.empty((states.shape[1] + 1, len(states)), dtype=np.float32)
        z[:-1] = np.clip((states - self.centre) / self.scale, -_CLIP, _CLIP).T
        z[-1] = 2.0 * (self.horizon - times) / self.horizon - 1.0
        return z

    def of(self, z: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features (F, n) of coordinates."""
        products = monomials(z, self.degree)
        out = np.empty((len(products) + len(self.phases), z.shape[1]), dtype=np.float32)
        out[: len(products)] = products
        angles = out[len(products) :]
        np.matmul(self.waves, z, out=angles)
        angles += self.phases[:, None]
        np.cos(angles, out=angles)
        return out


def learn_metric(
    features: ValueFeatures, theta: FloatArray, states: FloatArray, times: IntArray
) -> FloatArray:
    """Return the root (d + 1, d + 1) of the mean of ∇V ∇V', scaled to mean square 1 overall.

    V changes fast along its large directions: cosines stretched by it spend their waves there.
    """
    z = features.coordinates(states, times)
    shifts = _SHIFT * np.eye(len(z), dtype=np.float32)[:, :, None]
    slopes = np.stack([theta @ (features.of(z + e) - features.of(z - e)) for e in shifts])
    size, axes = np.linalg.eigh(slopes @ slopes.T)
    if not size[-1] > 0:
        return np.eye(len(z))
    root = (axes * np.sqrt(np.maximum(size, 1e-9 * size[-1]))) @ axes.T
    return np.asarray(root * np.sqrt(len(size)) / np.linalg.norm(root))


def fit_value(
    environment: Environment,
    probs: Probs,
    features: ValueFeatures,
    *,
    played: Played,
    gamma: float,
    rows: int,
    rng: np.random.Generator,
    luck_out: bool = True,
) -> FloatArray:
    """Return θ (F,), by least squares of y on x over about `rows` played steps and all first ones.

    First steps at time 0 together weigh half as much as all others, since the value is theirs.

    Args:
        environment: where they were played.
        probs: Probabilities by the target.
        features: φ.
        played: episodes.
        gamma: discount.
        rows: played steps to fit to.
        rng: chooses them.
        luck_out: False for returns on x = φ: cheap, but as noisy as these are.
    """
    total, count = played.times.size, played.returns.size
    share, steps = min(1.0, rows / total), played.longest_first()
    start = played.times[steps[0]] == 0
    heavy = max(1.0, 0.5 * share * total / max(int(np.count_nonzero(start)), 1))
    size = features(played.states[:1], played.times[:1]).shape[0]
    y, luck = np.zeros(count), np.zeros((size, count), dtype=np.float32)
    square, product, mass = np.zeros((size, size)), np.zeros(size), 0.0
    for u in range(len(steps) - 1, -1, -1):
        states, times = played.states[steps[u]], played.times[steps[u]]
        m = times.size
        if not luck_out:
            y[:m] = played.ahead[steps[u]]
        else:
            following, rewards, ends = environment.outcomes(states)
            chances = probs(states).T
            paid = chances * (rewards + environment.terminal_bonus * ends)
            y[:m] = gamma * y[:m] + paid.sum(axis=0)
            part = -gamma * chances * (1.0 - ends)  # (A, m)
            part[played.actions[steps[u]], np.arange(m)] += gamma * ~played.ended[steps[u]]
            luck[:, :m] *= np.float32(gamma)
            for factor, after in zip(part.astype(np.float32), following, strict=True):
                phi = features(after, times + 1)
                phi *= factor
                luck[:, :m] += phi
        chosen = np.flatnonzero(rng.random(m) < share) if u else np.arange(m)
        if not chosen.size:
            continue
        x = features(states[chosen], times[chosen]) + luck[:, chosen]
        weight = np.where(start, heavy, 1.0) if u == 0 else np.ones(chosen.size)
        weighted = x * weight.astype(np.float32)
        square += weighted @ x.T
        product += weighted @ y[chosen].astype(np.float32)
        mass += float(weight.sum())
    penalty = np.full(size, _RIDGE * mass)
    penalty[0] *= 1e-6  # the constant is not penalised
    return np.asarray(np.linalg.solve(square + np.diag(penalty), product))


def _states(observations: Tree) -> FloatArray:
    states = np.asarray(observations)
    return states.reshape(len(states), -1).astype(np.float64)


def recorded_steps(data: Trajectories, target: Policy) -> tuple[Steps, Probs]:
    """Return the steps to learn from, and the target's probabilities."""
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
    known, terminated = (
        np.ones(data.n_steps, dtype=np.bool_),
        np.zeros(data.n_steps, dtype=np.bool_),
    )
    last = data.offsets[1:] - 1
    known[last], terminated[last] = False, data.terminated
    following = np.append(states[1:], states[-1:], axis=0)
    following[last] = states[last]
    return Steps(states, following, known, taken, data.rewards, terminated, actions), probs
