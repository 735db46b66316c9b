"""The file of a recorder: what it holds after each episode, an error or a killed process."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import wrappers
import wrappers.vector
from benchmarks import fuzz
from ope_gym.data import block_writer, blocks, reader
from ope_gym.data.trajectories import Trajectories, read_chunks
from ope_gym.policies import LinearSigmoid, Uniform
from tests.scripted_envs import Constant, ScriptedEnv, script
from tests.test_record import play
from wrappers import collect
from wrappers.recording import rows

ROOT = Path(__file__).parents[1]
SUB_ENVS = 8


def recorder(kind: str, path: Path | None) -> Any:
    if kind.startswith("single"):
        env = gym.make("CartPole-v1")
        return wrappers.RecordTrajectories(env, held_out=0.25, path=path, append=True)
    envs = gym.make_vec("CartPole-v1", SUB_ENVS)
    return wrappers.vector.RecordTrajectories(envs, held_out=0.25, path=path, append=True)


def endless(env: Any, kind: str) -> Iterator[int]:
    """Play the same endless run; print after every step how many episodes have ended."""
    single = isinstance(env, wrappers.RecordTrajectories)
    rng = np.random.default_rng(0)
    observations, _ = env.reset(seed=1)
    ended, policy, log_prob = 0, LinearSigmoid(np.zeros(4)), None
    for i in range(10**9):
        # in the middle of episodes, too; later so seldom that blocks have many episodes
        if i % (50 if i < 500 else 5000) == 0:
            policy = LinearSigmoid(np.full(4, 0.01 * (i // 50)))
            env.follow(policy)
        actions = rng.integers(2, size=SUB_ENVS)
        if kind.endswith("given"):
            seen = np.atleast_2d(observations)
            log_prob = policy.log_prob(seen, actions[: len(seen)])
            log_prob = log_prob[0] if single else log_prob
        action = int(actions[0]) if single else actions
        observations, _, terminated, truncated, _ = env.step(action, log_prob)
        over = int(np.sum(np.logical_or(terminated, truncated)))
        ended += over
        if single and over:
            observations, _ = env.reset()
        yield ended


def announce(kind: str, path: str) -> None:
    """Start the process that will be killed."""
    for ended in endless(recorder(kind, Path(path)), kind):
        print(ended, flush=True)


def announced_by_the_killed(kind: str, path: Path, seconds: float) -> int:
    code = "import sys; from tests.test_record_crash import announce; announce(*sys.argv[1:])"
    command = [sys.executable, "-c", code, kind, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)
        process.kill()
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
    assert process.returncode == -signal.SIGKILL
    return int([line for line in lines if line.endswith(b"\n")][-1])


def load_quietly(path: Path) -> Trajectories:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ends inside its last block")
        return Trajectories.load(path)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("kind", ["single", "vector", "single, given", "vector, given"])
def test_killed_at_any_moment(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    moments = random.Random(kind)
    runs: list[int] = []  # number of episodes recovered from each
    for _ in range(2):  # the second continues the file of the first
        announced = announced_by_the_killed(kind, path, moments.uniform(0.0, 0.3))
        recovered = len(load_quietly(path)) - sum(runs)
        # at most the episodes of the last step, which was not printed any more, come on top
        assert announced <= recovered <= announced + (1 if "single" in kind else SUB_ENVS)
        runs.append(recovered)
    data = load_quietly(path)
    env = recorder(kind, None)
    for ended in endless(env, kind):
        if ended >= max(runs):
            break
    expected = env.buffer.view()
    for first, n in zip((0, runs[0]), runs, strict=True):
        part, whole = (
            data.select(episodes=slice(first, first + n)),
            expected.select(episodes=slice(n)),
        )
        # the last digit of a probability depends on how many rows are computed together
        assert_allclose(part.log_probs, whole.log_probs, rtol=1e-14)
        for name in (
            "observations",
            "actions",
            "rewards",
            "offsets",
            "terminated",
            "truncated",
            "held_out",
            "start_clock",
        ):
            assert_array_equal(getattr(part, name), getattr(whole, name), err_msg=name)
    data.audit(1e-12)
    # the file can be continued again and again
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ended inside its last block")
        env = recorder(kind, path)
        for ended in endless(env, kind):
            if ended:
                break
    env.close()
    assert len(Trajectories.load(path)) == sum(runs) + ended


@pytest.mark.parametrize("few", [0, 12])  # by an index, one by one
def test_episodes_whose_rows_were_moved_are_written_ahead_whole(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_envs = 12
    monkeypatch.setattr(rows, "_FEW", few)
    monkeypatch.setattr(rows, "_ROWS", 20 * num_envs)  # so many steps until rows are moved
    path = tmp_path / "episodes"
    make = wrappers.vector.RecordTrajectories
    mode: Any = {"vectorization_mode": "vector_entry_point"}
    env = make(gym.make_vec("CartPole-v1", num_envs, **mode), path=path)
    twin = make(gym.make_vec("CartPole-v1", num_envs, **mode))
    rng = np.random.default_rng(0)
    for recording in (env, twin):
        recording.follow(LinearSigmoid(np.full(4, 0.1)))
        recording.reset(seed=1)
    tails = 0
    for _ in range(150):
        actions = rng.integers(2, size=num_envs)
        env.step(actions)
        twin.step(actions)
        found = Trajectories.load(path)
        tails += any(block.kind == blocks.AHEAD for block in blocks.read_blocks(path))
        expected = twin.buffer.view()
        assert len(found) == len(expected) == env.finished_episodes
        for name in ("observations", "actions", "rewards", "offsets", "terminated", "start_clock"):
            assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert tails > 75
    env.abandon()
    env.close()


def test_episodes_that_end_together_may_have_begun_under_other_policies(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    scripts = script(".T", "...T"), script(".....T")
    envs = [lambda some=some: ScriptedEnv(some) for some in scripts]
    pair = gym.vector.SyncVectorEnv(envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env = wrappers.vector.RecordTrajectories(pair, path=path)
    env.follow(LinearSigmoid(np.zeros(3)))
    env.reset()
    env.step(np.ones(2, dtype=np.int64))
    env.follow(LinearSigmoid(np.ones(3)))
    for _ in range(5):
        env.step(np.ones(2, dtype=np.int64))
    found = Trajectories.load(path)
    assert_same(found, env.buffer.view())
    assert found.policy_ids.tolist() == [0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    env.close()


def scripted(path: Path | str, *episodes: str) -> wrappers.RecordTrajectories:
    inner = ScriptedEnv(script(*(episodes or ("..T",))))
    env = wrappers.RecordTrajectories(inner, path=path, append=True)
    env.follow(Uniform(2))
    return env


def test_each_episode_is_in_the_file_when_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    assert len(Trajectories.load(path)) == 0
    for n in range(1, 4):
        play(env, 1)
        assert len(Trajectories.load(path)) == n
    env.reset()
    env.step(0)
    env.follow(LinearSigmoid(np.zeros(3)))
    env.step(0)
    env.step(0)
    data = Trajectories.load(path)
    assert_array_equal(data.policy_ids[-3:], [0, 1, 1])
    assert_array_equal(data.schedules[0].clocks, [0, 10])
    assert_array_equal(data.schedule_ids, [0] * 4)
    env.close()


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_cut_file_is_continued(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    for n in range(1, 4):
        play(env, 1)
        assert len(env.buffer) == n  # whoever looks brings it into a block
    env.close()
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.warns(UserWarning, match="ended inside its last block"):
        env = scripted(path)
    play(env, 2)
    env.close()
    data = Trajectories.load(path)
    assert_array_equal(data.lengths, [3] * 4)
    assert data.policies == (Uniform(2),)


def test_a_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    env = scripted(tmp_path / "episodes")
    with pytest.raises(RuntimeError, match="open in another writer"):
        scripted(tmp_path / "episodes")
    env.close()
    scripted(tmp_path / "episodes").close()


def test_a_file_of_another_environment_is_refused(tmp_path: Path) -> None:
    scripted(tmp_path / "episodes").close()
    path = tmp_path / "episodes"
    env = wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=path, append=True)
    with pytest.raises(ValueError, match="holds episodes of another environment"):
        env.follow(Uniform(2))


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years")
    with pytest.raises(blocks.DamagedFileError, match="not an ope_gym file"):
        scripted(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "three years"


@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_file_that_exists_is_not_continued_in_silence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes"

    def make(**options: Any) -> Any:
        if kind == "single":
            return wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=path, **options)
        envs = gym.make_vec("CartPole-v1", 2)
        return wrappers.vector.RecordTrajectories(envs, path=path, **options)

    env = make(append=False)
    env.follow(Uniform(2))
    env.close()
    make().close()  # there is nothing in it yet
    env = make(append=True)
    collect(env, Uniform(2), 3, 0, seed=1)
    env.close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"exists and append=False"):
        make(append=False)
    with pytest.warns(UserWarning, match=r"exists: .* appended to the 3 of.*append=True") as seen:
        make().close()
    assert seen[0].filename == __file__
    assert path.read_bytes() == before
    make(append=True).close()
    path.write_bytes(b"")  # as tempfile makes it
    make().close()


def test_a_recorder_that_goes_on_after_close_continues_its_section(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    for _ in range(3):
        play(env, 1)
        env._session.close()
    kinds = [block.kind for block in blocks.read_blocks(path)]
    assert kinds == ["spaces", "policy", "changes", *["episodes"] * 3]
    path.write_bytes(path.read_bytes()[:-1])  # somebody else touches it
    with pytest.warns(UserWarning, match="ended inside its last block"):
        play(env, 1)
    env.close()
    assert len(Trajectories.load(path)) == 3
    assert [block.kind for block in blocks.read_blocks(path)].count("spaces") == 2


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        scripted(tmp_path / "no" / "episodes")


def test_a_file_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = scripted("episodes")
    play(env, 1)
    env.close()
    assert len(Trajectories.load("episodes")) == 1


def test_a_full_disk_is_an_error_and_the_next_write_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = scripted(tmp_path / "episodes")
    play(env, 1)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(block_writer, "_write_all", fail)
        with pytest.raises(OSError, match=r"No space left.*are in the buffer, but not in the file"):
            play(env, 1)
    play(env, 1)
    env.close()
    assert len(env.buffer) == 3
    assert len(Trajectories.load(tmp_path / "episodes")) == 3  # the second was written later


def test_a_policy_that_is_not_registered_is_recorded_with_a_warning(tmp_path: Path) -> None:
    env = wrappers.RecordTrajectories(ScriptedEnv(script("T")), path=tmp_path / "episodes")
    with pytest.warns(UserWarning, match="Constant is not registered"):
        env.follow(Constant())
    play(env, 1)
    env.close()
    assert_array_equal(Trajectories.load(tmp_path / "episodes").log_probs, [-0.5])


# Episodes that are written ahead of their block -----------------------------------------------


def recorded_ahead(path: Path, n: int = 6) -> tuple[wrappers.RecordTrajectories, bytes]:
    """Record episodes, and return what the file holds before they are put into a block."""
    env = scripted(path, "..T", "T", ".C")
    play(env, n)
    kinds = [block.kind for block in blocks.read_blocks(path)]
    assert kinds == ["spaces", "policy", "changes", *["ahead"] * n]
    return env, path.read_bytes()


def assert_same(found: Trajectories, expected: Trajectories) -> None:
    for name in ("observations", "actions", "rewards", "log_probs", "policy_ids", "start_clock"):
        assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    for name in ("offsets", "terminated", "truncated", "held_out"):
        assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_a_process_killed_while_it_makes_a_block_of_its_last_episodes(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env, before = recorded_ahead(path)
    expected = env.buffer.view()  # makes the block, and cuts off the tail
    after = path.read_bytes()
    (block,) = [x for x in blocks.read_blocks(path) if x.kind == "episodes"]
    written = after[block.offset :]
    env.close()
    for cut in (*range(0, len(written), 101), len(written)):
        end = block.offset + cut
        path.write_bytes(before[: block.offset] + written[:cut] + before[end:])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(Trajectories.load(path), expected)
            assert_same(fuzz.read_in_chunks(path, 2), expected)
    for cut in (0, 200, len(written)):  # and a recorder goes on with it
        end = block.offset + cut
        path.write_bytes(before[: block.offset] + written[:cut] + before[end:])
        env = scripted(path, "..T", "T", ".C")
        play(env, 2)
        env.close()
        found = Trajectories.load(path)
        assert_same(found.select(episodes=slice(6)), expected)
        assert len(found) == 8
        assert "ahead" not in [x.kind for x in blocks.read_blocks(path)]


@pytest.mark.parametrize("zeros", [False, True])
def test_a_tail_that_is_cut_or_ends_in_zeros(zeros: bool, tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env, before = recorded_ahead(path, 3)
    tail = [x for x in blocks.read_blocks(path) if x.kind == "ahead"]
    expected = env.buffer.view()
    env.close()
    for end in range(tail[0].offset, len(before), 97):
        path.write_bytes(before[:end] + bytes(len(before) - end) * zeros)
        whole = sum(x.end <= end for x in tail)
        assert_same(load_quietly(path), expected.select(episodes=slice(whole)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*ended inside its last block")
            env = scripted(path)
        play(env, 1)
        env.close()
        assert len(Trajectories.load(path)) == whole + 1


def test_a_power_cut_that_takes_the_beginning_of_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env, before = recorded_ahead(path)
    first = next(x for x in blocks.read_blocks(path) if x.kind == "ahead")
    env.close()
    path.write_bytes(before[: first.offset] + bytes(64) + before[first.offset + 64 :])
    with pytest.warns(UserWarning, match="ends inside its last block"):
        assert len(Trajectories.load(path)) == 0
    # the same in front of ordinary blocks is damage
    path.write_bytes(before[: first.offset] + bytes(64) + b"something else")
    with pytest.raises(blocks.DamagedFileError):
        Trajectories.load(path)


def test_what_the_recorder_would_refuse_is_left_out_of_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path, "..T")
    play(env, 1)
    env.reset()
    env.env.unwrapped.step = lambda action: (np.zeros(3), np.nan, True, False, {})  # type: ignore[method-assign]
    env.step(0)
    with pytest.warns(UserWarning, match=r"1 of them cannot be: .*rewards is nan"):
        assert len(Trajectories.load(path)) == 1
    with pytest.raises(ValueError, match=r"rewards is nan.*dropped"):
        env.close()
    assert len(Trajectories.load(path)) == 1


def test_a_tail_has_the_probabilities_of_policies_that_a_reader_cannot_ask(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = wrappers.RecordTrajectories(ScriptedEnv(script("T")), path=path)
    with pytest.warns(UserWarning, match="Constant is not registered"):
        env.follow(Constant())
    play(env, 2)
    assert_array_equal(Trajectories.load(path).log_probs, [-0.5] * 2)
    assert [block.kind for block in blocks.read_blocks(path)][-1] == "ahead"
    env.close()


def test_a_file_that_was_looked_at_may_lose_its_tail(tmp_path: Path) -> None:
    """Large files are read twice, and a recorder does not wait in between."""
    path = tmp_path / "episodes"
    env, _ = recorded_ahead(path)
    (section,) = reader.read_layout(path)
    assert section.lengths.tolist() == [3, 1, 2] * 2
    expected = env.buffer.view()  # the tail is gone
    play(env, 1)
    (found,) = read_chunks(section)
    assert_same(found, expected)
    env.close()


def test_a_reader_meets_a_recorder_that_makes_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes"
    env, _ = recorded_ahead(path)
    tail_of, first = blocks.tail_of, [True]

    def meanwhile(*args: Any) -> Any:
        found = tail_of(*args)
        if first.pop() if first else False:
            assert len(env.buffer) == 6
            play(env, 1)
        return found

    monkeypatch.setattr(blocks, "tail_of", meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(blocks.read_blocks(path))) == 5  # with the new block and the new tail
    env.close()


def test_a_block_that_is_too_large_for_the_gap(tmp_path: Path) -> None:
    with block_writer.BlockWriter(tmp_path / "run") as writer:
        writer.append("a", {}, {})
        assert writer.append_ahead('"arrays":{}', b"")
        writer.append("b", {}, {"x": np.arange(3 * blocks.GAP // 8)})
        assert not writer.append_ahead('"arrays":{}', bytes(blocks.GAP // 2))
    assert [x.kind for x in blocks.read_blocks(tmp_path / "run")] == ["a", "b"]


# A block that is larger than the gap in front of the tail --------------------------------------


@pytest.fixture
def small_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "GAP", 2**12)
    monkeypatch.setattr(block_writer, "_TAIL", 2**11)


SHORT, LONG = 5, "." * 400 + "T"


def before_a_long_episode(path: Path) -> wrappers.RecordTrajectories:
    """Record short episodes, which are ahead of their block, and a long one up to its last step."""
    env = scripted(path, *["T"] * SHORT, LONG)
    play(env, SHORT)
    env.reset()
    for _ in range(len(LONG) - 1):
        env.step(0)
    assert [block.kind for block in blocks.read_blocks(path)].count("ahead") == SHORT
    return env


def lengths_in(path: Path) -> list[int]:
    """Return the lengths of the episodes of a file, which both readers find without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found: list[int] = Trajectories.load(path).lengths.tolist()
        assert [n for x in reader.read_layout(path) for n in x.lengths] == found
    return found


class Moments:
    """Stands for the file of a writer: writes in pieces, and calls before and after each change."""

    def __init__(self, file: Any, call: Any) -> None:
        self.file, self.call = file, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.call()
        written = self.file.write(bytes(data[:301]))
        self.call()
        return int(written)

    def truncate(self, size: int) -> None:
        self.call()
        self.file.truncate(size)
        self.call()


def test_killed_at_each_moment_of_a_large_block(tmp_path: Path, small_gap: None) -> None:
    path, copy = tmp_path / "episodes", tmp_path / "copy"
    env = before_a_long_episode(path)
    seen = []

    def killed() -> None:
        copy.write_bytes(path.read_bytes())
        seen.append(len(lengths_in(copy)))
        assert lengths_in(copy) == ([1] * SHORT + [len(LONG)])[: seen[-1]]
        if len(seen) % 9 == 0:  # and a recorder goes on
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*ended inside its last block")
                again = scripted(copy)
                play(again, 1)
                again.close()
            assert len(lengths_in(copy)) == seen[-1] + 1

    writer: Any = env._session._file._writer  # type: ignore[union-attr]
    writer._file = Moments(writer._file, killed)
    env.step(0)
    assert len(seen) > 50
    assert set(seen) == {SHORT, SHORT + 1}
    assert seen == sorted(seen)
    env.close()
    assert lengths_in(path) == [1] * SHORT + [len(LONG)]
    assert "ahead" not in [block.kind for block in blocks.read_blocks(path)]


@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays full"])
def test_a_large_block_on_a_full_disk(tmp_path: Path, small_gap: None, stays: bool) -> None:
    """What was in the file stays in the file, also if nothing can be taken back."""
    moment = 0
    while True:
        path = tmp_path / f"{moment}"
        env = before_a_long_episode(path)
        calls = 0

        def fail(moment: int = moment) -> None:
            nonlocal calls
            calls += 1
            if calls - 1 == moment or (stays and calls > moment):
                raise OSError(errno.ENOSPC, "No space left on device")

        writer: Any = env._session._file._writer  # type: ignore[union-attr]
        good = writer._file
        writer._file = Moments(good, fail)
        with contextlib.suppress(OSError):
            env.step(0)
        found = lengths_in(path)
        assert found[:SHORT] == [1] * SHORT
        writer._file = good
        play(env, 2)  # there is room again
        env.close()
        assert lengths_in(path) == [1] * SHORT + [len(LONG), 1, 1]
        if calls <= moment:
            break
        moment += 1
    assert moment > 50


def test_after_a_failed_block_the_tail_counts(tmp_path: Path) -> None:
    """Also if the block was whole when its write failed: the file is as it was before."""
    path = tmp_path / "run"
    with block_writer.BlockWriter(path) as writer:
        assert writer.append_ahead('"arrays":{}', b"")

        errors: list[OSError] = []

        def fail() -> None:
            with open(path, "rb") as file:
                if errors and any(file.read(100)[8:]):
                    raise errors.pop()

        good: Any = writer._file
        for large in (False, True):
            errors.append(OSError(errno.EIO, "Input/output error"))
            writer._file = Moments(good, fail)  # type: ignore[assignment]
            with pytest.raises(OSError, match="Input/output error"):
                writer.append("a", {}, {"x": np.arange(3 * blocks.GAP // 8)} if large else {})
            writer._file = good
            assert [x.kind for x in blocks.read_blocks(path)] == ["ahead"]
        writer.append("b", {}, {})
    assert [x.kind for x in blocks.read_blocks(path)] == ["b"]


# The file, its lock and its name ----------------------------------------------------------------


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    env = scripted(tmp_path / "episodes")
    writer: Any = env._session._file._writer  # type: ignore[union-attr]
    kept = os.dup(writer._file.fileno())  # as a child has it, which was forked meanwhile
    try:
        env.close()
        scripted(tmp_path / "episodes").close()
    finally:
        os.close(kept)


@pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be deleted")
def test_a_file_that_is_deleted_meanwhile_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    play(env, 2)
    assert len(env.buffer) == 2
    path.unlink()
    play(env, 1)
    with pytest.warns(UserWarning, match=r"was deleted.*all that it held was written there again"):
        assert len(env.buffer) == 3  # makes a block
    assert len(Trajectories.load(path)) == 3
    with pytest.raises(RuntimeError, match="open in another writer"):
        block_writer.BlockWriter(path)
    play(env, 1)
    path.unlink()
    with pytest.warns(UserWarning, match="was deleted"):
        env.close()
    assert lengths_in(path) == [3] * 4


@pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be deleted")
def test_a_file_in_the_place_of_one_that_was_deleted_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    play(env, 1)
    path.unlink()
    path.write_text("three years")
    with pytest.warns(UserWarning, match=r"another file has taken its place.*buffer\.save"):
        assert len(env.buffer) == 1
    play(env, 1)
    env.close()  # once is enough
    assert path.read_text() == "three years"
    assert len(env.buffer) == 2


def test_a_deleted_file_for_which_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes"
    env = scripted(path)
    play(env, 1)
    path.unlink()

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("shutil.copyfileobj", fail)
        with pytest.raises(OSError, match="No space left"):
            len(env.buffer)
        assert not path.exists()
    with pytest.warns(UserWarning, match="was deleted"):
        env.close()
    assert len(Trajectories.load(path)) == 1


def test_an_error_of_fsync_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says only once that it could not bring something to the disk."""
    path = tmp_path / "episodes"
    env = scripted(path)
    play(env, 2)
    errors = [OSError(errno.EIO, "Input/output error")]
    fsync = os.fsync

    def once(number: int) -> None:
        if errors:
            raise errors.pop()
        fsync(number)

    monkeypatch.setattr(block_writer, "_SYNC", 0.0)
    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(OSError, match=r"the disk has not taken all that was written.*episodes'"):
        len(env.buffer)
    play(env, 1)
    env.close()
    assert lengths_in(path) == [3] * 3  # nothing is there twice


@pytest.mark.parametrize("name", ["", "x" * 300, "circle", "."])
def test_a_path_that_cannot_be_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    path = name and str(tmp_path / name)
    with pytest.raises((OSError, ValueError), match=r"path='.*(choose another|give the name)"):
        wrappers.RecordTrajectories(ScriptedEnv(script("T")), path=path)
