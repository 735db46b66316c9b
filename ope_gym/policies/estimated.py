"""Behaviour policies that were estimated from recorded actions: see `ope_gym.fit_behaviour`.

`EstimatedPolicy` holds what was fitted and how an observation becomes its input. It says whose
episodes it learned from and which fold of them it did not see, so that an evaluation can weigh
every episode by models that never saw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.policies.base import (
    Finite,
    FinitePolicy,
    Policy,
    from_bytes,
    register_policy,
    to_bytes,
)
from ope_gym.policies.closed_form import SoftmaxLinear
from ope_gym.policies.mlp import SoftmaxMlp
from ope_gym.policies.numerics import Columns, flat_leaves

ALL = -1  # fold of a policy that learned from all episodes
_LONGEST = 60  # characters of a name that are shown
_INNER = "policy."
_COLUMNS = "columns."


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class StateTable(Finite):
    """Probabilities by state, a row of whole numbers; other states have those of the last row.

    >>> table = StateTable(np.array([[3], [5]]), np.array([[1.0, 0.0], [0.2, 0.8], [0.5, 0.5]]))
    >>> table.probs(np.array([[5], [4]]))
    array([[0.2, 0.8],
           [0.5, 0.5]])
    """

    kind: ClassVar[str] = "state-table"
    states: IntArray  # (m, columns)
    table: FloatArray  # (m + 1, A)

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {row.tobytes(): i for i, row in enumerate(np.asarray(self.states, dtype=np.int64))}

    def probs(self, observations: Tree) -> FloatArray:
        """Return the row of each state, shape (n, A)."""
        rows = np.ascontiguousarray(observations, dtype=np.int64)
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        last = len(self.states)
        places = [self._numbers.get(row.tobytes(), last) for row in distinct]
        return self.table[np.array(places, dtype=np.int64)[inverse.ravel()]]


# a file holds the position of the class: only ever append
_CLASSES: tuple[Any, ...] = (StateTable, SoftmaxLinear, SoftmaxMlp)
_MODELS = ("counts", "logit", "network")


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class EstimatedPolicy(Finite):
    """A behaviour policy as it was estimated from its own episodes.

    Args:
        policy: Fitted policy over the actions that were ever taken, on encoded observations.
        columns: Encoding of observations; None where they are whole numbers as they stand.
        degree: 2 to add products of the numbers, 0 for none of them: shares of the actions.
        taken: (A,) whether an action was ever taken; the others have probability 0.
        logger: Number of the logger whose episodes it learned from.
        fold: Fold that it did not learn from, or `ALL`.
        scatter: (R, ...) draws of the estimation error of the weights of a logit; None if unknown.
        name: Name of the logger, where it has one.
    """

    kind: ClassVar[str] = "estimated"
    policy: FinitePolicy
    columns: Columns | None
    degree: int
    taken: NDArray[np.bool_]
    logger: int
    fold: int = ALL
    scatter: NDArray[np.float32] | None = None
    name: str = ""

    def drawn(self, r: int) -> EstimatedPolicy:
        """Return the policy as it might as well have been estimated, the draw r of them."""
        assert self.scatter is not None
        moved, inner = self.scatter[r].astype(np.float64), self.policy
        assert isinstance(inner, SoftmaxLinear)
        weights, bias = inner.weights + moved[:, :-1], np.asarray(inner.bias) + moved[:, -1]
        return replace(self, policy=SoftmaxLinear(weights, bias), scatter=None)

    @property
    def model(self) -> str:
        """Name of the model that was fitted."""
        if self.degree == 0:
            return "shares"
        name = _MODELS[_CLASSES.index(type(self.policy))]
        return f"{name}, degree 2" if self.degree == 2 else name

    def probs(self, observations: Tree) -> FloatArray:
        """Return the estimated probability of every action, shape (n, A)."""
        probs = np.zeros((batches.length(observations), self.taken.size))
        probs[:, self.taken] = self.policy.probs(encode(observations, self.columns, self.degree))
        return probs

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything as numbers."""
        arrays = {f"{_INNER}{k}": v for k, v in self.policy.arrays().items()}  # type: ignore[attr-defined]
        if self.columns is not None:
            scale = {f.name: getattr(self.columns, f.name) for f in fields(self.columns)}
            arrays |= {f"{_COLUMNS}{name}": value for name, value in scale.items()}
        if self.scatter is not None:
            arrays["scatter"] = self.scatter
        if self.name:
            arrays["name"] = to_bytes(self.name)
        numbers = {"degree": self.degree, "logger": self.logger, "fold": self.fold}
        numbers["class"] = _CLASSES.index(type(self.policy))
        return arrays | {k: np.array(v) for k, v in numbers.items()} | {"taken": self.taken}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> EstimatedPolicy:
        """Return the policy whose `arrays()` these are."""
        inner = _CLASSES[int(arrays["class"])].from_arrays(_within(arrays, _INNER))
        scale = _within(arrays, _COLUMNS)
        return cls(
            inner,
            Columns(**scale) if scale else None,
            int(arrays["degree"]),
            np.asarray(arrays["taken"], dtype=np.bool_),
            int(arrays["logger"]),
            int(arrays["fold"]),
            np.asarray(arrays["scatter"]) if "scatter" in arrays else None,
            from_bytes(arrays.get("name")),
        )

    def __repr__(self) -> str:
        part = "all its episodes" if self.fold == ALL else f"all but fold {self.fold}"
        return f"EstimatedPolicy({self.model}, {logger_name(self)}, from {part})"


def _within(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def encode(observations: Tree, columns: Columns | None, degree: int = 1) -> NDArray[Any]:
    """Return the input (n, d) of a fitted policy; without columns the whole numbers (n, c)."""
    if columns is None:
        return np.hstack([leaf.astype(np.int64) for leaf in flat_leaves(observations)])
    plain = columns(observations)
    if degree < 2:
        return plain if degree else plain[:, :0]
    first, second = np.triu_indices(columns.numbers)
    return np.hstack([plain, plain[:, first] * plain[:, second]])


def estimated_folds(policies: Sequence[Policy]) -> IntArray | None:
    """Return the fold (K,) of each policy; None unless all of them were cross-fitted."""
    folds = [p.fold if isinstance(p, EstimatedPolicy) else ALL for p in policies]
    return np.array(folds) if folds and ALL not in folds else None


def scatter_draws(policies: Sequence[Policy]) -> int:
    """Return how many draws there are of the estimation error of estimated policies.

    0 if none of them was estimated, or the error of some is unknown.
    """
    estimated = [p for p in policies if isinstance(p, EstimatedPolicy)]
    sizes = {0 if p.scatter is None else len(p.scatter) for p in estimated}
    return min(sizes, default=0)


def fitted_models(policies: Sequence[Policy]) -> str:
    """Name the models of the policies that were estimated; empty if none was."""
    return ", ".join(sorted({p.model for p in policies if isinstance(p, EstimatedPolicy)}))


def logger_name(policy: Policy, *, fold: bool = False) -> str:
    """Return the name of the logger of an estimated policy; empty for any other policy.

    Args:
        policy: Any policy.
        fold: Whether to add the fold that it did not learn from.
    """
    if not isinstance(policy, EstimatedPolicy):
        return ""
    name = policy.name or f"logger {policy.logger}"
    end = f"… (logger {policy.logger})"  # tells those apart that begin alike
    shown = name if len(name) <= _LONGEST else name[: _LONGEST - len(end)] + end
    return f"{shown} (fold {policy.fold})" if fold else shown
