"""Decide between two means while data come in: bets that stay valid at every look.

Each round of a duel brings a number x with E[x | past] = D = J_a - J_b. `rounds` says how it is
made; here is how it is bet on. Against the claim D <= m the wealth is multiplied by a factor f(x -
m, b), with a bet b >= 0 chosen from the past, whose mean is at most 1 if the claim is true:

    assumed of x                   factor at y = x - m, bet b
    |x| <= reach                   1 + b y,    b <= CAP / (reach + m)
    symmetric around D             1 + tanh(b y)
    standard deviation <= s        exp(phi(b y) - (b s)^2 / 2)

The first has mean 1 + b (D - m) and is never negative. The second has mean 1 for D = m, because
tanh is odd, and less for D < m, because it grows; it is at least exp(b y - (b y)^2 / 2), the
self-normalised factor of de la Peña (1999). The difference of independent returns is symmetric if
their distributions are equal but for a shift. With a common seed that is not enough: G_a = U and
G_b = (U + .05) mod 1 are both uniform, and G_a - G_b is -.05 in 95 % of the rounds. In the third
phi(z) = log(1 + z + z^2 / 2) for z >= 0 and -phi(-z) below, Catoni's function (Wang and Ramdas,
2023): it grows, and exp(phi(z)) <= 1 + z + z^2 / 2 everywhere, so that for D = m the mean is at
most (1 + (b s)^2 / 2) exp(-(b s)^2 / 2) <= 1. No symmetry and no moments beyond those named are
needed: all three hold for every sample size.

So the product over rounds, and every average of such products over bets, is a supermartingale
under the claim: by Ville's inequality it ever reaches 2 / alpha with probability at most alpha / 2.
The claim D >= m is bet against with the signs changed, so all statements of a duel hold together
with probability 1 - alpha, however often one looks and whenever one stops (Waudby-Smith and Ramdas,
2024). Each product falls in m: claims D <= m' with m' < m are refuted along with m, so the claims
that are left make an interval.

The bets are k / sigma for k on a grid, sigma the spread of x so far; the best k is about |D - m| /
sigma.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.intervals import Interval

CAP = 0.98  # of the largest bet that cannot lose everything
LARGEST = 1.0  # bet, in units of 1 / sigma
RATIO = 2.0**0.5  # of neighbouring bets


@dataclass(frozen=True)
class Assumed:
    """State what is assumed of returns; neither bounds nor deviation: differences are symmetric.

    Args:
        bounds: lowest and highest possible return of an episode.
        deviation: largest possible standard deviation of the difference of two returns that were
            played with the same seed.
    """

    bounds: tuple[float, float] | None = None
    deviation: float | None = None

    @property
    def span(self) -> float:
        """Largest possible difference of two returns."""
        return np.inf if self.bounds is None else self.bounds[1] - self.bounds[0]

    def largest_bets(self, room: FloatArray) -> FloatArray:
        """Return the largest bets if x can be `room` on the wrong side of a claim."""
        if self.bounds is None:
            return np.full_like(room, np.inf)
        return np.asarray(CAP / np.maximum(room, np.finfo(np.float64).tiny))

    def log_factors(self, bets: FloatArray, gains: FloatArray) -> FloatArray:
        """Return log f of the table above."""
        z = bets * gains
        if self.bounds is not None:
            return np.asarray(np.log1p(z))
        if self.deviation is None:
            return np.asarray(np.log(2.0) - np.logaddexp(0.0, -2.0 * z))
        size = np.abs(z)
        phi = np.copysign(np.log1p(size + size**2 / 2), z)
        return np.asarray(phi - (bets * self.deviation) ** 2 / 2)


def bet_sizes(limit: int, level: float) -> FloatArray:
    """Return (J,) bets in units of 1 / sigma, down to what the last rounds could decide."""
    least = np.sqrt(2.0 * np.log(2.0 / (1.0 - level)) / limit)
    count = max(1, int(np.ceil(np.log(LARGEST / min(least, LARGEST)) / np.log(RATIO))) + 1)
    return np.asarray(LARGEST * RATIO ** -np.arange(count, dtype=np.float64))


class Wealth:
    """Wealth of the bets on some claims in some independent duels, round after round.

    Args:
        assumed: what the factors rest on.
        points: (P,) claims D <= m and D >= m are bet against for each m of these.
        level: 1 - alpha.
        limit: rounds that there may be.
        runs: number of duels that go on side by side.

    Attributes:
        above: (runs, P) whether D > m is certain.
        below: (runs, P) whether D < m is certain.
        rounds: number of rounds so far.
    """

    def __init__(
        self,
        assumed: Assumed,
        points: FloatArray,
        *,
        level: float = 0.95,
        limit: int = 1000,
        runs: int = 1,
    ) -> None:
        self.assumed, self.points, self.level = assumed, points, level
        self._sizes = bet_sizes(limit, level)
        # log of the sum of the wealth of all bets that refutes a claim
        self._needed = float(np.log(2.0 * self._sizes.size / (1.0 - level)))
        self.rounds = 0
        self.above = np.zeros((runs, points.size), dtype=np.bool_)
        self.below = np.zeros((runs, points.size), dtype=np.bool_)
        self._logs = np.zeros((2, runs, points.size, self._sizes.size))
        self._history: list[FloatArray] = []  # (3, runs) each: x, reach, sigma

    def add(self, x: FloatArray, reach: FloatArray, sigma: FloatArray) -> None:
        """Take one round of every duel.

        Args:
            x: (runs,) of conditional mean D.
            reach: (runs,) bound of |x|, known before the round; unused without bounds.
            sigma: (runs,) expected spread of x, known before the round; inf for no bet.
        """
        sides = (self.above, self.below)
        for side, sign in enumerate((1.0, -1.0)):
            gain = sign * (x[:, None] - self.points)
            self._logs[side] += self._log_factors(reach, sigma, sign * self.points, gain)
            sides[side][...] |= np.logaddexp.reduce(self._logs[side], axis=-1) >= self._needed
        self._history.append(np.stack([x, reach, sigma]))
        self.rounds += 1

    def _log_factors(
        self, reach: FloatArray, sigma: FloatArray, points: FloatArray, gains: FloatArray
    ) -> FloatArray:
        """Return (n, P, J) log factors of n rounds for claims at points (P,), signed."""
        room = reach[:, None] + points  # the most that x can be on the wrong side of m
        most = self.assumed.largest_bets(room)
        bets = np.minimum(self._sizes / sigma[:, None, None], most[..., None])
        return self.assumed.log_factors(bets, gains[..., None])

    def interval(self, run: int = 0) -> Interval:
        """Return the differences that no round so far has refuted; it never widens."""
        span, name = self.assumed.span, "betting"
        if not self._history:
            return Interval(-span, span, self.level, name)
        x, reach, sigma = np.array(self._history)[:, :, run].T
        if not np.isfinite(span):
            span = 1e6 * float(np.abs(x).max()) + 1e-300  # as good as everything
        ends = []
        for sign in (1.0, -1.0):
            # sign * D > -span is known; halve what lies between a refuted and an open claim
            low, high = -span, span
            for _ in range(80):
                middle = (low + high) / 2
                refuted = self._refuted(sign, sign * middle, x, reach, sigma)
                low, high = (middle, high) if refuted else (low, middle)
            ends.append(sign * (low if low > -span else -self.assumed.span))
        return Interval(float(ends[0]), float(ends[1]), self.level, name)

    def _refuted(
        self, sign: float, point: float, x: FloatArray, reach: FloatArray, sigma: FloatArray
    ) -> bool:
        """Tell whether the bets against one claim ever had enough wealth."""
        gains = sign * (x - point)
        logs = self._log_factors(reach, sigma, np.array([sign * point]), gains[:, None])[:, 0]
        wealth = np.logaddexp.reduce(np.cumsum(logs, axis=0), axis=1)
        return bool(wealth.max() >= self._needed)
