"""The methods by name: how the estimators of the table are computed."""

from __future__ import annotations

from collections.abc import Callable

from ope_gym.estimators.adaptive import adaptive
from ope_gym.estimators.auto import auto
from ope_gym.estimators.control_variates import fused_with_controls
from ope_gym.estimators.empirical_average import empirical_average
from ope_gym.estimators.magic import magic
from ope_gym.estimators.table import ESTIMATORS, Composition
from ope_gym.estimators.weighted import Setting, Steps, direct, weighted
from ope_gym.inference.computed import Computed

METHODS: dict[str, Callable[[Composition, Setting], Steps[Computed]]] = {
    "weighted": weighted,
    "direct": direct,
    "auto": auto,
    "magic": magic,
    "control variates": fused_with_controls,
    "adaptive": adaptive,
    "average": empirical_average,
}


def estimator(name: str, setting: Setting) -> Steps[Computed]:
    """Start an estimator of the table."""
    composition = ESTIMATORS[name]
    return METHODS[composition.method](composition, setting)
