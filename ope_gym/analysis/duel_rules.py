"""The terms of a duel: what its statements rest on, and when it ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ope_gym.arguments import instance, pair, real, refusal, whole
from ope_gym.arrays import annuity_of
from ope_gym.data.trajectories import Trajectories
from ope_gym.options import Options

LIMIT = 1000


class RuleValues(TypedDict, total=False):
    """The rules as keyword arguments; see `Rules`."""

    bounds: tuple[float, float] | None
    reward_range: tuple[float, float] | None
    horizon: int | None
    deviation: float | None
    symmetric: bool
    margin: float
    level: float
    gamma: float
    limit: int
    seed: int


@dataclass(frozen=True)
class Rules:
    """The terms of a duel, which stay as they are from the first round on.

    A duel rests on one of bounds (or reward_range), deviation and symmetric.

    Args:
        bounds: lowest and highest possible return of an episode.
        reward_range: instead of bounds: lowest and highest possible reward of a step.
        horizon: Longest possible episode, for reward_range; by default the recorded limit.
        deviation: instead of bounds: the largest possible standard deviation of the difference of
            two returns with the same seed. Valid for every such distribution, skewed or not; twice
            the true number makes a duel four times as long.
        symmetric: instead of bounds: assume that the difference of two independent returns is
            symmetric around its mean, as it is if the returns of the two policies have the same
            distribution except for a shift. All statements are then valid, even with heavy tails
            and infinite variance. Every episode has a seed of its own, because with common seeds
            equal distributions are not enough. If one policy fails rarely and badly, the assumption
            is wrong, and the duel may be too.
        margin: a difference that does not matter, 0 or more: with it, a duel between two policies
            that are about equal ends as "too close" before the limit.
        level: probability with which all statements hold, at every look.
        gamma: discount of the returns.
        limit: pairs of episodes, played together or alone, after which a duel ends undecided, as
            "too close".
        seed: seed of the environment and of the actions, round by round.
    """

    bounds: tuple[float, float] | None = None
    reward_range: tuple[float, float] | None = None
    horizon: int | None = None
    deviation: float | None = None
    symmetric: bool = False
    margin: float = 0.0
    level: float = 0.95
    gamma: float = 1.0
    limit: int = LIMIT
    seed: int = 0

    def __post_init__(self) -> None:
        Options(gamma=self.gamma, level=self.level, seed=self.seed)  # raises
        real("margin", self.margin, "give a difference of 0 or more", lambda x: 0.0 <= x < np.inf)
        whole("limit", self.limit, expected="give a whole number of pairs, at least 1")
        if self.deviation is not None:
            known = "give a standard deviation above 0"
            real("deviation", self.deviation, known, lambda x: 0.0 < x < np.inf)
        instance("symmetric", self.symmetric, bool, "give True or False")
        if self.horizon is not None:
            whole("horizon", self.horizon)
        bounded = self.bounds is not None or self.reward_range is not None
        given = {
            "bounds": bounded,
            "deviation": self.deviation is not None,
            "symmetric": self.symmetric,
        }
        named = [name for name, is_given in given.items() if is_given]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given: a duel rests on one of them")
        if not named:
            raise ValueError(
                "a duel needs bounds, the lowest and highest possible return, such as (0, 500) for "
                "CartPole-v1; or reward_range, with a recorded time limit or horizon. Without "
                "bounds no number of episodes can exclude a rare return that is large enough to "
                "decide, unless you can say more: give deviation, the largest standard deviation "
                "of the difference of two returns, or symmetric=True"
            )
        if bounded:
            object.__setattr__(self, "bounds", self._bounds())

    def _bounds(self) -> tuple[float, float]:
        """Return lowest and highest return, or raise if they cannot be known."""
        name, given = "bounds", self.bounds
        if given is None:
            assert self.reward_range is not None
            if self.horizon is None:
                raise ValueError(
                    "reward_range needs horizon, the longest possible episode: no time limit is "
                    "recorded; or give bounds of the return"
                )
            unit = annuity_of(self.gamma, self.horizon)  # an episode may also end at once
            name, (low, high) = "reward_range", pair("reward_range", self.reward_range)
            given = min(low, 0.0) * unit, max(high, 0.0) * unit
        low, high = pair(name, given)
        if not low < high:
            raise refusal(name, given, "give finite (lowest, highest), lowest < highest")
        return low, high

    def outside(self, returns: Any) -> Any:
        """Tell which returns lie outside of the bounds, but for rounding."""
        low, high = self.bounds or (-np.inf, np.inf)
        slack = 0.0 if self.bounds is None else 1e-9 * max(abs(low), abs(high))
        return (returns < low - slack) | (returns > high + slack)

    def check(self, data: Trajectories) -> None:
        """Raise if a recorded return shows that the bounds do not hold."""
        returns = data.returns(self.gamma)
        outside = np.flatnonzero(self.outside(returns))
        if self.bounds is not None and outside.size:
            (low, high), i = self.bounds, int(outside[0])
            raise ValueError(
                f"bounds are ({low:g}, {high:g}), but the recorded episode {i} returned "
                f"{returns[i]:g}: a duel is valid only within bounds that hold for every episode; "
                "give wider ones"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as JSON gives them back."""
        pairs = {k: v and list(v) for k, v in vars(self).items() if k in ("bounds", "reward_range")}
        return {**dataclasses.asdict(self), **pairs}

    def __str__(self) -> str:
        sure = f"{100 * self.level:g} % confidence, valid even if you look after every episode"
        if self.symmetric:
            return (
                f"{sure}, if the difference of two independent returns is symmetric around its mean"
            )
        if self.deviation is not None:
            return f"{sure}, if the standard deviation of a round is at most {self.deviation:g}"
        return sure
