"""The methods by name: how the estimators of the table are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ope_gym.estimators.adaptive import adaptive
from ope_gym.estimators.auto import auto
from ope_gym.estimators.chunks import Column
from ope_gym.estimators.empirical_average import empirical_average
from ope_gym.estimators.magic import magic
from ope_gym.estimators.marginal import direct, mdr
from ope_gym.estimators.reductions import Bets
from ope_gym.estimators.run import ask, together
from ope_gym.estimators.table import ESTIMATORS, Composition
from ope_gym.estimators.weighted import Setting, Steps, weighted
from ope_gym.inference.computed import Computed
from ope_gym.inference.intervals import Betting

METHODS: dict[str, Callable[[Composition, Setting], Steps[Computed]]] = {
    "weighted": weighted,
    "direct": direct,
    "auto": auto,
    "magic": magic,
    "marginal": mdr,
    "adaptive": adaptive,
    "average": empirical_average,
}


def estimator(name: str, setting: Setting, betting: Betting | None = None) -> Steps[Computed]:
    """Run an estimator of the table.

    Args:
        name: Name of the estimator.
        setting: what all estimators of an evaluation share.
        betting: the interval, if it is one by betting, which needs sums of its own.
    """
    c = ESTIMATORS[name]
    if c.method != "weighted" and (c.method != "auto" or setting.has_q):
        setting = dataclasses.replace(setting, errors=True)  # its value rests on influence values
    steps = METHODS[c.method](c, setting)
    if betting is None:
        return (yield from steps)
    assert betting.reward_range is not None
    assert betting.horizon is not None
    column = Column(c.scheme, setting.cap if c.capped else None)
    bets = Bets(column, setting.gamma, betting.reward_range, betting.horizon)
    computed: Computed
    computed, sums = yield from together(steps, ask(bets))
    return dataclasses.replace(computed, bets=sums)
