"""Tables of steps: they come back unchanged, logs of others come in, bad ones are refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import ope_gym
from ope_gym import Bootstrap, Compute, Evaluator, Trajectories, evaluate, rank
from ope_gym.cli import main as command
from ope_gym.data.tables.header import sealed
from ope_gym.data.trajectories import nothing
from ope_gym.models import LinearQ
from ope_gym.policies import DiagonalGaussian, LinearSigmoid, Policy, Uniform, UnknownPolicy
from tests.builders import LogProbOnly
from tests.file_builders import assert_identical, clocked, constant_buffer, made, recording
from tests.test_files import assert_equal
from tests.test_record import EXOTIC

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")
TARGET = LinearSigmoid(np.full(3, 0.3))
LOG: dict[str, list[Any]] = {
    "episode": ["a", "a", "a", "b", "b", "c"],
    "step": [0, 1, 2, 0, 1, 0],
    "x": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
    "y": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "action": [0, 1, 0, 1, 1, 0],
    "reward": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}


def log(**changed: Any) -> dict[str, Any]:
    """Return a small log of three episodes, with further or other columns; None leaves one out."""
    columns = {**LOG, **changed}
    return {name: values for name, values in columns.items() if values is not None}


def read(table: Any, **names: Any) -> Trajectories:
    return Trajectories.from_frame(table, **{"observation": ["x", "y"], **names})


# There and back ------------------------------------------------------------------------------


def there_and_back(data: Trajectories, folder: Path) -> None:
    """Assert that all ways bring back the same bits."""
    for library in ("pyarrow", "pandas"):
        found = Trajectories.from_frame(data.to_frame(library))
        assert_identical(found, data)
    path = folder / "run.parquet"
    data.to_parquet(path)
    for found in (Trajectories.from_frame(path), Trajectories.load(path)):
        assert_identical(found, data)
        for one, other in zip(found.policies, data.policies, strict=True):
            assert one == other or isinstance(other, UnknownPolicy)


def test_everything_comes_back(tmp_path: Path) -> None:
    there_and_back(recording(), tmp_path)
    there_and_back(clocked(3, np.full((3, 4, 2), 0.5)).view(), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name != "run.parquet"]


@pytest.mark.parametrize("name", EXOTIC)
def test_any_space_comes_back(name: str, tmp_path: Path) -> None:
    data = constant_buffer(*EXOTIC[name])
    if name == "Graph":  # graphs do not compare
        data.to_parquet(tmp_path / "run.parquet")
        found = Trajectories.load(tmp_path / "run.parquet")
        assert [len(x.nodes) for x in found.actions] == [len(x.nodes) for x in data.actions]
    else:
        there_and_back(data, tmp_path)


def test_polars_keeps_the_columns_and_we_say_the_rest() -> None:
    pytest.importorskip("polars")
    for data in (recording(), constant_buffer(*EXOTIC["Dict"])):
        found = Trajectories.from_frame(
            data.to_frame("polars"),
            policies=data.policies,
            schedules=data.schedules,
            observation_space=data.observation_space,
            action_space=data.action_space,
            horizon=data.horizon,
        )
        assert_identical(found, data)


def test_a_lazy_polars_frame_is_collected() -> None:
    pl = pytest.importorskip("polars")
    assert len(read(pl.DataFrame(log()).lazy())) == 3


def test_no_episode_comes_back(tmp_path: Path) -> None:
    data = dataclasses.replace(
        nothing(spaces.Box(0, 1, (2,)), spaces.Discrete(2), 5), policies=(Uniform(2),)
    )
    there_and_back(data, tmp_path)


def test_nan_observations_and_unknown_probabilities_come_back(tmp_path: Path) -> None:
    data = Trajectories.from_arrays(
        np.array([[np.nan, -0.0], [np.inf, 1.0]], dtype=np.float32),
        np.array([0.0, -0.0]),
        [0.0, -0.0],
        [np.nan, -0.5],
        offsets=[0, 1, 2],
        policies=[UnknownPolicy(), DiagonalGaussian(np.zeros((1, 2)), np.zeros(1), np.zeros(1))],
        policy_ids=[0, 1],
        terminated=True,
    )
    there_and_back(data, tmp_path)


DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "b1"]


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectories:
    """Draw trajectories with rows of any shape and dtype, nested or not."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    n, steps = len(lengths), sum(lengths)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def leaf() -> Any:
        shape = draw(st.lists(st.integers(1, 3), max_size=3))
        bits = rng.integers(0, 2, size=(steps, *shape), dtype=np.uint8)
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        noise = rng.standard_normal(bits.shape) * (50 if dtype.kind in "fi" else 0)
        return (bits + noise).astype(dtype)

    nests: list[Any] = [leaf, lambda: (leaf(), leaf()), lambda: {"b": leaf(), "a": (leaf(),)}]
    flags = rng.integers(0, 3, size=n)
    ids = rng.integers(2, size=n)
    return Trajectories.from_arrays(
        draw(st.sampled_from(nests))(),
        draw(st.sampled_from(nests))(),
        rng.standard_normal(steps),
        -rng.random(steps),
        offsets=np.append(0, np.cumsum(lengths)),
        policies=[Uniform(2), LinearSigmoid(rng.standard_normal(2))],
        policy_ids=np.repeat(ids, lengths),
        terminated=flags > 0,
        truncated=flags < 2,
        held_out=rng.integers(2, size=n),
        start_clock=rng.integers(-1, 99, size=n),
        horizon=draw(st.none() | st.integers(5, 9)),
    )


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_whatever_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: Trajectories
) -> None:
    there_and_back(data, tmp_path_factory.mktemp("tables"))


def test_columns_are_those_of_the_documentation() -> None:
    frame = recording().to_frame()
    expected = "episode step observation action reward log_prob policy terminated truncated"
    assert list(frame) == [*expected.split(), "held_out", "start_clock", "schedule"]
    assert frame["terminated"].tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 1]
    assert frame["truncated"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert frame["episode"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]


def test_policies_that_cannot_be_stored_are_told() -> None:
    data = dataclasses.replace(recording(), policies=(LogProbOnly(Uniform(2).log_prob),) * 3)
    with pytest.warns(UserWarning, match="LogProbOnly is not registered: the table will not"):
        frame = data.to_frame()
    found = Trajectories.from_frame(frame)
    assert "unregistered" in repr(found.policies[0])
    again = Trajectories.from_frame(frame, policies=data.policies)
    assert again.policies == data.policies


def test_names_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="library is 'excel'; choose pandas, polars or pyarrow"):
        recording().to_frame("excel")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"needs {library}: pip install {library}"):
        recording().to_frame(library)


def test_labels_of_unknown_policies_are_kept(tmp_path: Path) -> None:
    table = recording().to_frame().drop(columns=["log_prob"])
    table["policy"] = np.where(table["episode"] < 2, "new", "old")
    table.attrs.clear()
    data = Trajectories.from_frame(table)
    assert [repr(x) for x in data.policies] == ["UnknownPolicy('new')", "UnknownPolicy('old')"]
    data.save(tmp_path / "a.ope")
    for policy in Trajectories.load(tmp_path / "a.ope").policies:
        assert isinstance(policy, UnknownPolicy)
        assert policy.label in ("new", "old")
        assert pickle.loads(pickle.dumps(policy)).label == policy.label
    twins = {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}
    data = Trajectories.from_arrays(
        twins, [0], [0.0], [-0.5], offsets=[0, 1], policies=[Uniform(2)], terminated=True
    )
    with pytest.raises(ValueError, match=r"would be called 'observation\.a\.b': rename a key"):
        data.to_frame()


def test_rows_without_a_number_cannot_be_written() -> None:
    data = Trajectories.from_arrays(
        np.empty((1, 0)), [0], [0.0], [-0.5], offsets=[0, 1], policies=[Uniform(2)], terminated=True
    )
    with pytest.raises(ValueError, match=r"observation has rows of shape \(0,\)"):
        data.to_frame()
    clash = dataclasses.replace(data, observations={"x": np.zeros(1)}, actions=np.zeros(1))
    assert "observation.x" in clash.to_frame()


def test_metadata_of_a_later_version_is_refused() -> None:
    table = recording().to_frame("pyarrow")
    later = json.loads(table.schema.metadata[b"ope_gym"]) | {"version": 2}
    damaged = json.dumps(later | {"version": 1, "horizon": 99})
    for text, words in (
        (json.dumps(later), "version 2 is not known"),
        (damaged, "does not match its checksum"),
        ("[", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=f"the table: what ope_gym wrote .*{words}"):
            Trajectories.from_frame(table.replace_schema_metadata({"ope_gym": text}))


# Logs of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "dict"])
def test_a_log_of_others(library: str) -> None:
    columns = log(
        log_prob=np.log([0.5, 0.25, 0.5, 0.5, 0.5, 0.5]), policy=["old"] * 3 + ["new"] * 3
    )
    table: Any = columns
    if library != "dict":
        module = pytest.importorskip(library)
        table = module.table(columns) if library == "pyarrow" else module.DataFrame(columns)
    data = read(table)
    assert data.lengths.tolist() == [3, 2, 1]
    assert data.observations.tolist() == [list(row) for row in zip(LOG["x"], LOG["y"], strict=True)]
    assert data.actions.tolist() == LOG["action"]
    assert data.rewards.tolist() == LOG["reward"]
    assert data.policy_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert all(isinstance(policy, UnknownPolicy) for policy in data.policies)
    assert data.has_propensities
    assert data.terminated.all()
    assert not data.held_out.any()
    assert read(table, held_out=True).held_out.all()


def test_policies_by_number_by_label_or_one_for_all() -> None:
    one, two = LinearSigmoid(np.array([0.5, 0.0])), LinearSigmoid(np.array([0.0, -0.5]))
    names = log(who=["old"] * 3 + ["new"] * 3)
    found = read(names, policy="who", policies={"new": two, "old": one})
    assert found.policies == (two, one)
    assert found.policy_ids.tolist() == [1, 1, 1, 0, 0, 0]
    numbers = log(policy=[0] * 3 + [1] * 3)
    again = read(numbers, policies=[one, two])
    for data in (found, again):
        data.audit(1e-12)  # the probabilities are those of the policies
    alone = read(log(), policies=one)
    assert alone.policies == (one,)
    alone.audit(1e-12)
    partly = read(names, policy="who", policies={"old": one, "new": UnknownPolicy()})
    assert np.isfinite(partly.log_probs[:3]).all()
    assert np.isnan(partly.log_probs[3:]).all()


def test_unknown_propensities_serve_the_direct_method() -> None:
    data = read(log())
    assert not data.has_propensities
    assert list(evaluate(data, LinearSigmoid(np.full(2, 0.1)), q_model=LinearQ())) == ["DM", "MDR"]


def test_ends_are_columns_or_values() -> None:
    last = [False, False, True, False, True, True]
    ends = log(done=last, cut=[0, 0, 0, 0, 1, 0])
    found = read(ends, terminated="done", truncated="cut")
    assert (found.terminated.tolist(), found.truncated.tolist()) == (
        [True] * 3,
        [False, True, False],
    )
    assert read(log(), truncated=True).truncated.all()
    assert not read(log(), truncated=True).terminated.any()


def test_steps_may_count_from_one_or_not_be_counted() -> None:
    one = read(log(step=[1, 2, 3, 1, 2, 1]))
    none = read(log(step=None), step=None)
    assert_identical(one, none)


def test_nested_columns_and_lists() -> None:
    table = log(image=[[[1, 2], [3, 4]]] * 6, words=["a"] * 6)
    found = read(table, observation={"at": ["x", "y"], "seen": ("image", "x")})
    assert found.observations["at"].shape == (6, 2)
    assert found.observations["seen"][0].shape == (6, 2, 2)
    text = read(table, observation="words", observation_space=spaces.Text(3))
    assert text.observations.tolist() == ["a"] * 6


def test_categories_of_pandas_are_labels() -> None:
    frame = pd.DataFrame(log(policy=pd.Categorical(["u"] * 3 + ["v"] * 3)))
    frame["episode"] = frame["episode"].astype("category")
    found = read(frame)
    assert found.policy_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.lengths.tolist() == [3, 2, 1]


class Stream:
    """A table of yet another library, which speaks Arrow."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested)


def test_other_libraries_arrays_and_tensors_come_in() -> None:
    seen = np.arange(24.0).reshape(6, 2, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(seen)
    table = pa.table(log(seen=tensors))
    for one in (Stream(table), table, log(seen=seen), log(seen=seen.tolist())):
        assert np.array_equal(read(one, observation="seen").observations, seen)
    flat = log(seen=seen.reshape(6, 4))
    assert read(flat, observation="seen").observations.shape == (6, 4)
    box = spaces.Box(0, 24, (2, 2))
    found = read(flat, observation="seen", observation_space=box)
    assert np.array_equal(found.observations, seen)


# Bad logs ------------------------------------------------------------------------------------

TIMES = pd.date_range("2026-01-01", periods=6, freq="min")
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (
        {"reward": None},
        {},
        r"column 'reward' \(reward\) is missing from the table, which has episode, step, x, y, "
        r"action; name the right one, reward=",
    ),
    "misspelt": ({"rewrad": [0.0] * 6, "reward": None}, {}, "; did you mean 'rewrad'.*--column"),
    "missing step": ({"step": None}, {}, r"column 'step' \(step\) is missing.*step=None if"),
    "named and missing": ({}, {"log_prob": "logp"}, r"column 'logp' \(log_prob\) is missing"),
    "missing observation": ({}, {"observation": ["x", "z"]}, r"column 'z' \(observation\)"),
    "unsorted": (
        {"step": [0, 2, 1, 0, 1, 0]},
        {},
        "row 1, column 'step': step 2 comes after step 0 of the same episode, expected 1: sort",
    ),
    "backwards": (
        {"step": [0, 1, 0, 0, 1, 0]},
        {},
        "row 2, column 'step': step 0 comes after step 1",
    ),
    "torn": (
        {"episode": ["a", "a", "b", "b", "a", "c"], "step": [0, 1, 0, 1, 0, 0]},
        {},
        "row 4, column 'episode': episode 'a' begins again, it began at .*row 0",
    ),
    "doubled": (
        {"step": [0, 1, 1, 0, 1, 0]},
        {},
        "row 2, column 'step': step 1 comes after step 1",
    ),
    "time stamps": (
        {"step": TIMES},
        {},
        "row 0, column 'step': 2026-01-01 00:00:00 is a time stamp .*count the steps",
    ),
    "nan reward": (
        {"reward": [1, 2, np.nan, 4, 5, 6]},
        {},
        "row 2, column 'reward': (is nan|has no value)",
    ),
    "nan observation": (
        {"y": [1, 2, 3, 4, np.nan, 6]},
        {},
        "row 4, column 'y': (is nan|has no value)",
    ),
    "nan action": (
        {"action": [0, 1, None, 0, 1, 1]},
        {},
        "row 2, column 'action': (is nan|has no)",
    ),
    "nan log_prob": (
        {"log_prob": [-0.5, np.nan, -0.5, -0.5, -0.5, -0.5]},
        {},
        "row 1, column 'log_prob': is nan",
    ),
    "probabilities": (
        {"log_prob": [0.5] * 6},
        {"action_space": spaces.Discrete(2)},
        "row 0, column 'log_prob': is 0.5, above 0, .*take their logarithms",
    ),
    "no episode": ({"episode": ["a", "a", None, "b", "b", "c"]}, {}, "row 2, column 'episode'"),
    "nan episode": (
        {"episode": [0, 0, 0, np.nan, 1, 2]},
        {},
        "row 3, column 'episode': has no value",
    ),
    "mixed": (
        {"reward": [1.0, 2.0, "three", 4.0, 5.0, 6.0]},
        {},
        "row 2, column 'reward': 'three' does not fit into a column with the cells before",
    ),
    "mixed lists": (
        {"x": [[1, 2], [1, 2], [1, 2, 3], [1, 2], [1, 2], [1, 2]]},
        {"observation": "x"},
        "row 2, column 'x': a list of 3, but the first row has one of 2",
    ),
    "lists among columns": (
        {"x": [[1, 2]] * 6},
        {},
        "row 0, column 'x': holds lists, expected one",
    ),
    "text": (
        {"action": ["left", "right"] * 3},
        {},
        "row 0, column 'action': 'left' is text, expected numbers; number the",
    ),
    "lists as steps": ({"step": [[0]] * 6}, {}, "row 0, column 'step': holds lists, expected one"),
    "decimals": (
        {"reward": [Decimal("1.5")] * 6},
        {},
        "row 0, column 'reward': the column is of type decimal.*cast it to a number type",
    ),
    "unreadable": (
        {"reward": [object()] * 6},
        {},
        "row 0, column 'reward': <object .* does not fit",
    ),
    "numbers as text": (
        {},
        {"observation": "x", "observation_space": spaces.Text(3)},
        "row 0, column 'x': is of type double, expected text for Text",
    ),
    "nothing": ({"x": [None] * 6}, {}, "row 0, column 'x': has no value, and nor has any other"),
    "action not there": (
        {"action": [0, 1, 0, 1, 7, 0]},
        {"action_space": spaces.Discrete(2)},
        r"row 4: actions is 7, which is not in Discrete\(2\)",
    ),
    "goes on": (
        {"terminated": [False, True, True, False, True, True]},
        {},
        "row 1, column 'terminated': is true, but the episode goes on in the next row",
    ),
    "unfinished": (
        {"terminated": [False, False, True, False, False, True]},
        {},
        "row 4, column 'terminated': the last row of an episode is neither",
    ),
    "two as a flag": (
        {"held_out": [2] * 6},
        {},
        "row 0, column 'held_out': 2 is not a truth value",
    ),
    "policy changes": (
        {"policy": ["u", "v", "v", "v", "v", "v"]},
        {},
        "row 1, column 'policy': differs from the row before, of the same episode",
    ),
    "policy unknown": (
        {"policy": ["u"] * 3 + ["v"] * 3},
        {"policies": {"u": Uniform(2)}},
        "row 3, column 'policy': policies has no 'v', only 'u': add this policy",
    ),
    "policy number": (
        {"policy": [0] * 3 + [2] * 3},
        {"policies": [Uniform(2), Uniform(3)]},
        "row 3, column 'policy': is 2, but there are 2 policies, numbered from 0",
    ),
    "too many parts": (
        {},
        {
            "observation": ("x", "y"),
            "observation_space": spaces.Tuple([spaces.Box(0, 1, ())]),
        },
        "observations must be a tuple of 1 batches",
    ),
    "too long": ({}, {"horizon": 2}, "episode 0 has 3 steps, horizon=2 is less"),
    "labels without a column": ({}, {"policies": {"u": Uniform(2)}}, "no column says which acted"),
    "numbers without a column": (
        {},
        {"policies": [Uniform(2), Uniform(3)]},
        "policies has several, but no column says which acted",
    ),
}

UNSTORED = ("mixed", "mixed lists", "unreadable")  # a column of a Parquet file has one type


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in BAD for form in ("dict", "parquet") if name not in UNSTORED]
    + [(name, form) for name in UNSTORED for form in ("dict", "pandas")],
)
def test_a_bad_log_is_refused_with_column_and_row(name: str, form: str, tmp_path: Path) -> None:
    changed, names, words = BAD[name]
    table: Any = log(**changed)
    if form != "dict":
        table = pd.DataFrame(table)
    if form == "parquet":
        table = pa.Table.from_pandas(pd.DataFrame(table), preserve_index=False)
        pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
        table = tmp_path / "log.parquet"
    with pytest.raises((ValueError, TypeError), match=words) as error:
        read(table, **names)
    if form == "parquet" and "row" in words:
        assert "log.parquet, row" in str(error.value)


def test_other_things_are_no_table() -> None:
    for wrong in (3, np.zeros(3), None, [], [{"episode": 1}]):
        with pytest.raises(TypeError, match="give a pandas, polars or pyarrow table"):
            Trajectories.from_frame(wrong)
    for policies in (3, [3], {"u": 3}):
        with pytest.raises(TypeError, match="give a policy, a list of policies"):
            read(log(policy=["u"] * 6), policies=policies)
    with pytest.raises(TypeError, match="scan_parquet has no argument 'obs'; it takes episode, "):
        ope_gym.tables.scan_parquet("x.parquet", obs="x")


def test_missing_pyarrow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"tables need pyarrow, .*\[tables\]"):
        recording().to_frame()


# Files ---------------------------------------------------------------------------------------


def policies_of(parts: list[Trajectories]) -> list[Policy]:
    return [policy for part in parts for policy in part.policies]


@pytest.mark.parametrize("block_steps", [90, 1 << 17])
def test_parquet_files_give_what_our_own_give(tmp_path: Path, block_steps: int) -> None:
    parts = [made(i, episodes=size, length=20) for i, size in enumerate((1, 30, 2, 12))]
    ours, theirs = [], []
    (tmp_path / "all").mkdir()
    for i, part in enumerate(parts):
        ours.append(tmp_path / f"{i}.ope")
        theirs.append(tmp_path / "all" / f"{i}.parquet")
        part.save(ours[-1])
        part.to_parquet(theirs[-1])
    names = ["NBIS", "NFIS", "FWDR", "auto"]
    options: dict[str, Any] = {
        "q_model": LinearQ(),
        "interval": Bootstrap(20),
        "compute": Compute(block_steps=block_steps),
    }
    expected = evaluate(ours, TARGET, names, **options)
    exactly = 0.0 if block_steps > 90 else 1e-9  # files are cut into other blocks
    assert_equal(evaluate(theirs, TARGET, names, **options), expected, rtol=exactly)
    mixed = [ours[0], theirs[1], ours[2], theirs[3]]
    assert_equal(evaluate(mixed, TARGET, names, **options), expected, rtol=exactly)
    memory = [Trajectories.from_frame(path) for path in theirs]
    assert_equal(evaluate(memory, TARGET, names, **options), expected, rtol=1e-9)
    order = rank(theirs, [0, 5], "NFIS", compute=options["compute"])
    assert list(order) == list(rank(ours, [0, 5], "NFIS", compute=options["compute"]))


def foreign(folder: Path, episodes: int = 40, *, rows: int = 70, group: int = 30) -> Trajectories:
    """Write a log of others whose episodes go on in the next row group and in the next file."""
    data = made(3, episodes=episodes, length=17)
    frame = pd.DataFrame(
        {
            "who": [f"user {i}" for i in data.episode_ids],
            "t": data.steps,
            "obs": list(data.observations),
            "act": data.actions,
            "gain": data.rewards,
            "logp": data.log_probs,
            "version": [f"v{k}" for k in data.policy_ids],
        }
    )
    for i, first in enumerate(range(0, len(frame), rows)):
        part = frame.iloc[first : first + rows]
        place = folder / f"part-{i:03}.parquet"
        pa_table = pa.Table.from_pandas(part, preserve_index=False)
        pq.write_table(pa_table, place, row_group_size=group)
    return data


NAMES: dict[str, Any] = {
    "episode": "who",
    "step": "t",
    "observation": "obs",
    "action": "act",
    "reward": "gain",
    "log_prob": "logp",
    "policy": "version",
}


@pytest.mark.parametrize(
    ("rows", "group", "block_steps"), [(70, 30, 10), (1000, 1000, 100), (5, 3, 100), (102, 34, 400)]
)
def test_a_log_that_does_not_fit_into_memory(
    tmp_path: Path, rows: int, group: int, block_steps: int
) -> None:
    data = foreign(tmp_path, rows=rows, group=group)
    policies = {f"v{k}": policy for k, policy in enumerate(data.policies)}
    files = ope_gym.tables.scan_parquet(tmp_path, **NAMES, policies=policies)
    names = ["NBIS", "NFIS", "FWDR", "auto"]
    evaluator = Evaluator(files, names, compute=Compute(block_steps=block_steps))
    assert evaluator.source.data is None
    source = evaluator.source
    seen = [chunk for task in source.tasks for _, chunk in source.chunks(task)]
    assert max(chunk.n_steps for chunk in seen) < 2 * block_steps + 17
    joined = seen[0].merge(*seen[1:])
    for column in ("observations", "actions", "rewards", "log_probs", "offsets", "policy_ids"):
        np.testing.assert_array_equal(getattr(joined, column), getattr(data, column))
    expected = evaluate(data, TARGET, names, q_model=LinearQ())
    assert_equal(evaluator.evaluate(TARGET), expected)


def test_files_as_rllib_leaves_them(tmp_path: Path) -> None:
    """A row a file, in a folder for each write; the real ones are read in test_train.py."""
    data = made(4, episodes=3, length=4)
    for row in range(data.n_steps):
        cells = {
            "eps_id": [f"id {data.episode_ids[row]}"],
            "agent_id": pa.nulls(1),
            "obs": pa.array([data.observations[row]], pa.large_list(pa.float64())),
            "actions": pa.array([data.actions[row]], pa.int32()),
            "rewards": [data.rewards[row]],
            "terminateds": [bool(data.steps[row] == 3)],
            "truncateds": [False],
            "action_logp": pa.array([data.log_probs[row]], pa.float32()),
            "weights_seq_no": [int(data.policy_ids[row])],
        }
        folder = tmp_path / "cartpoleenv" / f"run-000000-{2 + row // 5:05}"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(cells), folder / f"some_{row % 5:06}-0.parquet")
    found = Trajectories.from_frame(
        tmp_path,
        episode="eps_id",
        step=None,
        observation="obs",
        action="actions",
        reward="rewards",
        log_prob="action_logp",
        policy="weights_seq_no",
        terminated="terminateds",
        truncated="truncateds",
    )
    np.testing.assert_array_equal(found.observations, data.observations)
    np.testing.assert_array_equal(found.rewards, data.rewards)
    np.testing.assert_array_equal(found.offsets, data.offsets)
    np.testing.assert_array_equal(found.log_probs, data.log_probs.astype(np.float32))
    assert len(found.policies) == len(np.unique(data.policy_ids))


def test_unknown_policies_in_blocks_are_judged_by_what_is_recorded(tmp_path: Path) -> None:
    data = foreign(tmp_path)
    compute = Compute(block_steps=100)
    known = ope_gym.tables.scan_parquet(tmp_path, **NAMES)
    assert "NBIS" in evaluate(known, TARGET, compute=compute)
    table = Trajectories.from_frame(tmp_path, **NAMES)
    assert_equal(evaluate(known, TARGET, "NBIS", compute=compute), evaluate(table, TARGET, "NBIS"))
    names = {**NAMES, "log_prob": None}
    unknown = ope_gym.tables.scan_parquet(tmp_path, **names)
    assert list(evaluate(unknown, TARGET, compute=compute)) == ["DM", "MDR"]
    assert not Trajectories.from_frame(tmp_path, **names).has_propensities
    assert len(table.policies) == len(np.unique(data.policy_ids))


def test_the_commands_read_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = made(1, episodes=30, length=20)
    (tmp_path / "runs").mkdir()
    data.to_parquet(tmp_path / "runs" / "run.parquet")
    data.save(tmp_path / "run.ope")
    said = []
    for name in ("run.ope", "runs/run.parquet", "runs"):
        file = str(tmp_path / name)
        assert command(["info", file]) == 0
        assert command(["evaluate", file, "--data", "all", "--block-steps", "100"]) == 0
        assert command(["check", file, "--data", "all", "--limit", "2", "--estimator", "NFIS"]) == 0
        said.append(capsys.readouterr().out.replace(file, "FILE"))
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("form", ["csv", "tsv", "file://"])
def test_text_files_and_files_of_other_systems(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made(1, episodes=30, length=20)
    columns = dict(zip(["a", "b", "c"], data.observations.T, strict=True))
    table = pd.DataFrame({"ep": data.episode_ids, "t": data.steps, **columns})
    table["action"], table["r"], table["log_prob"] = data.actions, data.rewards, data.log_probs
    path = str(tmp_path / f"log.{form}")
    if form == "file://":
        path = f"file://{tmp_path}/log.parquet"
        table.to_parquet(tmp_path / "log.parquet")
    else:
        table.to_csv(path, index=False, sep="\t" if form == "tsv" else ",", float_format="%.17g")
    names: dict[str, Any] = {"episode": "ep", "step": "t", "observation": ["a", "b", "c"]}
    found = Trajectories.from_frame(path, **names, reward="r")
    for name in ("observations", "actions", "rewards", "log_probs", "offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(data, name))
    words = ["--column", "episode=ep", "step=t", "--column", "observation=a,b,c", "--column"]
    for block in ("100", "100000"):
        wide = ["evaluate", path, "--estimators", "DM", "--block-steps", block]
        assert command([*wide, "--target", "tests.test_tables:target", *words, "reward=r"]) == 0
        assert "600 steps" in capsys.readouterr().out.replace(",", "")
    assert command(["info", path, *words, "rewards=r"]) == 2
    assert "--column rewards=: did you mean 'reward'?" in capsys.readouterr().err
    assert command(["info", path, *words, "reward=rr"]) == 2
    assert "column 'rr' (reward) is missing" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="nothing"):
        Trajectories.from_frame(path.replace("log", "nothing"))
    folder = f"file://{tmp_path}" if form == "file://" else tmp_path
    assert len(Trajectories.from_frame(folder, **names, reward="r")) == 30


def target() -> LinearSigmoid:
    """Return a policy by the name of this function."""
    return TARGET


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as a CSV file: Empty CSV file"),
        ("episode,step,observation,action,reward\n0,0,1,0,1\n0,1,1", "cannot be read as a CSV"),
        ("episode,step,observation,action,reward\n0,0,1,0,a\n", "row 0, column 'reward': 'a' is"),
        ("episode,step,observation,action,reward\n0,0,1,,1\n", "row 0, column 'action': has no"),
        (
            "episode;step\n0;1\n",
            "column 'episode' .* is missing from the table",
        ),
        ("episode,episode,step,observation,action,reward\n0,0,0,1,0,1\n", "appears 2 times"),
        ("episode,step,observation,action,reward\n0,1e30,1,0,1\n", "1e.30 is not a whole number"),
        ("episode,step,observation,action,reward,policy\n0,0,1,0,1,\n", "'policy': has no value"),
    ],
)
def test_bad_text_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        Trajectories.from_frame(tmp_path / "log.csv")


HEADERS: list[dict[str, Any]] = [
    {"observation": 5},
    {"observation": ["observation", "observation"]},
    {"observation": {"a": {"b": "reward"}}},
    {"action": None, "action_space": {"type": "Dict"}},
    {"policies": []},
    {"policies": {}},
    {"policies": [{"kind": "linear-sigmoid", "arrays": {"theta": "AAAA"}}]},
    {"horizon": "5"},
    {"horizon": -1},
    {"schedules": [{"clocks": [], "policies": []}]},
    {"schedules": [{"clocks": [0], "policies": [99]}]},
    {"observation_space": {"type": "Box"}},
    {"finite": None, "schedules": 3},
    {"version": None},
]


@pytest.mark.parametrize("header", HEADERS)
def test_forged_headers_are_refused(header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    table = recording().to_frame("pyarrow")
    forged = json.loads(table.schema.metadata[b"ope_gym"]) | header
    text = json.dumps(sealed(forged))
    pq.write_table(table.replace_schema_metadata({"ope_gym": text}), path)
    with pytest.raises((ValueError, TypeError)):
        Trajectories.load(path)
    with pytest.raises((ValueError, TypeError)):
        evaluate(path, TARGET, "BIS", compute=Compute(block_steps=2))
    assert command(["info", str(path)]) == 2


def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "a.parquet", tmp_path / "b.parquet"
    made(1, episodes=3).to_parquet(path)
    copy.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"b.parquet, a copy of .*a.parquet"):
        evaluate([path, copy], TARGET)
    copy.unlink()
    scan = ope_gym.tables.scan_parquet
    doubled: list[Any] = [[path, path], [path, tmp_path], [path, scan(path)], scan([path, path])]
    for twice in doubled:
        with pytest.raises(ValueError, match=r"a.parquet twice"):
            evaluate(twice, TARGET)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command(["evaluate", str(empty)]) == 2
    assert capsys.readouterr().err.endswith(
        "holds no file with the ending .parquet or .csv or .tsv\n"
    )
    for i in range(5):
        (empty / f"run_{i}").mkdir()
        (empty / f"run_{i}" / "episodes.ope").touch()
    assert command(["evaluate", str(empty)]) == 2
    said = capsys.readouterr().err
    assert f"by name: {empty / 'run_0' / 'episodes.ope'}, " in said
    assert said.endswith(f"{empty / 'run_2' / 'episodes.ope'} (and 2 more)\n")
    with pytest.raises(FileNotFoundError, match=r"missing.parquet"):
        Trajectories.from_frame(tmp_path / "missing.parquet")


def test_files_of_one_table_must_be_alike(tmp_path: Path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for other, words in (
        (log(step=None), r"b.parquet: column 'step' is missing, and in .*a.parquet it is int64"),
        (log(reward=["1"] * 6), r"b.parquet: column 'reward' is .*string, and in .* it is double"),
    ):
        pq.write_table(pa.table(log()), paths[0])
        pq.write_table(pa.table(other), paths[1])
        with pytest.raises(ValueError, match=words):
            read(paths)


def test_a_folder_of_our_own_files_has_the_policies_of_each(tmp_path: Path) -> None:
    parts = [recording(), dataclasses.replace(recording(), policies=(Uniform(2), Uniform(3)) * 2)]
    for i, part in enumerate(parts):
        part.to_parquet(tmp_path / f"{i}.parquet")
    assert_identical(Trajectories.load(tmp_path), parts[0].merge(parts[1]))
    assert_identical(Trajectories.from_frame(tmp_path), parts[0].merge(parts[1]))


@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, None])
def test_damage_is_noticed(tmp_path: Path, place: float | None) -> None:
    path = tmp_path / "run.parquet"
    made(1, episodes=20).to_parquet(path)
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-100:]
    else:
        content[int(place * len(content))] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run.parquet cannot be read as a Parquet file"):
        Trajectories.load(path)


def test_a_file_that_changes_between_passes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    made(1, episodes=20).to_parquet(path)
    evaluator = Evaluator(path, "NFIS", compute=Compute(block_steps=1000))
    made(2, episodes=20).to_parquet(path)
    with pytest.raises(ValueError, match="another file than the one that"):
        evaluator.evaluate(TARGET)


def test_an_older_file_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    data = made(1, episodes=2)
    data.to_parquet(path)
    objects = dataclasses.replace(data, observations=np.full(data.n_steps, None))
    with pytest.raises(TypeError, match="observation holds Python objects"):
        objects.to_parquet(path)
    assert_identical(Trajectories.load(path), data)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        data.to_parquet(tmp_path / "nowhere" / "run.parquet")


def test_a_recorder_and_a_buffer_become_tables(tmp_path: Path) -> None:
    from wrappers import RecordTrajectories, collect

    env = RecordTrajectories(gym.make("CartPole-v1"), held_out=0.5)
    collect(env, LinearSigmoid(np.zeros(4)), 6, 0, seed=1)
    env.buffer.to_parquet(tmp_path / "run.parquet")
    assert_identical(Trajectories.load(tmp_path / "run.parquet"), env.buffer.view())
    assert len(env.buffer.to_frame()) == env.buffer.view().n_steps
