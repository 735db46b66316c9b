"""Choose whom to play in the next round of a duel, and turn what was played into a number.

Returns G lie in [lo, hi], with middle M. A round is one of two, and x has the mean D = J_a - J_b
given the past, because all that is chosen is chosen before the round:

    pair    both play, with the same seed          x = G_a - G_b
    single  a plays with chance h, else b does     x = r (G - M - c),    r = w_a - w_b

(Where differences are assumed to be symmetric, the seeds of a pair are independent: see
`sequences`.) For a single episode w_a = p_a / (h p_a + (1 - h) p_b), with p_a the probability that
a gives to its actions: the lot makes the denominator the distribution of the episode, so E[w_a G] =
J_a and E[r] = 0, exactly and for every c. With L = log p_a - log p_b and t = tanh(L / 2)

    r = 2 t / (1 + (2 h - 1) t),    |x| <= ((hi - lo) / 2 + |c|) / min(h, 1 - h)

A single episode says something about both policies as far as both would have played it: r is small
where they agree, whatever the environment did. Policies that share no episode have the largest |r|,
which is a comparison of independent episodes. A pair cancels the luck of the environment as far as
the seeds do. For two policies that are close, r goes down with the distance between them, as D
does; the difference of a pair is as large as ever in those rounds where the two part.

Bets are limited by the range of x. In a round of range R the wealth grows at most by log(1 + D /
R), and R = hi - lo both for a pair, of two episodes, and for a single one with h = 1/2. No data
help against that: an environment with D <= 0 may look like the real one but for one episode in 1 +
R / D, in which a and b part and b has it all. To exclude it takes log(1 / alpha) / log(1 + D / R)
episodes (`fewest_episodes`), and pairs with common seeds take twice as many. A lot other than even
makes R larger; it pays where returns of one policy vary more and the range does not matter.

What is played is what is expected to grow fastest, by b d - b^2 m / 2 for each episode, with the
best bet b = min(d / m, CAP / reach) on the difference d that the rounds so far suggest, and m the
second moment of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.sequences import CAP, Assumed, Wealth

SHARES = np.array([0.25, 0.5, 0.75])  # chances h of a in the lot
_PARTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # of the best c, which may cost more range than
# the variance that it saves is worth
_TINY = 1e-300
_NORMAL = 1.4826  # standard deviation over median absolute deviation


def fewest_episodes(difference: float, span: float, level: float) -> float:
    """Return the least mean number of fresh episodes of a test that always ends with the better.

    The test is valid for all returns within the range; one that may end undecided can need fewer.
    With p = D / (D + span) the environment above has D = 0, and n episodes show nothing of it with
    probability (1 - p)^n. A test that ends after N of them is wrong there with a probability of at
    least E[(1 - p)^N] >= (1 - p)^E[N], by Jensen, and that is at most alpha.
    """
    return float(np.log(1.0 / (1.0 - level)) / np.log1p(abs(difference) / span))


def weight_moments(log_ratios: FloatArray, apart: FloatArray, lot: FloatArray) -> FloatArray:
    """Return (..., H, 3) terms whose means are E[r^2 (G - M)^k] for each h of `SHARES`, k < 3.

    Args:
        log_ratios: (...) L of episodes.
        apart: (...) G - M.
        lot: (...) chance of a in the lot that chose who played them.
    """
    t = np.tanh(log_ratios / 2)
    density = 1.0 + (2 * lot - 1) * t  # of the episode, over that of an even lot
    share = 4 * t[..., None] ** 2 / (density[..., None] * (1.0 + (2 * SHARES - 1) * t[..., None]))
    return np.asarray(share[..., None] * apart[..., None, None] ** np.arange(3))


@dataclass(frozen=True, eq=False)
class Plan:
    """Say how the next round of every duel is played.

    Args:
        single: (runs,) whether one policy plays, drawn by lot, or both.
        share: (runs,) chance of a in the lot.
        centre: (runs,) c of a single episode.
        reach: (runs,) bound of |x|.
        sigma: (runs,) expected spread of x.
    """

    single: NDArray[np.bool_]
    share: FloatArray
    centre: FloatArray
    reach: FloatArray
    sigma: FloatArray


class Rounds:
    """Plan rounds of some independent duels, and bet on them.

    Args:
        assumed: what the bets rest on; single episodes need bounds.
        points: (P,) see `Wealth`.
        level: 1 - alpha.
        limit: pairs that there may be.
        runs: number of duels that go on side by side.
        pairs: whether to play pairs only.

    Attributes:
        wealth: the bets.
        episodes: (runs,) how many were played.
        mean: (runs,) mean of x, weighted by expected precision: the estimate of D.
    """

    def __init__(
        self,
        assumed: Assumed,
        points: FloatArray,
        *,
        level: float = 0.95,
        limit: int = 1000,
        runs: int = 1,
        pairs: bool = False,
    ) -> None:
        self.assumed, self.pairs = assumed, pairs
        self.wealth = Wealth(assumed, points, level=level, limit=2 * limit, runs=runs)
        self.episodes = np.zeros(runs, dtype=np.int64)
        self.mean = np.zeros(runs)
        self._precision = np.zeros(runs)  # of the mean
        self._pairs = np.zeros(runs)
        self._total, self._square = np.zeros(runs), np.zeros(runs)  # of the differences of pairs
        self._moments = np.zeros((runs, SHARES.size, 3))  # sums, see `weight_moments`
        self._sizes: list[FloatArray] = []  # |x|, where there are no bounds

    # Plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return how to play the next round: in the way that is expected to decide soonest."""
        runs = self.episodes.size
        if self.assumed.bounds is None:
            never, even, unused = np.zeros(runs, dtype=np.bool_), np.full(runs, 0.5), np.zeros(runs)
            return Plan(never, even, unused, np.full(runs, np.inf), self._free_sigma())
        variance = self._pair_variance()
        share, centre, moment, reach = self._singles()
        d = self._suggested(np.minimum(variance, moment.min(axis=1)))
        pair_growth = self._growth(d, variance + d**2, self.assumed.span)
        growth = self._growth(d[:, None], np.maximum(moment, d[:, None] ** 2), reach)
        best = np.arange(runs), growth.argmax(axis=1)
        single = (2 * growth[best] > pair_growth) & (self.episodes > 0) & (not self.pairs)
        return Plan(
            single,
            share[best],
            centre[best],
            np.where(single, reach[best], self.assumed.span),
            np.sqrt(np.where(single, moment[best], variance)),
        )

    @staticmethod
    def _growth(d: FloatArray, moment: FloatArray, reach: FloatArray | float) -> FloatArray:
        """Return the expected growth of the wealth in a round, given D and E[x^2]."""
        bet = np.minimum(d / moment, CAP / reach)
        return np.asarray(bet * d - bet**2 * moment / 2)

    def _free_sigma(self) -> FloatArray:
        """Return (runs,) the spread of x without bounds: robust, because tails may be heavy."""
        runs = self.episodes.size
        if self.assumed.deviation is not None:
            return np.full(runs, self.assumed.deviation)
        if not self._sizes:
            return np.full(runs, np.inf)
        sigma = _NORMAL * np.median(self._sizes, axis=0)
        return np.asarray(np.where(sigma > 0.0, sigma, np.inf))

    def _pair_variance(self) -> FloatArray:
        """Return (runs,) variance of the difference of a pair; that of span / 4 counts once."""
        n = self._pairs
        squares = self._square - self._total**2 / np.maximum(n, 1)
        start = (self.assumed.span / 4) ** 2
        return np.asarray((np.maximum(squares, 0.0) + start) / (1.0 + np.maximum(n - 1, 0)))

    def _singles(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return (runs, N) shares, centres, E[x^2] and bounds of |x| of N kinds of lots."""
        half = self.assumed.span / 2
        start = np.array([1.0, 0.0, half**2 / 4]) / (SHARES * (1 - SHARES))[:, None]
        means = (self._moments + start) / (1.0 + self.episodes)[:, None, None]
        one, linear, square = np.moveaxis(means, -1, 0)[..., None]  # (runs, H, 1)
        centre = _PARTS * np.clip(linear / np.maximum(one, _TINY), -half, half)
        moment = np.maximum(square - 2 * centre * linear + centre**2 * one, 1e-12 * half**2)
        reach = (half + np.abs(centre)) / np.minimum(SHARES, 1 - SHARES)[:, None]
        share = np.broadcast_to(SHARES[:, None], centre.shape)
        flat = [x.reshape(len(x), -1) for x in (share, centre, moment, reach)]
        return flat[0], flat[1], flat[2], flat[3]

    def _suggested(self, variance: FloatArray) -> FloatArray:
        """Return (runs,) the size of D that the rounds suggest, and not less than its own error.

        Args:
            variance: (runs,) of x in the next round, for duels without rounds.
        """
        precision = np.maximum(self._precision, 1.0 / variance)
        size = np.abs(self._precision * self.mean)
        return np.asarray(np.maximum(size, np.sqrt(precision)) / precision)

    # Take ------------------------------------------------------------------------------------

    def add(self, plan: Plan, who: IntArray, returns: FloatArray, log_ratios: FloatArray) -> None:
        """Take the outcome of one round in every duel.

        Args:
            plan: plan of this round.
            who: (runs,) 0 for a or 1 for b, drawn to play a single episode.
            returns: (runs, 2) of a and b; for a single episode the other one is not looked at.
            log_ratios: (runs, 2) L of their episodes.
        """
        single, each = plan.single, np.arange(self.episodes.size)
        middle = 0.0 if self.assumed.bounds is None else sum(self.assumed.bounds) / 2
        t, apart = np.tanh(log_ratios[each, who] / 2), returns - middle
        r = 2 * t / (1.0 + (2 * plan.share - 1) * t)
        difference = np.where(single, 0.0, returns[:, 0] - returns[:, 1])
        x = np.where(single, r * (apart[each, who] - plan.centre), difference)
        self.wealth.add(x, plan.reach, plan.sigma)
        if self.assumed.bounds is None:
            self._sizes.append(np.abs(x))
        self._pairs += ~single
        self._total += difference
        self._square += difference**2
        seen = ~single[:, None] | (who[:, None] == np.arange(2))
        lot = np.where(single, plan.share, 0.5)[:, None] * np.ones(2)
        terms = weight_moments(log_ratios, apart, lot)
        self._moments += np.sum(np.where(seen[..., None, None], terms, 0.0), axis=1)
        self.episodes += seen.sum(axis=1)
        weight = np.where(np.isfinite(plan.sigma), 1.0 / plan.sigma**2, 0.0)
        self._precision += weight
        self.mean += (x - self.mean) * weight / np.maximum(self._precision, _TINY)
