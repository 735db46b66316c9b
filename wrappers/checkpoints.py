"""Choose the best of the policies of a run, and say how surely it is that.

Whoever is chosen for its high estimate has, on average, an estimate that is too high, the more so
the less sure it is; and whoever is chosen for a narrow interval may be the worst. So the choice is
by the mean of a value given all estimates y, in a run that wanders:

    y_i = x_i + e_i,    x_i - x_(i-1) ~ N(0, tau^2)

An estimate that nothing supports counts for little, one that its neighbours share for much. The
highest mean has the least expected regret, and it needs no correction for having been chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.online import FreeEstimate

__all__ = ["BestCheckpoint", "Checkpoints", "smooth"]

_DRAWS = 4000  # for a probability, which they tell to a percent
_SCALES = np.geomspace(1e-3, 10.0, 30)  # of tau, in units of the range of the values
_KNOWN = 500  # checkpoints that are compared: far more would make evaluations slow
_LATEST = 4  # checkpoints whose value may still change much, so that their models are held


@dataclass(frozen=True)
class BestCheckpoint:
    """The policy that a run would be left with.

    Args:
        estimate: Its value as it is known by itself, settled if possible.
        value: Its mean given all estimates of the run.
        probability: Probability that it is the best of all that were evaluated.
        policies: How many were evaluated.
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
    """All policies that were evaluated, each with the best that is known of its value."""

    def __init__(self) -> None:
        self._known: dict[int, FreeEstimate] = {}  # by timesteps
        self.held: set[int] = set()  # those that may be chosen, now or later
        self.leader: int | None = None  # timesteps of the best

    def __len__(self) -> int:
        """Number of policies."""
        return len(self._known)

    def add(self, estimate: FreeEstimate) -> bool:
        """Take a new policy in; return whether another one is the best now."""
        self._known[estimate.timesteps] = estimate
        self.held.add(estimate.timesteps)
        for old in list(self._known)[:-_KNOWN]:
            if old not in self.held:
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
            self._known, self.leader, self.held = {-1: self._known[self.leader]}, -1, {-1}

    def _choose(self) -> bool:
        before, means = self.leader, dict(zip(self._known, self._smooth()[0], strict=True))
        ranked = sorted(self.held, key=lambda t: (means[t], t == before))
        self.leader = ranked[-1]
        self.held = {*ranked[-2:], *sorted(self.held)[-_LATEST:]}
        return self.leader != before

    def _smooth(self, draws: int = 0) -> tuple[FloatArray, FloatArray]:
        known = self._known.values()
        values, errors = np.array([(e.value, e.standard_error) for e in known]).T
        return smooth(values, errors, draws)

    @property
    def estimate(self) -> FreeEstimate:
        """Estimate of the best."""
        if self.leader is None:
            raise RuntimeError("no policy has been evaluated yet")
        return self._known[self.leader]

    def best(self) -> BestCheckpoint | None:
        """Return the best; None before the first evaluation."""
        if self.leader is None:
            return None
        (mean, draws), place = self._smooth(_DRAWS), list(self._known).index(self.leader)
        return BestCheckpoint(
            self.estimate,
            self.estimate.possible(float(mean[place])),
            float(np.mean(draws.argmax(axis=0) == place)),
            len(self),
        )


def smooth(values: FloatArray, errors: FloatArray, draws: int = 0) -> tuple[FloatArray, FloatArray]:
    """Return the means (n,) of a random walk given its estimates, and draws (n, draws) of it.

    Its step tau has the largest likelihood. With precision P of the walk given the estimates y,

        P = diag(1 / e^2) + D'D / tau^2,    mean = P^-1 (y / e^2),    D the differences.

    >>> smooth(np.array([20.0, 100, 200, 600, 400]), np.array([5.0, 10, 20, 200, 20]))[0].round()
    array([ 20., 100., 201., 332., 397.])

    Args:
        values: (n,) estimates in order of time.
        errors: (n,) their standard errors; those that are not finite tell nothing.
        draws: How many.
    """
    from scipy.linalg import cho_solve_banded, cholesky_banded, solve_banded

    n, rng = len(values), np.random.default_rng(0)
    finite = np.isfinite(errors)
    scale = float(np.hypot(np.ptp(values), np.max(errors[finite], initial=0.0))) or 1.0
    if not finite.any():  # nothing tells them apart but what they are
        return values, values[:, None] + scale * rng.standard_normal((n, draws))
    sharp = np.where(finite, np.maximum(errors, 1e-6 * scale), np.inf) ** -2.0
    steps = np.ones((2, n))
    steps[0], steps[1, 1:-1] = -1.0, 2.0
    if n == 1:
        steps[:] = 0.0

    def posterior(tau: float) -> tuple[float, FloatArray, FloatArray]:
        root = cholesky_banded(steps / tau**2 + np.stack([np.zeros(n), sharp]))
        mean = cho_solve_banded((root, False), sharp * values)
        spread = (n - 1) * np.log(tau) + np.log(root[1]).sum()
        return float(0.5 * (sharp * values) @ mean - spread), mean, root

    _, mean, root = max((posterior(scale * tau) for tau in _SCALES), key=lambda found: found[0])
    noise = solve_banded((0, 1), root, rng.standard_normal((n, draws)))
    return mean, mean[:, None] + noise
