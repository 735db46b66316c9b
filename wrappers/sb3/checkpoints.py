"""Which of the policies of a run is best, how surely, and whether the run still gets anywhere.

Whoever is chosen for its high estimate has, on average, an estimate that is too high (the winner's
curse). How much too high is found by drawing estimates anew with their errors, choosing among them
by the same rule, and taking the mean of (estimate - value) of the chosen ones. The values they are
drawn around are those of the contenders, shrunk towards each other as far as their errors explain
that they differ: policies that seem to differ by noise alone are taken for equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from ope_gym.arrays import FloatArray
from ope_gym.online import FreeEstimate

__all__ = ["BestCheckpoint", "Checkpoints", "Progress", "selection_bias", "winning_chance"]

SELECT = ("lower", "value")
_DRAWS = 1000
_POINTS = 401  # of the integral over the value of a policy, in +-8 standard errors
_OLDEST = 500  # checkpoints that are kept: far more would make the last lines slow
_PENDING = 8  # latest ones that are not settled, and may still turn out to be the best
_CONTENDS = 2.0  # standard errors of a difference within which a policy may be as good as the best


@dataclass(frozen=True)
class BestCheckpoint:
    """The policy that a run would be left with.

    Args:
        estimate: of its value as it is known now, settled if possible.
        value: the same, less what it owes to having been chosen.
        probability: that it is the best of all that were evaluated, by independent normal errors.
        policies: how many were evaluated.
    """

    estimate: FreeEstimate
    value: float
    probability: float
    policies: int

    @property
    def timesteps(self) -> int:
        """Timesteps of the run when the policy was evaluated."""
        return self.estimate.timesteps


class Checkpoints:
    """All policies that were evaluated, each with the best that is known of its value.

    Args:
        select: "lower" to prefer the highest lower end of the interval, "value" the highest value.
    """

    def __init__(self, select: str = "lower") -> None:
        if select not in SELECT:
            raise ValueError(f"select={select!r} must be one of {', '.join(map(repr, SELECT))}")
        self._select = select
        self._known: dict[int, FreeEstimate] = {}  # by timesteps
        self.leader: int | None = None  # timesteps of the best

    def __len__(self) -> int:
        """Number of policies."""
        return len(self._known)

    def score(self, estimate: FreeEstimate) -> tuple[float, float]:
        """Return what policies are chosen by; the value decides where no interval is known."""
        found = estimate.low if self._select == "lower" else estimate.value
        return (found if np.isfinite(found) else -np.inf, estimate.value)

    def add(self, estimate: FreeEstimate) -> bool:
        """Take a new policy in; return whether it is the best so far."""
        self._known[estimate.timesteps] = estimate
        kept = self.contenders()
        for old in list(self._known)[:-_OLDEST]:
            if old not in kept:
                del self._known[old]
        return self._choose()

    def revise(self, estimate: FreeEstimate) -> bool:
        """Replace what is known of a policy; return whether another one is the best now."""
        if estimate.timesteps not in self._known:
            return False
        self._known[estimate.timesteps] = estimate
        return self._choose()

    def begin_again(self) -> None:
        """Forget all but the best: timesteps count from 0 again, and theirs would be mistaken."""
        if self.leader is not None:
            self._known, self.leader = {-1: self._known[self.leader]}, -1

    def contenders(self) -> set[int]:
        """Return the timesteps of the policies that may be chosen, now or later.

        These are the best, the best of those that are settled, and the latest that are not. Others
        cannot become the best any more, because settled values stay as they are.
        """
        settled = [t for t, e in self._known.items() if e.settled]
        pending = [t for t, e in self._known.items() if not e.settled][-_PENDING:]
        best = sorted(settled, key=lambda t: self.score(self._known[t]))[-1:]
        return {*best, *pending, *(() if self.leader is None else (self.leader,))}

    def _choose(self) -> bool:
        before = self.leader
        self.leader = max(
            self.contenders(), key=lambda t: (self.score(self._known[t]), t == before)
        )
        return self.leader != before

    @property
    def estimate(self) -> FreeEstimate:
        """Estimate of the best."""
        if self.leader is None:
            raise RuntimeError("no policy has been evaluated yet")
        return self._known[self.leader]

    @property
    def highest(self) -> float:
        """The highest value of all policies, whichever is the best."""
        return max(e.value for e in self._known.values())

    def best(self) -> BestCheckpoint | None:
        """Return the best, corrected for having been chosen; None before the first evaluation."""
        if self.leader is None:
            return None
        found = list(self._known.values())
        values, errors = np.array([(e.value, e.standard_error) for e in found]).T
        errors = np.where(np.isfinite(errors), errors, 10.0 * np.ptp(values) + 1.0)
        below = np.array([e.value - e.low for e in found])
        below = np.where(np.isfinite(below) & (self._select == "lower"), below, 0.0)
        place = list(self._known).index(self.leader)
        return BestCheckpoint(
            self.estimate,
            self.estimate.possible(self.estimate.value - selection_bias(values, errors, below)),
            winning_chance(values, errors, place),
            len(found),
        )


def winning_chance(values: FloatArray, errors: FloatArray, i: int) -> float:
    """Return the probability that number i of n independent normal numbers is the largest.

    P_i = integral of phi(z) prod_j Phi((values_i + errors_i z - values_j) / errors_j) dz, j != i.

    >>> round(winning_chance(np.array([1.0, 1.0, -9.0]), np.array([1.0, 2.0, 1.0]), 0), 6)
    0.5
    """
    errors = np.maximum(errors, 1e-9 * (1.0 + np.abs(values).max()))
    z = np.linspace(-8.0, 8.0, _POINTS)
    logs = log_ndtr(((values[i] + errors[i] * z)[:, None] - values) / errors)
    logs[:, i] = 0.0
    density = np.exp(-0.5 * z**2)
    return float(density @ np.exp(logs.sum(axis=1)) / density.sum())


def selection_bias(values: FloatArray, errors: FloatArray, below: FloatArray) -> float:
    """Return by how much the estimate of the chosen one is too high, on average.

    Args:
        values: (n,) estimates.
        errors: (n,) their standard errors.
        below: (n,) what is taken off an estimate before the highest is chosen.
    """
    best = int(np.argmax(values - below))
    near = values[best] - values <= _CONTENDS * np.hypot(errors, errors[best])
    some, squares = values[near], errors[near] ** 2
    truly = max(0.0, float(np.var(some, ddof=1) - squares.mean())) if some.size > 1 else np.inf
    share = 1.0 if np.isinf(truly) else truly / (truly + squares + 1e-300)
    middle = float(np.average(some, weights=1.0 / (squares + 1e-300)))
    around = values.copy()
    around[near] = middle + share * (some - middle)
    half = np.random.default_rng(0).standard_normal((_DRAWS // 2, len(values))) * errors
    noise = np.vstack([half, -half])  # so that one policy alone needs no correction
    chosen = np.argmax(around - below + noise, axis=1)
    return float(noise[np.arange(_DRAWS), chosen].mean())


class Progress:
    """Says when a run has stopped improving by more than the error of its values.

    Args:
        patience: evaluations without improvement after which it is over; None for never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._reference: FreeEstimate | None = None
        self.idle = 0  # evaluations since the last improvement

    def is_over(self, estimate: FreeEstimate) -> bool:
        """Take the next evaluation in; return whether the run should stop."""
        if not np.isfinite(estimate.standard_error):  # nothing can be said
            return False
        before = self._reference
        error = 0.0 if before is None else np.hypot(estimate.standard_error, before.standard_error)
        if before is None or estimate.value - before.value > error:
            self._reference, self.idle = estimate, 0
        else:
            self.idle += 1
        return self._patience is not None and self.idle >= self._patience

    def revise(self, estimate: FreeEstimate) -> None:
        """Replace what is known of the policy that later ones are compared with."""
        if self._reference is not None and self._reference.timesteps == estimate.timesteps:
            self._reference = estimate
