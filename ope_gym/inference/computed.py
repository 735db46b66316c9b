"""The numbers that every estimator hands over, from which the rest follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.errors import spread_of
from ope_gym.verdict import Reason


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of an estimate; those that are alike share this object, compared by identity.

    Args:
        sums: (3, T) sum w, sum w^2, sum w r at t, scaled so that the largest weight is 1.
        log_last: (n,) log of the last weight of each trajectory, after the cap.
        capped_share: share of the steps whose weight was clipped by the cap.
    """

    sums: FloatArray
    log_last: FloatArray
    capped_share: float = 0.0

    @cached_property
    def last(self) -> FloatArray:
        """(n,) the last weights over the largest of them; zeros if all are."""
        return np.exp(self.log_last - (self.top if np.isfinite(self.top) else 0.0))

    @cached_property
    def top(self) -> float:
        """Log of the largest last weight."""
        return float(self.log_last.max())

    @cached_property
    def mean(self) -> float:
        """Mean of the last weights, 1 in expectation if they are plain."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.exp(self.top) * self.last.sum() / self.last.size)

    @cached_property
    def mean_error(self) -> float:
        """Standard error of that mean."""
        return spread_of(self.last).cautious * (self.mean / self.last.mean()) if self.mean else 0.0

    @property
    def ess(self) -> FloatArray:
        """(T,) effective sample size (sum w)^2 / sum w^2 at each step; 0 without any weight."""
        weight, square = self.sums[0], self.sums[1]
        ess: FloatArray = np.divide(weight**2, square, out=np.zeros_like(weight), where=square > 0)
        return ess


@dataclass(frozen=True, eq=False)
class Computed:
    """The numbers of an estimator; n trajectories, T the longest episode.

    Args:
        value: the estimate.
        influence: (n,) psi_i. Plain: J is their mean. Normalised: they average to 0.
        weights: those it rests on.
        replicates: (R,) of the bootstrap; None without one.
        bets: (2, n) sums for betting; None without it.
        spread: (n,) the values whose spread is the error, where it is not the influence.
        pooled: the error is that over all trajectories, not inside strata.
        reasons: what the estimator found out about itself.
        report: numbers of its own worth showing.
        bias: bound on a bias that the influence values do not show; it widens the error.
        freedom: effective number of trajectories for the interval; None for that of the weights.
        share: that of a model in it, 1 for the model alone.
        plain: what the weights alone say, with their own bias, if it rests on a model as well.
        model: value and influence values (n,) of that model alone.
    """

    value: float
    influence: FloatArray
    weights: Weights
    replicates: FloatArray | None = None
    bets: FloatArray | None = None
    spread: FloatArray | None = None
    pooled: bool = False
    reasons: tuple[Reason, ...] = ()
    report: Mapping[str, float] = field(default_factory=dict)
    bias: float = 0.0
    freedom: float | None = None
    share: float = 0.0
    plain: Computed | None = None
    model: tuple[float, FloatArray] | None = None

    @property
    def by_model(self) -> bool:
        """Whether it rests on a model more than on the weights."""
        return self.share >= 0.5
