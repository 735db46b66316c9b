"""Tests of every Gymnasium space as columns and as JSON."""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as S
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data import space_json, spaces

ALL_SPACES: list[gym.Space[Any]] = [
    S.Box(-1.0, 1.0, (2, 3)),
    S.Box(0.0, 1.0, ()),
    S.Box(np.array([-np.inf, 0.1]), np.array([1.0, np.inf]), dtype=np.float64),
    S.Box(-np.inf, 5, (2,), dtype=np.int32),
    S.Box(0, 255, (4, 4, 3), dtype=np.uint8),
    S.Box(-(2**63), 2**63 - 2, (2,), dtype=np.int64),
    S.Box(0, 1, (3,), dtype=np.bool_),
    S.Discrete(2),
    S.Discrete(3, start=-1),
    S.Discrete(5, dtype=np.int32),
    S.MultiDiscrete([3, 5]),
    S.MultiDiscrete(np.array([[1, 2], [3, 4]]), start=np.array([[0, -1], [2, 0]])),
    S.MultiBinary(4),
    S.MultiBinary([2, 3]),
    S.Text(6, min_length=2, charset="zyxä\ud800"),
    S.Tuple([S.Discrete(32), S.Discrete(11), S.Discrete(2)]),
    S.Dict({"b": S.Box(-1, 1, (2,)), "a": S.Discrete(3)}),
    S.Dict(OrderedDict([("b", S.Box(-1, 1, (2,))), ("a", S.Discrete(3))])),
    S.Sequence(S.Box(-1, 1, (2,))),
    S.Sequence(S.Tuple([S.Discrete(3), S.Box(-1, 1, (2,))])),
    S.Sequence(S.Dict({"x": S.Discrete(3), "y": S.Text(3)})),
    S.Sequence(S.Box(-1, 1, (2,)), stack=True),
    S.Sequence(S.Dict({"x": S.Discrete(3), "y": S.Box(0, 1, (2,))}), stack=True),
    S.Graph(S.Box(-1, 1, (3,)), S.Discrete(3)),
    S.Graph(S.Discrete(4), None),
    S.OneOf([S.Discrete(2), S.Box(-1, 1, (2,))]),
    S.OneOf([S.Tuple([S.Discrete(2), S.Box(-1, 1, (2,))]), S.Dict({"x": S.Discrete(3)})]),
    S.Tuple([S.Text(4), S.Box(0, 1, (2,)), S.Sequence(S.Discrete(3))]),
]


def same(left: Any, right: Any) -> bool:
    """Return whether two elements are equal, dtypes and array shapes included."""
    if isinstance(left, tuple | list):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, np.ndarray) and left.dtype == object:
        return same(list(left), list(right))
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


def where(row: int | None) -> str:
    return "episode 7" if row is None else f"episode 7, step {row}"


def columns(space: gym.Space[Any] | None, batch: Any, n: int) -> Any:
    return spaces.to_columns(space, batch, n, name="actions", where=where)


@pytest.mark.parametrize("space", ALL_SPACES, ids=repr)
def test_a_space_survives_json(space: gym.Space[Any]) -> None:
    text = json.dumps(space_json.space_to_json(space), allow_nan=False)
    back = space_json.space_from_json(json.loads(text))
    assert back == space
    assert type(back) is type(space)
    if isinstance(space, S.Box):
        assert isinstance(back, S.Box)
        assert same((space.low, space.high), (back.low, back.high))
        assert same(space.bounded_below, back.bounded_below)
        assert same(space.bounded_above, back.bounded_above)
    if isinstance(space, S.Dict):
        assert isinstance(back, S.Dict)
        assert list(back.spaces) == list(space.spaces)


def test_unknown_spaces_are_null() -> None:
    assert space_json.space_to_json(None) is None
    assert space_json.space_from_json(None) is None


@pytest.mark.skipif(
    "sort_keys" not in inspect.signature(S.Dict).parameters, reason="Gymnasium 1.4 is needed"
)
def test_the_order_of_characters_and_keys_survives() -> None:
    text = S.Text(3, charset="cab")
    back = space_json.space_from_json(space_json.space_to_json(text))
    assert isinstance(back, S.Text)
    assert back.character_list == ("c", "a", "b")
    unsorted = S.Dict({"b": S.Discrete(2), "a": S.Discrete(2)}, sort_keys=False)
    loaded = space_json.space_from_json(space_json.space_to_json(unsorted))
    assert isinstance(loaded, S.Dict)
    assert list(loaded.spaces) == ["b", "a"]
    assert loaded.sort_keys is False


class Custom(gym.Space[Any]):
    """A space that is not one of Gymnasium's own."""


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Custom(), "Custom is not one of Gymnasium's own"),
        (S.Tuple([Custom()]), "Custom is not one of Gymnasium's own"),
        (S.Dict({1: S.Discrete(2)}), "string keys"),  # type: ignore[dict-item]
        (S.Box(0, 1, (2,), dtype=np.longdouble), "cannot be saved"),
    ],
)
def test_what_cannot_be_described_is_refused(space: gym.Space[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        space_json.space_to_json(space)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        7,
        "Box",
        {"type": "Bag"},
        {"type": "Box", "dtype": "object", "shape": [1], "low": 0, "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [-1], "low": 0, "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [10**6, 10**6], "low": 0, "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": "0", "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, [1]], "high": 1},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": 2, "high": 1},
        {"type": "Box", "dtype": "uint8", "shape": [2], "low": 0, "high": 10**30},
        {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": "x", "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": 2, "start": 0, "dtype": "no such"},
        {"type": "MultiDiscrete", "nvec": [1, [2]], "start": [0, 0], "dtype": "int64"},
        {"type": "MultiBinary", "n": -1},
        {"type": "Text", "max_length": 1, "min_length": 2, "charset": "ab"},
        {"type": "Tuple", "spaces": 3},
        {"type": "Dict", "spaces": [["a"]], "sort_keys": True},
        {"type": "OneOf", "spaces": []},
        {"type": "Sequence", "space": None, "stack": False},
        {"type": "Graph", "node_space": {"type": "Discrete"}, "edge_space": None},
    ],
)
def test_what_describes_no_space_is_an_error(data: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # many are Gymnasium's own messages
        space_json.space_from_json(data)


def test_a_space_nested_too_deeply_is_an_error() -> None:
    data: Any = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
    for _ in range(5_000):
        data = {"type": "Tuple", "spaces": [data]}
    with pytest.raises(ValueError, match="not a Gymnasium space"):
        space_json.space_from_json(data)


@pytest.mark.parametrize(
    ("space", "answer"),
    [
        (None, None),
        (S.Discrete(2), True),
        (S.MultiBinary(2), True),
        (S.MultiDiscrete([2, 2]), True),
        (S.Box(0, 1, (2,)), False),
        (S.Box(0, 3, (2,), dtype=np.uint8), True),
        (S.Tuple([S.Discrete(2), S.Box(0, 1, (2,))]), False),
        (S.Dict({"a": S.Discrete(2), "b": S.MultiBinary(2)}), True),
        (S.OneOf([S.Discrete(2), S.Discrete(3)]), True),
        (S.Sequence(S.Box(0, 1, (2,))), False),
        (S.Graph(S.Discrete(2), None), True),
        (S.Graph(S.Discrete(2), S.Box(0, 1, (1,))), False),
        (S.Text(3), True),
        (Custom(), None),
    ],
)
def test_is_discrete(space: gym.Space[Any] | None, answer: bool | None) -> None:
    assert spaces.is_discrete(space) is answer


@pytest.mark.parametrize("space", ALL_SPACES, ids=repr)
def test_stacked_samples_are_columns_and_can_be_written(space: gym.Space[Any]) -> None:
    space.seed(3)
    samples = [space.sample() for _ in range(7)]
    found = columns(space, spaces.stack(space, samples), 7)
    assert all(len(leaf) == 7 for leaf in batches.leaves(found))
    single = [batches.take(found, slice(i, i + 1)) for i in range(7)]
    assert same(batches.concatenate(single), found)
    assert same(batches.concatenate([spaces.empty(space), found]), found)
    if not spaces.is_column(space) and not isinstance(space, S.Tuple | S.Dict):
        assert same(list(found), samples)
        text = space_json.elements_to_json(space, found)
        assert same(space_json.elements_from_json(space, text), found)


def test_arrays_without_rows_keep_their_shape() -> None:
    stacked = S.Sequence(S.Box(-1, 1, (2,)), stack=True)
    graph = S.Graph(S.Box(-1, 1, (3,)), S.Discrete(3))
    none = np.empty((0, 2), dtype=np.float32)
    no_edges = S.GraphInstance(
        np.zeros((1, 3), np.float32), np.empty(0, np.int64), np.empty((0, 2), np.int32)
    )
    for space, element in ((stacked, none), (graph, no_edges)):
        column = np.empty(1, dtype=object)
        column[0] = element
        text = space_json.elements_to_json(space, column)
        assert same(space_json.elements_from_json(space, text)[0], element)


@pytest.mark.parametrize(
    "text", [b"", b"3", b"[3]", b"[[0]]", b"[[9, 0]]", b"[[0, [1, 2]]]", b"\xff"]
)
def test_text_that_holds_no_elements_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        space_json.elements_from_json(S.OneOf([S.Discrete(2), S.Box(-1, 1, (2,))]), text)


def test_stack_without_a_space_follows_the_first_element() -> None:
    assert same(spaces.stack(None, [1, 2]), np.array([1, 2]))
    assert same(spaces.stack(None, [(1, 2.0), (3, 4.0)]), (np.array([1, 3]), np.array([2.0, 4.0])))
    assert same(spaces.stack(None, [{"a": 1}, {"a": 2}]), {"a": np.array([1, 2])})
    with pytest.raises(ValueError, match="zip"):
        spaces.stack(None, [(1, 2), (1, 2, 3)])


def test_integers_take_the_dtype_of_the_space_and_floats_keep_theirs() -> None:
    assert columns(S.Discrete(2), [0, 1], 2).dtype == np.int64
    assert columns(S.Discrete(2), np.array([0, 1], np.int8), 2).dtype == np.int64
    assert columns(S.Discrete(2), [True, False], 2).dtype == np.int64
    assert columns(S.MultiBinary(2), [[0, 1]], 1).dtype == np.int8
    box = S.Box(-1, 1, (1,))
    precise = np.array([[0.1]])  # not a float32 number: a cast would change its density
    assert columns(box, precise, 1)[0, 0] == precise[0, 0]
    assert columns(box, precise.astype(np.float32), 1).dtype == np.float32
    assert columns(box, [[1]], 1).dtype == np.float64
    assert columns(None, np.ones(1, np.longdouble), 1).dtype == np.float64
    assert columns(box, [[5.0]], 1)[0, 0] == 5.0  # outside the bounds: the env clips, not we


def test_columns_are_copies() -> None:
    given = np.zeros((2, 3), dtype=np.float32)
    kept = columns(S.Box(-1, 1, (3,)), given, 2)
    given[:] = 1
    assert (kept == 0).all()
    part = np.zeros(2, np.float32)
    elements = np.empty(1, dtype=object)
    elements[0] = (part,)
    kept = columns(S.Sequence(S.Box(-1, 1, (2,))), elements, 1)
    part[:] = 1
    assert (kept[0][0] == 0).all()


BLACKJACK = S.Tuple([S.Discrete(32), S.Discrete(11), S.Discrete(2)])
SWITCHES: gym.Space[Any] = S.Box(0, 1, (2,), dtype=np.bool_)
PAIR = S.Dict({"a": S.Discrete(2), "b": S.Box(0, 1, (2,))})


@pytest.mark.parametrize(
    ("space", "batch", "message"),
    [
        (S.Discrete(2), [0, 2], r"episode 7, step 1: actions is 2, which is not in Discrete\(2\)"),
        (S.Discrete(2, start=1), [0, 1], r"step 0: actions is 0"),
        (S.Discrete(2), [0.0, 1.0], "float64.*integers"),
        (S.Discrete(2), [[0], [1]], r"shape \(2, 1\), expected \(2,\) for Discrete\(2\)"),
        (S.Discrete(2), [0, 1, 1], r"shape \(3,\), expected \(2,\)"),
        (S.Discrete(2), 0, r"shape \(\), expected"),
        (S.MultiDiscrete([2, 3]), [[0, 2], [0, 3]], r"step 1: actions is \[0 3\]"),
        (S.MultiBinary(2), [[0, 1], [2, 0]], "step 1"),
        (S.Box(0, 255, (1,), dtype=np.uint8), [[0], [256]], "step 1: actions is .256."),
        (SWITCHES, [[0, 1], [0, 2]], "step 1"),
        (S.Box(0, 1, (2,)), [[0, 1], [0]], "actions is not an array"),
        (S.Box(0, 1, (2,)), [["a", "b"], ["c", "d"]], "expected numbers"),
        (S.Box(0, 1, (2,)), np.zeros((2, 2), complex), "complex128, expected numbers"),
        (None, ["a", "b"], "need their Gymnasium space"),
        (None, [0, 1, 2], r"shape \(3,\), expected \(2, ...\)"),
        (None, (np.zeros(2), np.zeros(3)), r"actions\[1\] has shape"),
        (BLACKJACK, [(14, 10, 0), (15, 10, 0)], "tuple of 3 batches.*list of 2.*stack"),
        (BLACKJACK, (np.zeros(2, int),) * 2, "tuple of 3 batches.*tuple of 2"),
        (
            BLACKJACK,
            (np.zeros(2, int), np.array([1, 11]), np.zeros(2, int)),
            r"step 1: actions\[1\]",
        ),
        (PAIR, {"a": [0, 1]}, r"keys \['a', 'b'\], got a dict with the keys \['a'\]"),
        (PAIR, np.zeros((2, 3)), r"keys \['a', 'b'\], got an array of shape \(2, 3\)"),
        (PAIR, {"a": [0, 3], "b": np.zeros((2, 2))}, r"step 1: actions\['a'\] is 3"),
        (S.Text(3), "ab", "sequence of elements.*got str"),
        (S.Text(3), 3, "sequence of elements"),
        (S.Text(3), ["a"], "1 rows, but there are 2 rewards"),
        (S.Text(3), ["a", "abcd"], "step 1: actions is 'abcd'"),
        (S.OneOf([S.Discrete(2)]), [(0, 1), (0, 2)], "step 1"),
        (S.Graph(S.Discrete(2), None), [1, 2], "step 0"),
    ],
)
def test_what_does_not_fit_is_named(space: gym.Space[Any] | None, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        columns(space, batch, 2)
    assert str(caught.value).startswith("episode 7")


def test_signatures_differ_where_batches_do() -> None:
    def sign(*shape: int, dtype: Any = float) -> Any:
        array: NDArray[Any] = np.zeros(shape, dtype)
        return spaces.signature(array)

    assert sign(2, 3) == sign(5, 3) == sign(2, 3, dtype=np.float32)
    assert len({sign(2), sign(2, 3), sign(2, dtype=int), sign(2, dtype=np.uint8)}) == 4
    batch = np.zeros(2)
    assert spaces.signature((batch, {"a": batch})) == spaces.signature((batch, {"a": batch}))
    assert spaces.signature((batch, batch)) != spaces.signature((batch,))


def test_an_element_that_a_stacked_sequence_cannot_take_apart_is_not_in_it() -> None:
    nodes = S.Sequence(S.Graph(S.Box(0, 1, (2,)), None), stack=True)
    with pytest.raises(ValueError, match="which is not in"):
        spaces.to_columns(nodes, [np.int64(3)], 1, name="actions", where=str)
