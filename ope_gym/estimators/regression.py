"""NFRIS: NFIS minus its regression on the scores of the behaviours.

    J = NFIS - c mean(h),   c = clip(slope - its standard error, 0, 1)

The policies that acted are known, and yet weights against probabilities estimated from their own
actions are less noisy. To first order they turn the influence values psi of NFIS into psi - h: h_i
is predicted from the score of the policy that acted, without the return of episode i
(`ope_gym.weights.scores` derives it). The slope is <psi, h> / <h, h>, centred inside behaviours,
with an error that allows for episodes of unequal spread. Only what is clear of that error is used:
where there are too few episodes for the parameters h is noise, and J is NFIS. The error of J is
that of psi_i - c h_i. Since the slopes in h_i did not see episode i, what they explain by chance is
not counted as precision.

Use it where no q model fits the problem and the behaviours are known policies with finitely many
actions. It gains little where the return is mostly noise, or where few long episodes have the
weight. Weakness: a bias of order 1 / n, as of all normalised estimates. ESS and verdict are those
of NFIS; bootstrap replicates are those of the influence values, with c held. Cost: that of NFIS,
and twice the probabilities of all actions under all behaviours, in blocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, step_numbers
from ope_gym.estimators.reductions import Column, Columns, StepSums, Weighted, discounts
from ope_gym.estimators.run import ask
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting, Steps, normalise
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import centre, join_single


class Scores(Protocol):
    """The scores of the behaviours, see `ope_gym.weights.scores`."""

    def predicted(self, pay: FloatArray) -> FloatArray:
        """Return h (n,), from what each step adds to the estimate beyond its mean."""
        ...


def regression(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute NFIS less its regression on the scores of the behaviours."""
    column, draws = setting.column(c), setting.draws
    totals = yield from ask(StepSums(column, setting.gamma, setting.errors))
    plain: Computed = yield from normalise(
        column, totals, None, dataclasses.replace(setting, draws=None)
    )
    if not np.isfinite(plain.value):
        return plain
    h = yield from ask(Predicted(column, setting.gamma, totals.columns))
    psi = plain.influence
    share = clear_slope(psi, h, setting.groups)
    value = plain.value - share * float(h.mean())
    influence = psi - share * (h - h.mean())
    return dataclasses.replace(
        plain,
        value=value,
        influence=influence,
        replicates=None if draws is None else value + draws.means(influence),
        report={"c": share},
    )


def clear_slope(psi: FloatArray, h: FloatArray, groups: IntArray) -> float:
    """Return the slope of psi on h within groups, less its standard error, within [0, 1]."""
    groups = join_single(groups)
    y, x = centre(psi, groups), centre(h, groups)
    largest = float(np.abs(x).max())
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    y, x = y / largest, x / largest  # their squares could leave the floats
    size = float(x @ x)
    slope = float(x @ y) / size
    error = float(np.sqrt(np.sum((x * (y - slope * x)) ** 2))) / size
    return float(np.clip(slope - error, 0.0, 1.0))


@dataclass(frozen=True)
class Predicted:
    """Ask for h (n,), what the scores of all trajectories predict of their influence values.

    Args:
        column: which weights.
        gamma: discount.
        columns: their sums at each step.
    """

    column: Column
    gamma: float
    columns: Columns

    def part(self, chunk: Weighted) -> FloatArray:
        """Predict from the only chunk."""
        scores: Scores = chunk.whole["scores"]()
        return scores.predicted(self.pay(chunk))

    def total(self, merged: FloatArray) -> FloatArray:
        """Return it unchanged."""
        return merged

    def pay(self, chunk: Weighted) -> FloatArray:
        """Return gamma^t w / W_t (r - R_t) of each step (S,), what follows an end with the end."""
        log_w, rewards, offsets = self.column.of(chunk)
        peak, sums = self.columns.peak, self.columns.sums
        steps, mean = step_numbers(offsets), sums[2] / sums[0]
        factor = discounts(self.gamma, peak.size) / sums[0]
        pay = np.exp(log_w - peak[steps]) * factor[steps] * (rewards - mean[steps])
        lengths, last = np.diff(offsets), offsets[1:] - 1
        for sign in (1.0, -1.0):
            pay[last] -= sign * _after(
                log_w[last], lengths, peak, np.maximum(sign * factor * mean, 0.0)
            )
        return np.asarray(pay)


def _after(
    log_last: FloatArray, lengths: IntArray, peak: FloatArray, paid: FloatArray
) -> FloatArray:
    """Return sum_{t >= length} exp(log_last - peak_t) paid_t (n,), paid (T,) not below 0.

    In logs: a peak may be far above others, but no last weight is above a later peak.
    """
    with np.errstate(divide="ignore"):
        terms = np.log(paid) - peak
    ahead = np.append(np.logaddexp.accumulate(terms[::-1])[::-1], -np.inf)
    return np.asarray(np.exp(log_last + ahead[lengths]))
