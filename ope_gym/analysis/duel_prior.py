"""Learn from recorded episodes what makes a duel short: controls, expected difference, spread.

The control of an episode of policy e is the luck of its own actions, as a q model sees it:

    C = sum_t gamma^t eta_t (q(s_t, a_t) - v(s_t)),     v(s) = sum_a e(a|s) q(s, a)

Given s_t, the action is drawn from e, which is known: whatever q says, each term has mean 0. So C
has mean 0 exactly, whether q is right or not and whether the recorded episodes look like those of e
or not; a good q makes C explain much of the return. (Starts and the chance of the environment need
no such trick: both policies of a round get the same seeds. The mean of v over start states would
have to be known, and is not.) eta_t in [0, 1] keeps |C| within its limit: it depends on what was
before the action alone, on C so far and on the largest term that any action could bring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.data.trajectories import Trajectories
from ope_gym.evaluation import Evaluator
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.rounds import weight_moments
from ope_gym.inference.sequences import Prior
from ope_gym.models import default_model, named_model
from ope_gym.models.base import SAMPLES, ActionValues, Problem, QModel, cross_fit, of_chosen, q_all
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.scale.sources import Source
from ope_gym.weights.behaviours import behaviours_of

TRUST = {"green": 0.3, "amber": 0.2, "red": 0.0}
_REACH = 1.5  # limit of a control, in standard deviations
_ROUNDS = 5.0  # rounds that recorded episodes count for
_LEAST = 0.05  # share of the variance that a control must explain to be worth its range


@dataclass(frozen=True, eq=False)
class Control:
    """Compute the control of fresh episodes of one policy.

    Args:
        policy: that plays.
        values: the fitted q.
        gamma: discount.
        bounds: (2, horizon + 1) lowest and highest return of so many steps, to clip q.
        limit: of |C|.
        scale: standard deviation of a term, for policies without a finite set of actions.
    """

    policy: Policy
    values: ActionValues
    gamma: float
    bounds: FloatArray
    limit: float
    scale: float

    def of(self, data: Trajectories, rng: np.random.Generator) -> FloatArray:
        """Return (n,) the controls of episodes that the policy played.

        Args:
            data: the episodes.
            rng: of actions to average over, where there is no finite set of them; new for every
                round, or the terms would not have mean 0.
        """
        terms, largest = self._terms(data, rng)
        return bounded_sums(terms, largest, data.offsets, self.gamma, self.limit)

    def _terms(self, data: Trajectories, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """Return (S,) terms q - v, and the largest that any action could have brought."""
        left = np.clip(self.bounds.shape[1] - 1 - data.steps, 1, None)
        low, high = self.bounds[:, left]
        if isinstance(self.policy, FinitePolicy):
            probs = self.policy.probs(data.observations)
            every = q_all(self.values, data.observations, data.steps, probs.shape[1])
            every = np.clip(every, low[:, None], high[:, None])
            apart = every - np.einsum("na,na->n", probs, every)[:, None]
            return of_chosen(apart, data.actions), np.abs(np.where(probs > 0, apart, 0)).max(axis=1)
        return self._drawn_terms(data, low, high, rng)

    def _drawn_terms(
        self, data: Trajectories, low: FloatArray, high: FloatArray, rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        """Return the same from actions drawn to average over, clipped around one of them."""
        width = 1.5 * self.scale

        def values(actions: batches.Tree) -> FloatArray:
            return np.clip(self.values.q(data.observations, actions, data.steps), low, high)

        centre = values(self.policy.sample(data.observations, rng))
        mean = np.zeros(data.n_steps)
        for _ in range(SAMPLES):
            drawn = values(self.policy.sample(data.observations, rng))
            mean += np.clip(drawn - centre, -width, width) / SAMPLES
        own = np.clip(values(data.actions) - centre, -width, width)
        return own - mean, np.full(data.n_steps, 2 * width)


def bounded_sums(
    terms: FloatArray, largest: FloatArray, offsets: IntArray, gamma: float, limit: float
) -> FloatArray:
    """Return (n,) sum_t gamma^t eta_t terms_t with eta_t = min(1, (limit - |C|) / largest_t).

    Args:
        terms: (S,) of conditional mean 0.
        largest: (S,) bound of each, known before it.
        offsets: (n + 1,).
        gamma: discount.
        limit: bound of the sums, 0 or more.
    """
    lengths = np.diff(offsets)
    found = np.zeros(lengths.size)
    for t in range(int(lengths.max())):
        going = np.flatnonzero(lengths > t)
        rows, now = offsets[going] + t, found[going]
        room, bound = np.maximum(limit - np.abs(now), 0.0), gamma**t * largest[rows]
        eta = np.divide(room, bound, out=np.ones(going.size), where=bound > room)
        found[going] = now + gamma**t * eta * terms[rows]
    return found


@dataclass(frozen=True, eq=False)
class Expected:
    """Hold what recorded episodes say about one of the policies.

    Args:
        estimate: its value by auto.
        control: of its fresh episodes; None if no q model can be had.
        coefficient: with which the control explains the return.
        variance: of the control.
        rest: variance of the return that the control leaves.
        log_weights: (n,) of the recorded episodes.
    """

    estimate: Estimate
    control: Control | None
    coefficient: float
    variance: float
    rest: float
    log_weights: FloatArray


def expect(
    source: Source,
    policies: tuple[Policy, Policy],
    gamma: float,
    reward_range: tuple[float, float] | None,
    q_model: QModel | str | None,
    seed: int,
    middle: float,
) -> tuple[Prior, tuple[Control | None, Control | None]]:
    """Return the prior of a duel and the controls of both policies, from recorded episodes."""
    assert source.data is not None  # all of it is in memory
    returns = source.data.returns(gamma)
    evaluator = Evaluator(source, ["auto", "NFIS"], gamma=gamma, q_model=q_model, seed=seed)
    a, b = (_expect(evaluator, p, reward_range, q_model) for p in policies)
    apart = a.estimate.difference(b.estimate)
    colours = {a.estimate.verdict.colour, b.estimate.verdict.colour}
    trust = min(TRUST[colour] for colour in colours)
    known = trust > 0.0 and np.isfinite(apart.value) and np.isfinite(apart.standard_error)
    used = [e for e in (a, b) if e.control is not None]
    prior = Prior(
        apart.value if known else 0.0,
        apart.standard_error if known else np.inf,
        float(np.sqrt(a.rest + b.rest)),
        np.array([e.coefficient for e in used]),
        np.array([e.variance for e in used]),
        _moments(a, b, returns, middle) if trust > 0.0 else Prior().moments,
        _ROUNDS if trust > 0.0 else 1.0,
        trust if known else 0.0,
    )
    return prior, (a.control, b.control)


def _moments(a: Expected, b: Expected, returns: FloatArray, middle: float) -> FloatArray:
    """Return what `weight_moments` would be in the mean over fresh single episodes."""
    both = np.logaddexp(a.log_weights, b.log_weights)
    weights = np.exp(both - both.max())
    apart = np.where(weights > 0.0, a.log_weights - b.log_weights, 0.0)
    terms = weight_moments(apart, returns - middle, np.full(returns.size, 0.5))
    return np.asarray(np.einsum("n,nhk->hk", weights / weights.sum(), terms))


def _expect(
    evaluator: Evaluator,
    policy: Policy,
    reward_range: tuple[float, float] | None,
    q_model: QModel | str | None,
) -> Expected:
    """Learn q, and how well the control explains the returns of the reweighted episodes."""
    data, options = evaluator.source.data, evaluator.options
    assert data is not None  # all of it is in memory
    found = evaluator.evaluate(policy)
    estimate, log_w = found["auto"], found["NFIS"].diagnostics.log_last
    returns = data.returns(options.gamma)
    weights = _weights(log_w, estimate)
    spread = float(weights @ (returns - weights @ returns) ** 2)
    model = default_model(data, policy) if q_model == "default" else q_model
    model = named_model(model) if isinstance(model, str) else model
    if model is None or len(data) < 2:
        return Expected(estimate, None, 0.0, 0.0, spread, log_w)
    rng = np.random.default_rng(options.seed)
    longest = evaluator.source.roster.longest
    problem = Problem(policy, options.gamma, longest, rng)
    base = cross_fit(model, data, behaviours_of(data).ids, problem)
    terms = (base.q - base.v) * options.gamma**data.steps
    luck = np.add.reduceat(terms, data.offsets[:-1])
    variance = float(weights @ luck**2)
    if not variance > 0.0:
        return Expected(estimate, None, 0.0, 0.0, spread, log_w)
    apart = returns - weights @ returns
    coefficient = float(np.clip(weights @ (apart * luck) / variance, 0.0, 1.0))
    rest = float(weights @ (apart - coefficient * luck) ** 2)
    if estimate.verdict.colour != "red" and rest > (1.0 - _LEAST) * spread:
        return Expected(estimate, None, 0.0, 0.0, spread, log_w)
    low, high = data.rewards.min(), data.rewards.max()
    if reward_range is not None:
        low, high = reward_range
    unit = annuity(options.gamma, longest)
    control = Control(
        policy,
        model.fit(data, problem),
        options.gamma,
        np.stack([min(low, 0.0) * unit, max(high, 0.0) * unit]),
        _REACH * float(np.sqrt(variance)),
        float(np.sqrt(np.mean((base.q - base.v) ** 2))),
    )
    return Expected(estimate, control, coefficient, variance, rest, log_w)


def _weights(log_w: FloatArray, estimate: Estimate) -> FloatArray:
    """Return normalised weights (n,); equal ones if these leave next to nothing."""
    top = float(log_w.max())
    if estimate.verdict.colour == "red" or not np.isfinite(top):
        return np.full(log_w.size, 1.0 / log_w.size)
    weights = np.exp(log_w - top)
    return np.asarray(weights / weights.sum())
