"""A real cluster: the same bits, whoever is killed or removed meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ope_gym import Bootstrap, Compute, Evaluator, Trajectories, evaluate
from ope_gym.data.tables import scan_parquet
from ope_gym.files import DamagedFileError
from ope_gym.models.linear import LinearQ
from ope_gym.policies import LinearSigmoid
from ope_gym.scale import ray as ray_tasks
from ope_gym.scale.ray import WorkerError, connect
from ope_gym.scale.workers import Workers
from studies.harness import runner
from studies.harness.kept import folder_of
from studies.harness.runner import collect
from studies.harness.study import Runs, Seeds
from tests.builders import assert_same
from tests.file_builders import made, record
from tests.test_studies import Coin

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="clusters of nodes need Unix")

ROOT = Path(__file__).parents[1]
TARGET = LinearSigmoid(np.full(3, 0.3))
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
HEAD = {"include_dashboard": False, "_system_config": {"health_check_period_ms": 1000}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a node, and connect this process to it."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD})
        try:
            connect(made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_is(address: str) -> None:
    assert not ray.is_initialized()
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        place = address.format(taken.getsockname()[1])
        with pytest.raises(ConnectionError, match=f"no Ray cluster at {place}"):
            connect(place)


def test_a_variable_that_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", place)
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would wait for a minute"))
        for address in (True, "auto"):
            words = f"no Ray cluster at {place} .*RAY_ADDRESS"
            with pytest.raises(ConnectionError, match=words):
                connect(address)


def test_no_cluster_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own words name a flag that is not ours."""
    assert not ray.is_initialized()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**_: object) -> None:
        raise ConnectionError("specify the one to connect to by the --address flag")

    monkeypatch.setattr(ray, "init", init)
    words = "none runs on this machine; give"
    with pytest.raises(ConnectionError, match=words) as caught:
        connect("auto")
    assert "--address" not in str(caught.value)

    def other(**_: object) -> None:
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(ray, "init", other)
    with pytest.raises(ConnectionError, match="Version mismatch"):
        connect("auto")


def test_errors_come_as_themselves_and_other_versions_are_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ope"
    data = made(0, 5, 9)
    record(data, path)
    good = path.read_bytes()
    at = good.index(data.rewards[:2].tobytes())
    path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    with pytest.raises(DamagedFileError, match=r"run\.ope: the file is damaged"):
        evaluate(path, TARGET, compute=Compute(ray=True))
    path.write_bytes(good)
    with monkeypatch.context() as patch:
        patch.setattr(ray_tasks, "_versions", lambda: ("another", "one"))
        with pytest.raises(WorkerError, match=r"has ope_gym and numpy .* instead of \('another'"):
            evaluate(lambda: data, TARGET, compute=Compute(ray=True))
    monkeypatch.setattr(runner, "fingerprint", lambda study, seed: "another")
    with pytest.raises(WorkerError, match="coin: a Ray worker has other code"):
        collect(Coin(), tmp_path, runs=4, seed=0, ray=True, progress=False)
    assert not list(tmp_path.glob("chunks/*/*.npz"))


def test_files_over_ray(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are those of the command, wherever the cluster was started."""
    monkeypatch.chdir(tmp_path)
    paths = [f"{i}.ope" for i in range(4)]
    for i, path in enumerate(paths):
        record(made(i, 12, 25), Path(path)) if i % 2 else made(i, 12, 25).save(path)
    episodes: list[Any] = [*paths, made(7, 10, 20), lambda: made(8, 10, 20)]
    names = ["BIS", "NBCIS", "NFIS", "DM", "FWDR"]
    options: dict[str, Any] = {"q_model": LinearQ(), "seed": 3, "interval": Bootstrap(50)}
    seen: list[int] = []
    here = evaluate(episodes, TARGET, names, compute=Compute(block_steps=100), **options)
    compute = Compute(ray=True, block_steps=100, progress=seen.append)
    evaluator = Evaluator(episodes, names, compute=compute, **options)
    there = evaluator.evaluate(TARGET)
    assert_same(here, there, rtol=1e-12)
    assert sum(seen) == evaluator.passes(TARGET) * here.sample.steps
    assert evaluator.passes(TARGET) == 4  # two of them for the q model
    assert sorted(path.name for path in tmp_path.iterdir()) == paths


def test_tables_over_ray(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    for folder in ("ours", "theirs"):
        Path(folder).mkdir()
    made(0, 12, 25).save("0.ope")
    made(1, 12, 25).to_parquet("1.parquet")
    made(2, 12, 25).to_parquet("ours/2.parquet")
    log = made(3, 12, 25)
    log.to_frame().rename(columns={"reward": "gain"}).to_parquet("theirs/3.parquet")
    names = {"reward": "gain", "policies": log.policies}
    episodes: list[Any] = ["0.ope", "1.parquet", "ours", scan_parquet("theirs", **names)]
    here = evaluate(episodes, TARGET, ["NBIS", "NFIS"], compute=Compute(block_steps=100))
    there = evaluate(episodes, TARGET, ["NBIS", "NFIS"], compute=Compute(ray=True, block_steps=100))
    assert_same(here, there, rtol=1e-12)
    whole = [Trajectories.load(path) for path in ("0.ope", "1.parquet", "ours")]
    assert_same(here, evaluate([*whole, log], TARGET, ["NBIS", "NFIS"]), rtol=1e-9)


# Losses ---------------------------------------------------------------------------------------


def _visit(folder: Path, name: str) -> int:
    """How many came here before; this one says on which node it is."""
    before = len(list(folder.glob(f"{name}-*")))
    node = ray.get_runtime_context().get_node_id()
    (folder / f"{name}-{before}-{node}").touch()
    return before


def _visits(folder: str | Path, name: str) -> int:
    return len(list(Path(folder).glob(f"{name}-*")))


@dataclass(frozen=True)
class Deadly(Coin):
    """The worker of its second chunk is killed, twice."""

    folder: str = ""

    @property
    def name(self) -> str:
        return "deadly"

    def run(self, seeds: Seeds) -> Runs:
        key = seeds[0].spawn_key[-1]
        if self.folder and _visit(Path(self.folder), f"{key}") < 2 and key == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(seeds)


def test_a_killed_worker_is_replaced(cluster: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    study = Deadly(folder=str(marks))
    there = collect(study, tmp_path, runs=20, seed=2, ray=True, progress=False)
    here = collect(Deadly(), tmp_path, runs=20, seed=2, progress=False)
    np.testing.assert_array_equal(there["key"], np.arange(20))
    np.testing.assert_array_equal(there["heads"], here["heads"])
    assert [_visits(marks, f"{key}") for key in range(0, 20, 3)] == [1, 3, 1, 1, 1, 1, 1]
    assert len(list(folder_of(study, tmp_path, 2).iterdir())) == 7


def _slow(folder: Path, number: int, i: int) -> Trajectories:
    """Make episodes; in pass `number` a doomed node is at it until its end, and others wait."""
    if folder.exists():
        begun = _visit(folder, f"part{i}") == number - 1
        mine = ray.get_runtime_context().get_node_id()
        deadline = time.monotonic() + 240  # on a busy machine
        while begun and time.monotonic() < deadline:
            doomed = [path.name[7:] for path in folder.glob("doomed-*")]
            caught = [path for node in doomed for path in folder.glob(f"*-{number - 1}-{node}")]
            begun = bool(doomed) and (doomed == [mine] or not caught)
            time.sleep(0.02)
    return made(i, 6 + i, 20)


def test_a_node_is_removed_while_it_works(cluster: Any, tmp_path: Path) -> None:
    """What it was at, in the second pass, is done again elsewhere."""
    number = 2
    doomed = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    folder = tmp_path / "visits"
    episodes: list[Any] = [partial(_slow, folder, number, i) for i in range(6)]
    here = evaluate(episodes, TARGET, ["NFIS", "BIS"], compute=Compute(block_steps=100))
    folder.mkdir()
    mark = folder / f"doomed-{doomed.node_id}"
    mark.touch()
    caught: list[str] = []

    def remove() -> None:
        deadline = time.monotonic() + 240  # on a busy machine
        while not caught and time.monotonic() < deadline:
            found = folder.glob(f"part*-{number - 1}-{doomed.node_id}")
            caught.extend(path.name for path in found)
            time.sleep(0.02)
        cluster.remove_node(doomed, allow_graceful=False)
        mark.unlink()

    thread = threading.Thread(target=remove)
    thread.start()
    seen: list[int] = []
    compute = Compute(ray=True, block_steps=100, progress=seen.append)
    there = evaluate(episodes, TARGET, ["NFIS", "BIS"], compute=compute)
    thread.join()
    assert_same(here, there, rtol=1e-12)
    assert there.sample.trajectories == sum(6 + i for i in range(6))
    assert sum(seen) == 2 * here.sample.steps
    assert caught  # the node was at work
    again = [_visits(folder, f"part{i}") - 3 for i in range(6)]  # beside the three passes
    assert min(again) == 0
    assert max(again) > 0


def _always(i: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return i


def test_a_task_that_always_kills_its_worker_is_given_up(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks, "_RETRIES", 0)
    with pytest.raises(WorkerError, match=r"Ray could not compute .*, after 0 retries"):
        list(Workers(ray=True).in_order(_always, [1]))


# Connections ----------------------------------------------------------------------------------


def _waits(episodes: Any, held_out: Any, steps: int, workers: Workers) -> Any:
    """Keep the workers busy for a long time."""
    return list(workers.in_order(partial(_sleep, Path(episodes[0]).with_name("begun")), range(9)))


def _sleep(mark: Path, i: int) -> None:
    mark.touch()
    time.sleep(600)


def test_the_cluster_stays_when_commands_have_ended(cluster: Any, tmp_path: Path) -> None:
    """One of them is stopped by Ctrl-C, which cancels its tasks."""
    from ope_gym.cli import main as command  # not yet there when `code` runs the module

    paths = [str(tmp_path / f"{i}.ope") for i in range(2)]
    for i, path in enumerate(paths):
        made(i, 12, 25).save(path)
    words = ["evaluate", *paths, "--ray", cluster.address]
    code = (
        "import runpy, sys\n"
        "from ope_gym.scale import sources\n"
        "from tests.test_ray import _waits\n"
        "sources.open_source = _waits\n"
        f"sys.argv = {['ope_gym', *words]!r}\n"
        "runpy.run_module('ope_gym', run_name='__main__')\n"
    )
    stopped = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240  # on a busy machine
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        assert stopped.poll() is None
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert (stopped.returncode, said) == (130, "\nstopped\n")
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    done = subprocess.run(
        [sys.executable, "-m", "ope_gym", *words, "--json", str(one)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "olicy 7 of" in done.stdout  # where Ray also reports lost nodes
    assert command(["evaluate", *paths, "--json", str(two), "--workers", "1"]) == 0
    assert one.read_bytes() == two.read_bytes()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    assert {node.node_id for node in cluster.list_all_nodes()} <= alive
    assert ray.is_initialized()


def test_sigterm_ends_a_command_with_a_cluster_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "0.ope"
    made(0, 12, 25).save(path)
    words = ["evaluate", str(path), "--ray", "local"]
    code = (
        "import runpy, sys\n"
        "from ope_gym.scale import sources\n"
        "from tests.test_ray import _waits\n"
        "sources.open_source = _waits\n"
        f"sys.argv = {['ope_gym', *words]!r}\n"
        "runpy.run_module('ope_gym', run_name='__main__')\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        assert started.poll() is None
        time.sleep(0.05)
    started.terminate()
    _, said = started.communicate(timeout=120)
    assert (started.returncode, said) == (143, "\nstopped\n")
