"""Decide between two means while data come in: bets that stay valid at every look.

Round t of a duel plays both policies once. With returns G_a and G_b in [lo, hi] and controls C_k of
conditional mean 0, bounded by l_k,

    x_t = G_a - G_b - sum_k c_k C_k,     E[x_t | past] = D = J_a - J_b

for every coefficient c that is known before the round: it is fitted on earlier rounds. x_t lies in
[low, high] = ±(hi - lo + sum_k |c_k| l_k). Against the claim D <= m the factor

    1 + b (x_t - m),    0 <= b <= CAP / (m - low)

is never negative and has mean at most 1 if the claim is true, whatever bet b was chosen from the
past. So the product over rounds, and every average of such products over bets, is a supermartingale
under the claim: by Ville's inequality it ever reaches 1 / alpha with probability at most alpha. The
claim D >= m is bet against with the signs changed. The two get theta alpha and (1 - theta) alpha,
so all statements of a duel hold together with probability 1 - alpha, however often one looks and
whenever one stops (Waudby-Smith and Ramdas, 2024).

Each product falls in m: claims D <= m' with m' < m are refuted along with m, so the claims that are
left make an interval.

The bets are k / sigma for k on a grid, sigma the spread of x so far; the best k is about |D - m| /
sigma. Recorded episodes say what to expect of D, c and sigma (`Prior`): then a share of the bets is
d / (sigma^2 + d^2) for likely differences d, and theta is the chance of D > 0. That changes how
soon a duel ends, and never how often it errs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.intervals import Interval

CAP = 0.9  # of the largest bet that cannot lose everything
LARGEST = 1.0  # bet, in units of 1 / sigma
RATIO = 2.0**0.5  # of neighbouring bets
_QUANTILES = 9  # of the expected difference
_MOST = 1.5  # largest coefficient of a control
_PARTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # of the coefficients that may be used


@dataclass(frozen=True, eq=False)
class Prior:
    """Hold what is expected before the first round; K controls.

    Args:
        difference: of the two means; 0 if nothing is known.
        error: its standard error; inf if nothing is known.
        deviation: of a round's x after its controls; NaN if unknown.
        coefficients: (K,) of the controls.
        variances: (K,) of the controls.
        rounds: how many rounds deviation and coefficients count for.
        trust: share of the bets, within [0, 1), that follows difference and error; the others are
            spread evenly.
    """

    difference: float = 0.0
    error: float = np.inf
    deviation: float = np.nan
    coefficients: FloatArray = field(default_factory=lambda: np.zeros(0))
    variances: FloatArray = field(default_factory=lambda: np.zeros(0))
    rounds: float = 1.0
    trust: float = 0.0


def bet_sizes(limit: int, level: float) -> FloatArray:
    """Return (J,) bets in units of 1 / sigma, down to what the last rounds could decide."""
    least = np.sqrt(2.0 * np.log(2.0 / (1.0 - level)) / limit)
    count = max(1, int(np.ceil(np.log(LARGEST / min(least, LARGEST)) / np.log(RATIO))) + 1)
    return np.asarray(LARGEST * RATIO ** -np.arange(count, dtype=np.float64))


def expected_bets(prior: Prior) -> tuple[FloatArray, FloatArray, float]:
    """Return (Q,) differences to bet on, (2, Q) their shares on each side, and theta.

    The differences are quantiles of the normal distribution of the prior, those above 0 for bets on
    D > m, those below 0 for D < m. theta is the chance of D > 0, between (1 - trust) / 2 and (1 +
    trust) / 2. Without trust there are none, and theta is 1 / 2.
    """
    if not (prior.trust > 0.0 and np.isfinite(prior.error)):
        return np.zeros(0), np.zeros((2, 0)), 0.5
    from scipy.special import ndtr, ndtri

    quantiles = ndtri((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    differences = prior.difference + prior.error * quantiles
    sides = np.stack([differences > 0, differences < 0]).astype(np.float64)
    total = sides.sum(axis=1, keepdims=True)
    shares = prior.trust * sides / np.maximum(total, 1.0)
    above = float(ndtr(prior.difference / prior.error)) if prior.error > 0 else 0.5
    half = prior.trust / 2
    return differences, shares, float(np.clip(above, 0.5 - half, 0.5 + half))


class PairedSequence:
    """Wealth of the bets on some claims in some independent duels, round after round.

    Args:
        span: hi - lo of the returns.
        limits: (K,) bounds of the controls.
        points: (P,) claims D <= m and D >= m are bet against for each m of these.
        level: 1 - alpha.
        limit: rounds that there may be.
        prior: what is expected.
        runs: number of duels that go on side by side.

    Attributes:
        above: (runs, P) whether D > m is certain.
        below: (runs, P) whether D < m is certain.
        rounds: how many there were.
    """

    def __init__(
        self,
        span: float,
        limits: FloatArray,
        points: FloatArray,
        *,
        level: float = 0.95,
        limit: int = 1000,
        prior: Prior | None = None,
        runs: int = 1,
    ) -> None:
        self.span, self.limits, self.points = span, limits, points
        self.level, self.prior = level, Prior() if prior is None else prior
        self._sizes = bet_sizes(limit, level)
        self._expected, follow, theta = expected_bets(self.prior)
        rest = 1.0 - follow.sum(axis=1, keepdims=True)
        even = np.full((2, self._sizes.size), 1.0 / self._sizes.size)
        with np.errstate(divide="ignore"):  # bets on the other side have no share
            self._log_shares = np.log(np.hstack([rest * even, follow]))
        alpha = 1.0 - level
        self._needed = -np.log([alpha * theta, alpha * (1.0 - theta)])
        controls = limits.size
        self.rounds = 0
        self.above = np.zeros((runs, points.size), dtype=np.bool_)
        self.below = np.zeros((runs, points.size), dtype=np.bool_)
        self._logs = np.zeros((2, runs, points.size, self._sizes.size + self._expected.size))
        self._total, self._square = np.zeros(runs), np.zeros(runs)  # of the raw differences
        self._luck = np.zeros((runs, controls))  # sum of the controls
        self._cross = np.zeros((runs, controls))
        self._squares = np.zeros((runs, controls, controls))
        self._mean = np.zeros(runs)  # of x
        self._history: list[FloatArray] = []  # (3, runs) each: x, reach, sigma

    def choose(self) -> tuple[FloatArray, FloatArray]:
        """Return (runs, K) coefficients and (runs,) the spread of x, both for the next round.

        Of the best coefficients c, those of the regression on the rounds so far, a part g is used:
        controls make x less variable, but also its range wider, and so the largest bet smaller. g
        is the one of `_PARTS` for which the wealth is expected to grow fastest, by

            b d - b^2 (sigma_g^2 + d^2) / 2,    b = min(d / (sigma_g^2 + d^2), CAP / reach_g)

        with d the difference that the prior and the rounds so far suggest.
        """
        prior, n = self.prior, self.rounds
        known = prior.deviation > 0.0
        weight = prior.rounds if known else 1.0
        products = prior.coefficients * prior.variances
        start = prior.deviation**2 if known else (self.span / 4) ** 2
        count = weight + max(n - 1, 0)
        mean, luck = self._total / max(n, 1), self._luck / max(n, 1)
        variance = self._square - n * mean**2 + weight * (start + prior.coefficients @ products)
        cross = self._cross - self._luck * mean[:, None] + weight * products
        squares = self._squares - self._luck[:, :, None] * luck[:, None]
        squares = squares + weight * np.diag(prior.variances)
        if not self.limits.size:
            return np.zeros((mean.size, 0)), np.sqrt(np.maximum(variance, 0.0) / count)
        best = np.linalg.solve(squares, cross[..., None])[..., 0]
        best = np.clip(best, 0.0, _MOST)
        gain = np.sum(best * cross, axis=1)
        curve = np.einsum("rk,rkl,rl->r", best, squares, best)
        left = (variance[:, None] - 2 * _PARTS * gain[:, None] + _PARTS**2 * curve[:, None]) / count
        left = np.maximum(left, 1e-6 * variance[:, None] / count)
        d = self._suggested(left)
        wanted, reach = d / (left + d**2), self.span + _PARTS * (best @ self.limits)[:, None]
        bet = np.minimum(wanted, CAP / reach)
        chosen = np.argmax(bet * d - bet**2 * (left + d**2) / 2, axis=1)
        each = np.arange(mean.size)
        return _PARTS[chosen][:, None] * best, np.sqrt(left[each, chosen])

    def _suggested(self, variance: FloatArray) -> FloatArray:
        """Return (runs, parts) the size of D that prior and rounds suggest, given variances."""
        prior, n = self.prior, self.rounds
        precise = 1.0 / prior.error**2 if prior.trust > 0.0 and prior.error > 0.0 else 0.0
        own = n / variance
        total = own + precise
        size = np.abs(own * self._mean[:, None] + precise * prior.difference)
        total = np.maximum(total, 1.0 / variance)
        return np.asarray(np.maximum(size, np.sqrt(total)) / total)  # not less than its own error

    def add(self, differences: FloatArray, controls: FloatArray) -> None:
        """Take the outcome of one round in every duel.

        Args:
            differences: (runs,) G_a - G_b.
            controls: (runs, K), of conditional mean 0.
        """
        c, sigma = self.choose()
        x = differences - np.sum(c * controls, axis=1)
        reach = self.span + np.abs(c) @ self.limits
        self._bet(x, reach, sigma)
        self._history.append(np.stack([x, reach, sigma]))
        self.rounds += 1
        self._total += differences
        self._square += differences**2
        self._luck += controls
        self._cross += controls * differences[:, None]
        self._squares += controls[:, :, None] * controls[:, None]
        self._mean += (x - self._mean) / self.rounds

    def _bets(self, sigma: FloatArray) -> FloatArray:
        """Return (n, J + Q) bets for spreads (n,): some even, some on what is expected.

        The best bet on a difference d is d / (sigma^2 + d^2).
        """
        d, square = np.abs(self._expected), sigma[:, None] ** 2
        return np.hstack([self._sizes / sigma[:, None], d / (square + d**2)])

    def _bet(self, x: FloatArray, reach: FloatArray, sigma: FloatArray) -> None:
        sides = (self.above, self.below)
        for side, sign in enumerate((1.0, -1.0)):
            room = reach[:, None] + sign * self.points  # the most that x can be below (above) m
            most = CAP / np.maximum(room, np.finfo(np.float64).tiny)
            bets = np.minimum(self._bets(sigma)[:, None], most[..., None])
            gain = sign * (x[:, None] - self.points)
            self._logs[side] += np.log1p(bets * gain[..., None])
            wealth = np.logaddexp.reduce(self._logs[side] + self._log_shares[side], axis=-1)
            sides[side][...] |= wealth >= self._needed[side]

    @property
    def mean(self) -> FloatArray:
        """(runs,) mean of x, the estimate of D."""
        return self._mean.copy()

    def interval(self, run: int = 0) -> Interval:
        """Return the differences that no round so far has refuted; it never widens."""
        if not self._history:
            return Interval(-self.span, self.span, self.level, "betting")
        x, reach, sigma = np.array(self._history)[:, :, run].T
        ends = []
        for side, sign in enumerate((1.0, -1.0)):
            # sign * D > -span is known; halve what lies between a refuted and an open claim
            low, high = -self.span, self.span
            for _ in range(60):
                middle = (low + high) / 2
                refuted = self._refuted(side, sign, sign * middle, x, reach, sigma)
                low, high = (middle, high) if refuted else (low, middle)
            ends.append(sign * low)
        return Interval(float(ends[0]), float(ends[1]), self.level, "betting")

    def _refuted(
        self,
        side: int,
        sign: float,
        point: float,
        x: FloatArray,
        reach: FloatArray,
        sigma: FloatArray,
    ) -> bool:
        """Tell whether the bets against one claim ever had enough wealth."""
        most = CAP / np.maximum(reach + sign * point, np.finfo(np.float64).tiny)
        bets = np.minimum(self._bets(sigma), most[:, None])
        logs = np.cumsum(np.log1p(bets * (sign * (x - point))[:, None]), axis=0)
        wealth = np.logaddexp.reduce(logs + self._log_shares[side], axis=1)
        return bool(wealth.max() >= self._needed[side])
