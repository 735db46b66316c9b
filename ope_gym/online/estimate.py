"""The value of one policy of a training loop, with what it rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.inference.judging import judge_free, unseen_by_greedy
from ope_gym.online.rules import UNSEEN
from ope_gym.verdict import Verdict

FEW = 10  # ended episodes below which a value claims to be no surer than these


@dataclass(frozen=True)
class FreeEstimate:
    """The value of one policy of a training loop.

    Args:
        timesteps: timesteps of the loop when the policy was first evaluated.
        value: mean return of the policy.
        standard_error: standard error of the value.
        low: lower end of the interval.
        high: upper end of the interval.
        settled: whether steps of later policies have confirmed it.
        spread: standard deviation of a return.
        episodes: recorded and fresh episodes that it rests on, whole or in part.
        shares: weight of each way: what was "seen", "simulation" and "fresh".
        steady: whether episodes of the policy all return about the same, and the value is known at
            least as well as that: one episode then tells it, and fresh ones would not tell more.
        ended: how many of the episodes that it rests on have ended, so that their returns are
            known; None if that does not matter.
        bounds: the lowest and highest return so far, recorded or played in the learned environment:
            the value lies between them.
        deterministic: whether it is the value of the greedy policy.
        unseen: share of the steps played in the learned environment that lie outside of what was
            recorded; 1 of a greedy policy that could not be played there.
        length: mean steps of an episode so far, which fresh ones would cost.
    """

    timesteps: int
    value: float
    standard_error: float
    low: float
    high: float
    settled: bool
    spread: float
    episodes: int
    shares: dict[str, float]
    steady: bool = False
    ended: int | None = None
    bounds: tuple[float, float] = (-np.inf, np.inf)
    deterministic: bool = False
    unseen: float = 0.0
    length: float = np.nan

    def __str__(self) -> str:
        state = "settled" if self.settled else "provisional"
        sure = f", as sure as about {self.claim:.2g} fresh episodes" if self.claim > 0 else ""
        red = " (red: do not use it)" if self.verdict.colour == "red" else ""
        return (
            f"{self.value:.5g} in [{self.low:.5g}, {self.high:.5g}]{red}{sure}; {state}, of the "
            f"policy after {self.timesteps:,} timesteps"
        )

    @property
    def few(self) -> bool:
        """Whether fewer than 10 returns are known: too few to tell spread and error from them."""
        return self.ended is not None and self.ended < FEW

    @property
    def fresh_episodes(self) -> float:
        """About how many fresh episodes would make you as sure; where `few`, no more than these."""
        count = (self.spread / self.standard_error) ** 2 if self.standard_error > 0 else np.inf
        return min(count, float(self.ended)) if self.few and self.ended is not None else count

    @property
    def claim(self) -> float:
        """`fresh_episodes` where it may be claimed: NaN if red, or if one episode tells as much."""
        mute = self.steady or self.verdict.colour == "red"
        return float("nan") if mute else self.fresh_episodes

    @property
    def played(self) -> bool:
        """Whether it rests on fresh episodes alone."""
        return self.shares == {"fresh": 1.0}

    @property
    def known(self) -> bool:
        """Whether the value can be told: not of a greedy policy that goes where nobody was yet."""
        return not self.deterministic or self.unseen <= UNSEEN or "fresh" in self.shares

    @property
    def verdict(self) -> Verdict:
        """Whether to trust it, and why."""
        if not self.known:
            return Verdict.of([unseen_by_greedy(self.unseen, self.length)])
        return judge_free(
            self.fresh_episodes,
            episodes=self.episodes,
            ended=self.ended,
            played=self.played,
            steady=self.steady,
        )

    def possible(self, value: float) -> float:
        """Return a value within the bounds: a mean cannot lie beyond all returns."""
        return float(np.clip(value, *self.bounds))
