"""MDR and DM: a q model, corrected by how often the target visits each state and action.

    MDR = 1/n sum_i [v_i,0 + sum_t omega_i,t e_i,t],   e_t = r_t - q_t + gamma v_t+1

omega is the ratio of visits: how often the target comes by this state and action, divided by how
often the recorded policies did (`ope_gym.models.process`, `ope_gym.models.linear`). It holds no
product over time, so its spread does not grow with the length of the episodes as that of importance
weights does. It is right if q is right, or if omega is; the price is that both take the observation
to be a Markov state, which `ope_gym.estimators.markov` checks. DM is the mean of v_0 alone, with a
q that was learned from all episodes where that is cheap. The two have the same noise to first
order, so the error of DM is the one of MDR: the spread of the starts alone would leave out that q
was learned from these episodes. Of actions that no episode shows the model knows nothing, and of
those that one shows it does not know the spread: `Support` bounds what these may be worth.

Known in the literature as double reinforcement learning (Kallus and Uehara, 2020); without q the
ratios alone give marginalised importance sampling (Xie, Ma and Wang, 2019), which for a table or a
linear q is DM itself: b0' A^-1 b is both.

Cost: O(steps), beside the fit of q.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.markov import MarkovCheck, check_markov
from ope_gym.estimators.reductions import LARGEST, Arrays, Starts, Steps, Weighted, ask, together
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.computed import Computed, Weights
from ope_gym.inference.errors import cautious_error
from ope_gym.verdict import Reason

MEMORIES = (0, 1, 2, 4, 8)  # of the rows that auto compares
REFUTED = 0.0027  # p, of three standard errors, from which a model alone is known to be wrong
UNKNOWN = 0.05  # share of the target's visits beyond which what the model guesses is said aloud


@dataclass(frozen=True)
class Corrections:
    """Sum what the residuals of each trajectory add to the mean value at the start, (m, n).

    The row of memory k weighs the residual of step t by the ratio of visits k steps earlier times
    the importance weights of the k actions since; from the first step on if there are fewer. Row 0
    is MDR. If the observations are Markov states all rows have the same mean; if they are not, a
    longer memory sees more of what the state hides.

    Args:
        gamma: discount.
        memories: k of each row, from 0 up.
    """

    gamma: float
    memories: tuple[int, ...] = (0,)

    def part(self, chunk: Weighted) -> Arrays:
        """Sum along the trajectories of a chunk."""
        n = chunk.offsets.size - 1
        if chunk.visits is None:
            return Arrays(np.full((len(self.memories), n), np.nan))
        (ratio, residuals), begins = chunk.visits, chunk.offsets[:-1]
        rows = [np.add.reduceat(ratio * residuals, begins)]
        since, reached = chunk.step_ratios, 1  # log weight of the last actions, and how many
        for k in self.memories[1:]:
            assert chunk.step_ratios is not None  # whoever compares memories asks for them
            assert since is not None
            while reached < k:  # as many actions again, or one more
                twice = 2 * reached <= k
                since = since + _earlier(since if twice else chunk.step_ratios, reached, chunk, 0.0)
                reached += reached if twice else 1
            weight = np.minimum(since, LARGEST)
            np.exp(weight, out=weight)
            if self.gamma != 1.0:
                weight *= (self.gamma ** np.arange(k + 1))[np.minimum(chunk.steps, k)]
            # 1 where the memory reaches the start, where both visit alike
            weight *= _earlier(ratio, k, chunk, 1.0)
            weight *= residuals
            rows.append(np.add.reduceat(weight, begins))
        return Arrays(np.stack(rows))

    def total(self, merged: Arrays) -> FloatArray:
        """Return the sums of all trajectories; NaN if the ratios of any of them are unknown."""
        rows = merged.joined()
        return rows if np.isfinite(rows[0]).all() else np.full_like(rows, np.nan)


def _earlier(values: FloatArray, k: int, chunk: Weighted, start: float) -> FloatArray:
    """Return the values (S,) of k steps earlier, `start` at steps when an episode had not begun."""
    shifted = np.empty(values.size)
    shifted[k:] = values[: max(values.size - k, 0)]
    early = chunk.once(("early", k), lambda: np.flatnonzero(chunk.steps < k))
    shifted[early] = start
    return shifted


class Support(NamedTuple):
    """How much of what the target does the model has data of; n trajectories.

    Args:
        pooled: Standard error of a value whose residuals all have one spread e,
            e sqrt(sum omega^2) / n: an action seen once shows no spread of its own.
        unknown: Share of the target's visits whose action no episode shows the model; NaN if the
            model cannot tell.
        guess: What these may be worth, the sum of their visits times the spread of q between the
            actions of a state, as if all guesses erred to the same side; 0 if it cannot tell.
    """

    pooled: float
    unknown: float
    guess: float


@dataclass
class _SupportSums:
    """Sums of squares of omega and of residuals, their number, visits, unknown ones, guesses."""

    sums: FloatArray
    unit: float

    def merge(self, other: _SupportSums) -> None:
        """Add the sums of later chunks."""
        self.sums = self.sums + other.sums


@dataclass(frozen=True)
class AskSupport:
    """Sum what `Support` is made of, over so many trajectories."""

    trajectories: int

    def part(self, chunk: Weighted) -> _SupportSums:
        """Sum over the steps of a chunk."""
        if chunk.visits is None:
            return _SupportSums(np.full(6, np.nan), chunk.unit)
        ratio, residuals = chunk.visits
        learned, visits = ratio != 0.0, np.full(3, np.nan)
        if chunk.unknown is not None:
            learned &= chunk.unknown[3] != 1.0  # of a guess the residual says nothing
            visits = chunk.unknown[:3].sum(axis=1)
        learned = residuals[learned] / chunk.unit
        sums = [ratio @ ratio, learned @ learned, learned.size, *visits]
        return _SupportSums(np.array(sums), chunk.unit)

    def total(self, merged: _SupportSums) -> Support:
        """Return the answer."""
        ratio, residuals, steps, visits, unknown, guess = merged.sums.tolist()
        spread = merged.unit * np.sqrt(residuals / max(steps, 1.0))
        return Support(
            float(spread * np.sqrt(ratio) / self.trajectories),
            unknown / visits if visits > 0.0 else np.nan,
            0.0 if np.isnan(guess) else guess / self.trajectories,
        )


@dataclass(frozen=True, eq=False)
class Marginal:
    """MDR and the evidence for it; n trajectories.

    Args:
        direct: value of DM.
        start: (n,) v at the start.
        influence: (n,) of MDR; their mean is its value.
        gaps: (m, n) influence values of how far the rows of longer memory lie from MDR.
        markov: whether past steps predict the residuals.
        support: How much of what the target does the model has data of.
    """

    direct: float
    start: FloatArray
    influence: FloatArray
    gaps: FloatArray
    markov: MarkovCheck
    support: Support

    @property
    def value(self) -> float:
        """The estimate."""
        return float(self.influence.mean())

    @property
    def known(self) -> bool:
        """Whether there are ratios of visits at all."""
        return bool(np.all(np.isfinite(self.influence)))

    @property
    def guesses(self) -> tuple[Reason, ...]:
        """A caution where no episode shows what the target does, which every estimate guesses."""
        share = self.support.unknown
        return (Reason("actions_unknown", share=share),) if share > UNKNOWN else ()

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Grounds of an estimate from the model, and what speaks against it."""
        if np.isnan(self.support.unknown):
            return (*self.markov.reasons, Reason("data_unknown"))
        return (*self.guesses, *self.markov.reasons)

    def hidden_error(self, groups: IntArray) -> float:
        """Return what pooled residuals add to the standard error of the influence values."""
        own, pooled = np.nan_to_num(cautious_error(self.influence, groups)), self.support.pooled
        return float(np.sqrt(max(pooled - own, 0.0)) * np.sqrt(pooled + own))

    def error(self, groups: IntArray) -> float:
        """Return the standard error, at least that of pooled residuals; NaN if unknown."""
        return float(np.hypot(cautious_error(self.influence, groups), self.hidden_error(groups)))


def marginal(setting: Setting, memories: tuple[int, ...] = (0,)) -> Steps[Marginal]:
    """Compute MDR and the evidence for it, with rows of these memories."""
    corrections = Corrections(setting.gamma, memories)
    direct, start, added, markov, support = yield from together(
        ask(Starts(direct=True)),
        ask(Starts()),
        ask(corrections),
        check_markov(),
        ask(AskSupport(setting.trajectories)),
    )
    value = float(direct.mean())
    return Marginal(value, start, start + added[0], added[1:] - added[0], markov, support)


def mdr(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute MDR, the marginalised doubly robust estimate.

    Kallus & Uehara (2020), Double reinforcement learning, https://arxiv.org/abs/1908.08526.
    """
    model = yield from marginal(setting)
    if model.known:
        return _computed(model.value, model.influence, model, setting)
    computed = _computed(model.value, model.influence, None, setting)
    return dataclasses.replace(computed, reasons=(Reason("visits_unknown"),))


def direct(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute DM, the mean of v at the start. Cost: the fit of q; weakness: as wrong as q.

    With q by regression on the next step's value: fitted Q evaluation, Le, Voloshin & Yue (2019),
    https://arxiv.org/abs/1903.08738.
    """
    model = yield from marginal(setting)
    if model.known:
        steady = model.influence - model.value + model.direct
        return _computed(model.direct, steady, model, setting)
    spread = model.start - model.start.mean() + model.direct
    computed = _computed(model.direct, spread, None, setting)
    return dataclasses.replace(computed, reasons=(Reason("visits_guessed"),))


def _computed(
    value: float, influence: FloatArray, model: Marginal | None, setting: Setting
) -> Computed:
    """Return an estimate without weights; what a model hides and guesses widens its error."""
    n = float(influence.size)
    computed = Computed(
        value,
        influence,
        Weights(np.array([[n], [n], [0.0]]), np.zeros(influence.size)),
        replicates=setting.drawn(influence),
    )
    if model is None:
        return computed
    bias = float(np.hypot(model.hidden_error(setting.groups), model.support.guess))
    reasons = model.reasons
    if model.markov.chance < REFUTED:
        reasons = (Reason("model_refuted", p=model.markov.chance), *model.guesses)
    return dataclasses.replace(computed, bias=bias, reasons=reasons, share=1.0)
