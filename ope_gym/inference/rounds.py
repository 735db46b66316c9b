"""Choose whom to play in the next round of a duel, and turn what was played into a number.

Returns G lie in [lo, hi], with middle M. A round is one of two, and x has the mean D = J_a - J_b
given the past, because all that is chosen is chosen before the round:

    pair    both play, with the same seed          x = G_a - G_b - sum_k c_k C_k
    single  a plays with chance h, else b does     x = r (G - M - c),    r = w_a - w_b

(Where differences are assumed to be symmetric, the seeds of a pair are independent: see
`sequences`.) C_k are controls of conditional mean 0, bounded by l_k
(`ope_gym.analysis.duel_prior`). For a single episode w_a = p_a / (h p_a + (1 - h) p_b), with p_a
the probability that a gives to its actions: the lot makes the denominator the distribution of the
episode, so E[w_a G] = J_a and E[r] = 0, exactly and for every c. With L = log p_a - log p_b and t =
tanh(L / 2)

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
makes R larger; it pays where returns of one policy vary more and the range does not matter. Single
episodes have no control: it takes variance away, but widens the range, and the two about cancel.

What is played is what is expected to grow fastest, by b d - b^2 m / 2 for each episode, with the
best bet b = min(d / m, CAP / reach) on the difference d that prior and rounds so far suggest, and
m the second moment of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.sequences import CAP, Assumed, Prior, Wealth

_MOST = 1.5  # largest coefficient of a control
_PARTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # of c that may be used
SHARES = np.array([0.25, 0.5, 0.75])  # chances h of a in the lot
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
        lot: (...) the chance of a in the lot that chose who played them.
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
        coefficients: (runs, K) of the controls of a pair.
        centre: (runs,) c of a single episode.
        reach: (runs,) bound of |x|.
        sigma: (runs,) expected spread of x.
    """

    single: NDArray[np.bool_]
    share: FloatArray
    coefficients: FloatArray
    centre: FloatArray
    reach: FloatArray
    sigma: FloatArray


@dataclass(frozen=True, eq=False)
class _Choices:
    """Hold (runs, N) bounds of |x| and variances of x, or second moments, for N ways to play."""

    reach: FloatArray
    variance: FloatArray

    def fastest(self, d: FloatArray, moment: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return (runs,) which one grows fastest, and its growth a round, given D and E[x^2]."""
        bet = np.minimum(d / moment, CAP / self.reach)
        growth = bet * d - bet**2 * moment / 2
        chosen = np.argmax(growth, axis=1)
        return chosen, growth[np.arange(len(growth)), chosen]


class Rounds:
    """Plan rounds of some independent duels, and bet on them.

    Args:
        assumed: what the bets rest on; single episodes need bounds.
        limits: (K,) bounds of the controls.
        points: (P,) see `Wealth`.
        level: 1 - alpha.
        limit: pairs that there may be.
        prior: what is expected.
        runs: number of duels that go on side by side.
        pairs: play pairs only.

    Attributes:
        wealth: the bets.
        episodes: (runs,) how many were played.
    """

    def __init__(
        self,
        assumed: Assumed,
        limits: FloatArray,
        points: FloatArray,
        *,
        level: float = 0.95,
        limit: int = 1000,
        prior: Prior | None = None,
        runs: int = 1,
        pairs: bool = False,
    ) -> None:
        self.assumed, self.limits, self.pairs = assumed, limits, pairs
        self.prior = Prior() if prior is None else prior
        self.wealth = Wealth(
            assumed, points, level=level, limit=2 * limit, prior=self.prior, runs=runs
        )
        controls = limits.size
        self.episodes = np.zeros(runs, dtype=np.int64)
        self._n = np.zeros(runs)  # pairs
        self._total, self._square = np.zeros(runs), np.zeros(runs)  # of their differences
        self._luck = np.zeros((runs, controls))  # sum of the controls
        self._cross = np.zeros((runs, controls))
        self._squares = np.zeros((runs, controls, controls))
        self._moments = np.zeros((runs, SHARES.size, 3))  # sums, see `weight_moments`
        self._precision, self._mean = np.zeros(runs), np.zeros(runs)
        self._sizes: list[FloatArray] = []  # |x|, where there are no bounds

    # Plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return how to play the next round."""
        runs = self._n.size
        if self.assumed.bounds is None:
            zero, even = np.zeros(runs), np.full(runs, 0.5)
            unused, free = np.zeros((runs, self.limits.size)), np.full(runs, np.inf)
            return Plan(zero > 0, even, unused, zero, free, self._free_sigma())
        coefficients, pair = self._pairs()
        share, centre, alone = self._singles()
        least = np.minimum(pair.variance.min(axis=1), alone.variance.min(axis=1))
        d = self._suggested(least)[:, None]
        i, pair_growth = pair.fastest(d, pair.variance + d**2)
        j, growth = alone.fastest(d, np.maximum(alone.variance, d**2))
        single = (2 * growth > pair_growth) & (not self.pairs)
        if not np.isfinite(self.prior.moments).all():
            single &= self.episodes > 0  # a pair says something about both
        each = np.arange(runs)
        return Plan(
            single,
            share[each, j],
            coefficients[each, i],
            centre[each, j],
            np.where(single, alone.reach[each, j], pair.reach[each, i]),
            np.sqrt(np.where(single, alone.variance[each, j], pair.variance[each, i])),
        )

    def _free_sigma(self) -> FloatArray:
        """Return (runs,) the spread of x without bounds: robust, because tails may be heavy."""
        runs = self._n.size
        if self.assumed.deviation is not None:
            return np.full(runs, self.assumed.deviation)
        known = self.prior.deviation > 0.0
        if not self._sizes:
            return np.full(runs, self.prior.deviation if known else np.inf)
        sigma = _NORMAL * np.median(self._sizes, axis=0)
        return np.asarray(np.where(sigma > 0.0, sigma, np.inf))

    def _pairs(self) -> tuple[FloatArray, _Choices]:
        """Return (runs, N, K) coefficients of pairs, and what comes of them.

        Of the best coefficients, those of the regression on the pairs so far, a part is used:
        controls make x less variable, but also its range wider, and so the largest bet smaller.
        """
        prior, n = self.prior, self._n
        known = prior.deviation > 0.0
        weight = prior.rounds if known else 1.0
        products = prior.coefficients * prior.variances
        start = prior.deviation**2 if known else (self.assumed.span / 4) ** 2
        count = weight + np.maximum(n - 1, 0)
        many = np.maximum(n, 1)
        mean, luck = self._total / many, self._luck / many[:, None]
        variance = self._square - n * mean**2 + weight * (start + prior.coefficients @ products)
        variance = np.maximum(variance, 0.0)
        if not self.limits.size:
            parts, best = _PARTS[:1], np.zeros((n.size, 0))
            left = (variance / count)[:, None]
        else:
            cross = self._cross - self._luck * mean[:, None] + weight * products
            squares = self._squares - self._luck[:, :, None] * luck[:, None]
            squares = squares + weight * np.diag(prior.variances)
            solved = np.linalg.solve(squares, cross[..., None])[..., 0]
            best, parts = np.asarray(np.clip(solved, 0.0, _MOST)), _PARTS
            gain = np.sum(best * cross, axis=1)[:, None]
            curve = np.einsum("rk,rkl,rl->r", best, squares, best)[:, None]
            left = variance[:, None] - 2 * parts * gain + parts**2 * curve
            left = np.maximum(left, 1e-6 * variance[:, None]) / count[:, None]
        reach = self.assumed.span + parts * (best @ self.limits)[:, None]
        return parts[:, None] * best[:, None], _Choices(reach, left)

    def _singles(self) -> tuple[FloatArray, FloatArray, _Choices]:
        """Return (runs, N) shares and centres of single episodes, and what comes of them."""
        half, weight = self.assumed.span / 2, 1.0
        start = np.array([1.0, 0.0, half**2 / 4]) / (SHARES * (1 - SHARES))[:, None]
        if np.isfinite(self.prior.moments).all():
            start, weight = self.prior.moments, self.prior.rounds
        sums = (self._moments + weight * start) / (weight + self.episodes)[:, None, None]
        one, linear, square = np.moveaxis(sums, -1, 0)[..., None]  # (runs, H, 1)
        centre = _PARTS * np.clip(linear / np.maximum(one, _TINY), -half, half)
        moment = np.maximum(square - 2 * centre * linear + centre**2 * one, 1e-12 * half**2)
        reach = (half + np.abs(centre)) / np.minimum(SHARES, 1 - SHARES)[:, None]
        share = np.broadcast_to(SHARES[:, None], centre.shape)
        share, centre, moment, reach = (
            x.reshape(len(x), -1) for x in (share, centre, moment, reach)
        )
        return share, centre, _Choices(reach, moment)

    def _suggested(self, variance: FloatArray) -> FloatArray:
        """Return (runs,) the size of D that prior and rounds suggest, given variances of x.

        A prior that the rounds contradict counts with the error that it turns out to have.
        """
        prior, own = self.prior, self._precision
        precise = np.zeros_like(own)
        if prior.trust > 0.0:
            off = (self._mean - prior.difference) ** 2 - 1.0 / np.maximum(own, _TINY)
            square = prior.error**2 + np.maximum(off, 0.0)
            precise = np.where(square > 0.0, 1.0 / np.maximum(square, _TINY), 0.0)
        size = np.abs(own * self._mean + precise * prior.difference)
        total = np.maximum(own + precise, 1.0 / variance)
        return np.asarray(np.maximum(size, np.sqrt(total)) / total)  # not less than its own error

    # Take ------------------------------------------------------------------------------------

    def add(
        self,
        plan: Plan,
        who: IntArray,
        returns: FloatArray,
        log_ratios: FloatArray,
        controls: FloatArray,
    ) -> None:
        """Take the outcome of one round in every duel.

        Args:
            plan: of this round.
            who: (runs,) 0 for a or 1 for b, drawn to play a single episode.
            returns: (runs, 2) of a and b; for a single episode the other one is not looked at.
            log_ratios: (runs, 2) L of their episodes.
            controls: (runs, K), of conditional mean 0.
        """
        single, each = plan.single, np.arange(self._n.size)
        middle = 0.0 if self.assumed.bounds is None else sum(self.assumed.bounds) / 2
        t, apart = np.tanh(log_ratios[each, who] / 2), returns - middle
        r = 2 * t / (1.0 + (2 * plan.share - 1) * t)
        difference = np.where(single, 0.0, returns[:, 0] - returns[:, 1])
        luck = np.where(single[:, None], 0.0, controls)
        x = np.where(single, r * (apart[each, who] - plan.centre), difference)
        x = x - np.sum(plan.coefficients * luck, axis=1)
        self.wealth.add(x, plan.reach, plan.sigma)
        if self.assumed.bounds is None:
            self._sizes.append(np.abs(x))
        self._n += ~single
        self._total += difference
        self._square += difference**2
        self._luck += luck
        self._cross += luck * difference[:, None]
        self._squares += luck[:, :, None] * luck[:, None]
        seen = ~single[:, None] | (who[:, None] == np.arange(2))
        lot = np.where(single, plan.share, 0.5)[:, None] * np.ones(2)
        terms = weight_moments(log_ratios, apart, lot)
        self._moments += np.sum(np.where(seen[..., None, None], terms, 0.0), axis=1)
        self.episodes += seen.sum(axis=1)
        weight = np.where(np.isfinite(plan.sigma), 1.0 / plan.sigma**2, 0.0)
        self._precision += weight
        self._mean += (x - self._mean) * weight / np.maximum(self._precision, _TINY)

    @property
    def mean(self) -> FloatArray:
        """(runs,) mean of x, weighted by expected precision: the estimate of D."""
        return self._mean.copy()
