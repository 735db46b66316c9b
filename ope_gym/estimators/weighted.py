"""The weighted estimators: plain or normalised, capped or not, doubly robust or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.chunks import Column, discounts
from ope_gym.estimators.reductions import Reduction, Starts
from ope_gym.estimators.step_sums import Influence, Payer, Replicates, StepSums, StepTotals
from ope_gym.estimators.table import Composition
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.computed import Computed

_NONE = np.empty(0)
T = TypeVar("T")
# An estimator: yields the reductions it needs next, is sent their totals, returns its result.
Steps: TypeAlias = Generator[tuple[Reduction, ...], tuple[Any, ...], T]


@dataclass(frozen=True, eq=False)
class Setting:
    """The facts that the estimators of one evaluation share; n trajectories, K behaviours.

    Args:
        trajectories: n.
        groups: (n,) the groups inside which influence values are centred.
        rounds: (n,) behaviour of each trajectory.
        counts: (K,) trajectories of each behaviour.
        gamma: discount.
        cap: upper bound of the weights of capped estimators.
        has_q: whether there is a q model.
        draws: Bootstrap draws; None without a bootstrap.
        errors: whether influence values are wanted, not the values alone.
    """

    trajectories: int
    groups: IntArray
    rounds: IntArray
    counts: IntArray
    gamma: float = 1.0
    cap: float = 10.0
    has_q: bool = False
    draws: Resamples | None = None
    errors: bool = True

    def column(self, c: Composition) -> Column:
        """Return which weights an estimator uses, and what they multiply."""
        return Column(c.scheme, self.cap if c.capped else None, c.baseline)

    def drawn(self, influence: FloatArray) -> FloatArray | None:
        """Return replicates (R,) of the mean of influence values; None without a bootstrap."""
        return None if self.draws is None else self.draws.means(influence)


def weighted(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute a plain or normalised, capped or not, doubly robust or not, weighted estimate.

    Basic, fused and optimal weights: Nedelec, Le Roux & Perchet (2017),
    https://arxiv.org/abs/1704.00773. With a q model: DR of Jiang & Li (2016),
    https://arxiv.org/abs/1511.03722; WDR of Thomas & Brunskill (2016),
    https://arxiv.org/abs/1604.00923.
    """
    return (yield from weigh_column(setting.column(c), c.normalised, setting))


def weigh_column(column: Column, normalised: bool, setting: Setting) -> Steps[Computed]:
    """Compute the weighted estimate of one column."""
    wanted: tuple[Reduction, ...] = (StepSums(column, setting.gamma),)
    totals, *starts = yield (*wanted, Starts()) if column.baseline else wanted
    start = starts[0] if starts else None
    if normalised:
        return (yield from normalise(column, totals, start, setting))
    with np.errstate(invalid="ignore"):
        value = float(totals.psi.mean())
    computed = _computed(value, totals.psi, totals)
    if start is not None:
        computed = dataclasses.replace(
            computed, value=value + float(start.mean()), influence=totals.psi + start
        )
    return dataclasses.replace(computed, replicates=setting.drawn(computed.influence))


def normalise(
    column: Column, totals: StepTotals, start: FloatArray | None, setting: Setting
) -> Steps[Computed]:
    """Compute the normalised estimate of a column whose sums are known.

    With a q model (`start`, its v at the start) the mean of v is added, and drawn anew with the
    rest in the bootstrap.
    """
    gamma, columns = setting.gamma, totals.columns
    value = columns.value(gamma)
    if not setting.errors:
        return _computed(value + (0.0 if start is None else float(start.mean())), _NONE, totals)
    wanted: tuple[Reduction, ...] = (Influence(column, gamma, columns, setting.trajectories),)
    if setting.draws is not None and np.isfinite(value):
        payer = Payer(discounts(gamma, columns.peak.size)[:, None])
        wanted = (*wanted, Replicates(column, columns, setting.draws, payer))
    influence, *drawn = yield wanted
    computed = _computed(value, influence, totals)
    if drawn:
        computed = dataclasses.replace(computed, replicates=drawn[0][:, 0])
    if start is None:
        return computed
    mean = float(start.mean())
    moved = dataclasses.replace(computed, value=value + mean, influence=influence + (start - mean))
    if computed.replicates is None or setting.draws is None:
        return moved
    return dataclasses.replace(moved, replicates=computed.replicates + setting.draws.means(start))


def _computed(value: float, influence: FloatArray, totals: StepTotals) -> Computed:
    return Computed(value, influence, totals.weights)
