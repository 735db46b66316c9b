"""Who computes changes nothing: one process or several, the same bits, errors and warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from ope_gym.scale.crews import _Processes, crew
from ope_gym.scale.tasks import _AHEAD, Crew, WorkerError, answer
from threadpoolctl import threadpool_info, threadpool_limits

from ope_gym import LinearSigmoid, Trajectories, evaluate
from ope_gym.__main__ import main as command
from ope_gym.data.blocks import DamagedFileError
from ope_gym.models.linear import LinearQ
from ope_gym.options import check_options
from ope_gym.scale.ray import connected
from ope_gym.scale.shard_tasks import Setting, weight_pass
from ope_gym.scale.sharded import evaluate_shards, evaluate_survey
from ope_gym.scale.sources import survey
from ope_gym.scale.spool import Spool, scratch_folder
from tests.builders import assert_same, recorded
from tests.test_sharded import made, record, split

ROOT = Path(__file__).parents[1]
ESTIMATORS = ["BIS", "NBCIS", "NFIS", "DM", "DR", "FWDR"]
TARGET = LinearSigmoid(np.full(3, 0.3))


@pytest.fixture(scope="module")
def hands() -> Iterator[Crew]:
    with crew(workers=2) as made:
        yield made


def _square(i: int) -> tuple[int, int]:
    return i * i, os.getpid()


def _noted(folder: Path, i: int) -> int:
    (folder / str(i)).touch()
    deadline = time.monotonic() + 60
    while i == 0 and not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return i


def test_results_come_as_they_finish_or_in_order(hands: Crew, tmp_path: Path) -> None:
    found = dict(hands.run(_square, range(12)))
    assert [found[i][0] for i in range(12)] == [i * i for i in range(12)]
    assert os.getpid() not in {pid for _, pid in found.values()}
    results = hands.run(partial(_noted, tmp_path), range(4))  # 0 waits for the others
    assert sorted(next(results)[0] for _ in range(3)) == [1, 2, 3]
    (tmp_path / "go").touch()
    assert list(results) == [(0, 0)]
    assert [value for value, _ in hands.in_order(_square, range(12))] == [i * i for i in range(12)]
    assert list(hands.run(_square, [])) == []


def test_few_items_are_ahead_of_the_oldest(hands: Crew, tmp_path: Path) -> None:
    """So that results which wait for their turn take bounded memory."""
    ahead = 2 * _AHEAD
    results = hands.run(partial(_noted, tmp_path), range(3 * ahead))
    others = [next(results)[0] for _ in range(ahead - 1)]
    assert sorted(others) == list(range(1, ahead))
    (tmp_path / "late").touch()
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(ahead)), "late"}
    (tmp_path / "go").touch()
    assert sorted(index for index, _ in results) == [0, *range(ahead, 3 * ahead)]


def _fails(i: int) -> int:
    if i == 2:
        raise DamagedFileError("some.ope", 17, "of item 2", "do this")
    if i == 1:
        warnings.warn("of item 1", UserWarning, stacklevel=1)
    return i


def test_errors_and_warnings_come_as_themselves(hands: Crew) -> None:
    with pytest.warns(UserWarning, match="of item 1"):
        assert list(hands.in_order(_fails, [0, 1])) == [0, 1]
    with pytest.raises(DamagedFileError, match=r"some\.ope: of item 2") as caught:
        list(hands.in_order(_fails, [2, 2]))
    assert caught.value.offset == 17
    assert "_fails" in str(caught.value.__cause__)  # where it was raised


class Keyed(Exception):
    """Pickle cannot make it again, nor can its parts."""

    def __new__(cls, *, path: str) -> Keyed:
        return super().__new__(cls)

    def __init__(self, *, path: str) -> None:
        super().__init__(f"of {path}")


def _raises(kind: str, i: int) -> None:
    warnings.warn("before it failed", UserWarning, stacklevel=1)
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
        ("file", FileNotFoundError, r"No such file or directory: '/missing/\d\.ope'"),
        ("bytes", UnicodeDecodeError, "can't decode byte 0xff"),
        ("lock", WorkerError, "ValueError: with a lock"),
        ("keyed", WorkerError, "Keyed: of here"),
    ],
)
def test_an_error_says_the_same_as_without_workers(
    hands: Crew, kind: str, error: type[Exception], words: str
) -> None:
    with (
        pytest.warns(UserWarning, match="before it failed"),
        pytest.raises(error, match=words) as caught,
    ):
        list(hands.run(partial(_raises, kind), [1, 2]))
    assert "_raises" in str(caught.value.__cause__)
    if isinstance(caught.value, OSError):
        assert caught.value.filename.startswith("/missing/")


def test_a_missing_file_is_named_by_workers(hands: Crew, files: list[Path]) -> None:
    missing = files[0].with_name("missing.ope")
    with pytest.raises(FileNotFoundError, match=r"missing\.ope"):
        survey([*files, missing], "all", 150, hands)


def test_what_cannot_be_sent_is_named(hands: Crew) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"item 1 cannot be sent .* use workers=1 without Ray"):
        list(hands.run(_fails, [0, lock]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="what the workers share cannot be sent"):
        list(hands.run(lambda i: (lock, i), [0, 1]))
    offset = 3
    assert list(hands.in_order(lambda i: i + offset, [1, 2])) == [4, 5]


def _killed(i: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return i


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_process_is_told() -> None:
    with (
        pytest.raises(WorkerError, match="a worker process was killed"),
        crew(workers=2) as those,
    ):
        list(those.run(_killed, range(4)))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_process_killed_between_two_items_is_told() -> None:
    """When an item is sent, not when a result is awaited."""
    with crew(workers=2) as those:
        assert isinstance(those, _Processes)
        list(those.run(abs, range(4)))
        those._context.started()[0].kill()
        deadline = time.monotonic() + 60
        while not those._pool._broken and time.monotonic() < deadline:  # until it has noticed
            time.sleep(0.01)
        with pytest.raises(WorkerError, match=r"^a worker process was killed"):
            list(those.run(abs, range(4)))


def test_crews_of_other_threads_are_left_alone() -> None:
    with crew(workers=2) as mine:
        results = mine.run(abs, range(40))
        with contextlib.suppress(RuntimeError), crew(workers=2):
            next(results)  # these workers were born after the other crew began
            raise RuntimeError
        assert len(list(results)) == 39


@pytest.mark.parametrize("chosen", [None, "3"])
def test_workers_use_one_thread_each(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says otherwise; the user's own process stays as it is."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    with crew(workers=2) as those:
        assert list(those.in_order(os.getenv, ["OMP_NUM_THREADS"] * 2)) == [chosen or "1"] * 2
    assert os.environ.get("OMP_NUM_THREADS") == chosen


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ope_gym.scale.crews import crew\n"
        "with crew(workers=2) as hands:\n"
        "    list(hands.run(abs, [1, 2]))\n"
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
    assert done.returncode == 1
    assert 'call this under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_impossible_crews_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (0, "2", None, 1.5):
        with pytest.raises(ValueError, match=f"workers is {workers!r}"), crew(workers=workers):  # type: ignore[arg-type]
            pass
    for address in ("", 3):
        with pytest.raises(ValueError, match=f"ray is {address!r}"), crew(ray=address):  # type: ignore[arg-type]
            pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with crew(ray=None) as here:
        assert not here.remote
    for ray in (True, "auto"):
        with pytest.raises(ImportError, match=r"pip install -e .*\[ray\]"), connected(ray):
            pass


# Shards ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Saved in one block, and recorded episode by episode; large and small."""
    folder = tmp_path_factory.mktemp("files")
    sizes = [1, 30, 2, 3, 25]
    paths = [folder / f"{i}.ope" for i in range(len(sizes))]
    for i, path in enumerate(paths):
        data = made(i, episodes=sizes[i], length=20)
        record(data, path) if i % 2 else data.save(path)
    return paths


def test_processes_give_the_same_bits(hands: Crew, files: list[Path], tmp_path: Path) -> None:
    shards: list[Any] = [*files, made(7, 10, 20), lambda: made(8, 10, 20)]
    options = check_options(ESTIMATORS, 0.95, 10.0, "percentile", 0.95, 1, 50, None, None)
    kinds: list[Any] = []
    for who, scratch in ((Crew(), None), (Crew(), tmp_path), (hands, None), (hands, tmp_path)):
        seen: list[int] = []
        found = survey(shards, "all", 150, who)
        with scratch_folder(scratch) as folder:
            kinds.append(
                evaluate_survey(
                    found,
                    TARGET,
                    options,
                    who,
                    q_model=LinearQ(),
                    folder=folder,
                    progress=seen.append,
                )
            )
        assert sum(seen) == 4 * found.mixture.steps  # two of them for the q model
        assert not list(tmp_path.iterdir())
        assert sum(task.name == str(files[1]) for task in found.tasks) > 2  # it is cut
    data = [Trajectories.load(path) for path in files]
    together = data[0].merge(*data[1:], made(7, 10, 20), made(8, 10, 20))
    for other in kinds[1:]:
        assert_same(kinds[0], other)
    single = survey(shards, "all", 10**6, Crew())
    assert len(single.tasks) == 1
    assert_same(
        kinds[0], evaluate_survey(single, TARGET, options, Crew(), q_model=LinearQ()), rtol=1e-8
    )
    plain = evaluate(together, TARGET, estimators=ESTIMATORS, gamma=0.95, q_model=LinearQ())
    for name, estimate in kinds[0].items():
        assert estimate.value == pytest.approx(plain[name].value, rel=1e-9)


@pytest.mark.parametrize(
    ("estimators", "options"), [(["auto", "NFIS"], {}), (["FIS", "NFIS", "OUIS"], {"mixture": 3})]
)
def test_auto_and_partial_mixtures_by_processes(
    hands: Crew, files: list[Path], estimators: list[str], options: dict[str, Any]
) -> None:
    asked = check_options(estimators, 0.95, 10.0, "percentile", 0.95, 1, 50, None, None)
    one, two = (
        evaluate_survey(
            survey(files, "all", 150, who), TARGET, asked, who, q_model=LinearQ(), **options
        )
        for who in (Crew(), hands)
    )
    assert_same(one, two)
    assert [e.report for e in one.values()] == [e.report for e in two.values()]


class Unpacked:
    """Counts how often it is made from bytes."""

    made = 0

    def __call__(self, item: int) -> int:
        return Unpacked.made

    def __setstate__(self, state: dict[str, Any]) -> None:
        Unpacked.made += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"not": "empty"}


def test_what_the_workers_share_is_unpacked_once() -> None:
    function = cloudpickle.dumps(Unpacked())
    found = [answer(function, cloudpickle.dumps(i)) for i in range(3)]
    assert [cloudpickle.loads(one)[0] for one in found] == [1, 1, 1]


def _threads(_: int) -> set[int]:
    return {library["num_threads"] for library in threadpool_info()}


def test_an_item_is_computed_in_one_thread() -> None:
    """Sums in several threads have other bits."""
    with threadpool_limits(2):
        assert _threads(0) == {2}
        assert list(Crew().in_order(_threads, [0, 1])) == [{1}, {1}]


class Same:
    """A policy that equals only itself."""

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return np.full(len(actions), np.log(0.5))

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return rng.integers(2, size=len(observations))


def test_policies_without_equality(hands: Crew) -> None:
    """Trajectories in memory keep theirs; copies that functions make elsewhere are refused."""
    policy = Same()
    parts: list[Any] = [
        dataclasses.replace(data, policies=(policy,), policy_ids=0 * data.policy_ids)
        for data in (made(0, 5, 9), made(1, 5, 9))
    ]
    for who in (Crew(), hands):
        mixture = survey(parts, "all", 30, who).mixture
        assert mixture.policies == (policy,)
        assert mixture.counts.tolist() == [10]
    with pytest.raises(TypeError, match=r"shard 0 has the policy .* without __eq__"):
        survey([lambda: parts[0], lambda: parts[1]], "all", 30, hands)


def test_tasks_know_what_comes_before_them() -> None:
    r = recorded(3, (9, 7, 5))
    parts = split(r.trajectories, 0, 6)
    found = survey(parts, "all", 15, Crew())
    mixture = found.mixture
    before = np.zeros_like(mixture.counts)
    setting = Setting(mixture, r.target, _plain(), held_out=False, steps=15)
    for task in found.tasks:
        np.testing.assert_array_equal(task.before, before[task.behaviours])
        part = weight_pass(setting, task)
        counts = np.bincount(np.concatenate(part.ids), minlength=before.size)
        np.testing.assert_array_equal(task.behaviours, np.flatnonzero(counts))
        np.testing.assert_array_equal(task.counts, counts[task.behaviours])
        assert task.episodes == slice(before.sum(), before.sum() + counts.sum())
        before = before + counts
    np.testing.assert_array_equal(before, mixture.counts)
    assert sum(task.steps for task in found.tasks) == mixture.steps == r.trajectories.n_steps


def _plain() -> Any:
    return check_options(["FIS", "NFIS"], 1.0, 10.0, "ess-t", 0.95, 0, 10, None, None)


def test_weights_that_are_not_in_the_folder_are_made_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that does not share it; one that was cut is an error."""
    found = survey(files, "all", 150, Crew())
    whole = evaluate_survey(found, TARGET, _plain(), Crew())

    class Forgetful(Crew):
        def run(self, function: Any, items: Any) -> Any:
            kept = sorted(tmp_path.glob("*/*"))
            for path in kept[::2]:
                path.unlink() if not cut else path.write_bytes(path.read_bytes()[:-5])
            yield from super().run(function, items)

    cut = False
    with scratch_folder(tmp_path) as folder:
        again = evaluate_survey(found, TARGET, _plain(), Forgetful(), folder=folder)
    assert_same(whole, again)
    cut = True
    with (
        pytest.raises(OSError, match="`scratch` was cut short"),
        scratch_folder(tmp_path) as folder,
    ):
        evaluate_survey(found, TARGET, _plain(), Forgetful(), folder=folder)
    assert not list(tmp_path.iterdir())


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
        evaluate_shards(files, TARGET, workers=2, block_steps=150, scratch=tmp_path, progress=stop)
    assert left == [set()]
    assert not list(tmp_path.iterdir())


def test_policies_are_not_sent_with_every_task(files: list[Path]) -> None:
    found = survey(files, "all", 150, Crew())
    for task in found.tasks:
        assert b"LinearSigmoid" not in cloudpickle.dumps(task)


def test_held_out_episodes_if_there_are_any() -> None:
    data = recorded(6, (30, 25)).trajectories
    some = np.arange(len(data)) % 3 == 0
    mixed = dataclasses.replace(data, held_out=some)
    none = dataclasses.replace(data, held_out=np.zeros(len(data), dtype=bool))
    for shards, which, count in (
        ([none, mixed], "auto", some.sum()),
        ([none, mixed], "all", 2 * len(data)),
        ([none], "auto", len(data)),
    ):
        with contextlib.ExitStack() as stack:
            if count == some.sum():
                words = r"shard 0: 0 of 55 episodes used, .*data='all'"
                stack.enter_context(pytest.warns(UserWarning, match=words))
            found = survey(shards, which, 50, Crew())
        assert found.mixture.trajectories == count
        assert sum(int(task.counts.sum()) for task in found.tasks) == count


# The command line -----------------------------------------------------------------------------


def test_several_files_from_the_command_line(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(path) for path in files]
    result = tmp_path / "result.json"
    arguments = ["evaluate", *names, "--target", "3", "--estimators", "NFIS", "FWDR", "--data"]
    assert command([*arguments, "all", "--json", str(result), "--workers", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"value of policy 3, of {names[0]}\n")
    data = [Trajectories.load(path) for path in files]
    together = data[0].merge(*data[1:])
    target = survey(files, "all", 1000, Crew()).mixture.policies[3]
    expected = evaluate(together, target, estimators=["NFIS", "FWDR"], q_model=LinearQ())
    found = json.loads(result.read_text())
    for name, estimate in expected.items():
        assert found["estimates"][name]["value"] == pytest.approx(estimate.value, rel=1e-9)
    kept = ["--scratch", str(tmp_path), "--workers", "1"]
    assert command([*arguments, "auto", *kept]) == 0
    assert capsys.readouterr().out == said.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is needed")
def test_a_table_is_not_lost_with_its_file(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["evaluate", str(files[1]), "--no-q-model", "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("value of policy ")
    assert "No space left" in said.err


def test_one_file_in_shards_from_the_command_line(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name, chosen = str(files[1]), ["--estimators", "NFIS", "BIS"]
    assert command(["evaluate", name, *chosen]) == 0
    usual = capsys.readouterr().out
    assert command(["evaluate", name, *chosen, "--shards"]) == 0
    assert capsys.readouterr().out == usual
    assert command(["evaluate", name, "--shards"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[4:9]] == [
        "BIS",
        "NBIS",
        "FIS",
        "NFIS",
        "auto",
    ]
    assert "; q model: LinearQ" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--estimators", "MAGIC"], "'MAGIC', which cannot be evaluated in shards"),
        (
            ["--interval", "betting", "--reward-range", "0", "1", "--horizon", "9"],
            "interval='betting' cannot be made from shards",
        ),
        (["--estimators", "DM", "--no-q-model"], "'DM', which needs a q model"),
        (["--target", "99"], "--target 99: there are policies 0 to"),
        (["--workers", "0"], "workers is 0"),
        (["--json", "missing/result.json"], "--json missing/result.json: cannot be written"),
        (["--json", "."], "--json .: cannot be written"),
        (["--json", "-"], "--json -: give the name of a file"),
        (["--scratch", "missing"], "--scratch missing: give a folder that exists"),
        (["--data", "held-out"], "no held-out episode"),
    ],
)
def test_what_the_command_line_refuses(
    files: list[Path], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [] if "--workers" in more else ["--workers", "1"]
    assert command(["evaluate", str(files[0]), str(files[2]), *more, *workers]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_a_stopped_command_ends_its_workers(tmp_path: Path) -> None:
    from tests.test_studies import _alive

    path = tmp_path / "run.ope"
    made(0, 3, 20).save(path)
    code = (
        "from ope_gym import __main__\nfrom ope_gym.scale import leaving, sources as shards\n"
        "from tests.test_tasks import _waits\n"
        "shards.survey = _waits\n"
        f"leaving.leave(__main__.main(['evaluate', {str(path)!r}, '--workers', '2']))\n"
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
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, said = started.communicate(timeout=60)
    assert (started.returncode, said) == (130, "\nstopped\n")  # nor is a semaphore left behind
    while _alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(started.pid)


def _waits(shards: Any, data: str, steps: int, hands: Crew) -> Any:
    """A worker is busy for a long time."""
    return list(hands.run(partial(_noted, Path(shards[0]).parent), range(2)))


def test_ray_takes_an_address_and_no_workers(
    files: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in (
        (["--ray", str(files[0])], "is no address of a Ray cluster"),
        ([str(files[0]), "--ray", "--workers", "2"], "not allowed with argument --ray"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(["evaluate", *arguments])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        command(["evaluate", "--help"])
    assert "auto, local (a new one here)" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setitem(sys.modules, "ray", None)
    assert command(["evaluate", str(files[0]), "--ray"]) == 2
    assert 'pip install -e ".[ray]" -c constraints.txt' in capsys.readouterr().err


def run_module(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ope_gym", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, **options)


def test_warnings_are_plain_lines(tmp_path: Path) -> None:
    paths = [tmp_path / "a.ope", tmp_path / "b.ope"]
    data = made(0, 6, 9)
    dataclasses.replace(data, held_out=np.ones(len(data), dtype=bool)).save(paths[0])
    other = made(1, 6, 9)
    dataclasses.replace(other, held_out=np.zeros(len(other), dtype=bool)).save(paths[1])
    done = run_module("evaluate", *map(str, paths), "--workers", "1", "--estimators", "NFIS")
    assert done.returncode == 0
    assert done.stderr == (
        f"warning: {paths[1]}: 0 of 6 episodes used, as none is held out; data='all' (--data all) "
        "takes them\n"
    )
    assert run_module("evaluate", *map(str, paths), "--workers", "1", "--data", "all").stderr == ""


def test_last_is_the_last_policy_of_the_last_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many, few, empty = (str(tmp_path / name) for name in ("many.ope", "few.ope", "empty.ope"))
    data = made(0, 12, 9)
    data.save(many)
    some = made(1, 12, 9).select(policies=[0, 1, 2])
    dataclasses.replace(some, policies=some.policies[:3]).save(few)
    chosen = ["--workers", "1", "--data", "all", "--estimators", "NFIS"]
    assert command(["evaluate", many, few, *chosen]) == 0
    assert capsys.readouterr().out.startswith(f"value of policy 2, of {few}\n")
    assert command(["evaluate", many, few, "--target", "5", *chosen]) == 0
    assert capsys.readouterr().out.startswith(f"value of policy 5, of {many}\n")
    Path(empty).write_bytes(Path(many).read_bytes()[:8])  # nothing but the magic number
    assert command(["evaluate", many, empty, *chosen]) == 2
    assert f"--target last: {empty}, the last file, holds no policy" in capsys.readouterr().err


def test_info_numbers_policies_over_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.ope", "b.ope")]
    for i, path in enumerate(paths):
        made(i, 12, 9).save(path)
    known = survey(paths, "all", 100, Crew()).mixture.policies
    assert command(["info", *paths]) == 0
    said = capsys.readouterr().out.splitlines()
    assert paths == [line for line in said if line in paths]
    for number, policy in enumerate(known):
        found = [line for line in said if line.startswith(f"policy {number}: ")]
        assert found
        assert all(line.endswith(repr(policy)) for line in found)


def test_info_numbers_the_policies_of_one_file_as_the_other_commands_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = made(0, 12, 9), tmp_path / "a.ope"
    first = data.policies[0]
    dataclasses.replace(data, policies=(first, first, *data.policies[2:])).save(path)
    assert command(["info", str(path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy ")]
    assert [line.split(":")[0] for line in said] == [f"policy {k}" for k in range(len(said))]
    assert len(said) == len(Trajectories.load(path).policies)


def test_a_damaged_file_names_a_remedy_that_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ope"
    made(0, 12, 9).save(path)
    good = path.read_bytes()
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    assert command(["evaluate", str(path)]) == 2
    assert "Trajectories.load(path, recover=True).save(new_path)" in capsys.readouterr().err


def test_workers_that_are_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.ope")
    made(0, 12, 9).save(path)
    chosen = ["evaluate", path, "--estimators", "NFIS", "--data", "all", "--shards"]
    assert command([*chosen, "--workers", "2"]) == 0
    assert f"note: --workers 2: no worker is needed, {path} is a" in capsys.readouterr().err
    assert command(chosen) == 0
    assert capsys.readouterr().err == ""


def test_a_figure_that_cannot_be_drawn_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(Trajectories, "load", lambda *_: pytest.fail("work was done before"))
    assert command(["rank", "missing.ope", "--figure", str(tmp_path / "a.png")]) == 2
    assert "figures need matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="closes a pipe")
def test_a_reader_that_has_gone(tmp_path: Path) -> None:
    path, result = tmp_path / "a.ope", tmp_path / "result.json"
    made(0, 12, 9).save(path)
    read, write = os.pipe()
    os.close(read)
    words = ["evaluate", str(path), "--estimators", "NFIS", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "ope_gym", *words],
        cwd=ROOT,
        text=True,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert "NFIS" in json.loads(result.read_text())["estimates"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is needed")
def test_a_full_scratch_disk_is_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool, "_partial", lambda _: Path("/dev/full"))
    with pytest.raises(OSError, match=rf"scratch is '{tmp_path}': the disk is full; give a folder"):
        evaluate_shards(files, TARGET, scratch=tmp_path, estimators="NFIS")


def test_workers_and_ray_are_not_given_together(files: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"workers is 2 and ray is True: .* give one of them"):
        evaluate_shards(files, TARGET, workers=2, ray=True)


def test_ray_ends_before_a_stopped_command() -> None:
    """What Ray leaves running crashes Python on its way out."""
    code = (
        "import atexit, sys, types\n"
        "from ope_gym.scale.leaving import leave\n"
        "ray = sys.modules['ray'] = types.ModuleType('ray')\n"
        "ray.shutdown = lambda: print('shut down')\n"
        "atexit.register(print, 'crash')\n"
        "leave(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "shut down\n")


def test_scripts_of_benchmarks_start() -> None:
    """Their own folder comes first on the path: nothing in it may have the name of a package."""
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert "studies" in packages
    assert not packages & {path.stem for path in (ROOT / "benchmarks").iterdir()}
