"""Tests of what is left when a signal, the clock or forged JSON interfere."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as S
from numpy.testing import assert_array_equal

import wrappers
import wrappers.vector
from benchmarks import soak
from ope_gym import batches, duel
from ope_gym.analysis import duel_state
from ope_gym.analysis.duel import Duel
from ope_gym.cli import main
from ope_gym.data import space_json
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.database import connect
from ope_gym.data.schema import BY_EPISODE, BY_STEP
from ope_gym.data.trajectories import Trajectories
from ope_gym.files import write_file
from ope_gym.policies import LinearSigmoid, Policy, Uniform
from ope_gym.stopping import held_back
from tests.scripted_envs import ScriptedEnv, script
from tests.test_architecture import sources, tops
from tests.test_duel import Coin, leaning, recorded_coins

ROOT = Path(__file__).parents[1]
SIGMOID = LinearSigmoid(np.array([0.5, -0.5, 0.25]))
posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit or signal")


def digest(data: Trajectories) -> str:
    """Return a digest of all columns, policies and schedules."""
    found = hashlib.sha256(repr((data.policies, data.schedules, data.horizon)).encode())
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        for leaf in batches.leaves(getattr(data, name)):
            found.update(leaf.tobytes())
    return found.hexdigest()


load = Trajectories.load


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


# Interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_signals_wait_for_the_end_of_the_block(signals: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt) if signals else contextlib.nullcontext(), held_back():
        with held_back():
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            done.append("inside")
        done.append("around")
    assert done == ["inside", "around"]
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
    assert digest(found) == digest(expected(SAVED[which]))
    assert which in [announced % len(SAVED), (announced + 1) % len(SAVED)]
    expected().save(path)  # what the other left behind is in nobody's way
    assert digest(Trajectories.load(path)) == digest(expected())


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
    assert digest(load(tmp_path / "jumpy")) == digest(load(tmp_path / "calm"))


def test_nothing_that_records_or_stores_asks_for_the_time() -> None:
    for path in (*sources("ope_gym/data"), *sources("wrappers")):
        # a file is brought to the disk once a second, and evaluations cost their share of the
        # time: neither changes what is recorded
        if path.stem not in {"store", "schedule"}:
            assert not {"time", "datetime"} & tops(path), path


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
    ("spaces", "words"),
    [
        ((LARGE, LARGE), "the space takes"),
        (({"type": "Tuple", "spaces": [LARGE, box(2**18)]}, LARGE), "the space takes"),
        (({"type": "Sequence", "space": LARGE, "stack": True}, None), "the space takes"),
        ((graph(graph(LARGE)), None), "nodes and edges of a Graph space are Box or Discrete"),
        (({**box(2), "more": 1}, None), r"unknown fields \['more'\]"),
    ],
)
def test_both_spaces_of_a_file_have_one_budget(spaces: tuple[Any, Any], words: str) -> None:
    budget = space_json.Budget()

    def read() -> None:
        for data in spaces:
            space_json.space_from_json(data, budget)

    with memory(64 * 2**20), pytest.raises(ValueError, match=words):
        read()


def test_spaces_that_are_too_large_together_are_not_written() -> None:
    large = S.Box(-1, 1, (2**20,), np.float64)
    with pytest.raises(ValueError, match="space takes"):
        space_json.env_to_json(large, large, None)


def test_spaces_inside_each_other_are_counted() -> None:
    deep: Any = S.Discrete(2)
    for _ in range(space_json._DEEPEST - 1):
        deep = S.Tuple([deep])
    assert space_json.space_from_json(space_json.space_to_json(deep)) == deep
    with pytest.raises(ValueError, match="more than 64 spaces are inside each other"):
        space_json.space_to_json(S.Tuple([deep]))


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


# Commands ------------------------------------------------------------------------------------


class Broken(Coin):
    """A coin that raises at its third step."""

    def __init__(self, error: BaseException) -> None:
        self.steps, self.error = itertools.count(), error

    def step(self, action: int) -> Any:
        if next(self.steps) == 2:
            raise self.error
        return super().step(action)


@pytest.fixture
def coins(tmp_path: Path) -> list[str]:
    """Words of a gate of coins, without --env."""
    recorded_coins().save(tmp_path / "coins.ope")
    return ["gate", str(tmp_path / "coins.ope"), "--bounds", "0", "2"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("reward"), "KeyError: 'reward' (test_faults.py, line "),
        (MemoryError(), "MemoryError (test_faults.py, line "),
        (SystemExit(1), "SystemExit: 1 (test_faults.py, line "),
        (GeneratorExit(), "GeneratorExit ("),
        (ValueError("a\nb \x1b[2Jc"), "a b \\x1b[2Jc"),
        (ValueError(), "ValueError (test_faults.py, line "),
        (ExceptionGroup("both", [ValueError()]), "ExceptionGroup: both "),
        (OSError(5, "broken", "disk"), "disk: broken"),
    ],
)
def test_whatever_an_environment_raises_is_no_verdict(
    coins: list[str], error: BaseException, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gym.register("Broken-v0", lambda **_: Broken(error), disable_env_checker=True)
    try:
        assert main([*coins, "--env", "Broken-v0"]) == 3
    finally:
        del gym.registry["Broken-v0"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m ope_gym: {words}")


def broken() -> Any:
    """Stand for a function that makes a policy, for the command line."""
    raise KeyError("weights")


def test_other_commands_have_code_2(coins: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("evaluate", "distribution", "plan"):
        assert main([command, coins[1], "--target", "tests.test_faults:broken"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m ope_gym: KeyError: 'weights' (test_faults.py, line ")


def test_a_full_standard_output_is_an_error(coins: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no such device")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ope_gym", "info", coins[1]]
        run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "python -m ope_gym: standard output: No space left on device"
    ]


def test_close_says_that_a_file_could_never_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("wrappers.recording.file.Store", full)
    env = recorder(tmp_path / "run")
    with pytest.warns(UserWarning, match="No space left on device"):
        loop(env, (Uniform(2),))
    with pytest.raises(OSError, match="2 episodes are in the buffer, but not in the file"):
        env.close()
    monkeypatch.undo()
    env.close()  # there is room again
    assert len(load(tmp_path / "run")) == 2


# The state of a duel -------------------------------------------------------------------------


def close_duel(**terms: Any) -> Duel:
    return duel(leaning(0.5), leaning(0.501), bounds=(0, 2), limit=10**6, **terms)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\0" * 5000, b"\xff\xfe", b"SQLite format 3\0"])
def test_what_is_no_state_of_a_duel(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(ValueError, match="is not the state of a duel: give another file"):
        close_duel(state=tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE duel",
        "UPDATE duel SET terms = '[]'",
        'UPDATE duel SET terms = \'{"rules": 3, "policies": {}}\'',
        "UPDATE episodes SET round = 7",
        "UPDATE episodes SET policy = 'c'",
        "UPDATE episodes SET policy = 'a'",
        "UPDATE episodes SET total = 'x'",
    ],
)
def test_a_forged_state_is_refused(tmp_path: Path, change: str) -> None:
    played = close_duel()
    played.play(Coin(), 6)
    played.save(tmp_path / "state")
    with contextlib.closing(sqlite3.connect(tmp_path / "state", isolation_level=None)) as db:
        db.execute(change)
    with pytest.raises(ValueError, match="is not the state of a duel"):
        close_duel(state=tmp_path / "state")


def test_a_full_disk_keeps_what_a_duel_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, played, env = tmp_path / "state", close_duel(), Coin()
    played.play(env, 10)
    played.save(path)

    def full(*args: Any) -> sqlite3.Connection:
        db = connect(*args)
        db.execute("PRAGMA max_page_count=4")
        return db

    monkeypatch.setattr(duel_state, "connect", full)
    played.play(env, 500)
    with pytest.raises(OSError, match="No space left on device"):
        played.save(path)
    monkeypatch.undo()
    assert close_duel(state=path).episodes == 10
    played.save(path)  # there is room again
    assert close_duel(state=path).to_dict() == played.to_dict()


def test_two_duels_do_not_mix_in_a_file(tmp_path: Path) -> None:
    first, env = close_duel(), Coin()
    first.play(env, 2)
    first.save(tmp_path / "state")
    second = close_duel(state=tmp_path / "state")
    for player in (first, second):
        player.play(env, 2)
    first.save(tmp_path / "state")
    with pytest.raises(RuntimeError, match="holds 4 episodes where 2 are expected: another duel"):
        second.save(tmp_path / "state")


_PLAY = """
import sys
from tests.test_faults import *
played, env = close_duel(state=sys.argv[1]), Coin()
while True:
    played.play(env, 1)
    played.save(sys.argv[1])
    print(played.episodes, flush=True)
"""


@posix
def test_a_killed_duel_loses_nothing(tmp_path: Path) -> None:
    path, announced = tmp_path / "state", 0
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", _PLAY, str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) > announced
            time.sleep(0.2)
            process.kill()
            lines = process.stdout.read().splitlines(keepends=True)
        announced = max([announced, *(int(line) for line in lines if line.endswith("\n"))])
        assert close_duel(state=path).episodes >= announced
    whole, again = close_duel(), close_duel(state=path)
    whole.play(Coin(), again.episodes)
    assert again.to_dict() == whole.to_dict()


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


def test_whoever_reads_a_file_that_several_write_gets_one_of_theirs(tmp_path: Path) -> None:
    path, texts = tmp_path / "page.html", [letter * 300_000 for letter in "ab"]

    def write(text: str) -> None:
        for _ in range(30):
            write_file(path, text)

    write_file(path, texts[0])
    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "result.json"
    write_file(path, "old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, fails, lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=r"what was there is as it was.*result\.json"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


@posix
def test_a_pipe_gets_the_text_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "words")
    assert os.read(reader, 9) == b"words"
    os.close(reader)
