"""One battery for files of episodes: what they hold after anything that may happen to them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as S
from numpy.testing import assert_array_equal

import ope_gym
import wrappers
import wrappers.vector
from ope_gym.data import database, encoding, store, stored, tail
from ope_gym.data.database import SCHEMA
from ope_gym.data.schema import join
from ope_gym.data.store import Store
from ope_gym.data.stored import read_stored
from ope_gym.data.trajectories import Trajectories, read_chunks
from ope_gym.files import DamagedFileError, ForeignFileError
from ope_gym.policies import LinearSigmoid, UnavailablePolicy, Uniform, register_policy
from tests.file_builders import as_if_killed, assert_identical, constant_buffer, made, recording
from tests.scripted_envs import Constant, ScriptedEnv, script
from wrappers import collect

ROOT = Path(__file__).parents[1]
SIGMOID = LinearSigmoid(np.array([0.5, -0.5, 0.25]))
posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit, fork or signal")


def recorder(path: Path | None, *episodes: str) -> wrappers.RecordTrajectories:
    env = ScriptedEnv(script(*(episodes or ("..T",))))
    recording = wrappers.RecordTrajectories(env, path=path, append=True)
    recording.follow(Uniform(2))
    return recording


def play(env: wrappers.RecordTrajectories, episodes: int, *, hand_over: bool = True) -> None:
    for _ in range(episodes):
        env.reset()
        over = False
        while not over:
            *_, terminated, truncated, _ = env.step(env.clock % 2)
            over = terminated or truncated
    if hand_over:
        env._session.hand_over()


def in_chunks(path: Path, steps: int = 3) -> Trajectories:
    """Load a file as files larger than memory are read."""
    section = read_stored(path)
    parts = list(read_chunks(section, steps))
    return dataclasses.replace(join(parts), policies=section.policies, schedules=section.schedules)


def sql(path: Path, *statements: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        return [db.execute(statement).fetchall() for statement in statements][-1]


def keep(file: Store, data: Trajectories, *, silent: bool = True, policy: int = 0) -> bool:
    """Write episodes to the tail, by default without the propensities, which the policy knows."""
    if silent:
        data = dataclasses.replace(data, log_probs=np.full(data.n_steps, np.nan))
    ends = (data.terminated, data.truncated, data.held_out)
    facts = np.array([data.start_clock, data.lengths, *ends], dtype=np.int64)
    return file.keep(*encoding.encode(data), facts, policy, 0)


@contextlib.contextmanager
def looping(path: Path, data: Trajectories) -> Iterator[Store]:
    """Open a file for the episodes of one policy, and append the first of them."""
    file = Store(path)
    file.change(0, 0, file.add_policy(data.policies[0]), mid_episode=False)
    file.append(data.select(episodes=[0]))
    yield file
    file.close()


@pytest.fixture
def played() -> Trajectories:
    """Six episodes of one policy in one loop."""
    rng = np.random.default_rng(3)
    seen, chosen = rng.standard_normal((12, 3)), rng.integers(2, size=12)
    return Trajectories.from_arrays(
        seen,
        chosen,
        rng.random(12),
        SIGMOID.log_prob(seen, chosen),
        policies=[SIGMOID],
        offsets=np.arange(7) * 2,
        terminated=True,
        start_clock=np.arange(6) * 2,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "run.ope"
    recording().save(path)
    return path


# The format ----------------------------------------------------------------------------------


DTYPES = [np.dtype(x) for x in ("b1", "i1", "i4", "u2", "u8", "f2", "f4", "f8")]
NESTED = S.Dict(
    {f"{x}": S.Box(0, 1, (2,), x) for x in DTYPES if x != np.bool_} | {"flags": S.MultiBinary(3)}
)


@pytest.mark.parametrize(
    ("space", "element"),
    [
        (S.Discrete(9), lambda i: i),
        (
            NESTED,
            lambda i: {k: np.full_like(x.sample(), i % 2) for k, x in NESTED.items()},
        ),
        (S.Tuple([S.Discrete(9), S.Text(3)]), lambda i: (i, "a0Z"[: 1 + i % 2])),
        (S.Sequence(S.Discrete(9)), lambda i: (i,) * (i % 3)),
        (S.OneOf([S.Discrete(9), S.Text(3)]), lambda i: (np.int64(0), np.int64(i))),
    ],
    ids=["discrete", "dict", "text", "sequence", "oneof"],
)
def test_episodes_come_back_to_the_last_bit(
    space: Any, element: Callable[[int], Any], tmp_path: Path
) -> None:
    data = constant_buffer(space, element)
    data.save(tmp_path / "run")
    assert_identical(Trajectories.load(tmp_path / "run"), data)
    assert_identical(in_chunks(tmp_path / "run", 1), data)


def test_schedules_and_ends_come_back(saved: Path) -> None:
    for found in (Trajectories.load(saved), in_chunks(saved)):
        assert_identical(found, recording())
        assert found.policies == recording().policies


def test_sqlite_shells_read_the_roster(saved: Path) -> None:
    data = recording()
    rows = sql(saved, "SELECT policy, avg(return), sum(held_out) FROM episodes GROUP BY policy")
    for policy, mean, held_out in rows:
        chosen = data.first_policies == policy
        assert mean == pytest.approx(data.returns()[chosen].mean())
        assert held_out == data.held_out[chosen].sum()
    assert sql(saved, "PRAGMA integrity_check") == [("ok",)]
    (npy,) = sql(saved, "SELECT npy FROM policy_arrays WHERE policy = 0 AND name = 'theta'")[0]
    assert_array_equal(encoding.from_npy(npy), data.policies[0].theta)  # type: ignore[attr-defined]


def test_the_page_shows_the_schema() -> None:
    page = (ROOT / "docs" / "file_format.md").read_text(encoding="utf-8")
    assert SCHEMA.strip() in page


def test_a_policy_that_is_not_registered_is_recorded_with_a_warning(tmp_path: Path) -> None:
    env = wrappers.RecordTrajectories(ScriptedEnv(script("T")), path=tmp_path / "run")
    with pytest.warns(UserWarning, match="Constant is not registered"):
        env.follow(Constant())
    play(env, 1)
    env.close()
    (policy,) = Trajectories.load(tmp_path / "run").policies
    assert isinstance(policy, UnavailablePolicy)


def test_only_numbers_are_written(tmp_path: Path) -> None:
    data = dataclasses.replace(
        recording(), observations=np.array(["a"] * 10), observation_space=None
    )
    with pytest.raises(TypeError, match="observations has dtype <U1"):
        data.save(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_long_episodes_and_large_steps_take_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recording()
    monkeypatch.setattr(store, "_CHUNK_BYTES", 120)  # two steps
    data.save(tmp_path / "run")
    assert sql(tmp_path / "run", "SELECT count(*), max(steps) FROM chunks") == [(5, 2)]
    for steps in (1, 2, 4, 100):
        assert_identical(in_chunks(tmp_path / "run", steps), data)
    section = read_stored(tmp_path / "run")
    for first in range(len(data)):
        (part,) = read_chunks(section.part(first, first + 1), None)
        assert_array_equal(part.rewards, data.select(episodes=[first]).rewards)


def test_small_chunks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MERGE_ROWS", 4)
    path, twin = tmp_path / "run", recorder(None, "..T", "T", ".C")
    env = recorder(path, "..T", "T", ".C")
    for n in range(1, 12):
        play(env, 1)
        assert len(env.buffer) == n  # whoever looks at the buffer lets the recorder hand over
        play(twin, 1)
        assert_identical(Trajectories.load(path), twin.buffer.view())
        chunks = n if n < 4 else 1 + n % 4
        assert sql(path, "SELECT count(*) FROM chunks") == [(chunks,)]
    env.close()
    assert sql(path, "SELECT count(*) FROM chunks") == [(1,)]
    assert_identical(in_chunks(path, 2), twin.buffer.view())


# Recorders and readers -----------------------------------------------------------------------


def test_each_episode_is_safe_when_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = recorder(path)
    for n in range(1, 4):
        play(env, 1, hand_over=False)
        assert len(Trajectories.load(path)) == 0  # it is in the tail
        assert len(Trajectories.load(as_if_killed(path))) == n
    env.reset()
    env.step(0)
    env.follow(SIGMOID)
    assert len(Trajectories.load(path)) == 3
    env.step(0)
    env.step(0)
    copy = as_if_killed(path)
    for _ in range(2):  # the first takes the tail into the file
        data = Trajectories.load(copy)
        assert_array_equal(data.policy_ids[-3:], [0, 1, 1])
        assert_array_equal(data.schedules[0].clocks, [0, 10])
        assert_identical(data, env.buffer.view())
        assert os.listdir(copy.parent) == ["run"]
    env.close()
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_file()) == ["run"]


def test_readers_see_an_episode_soon_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = recorder(tmp_path / "run")
    play(env, 3, hand_over=False)
    monkeypatch.setattr(store, "_SYNC_SECONDS", 0)
    play(env, 1, hand_over=False)
    assert len(Trajectories.load(tmp_path / "run")) == 4
    env.close()


def test_readers_keep_the_episodes_that_they_have_listed(tmp_path: Path) -> None:
    """A recorder appends, and joins chunks, between two chunks of a pass."""
    path = tmp_path / "run"
    env = recorder(path)
    play(env, 5)
    section = read_stored(path)
    chunks = read_chunks(section, 3)
    first = next(chunks)
    play(env, 2000)
    env.close()
    assert [len(x) for x in (first, *chunks)] == [1] * 5
    assert len(read_stored(path)) == 2005


def test_a_second_run_appends_with_its_own_policies_and_clock(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(2):
        env = recorder(path)
        play(env, 2)
        env.follow(SIGMOID)
        play(env, 1)
        env.close()
    data = Trajectories.load(path)
    assert data.policies == (Uniform(2), SIGMOID)
    assert data.first_policies.tolist() == [0, 0, 1, 0, 0, 1]
    assert sql(path, "SELECT policy FROM episodes") == [(0,), (0,), (1,), (2,), (2,), (3,)]
    assert data.start_clock.tolist() == [0, 3, 6] * 2
    env._session.close()
    play(env, 1)  # goes on with the numbers that it had
    env.close()
    assert sql(path, "SELECT policy FROM episodes")[-2:] == [(3,), (3,)]


def test_two_recorders_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "run"
    one, other = recorder(path), recorder(path)
    for env in (one, other, other, one):
        play(env, 1)
    one.close()
    play(other, 1)
    other.close()
    data = Trajectories.load(path)
    assert_array_equal(data.lengths, [3] * 5)
    assert sql(path, "SELECT policy FROM episodes") == [(0,), (1,), (1,), (0,), (1,)]


def test_a_writer_that_waits_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ope_gym.data.database.PATIENCE", 0.05)
    path = tmp_path / "run"
    env = recorder(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(UserWarning, match=r"another program has been writing.*1 episodes are in"):
        play(env, 1)
    other.execute("ROLLBACK")
    other.close()
    play(env, 1)
    assert len(Trajectories.load(path)) == 2
    env.close()


@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_file_that_exists_is_not_continued_in_silence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def make(**options: Any) -> Any:
        if kind == "single":
            return wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=path, **options)
        return wrappers.vector.RecordTrajectories(
            gym.make_vec("CartPole-v1", 2), path=path, **options
        )

    env = make(append=False)
    env.follow(Uniform(2))
    env.close()
    make().close()  # there is nothing in it yet
    env = make(append=True)
    collect(env, Uniform(2), 3, 0, seed=1)
    env.close()
    with pytest.raises(FileExistsError, match=r"exists and append=False"):
        make(append=False)
    with pytest.warns(UserWarning, match=r"exists: .* appended to the 3 of.*append=True") as seen:
        make().close()
    assert seen[0].filename == __file__
    path.write_bytes(b"")  # as tempfile makes it
    env = make()
    env.follow(Uniform(2))
    env.close()
    assert len(read_stored(path).policies) == 1


def test_files_that_cannot_be_continued(tmp_path: Path) -> None:
    recorder(tmp_path / "run").close()
    env = wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=tmp_path / "run", append=True)
    with pytest.raises(ValueError, match="holds episodes of another environment"):
        env.follow(Uniform(2))
    (tmp_path / "thesis.tex").write_text("three years" * 99)
    with pytest.raises(ForeignFileError, match="is not an ope_gym file"):
        recorder(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "three years" * 99
    sql(tmp_path / "other.db", "CREATE TABLE mine (x)")
    before = (tmp_path / "other.db").read_bytes()
    with pytest.raises(ForeignFileError, match="but not an ope_gym file"):
        recorder(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        recorder(tmp_path / "no" / "run")


@pytest.mark.parametrize("name", ["", "x" * 300, "circle", "."])
def test_a_path_that_cannot_be_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    path = name and str(tmp_path / name)
    with pytest.raises((OSError, ValueError), match=r"path(=| is )'.*(choose another|give the)"):
        wrappers.RecordTrajectories(ScriptedEnv(script("T")), path=path)


@posix
def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait until somebody writes to it, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    doors: list[Callable[[Path], Any]] = [Trajectories.load, recorder, recording().save]
    doors.append(lambda path: ope_gym.evaluate(path, Uniform(2)))
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        for door in doors:
            with pytest.raises(ValueError, match="a pipe, a device or a socket"):
                door(path)


# What happens to the process -----------------------------------------------------------------


def endless(kind: str, path: str) -> None:
    """Record for ever, and print after every step how many episodes have ended."""
    env: Any
    if kind == "single":
        env = wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=path, append=True)
    else:
        env = wrappers.vector.RecordTrajectories(
            gym.make_vec("CartPole-v1", 8), path=path, append=True
        )
    rng, ended = np.random.default_rng(0), 0
    env.reset(seed=1)
    for i in range(10**9):
        if i % 50 == 0:  # in the middle of episodes, too
            env.follow(LinearSigmoid(np.full(4, 0.01 * (i % 1000))))
        actions = rng.integers(2, size=8)
        *_, terminated, truncated, _ = env.step(int(actions[0]) if kind == "single" else actions)
        over = int(np.sum(np.logical_or(terminated, truncated)))
        ended += over
        if kind == "single" and over:
            env.reset()
        print(ended, flush=True)


@posix
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_killed_at_any_moment(kind: str, tmp_path: Path) -> None:
    path, before = tmp_path / "run", 0
    for seconds in (0.05, 0.2):  # the second continues the file of the first
        code = "import sys; from tests.test_store import endless; endless(*sys.argv[1:])"
        command = [sys.executable, "-c", code, kind, str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(seconds)
            process.kill()
            lines = [first, *process.stdout.read().splitlines(keepends=True)]
        announced = int([line for line in lines if line.endswith(b"\n")][-1])
        data = Trajectories.load(path)
        # at most the episodes of the last step, which was not printed any more, come on top
        assert announced <= len(data) - before <= announced + 8
        before = len(data)
    data.audit(1e-12)
    assert os.listdir(tmp_path) == ["run"]  # its tail and its log are in the file


@posix
def test_a_fork_does_nothing_to_the_file_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = recorder(path)
    play(env, 2)

    def child(answers: Any) -> None:
        try:
            play(env, 1)
        except RuntimeError as error:
            answers.put(str(error))
        env.close()
        sys.exit(0)

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads and forks
        process = context.Process(target=child, args=(answers,))
        process.start()
    assert "is a fork: make a recorder of its own" in answers.get(timeout=60)
    process.join()
    play(env, 2)
    assert len(Trajectories.load(path)) == 4
    env.close()
    assert_identical(Trajectories.load(path), env.buffer.view())


# What happens to the file --------------------------------------------------------------------


def _delete(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    path.with_name("text").write_text("three years")
    os.replace(path.with_name("text"), path)


def _cut(path: Path) -> None:
    os.truncate(path, 0)


@posix
@pytest.mark.parametrize("change", [_delete, _replace, _cut])
@pytest.mark.parametrize("closes", [False, True])
def test_a_file_that_is_lost_meanwhile_is_written_anew(
    change: Callable[[Path], None], closes: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.ope"
    env = recorder(path)
    play(env, 2)
    env.follow(SIGMOID)
    change(path)
    with pytest.warns(UserWarning, match=r"run\.ope is lost, .*episodes that are in memory"):
        play(env, 1)
    new = path if change is _delete else tmp_path / "run-2.ope"
    if not closes:
        assert_identical(Trajectories.load(new), env.buffer.view())
    play(env, 1)
    env.close()
    assert_identical(Trajectories.load(new), env.buffer.view())
    assert change is not _replace or path.read_text() == "three years"


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """Let no file become larger than this."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@posix
@pytest.mark.parametrize("size", [0, 4096, 30_000, 60_000])
def test_a_disk_that_is_full_for_a_while_costs_no_episode(size: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with warnings.catch_warnings(record=True) as told, room(size):
        warnings.simplefilter("always")
        env = recorder(path)
        play(env, 9)
    assert len(told) == 1
    assert "in the buffer, but not in the file" in str(told[0].message)
    play(env, 1)
    assert_identical(Trajectories.load(path), env.buffer.view())
    env.close()
    assert_identical(Trajectories.load(path), env.buffer.view())


@posix
def test_episodes_that_never_found_room_are_an_error_at_the_end(tmp_path: Path) -> None:
    env, data = recorder(tmp_path / "run"), made(0)
    with room(8192):
        with pytest.warns(UserWarning, match="not in the file"):
            play(env, 9)
        with pytest.raises(OSError, match=r"episodes are in the buffer, but not in the file"):
            env.close()
        with pytest.raises(OSError, match="cannot save"):
            data.save(tmp_path / "other")
    env.close()
    assert len(Trajectories.load(tmp_path / "run")) == 9
    assert os.listdir(tmp_path) == ["run"]


def test_a_file_system_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = database.connect

    class NoLog(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> Any:
            if statement == "PRAGMA journal_mode=WAL":
                return super().execute("PRAGMA journal_mode")
            return super().execute(statement, *values)

    def without_log(path: str, query: str) -> sqlite3.Connection:
        connect(path, query).close()
        return sqlite3.connect(path, factory=NoLog, isolation_level=None)

    monkeypatch.setattr(store, "connect", without_log)
    with pytest.warns(UserWarning, match="no shared memory for a write-ahead log"):
        env = recorder(tmp_path / "run")
    play(env, 2)
    assert len(Trajectories.load(tmp_path / "run")) == 2
    env.close()
    assert_identical(Trajectories.load(tmp_path / "run"), env.buffer.view())


@posix
def test_folders_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "run"
        recording().save(path)
        before = path.read_bytes()
        path.chmod(0o444)
        folder.chmod(0o555)
        superuser = os.geteuid() == 0  # for whom rights are no obstacle
        if superuser:
            os.seteuid(65534)
        try:
            for place in (path, folder / "new"):
                with pytest.raises(PermissionError, match=f"cannot save.*{place.name}'"):
                    recording().save(place)
                with pytest.raises(PermissionError, match=f"{place.name}'"):
                    recorder(place)
            assert_identical(Trajectories.load(path), recording())
        finally:
            if superuser:
                os.seteuid(0)
            folder.chmod(0o755)
        assert path.read_bytes() == before
        assert os.listdir(folder) == ["run"]


def test_saving_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = recorder(path)
    play(env, 1)
    for save in (recording().save, recording().to_parquet):
        with pytest.raises(RuntimeError, match="a recorder is writing to it"):
            save(path)
    assert len(Trajectories.load(path)) == 1
    env.close()
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    recording().save(tmp_path / "link")
    assert_identical(Trajectories.load(path), recording())
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link", "run"]
    (tmp_path / "run-wal").write_bytes(b"of a killed recorder")
    path.unlink()
    recording().save(path)
    assert sorted(os.listdir(tmp_path)) == ["link", "run"]


# Hostile and damaged files -------------------------------------------------------------------


@contextlib.contextmanager
def memory(most: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refused(path: Path, words: str) -> None:
    """Both ways to read a file refuse it, and take little memory."""
    for door in (Trajectories.load, in_chunks):
        with memory(64 * 2**20), pytest.raises(DamagedFileError, match=words):
            door(path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN DELETE FROM chunks; END",
        "CREATE INDEX i ON episodes (abs(return))",
        "CREATE TABLE more (x)",
        "DROP TABLE changes",
        "ALTER TABLE episodes ADD COLUMN x DEFAULT 1",
    ],
)
def test_other_tables_views_and_triggers_are_refused(statement: str, saved: Path) -> None:
    sql(saved, statement)
    refused(saved, "has other tables than those of an ope_gym file")
    with pytest.raises(ForeignFileError):
        Store(saved)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE episodes SET held_out = 0 WHERE id = 3", "rows 0 to 3 of episodes do not match"),
        ("UPDATE episodes SET policy = 7", "rows 0 to 3 of episodes"),
        ("UPDATE episodes SET length = 'x'", "invalid literal"),
        ("DELETE FROM episodes WHERE id = 3", "rows 0 to 3 of episodes"),
        (
            "INSERT INTO episodes SELECT 4, policy, length, return, 1, 0, 0, 9, 0, 10 "
            "FROM episodes LIMIT 1",
            "5 episodes, but",
        ),
        ("DELETE FROM chunks", "4 episodes, but chunks have 0 steps"),
        ("UPDATE chunks SET data = zeroblob(length(data))", "row 0 of chunks does not match"),
        ("UPDATE chunks SET data = substr(data, 2)", "row 0 of chunks does not match"),
        ("UPDATE chunks SET steps = 1099511627776", "row 0 of chunks has 1099511627776 steps"),
        ("UPDATE chunks SET layout = replace(layout, '<f8', '<i8')", "row 0 of chunks does not"),
        ("UPDATE chunks SET first_step = 1", "row 1 of chunks follows step -1"),
        ("UPDATE policies SET kind = 'uniform' WHERE id = 0", "(policies|arrays)"),
        ("DELETE FROM policies WHERE id = 2", "do not match their checksum"),
        ("DELETE FROM policy_arrays WHERE policy = 1", "(policies|arrays)"),
        ("DELETE FROM changes WHERE id = 2", "changes do not match"),
        ("UPDATE changes SET clock = 13 WHERE id = 1", "changes do not match"),
        ("DELETE FROM environment", "environment has 0 rows"),
        ("UPDATE environment SET horizon = 8", "environment does not match"),
        ("UPDATE environment SET horizon = 'long'", "environment does not match"),
    ],
)
def test_rows_that_somebody_changed_are_named(statement: str, words: str, saved: Path) -> None:
    sql(saved, statement)
    refused(saved, words)


def test_bytes_that_changed_never_give_other_numbers(saved: Path) -> None:
    whole = saved.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        saved.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = Trajectories.load(saved)
            except (DamagedFileError, OSError):
                continue
        assert_identical(found, recording())
        assert found.policies == recording().policies


def forge(path: Path, layout: str, data: bytes, steps: int = 1, space: Any = None) -> Path:
    """Write an episode with right checksums and any contents."""
    space = S.Discrete(9) if space is None else space
    with Store(path, space, S.Discrete(9)) as file:
        file.add_policy(Uniform(2))
        one = constant_buffer(S.Discrete(9), lambda i: i)
        file.append(one.select(episodes=[0]))
        db = file._db
        assert db is not None
        table = np.array([[0, steps, 1, -1, -1]])
        db.execute("DELETE FROM chunks")
        db.execute("UPDATE episodes SET length = ?", (steps,))
        row = database.ChunkRow(0, steps, 0, 1, layout, 0, 0, data)
        store._insert(db, row, table)
        file._small = 0
    return path


ROW = '"rewards":{"dtype":"<f8","shape":[]},"log_probs":{"dtype":"<f8","shape":[]}'
ACTION = '"actions":{"dtype":"<i8","shape":[]}'


@pytest.mark.parametrize(
    ("observations", "data", "words"),
    [
        ('{"dtype":"<f8","shape":[1099511627776]}', bytes(64), "more than its 64 bytes"),
        ('{"dtype":"O","shape":[]}', bytes(32), "an array of dtype 'O'"),
        ('{"dtype":"<i8","shape":[-1]}', bytes(32), "shape"),
        ('{"dtype":"<i8","shape":[]}', bytes(33), "the columns have 32 bytes of 33"),
        ('{"pickle":true}', bytes(32), "unknown layout 'pickle'"),
        ('{"json":true}', bytes(32), "the text of a column"),
        ("[" * 100_000, bytes(32), "."),
        ('{"dict":[' + '["a",{"dtype":"<i8","shape":[0]}],' * 9_000 + "0]}", bytes(32), "charact"),
    ],
)
def test_what_a_chunk_claims_is_checked_before_memory_is_taken(
    observations: str, data: bytes, words: str, tmp_path: Path
) -> None:
    layout = f'{{"observations":{observations},{ACTION},{ROW}}}'
    refused(forge(tmp_path / "run", layout, data), words)


@pytest.mark.parametrize(
    ("space", "part"),
    [
        (S.Sequence(S.Sequence(S.Discrete(2))), b"[]"),
        (S.Sequence(S.Box(-1, 1, (1,))), b"[0]"),
        (S.Text(10), b"{}"),
        (S.Sequence(S.Text(3)), b'""'),
    ],
    ids=str,
)
def test_an_element_of_many_small_parts_is_refused(space: Any, part: bytes, tmp_path: Path) -> None:
    text = b"[[" + b",".join([part] * 1_000_000) + b"]]"
    layout = f'{{"observations":{{"json":true}},{ACTION},{ROW}}}'
    data = len(text).to_bytes(8, "little") + text + bytes(24)
    refused(forge(tmp_path / "run", layout, data, space=space), "too many parts")


NETWORK = {
    "activation": np.array(0),
    "weights_0": np.zeros((2, 5), np.float32),
    "bias_0": np.zeros(2, np.float32),
}


@pytest.mark.parametrize("exponent", [17, 40, 62])
@pytest.mark.parametrize(
    ("kind", "arrays", "size"),
    [
        ("uniform", {}, "n_actions"),
        (
            "epsilon-greedy-table",
            {"greedy": np.zeros(5, np.int64), "epsilon": np.array(0.1)},
            "n_actions",
        ),
        ("softmax-mlp", NETWORK, "n_states"),
    ],
)
def test_a_policy_does_not_ask_for_more_than_it_brings(
    kind: str,
    arrays: dict[str, Any],
    size: str,
    exponent: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {**arrays, size: np.array(2**exponent)}
    monkeypatch.setattr(store, "describe_policy", lambda policy, place: (kind, whole))
    with Store(tmp_path / "run", whole=True) as file:
        file.add_policy(Uniform(2))
    refused(tmp_path / "run", size)


def npy(dtype: str, shape: str, data: bytes) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        npy("<f8", "(1099511627776,)", bytes(8)),
        npy("|O", "(1,)", bytes(8)),
        npy("<f8", "(2,)", bytes(8)),
        npy("<f8", "(" * 5000, b""),
        b"\x93NUMPY\x03\0",
        b"",
    ],
)
def test_arrays_of_policies_are_numbers_that_are_there(data: bytes) -> None:
    with memory(2**22), pytest.raises(ValueError, match=r"array"):
        encoding.from_npy(data)


def test_a_time_limit_that_stands_for_none_takes_no_memory() -> None:
    data = recording()
    one, other = (
        ope_gym.evaluate(dataclasses.replace(data, horizon=horizon), 1, held_out=False)
        for horizon in (None, 2**40)
    )
    assert str(one) == str(other)


def test_what_precedes_damage_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CHUNK_BYTES", 120)  # two steps
    path = tmp_path / "run"
    recording().save(path)
    sql(path, "UPDATE chunks SET data = zeroblob(length(data)) WHERE first_step = 4")
    refused(path, "row 4 of chunks does not match its checksum")
    with pytest.warns(UserWarning, match=r"recovered what precedes the damage of .*run.*row 4"):
        found = Trajectories.load(path, recover=True)
    assert_identical(found, recording().select(episodes=slice(2)))
    sql(path, "DELETE FROM episodes WHERE id > 2")
    with pytest.warns(UserWarning, match="recovered"):
        assert len(Trajectories.load(path, recover=True)) == 2


@pytest.mark.parametrize("size", [0, 15, 16, 100, 5000])
def test_cut_files_are_damage(size: int, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    refused(saved, "is not an ope_gym file|is empty|damaged")
    with pytest.raises(FileNotFoundError):
        Trajectories.load(saved.with_name("missing"))


def test_a_killed_save_leaves_the_old_file(saved: Path) -> None:
    code = (
        "import os, sys, signal; from tests.file_builders import made\n"
        "replace = os.replace\n"
        "def die(*names): os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.replace = die\n"
        "made(0).save(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGTERM
    assert_identical(Trajectories.load(saved), recording())


def test_a_large_file_is_never_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Store(path, whole=True) as file:
        for policy in made(0).policies:
            file.add_policy(policy)
        for _ in range(100):
            file.append(made(0))
    section = read_stored(path)
    with memory(path.stat().st_size / 3):
        assert sum(len(x) for x in read_chunks(section, 10_000)) == 4000


def test_changes_stay_arrays(tmp_path: Path) -> None:
    with Store(tmp_path / "run", whole=True) as file:
        for k in range(2):
            file.add_policy(LinearSigmoid(np.full(4, float(k))))
        for clock in range(200_000):
            file.change(0, clock, clock % 2, mid_episode=True)
    with memory(6 * (tmp_path / "run").stat().st_size + stored._AT_ONCE * 200):
        section = read_stored(tmp_path / "run")
    assert_array_equal(section.schedules[0].clocks, np.arange(200_000))


# Tails ---------------------------------------------------------------------------------------


def test_a_tail_is_taken_in_with_the_propensities_of_its_policy(
    tmp_path: Path, played: Trajectories
) -> None:
    path = tmp_path / "run"
    with looping(path, played) as file:
        assert keep(file, played.select(episodes=[1, 2]))
        assert keep(file, played.select(episodes=[3]), silent=False)
        assert len(Trajectories.load(path)) == 1
        copy = as_if_killed(path)
        file.append(played.select(episodes=[1, 2, 3, 4]), kept=0)
        assert_identical(Trajectories.load(as_if_killed(path)), played.select(episodes=range(5)))
        assert keep(file, played.select(episodes=[5]))
        assert_identical(Trajectories.load(as_if_killed(path)), played)
        file.append(played.select(episodes=[5]), kept=0)
    assert_identical(Trajectories.load(path), played)
    assert_identical(Trajectories.load(copy), played.select(episodes=range(4)))
    with looping(copy, played):  # the next recorder finds nothing in the tail
        pass
    assert len(Trajectories.load(copy)) == 5


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("actions", 5, "cannot tell the propensities.*is 5"), ("log_probs", 0.7, "log_probs is 0.7")],
)
def test_an_invalid_episode_of_a_tail_costs_no_other(
    column: str, value: float, reason: str, tmp_path: Path, played: Trajectories
) -> None:
    path = tmp_path / "run"
    with looping(path, played) as file:
        episodes = played.select(episodes=[1, 2, 3])
        log_probs = np.full(6, np.nan)
        changed = {"actions": episodes.actions.copy(), "log_probs": log_probs}
        changed[column][3] = value  # of the second
        broken = dataclasses.replace(episodes, **changed)
        assert keep(file, broken, silent=False)
        copy = as_if_killed(path)
    with pytest.warns(UserWarning, match=f"left out an episode of .*run, .*{reason}"):
        found = Trajectories.load(copy)
    assert_identical(found, played.select(episodes=[0, 1, 3]))


def test_a_torn_or_foreign_tail_is_noticed(tmp_path: Path, played: Trajectories) -> None:
    path = tmp_path / "run"
    with looping(path, played) as file:
        for i in (1, 2, 3):
            assert keep(file, played.select(episodes=[i]))
        copy, other = as_if_killed(path), as_if_killed(path)
    torn = copy.with_name("run-tail1")
    content = torn.read_bytes()
    torn.write_bytes(content[: 2 * len(content) // 3 + 40] + bytes(100))
    assert_identical(Trajectories.load(copy), played.select(episodes=range(3)))
    recording().save(other)
    other.with_name("run-tail1").write_bytes(content)
    with pytest.warns(UserWarning, match="it belongs to another file"):
        assert_identical(Trajectories.load(other), recording())


@pytest.mark.parametrize("lost", ["episodes", "policy", "change"])
def test_episodes_that_a_damaged_log_lacks_are_counted(
    lost: str, tmp_path: Path, played: Trajectories
) -> None:
    """SQLite reads a log up to the damage and says nothing; the tail knows what followed."""
    path = tmp_path / "run"
    with looping(path, played) as file:
        at = path.with_name("run-wal").stat().st_size + 100
        if lost == "episodes":
            file.append(played.select(episodes=[1, 2]), kept=0)
            file.append(played.select(episodes=[3]), kept=0)
        else:
            policy = file.add_policy(Uniform(2)) if lost == "policy" else 0
            file.change(0, 2, policy, mid_episode=True)
            file.flush()
        assert keep(file, played.select(episodes=[4, 5]))
        copy = as_if_killed(path)
    log = copy.with_name("run-wal")
    content = bytearray(log.read_bytes())
    content[at] ^= 1
    log.write_bytes(content)
    words, left = {
        "episodes": (
            "and 3 episodes are missing before the latest 2, which were taken in",
            [0, 4, 5],
        ),
        "policy": ("cannot be taken into .*run: .*and with them which policies acted", [0]),
        "change": ("cannot be taken into .*run: .*and with them which policies acted", [0]),
    }[lost]
    with pytest.warns(UserWarning, match=words) as told:
        assert_identical(Trajectories.load(copy), played.select(episodes=left))
    assert len(told) == 1
    assert sorted(os.listdir(copy.parent)) == ["run", *["run-tail1"] * (lost != "episodes")]


def test_a_forged_tail_is_no_crash(tmp_path: Path, played: Trajectories) -> None:
    with looping(tmp_path / "run", played) as file:
        assert keep(file, played.select(episodes=[1, 2]))
        copy = as_if_killed(tmp_path / "run")
    content, rng = copy.with_name("run-tail1").read_bytes(), np.random.default_rng(0)
    whole = copy.read_bytes(), copy.with_name("run-wal").read_bytes()
    for _ in range(200):
        forged = bytearray(content)
        for at in rng.integers(tail._HEAD.size - 4, len(content), size=3).tolist():
            forged[at] = rng.integers(256)
        *numbers, _ = tail._HEAD.unpack_from(forged)
        crc = tail._checksum(numbers, bytes(forged[tail._HEAD.size :]))
        forged[: tail._HEAD.size] = tail._HEAD.pack(*numbers, crc)
        copy.write_bytes(whole[0])
        copy.with_name("run-wal").write_bytes(whole[1])
        copy.with_name("run-tail1").write_bytes(forged)
        with warnings.catch_warnings(), memory(64 * 2**20):
            warnings.simplefilter("ignore")
            assert 1 <= len(Trajectories.load(copy)) <= 3
        copy.with_name("run-tail1").unlink(missing_ok=True)


@register_policy
class Foreign(Uniform):
    kind = "test-store-foreign"


def test_the_file_knows_whether_all_readers_can_ask_its_policies(
    tmp_path: Path, played: Trajectories
) -> None:
    for policy, answers in (SIGMOID, True), (Foreign(2), False):
        with looping(tmp_path / str(answers), dataclasses.replace(played, policies=(policy,))) as x:
            assert x.answers is answers


def test_kept_episodes_stay_until_the_checked_ones_are_written(
    tmp_path: Path, played: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def fail(*_: object) -> None:
        raise OSError(28, "full")

    with looping(path, played) as file:
        assert keep(file, played.select(episodes=[1]))
        with monkeypatch.context() as patch:
            patch.setattr(store, "_write_chunks", fail)
            with pytest.raises(OSError, match="full"):
                file.append(played.select(episodes=[1, 2]), kept=0)
        assert len(Trajectories.load(as_if_killed(path))) == 2
        assert not keep(file, played.select(episodes=[3]))
        file.flush()
        assert_identical(Trajectories.load(path), played.select(episodes=range(3)))


def test_episodes_that_no_file_can_hold_stop_no_others(
    tmp_path: Path, played: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    with looping(tmp_path / "run", played) as file:
        bad = np.full(2, None, dtype=object)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_write_chunks", mock.Mock(side_effect=OSError("full")))
            with pytest.raises(OSError, match="full"):
                file.append(played.select(episodes=[1]))
        with pytest.raises(TypeError, match="holds Python objects"):
            file.append(dataclasses.replace(played.select(episodes=[2]), observations=bad))
        file.append(played.select(episodes=[3]))
    expected = played.select(episodes=[0, 1, 3])
    assert_array_equal(Trajectories.load(tmp_path / "run").rewards, expected.rewards)


def test_what_nobody_handed_over_stays_in_the_tail(tmp_path: Path, played: Trajectories) -> None:
    with looping(tmp_path / "run", played) as file:
        assert keep(file, played.select(episodes=[1, 2]))
    assert sorted(os.listdir(tmp_path)) == ["run", "run-tail1"]
    assert_identical(Trajectories.load(tmp_path / "run"), played.select(episodes=range(3)))
    assert os.listdir(tmp_path) == ["run"]


def test_further_recorders_have_tails_of_their_own(tmp_path: Path, played: Trajectories) -> None:
    path = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(looping(path, played)) for _ in range(tail._MOST_TAILS + 1)]
        kept = [keep(file, played.select(episodes=[1])) for file in files]
        assert kept == [True] * tail._MOST_TAILS + [False]
        copy = as_if_killed(path)
        assert len(Trajectories.load(copy)) == len(files) + tail._MOST_TAILS
        assert os.listdir(copy.parent) == ["run"]


@posix
def test_what_is_no_tail_stays_where_it_is(saved: Path) -> None:
    other, name = saved.with_name("other"), f"{saved}-tail1"
    other.write_bytes(b"of somebody else")
    for make in (os.mkfifo, lambda path: os.symlink(other, path)):
        make(name)
        with pytest.warns(UserWarning, match="cannot be taken into"):
            assert_identical(Trajectories.load(saved), recording())
        assert tail.Tail.new(str(saved)) is None
        os.unlink(name)
    assert other.read_bytes() == b"of somebody else"
