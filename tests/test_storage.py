"""Tests of block files: whole, cut, damaged, forged, and written by two runs."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as S
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.fuzz import write_episode
from ope_gym.data import block_writer, blocks, files
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.blocks import DamagedFileError, read_blocks
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid, Policy, Uniform

ROOT = Path(__file__).parents[1]
BOX, TWO = S.Box(-1, 1, (2,)), S.Discrete(2)
SIGMOID = LinearSigmoid(np.array([0.5, -0.5]))


def write_run(path: Path, lengths: tuple[int, ...], *, close: bool = True) -> list[int]:
    """Write a recorder's file, one block an episode, and return where each block ends."""
    ends = []
    with BlockWriter(path) as writer:
        files.write_spaces(writer, BOX, TWO, 50)
        ends.append(path.stat().st_size)
        files.write_policy(writer, SIGMOID)
        ends.append(path.stat().st_size)
        for i, n in enumerate(lengths):
            write_episode(
                writer,
                np.full((n, 2), i, dtype=np.float32),
                np.arange(n) % 2,
                np.full(n, 10.0 + i),
                np.full(n, -0.5 - i),
                0,
                terminated=True,
                truncated=i == 1,
                held_out=i == 2,
                start_clock=None if i == 0 else 100 * i,
                observation_space=BOX,
                action_space=TWO,
            )
            ends.append(path.stat().st_size)
    return ends


def check_run(found: Trajectories, lengths: tuple[int, ...]) -> None:
    """Assert that these are the first episodes of `write_run`, to the last bit."""
    n = len(found)
    assert found.lengths.tolist() == list(lengths[:n])
    if n == 0:
        return
    ids = found.episode_ids
    assert np.array_equal(found.observations, np.stack([ids, ids], axis=1).astype(np.float32))
    assert np.array_equal(found.actions, found.steps % 2)
    assert np.array_equal(found.rewards, 10.0 + ids)
    assert np.array_equal(found.log_probs, -0.5 - ids)
    assert not found.policy_ids.any()
    assert found.terminated.all()
    assert found.truncated.tolist() == [i == 1 for i in range(n)]
    assert found.held_out.tolist() == [i == 2 for i in range(n)]
    assert found.start_clock.tolist() == [-1 if i == 0 else 100 * i for i in range(n)]
    assert (found.schedule_ids == -1).all()
    assert found.policies == (SIGMOID,)
    assert (found.observation_space, found.action_space, found.horizon) == (BOX, TWO, 50)


def load_quietly(path: Path, *, recover: bool = False) -> tuple[Trajectories, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Trajectories.load(path, recover=recover)
    assert all(w.category is UserWarning for w in caught)
    return found, [str(w.message) for w in caught]


def raw_block(offset: int, meta: dict[str, Any] | bytes, payload: bytes = b"") -> bytes:
    """Make a block with right checksums and any contents, for a position in the file."""
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    text += b" " * (-(offset + 24 + len(text)) % 64)
    head = struct.pack(
        "<IIQI", 0x4B4C424F, len(text), len(payload), zlib.crc32(payload, zlib.crc32(text))
    )
    return head + struct.pack("<I", zlib.crc32(head)) + text + payload


def file_with(path: Path, *made: tuple[dict[str, Any] | bytes, bytes]) -> Path:
    data = blocks.MAGIC
    for meta, payload in made:
        data += raw_block(len(data), meta, payload)
    path.write_bytes(data)
    return path


# The format ----------------------------------------------------------------------------------


def test_blocks_come_back_as_they_were(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        dtype: np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
    }
    arrays |= {
        "scalar": np.array(2.5),
        "none": np.empty((0, 3), np.float32),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(10)[::3],
        "big-endian": np.arange(3, dtype=">i4"),
        "odd values": np.array([np.nan, -np.inf, -0.0, 5e-324]),
    }
    path = tmp_path / "blocks"
    with BlockWriter(path) as writer:
        writer.append("first", {"a": [1, {"b": None}], "ü": "ä"}, arrays)
        writer.append("second", {}, {})
    first, second = read_blocks(path)
    assert (first.kind, first.meta) == ("first", {"a": [1, {"b": None}], "ü": "ä"})
    assert (second.kind, second.meta, second.arrays) == ("second", {}, {})
    assert first.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        found = first.arrays[name]
        assert found.shape == array.shape
        assert found.dtype == array.dtype.newbyteorder("=")
        assert found.tobytes() == array.astype(found.dtype).tobytes(), name


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    with BlockWriter(path) as writer:
        writer.append("x", {}, {"a": np.arange(3, dtype=np.int8), "b": np.array([1.5, 2.5])})
        writer.append("y", {"n": 1}, {"c": np.array([7], np.int32)})
    data = path.read_bytes()
    assert data[:8] == b"OPEGYM\x00\x01"
    position = 8
    for expected in ({"a": [0, 1, 2], "b": [1.5, 2.5]}, {"c": [7]}):
        magic, json_length, payload_length, crc, head_crc = struct.unpack_from(
            "<IIQII", data, position
        )
        assert magic == 0x4B4C424F
        assert zlib.crc32(data[position : position + 20]) == head_crc
        start = position + 24 + json_length
        end = start + payload_length
        assert start % 64 == 0
        assert zlib.crc32(data[position + 24 : end]) == crc
        entries = json.loads(data[position + 24 : start])["arrays"]
        for name, values in expected.items():
            entry = entries[name]
            assert entry["offset"] % 64 == 0
            mapped = np.memmap(
                path, entry["dtype"], "r", start + entry["offset"], tuple(entry["shape"])
            )
            assert mapped.tolist() == values
            del mapped
        position = end
    assert position == len(data)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([1j]), np.array([None]), np.ones(1, "g")]
)
def test_only_numbers_are_written(tmp_path: Path, array: NDArray[Any]) -> None:
    path = tmp_path / "blocks"
    with BlockWriter(path) as writer:
        writer.append("x", {}, {})
        before = path.read_bytes()
        with pytest.raises(TypeError, match="array 'a' has dtype"):
            writer.append("x", {}, {"a": array})
        with pytest.raises(ValueError, match="JSON"):
            writer.append("x", {"a": float("nan")}, {})
        assert path.read_bytes() == before
        writer.append("y", {}, {})
    assert [block.kind for block in read_blocks(path)] == ["x", "y"]


# Cut and damaged files -----------------------------------------------------------------------


def test_a_file_cut_anywhere_gives_the_episodes_before_the_cut(tmp_path: Path) -> None:
    path, cut = tmp_path / "run", tmp_path / "cut"
    lengths = (3, 1, 2)
    ends = write_run(path, lengths)
    data = path.read_bytes()
    # every byte of the last block, and a sample of the others
    for size in [*range(8, ends[-2], 13), *ends, *range(ends[-2], len(data) + 1)]:
        cut.write_bytes(data[:size])
        found, messages = load_quietly(cut)
        assert len(found) == sum(end <= size for end in ends[2:])
        check_run(found, lengths)
        whole = max(end for end in [8, *ends] if end <= size)
        if whole == size:
            assert messages == []
        else:
            assert len(messages) == 1
            assert f"{size - whole} bytes from byte {whole} on were dropped" in messages[0]


def test_a_flipped_bit_or_byte_never_gives_wrong_numbers(tmp_path: Path) -> None:
    path, bad = tmp_path / "run", tmp_path / "bad"
    lengths = (2, 1)
    ends = write_run(path, lengths)
    data = bytearray(path.read_bytes())
    for position in range(len(data)):
        mask = (0x01, 0xFF)[position % 2]
        data[position] ^= mask
        bad.write_bytes(data)
        data[position] ^= mask
        with pytest.raises(DamagedFileError) as caught:
            load_quietly(bad)
        begin = max(end for end in [0, 8, *ends] if end <= position)
        assert caught.value.offset == begin
        assert f"byte {begin}" in str(caught.value)
        if position >= 8 and position % 3 == 0:
            found, messages = load_quietly(bad, recover=True)
            assert len(found) == sum(end <= position for end in ends[2:])
            assert len(messages) == 1
            assert "recovered what precedes the damage" in messages[0]
            check_run(found, lengths)


def test_the_error_says_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run"
    ends = write_run(path, (3, 3, 3))
    data = bytearray(path.read_bytes())
    data[ends[3] + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DamagedFileError, match=r"checksum \(byte \d+\); 4 blocks.*2 of episodes.*recover=True"
    ):
        Trajectories.load(path)


@pytest.mark.parametrize("data", [b"", b"OPE", b"PK\x03\x04" * 10, b"OPEGYM\x00\x02" + bytes(99)])
def test_what_is_not_our_file_is_refused_and_left_alone(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    expected = "format version 2" if data.startswith(b"OPEGYM\x00") else "not an ope_gym file"
    for recover in (False, True):
        with pytest.raises(DamagedFileError, match=expected):
            Trajectories.load(path, recover=recover)
    if len(data) >= 8:
        with pytest.raises(DamagedFileError, match=expected):
            BlockWriter(path)
        assert path.read_bytes() == data


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trajectories.load(tmp_path / "none")


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    head = struct.pack("<IIQI", 0x4B4C424F, 2**32 - 1, 2**63, 0)
    path.write_bytes(blocks.MAGIC + head + struct.pack("<I", zlib.crc32(head)))
    with pytest.warns(UserWarning, match="24 bytes from byte 8 on were dropped"):
        assert list(read_blocks(path)) == []


def entry(dtype: Any = "<f8", shape: Any = (2,), offset: Any = 0) -> dict[str, Any]:
    arrays = {"a": {"dtype": dtype, "shape": shape, "offset": offset}}
    return {"kind": "x", "arrays": arrays}


@pytest.mark.parametrize(
    "meta",
    [
        entry(dtype="|O"),
        entry(dtype=">f8"),
        entry(dtype="f8"),
        entry(dtype=["<f8"]),
        entry(dtype=7),
        entry(shape=[3]),
        entry(shape=[-2]),
        entry(shape=[True]),
        entry(shape=[2.0]),
        entry(shape=["2"]),
        entry(shape=3),
        entry(shape=[2**40, 2**40]),
        entry(shape=[0, 2**70]),
        entry(shape=[0] + [2**62] * 3),
        entry(shape=[1] * 100),
        entry(offset=8),
        entry(shape=[1], offset=8),
        entry(offset=64),
        entry(offset=-64),
        entry(offset=None),
        entry(dtype="|b1", shape=[8]),
        {"kind": "x"},
        {"arrays": {}},
        {"kind": 3, "arrays": {}},
        {"kind": "x", "arrays": []},
        {"kind": "x", "arrays": {"a": []}},
        b"[]",
        b"3",
        b'"kind"',
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda meta: str(meta)[:60],
)
def test_impossible_contents_with_good_checksums_are_damage(tmp_path: Path, meta: Any) -> None:
    good: dict[str, Any] = {"kind": "good", "arrays": {}}
    path = file_with(tmp_path / "bad", (good, b""), (meta, struct.pack("<2d", 1.5, 2.5)))
    with pytest.raises(DamagedFileError, match="1 blocks before it are readable"):
        list(read_blocks(path))
    with pytest.warns(UserWarning, match="recovered"):
        assert [block.kind for block in read_blocks(path, recover=True)] == ["good"]


def test_a_payload_off_its_boundary_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(blocks.MAGIC + raw_block(9, {"kind": "x", "arrays": {}}))
    with pytest.raises(DamagedFileError, match="multiple of 64"):
        list(read_blocks(path))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_an_error_or_a_cut_file(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(blocks.MAGIC + noise)
    try:
        found, messages = load_quietly(path)
    except DamagedFileError:
        return
    assert len(found) == 0
    assert len(messages) == bool(noise)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["a", "rewards", "Box"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "tuple", "dict", "json", "n"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["spaces", "policy", "changes", "episodes", "?"]),
    change=st.dictionaries(
        st.sampled_from(
            [
                "observation_space",
                "action_space",
                "horizon",
                "policy",
                "schedule",
                "mid_episode",
                "observations",
                "actions",
            ]
        ),
        json_values,
        min_size=1,
        max_size=2,
    ),
)
def test_nonsense_in_json_is_damage_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, kind: str, change: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("nonsense")
    write_run(folder / "run", (2, 1))
    with BlockWriter(folder / "bad") as writer:
        for block in read_blocks(folder / "run"):
            meta = {**block.meta, **change} if block.kind == kind else block.meta
            writer.append(block.kind, meta, block.arrays)
    try:
        found, _ = load_quietly(folder / "bad")
    except DamagedFileError:
        return
    assert found.rewards.tolist() == [10.0, 10.0, 11.0]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(
        ["rewards", "log_probs", "policy_ids", "episodes", "observations", "actions"]
    ),
    dtype=st.sampled_from(["f8", "i8", "i4", "u1", "f4", "b1"]),
    shape=st.lists(st.integers(0, 3), max_size=3),
    value=st.sampled_from([0, 1, -1, 2, 99]),
)
def test_nonsense_in_arrays_is_damage_or_valid(
    tmp_path_factory: pytest.TempPathFactory, name: str, dtype: str, shape: list[int], value: int
) -> None:
    folder = tmp_path_factory.mktemp("nonsense")
    write_run(folder / "run", (2, 1))
    with np.errstate(all="ignore"):
        wrong = np.full(shape, np.array(value).astype(dtype))
    with BlockWriter(folder / "bad") as writer:
        for block in read_blocks(folder / "run"):
            swap = {name: wrong} if block.kind == "episodes" else {}
            writer.append(block.kind, block.meta, {**block.arrays, **swap})
    try:
        found, _ = load_quietly(folder / "bad")
    except DamagedFileError:
        return
    assert found.lengths.tolist() == [2, 1]
    assert np.isfinite(found.rewards).all()


# Writing -------------------------------------------------------------------------------------


def test_a_good_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    for kind in "abc":
        with BlockWriter(path) as writer:
            writer.append(kind, {}, {"x": np.arange(5)})
    assert [block.kind for block in read_blocks(path)] == ["a", "b", "c"]


def test_a_file_cut_anywhere_can_be_continued(tmp_path: Path) -> None:
    path, cut = tmp_path / "run", tmp_path / "cut"
    with BlockWriter(path) as writer:
        writer.append("a", {}, {"x": np.arange(5)})
        whole = path.stat().st_size
        writer.append("b", {}, {"x": np.arange(5)})
    data = path.read_bytes()
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        left = [kind for kind, end in (("a", whole), ("b", len(data))) if end <= size]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with BlockWriter(cut) as writer:
                writer.append("new", {}, {"x": np.arange(3)})
        tail = size - (whole if size >= whole else 8)
        assert [("removed" in str(w.message)) for w in caught] == [True] * (tail > 0)
        assert [block.kind for block in read_blocks(cut)] == [*left, "new"]


def test_a_damaged_file_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_run(path, (3, 3))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="recover=True"):
        BlockWriter(path)
    assert path.read_bytes() == data


def test_a_failed_write_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    original = block_writer._write_all

    def disk_full(file: Any, data: bytes | memoryview) -> None:
        original(file, bytes(data)[:10])
        raise OSError("no space left")

    with BlockWriter(path) as writer:
        writer.append("a", {}, {"x": np.arange(5)})
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(block_writer, "_write_all", disk_full)
            for size in (5, 2**18):  # written at once, and in parts
                with pytest.raises(OSError, match="no space left"):
                    writer.append("b", {}, {"x": np.arange(size)})
        assert path.read_bytes() == before
        writer.append("c", {}, {"x": np.arange(2**18)})
    assert [block.kind for block in read_blocks(path)] == ["a", "c"]


def test_a_large_block_is_written_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    x, y = np.arange(2**18), np.arange(7, dtype=np.int8)
    with BlockWriter(path) as writer:
        writer.append("a", {}, {"y": y, "x": x})
    (block,) = read_blocks(path)
    assert np.array_equal(block.arrays["x"], x)
    assert np.array_equal(block.arrays["y"], y)


def test_a_short_write_is_completed() -> None:
    class Slow:
        data = b""

        def write(self, view: memoryview) -> int:
            self.data += bytes(view[:3])
            return min(3, len(view))

    slow = Slow()
    block_writer._write_all(slow, b"0123456789")
    assert slow.data == b"0123456789"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with BlockWriter(path) as writer:
        with pytest.raises(RuntimeError, match="open in another writer"):
            BlockWriter(path)
        writer.append("a", {}, {})
    BlockWriter(path).close()


def test_a_writer_closes_once_and_for_all(tmp_path: Path) -> None:
    writer = BlockWriter(tmp_path / "run")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append("a", {}, {})


def test_blocks_survive_the_death_of_their_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = (
        "import os, sys, numpy as np; from ope_gym.data.block_writer import BlockWriter\n"
        "w = BlockWriter(sys.argv[1])\n"
        "w.append('a', {}, {'x': np.arange(5)}); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert [block.kind for block in read_blocks(path)] == ["a"]


# Saving --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    write_run(tmp_path / "run", (3, 1, 2))
    path = tmp_path / "saved"
    Trajectories.load(tmp_path / "run").save(path)
    (tmp_path / "run").unlink()
    yield path
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    assert leftovers == []


def test_a_saved_file_loads_the_same(saved: Path) -> None:
    check_run(Trajectories.load(saved), (3, 1, 2))
    buffer = TrajectoryBuffer.load(saved)
    check_run(buffer.view(), (3, 1, 2))


def test_a_failed_save_keeps_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    data = Trajectories.load(saved)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    for name in ("write_episodes", "write_spaces"):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, fail)
            with pytest.raises(OSError, match="no space left"):
                data.save(saved)
        assert saved.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            data.save(saved)
    assert saved.read_bytes() == before


def test_saving_keeps_links_and_rights(saved: Path) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    saved.chmod(0o640)
    Trajectories.load(saved).select(episodes=[0]).save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640
    assert len(Trajectories.load(saved)) == 1


def test_a_new_file_has_the_usual_rights(saved: Path) -> None:
    other = saved.with_name("plain")
    other.touch()
    new = saved.with_name("new")
    Trajectories.load(saved).save(new)
    assert new.stat().st_mode == other.stat().st_mode


def test_a_recorders_file_is_not_replaced_under_it(saved: Path) -> None:
    data = Trajectories.load(saved)
    with BlockWriter(saved), pytest.raises(RuntimeError, match="a recorder is writing"):
        data.save(saved)
    data.save(saved)


def test_a_missing_folder_is_named(saved: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        Trajectories.load(saved).save(saved.parent / "nowhere" / "file")


# Sections ------------------------------------------------------------------------------------


def test_a_second_run_appends_a_section(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_run(path, (3, 1))
    with BlockWriter(path) as writer:
        files.write_spaces(writer, BOX, TWO, 50)
        files.write_policy(writer, Uniform(2))
        files.write_policy(writer, SIGMOID)
        files.write_change(writer, 0, 0, mid_episode=False)
        files.write_change(writer, 1, 4, mid_episode=True)
        write_episode(
            writer,
            np.zeros((4, 2)),
            [0, 1, 0, 1],
            np.ones(4),
            np.full(4, -0.7),
            [0, 0, 1, 1],
            terminated=True,
            start_clock=2,
            observation_space=BOX,
            action_space=TWO,
        )
    found = Trajectories.load(path)
    assert found.lengths.tolist() == [3, 1, 4]
    assert found.policies == (SIGMOID, Uniform(2))
    assert found.policy_ids.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert found.schedule_ids.tolist() == [-1, -1, 0]
    assert found.schedules[0].clocks.tolist() == [0, 4]
    assert found.schedules[0].policies.tolist() == [1, 0]
    found.save(tmp_path / "saved")
    again = Trajectories.load(tmp_path / "saved")
    assert again.schedules == found.schedules
    assert again.schedule_ids.tolist() == [-1, -1, 0]
    assert np.array_equal(again.observations, found.observations)


def test_changes_between_episodes_need_no_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with BlockWriter(path) as writer:
        files.write_spaces(writer, None, None, None)
        files.write_policy(writer, Uniform(2))
        files.write_policy(writer, Uniform(3))
        files.write_change(writer, 0, 0, mid_episode=False)
        write_episode(writer, [0.0], [0], [1.0], [-1.0], 0, terminated=True, start_clock=0)
        files.write_change(writer, 1, 1, mid_episode=False)
        write_episode(writer, [0.0], [0], [1.0], [-1.0], 1, terminated=True, start_clock=1)
    found = Trajectories.load(path)
    assert found.schedules == ()
    assert found.schedule_ids.tolist() == [-1, -1]
    assert found.start_clock.tolist() == [0, 1]
    assert found.policy_ids.tolist() == [0, 1]


def test_a_file_and_a_buffer_give_the_same_schedules(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(BOX, TWO)
    policies: list[Policy] = [Uniform(2), SIGMOID, LinearSigmoid(np.zeros(2))]
    with BlockWriter(tmp_path / "run") as writer:
        files.write_spaces(writer, BOX, TWO, None)

        def change(k: int, clock: int, mid_episode: bool) -> None:
            buffer.change_policy(k, clock, mid_episode=mid_episode)
            files.write_change(writer, k, clock, mid_episode=mid_episode)

        def append(ids: list[int], clock: int | None) -> None:
            n = len(ids)
            steps = (np.zeros((n, 2)), [0] * n, np.ones(n), np.full(n, -0.7), ids)
            buffer.append(*steps, terminated=True, start_clock=clock)
            write_episode(
                writer,
                *steps,
                terminated=True,
                start_clock=clock,
                observation_space=BOX,
                action_space=TWO,
            )

        for policy in policies:
            buffer.add_policy(policy)
            files.write_policy(writer, policy)
        append([2], 0)  # before anything is known of changes
        change(0, 2, False)
        append([0, 0], 2)
        change(0, 4, True)  # no change
        change(1, 5, False)
        change(2, 5, True)  # policy 1 never acted
        append([0, 2, 2], 4)
        append([1, 1], None)
    found, expected = Trajectories.load(tmp_path / "run"), buffer.view()
    assert found.schedules == expected.schedules
    assert found.schedule_ids.tolist() == expected.schedule_ids.tolist() == [-1, 0, 0, -1]
    assert found.policy_ids.tolist() == expected.policy_ids.tolist()


@pytest.mark.parametrize(
    ("kind", "meta", "arrays"),
    [
        ("policy", {"policy": "linear-sigmoid"}, {}),
        ("policy", {}, {}),
        ("policy", {"policy": 3}, {}),
        ("changes", {"schedule": 0, "mid_episode": True}, {"clocks": np.arange(2)}),
        (
            "changes",
            {"schedule": 0, "mid_episode": True},
            {"clocks": np.array([5, 3]), "policies": np.array([0, 1])},
        ),
        (
            "changes",
            {"schedule": 0, "mid_episode": True},
            {"clocks": np.array([0, 3]), "policies": np.array([0, 7])},
        ),
        ("spaces", {"observation_space": None, "action_space": None, "horizon": "long"}, {}),
        ("spaces", {"observation_space": None, "action_space": None, "horizon": 0}, {}),
        ("spaces", {"observation_space": {"type": "?"}, "action_space": None, "horizon": 1}, {}),
        ("future", {}, {}),
    ],
)
def test_blocks_that_contradict_each_other_are_damage(
    tmp_path: Path, kind: str, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]
) -> None:
    path = tmp_path / "run"
    write_run(path, (3, 1))
    with BlockWriter(path) as writer:
        writer.append(kind, meta, arrays)
    with pytest.raises(DamagedFileError):
        Trajectories.load(path)


def test_the_rows_of_a_block_belong_to_its_episodes(tmp_path: Path) -> None:
    write_run(tmp_path / "run", (2, 1))
    lengths = iter([1, 2])  # three steps in all, but not in each
    with BlockWriter(tmp_path / "bad") as writer:
        for block in read_blocks(tmp_path / "run"):
            arrays = dict(block.arrays)
            if block.kind == "episodes":
                arrays["episodes"] = arrays["episodes"].copy()
                arrays["episodes"][0, 0] = next(lengths)
            writer.append(block.kind, block.meta, arrays)
    with pytest.raises(DamagedFileError, match="its episodes have 1 steps, its columns 2"):
        Trajectories.load(tmp_path / "bad")


@pytest.mark.parametrize("lengths", [[3, -1], [2, 0], [2**62] * 4 + [2]])
def test_impossible_lengths_are_damage(tmp_path: Path, lengths: list[int]) -> None:
    write_run(tmp_path / "run", (2,))
    with BlockWriter(tmp_path / "bad") as writer:
        for block in read_blocks(tmp_path / "run"):
            arrays = dict(block.arrays)
            if block.kind == "episodes":
                arrays["episodes"] = np.repeat(arrays["episodes"], len(lengths), axis=0)
                arrays["episodes"][:, 0] = lengths
            writer.append(block.kind, block.meta, arrays)
    with pytest.raises(DamagedFileError, match="an episode has at least one step"):
        Trajectories.load(tmp_path / "bad")


def test_a_file_must_begin_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with BlockWriter(path) as writer:
        files.write_policy(writer, Uniform(2))
    with pytest.raises(DamagedFileError, match="first block is not of kind 'spaces'"):
        Trajectories.load(path)


def test_a_file_without_blocks_is_empty(tmp_path: Path) -> None:
    BlockWriter(tmp_path / "run").close()
    assert len(Trajectories.load(tmp_path / "run")) == 0


def test_malformed_blocks_can_be_recovered_from(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_run(path, (3, 1))
    with BlockWriter(path) as writer:
        writer.append("policy", {"policy": "linear-sigmoid"}, {})
        writer.append("future", {}, {})
    found, messages = load_quietly(path, recover=True)
    check_run(found, (3, 1))
    assert len(messages) == 1


def test_thousands_of_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lengths = tuple(1 + i % 3 for i in range(2000))
    with BlockWriter(path) as writer:
        files.write_spaces(writer, BOX, TWO, None)
        files.write_policy(writer, Uniform(2))
        for i, n in enumerate(lengths):
            write_episode(
                writer,
                np.zeros((n, 2)),
                [0] * n,
                [float(i)] * n,
                [-0.7] * n,
                0,
                terminated=True,
                observation_space=BOX,
                action_space=TWO,
            )
    found = Trajectories.load(path)
    assert found.lengths.tolist() == list(lengths)
    assert np.array_equal(found.rewards, found.episode_ids)


def test_an_unregistered_policy_is_announced_when_it_is_lost(tmp_path: Path) -> None:
    class Mine:
        def log_prob(self, observations: Any, actions: Any) -> NDArray[np.float64]:
            return np.zeros(len(actions))

        def sample(self, observations: Any, rng: np.random.Generator) -> Any:
            return np.zeros(len(observations), int)

    buffer = TrajectoryBuffer()
    for mine in (Mine(), Mine()):
        k = buffer.add_policy(mine)
        buffer.append([0.0], [0], [1.0], [-0.1], k, terminated=True)
    with pytest.warns(UserWarning, match="Mine is not registered.*register_policy"):
        buffer.save(tmp_path / "run")
    found = Trajectories.load(tmp_path / "run")
    assert found.policy_ids.tolist() == [0, 1]  # two that cannot be told apart stay two
    assert TrajectoryBuffer.load(tmp_path / "run").view().policy_ids.tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="register"):
        found.audit()


_TWO_MORE_COLUMNS = """
import dataclasses, sys
from importlib.machinery import PathFinder, SourceFileLoader
import numpy as np

class Changed(SourceFileLoader):
    def get_code(self, name):
        source, line = self.get_source(name), "    schedules: tuple[Schedule, ...] = ()"
        assert line in source
        more = "    seeds: Ints = field(metadata=_per_episode(np.int64, default=-5))\\n"
        more += "    noise: Floats = field(metadata=_per_step(np.float64, default=0.5))\\n"
        return compile(source.replace(line, more + line), self.path, "exec")

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "ope_gym.data.schema":
            spec = PathFinder.find_spec(name, path)
            spec.loader = Changed(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder)

from ope_gym.data.trajectories import Trajectories

found = Trajectories.load(sys.argv[1])
assert (found.seeds == -5).all() and len(found.seeds) == 3
assert (found.noise == 0.5).all() and len(found.noise) == 6
changed = dataclasses.replace(found, seeds=np.arange(3), noise=np.arange(6.0))
changed.save(sys.argv[2])
again = Trajectories.load(sys.argv[2])
assert again.select(episodes=[2, 0]).seeds.tolist() == [2, 0]
assert again.merge(found).noise.tolist() == [0, 1, 2, 3, 4, 5] + [0.5] * 6
"""


def test_a_new_column_is_one_line_and_older_files_have_its_default(tmp_path: Path) -> None:
    write_run(tmp_path / "old", (3, 1, 2))
    command = [
        sys.executable,
        "-c",
        _TWO_MORE_COLUMNS,
        str(tmp_path / "old"),
        str(tmp_path / "new"),
    ]
    subprocess.run(command, check=True, timeout=100)
    with pytest.raises(DamagedFileError, match=r"episodes has shape \(3, 7\)"):
        Trajectories.load(tmp_path / "new")  # a newer version wrote it
