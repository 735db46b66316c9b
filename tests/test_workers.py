"""Who computes changes nothing: one process or several, the same bits, errors and warnings."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from ope_gym import (
    Bootstrap,
    Compute,
    Evaluator,
    Trajectories,
    Weighting,
    evaluate,
)
from ope_gym.data.blocks import DamagedFileError
from ope_gym.models.linear import LinearQ
from ope_gym.policies import LinearSigmoid
from ope_gym.scale import passes
from ope_gym.scale.passes import Item
from ope_gym.scale.ray import connected
from ope_gym.scale.sources import open_source
from ope_gym.scale.tasks import WorkerError, compute
from ope_gym.scale.threads import LocalThreads
from ope_gym.scale.workers import _AHEAD, LocalProcesses, Workers, start_workers
from ope_gym.weights.answers import Answers
from tests.builders import assert_same
from tests.file_builders import clocked, functions, made, mixed_files

ROOT = Path(__file__).parents[1]
ESTIMATORS = ["BIS", "NBCIS", "NFIS", "DM", "DR", "FWDR"]
TARGET = LinearSigmoid(np.full(3, 0.3))


# Order and memory -----------------------------------------------------------------------------


def _noted(folder: Path, i: int, checkpoint: Any = None) -> tuple[int, int]:
    """Leave a file; the first item then waits until it is told to go on, or is stopped."""
    (folder / str(i)).touch()
    deadline = time.monotonic() + 60
    while i == 0 and not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
        if checkpoint is not None:
            checkpoint(0)
    return i, os.getpid()


@pytest.mark.parametrize("threads", [False, True])
def test_results_come_in_order_and_few_are_ahead_of_the_oldest(
    crew: Workers, tmp_path: Path, threads: bool
) -> None:
    """Otherwise those that wait for their turn would fill the memory."""
    ahead = 2 * _AHEAD
    results = crew.within(threads).in_order(partial(_noted, tmp_path), range(3 * ahead))
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.extend(results))
    thread.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # in which others would begin
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(ahead))}
    (tmp_path / "go").touch()
    thread.join()
    assert [i for i, _ in found] == list(range(3 * ahead))
    assert (os.getpid() in {pid for _, pid in found}) == threads
    assert list(crew.in_order(abs, [])) == []


# Errors and warnings --------------------------------------------------------------------------


class Keyed(Exception):
    """Neither pickle nor its parts can make it again."""

    def __new__(cls, *, path: str) -> Keyed:
        return super().__new__(cls)

    def __init__(self, *, path: str) -> None:
        super().__init__(f"of {path}")


def _raises(kind: str, i: int) -> int:
    if i == 0:
        return i
    warnings.warn("before it failed", UserWarning, stacklevel=1)
    if kind == "damage":
        raise DamagedFileError("some.ope", 17, "of item 1", "do this")
    if kind == "file":
        Path(f"/missing/{i}.ope").read_bytes()
    elif kind == "bytes":
        b"\xff".decode()
    elif kind == "lock":
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error
    raise Keyed(path="here")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("damage", DamagedFileError, r"some\.ope: of item 1 \(byte 17\); do this"),
        ("file", FileNotFoundError, r"No such file or directory: '/missing/1\.ope'"),
        ("bytes", UnicodeDecodeError, "can't decode byte 0xff"),
        ("lock", WorkerError, "ValueError: with a lock"),
        ("keyed", WorkerError, "Keyed: of here"),
    ],
)
def test_an_error_says_the_same_as_without_workers(
    crew: Workers, kind: str, error: type[Exception], words: str
) -> None:
    with (
        pytest.warns(UserWarning, match="before it failed"),
        pytest.raises(error, match=words) as caught,
    ):
        list(crew.in_order(partial(_raises, kind), [0, 1]))
    cause = str(caught.value.__cause__)
    assert cause.startswith("item 1 failed in a worker process:\nTraceback")
    assert "_raises" in cause  # where it was raised
    if isinstance(caught.value, OSError):
        assert caught.value.filename == "/missing/1.ope"
    if isinstance(caught.value, DamagedFileError):
        assert caught.value.offset == 17


def _fails_beside(others: list[str], checkpoint: Any, i: int) -> None:
    """Fail as soon as another item is computed, which takes a minute unless it is stopped."""
    deadline = time.monotonic() + 60
    try:
        if i:
            others.append("begun")
        while (i or not others) and time.monotonic() < deadline:
            time.sleep(0.001)
            checkpoint(0)
    except WorkerError:
        time.sleep(0.1)
        others.append("stopped")
        raise
    raise ValueError(f"of item {i}")


def test_an_error_in_a_thread_stops_the_others_and_waits_for_them() -> None:
    others, before = list[str](), {*threading.enumerate()}
    with (
        pytest.raises(ValueError, match="of item 0") as caught,
        start_workers(2) as those,
        nullcontext(those.within(True)) as threads,
    ):
        list(threads.in_order(partial(_fails_beside, others, threads.checkpoint), range(9)))
    assert others.count("stopped") == others.count("begun")
    assert {*threading.enumerate()} <= before
    assert [entry.name for entry in caught.traceback][-1] == "_fails_beside"
    assert caught.value.__cause__ is None


def _warns(others: list[int], i: int) -> int:
    deadline = time.monotonic() + 60
    while i == 0 and not others and time.monotonic() < deadline:
        time.sleep(0.001)
    for _ in range(2):
        warnings.warn(f"of item {i}", UserWarning, stacklevel=1)
    others.append(i)
    if i == 3:
        raise ValueError("after it warned")
    return i


def test_warnings_of_threads_come_in_the_order_of_the_items() -> None:
    others: list[int] = []
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as caught, start_workers(2) as those:
        warnings.simplefilter("always")
        results = those.within(True).in_order(partial(_warns, others), range(9))
        for i in itertools.islice(results, 3):
            warnings.warn(f"of the caller after {i}", UserWarning, stacklevel=1)
        with pytest.raises(ValueError, match="after it warned"):
            next(results)
    assert others[0] != 0
    said = [x for i in range(3) for x in [f"item {i}"] * 2 + [f"the caller after {i}"]]
    assert [str(x.message)[3:] for x in caught] == [*said, "item 3", "item 3"]
    assert warnings.showwarning is before


def test_a_missing_file_is_named_by_workers(crew: Workers, files: list[Path]) -> None:
    missing = files[0].with_name("missing.ope")
    with pytest.raises(FileNotFoundError, match=r"missing\.ope"):
        open_source([*files, missing], None, 150, crew)


def test_what_cannot_be_sent_is_named(crew: Workers) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"item 1 cannot be sent .* use workers=1 without Ray"):
        list(crew.in_order(id, [0, lock]))
    with pytest.raises(TypeError, match="the function, with what it refers to, cannot be sent"):
        list(crew.in_order(lambda i: (lock, i), [0, 1]))
    with pytest.raises(TypeError, match="the result cannot be sent"):
        list(crew.in_order(lambda i: threading.Lock(), [0, 1]))
    offset = 3
    assert list(crew.in_order(lambda i: i + offset, [1, 2])) == [4, 5]


def test_impossible_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (0, "2", None, 1.5):
        with pytest.raises(ValueError, match=f"workers is {workers!r}"), start_workers(workers):  # type: ignore[arg-type]
            pass
    for address in ("", 3):
        with pytest.raises(ValueError, match=f"ray is {address!r}"), start_workers(ray=address):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError, match=r"workers is 2 and ray is True: .* give one of them"):
        Compute(workers=2, ray=True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with start_workers(ray=None) as here:
        assert not here.remote
    for ray in (True, "auto"):
        with pytest.raises(ImportError, match=r"pip install -e .*\[ray\]"), connected(ray):
            pass


# Ends -----------------------------------------------------------------------------------------


def _killed(i: int) -> int:
    if i == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_process_is_told_and_other_workers_are_left_alone(crew: Workers) -> None:
    mine = crew.in_order(abs, range(40))
    next(mine)
    with start_workers(2) as those:
        results = those.in_order(_killed, range(4))
        with pytest.raises(WorkerError, match=r"a worker process was killed, .* fewer workers"):
            list(results)
        with pytest.raises(WorkerError, match="a worker process was killed"):
            list(those.in_order(abs, range(4)))  # when an item is sent
    assert len(list(mine)) == 39


def _is_there(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_have_ended_when_their_folder_is_removed(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would write on, and the folder could not be removed."""
    others = set(multiprocessing.active_children())
    left: list[Any] = []

    class Watched(tempfile.TemporaryDirectory[str]):
        def cleanup(self) -> None:
            if Path(self.name).parent == tmp_path:
                children = set(multiprocessing.active_children()) - others
                # one that another thread has just waited for still counts as active
                left.append({child for child in children if _is_there(child.pid)})
            super().cleanup()

        def __exit__(self, *_: object) -> None:
            self.cleanup()

    def stop(steps: int) -> None:
        raise RuntimeError("of the user")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Watched)
    with pytest.raises(RuntimeError, match="of the user"):
        evaluate(
            files,
            TARGET,
            compute=Compute(workers=2, scratch=tmp_path, block_steps=150, progress=stop),
        )
    assert left == [set()]
    assert not list(tmp_path.iterdir())


def _waits(threads: bool, episodes: Any, held_out: Any, steps: int, crew: Workers) -> Any:
    """Keep a worker busy for a long time, and have more items wait."""
    those = crew.within(threads)
    function = partial(_noted, Path(episodes[0]).parent, checkpoint=those.checkpoint)
    return list(those.in_order(function, range(9)))


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_ends_its_workers(
    number: signal.Signals, tmp_path: Path, threads: bool
) -> None:
    from tests.test_studies import _alive

    path, scratch = tmp_path / "run.ope", tmp_path / "scratch"
    scratch.mkdir()
    made(0, 3, 20).save(path)
    code = (
        "import functools, runpy, sys\n"
        "from ope_gym import cli\n"
        "from tests.test_workers import _waits\n"
        f"cli.open_source = functools.partial(_waits, {threads})\n"
        f"words = ['evaluate', {str(path)!r}, '--workers', '2', '--scratch', {str(scratch)!r}]\n"
        "sys.argv = ['ope_gym', *words]\n"
        "runpy.run_module('ope_gym', run_name='__main__')\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in "01") and time.monotonic() < deadline:
        assert started.poll() is None
        time.sleep(0.01)
    assert len(list(scratch.iterdir())) == 1
    if number == signal.SIGINT:
        os.killpg(started.pid, number)  # as a terminal does: to the workers, too
    else:
        started.terminate()
    _, said = started.communicate(timeout=60)
    # nor is a semaphore left behind
    assert (started.returncode, said) == (128 + number, "\nstopped\n")
    assert not list(scratch.iterdir())
    while _alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(started.pid)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ope_gym.scale.workers import start_workers\n"
        "def double(i):\n"
        "    return 2 * i\n"
        "with start_workers(2) as crew:\n"
        "    print(list(crew.in_order(double, [1, 2])))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4]\n", "")


# One thread, and what is sent -----------------------------------------------------------------


def _threads(_: int) -> tuple[set[int], str | None]:
    threads = {library["num_threads"] for library in threadpool_info()}
    return threads, os.environ.get("OMP_NUM_THREADS")


def test_an_item_is_computed_in_one_thread(crew: Workers) -> None:
    """Sums in several threads have other bits; the user's own process stays as it is."""
    before = os.environ.get("OMP_NUM_THREADS")
    assert list(crew.in_order(_threads, [0, 1])) == [({1}, "1"), ({1}, "1")]
    with threadpool_limits(2):
        assert list(Workers().in_order(_threads, [0])) == [({1}, before)]
        assert _threads(0)[0] == {2}


def _threads_when_the_other_has_left(left: threading.Event, i: int) -> set[int]:
    if i:
        left.wait(60)
        time.sleep(0.1)  # in which the other thread leaves, too
    threads = {library["num_threads"] for library in threadpool_info()}
    if not i:
        left.set()
    return threads


def test_threads_that_overlap_hold_libraries_to_one_thread() -> None:
    """The first one that is done does not give the others more than one."""
    with threadpool_limits(2, user_api="blas"):
        with start_workers(2) as those:
            function = partial(_threads_when_the_other_has_left, threading.Event())
            assert list(those.within(True).in_order(function, [0, 1])) == [{1}, {1}]
        assert 2 in _threads(0)[0]


class Unpacked:
    """Counts how often it is made from bytes."""

    made = 0

    def __call__(self, item: int) -> int:
        return Unpacked.made

    def __setstate__(self, state: dict[str, Any]) -> None:
        Unpacked.made += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"not": "empty"}


def test_the_function_is_unpacked_once_and_policies_are_not_sent_with_every_task(
    files: list[Path],
) -> None:
    function = cloudpickle.dumps(Unpacked())
    found = [compute(function, cloudpickle.dumps(i), "here") for i in range(3)]
    assert [cloudpickle.loads(one).result for one in found] == [1, 1, 1]
    for task in open_source(files, None, 150, Workers()).tasks:
        assert b"LinearSigmoid" not in cloudpickle.dumps(task)


# Evaluations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


def test_threads_give_the_same_bits(files: list[Path], tmp_path: Path) -> None:
    """With a scratch folder and without; and progress is told to the calling thread."""
    options: dict[str, Any] = {"gamma": 0.95, "q_model": LinearQ(), "interval": Bootstrap(50)}
    kinds: list[Any] = []
    for workers, scratch in ((1, None), (2, None), (2, tmp_path), (5, None)):
        seen: list[tuple[int, int]] = []

        def told(steps: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((steps, threading.get_ident()))

        compute = Compute(workers, block_steps=150, scratch=scratch, progress=told)
        evaluator = Evaluator(files, [*ESTIMATORS, "auto"], compute=compute, seed=1, **options)
        kinds.append(evaluator.evaluate(TARGET))
        assert sum(steps for steps, _ in seen) == evaluator.passes(TARGET) * evaluator.steps
        assert {thread for _, thread in seen} == {threading.get_ident()}
        assert not list(tmp_path.iterdir())
    for other in kinds[1:]:
        assert_same(kinds[0], other)


class OwnTarget(LinearSigmoid):
    """A policy of a user, whose code may be anything."""


def _own_features(batch: Any) -> Any:
    return np.asarray(batch, dtype=np.float64)


@pytest.mark.usefixtures("shared_crew")
@pytest.mark.parametrize("own", ["nothing", "policy", "features", "function", "many steps"])
def test_code_of_a_user_and_many_steps_with_a_q_model_take_processes(
    own: str, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such code may hold the interpreter's lock, or change something as it runs."""
    if own == "many steps":
        monkeypatch.setattr(passes, "_WORTH_STARTING", 1)
    sent: list[tuple[str, Any]] = []
    for pool in (LocalThreads, LocalProcesses):
        send = pool.send

        def noted(
            self: Any, function: Any, item: Any, name: str, pool: Any = pool, send: Any = send
        ) -> Any:
            sent.append((pool.__name__, type(item)))
            return send(self, function, item, name)

        monkeypatch.setattr(pool, "send", noted)
    given: list[Any] = [*files, *functions([made(9, 10, 20)])] if own == "function" else files
    evaluate(
        given,
        OwnTarget(TARGET.theta) if own == "policy" else TARGET,
        ["NFIS", "DM"],
        q_model=LinearQ(features=_own_features if own == "features" else None),
        compute=Compute(2, block_steps=150),
    )
    assert {pool for pool, kind in sent if kind is Item} == {
        "LocalThreads" if own == "nothing" else "LocalProcesses"
    }
    assert {pool for pool, kind in sent if kind is not Item} == {
        "LocalProcesses" if own == "function" else "LocalThreads"
    }


def test_threads_do_not_wait_for_each_other_in_cached_properties() -> None:
    """functools' own holds a lock for all objects of a class before Python 3.12."""
    together = threading.Barrier(2)

    class Meeting(OwnTarget):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            together.wait(10)
            return super().log_prob(observations, actions)

    with start_workers(2) as those:
        ask = those.within(True).in_order(
            lambda seed: Answers(Meeting(TARGET.theta), made(seed, 5, 9)).log_probs, [0, 1]
        )
        assert [x.size for x in ask] == [45, 45]


@pytest.mark.usefixtures("shared_crew")
def test_processes_give_the_same_bits(files: list[Path], tmp_path: Path) -> None:
    """With a scratch folder and without; of files, of trajectories and of functions."""
    episodes: list[Any] = [*files, made(7, 10, 20), lambda: made(8, 10, 20)]
    options: dict[str, Any] = {"gamma": 0.95, "q_model": LinearQ(), "interval": Bootstrap(50)}
    kinds: list[Any] = []
    for workers, scratch in ((1, None), (1, tmp_path), (2, None), (2, tmp_path)):
        seen: list[int] = []
        compute = Compute(workers, block_steps=150, scratch=scratch, progress=seen.append)
        evaluator = Evaluator(episodes, ESTIMATORS, compute=compute, seed=1, **options)
        kinds.append(evaluator.evaluate(TARGET))
        assert sum(seen) == evaluator.passes(TARGET) * evaluator.steps
        assert evaluator.passes(TARGET) == 4  # two of them for the q model
        assert not list(tmp_path.iterdir())
    for other in kinds[1:]:
        assert_same(kinds[0], other)
    data = [Trajectories.load(path) for path in files]
    together = data[0].merge(*data[1:], made(7, 10, 20), made(8, 10, 20))
    assert_same(kinds[0], evaluate(together, TARGET, ESTIMATORS, seed=1, **options), rtol=1e-8)
    compute = Compute(2)  # who read all at once, too
    whole = evaluate(episodes, TARGET, ESTIMATORS, seed=1, compute=compute, **options)
    assert_same(whole, evaluate(together, TARGET, ESTIMATORS, seed=1, **options))


@pytest.mark.usefixtures("shared_crew")
@pytest.mark.parametrize(
    ("names", "mixture"), [(["auto", "NFIS", "MAGIC"], "auto"), (["FIS", "NFIS", "OUIS"], 3)]
)
def test_auto_magic_and_partial_mixtures_by_processes(
    files: list[Path], names: list[str], mixture: str | int
) -> None:
    one, two = (
        evaluate(
            files,
            TARGET,
            names,
            gamma=0.95,
            interval=Bootstrap(50),
            q_model=LinearQ(),
            weighting=Weighting(mixture=mixture),
            compute=Compute(workers, block_steps=150),
            seed=1,
        )
        for workers in (1, 2)
    )
    assert_same(one, two)
    assert [e.report for e in one.values()] == [e.report for e in two.values()]


@pytest.mark.usefixtures("shared_crew")
def test_policies_that_change_during_episodes_by_processes() -> None:
    parts = [clocked(i, [[[0.5, 0.5]], [[0.3, 0.7]]], 15).view() for i in range(3)]
    assert all((part.schedule_ids >= 0).any() for part in parts)
    one, two = (
        evaluate(
            functions(parts),
            "last",
            ["BIS", "NFIS", "auto"],
            interval=Bootstrap(20),
            compute=Compute(workers, block_steps=20),
        )
        for workers in (1, 2)
    )
    assert_same(one, two)
    assert one.sample.behaviours == two.sample.behaviours


class Same:
    """A policy that equals only itself."""

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return np.full(len(actions), np.log(0.5))

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return rng.integers(2, size=len(observations))


def test_policies_without_equality(crew: Workers) -> None:
    """Trajectories in memory keep theirs; copies that functions make elsewhere are refused."""
    policy = Same()
    parts: list[Any] = [
        dataclasses.replace(data, policies=(policy,), policy_ids=0 * data.policy_ids)
        for data in (made(0, 5, 9), made(1, 5, 9))
    ]
    for who in (Workers(), crew):
        source = open_source(parts, None, 30, who)
        assert source.policies == (policy,)
        assert len(source.roster) == 10
    found = open_source(functions(parts), None, 30, Workers())
    assert found.policies == (policy,)
    with pytest.raises(TypeError, match=r"episodes\[0\] has the policy .* without __eq__"):
        open_source([lambda: parts[0], lambda: parts[1]], None, 30, crew)
