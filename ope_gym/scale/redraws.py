"""Weigh episodes anew with draws of estimated propensities, for the error of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.methods import estimator
from ope_gym.estimators.run import reduce_chunk, run
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.computed import Computed
from ope_gym.models.base import Baseline, QModel
from ope_gym.scale.weighing import Shared, Weighing
from ope_gym.weights.answers import Answers
from ope_gym.weights.behaviours import Behaviours, redrawn

_KEPT = 1 << 20  # steps up to which the mixtures of drawn policies are kept

# of the estimators, their setting, the number of a target, and what was computed for it
Scatter: TypeAlias = Callable[[Sequence[str], Setting, int, Sequence[Computed]], list[Computed]]


class Held(NamedTuple):
    """A target's answers, the q model, and its values at every step."""

    answers: Answers
    model: QModel | Baseline | None
    baseline: Baseline | None


class Redraws:
    """The episodes as recorded by draws of the models that propensities were estimated by.

    Args:
        data: The episodes.
        behaviours: Theirs.
        count: Number of draws; 0 where propensities were recorded.
    """

    def __init__(self, data: Trajectories, behaviours: Behaviours, count: int) -> None:
        self._data, self._behaviours, self._count = data, behaviours, count
        self._kept: dict[int, tuple[Trajectories, Shared]] = {}

    def scatter(
        self,
        weighing: Weighing,
        held: Sequence[Held],
        names: Sequence[str],
        setting: Setting,
        i: int,
        computed: Sequence[Computed],
    ) -> list[Computed]:
        """Add the estimation error of the propensities to each bias of the target `i`.

        The estimators run anew with draws of the fitted models. The root mean square by which a
        value moves holds both: how much it varies with the models, and how far the middle of its
        values lies off, which plain weights do, because 1 / p is convex. In large samples a model
        that learned from the weighed episodes moves against their own chance (Hirano, Imbens and
        Ridder, 2003): the sum of both squares is on the safe side.
        """
        adjusted, draws = list(computed), self._count
        moved = [j for j, n in enumerate(names) if ESTIMATORS[n].scheme and not ESTIMATORS[n].whole]
        if not (draws and moved):
            return adjusted
        target, plain = held[i], dataclasses.replace(setting, draws=None)
        off = np.empty((len(moved), draws))
        for r in range(draws):
            data, shared = self._drawn(r)
            about = target.answers.about(data)
            chunk = weighing.weigh(about, self._behaviours.ids, 0, target.baseline, shared)
            again = run([estimator(names[j], plain) for j in moved], reduce_chunk(chunk))
            off[:, r] = [one.value - computed[j].value for one, j in zip(again, moved, strict=True)]
        for j, row in zip(moved, off, strict=True):
            seen = row[np.isfinite(row)]  # without any weight left there is no value
            error = float(np.sqrt(np.mean(seen**2))) if seen.size else 0.0
            adjusted[j] = dataclasses.replace(
                computed[j],
                bias=float(np.hypot(computed[j].bias, error)),
                report={**computed[j].report, "propensities": error},
            )
        return adjusted

    def _drawn(self, r: int) -> tuple[Trajectories, Shared]:
        """Return the episodes as recorded by the draw r of estimated policies, and its mixtures."""
        drawn = self._kept.get(r)
        if drawn is None:
            drawn = redrawn(self._data, self._behaviours.policies, r), Shared()
        if self._data.n_steps <= _KEPT:
            self._kept[r] = drawn
        return drawn
