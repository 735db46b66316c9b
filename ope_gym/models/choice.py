"""The q model that fits the observations, where none is named."""

from __future__ import annotations

import importlib

from ope_gym import batches
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import QModel
from ope_gym.policies.closed_form import FinitePolicy, Policy

_WIDEST = 64  # numbers in an observation from which a quadratic model has too many features


NAMED = {
    "tabular": "tabular:TabularQ",
    "linear": "linear:LinearQ",
    "dynamics": "dynamics:DynamicsQ",
    "network": "network:NetworkQ",
}


def named_model(name: str) -> QModel:
    """The model of that name with its default settings."""
    if name not in NAMED:
        raise ValueError(
            f"q_model is {name!r}; give 'default', {', '.join(map(repr, NAMED))}, None, a model of "
            "ope_gym.models or a Baseline"
        )
    module, _, kind = NAMED[name].partition(":")
    model: QModel = getattr(importlib.import_module(f"ope_gym.models.{module}"), kind)()
    return model


def default_model(data: Trajectories, target: Policy) -> QModel | None:
    """`TabularQ` for whole numbers, `LinearQ` for small arrays of numbers, None for anything else.

    Images, texts and the like need a model of their own, and so do actions with several parts that
    are not plain numbers.
    """
    kinds = {leaf.dtype.kind for leaf in batches.leaves(data.observations)}
    width = sum(leaf[0].size for leaf in batches.leaves(data.observations))
    if kinds <= set("iub") and isinstance(target, FinitePolicy) and width <= _WIDEST:
        from ope_gym.models.tabular import TabularQ

        return TabularQ()
    actions = batches.leaves(data.actions)
    finite = isinstance(target, FinitePolicy) and actions[0].ndim == 1
    plain = len(actions) == 1 and actions[0].dtype.kind in ("iub" if finite else "f")
    if kinds <= set("iubf") and width <= _WIDEST and plain:
        from ope_gym.models.linear import LinearQ

        return LinearQ()
    return None
