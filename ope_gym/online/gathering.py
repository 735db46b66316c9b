"""Gather what each way says of the policies that are valued at one moment of a training loop.

Steps are fitted and environments learned once for all policies that are valued at the same time:
the one that acts, the greedy one, and earlier ones that are settled now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.online.advantages import Actions, Terms, ValueFit, best_span
from ope_gym.online.rules import EPISODES, SHARE_OF_SHIFT, Evidence, Value
from ope_gym.online.simulation import Learned
from ope_gym.online.stream import Window
from ope_gym.policies.acting import ActingPolicy

SHARE = 0.7  # of the advantages: they are estimated, and so is how far policies are apart
_RECENT = 20  # successive differences of returns, which tell their spread

Span = tuple[int, int]
"""Clocks between which steps count."""


@dataclass(frozen=True, eq=False)
class Returns:
    """Returns of the whole episodes of a window, in the order of their ends.

    Args:
        ends: clocks after the last steps.
        paid: returns.
        seen: returns so far, of open episodes as well.
    """

    ends: NDArray[np.int64]
    paid: FloatArray
    seen: FloatArray

    @classmethod
    def of(cls, window: Window, gamma: float) -> Returns:
        """Sum the rewards of each episode."""
        segment = np.cumsum(window.place == 0) - 1
        paid = np.bincount(segment, window.rewards * gamma**window.step).astype(np.float64)
        began = window.step[window.place == 0] == 0
        last = np.append(np.flatnonzero(window.place[1:] == 0), window.size - 1)
        whole = np.flatnonzero(began & window.ended[last])
        whole = whole[np.argsort(window.clock[last[whole]], kind="stable")]
        return cls(window.clock[last[whole]] + 1, paid[whole], paid[began])

    def spread(self, stop: int) -> float:
        """Return the standard deviation of a return, from successive differences: no drift in it.

        NaN where fewer than two episodes have ended.
        """
        recent = self.paid[self.ends <= stop][-_RECENT - 1 :]
        return float(np.sqrt(0.5 * np.mean(np.diff(recent) ** 2))) if recent.size > 1 else np.nan

    def last(self, stop: int, spread: float, scale: float, *, settled: bool) -> Value | None:
        """Return the mean of the last episodes before a clock; settled, of as many after it, too.

        Args:
            stop: the clock.
            spread: standard deviation of a return.
            scale: range of the returns.
            settled: whether enough later episodes are there.
        """
        before = self.paid[self.ends <= stop][-EPISODES:]
        after = self.paid[self.ends > stop][:EPISODES]
        if not before.size:
            return None
        if settled:
            if min(before.size, after.size) < EPISODES:
                return None
            half = 0.5 * (before.mean() - after.mean())
            return Value(float(before.mean() - half), spread**2 / (2 * EPISODES) + float(half) ** 2)
        few = 0.0 if before.size == EPISODES else (scale / before.size) ** 2
        return Value(float(before.mean()), spread**2 / before.size + few)


@dataclass(frozen=True)
class Scale:
    """Sizes that are known from the run so far.

    Args:
        low: lowest return so far.
        high: highest return so far.
        limits: lowest and highest mean that these allow.
        spread: standard deviation of a return, drift included.
        length: steps of an episode.
    """

    low: float
    high: float
    limits: tuple[float, float]
    spread: float
    length: float


@dataclass(frozen=True, eq=False)
class Moment:
    """Steps and environments that policies share which are valued at the same time.

    Args:
        clock: the time.
        fit: v, along the latest steps.
        returns: of the whole episodes of these steps.
        learned: environments learned from them; None where none can be.
        starts: (m, ...) first observations.
        rng: source of what is drawn.
    """

    clock: int
    fit: ValueFit
    returns: Returns
    learned: Learned | None
    starts: NDArray[np.generic]
    rng: np.random.Generator

    def evidence(
        self,
        policy: ActingPolicy | None,
        explorer: ActingPolicy | None,
        spans: Sequence[Span],
        stop: int,
        scale: Scale,
    ) -> Evidence:
        """Gather what the ways say of a policy.

        Args:
            policy: None where there is no snapshot: then all steps count as its own.
            explorer: the policy that acts, if the other is greedy.
            spans: clocks of growing windows around the policy's own steps.
            stop: clock after its last step; it is settled if that is not now.
            scale: sizes that are known.
        """
        window, psi, distance = self.fit.window, None, 0.0
        if policy is not None and self.fit.features.shape[1] > 1:
            actions = Actions.of(policy, window, self.rng, explorer)
            psi = actions.psi(self.fit.features)
            close = (window.clock >= spans[0][0]) & (window.clock < spans[0][1])
            distance = max(float(actions.distances[close].mean()), 0.0) if close.any() else 0.0
        terms = self.fit.advantages(psi)
        near, moved = _best(terms, spans, SHARE, scale.spread)
        spread = min(np.nan_to_num(self.returns.spread(stop), nan=np.inf), scale.spread)
        settled, simulated = stop != self.clock, None
        if policy is not None and self.learned is not None:
            if settled:  # played anew, because the environment is known better now
                simulated, _ = self.learned.value(policy, self.starts, self.rng)
            else:
                simulated = self.learned.tested(
                    policy,
                    self.starts,
                    lambda terms: _best(terms, spans, 0.0, scale.spread)[0],
                    window,
                    self.rng,
                )
        size = scale.high - scale.low
        return Evidence(
            near=Value(near.mean, near.square + SHARE_OF_SHIFT * moved**2),
            last=self.returns.last(stop, spread, size, settled=settled),
            distance=scale.length * distance,
            spread=float(spread),
            low=scale.low,
            high=scale.high,
            limits=scale.limits,
            simulated=simulated,
        )


def _best(terms: Terms, spans: Sequence[Span], share: float, spread: float) -> tuple[Value, float]:
    """Return the value by the best window, and what advantages make of it.

    Args:
        terms: what steps add to the value.
        spans: the windows.
        share: of the advantages.
        spread: standard deviation of a return, which stands for an unknown error.
    """
    sums = [x for x in (terms.sums(*span) for span in spans) if x is not None]
    best, square = best_span(sums, share)
    return Value(best.value(share), square if np.isfinite(square) else spread**2), best.moved
