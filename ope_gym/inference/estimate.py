"""Hold the result of one estimator, the sample it rests on, and differences of two results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, finite
from ope_gym.inference.diagnostics import Diagnostics
from ope_gym.inference.errors import spread_of, uncorrelated
from ope_gym.inference.intervals import (
    Interval,
    ess_t,
    percentile,
    whatever_bias,
    widened,
    with_bias,
)
from ope_gym.verdict import MODEL_DOUBTS, Reason, Verdict

# What the learner saw of the episodes:
#   held-out   it never trained on them: everything classical holds
#   fresh      one policy recorded them all, and the target was fixed in advance: the same
#   adaptive   policies learned from earlier episodes, the target was fixed in advance: basic
#              weights stay unbiased; weights against a mixture do not, since later policies in
#              their denominator depend on earlier rewards
#   in-sample  the target was trained on these very episodes: estimates are optimistic, some a
#              little and some much; only held-out episodes repair it
#   unstated   nothing is known
REGIMES = ("held-out", "fresh", "adaptive", "in-sample", "unstated")
IN_SAMPLE = ("in_sample", "in_sample_though_held_out")  # reasons of that regime
LABELS = {"in-sample": "in-sample, optimistic"}


def regime_label(regime: str) -> str:
    """Return the name of a regime as reports show it."""
    return LABELS.get(regime, regime)


def regime_doubts(regime: str, scheme: str, held_out: bool = False) -> tuple[Reason, ...]:
    """Return the reasons why a result of this regime is amber at best; empty if it is not.

    Args:
        regime: One of `REGIMES`.
        scheme: Weighting scheme; empty without weights.
        held_out: Whether some of the episodes are held out, so that they could be used alone.
    """
    if regime == "in-sample":
        return (Reason("in_sample_though_held_out" if held_out else "in_sample"),)
    if regime == "adaptive" and scheme != "basic":
        return (Reason("adaptive"),)
    return ()


@dataclass(frozen=True)
class PartialMixture:
    """Describe mixtures of a part of the behaviours; see `ope_gym.weights.behaviours`.

    Args:
        behaviours: number of behaviours recorded.
        groups: number of groups into which they are split.
        size: behaviours of the largest group.
    """

    behaviours: int
    groups: int
    size: int

    @classmethod
    def of(cls, groups: IntArray) -> PartialMixture | None:
        """Describe the groups (K,) of the behaviours; None if there is but one group.

        >>> print(PartialMixture.of(np.array([0, 1, 0])))
        partial mixtures of 2 of 3 behaviours
        """
        sizes = np.bincount(groups)
        return cls(groups.size, sizes.size, int(sizes.max())) if sizes.size > 1 else None

    def __str__(self) -> str:
        return f"partial mixtures of {self.size:,} of {self.behaviours:,} behaviours"


@dataclass(frozen=True)
class Behaviour:
    """A policy, a sequence of policies or a logger that acted in some of the episodes.

    Args:
        name: As tables show it: "policy 3", "policy 3, then 4 from step 17", "Ward A (fold 2)".
        policies: Numbers of the policies that acted, one after the other.
        logger: Name of the logger whose propensities were estimated; empty if they were recorded.
    """

    name: str
    policies: tuple[int, ...] = ()
    logger: str = ""

    @property
    def collector(self) -> str:
        """Whom to ask for more such episodes; empty for a sequence of policies."""
        return "" if len(self.policies) > 1 else self.logger or self.name


@dataclass(frozen=True, eq=False)
class Sample:
    """Describe the trajectories that estimates rest on.

    Args:
        trajectories: number of episodes.
        steps: number of steps in all of them.
        strata: (n,) the groups within which trajectories are alike.
        behaviours: (K,) who acted.
        counts: (K,) trajectories of each.
        gamma: discount.
        regime: what the learner saw of the data, one of `REGIMES`.
        fingerprint: equal for equal data, so that differences are only taken between such.
        mixture: where weights are against parts of the behaviours; None where against all.
        q_model: name of the q model; None if no estimator uses one.
        propensities: the model that estimated them; None if they were recorded.
    """

    trajectories: int
    steps: int
    strata: IntArray = field(repr=False)
    behaviours: tuple[Behaviour, ...] = field(repr=False)
    counts: IntArray = field(repr=False)
    gamma: float
    regime: str
    fingerprint: tuple[float, ...] = field(repr=False)
    mixture: PartialMixture | None = None
    q_model: str | None = None
    propensities: Reason | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return how much data there is, as plain numbers and strings."""
        return {
            "trajectories": self.trajectories,
            "steps": self.steps,
            "behaviours": {
                behaviour.name: count
                for behaviour, count in zip(self.behaviours, self.counts.tolist(), strict=True)
            },
            "gamma": self.gamma,
            "propensities": str(self.propensities) if self.propensities else None,
        }


@dataclass(frozen=True, eq=False)
class Difference:
    """Hold a paired difference of two estimates on the same trajectories: minuend - subtrahend."""

    minuend: str
    subtrahend: str
    value: float
    standard_error: float
    interval: Interval

    def __str__(self) -> str:
        low, high, level = self.interval.low, self.interval.high, self.interval.level
        return (
            f"{self.minuend} - {self.subtrahend}: {self.value:.6g} ± {self.standard_error:.3g}, "
            f"{100 * level:g} % [{low:.6g}, {high:.6g}]"
        )


@dataclass(frozen=True, eq=False)
class Estimate:
    """Hold the value of a policy by one estimator.

    With interval=None there is the value alone: error and interval are NaN, and diagnostics and
    verdict are computed from the weights when you read them.

    Args:
        name: name of the estimator.
        value: the estimate; NaN if the data do not support one.
        standard_error: spread of the influence values within strata; NaN if undefined.
        interval: confidence interval, with `low`, `high` and `level`.
        diagnostics: diagnostics of the weights.
        verdict: whether to trust it, and why.
        influence: (n,) influence value of each trajectory; empty where they were not needed.
        replicates: (R,) bootstrap replicates, if the interval is a bootstrap.
        sample: the data it rests on.
        seed: seed of the bootstrap draws.
        report: numbers that only this estimator has: for "auto", the share `s` of the model in it.
        fresh_episodes: number of fresh episodes of the target that would tell as much: the
            variance of its return over the squared standard error; NaN if unknown.
        unseen: by how much outcomes with a probability of 1 / ESS that were not seen would lower
            and raise the value.
        bias: bound on a bias that the influence values do not show; it is in the standard error.
        freedom: effective number of trajectories where it rests on more than the weights; None for
            that of the weights.
        share: that of a model in the estimate, 1 for the model alone.
        breakdown: bias of the model up to which the interval misses at most twice as often as it
            should; infinite where no model is in it.
        model_free: interval that holds whatever the bias of the model; None where no model is in
            the estimate, or no weights.
        plain: what the weights alone say.
        lost: by how much the ends of the interval are further out because the target takes actions
            that no recorded policy takes.
    """

    name: str
    value: float
    standard_error: float
    interval: Interval
    diagnostics: Diagnostics = field(repr=False)
    verdict: Verdict
    influence: FloatArray = field(repr=False)
    sample: Sample = field(repr=False)
    replicates: FloatArray | None = field(default=None, repr=False)
    seed: int | None = field(default=None, repr=False)
    report: dict[str, float] = field(default_factory=dict, repr=False)
    fresh_episodes: float = np.nan
    unseen: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    bias: float = field(default=0.0, repr=False)
    freedom: float | None = field(default=None, repr=False)
    lost: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    share: float = field(default=0.0, repr=False)
    breakdown: float = field(default=np.inf, repr=False)
    model_free: Interval | None = field(default=None, repr=False)
    plain: Estimate | None = field(default=None, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make diagnostics and verdict of a value alone when the first of them is read."""
            judge = self.__dict__.get("_judge")
            if judge is None or name not in ("diagnostics", "verdict"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.__dict__["diagnostics"], self.__dict__["verdict"] = judge()
            return self.__dict__[name]

    def judged_by(self, judge: Callable[[], tuple[Diagnostics, Verdict]]) -> Estimate:
        """Let diagnostics and verdict be made when they are read; return the estimate itself."""
        del self.__dict__["diagnostics"], self.__dict__["verdict"]
        self.__dict__["_judge"] = judge
        return self

    @property
    def effective(self) -> float:
        """Effective number of trajectories behind its interval."""
        return self.diagnostics.ess if self.freedom is None else self.freedom

    @property
    def by_model(self) -> bool:
        """Whether it rests on a model more than on the weights."""
        return self.share >= 0.5

    @property
    def decisive(self) -> Estimate:
        """The estimate to decide by: without its model where that is not confirmed."""
        codes = {reason.code for reason in self.verdict.reasons}
        free = self.model_free
        if not (self.by_model and codes & MODEL_DOUBTS) or free is None or self.plain is None:
            return self
        known = bool(np.isfinite(free.low))  # without any weights the model is all there is
        return dataclasses.replace(self.plain, name=self.name, interval=free) if known else self

    def difference(self, other: Estimate) -> Difference:
        """Return the paired difference self - other, of two targets or two estimators.

        Its interval has the percentiles of the shared bootstrap draws where both have them; else it
        is ess-t, from the influence values. Bounds on the biases widen it, because the two biases
        need not cancel, and so does what the episodes cannot show of either target.
        """
        self._refuse_unlike(other)
        value = self.value - other.value
        spread = spread_of(self.influence - other.influence, self.sample.strata)
        error, level = spread.error, self.interval.level
        mine, theirs = self.replicates, other.replicates
        draws = None
        if mine is not None and theirs is not None and self.seed == other.seed:
            draws = mine - theirs if mine.size == theirs.size else None
        ess = min(self.effective, other.effective)
        equal = self.value == other.value and np.array_equal(self.influence, other.influence)
        bias = 0.0 if equal else float(np.hypot(self.bias, other.bias))

        def ends(level: float) -> Interval:
            if draws is None:
                interval = ess_t(value, spread.cautious, ess, level, spread.tails)
            else:
                interval = percentile(draws, level)
            return with_bias(interval, value, bias)

        interval = ends(level)
        if not equal:
            error = float(np.hypot(error, bias))
            unseen = self.unseen[0] + other.unseen[1], self.unseen[1] + other.unseen[0]
            interval = widened(ends, value, level, ess, unseen)
            low = interval.low - self.lost[0] - other.lost[1]
            high = interval.high + self.lost[1] + other.lost[0]
            interval = dataclasses.replace(interval, low=low, high=high)
        first, second = self.decisive, other.decisive
        if first is not self or second is not other:  # whatever the models
            plain = first.difference(second)
            model = value, self.influence - other.influence
            weights = plain.value, first.influence - second.influence
            guess = uncorrelated(model, weights, self.sample.strata)
            interval = whatever_bias(plain.interval, plain.value, guess)
        return Difference(self.name, other.name, value, error, interval)

    def _refuse_unlike(self, other: Estimate) -> None:
        """Raise if the two estimates cannot be paired."""
        for one in (self, other):
            if one.interval.method == "none":
                raise ValueError(
                    f"{one.name} was evaluated with interval=None, for its value alone: evaluate "
                    "both targets with an interval to compare them"
                )
        if self.sample.fingerprint != other.sample.fingerprint:
            raise ValueError(
                f"other ({other.name}) rests on other trajectories than {self.name}: a paired "
                "difference needs both from the same data; evaluate both targets on one set"
            )
        if self.sample.gamma != other.sample.gamma:
            raise ValueError(
                f"other ({other.name}) has gamma {other.sample.gamma:g}, but {self.name} has "
                f"{self.sample.gamma:g}: a difference needs one discount"
            )
        if self.interval.level != other.interval.level:
            raise ValueError(
                f"{self.name} has level {self.interval.level} and {other.name} "
                f"{other.interval.level}: evaluate both at one level"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined numbers are None."""
        return {
            "estimator": self.name,
            "regime": regime_label(self.sample.regime),
            "value": finite(self.value),
            "standard_error": finite(self.standard_error),
            "interval": {
                "low": finite(self.interval.low),
                "high": finite(self.interval.high),
                "level": self.interval.level,
                "method": self.interval.method,
            },
            "verdict": self.verdict.to_dict(),
            "model_free": None
            if self.model_free is None
            else {"low": finite(self.model_free.low), "high": finite(self.model_free.high)},
            "breakdown": finite(self.breakdown),
            "fresh_episodes": finite(self.fresh_episodes),
            "diagnostics": self.diagnostics.to_dict(),
            "report": {key: finite(value) for key, value in self.report.items()},
        }
