"""Options of an evaluation: declared here once, for Python and for the command lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arguments import confidence, discount, instance, real, refusal, whole
from ope_gym.inference.intervals import (
    Betting,
    Bootstrap,
    IntervalKind,
    NoInterval,
    interval_kind,
)

BLOCK_STEPS = 1 << 17  # held in memory at once
Q_MODELS = ("tabular", "linear", "dynamics", "network")  # names of models of `ope_gym.models`


@dataclass(frozen=True)
class Weighting:
    """Importance weights.

    Args:
        cap: upper bound of the weights of capped estimators.
        mixture: the behaviours in the denominator of an episode's fused weights: "all"; a number,
            for that many, its own among them and the others spread over the training history, each
            of which costs a policy evaluation at every step; "auto" for all of up to 256
            behaviours, and 64 if there are more.
        reward_model: mean and variance of the rewards, for OUIS: "deterministic", "cross-fit"
            (learned from other episodes), or in Python a pair of arrays (S,).
    """

    cap: float = 10.0
    mixture: str | int = "auto"
    reward_model: str | tuple[ArrayLike, ArrayLike] = "deterministic"

    def __post_init__(self) -> None:
        if not isinstance(self.mixture, str) or self.mixture not in ("auto", "all"):
            known = "give 'all', 'auto' or the largest number of behaviours in a mixture"
            whole("mixture", self.mixture, expected=f"{known}, such as 64")
        real("cap", self.cap, "it bounds the weights, so it must be above 0", lambda x: x > 0.0)
        model = self.reward_model
        if isinstance(model, str) and model in ("deterministic", "cross-fit"):
            return
        if not isinstance(model, tuple | list | np.ndarray) or len(model) != 2:
            known = "give 'deterministic', 'cross-fit' or (mean, variance)"
            raise refusal("reward_model", model, known)


@dataclass(frozen=True)
class Compute:
    """Processes and memory.

    None of them changes a result, except through the default q model: episodes that are read in
    blocks get `LinearQ`, where those in memory may get another model. The result names it.

    Args:
        workers: number of blocks of files that are evaluated at once on this machine, in threads;
            in processes where code of your own takes part, such as policies of your own classes,
            and for a q model of millions of steps.
        ray: Ray cluster to compute on: auto, local (a new one here), HOST:PORT or ray://HOST:PORT;
            True, or --ray alone, for the one of RAY_ADDRESS, else one that runs on this machine,
            else a new one here. Files must have the same paths on all nodes.
        block_steps: number of steps of files to hold in memory at once, about. Files with no more
            than that in all are read whole.
        progress: called with the number of steps just done; by `rank` and `leave_one_policy_out`
            with 1 after each policy.
    """

    workers: int = 1
    ray: bool | str | None = False
    block_steps: int = BLOCK_STEPS
    progress: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        whole("block_steps", self.block_steps, expected="hold at least 1 step at once")
        if self.progress is not None and not callable(self.progress):
            raise refusal("progress", self.progress, "give a function of the steps just done")


class OptionValues(TypedDict, total=False):
    """The options as keyword arguments; see `Options`."""

    held_out: bool | None
    q_model: Any
    gamma: float
    interval: str | IntervalKind | None
    level: float
    return_range: tuple[float, float] | None
    weighting: Weighting
    compute: Compute
    seed: int


@dataclass(frozen=True)
class Options:
    """Checked options of an evaluation.

    Args:
        held_out: True for held-out episodes alone, False for all; None for the held-out ones if
            there are any. The result says which were used.
        q_model: a model of `ope_gym.models` for the estimators that need one, or its name
            ("tabular", "linear", "dynamics", "network"); "default" is tabular for discrete
            observations and linear for arrays of numbers; None for none; or a `Baseline`, the
            values q and v at every step. Files that are read in blocks take a `LinearQ`.
        gamma: discount factor within [0, 1].
        interval: "ess-t", "percentile" or "bca", or an object: `EssT()`, `Bootstrap(resamples,
            method)`, `Betting(reward_range, horizon)`; see `ope_gym.inference.intervals`. None for
            the value alone, without error and interval, which saves a pass over the episodes.
        level: confidence level of the intervals.
        return_range: lowest and highest (discounted) return that an episode can have. Intervals
            then allow for any return in it that the episodes may have missed by chance, such as a
            rare catastrophe; without it, for those that the recorded rewards suggest.
        weighting: cap, mixture and reward model of the weights.
        compute: workers, cluster, memory and progress.
        seed: seed of the bootstrap draws and of the q model; two evaluations of the same
            trajectories with one seed share their draws.
    """

    held_out: bool | None = None
    q_model: Any = "default"
    gamma: float = 1.0
    interval: str | IntervalKind | None = "ess-t"
    level: float = 0.95
    return_range: tuple[float, float] | None = None
    weighting: Weighting = field(default_factory=Weighting)
    compute: Compute = field(default_factory=Compute)
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.held_out, bool | np.bool_ | None):
            known = "give True, False, or None for the held-out episodes if there are any"
            raise refusal("held_out", self.held_out, known)
        instance("weighting", self.weighting, Weighting, "give Weighting(cap=...), for instance")
        instance("compute", self.compute, Compute, "give Compute(workers=...), for instance")
        if self.return_range is not None:
            object.__setattr__(self, "return_range", _range(self.return_range))
        object.__setattr__(self, "gamma", discount(self.gamma))
        object.__setattr__(self, "level", confidence(self.level))
        object.__setattr__(self, "interval", interval_kind(self.interval))
        if self.kind.name == "betting" and self.weighting.reward_model == "cross-fit":
            raise ValueError(
                "interval='betting' needs independent episodes, but the weights of "
                "reward_model='cross-fit' learn from each other's rewards: give (mean, variance)"
            )
        seed = whole("seed", self.seed, 0, "give a whole number of 0 or more")
        object.__setattr__(self, "seed", seed)

    @property
    def kind(self) -> IntervalKind:
        """The kind of the intervals."""
        return interval_kind(self.interval)

    @property
    def value_alone(self) -> bool:
        """Whether neither errors nor intervals are wanted."""
        return isinstance(self.kind, NoInterval)

    def refuse_value_alone(self, what: str) -> None:
        """Raise if intervals are left out where something rests on the errors."""
        if self.value_alone:
            raise ValueError(
                f"interval is None, but {what} compares by standard errors: give 'ess-t' or "
                "another kind of interval"
            )

    @property
    def resamples(self) -> int:
        """Number of bootstrap replicates, 0 without a bootstrap."""
        return self.kind.resamples if isinstance(self.kind, Bootstrap) else 0

    @property
    def lacks(self) -> dict[str, str]:
        """Why needs of estimators are not met by the kind of interval, in words."""
        if not isinstance(self.kind, Betting):
            return {}
        return {"standard error": "interval='betting' bounds weighted means: use FIS or BIS"}

    def betting(self, horizon: int | None) -> Betting | None:
        """Return the betting interval with its horizon, the recorded time limit unless given."""
        kind = self.kind
        if not isinstance(kind, Betting):
            return None
        if kind.horizon is None and horizon is None:
            raise ValueError(
                "interval='betting' needs horizon, the longest possible episode (the time limit): "
                "the longest recorded one may be shorter, and the interval could then miss the "
                "value"
            )
        return kind if kind.horizon else dataclasses.replace(kind, horizon=horizon)


def _range(ends: Any) -> tuple[float, float]:
    numbers = np.asarray(ends, dtype=np.float64) if np.ndim(ends) == 1 else np.zeros(0)
    if numbers.shape != (2,) or not np.all(np.isfinite(numbers)) or not numbers[0] < numbers[1]:
        raise ValueError(
            f"return_range is {ends!r}; give the lowest and the highest return that an episode can "
            "have, such as (0, 500)"
        )
    return float(numbers[0]), float(numbers[1])
