"""Estimate the mean of a function of the return, with a q model.

E h(G) is the value of another problem, in which the last step of an episode pays h(G) and the
others pay nothing. What h(G) will be depends on the return so far, so the q model sees that beside
the observation; the policies, and so the weights, do not. The new state is Markov if the old one
is. Probabilities (h = 1[G < x]), tail means (h = max(q - G, 0)) and variances (h = (G - m)^2) are
such means, and `auto` estimates them: it uses the q model as far as the data bear it out.

A quantile is no mean. The weighted one, x, is corrected by how far the probability up to x is off:
if F(x) is p by the weights and p + d by auto, the level q is looked up at q - d.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.evaluation import evaluate
from ope_gym.inference.errors import cautious_error
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.intervals import Interval
from ope_gym.inference.weighted_returns import WeightedReturns, binomial_interval
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.estimated import fitted_models


@dataclass(frozen=True)
class Blind:
    """Act on the observation alone, where the return so far stands beside it."""

    policy: Policy

    def log_prob(self, observations: Any, actions: Tree) -> FloatArray:
        """Return the log-probability of each action, (n,)."""
        return self.policy.log_prob(observations[0], actions)

    def sample(self, observations: Any, rng: np.random.Generator) -> Tree:
        """Draw one action a row."""
        return self.policy.sample(observations[0], rng)


@dataclass(frozen=True)
class FiniteBlind(Blind):
    """Do the same for a policy over finitely many actions."""

    policy: FinitePolicy

    def probs(self, observations: Any) -> FloatArray:
        """Return the probability of every action, (n, A)."""
        return self.policy.probs(observations[0])


def blind(policy: Policy) -> Blind:
    """Return the policy, for observations that have the return so far beside them."""
    return FiniteBlind(policy) if isinstance(policy, FinitePolicy) else Blind(policy)


@dataclass(frozen=True, eq=False)
class ScoredReturns:
    """Estimate numbers of the distribution of a target's returns, each with its interval.

    A number is None where the episodes agree, so that nothing can be learned, or where it is
    undefined: the weights alone have to do then.

    Args:
        data: recorded episodes, whose observations have the return so far beside them.
        target: blind to it.
        weighted: the returns with their weights.
        options: of `ope_gym.evaluate`.
    """

    data: Trajectories
    target: Blind
    weighted: WeightedReturns
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        data: Trajectories,
        target: Policy,
        gamma: float,
        weighted: WeightedReturns,
        **options: Any,
    ) -> ScoredReturns:
        """Put the discounted return so far beside the observations.

        Args:
            data: recorded episodes.
            target: the policy to evaluate.
            gamma: discount.
            weighted: the returns with their weights.
            options: `origin`, `q_model`, `level` and `seed` of `ope_gym.evaluate`.
        """
        if fitted_models(data.policies):
            raise ValueError(
                "q_model is given, but the propensities are estimated: leave q_model out"
            )
        paid = data.rewards * gamma**data.steps
        before = np.cumsum(paid) - paid
        so_far = before - np.repeat(before[data.offsets[:-1]], data.lengths)
        seen = dataclasses.replace(
            data,
            observations=(data.observations, so_far),
            policies=tuple(blind(policy) for policy in data.policies),
            observation_space=None,
        )
        return cls(seen, blind(target), weighted, options)

    @property
    def level(self) -> float:
        """Confidence level of the intervals."""
        return float(self.options["level"])

    def estimate(self, scores: FloatArray) -> Estimate | None:
        """Estimate the mean of a function of the return.

        Args:
            scores: (n,) its value in each episode, in the order of ascending returns.
        """
        if np.ptp(scores) == 0.0:
            return None
        rewards = np.zeros(self.data.n_steps)
        rewards[self.data.offsets[1:][self.weighted.order] - 1] = scores
        data = dataclasses.replace(self.data, rewards=rewards)
        found = evaluate(data, self.target, "auto", held_out=False, **self.options)["auto"]
        return found if np.isfinite(found.standard_error) else None

    def probability(self, x: float, strict: bool = True) -> tuple[float, Interval] | None:
        """Return the probability of a return below x, or up to x if not strict."""
        found = self._share(x, strict)
        if found is None:
            return None
        return found[0], binomial_interval(*found, self.weighted.ess, self.level)

    def _share(self, x: float, strict: bool) -> tuple[float, float] | None:
        """Return that probability and its standard error."""
        returns = self.weighted.returns
        found = self.estimate(np.where(returns < x if strict else returns <= x, 1.0, 0.0))
        if found is None:
            return None
        error = max(found.standard_error, cautious_error(found.influence, found.sample.strata))
        return min(max(found.value, 0.0), 1.0), error

    def quantile(self, q: float) -> tuple[float, Interval] | None:
        """Return the quantile of a level.

        The interval is that of order statistics: of m independent episodes, so many that they
        leave the error of the probability, k have returns up to the quantile, and k is binomial
        with the probability q.
        """
        from scipy.special import bdtrik

        at = self.weighted.quantile(q)
        found = self._share(at, strict=False)
        if found is None or not found[1] > 0.0:
            return None
        p, error = found
        off = p - self.weighted.probability(at, strict=False)
        size, tail = q * (1.0 - q) / error**2, (1.0 - self.level) / 2
        least, most = bdtrik([tail, 1.0 - tail], size, q) / size + [0.0, 1.0 / size]
        low = self._return(least - off) if least > 0.0 else -np.inf  # NaN: too few episodes
        high = self._return(most - off) if most < 1.0 else np.inf
        value = min(max(self.weighted.quantile(q - off), low), high)
        return value, Interval(low, high, self.level, "binomial")

    def _return(self, level: float) -> float:
        """Return the weighted quantile, infinite beyond the returns."""
        if level <= 0.0:
            return -np.inf
        return self.weighted.quantile(level) if level < 1.0 else np.inf

    def cvar(self, tail: float) -> tuple[float, Interval] | None:
        """Return the mean of the worst share, q - E max(q - G, 0) / share at its quantile q."""
        if self.weighted.majority(tail) > 0.0:
            return None
        edge = self.weighted.quantile(tail)
        found = self.estimate(np.maximum(edge - self.weighted.returns, 0.0) / tail)
        if found is None:
            return None
        low, high = edge - found.interval.high, edge - found.interval.low
        return edge - found.value, Interval(low, high, self.level, found.interval.method)

    def variance(self, mean: float) -> tuple[float, Interval] | None:
        """Return the mean of the squared distance to the mean return."""
        found = self.estimate((self.weighted.returns - mean) ** 2)
        if found is None:
            return None
        return max(found.value, 0.0), dataclasses.replace(
            found.interval, low=max(found.interval.low, 0.0)
        )
