"""Nested batches: an array, or a tuple or dict of batches, as a Gymnasium vector env gives them.

All leaves of a batch share their first axis. Spaces whose elements do not stack (Text, Graph,
Sequence, OneOf) are one-dimensional object arrays, one element a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tree: TypeAlias = Any

__all__ = ["Tree", "concatenate", "distinct", "freeze", "leaves", "length", "map_leaves", "take"]


def leaves(tree: Tree) -> list[NDArray[Any]]:
    """Return the arrays of a batch, tuples in order and dicts by sorted key.

    >>> [leaf.tolist() for leaf in leaves({"b": np.arange(2), "a": (np.ones(2), np.zeros(2))})]
    [[1.0, 1.0], [0.0, 0.0], [0, 1]]
    """
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in leaves(branch)]
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [np.asarray(tree)]


def map_leaves(fn: Callable[[NDArray[Any]], Any], tree: Tree) -> Tree:
    """Apply `fn` to every array, and return the same nest."""
    if isinstance(tree, tuple):
        return tuple(map_leaves(fn, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(fn, branch) for key, branch in tree.items()}
    return fn(np.asarray(tree))


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Join the rows of all batches, in order; the nests must have the same structure.

    >>> concatenate([(np.array([1]), np.array([2])), (np.array([3]), np.array([4]))])
    (array([1, 3]), array([2, 4]))
    """
    if len(trees) == 0:
        raise ValueError("trees is empty: there is no batch to concatenate")
    first = trees[0]
    if isinstance(first, tuple):
        _require(trees, lambda tree: isinstance(tree, tuple) and len(tree) == len(first))
        return tuple(concatenate([tree[i] for tree in trees]) for i in range(len(first)))
    if isinstance(first, dict):
        _require(trees, lambda tree: isinstance(tree, dict) and tree.keys() == first.keys())
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    _require(trees, lambda tree: not isinstance(tree, tuple | dict))
    return np.concatenate([np.asarray(tree) for tree in trees])


def take(tree: Tree, rows: slice | NDArray[Any]) -> Tree:
    """Take the chosen rows of every array: a view for a slice, a copy for indices or a mask."""
    return map_leaves(lambda leaf: leaf[rows], tree)


def length(tree: Tree) -> int:
    """Return the number of rows, which all arrays of a batch share."""
    nodes = leaves(tree)
    if not nodes:
        raise ValueError(f"the batch {tree!r} holds no array, so its number of rows is unknown")
    if any(leaf.ndim == 0 for leaf in nodes):
        raise ValueError("the batch holds a scalar: give it a first axis, e.g. value[None]")
    counts = sorted({leaf.shape[0] for leaf in nodes})
    if len(counts) > 1:
        raise ValueError(f"the arrays of a batch differ in their number of rows: {counts}")
    return int(counts[0])


def freeze(tree: Tree) -> Tree:
    """Copy a batch into read-only arrays (elements of object arrays are copied, too)."""
    return map_leaves(_frozen_copy, tree)


def _frozen_copy(leaf: NDArray[Any]) -> NDArray[Any]:
    copied = copy.deepcopy(leaf) if leaf.dtype == object else np.array(leaf, order="C")
    copied.setflags(write=False)
    return copied


def _require(trees: Sequence[Tree], alike: Callable[[Tree], bool]) -> None:
    for i, tree in enumerate(trees):
        if not alike(tree):
            raise ValueError(
                f"batch {i} is {_shape_of(tree)} but batch 0 is {_shape_of(trees[0])}: "
                "batches of one space have one structure"
            )


def _shape_of(tree: Tree) -> str:
    if isinstance(tree, tuple):
        return f"a tuple of {len(tree)}"
    if isinstance(tree, dict):
        return f"a dict with keys {sorted(tree)}"
    return "an array"


def distinct(tree: Tree) -> NDArray[np.int64]:
    """Number the rows (n,) of a batch so that equal rows have equal numbers.

    >>> distinct((np.array([3, 3, 1]), np.array([[0.0], [0.0], [0.0]]))).tolist()
    [1, 1, 0]
    """
    ids = np.zeros(length(tree), dtype=np.int64)
    for leaf in leaves(tree):
        rows = np.asarray(leaf).reshape(ids.size, -1)
        _, part = np.unique(rows, axis=0, return_inverse=True)
        _, ids = np.unique(ids * (part.max() + 1) + part.ravel(), return_inverse=True)
    return ids
