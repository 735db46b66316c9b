"""Tests of what is left when the disk, another process, a signal or forged bytes interfere."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as S
from numpy.testing import assert_array_equal

import ope_gym
import wrappers
import wrappers.vector
from benchmarks import fuzz, soak
from ope_gym.data import block_writer, blocks, reader, space_json
from ope_gym.data import files as episode_blocks
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.blocks import MAGIC, DamagedFileError
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schedules import Schedule
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid, Policy, Uniform
from ope_gym.stopping import held_back
from tests.scripted_envs import ScriptedEnv, script
from tests.test_architecture import sources, tops

ROOT = Path(__file__).parents[1]
SIGMOID = LinearSigmoid(np.array([0.5, -0.5, 0.25]))
posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit or signal")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return fuzz.originals(tmp_path_factory.mktemp("originals"))


def load(path: Path) -> Trajectories:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ends inside its last block")
        return Trajectories.load(path)


def read_in_chunks(path: Path, steps: int = 3) -> Trajectories:
    """Load a file as files larger than memory are read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ends inside its last block")
        return fuzz.read_in_chunks(path, steps)


def recorder(path: Path | None) -> wrappers.RecordTrajectories:
    env = ScriptedEnv(script("..T", "T", ".C"))
    return wrappers.RecordTrajectories(env, path=path, append=True)


def loop(env: wrappers.RecordTrajectories, policies: tuple[Policy, ...], ignore: Any = ()) -> int:
    """Play two episodes with each policy in spite of errors, and return how many there were."""
    errors = 0
    for policy in policies:
        try:
            env.follow(policy)
        except ignore:
            errors += 1
        for _ in range(2):
            env.reset()
            over = False
            while not over:
                try:
                    *_, terminated, truncated, _ = env.step(env.clock % 2)
                    over = terminated or truncated
                except ignore:  # comes of the file, at the end of an episode
                    errors, over = errors + 1, True
    return errors


def expected(runs: int = 1) -> Trajectories:
    """Return what `loop` records with two policies if nothing fails."""
    env = recorder(None)
    loop(env, (Uniform(2), SIGMOID))
    data = env.buffer.view()
    return data.merge(*[data] * (runs - 1))


# The disk is full ----------------------------------------------------------------------------


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
@pytest.mark.parametrize("runs", [1, 2])
def test_a_disk_that_was_full_for_a_while_costs_no_episode(tmp_path: Path, runs: int) -> None:
    """The disk fills up in any block, and also where a second run begins."""
    path = tmp_path / "run"
    first = b""
    if runs == 2:
        env = recorder(path)
        loop(env, (Uniform(2), SIGMOID))
        env.close()
        first = path.read_bytes()
    good = fuzz.digest(expected(runs))
    sizes, size = 0, len(first)
    while True:
        path.write_bytes(first)
        env = recorder(path)
        with room(size):
            errors = loop(env, (Uniform(2), SIGMOID), OSError)
            found = load(path) if size >= 8 else None
            assert fuzz.digest(env.buffer.view()) == fuzz.digest(expected())
        if found is not None:  # a prefix, without a hole
            assert_array_equal(found.rewards, expected(runs).rewards[: found.n_steps])
        env.close()  # and there is room again
        assert fuzz.digest(load(path)) == good
        if not errors:
            break
        size, sizes = size + 61, sizes + 1
    assert sizes > 20


@posix
@pytest.mark.parametrize("size", [5, 700, 20_000])
def test_a_vector_recorder_catches_up_with_a_full_disk(tmp_path: Path, size: int) -> None:
    envs = gym.make_vec("CartPole-v1", 8, vectorization_mode="vector_entry_point")
    env = wrappers.vector.RecordTrajectories(envs, held_out=0.25, path=tmp_path / "run")
    rng, errors = np.random.default_rng(0), 0
    env.reset(seed=1)
    with room(size):
        for i in range(150):
            try:
                if i % 40 == 0:  # in the middle of episodes
                    env.follow(LinearSigmoid(np.full(4, 0.01 * i)))
                env.step(rng.integers(2, size=8))
            except OSError:
                errors += 1
    env.close()
    assert errors > 10
    assert len(env.buffer) > 40
    assert fuzz.digest(Trajectories.load(tmp_path / "run")) == fuzz.digest(env.buffer.view())


@posix
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = recorder(path)
    with room(20), pytest.raises(OSError, match=r"(?i)file too large.*run'"):
        env.follow(Uniform(2))
    env.follow(Uniform(2))
    env.reset()
    with room(path.stat().st_size + 5):
        env.step(0)
        env.step(0)
        with pytest.raises(OSError, match=r"in the buffer, but not in the file.*buffer\.save"):
            env.step(0)
        assert len(env.buffer) == 1
        with pytest.raises(OSError, match="in the buffer, but not in the file"):
            env.close()
    assert len(Trajectories.load(path)) == 0
    env.close()
    assert len(Trajectories.load(path)) == 1
    env.buffer.save(tmp_path / "elsewhere")
    assert len(Trajectories.load(tmp_path / "elsewhere")) == 1


@posix
def test_a_save_without_room_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    expected().save(path)
    before = path.read_bytes()
    for size in (0, 7, 100, len(before) - 1):
        with room(size), pytest.raises(OSError, match=r"cannot save, File too large.*run'"):
            expected(2).save(path)
        assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run"]


_FILL = """
import sys
from tests.test_faults import *
folder = Path(sys.argv[1])
expected().save(folder / "saved")
before = (folder / "saved").read_bytes()
(folder / "ballast").write_bytes(bytes(200_000))
env = recorder(folder / "run")
errors = sum(loop(env, (Uniform(2), SIGMOID), OSError) for _ in range(40))
assert errors > 20, errors
try:
    env.buffer.save(folder / "saved")
except OSError as error:
    print(error)
assert (folder / "saved").read_bytes() == before
assert set(os.listdir(folder)) == {"saved", "ballast", "run"}
some = load(folder / "run")
assert 0 < len(some) < len(env.buffer) == 160
(folder / "ballast").unlink()
env.close()
assert fuzz.digest(Trajectories.load(folder / "run")) == fuzz.digest(env.buffer.view())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A disk of 256 kB of its own has room again before the recorder is closed."""
    small = 'mount -t tmpfs -o size=256k none "$0" && touch "$0/here" && rm "$0/here"'
    start = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*start, small, str(tmp_path)], check=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system of its own")
    shell = [*start, small + ' && exec "$@"', str(tmp_path)]
    command = [sys.executable, "-W", "ignore", "-c", _FILL, str(tmp_path)]
    done = subprocess.run([*shell, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot save, No space left on device; what was there is as it was" in done.stdout


def test_a_write_that_cannot_be_taken_back_is_taken_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BlockWriter(tmp_path / "run")
    write_all = block_writer._write_all

    class Stuck:
        """A file that can be written to, but not be cut."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def truncate(self, size: int) -> int:
            raise OSError(5, "Input/output error")

    def fail(file: Any, data: Any) -> None:
        write_all(file, bytes(data)[:-1])
        raise OSError(5, "Input/output error")

    good = writer._file
    with monkeypatch.context() as broken:
        broken.setattr(writer, "_file", Stuck(good))
        broken.setattr(block_writer, "_write_all", fail)
        with pytest.raises(OSError, match="Input/output error"):
            writer.append("long", {}, {"x": np.arange(1000)})
    writer.append("short", {}, {})  # the rest of the long one may not follow it
    writer.close()
    assert [block.kind for block in blocks.read_blocks(tmp_path / "run")] == ["short"]


@pytest.mark.parametrize("dtype", ["a", "<S1", "O", "no such"])
def test_episodes_written_ahead_have_known_dtypes(dtype: str) -> None:
    """Numpy is not even asked about others: a deprecated name would be a warning."""
    meta = {"steps": 1, "columns": [["rewards", dtype, []]]}
    block: Any = SimpleNamespace(meta=meta, array=lambda _: np.zeros(64, dtype=np.uint8))
    with pytest.raises(ValueError, match=f"'rewards' have dtype {dtype!r}"):
        episode_blocks.unpack_ahead(block)


# Interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (block_writer, "_write_all"),
        (episode_blocks, "write_spaces"),
        (episode_blocks, "write_policy"),
        (episode_blocks, "write_change"),
        (episode_blocks, "write_ahead"),
        (episode_blocks, "write_episodes"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: bool
) -> None:
    """Ctrl-C before a write, in the middle of it, or when it is done and nobody knows it yet."""
    good = fuzz.digest(expected())
    original: Callable[..., Any] = getattr(module, name)
    moments = 0
    for moment in range(100):
        calls = 0

        def interrupted(*args: Any, moment: int = moment, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = None
            if calls - 1 == moment and name == "_write_all" and not after:
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
            elif calls - 1 != moment or after:
                result = original(*args, **kwargs)
            if calls - 1 == moment:
                raise KeyboardInterrupt
            return result

        env = recorder(tmp_path / f"{moment}")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            errors = loop(env, (Uniform(2), SIGMOID), KeyboardInterrupt)
            try:
                env.close()
            except KeyboardInterrupt:
                errors += 1
        env.close()
        assert fuzz.digest(env.buffer.view()) == good
        assert fuzz.digest(load(tmp_path / f"{moment}")) == good, moment
        if not errors:
            break
        moments += 1
    # a magic number, spaces, two policies, two changes, four episodes ahead, two blocks of them
    assert moments == {"_write_all": 12, "write_spaces": 1, "write_ahead": 4}.get(name, 2)


def test_a_signal_waits_for_the_end_of_the_block_and_a_second_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []

    def run(signals: int) -> None:
        with held_back():
            with held_back():
                for _ in range(signals):
                    signal.raise_signal(signal.SIGINT)
                done.append("inside")
            done.append("around")

    for signals, expected_to_be_done in (1, ["inside", "around"]), (2, []):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            run(signals)
        assert done == expected_to_be_done
        assert signal.getsignal(signal.SIGINT) is before
    run(0)
    assert signal.getsignal(signal.SIGINT) is before


# Python runs the handler of a signal where a function begins, or when a call of C returns.
_RECORDING = tuple(str(ROOT / name) for name in ("wrappers", "ope_gym/data", "ope_gym/batches.py"))


@contextlib.contextmanager
def interrupt_at(moment: int) -> Iterator[None]:
    """Send Ctrl-C at one of the moments at which it can reach a recorder."""
    moments = itertools.count()

    def count(frame: Any, event: str, _: object) -> None:
        ours = frame.f_code.co_filename.startswith(_RECORDING)
        if ours and event in ("call", "c_return") and next(moments) == moment:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    gc.collect()
    gc.disable()  # an interrupt in the __del__ of an earlier recorder would be ignored
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


SCRIPT = script("..T", "T", ".C")


def scripted(who: int) -> Callable[[], ScriptedEnv]:
    return lambda: ScriptedEnv(SCRIPT, who=who)


def assert_whole(data: Trajectories) -> None:
    """Every episode is one of the script, and none is there twice."""
    data.audit(1e-12)
    names = set()
    for i in range(len(data)):
        rows = slice(data.offsets[i], data.offsets[i + 1])
        who, episode, _ = map(int, data.observations[rows][0])
        steps = range(len(SCRIPT[episode % len(SCRIPT)]))
        assert data.observations[rows].tolist() == [[who, episode, step] for step in steps]
        assert data.rewards[rows].tolist() == [step + 1 for step in steps]
        names.add((who, episode))
    assert len(names) == len(data)


@posix
@pytest.mark.filterwarnings("ignore:reset before the end")
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_ctrl_c_at_any_moment_loses_and_doubles_nothing(
    tmp_path: Path, vector: bool, goes_on: bool
) -> None:
    """Whoever goes on after it, as in a notebook, has whole episodes, too."""

    def play(env: Any, first: int) -> Iterator[int]:
        """Play, and say after each step how many episodes have ended."""
        ended = 0
        for j in range(first, first + 4):
            env.follow(LinearSigmoid(np.full(3, 1e-4 * (j // 2))))
            env.reset()
            over = False
            for _ in range(4):
                if not over:
                    *_, terminated, truncated, _ = env.step(np.zeros(2, dtype=int) if vector else 0)
                    over = not vector and (terminated or truncated)
                    ended += 0 if vector else over
                    yield env.finished_episodes if vector else ended

    moment, interrupted = 250 + 6 * vector + 3 * goes_on, True  # the file is there by then
    while interrupted:
        path = tmp_path / str(moment)
        env: Any
        if vector:
            envs = gym.vector.SyncVectorEnv([scripted(0), scripted(1)])
            env = wrappers.vector.RecordTrajectories(envs, path=path)
        else:
            env = wrappers.RecordTrajectories(scripted(0)(), path=path)
        ended = 0
        try:
            with interrupt_at(moment):
                for n in play(env, 0):
                    ended = n
            interrupted = False
        except KeyboardInterrupt:
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unfinished episodes
            if goes_on:
                ended = max(play(env, 4)) + (0 if vector else ended)
            env.close()
            found = Trajectories.load(path)
        assert ended <= len(found) <= ended + 1 + vector, moment
        assert_whole(found)
        kept = env.buffer.view()  # may know a policy that never acted
        for name in ("observations", "actions", "rewards", "log_probs", "lengths", "start_clock"):
            assert_array_equal(getattr(found, name), getattr(kept, name))
        moment += 29
    assert moment > 700


_RECORD = """
import signal, sys, pathlib
from tests.test_faults import *
if sys.argv[2] == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
env = recorder(pathlib.Path(sys.argv[1]))
ended = 0
try:
    while True:
        env.follow(LinearSigmoid(np.full(3, 1e-4 * ended)))
        env.reset()
        over = False
        while not over:
            *_, terminated, truncated, _ = env.step(0)
            over = terminated or truncated
        ended += 1
        print(ended, flush=True)
finally:
    env.close()
"""
SAVED = (1, 50, 2, 30)  # sizes of the files that `_SAVE` writes in turn
_SAVE = """
import sys
from tests.test_faults import *
data = [expected(runs) for runs in SAVED]
for i in range(10**9):
    data[i % len(data)].save(sys.argv[1])
    print(i, flush=True)
"""


def terminated(code: str, *arguments: str) -> tuple[int, int]:
    """Return the last number that a process printed before SIGTERM, and its return code."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(random.Random(str(arguments)).uniform(0.05, 0.2))
        process.terminate()
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
    return int([line for line in lines if line.endswith(b"\n")][-1]), process.returncode


@posix
@pytest.mark.parametrize("handler", ["default", "exit"])
def test_sigterm_while_recording(tmp_path: Path, handler: str) -> None:
    path = tmp_path / "run"
    announced, code = terminated(_RECORD, str(path), handler)
    assert code == {"default": -signal.SIGTERM, "exit": 3}[handler]
    found = load(path)
    assert announced <= len(found) <= announced + 1
    found.audit(1e-12)
    assert_array_equal(found.lengths, np.resize([3, 1, 2], len(found)))
    if handler == "exit":  # nothing is cut off
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Trajectories.load(path)


_SAVE_AND_DIE = """
import signal, sys
from tests.test_faults import *
path, write_all, replace = Path(sys.argv[1]), block_writer._write_all, os.replace
def die():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
for moment in range(100):
    expected(1).save(path)
    pid = os.fork()
    if not pid:
        calls = 0
        def write(file, data):
            global calls
            calls += 1
            write_all(file, bytes(data)[: len(data) // 2] if calls == moment else data)
            calls == moment and die()
        def put_in_place(*names):
            calls + 1 == moment and die()
            replace(*names)
            calls + 2 == moment and die()
        block_writer._write_all, os.replace = write, put_in_place
        expected(50).save(path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, fuzz.digest(Trajectories.load(path)), flush=True)
    if moment and not status:
        break
"""


@posix
def test_sigterm_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """It is stopped in the middle of each write, before and after the new file takes its place."""
    command = [sys.executable, "-W", "ignore", "-c", _SAVE_AND_DIE, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (code, first), *killed, last = (line.split() for line in done.stdout.splitlines())
    old, new = fuzz.digest(expected(1)), fuzz.digest(expected(50))
    assert (code, first) == ("0", new)
    assert last == ["0", new]
    assert len(killed) > 5
    assert killed == [["-15", old]] * (len(killed) - 1) + [["-15", new]]


@posix
def test_sigterm_while_saving(tmp_path: Path) -> None:
    path = tmp_path / "run"
    announced, code = terminated(_SAVE, str(path))
    assert code == -signal.SIGTERM
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Trajectories.load(path)
    # the announced save or the next one, whole: never an older one
    which = [len(found) == 4 * runs for runs in SAVED].index(True)
    assert fuzz.digest(found) == fuzz.digest(expected(SAVED[which]))
    assert which in [announced % len(SAVED), (announced + 1) % len(SAVED)]
    expected().save(path)  # what the other left behind is in nobody's way
    assert fuzz.digest(Trajectories.load(path)) == fuzz.digest(expected())


# The power goes ------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 700])
def test_a_file_that_ends_in_zeros_is_continued(tmp_path: Path, more: int) -> None:
    """The system noted the size of the file, but zeros stand for the last bytes, or behind them."""
    path = tmp_path / "run"
    env = recorder(path)
    loop(env, (Uniform(2), SIGMOID))
    env.close()
    whole = path.read_bytes()
    ends = np.cumsum([8, *map(len, fuzz.blocks_of(whole))])
    assert more or whole[-1]  # a block of our own does not end in a zero
    for cut in (*range(0, len(whole), 7), *ends.tolist()):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut + more))
        left = int((ends[1:] <= len(whole[:cut].rstrip(b"\0"))).sum())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*end(s|ed) inside its last block")
            if cut >= 8:
                assert len(list(blocks.read_blocks(path))) == left
            with BlockWriter(path) as writer:
                writer.append("policy", {"policy": "mine"}, {})
        kinds = [block.kind for block in blocks.read_blocks(path)]
        assert len(kinds) == left + 1
        assert path.read_bytes().startswith(whole[: ends[left]])


def test_zeros_in_front_of_other_bytes_are_damage(tmp_path: Path, files: dict[str, bytes]) -> None:
    whole = files["discrete"]
    ends = np.cumsum([8, *map(len, fuzz.blocks_of(whole))])
    path = tmp_path / "run"
    path.write_bytes(whole[: ends[2]] + bytes(ends[3] - ends[2]) + whole[ends[3] :])
    with pytest.raises(DamagedFileError):
        Trajectories.load(path)
    with pytest.raises(DamagedFileError):
        BlockWriter(path)


@posix
def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait until somebody writes to it, and a device has no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        for door in (
            Trajectories.load,
            read_in_chunks,
            BlockWriter,
            recorder,
            expected().save,
            lambda path: ope_gym.evaluate(path, Uniform(2)),
            lambda path: list(blocks.read_blocks(path)),
        ):
            with pytest.raises(ValueError, match="a pipe, a device or a socket"):
                door(path)
    assert pipe.is_fifo()


# Two writers, no rights, no clock ------------------------------------------------------------


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = recorder(path)
    env.follow(Uniform(2))
    code = (
        "import sys, pathlib; from tests.test_faults import *\n"
        "for use in (lambda p: recorder(p).follow(Uniform(2)), expected().save):\n"
        "    try: use(pathlib.Path(sys.argv[1]))\n"
        "    except RuntimeError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "is open in another writer" in first
    assert "a recorder is writing to it" in second
    loop(env, (Uniform(2), SIGMOID))
    env.close()
    assert fuzz.digest(Trajectories.load(path)) == fuzz.digest(expected())
    assert os.listdir(tmp_path) == ["run"]


@posix
def test_a_file_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save comes between opening and locking: episodes would go to a file without a name."""
    path = tmp_path / "run"
    expected().save(path)
    expected(2).save(tmp_path / "other")
    lock = block_writer._lock

    def late(file: Any) -> bool:
        os.replace(tmp_path / "other", path)
        return lock(file)

    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "_lock", late)
        with pytest.raises(RuntimeError, match=r"replaced by another file.*open it again"):
            BlockWriter(path)
    BlockWriter(path).close()


@posix
def test_a_target_is_locked_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    expected().save(path)
    replace = os.replace

    def meanwhile(*names: Any) -> None:
        with pytest.raises(RuntimeError, match="open in another writer"):
            BlockWriter(path)
        replace(*names)

    monkeypatch.setattr(os, "replace", meanwhile)
    expected(2).save(path)
    assert fuzz.digest(Trajectories.load(path)) == fuzz.digest(expected(2))


@posix
def test_a_recorder_that_opens_a_new_path_meanwhile_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder comes between the look at the path and the moment of the new file."""
    path, link, opened = tmp_path / "run", os.link, []

    def late(*names: Any) -> None:
        opened.append(recorder(path))
        opened[0].follow(Uniform(2))
        link(*names)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", late)
        with pytest.raises(RuntimeError, match=r"cannot save .*run: a recorder is writing to it"):
            expected().save(path)
    opened[0].close()
    assert os.listdir(tmp_path) == ["run"]
    assert len(Trajectories.load(path)) == 0


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    expected().save(tmp_path / "run")
    assert fuzz.digest(Trajectories.load(tmp_path / "run")) == fuzz.digest(expected())
    assert os.listdir(tmp_path) == ["run"]


@posix
def test_a_folder_without_write_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected().save(folder / "run")
        before = (folder / "run").read_bytes()
        (folder / "run").chmod(0o444)
        folder.chmod(0o555)
        superuser = os.geteuid() == 0  # for whom rights are no obstacle
        if superuser:
            os.seteuid(65534)
        try:
            for path in (folder / "run", folder / "new"):
                with pytest.raises(PermissionError, match=f"cannot save.*{path.name}'"):
                    expected().save(path)
                with pytest.raises(PermissionError, match=f"{path.name}'"):
                    recorder(path).follow(Uniform(2))
            assert len(Trajectories.load(folder / "run")) == 4
        finally:
            if superuser:
                os.seteuid(0)
            folder.chmod(0o755)
        assert (folder / "run").read_bytes() == before
        assert os.listdir(folder) == ["run"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        expected().save(tmp_path / "file" / "run")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        recorder(tmp_path / "file" / "run")


def test_the_clock_of_the_machine_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = recorder(tmp_path / "calm")
    loop(env, (Uniform(2), SIGMOID))
    env.close()
    jumps = random.Random(0)
    for name in ("time", "time_ns", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: jumps.randint(-(10**12), 10**12))
    env = recorder(tmp_path / "jumpy")
    loop(env, (Uniform(2), SIGMOID))
    env.close()
    assert (tmp_path / "jumpy").read_bytes() == (tmp_path / "calm").read_bytes()


def test_nothing_that_records_or_stores_asks_for_the_time() -> None:
    for path in (*sources("ope_gym"), *sources("wrappers")):
        # events of TensorBoard carry the time, for show; a stopped command waits, but not for ever;
        # a file is brought to the disk once a second, which changes nothing in it
        if path.stem not in ("events", "workers", "block_writer"):
            assert not {"time", "datetime"} & tops(path), path


# Damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stride"),
    [("discrete", 1), ("dict", 7), ("objects", 7), ("torch", 7), ("schedules", 7)],
)
def test_cut_at_every_byte_of_the_last_block(
    tmp_path: Path, files: dict[str, bytes], kind: str, stride: int
) -> None:
    """Other contents are cut at every seventh byte: the block around them is the same."""
    path, data = tmp_path / "cut", files[kind]
    last = len(data) - len(fuzz.blocks_of(data)[-1])
    path.write_bytes(data[:last])
    before = fuzz.digest(Trajectories.load(path))
    with open(path, "ab", buffering=0) as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(last + 1, len(data), stride):
            file.write(data[path.stat().st_size : size])
            assert fuzz.digest(Trajectories.load(path)) == before
            assert f"{size - last} bytes from byte {last} on" in str(caught.pop().message)
            if kind == "discrete":
                (section,) = reader.read_layout(path)
                assert len(section) == len(section.lengths) == 4
                assert f"{size - last} bytes from byte {last} on" in str(caught.pop().message)
    assert not caught
    path.write_bytes(data[:-1])
    assert fuzz.digest(read_in_chunks(path)) == before
    path.write_bytes(data)
    assert fuzz.digest(Trajectories.load(path)) != before


def test_blocks_keep_their_order_and_their_file(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Blocks of equal size, each with good checksums: none may pass for another."""
    path = tmp_path / "moved"
    *start, a, b, c, d = fuzz.blocks_of(files["discrete"])
    others = fuzz.blocks_of(files["another"])[3:]
    assert len({len(block) for block in (a, b, c, d, *others)}) == 1
    for order, readable in (
        ([b, a, c, d], 1),
        ([a, a, b, c, d], 2),
        ([a, c, d], 2),
        ([a, others[1], c, d], 2),
        ([a, b, c, d, a], 5),
    ):
        path.write_bytes(MAGIC + b"".join([*start, *order]))
        with pytest.raises(DamagedFileError, match="does not follow"):
            Trajectories.load(path)
        with pytest.raises(DamagedFileError, match="does not follow"):
            read_in_chunks(path)
        with pytest.warns(UserWarning, match="recovered"):
            assert len(Trajectories.load(path, recover=True)) == readable
        with pytest.raises(DamagedFileError, match="does not follow"):
            BlockWriter(path)


def test_a_file_whose_blocks_do_not_say_what_they_follow(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    """The first version wrote such files; they can be read and continued."""
    path, data = tmp_path / "old", MAGIC
    for block in fuzz.blocks_of(files["discrete"]):
        meta, payload = fuzz.taken_apart(block)
        data += fuzz.raw_block(len(data), meta, payload)[0]
    assert b'"after"' not in data
    path.write_bytes(data)
    assert len(Trajectories.load(path)) == len(read_in_chunks(path)) == 5
    with BlockWriter(path) as writer:
        episode_blocks.write_policy(writer, SIGMOID)
        episode_blocks.write_policy(writer, Uniform(3))
    assert len(Trajectories.load(path).policies) == 3


def test_fuzzed_files(tmp_path: Path) -> None:
    """It runs in a process that is watched and limited; `benchmarks.fuzz` itself does more."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--mutations", "600", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "600 loads" in done.stdout


@pytest.mark.parametrize("whole", [0, 1 << 24])
@pytest.mark.parametrize("kind", ["discrete", "dict", "objects", "torch", "schedules", "plain"])
def test_both_doors_give_the_same(
    tmp_path: Path, files: dict[str, bytes], kind: str, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_WHOLE", whole)
    path = tmp_path / "run"
    path.write_bytes(files[kind])
    for steps in (1, 3, 1000):
        assert fuzz.digest(read_in_chunks(path, steps)) == fuzz.digest(Trajectories.load(path))


@pytest.mark.parametrize("kind", ["discrete", "schedules", "plain"])
def test_the_layout_of_a_file_tells_its_episodes_without_their_contents(
    tmp_path: Path, files: dict[str, bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.write_bytes(files[kind])
    found = Trajectories.load(path)
    monkeypatch.setattr(episode_blocks, "parse_episodes", lambda *_: pytest.fail("were read"))
    sections = reader.read_layout(path)
    first = found.policy_ids[found.offsets[:-1]]
    for name, expected in {"first_policies": first, "schedule_ids": found.schedule_ids}.items():
        if len(sections) == 1:
            assert_array_equal(getattr(sections[0], name), expected)
    for name in ("lengths", "held_out", "start_clock"):
        parts = [getattr(section, name) for section in sections]
        assert_array_equal(np.concatenate(parts), getattr(found, name))
    assert any(section.clocked for section in sections) == (kind == "schedules")
    if kind == "schedules":
        changes = Schedule(np.array([0, 3]), np.array([0, 1], dtype=np.int32))
        assert [section.schedule_ids.tolist() for section in sections] == [[0, 0], [0, 0]]
        assert [section.start_clock.tolist() for section in sections] == [[0, 4], [0, 4]]
        assert [section.schedules for section in sections] == [(changes,)] * 2


def test_a_part_of_a_section_counts_episodes_from_its_start(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    path.write_bytes(files["discrete"])  # five blocks of one episode
    (section,) = reader.read_layout(path)
    assert [chunk.first for chunk in section.part(2, 5).chunks(1)] == [2, 3, 4]
    assert [chunk.first for chunk in section.part(1, 5).part(2, 4).chunks(1)] == [3, 4]


def forged(data: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """Change the contents of the last block of a file and make all checksums right."""
    blocks = [fuzz.taken_apart(block) for block in fuzz.blocks_of(data)]
    meta, payload = blocks[-1][0], bytearray(blocks[-1][1])
    change(meta, payload)
    return fuzz.put_together([*blocks[:-1], (meta, bytes(payload))])


def put(name: str, row: int, value: int) -> Callable[[dict[str, Any], bytearray], None]:
    """Put another number into an array of the last block."""

    def change(meta: dict[str, Any], payload: bytearray) -> None:
        entry = meta["arrays"][name]
        dtype, count = entry["dtype"], int(np.prod(entry["shape"]))
        array = np.frombuffer(payload, dtype, count, entry["offset"])
        array[row] = value

    return change


def describe(name: str, **changed: Any) -> Callable[[dict[str, Any], bytearray], None]:
    """Describe an array in another way."""
    return lambda meta, payload: meta["arrays"][name].update(changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("policy_ids", 0, 2**31 - 1), "policy_ids is 2147483647, but the policies known are"),
        (put("policy_ids", 3, -1), "policy_ids is -1, but the policies known are"),
        (put("policy_ids", 1, 1), "but policy 0 should act there"),
        (put("episodes", 0, 4), "its episodes have 13 steps, its columns 12"),
        (put("episodes", 1, 7), "terminated has dtype int64"),
        (describe("policy_ids", dtype="<i8", shape=[6]), "policy_ids has dtype int64"),
        (describe("policy_ids", dtype="O"), "'policy_ids' has the unknown dtype 'O'"),
        (describe("policy_ids", dtype=["O"]), "'policy_ids' has the unknown dtype"),
        (describe("policy_ids", shape=[-1]), "'policy_ids' has the impossible shape"),
        (describe("policy_ids", shape="12"), "'policy_ids' has the impossible shape"),
        (describe("policy_ids", shape=[2**40]), "'policy_ids' of shape .* does not fit"),
        (describe("episodes", shape=[24]), r"episodes has dtype int64, shape \(24,\)"),
        (describe("episodes", offset=8), "'episodes' of shape .* does not fit"),
        (lambda meta, _: meta.pop("arrays"), "a block is of kind 'episodes' and has arrays None"),
        (lambda meta, _: meta["arrays"].update(rewards=3), "'rewards' is described by 3"),
        (lambda meta, _: meta.update(note=np.nan), "holds NaN, which is not JSON"),
        (lambda meta, _: meta.update(kind="other"), "unknown kind"),
    ],
)
def test_both_doors_refuse_the_same(
    tmp_path: Path, files: dict[str, bytes], change: Any, words: str
) -> None:
    path = tmp_path / "run"
    path.write_bytes(forged(files["plain"], change))
    for door in (Trajectories.load, read_in_chunks):
        for whole in (0, 1 << 24):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reader, "_WHOLE", whole)
                with pytest.raises(DamagedFileError, match=f"(?s)run.*{words}"):
                    door(path)


def test_both_doors_want_blocks_and_sections_alike(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Where no space says what an observation is, all must be like the first."""
    path = tmp_path / "run"
    blocks = [fuzz.taken_apart(block) for block in fuzz.blocks_of(files["plain"])]
    meta, payload = blocks[-1]
    other = json.loads(json.dumps(meta))
    other["observations"] = "rewards"
    empty = {**blocks[0][0], "horizon": 7}
    for more, words in (
        ([(other, payload)], "observations differ in structure"),
        ([*blocks[:-1], (other, payload)], "observations differ in structure"),
        ([(empty, b""), *blocks[1:]], "horizon differs: None and 7"),
    ):
        path.write_bytes(fuzz.put_together([*blocks, *more]))
        for door in (Trajectories.load, read_in_chunks):
            with pytest.raises(DamagedFileError, match=words):
                door(path)


# Forged files --------------------------------------------------------------------------------


def box(*shape: int, dtype: str = "float64") -> dict[str, Any]:
    return {"type": "Box", "dtype": dtype, "shape": list(shape), "low": None, "high": None}


@pytest.mark.parametrize(
    "data",
    [
        box(2**21),
        box(2**60),
        box(2**40, 2**40),
        {"type": "Tuple", "spaces": [box(2**25)] * 3},
        {"type": "Tuple", "spaces": [{"type": "Tuple", "spaces": [box(2**20)] * 10}] * 10},
        {"type": "Dict", "spaces": [["a", box(2**26)], ["b", box(1)]], "sort_keys": True},
        {"type": "Graph", "node_space": box(2**26), "edge_space": box(2**26)},
        {"type": "Sequence", "space": {"type": "OneOf", "spaces": [box(2**26)] * 2}, "stack": True},
    ],
    ids=str,
)
def test_a_few_bytes_do_not_ask_for_much_memory(data: Any) -> None:
    with pytest.raises(ValueError, match=r"the space takes [\d,]+ bytes"):
        space_json.space_from_json(data)


def policy_file(path: Path, kind: str, arrays: dict[str, Any]) -> Path:
    with BlockWriter(path) as writer:
        episode_blocks.write_spaces(writer, S.Discrete(5), S.Discrete(2), None)
        writer.append("policy", {"policy": kind}, arrays)
    return path


NETWORK = {
    "activation": np.array(0),
    "weights_0": np.zeros((2, 5), np.float32),
    "bias_0": np.zeros(2, np.float32),
}


@pytest.mark.parametrize("exponent", [17, 30, 40, 62])
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
        ("epsilon-greedy-mlp", {**NETWORK, "epsilon": np.array(0.1)}, "n_states"),
    ],
)
def test_a_policy_does_not_ask_for_more_than_it_brings(
    kind: str, arrays: dict[str, Any], size: str, exponent: int, tmp_path: Path
) -> None:
    path = policy_file(tmp_path / "run", kind, {**arrays, size: np.array(2**exponent)})
    with pytest.raises(DamagedFileError, match=size):
        Trajectories.load(path)
    good = {"n_actions": 2**16, "n_states": 5}[size]
    path = policy_file(tmp_path / "good", kind, {**arrays, size: np.array(good)})
    (policy,) = Trajectories.load(path).policies
    assert len(repr(policy)) < 1000
    assert len(policy.sample(np.array([3]), np.random.default_rng(0))) == 1


@pytest.mark.parametrize("names", [8, 4000])
def test_a_column_under_many_names_is_refused(
    names: int, tmp_path: Path, files: dict[str, bytes]
) -> None:
    """Neither many arrays in the same bytes, nor one array in many places of an observation."""

    def arrays(meta: dict[str, Any], payload: bytearray) -> None:
        entry = meta["arrays"]["rewards"]
        for i in range(names):
            meta["arrays"][f"more.{i}"] = entry

    def layout(meta: dict[str, Any], payload: bytearray) -> None:
        meta["observations"] = {"dict": [[f"{i}", "rewards"] for i in range(names + 1)]}

    path = tmp_path / "run"
    for change, words in ((arrays, "lie in the same bytes"), (layout, "'rewards' twice")):
        path.write_bytes(forged(files["plain"], change))
        for door in (Trajectories.load, read_in_chunks):
            with pytest.raises(DamagedFileError, match=words):
                door(path)


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8", "int64"])
def test_the_largest_space_takes_less_than_64_mebibytes(dtype: str) -> None:
    width = 4 * np.dtype(dtype).itemsize + 6
    largest = box((space_json._MOST_BYTES - space_json._SPACE_BYTES) // width, dtype=dtype)
    tracemalloc.start()
    try:
        assert space_json.space_from_json(largest) is not None
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_a_time_limit_that_stands_for_none_takes_no_memory() -> None:
    """There are columns with a number for each step up to the limit."""
    data = expected(4)
    near, far = (
        ope_gym.evaluate(dataclasses.replace(data, horizon=horizon), "last")
        for horizon in (None, 2**40)
    )
    assert str(near) == str(far)


def test_json_is_bounded_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with BlockWriter(path) as writer, pytest.raises(ValueError, match="the JSON of a 'x' block"):
        writer.append("x", {"long": "a" * 2**20}, {})
    path.write_bytes(
        MAGIC + fuzz.raw_block(8, {"kind": "x", "arrays": {}, "l": "a" * 2**21}, b"")[0]
    )
    with pytest.raises(DamagedFileError, match="the JSON of a block has"):
        Trajectories.load(path)


def test_what_cannot_be_read_is_not_written() -> None:
    large = S.Box(0, 255, (2**25,), np.uint8)
    with pytest.raises(ValueError, match="the space takes"):
        space_json.space_to_json(S.Tuple([large, large, large]))


@contextlib.contextmanager
def memory(most: float) -> Iterator[None]:
    """Raise if more bytes are needed at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def graph(nodes: Any) -> dict[str, Any]:
    return {"type": "Graph", "node_space": nodes, "edge_space": None}


LARGE = box(2**20)  # within what the spaces of a file may take, but not twice


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ([(LARGE, LARGE)], "the space takes"),
        ([(LARGE, None), (None, LARGE)], "the space takes"),
        ([({"type": "Tuple", "spaces": [LARGE, box(2**18)]}, LARGE)], "the space takes"),
        ([({"type": "Sequence", "space": LARGE, "stack": True}, None)], "the space takes"),
        ([(LARGE, None), ({**LARGE, "low": -1}, None)], "the space takes"),
        ([(graph(graph(LARGE)), None)], "nodes and edges of a Graph space are Box or Discrete"),
        ([({**box(2), "more": 1}, None)], r"unknown fields \['more'\]"),
    ],
)
def test_all_spaces_of_a_file_have_one_budget(
    sections: list[tuple[Any, Any]], words: str, tmp_path: Path
) -> None:
    with BlockWriter(tmp_path / "run") as writer:
        for seen, chosen in sections:
            meta = {"observation_space": seen, "action_space": chosen, "horizon": None}
            writer.append("spaces", meta, {})
    with memory(64 * 2**20), pytest.raises(DamagedFileError, match=words):
        Trajectories.load(tmp_path / "run")


def test_spaces_of_sections_that_say_the_same_are_not_compared(tmp_path: Path) -> None:
    space = S.Box(0, 1, (4_900_000,), np.uint8)  # which Gymnasium would do with float64
    with BlockWriter(tmp_path / "run") as writer:
        for _ in range(2):
            episode_blocks.write_spaces(writer, space, S.Discrete(2), None)
    with memory(64 * 2**20):
        assert len(Trajectories.load(tmp_path / "run")) == 0


def test_spaces_that_are_too_large_together_are_not_written(tmp_path: Path) -> None:
    large = S.Box(-1, 1, (2**20,), np.float64)
    with BlockWriter(tmp_path / "run") as writer, pytest.raises(ValueError, match="space takes"):
        episode_blocks.write_spaces(writer, large, large, None)


def test_spaces_inside_each_other_are_counted() -> None:
    deep: Any = S.Discrete(2)
    for _ in range(space_json._DEEPEST - 1):
        deep = S.Tuple([deep])
    assert space_json.space_from_json(space_json.space_to_json(deep)) == deep
    with pytest.raises(ValueError, match="more than 64 spaces are inside each other"):
        space_json.space_to_json(S.Tuple([deep]))


def with_elements(path: Path, space: Any, text: bytes) -> Path:
    """Write an episode of one step, whose observation is this JSON."""
    table = np.array([[1, 1, 0, 0, -1, -1]])
    arrays = {"rewards": np.ones(1), "log_probs": np.full(1, -0.7), "episodes": table}
    arrays |= {"policy_ids": np.zeros(1, np.int32), "actions": np.zeros(1, np.int64)}
    arrays["observations"] = np.frombuffer(text, np.uint8)
    with BlockWriter(path) as writer:
        episode_blocks.write_spaces(writer, space, S.Discrete(2), None)
        episode_blocks.write_policy(writer, Uniform(2))
        meta = {"observations": {"json": "observations"}, "actions": "actions"}
        writer.append("episodes", meta, arrays)
    return path


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
def test_an_element_of_many_small_parts_is_refused_before_it_is_made(
    space: Any, part: bytes, tmp_path: Path
) -> None:
    text = b"[[" + b",".join([part] * 1_000_000) + b"]]"
    path = with_elements(tmp_path / "run", space, text)
    with memory(64 * 2**20), pytest.raises(DamagedFileError, match="too many parts"):
        Trajectories.load(path)


def test_what_has_too_many_parts_to_be_read_is_not_written() -> None:
    elements = np.empty(1, dtype=object)
    elements[0] = ((),) * 400_000
    with pytest.raises(ValueError, match="in row 0 has so many parts"):
        space_json.elements_to_json(S.Sequence(S.Sequence(S.Discrete(2))), elements)


@pytest.mark.parametrize(
    "text", [b"", b"3", b"[", b"[1", b"[1 2]", b"[1]]", b"[1,]", b"[1,", b"{}"]
)
def test_elements_that_are_no_list_are_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"the (text|list) of a column"):
        space_json.elements_from_json(S.Discrete(5), text)


@pytest.mark.parametrize("short", [1, 2, 5, 4096])
def test_elements_are_read_one_by_one(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the piece that is read ends inside of one, or inside of a number."""
    monkeypatch.setattr(space_json, "_SHORT", short)
    for text in (b"[]", b" [ ] ", b"[123456]", b"[1,23 , 456,\n7890]", b"[12,3]"):
        found = space_json.elements_from_json(S.Discrete(10**6), text)
        assert found.tolist() == json.loads(text)
    words = ['a"b', "\\", "]", "", ",[", "é\u2028"]
    assert space_json.elements_from_json(S.Text(9), json.dumps(words).encode()).tolist() == words


def test_a_large_element_comes_back() -> None:
    elements = np.empty(2, dtype=object)
    rng = np.random.default_rng(0)
    elements[:] = [tuple(rng.normal(size=(3, 20_000))), tuple(rng.normal(size=(1, 20_000)))]
    space = S.Sequence(S.Box(-9, 9, (20_000,), np.float64))
    found = space_json.elements_from_json(space, space_json.elements_to_json(space, elements))
    for one, other in zip(found, elements, strict=True):
        assert_array_equal(one, other)


def with_changes(path: Path, clocks: Any, policies: Any) -> Path:
    with BlockWriter(path) as writer:
        episode_blocks.write_spaces(writer, S.Discrete(5), S.Discrete(2), None)
        for k in range(2):
            episode_blocks.write_policy(writer, LinearSigmoid(np.full(4, float(k))))
        arrays = {"clocks": clocks, "policies": policies}
        writer.append("changes", {"schedule": 0, "mid_episode": True}, arrays)
    return path


def test_changes_stay_arrays(tmp_path: Path) -> None:
    clocks = np.arange(500_000)
    path = with_changes(tmp_path / "run", clocks, (clocks % 2).astype(np.int32))
    with memory(4 * path.stat().st_size):
        (section,) = reader.read_layout(path)
    assert_array_equal(section.schedules[0].clocks, clocks)


def test_changes_have_the_dtypes_of_the_format(tmp_path: Path) -> None:
    for dtypes in ((np.int8, np.int32), (np.int64, np.int8), (np.float64, np.int32)):
        path = tmp_path / "-".join(np.dtype(x).name for x in dtypes)
        with pytest.raises(DamagedFileError, match="clocks have dtype"):
            Trajectories.load(with_changes(path, *(np.zeros(2, x) for x in dtypes)))


@pytest.mark.parametrize("dtype", ["0", "2,i4", "(2,2)f8", "O", "a", "V8", "U1", "M8[s]", 3, None])
@pytest.mark.parametrize("kind", ["Box", "Discrete", "MultiDiscrete"])
def test_a_dtype_is_one_of_a_list(kind: str, dtype: Any) -> None:
    data = {
        "Box": box(2),
        "Discrete": {"type": kind, "n": 2, "start": 0},
        "MultiDiscrete": {"type": kind, "nvec": [2], "start": [0]},
    }[kind]
    data["dtype"] = dtype
    with pytest.raises(ValueError, match="the dtype of a space is"):
        space_json.space_from_json(data)


def test_bounds_fit_their_dtype() -> None:
    with pytest.raises(ValueError, match="low of a Box do not fit its dtype float32"):
        space_json.space_from_json({**box(2, dtype="float32"), "low": -1e308})


def test_sections_share_their_spaces_or_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with BlockWriter(path) as writer:
        for _ in range(3):
            episode_blocks.write_spaces(writer, S.Box(-1, 1, (2,)), S.Discrete(2), None)
    spaces = [section.observation_space for section in reader.read_layout(path)]
    assert spaces[0] is spaces[1] is spaces[2]
    with BlockWriter(path) as writer:
        episode_blocks.write_spaces(writer, S.Box(-1, 1, (3,)), S.Discrete(2), None)
    with pytest.raises(DamagedFileError, match=r"malformed.*observation_space differs"):
        Trajectories.load(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be"])
def test_json_is_utf_8(tmp_path: Path, encoding: str) -> None:
    text = json.dumps({"kind": "x", "arrays": {}}).encode(encoding)
    text += " ".encode(encoding.removesuffix("16") + "16-le") * 40 if "16" in encoding else b""
    text = text[: len(text) - (len(MAGIC) + 24 + len(text)) % 64] if "16" in encoding else text
    path = tmp_path / "run"
    path.write_bytes(MAGIC + fuzz.raw_block(len(MAGIC), text, b"")[0])
    with pytest.raises(DamagedFileError):
        list(blocks.read_blocks(path))


# Memory --------------------------------------------------------------------------------------


def test_many_small_appends_do_not_stay_many_small_parts() -> None:
    """A part has a dozen arrays; of one episode each, they would take more room than its rows."""
    one, whole = TrajectoryBuffer(S.Discrete(9), S.Discrete(2)), []
    one.add_policy(Uniform(2))
    rng = np.random.default_rng(0)
    for i in range(1000):
        n = 1 + i % 3
        seen, rewards = rng.integers(9, size=n), rng.normal(size=n)
        one.append_many(seen, seen % 2, rewards, np.full(n, -0.7), 0, lengths=[n], terminated=True)
        whole.append((seen, rewards))
    assert len(one._parts) < 260
    data = one.view()
    assert_array_equal(data.lengths, 1 + np.arange(1000) % 3)
    assert_array_equal(data.observations, np.concatenate([seen for seen, _ in whole]))
    assert_array_equal(data.rewards, np.concatenate([rewards for _, rewards in whole]))


@pytest.mark.parametrize(("leak", "found"), [(0, False), (48e6, True), (-48e6, False)])
def test_the_soak_sees_a_leak_that_fits_into_its_allowance(leak: float, found: bool) -> None:
    """48 MB in a run of 10^7 steps, beside arenas of 20 MB that come and go."""
    lines = [
        {"steps": i * 1e6, "grown": 9e7 + 2e7 * (i % 3) + leak * i / 10, "columns": 9e7}
        for i in range(1, 11)
    ]
    assert soak.leaks(lines) is found
    assert abs(leak) <= soak.ALLOWANCE
