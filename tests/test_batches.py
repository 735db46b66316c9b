"""Tests of nested batches."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st

from ope_gym import batches


def nested(n: int, start: int = 0) -> dict[str, Any]:
    rows = np.arange(start, start + n)
    return {"z": rows, "a": (rows[:, None] * np.array([1.0, 2.0]), rows % 2 == 0)}


def same(left: batches.Tree, right: batches.Tree) -> bool:
    if isinstance(left, tuple):
        return isinstance(right, tuple) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(np.array_equal(left, right))


def test_leaves_come_in_a_fixed_order() -> None:
    tree = nested(2)
    assert [leaf.shape for leaf in batches.leaves(tree)] == [(2, 2), (2,), (2,)]
    reordered = {"a": tree["a"], "z": tree["z"]}
    assert all(map(same, batches.leaves(tree), batches.leaves(reordered)))


def test_map_leaves_keeps_the_nest() -> None:
    doubled = batches.map_leaves(lambda leaf: leaf * 2, nested(3))
    assert list(doubled) == ["z", "a"]
    assert isinstance(doubled["a"], tuple)
    assert doubled["z"].tolist() == [0, 2, 4]


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_concatenate_undoes_take(sizes: list[int]) -> None:
    whole = nested(sum(sizes))
    ends = np.cumsum([0, *sizes])
    parts = [batches.take(whole, slice(a, b)) for a, b in itertools.pairwise(ends)]
    assert [batches.length(part) for part in parts] == sizes
    assert same(batches.concatenate(parts), whole)


def test_concatenate_matches_dicts_by_key_not_by_order() -> None:
    joined = batches.concatenate(
        [{"x": np.array([1]), "y": np.array([2])}, {"y": np.array([4]), "x": np.array([3])}]
    )
    assert joined["x"].tolist() == [1, 3]
    assert joined["y"].tolist() == [2, 4]


def test_take_by_mask_and_by_index_copies() -> None:
    tree = nested(4)
    assert batches.take(tree, np.array([3, 0]))["z"].tolist() == [3, 0]
    masked = batches.take(tree, np.array([True, False, True, False]))
    assert masked["a"][1].tolist() == [True, True]
    masked["z"][0] = 99
    assert tree["z"][0] == 0


def test_freeze_copies_and_locks() -> None:
    tree = nested(3)
    frozen = batches.freeze(tree)
    tree["z"][0] = 99
    assert frozen["z"][0] == 0
    with pytest.raises(ValueError, match="read-only"):
        frozen["a"][0][0, 0] = 1.0


def test_freeze_copies_the_elements_of_object_arrays() -> None:
    elements = np.empty(2, dtype=object)
    elements[0], elements[1] = [1, 2], "text"
    frozen = batches.freeze(elements)
    elements[0].append(3)
    assert frozen[0] == [1, 2]
    joined = batches.concatenate([frozen, frozen])
    assert joined.dtype == object
    assert batches.length(joined) == 4


def test_a_gymnasium_vector_batch_is_a_tree() -> None:
    space = gym.spaces.Dict(
        {"p": gym.spaces.Box(-1, 1, (3,)), "q": gym.spaces.Tuple([gym.spaces.Discrete(4)] * 2)}
    )
    batch = batch_space(space, 5).sample()
    assert batches.length(batch) == 5
    assert [leaf.shape for leaf in batches.leaves(batch)] == [(5, 3), (5,), (5,)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batches.length(()), "holds no array"),
        (lambda: batches.length(np.float64(1.0)), "holds a scalar"),
        (lambda: batches.length((np.zeros(2), np.zeros(3))), r"number of rows: \[2, 3\]"),
        (lambda: batches.concatenate([]), "empty"),
        (lambda: batches.concatenate([np.zeros(1), (np.zeros(1),)]), "batch 1 is a tuple of 1"),
        (lambda: batches.concatenate([(np.zeros(1),), ()]), "batch 1 is a tuple of 0"),
        (lambda: batches.concatenate([{"a": np.zeros(1)}, {"b": np.zeros(1)}]), r"keys \['b'\]"),
        (lambda: batches.concatenate([{"a": np.zeros(1)}, np.zeros(1)]), "batch 1 is an array"),
    ],
)
def test_errors_say_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
