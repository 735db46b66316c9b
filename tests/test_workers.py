"""Who computes changes nothing: one process or several, the same numbers, errors and warnings."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError
from threadpoolctl import threadpool_info

from ope_gym import Bootstrap, Compute, Evaluator, Trajectories, Weighting, evaluate
from ope_gym.models.linear import LinearQ
from ope_gym.policies import LinearSigmoid
from ope_gym.preparing.files import Item
from ope_gym.scale import ray as ray_tasks
from ope_gym.scale.sources import open_source
from ope_gym.scale.workers import Packed, Workers
from ope_gym.weights.answers import Answers
from tests.builders import assert_same
from tests.file_builders import clocked, functions, made, mixed_files

ROOT = Path(__file__).parents[1]
ESTIMATORS = ["BIS", "NBCIS", "NFIS", "DM", "DR", "FWDR"]
TARGET = LinearSigmoid(np.full(3, 0.3))


# Order, errors and warnings -------------------------------------------------------------------


def _slower_at_first(i: int) -> tuple[int, int]:
    time.sleep(0.3 if i == 0 else 0.0)
    return i, os.getpid()


@pytest.mark.parametrize("threads", [False, True])
def test_results_come_in_order(threads: bool) -> None:
    found = list(Workers(2).in_order(_slower_at_first, range(9), threads=threads))
    assert [i for i, _ in found] == list(range(9))
    assert (os.getpid() in {pid for _, pid in found}) == threads
    assert list(Workers(2).in_order(abs, [], threads=threads)) == []


def _raises(i: int) -> int:
    if i:
        Path(f"/missing/{i}.ope").read_bytes()
    return i


def _warns(i: int) -> int:
    warnings.warn("of an item", UserWarning, stacklevel=1)
    return i


@pytest.mark.parametrize("threads", [False, True])
def test_errors_and_warnings_come_as_without_workers(threads: bool) -> None:
    with pytest.warns(UserWarning, match="of an item"):
        assert list(Workers(2).in_order(_warns, [0, 1], threads=threads)) == [0, 1]
    with pytest.raises(FileNotFoundError, match=r"directory: '/missing/1\.ope'") as caught:
        list(Workers(2).in_order(_raises, [0, 1], threads=threads))
    assert caught.value.filename == "/missing/1.ope"


def test_a_missing_file_is_named_by_workers(files: list[Path]) -> None:
    missing = files[0].with_name("missing.ope")
    with pytest.raises(FileNotFoundError, match=r"missing\.ope"):
        open_source([*files, missing], None, 150, Workers(2))


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to another process .* use workers=1"):
        list(Workers(2).in_order(lambda i: (lock, i), [0, 1]))
    offset = 3
    assert list(Workers(2).in_order(lambda i: i + offset, [1, 2])) == [4, 5]


def test_impossible_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible: Any
    for impossible in (0, "2", None, 1.5):
        with pytest.raises(ValueError, match=f"workers is {impossible!r}"):
            Workers(impossible)
    for impossible in ("", 3):
        with pytest.raises(ValueError, match=f"ray is {impossible!r}"):
            Workers(ray=impossible)
    with pytest.raises(ValueError, match=r"workers is 2 and ray is True: .* give one of them"):
        Workers(2, True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install -e .*\[ray\]"):
        ray_tasks.connect(True)


# Ends -----------------------------------------------------------------------------------------


def _killed(i: int) -> int:
    if i == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_process_is_told_and_the_next_work_has_new_ones() -> None:
    with pytest.raises(TerminatedWorkerError, match="excessive memory usage"):
        list(Workers(2).in_order(_killed, range(4)))
    assert list(Workers(2).in_order(abs, [-1, -2])) == [1, 2]


def _waits(threads: bool, episodes: Any, held_out: Any, steps: int, workers: Workers) -> Any:
    """Keep the workers busy for a long time, and have more items wait."""
    wait = partial(_wait, Path(episodes[0]).parent)
    return list(workers.in_order(wait, range(9), threads=threads))


def _wait(folder: Path, i: int) -> None:
    (folder / str(i)).touch()
    for _ in range(600):
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_ends_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    from tests.test_studies import _alive

    path = tmp_path / "run.ope"
    made(0, 3, 20).save(path)
    code = (
        "import functools, runpy, sys\n"
        "from ope_gym.scale import sources\n"
        "from tests.test_workers import _waits\n"
        "sources.open_source = functools.partial(_waits, False)\n"
        f"sys.argv = ['ope_gym', 'evaluate', {str(path)!r}, '--workers', '2']\n"
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
    if number == signal.SIGINT:
        os.killpg(started.pid, number)  # as a terminal does: to the workers, too
    else:
        started.terminate()
    _, said = started.communicate(timeout=60)
    assert (started.returncode, said) == (128 + number, "\nstopped\n")
    while _alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(started.pid)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ope_gym.scale.workers import Workers\n"
        "def double(i):\n"
        "    return 2 * i\n"
        "print(list(Workers(2).in_order(double, [1, 2])))\n"
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


def _threads(_: int) -> set[int]:
    return {library["num_threads"] for library in threadpool_info()}


def test_a_process_has_one_thread() -> None:
    assert list(Workers(2).in_order(_threads, [0, 1])) == [{1}, {1}]


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
    packed = Packed(cloudpickle.dumps(Unpacked()))
    assert [packed(i) for i in range(3)] == [(1, [])] * 3
    for task in open_source(files, None, 150, Workers()).tasks:
        assert b"LinearSigmoid" not in cloudpickle.dumps(task)


# Evaluations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


class OwnTarget(LinearSigmoid):
    """A policy of a user, whose code may be anything."""


def _own_features(batch: Any) -> Any:
    return np.asarray(batch, dtype=np.float64)


@pytest.mark.parametrize("own", ["nothing", "policy", "features", "function", "many steps"])
def test_code_of_a_user_and_many_steps_with_a_q_model_take_processes(
    own: str, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such code may hold the interpreter's lock, or change something as it runs."""
    if own == "many steps":
        monkeypatch.setattr("ope_gym.preparing.files._WORTH_STARTING", 1)
    seen: dict[bool, set[bool]] = {True: set(), False: set()}  # by whether they are tasks: threads
    compute = Workers.in_order

    def noted(self: Workers, function: Any, items: Any, *, threads: bool = False) -> Any:
        seen[isinstance(items[0], Item)].add(threads)
        return compute(Workers(), function, items)

    monkeypatch.setattr(Workers, "in_order", noted)
    given: list[Any] = [*files, *functions([made(9, 10, 20)])] if own == "function" else files
    evaluate(
        given,
        OwnTarget(TARGET.theta) if own == "policy" else TARGET,
        ["NFIS", "DM"],
        q_model=LinearQ(_own_features) if own == "features" else LinearQ(),
        compute=Compute(2, block_steps=150),
    )
    assert seen == {True: {own == "nothing"}, False: {own != "function"}}


def test_threads_do_not_wait_for_each_other_in_cached_properties() -> None:
    """functools' own holds a lock for all objects of a class before Python 3.12."""
    together = threading.Barrier(2)

    class Meeting(OwnTarget):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            together.wait(10)
            return super().log_prob(observations, actions)

    def ask(seed: int) -> Any:
        return Answers(Meeting(TARGET.theta), made(seed, 5, 9)).log_probs

    assert [x.size for x in Workers(2).in_order(ask, [0, 1], threads=True)] == [45, 45]


@pytest.mark.parametrize("threads", [False, True])
def test_workers_give_the_same_numbers(files: list[Path], threads: bool) -> None:
    """By threads of files alone, by processes of trajectories and functions, too."""
    episodes: list[Any] = (
        [*files] if threads else [*files, made(7, 10, 20), partial(made, 8, 10, 20)]
    )
    options: dict[str, Any] = {"gamma": 0.95, "q_model": LinearQ(), "interval": Bootstrap(50)}
    kinds: list[Any] = []
    for workers in (1, 2, 3):
        seen: list[tuple[int, int]] = []

        def told(steps: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((steps, threading.get_ident()))

        compute = Compute(workers, block_steps=150, progress=told)
        evaluator = Evaluator(episodes, ESTIMATORS, compute=compute, seed=1, **options)
        kinds.append(evaluator.evaluate(TARGET))
        assert sum(steps for steps, _ in seen) == evaluator.passes(TARGET) * evaluator.steps
        assert {thread for _, thread in seen} == {threading.get_ident()}
        assert evaluator.passes(TARGET) == 4  # two of them for the q model
    for other in kinds[1:]:
        assert_same(kinds[0], other, rtol=1e-12)
    if threads:
        return
    data = [Trajectories.load(path) for path in files]
    together = data[0].merge(*data[1:], made(7, 10, 20), made(8, 10, 20))
    assert_same(kinds[0], evaluate(together, TARGET, ESTIMATORS, seed=1, **options), rtol=1e-8)
    compute = Compute(2)  # who read all at once, too
    whole = evaluate(episodes, TARGET, ESTIMATORS, seed=1, compute=compute, **options)
    assert_same(whole, evaluate(together, TARGET, ESTIMATORS, seed=1, **options))


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
    assert_same(one, two, rtol=1e-12)


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


def test_policies_without_equality() -> None:
    """Trajectories in memory keep theirs; copies that functions make elsewhere are refused."""
    policy = Same()
    parts: list[Any] = [
        dataclasses.replace(data, policies=(policy,), policy_ids=0 * data.policy_ids)
        for data in (made(0, 5, 9), made(1, 5, 9))
    ]
    for who in (Workers(), Workers(2)):
        source = open_source(parts, None, 30, who)
        assert source.policies == (policy,)
        assert len(source.roster) == 10
    found = open_source(functions(parts), None, 30, Workers())
    assert found.policies == (policy,)
    with pytest.raises(TypeError, match=r"episodes\[0\] has the policy .* without __eq__"):
        open_source([lambda: parts[0], lambda: parts[1]], None, 30, Workers(2))
