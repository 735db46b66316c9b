"""The commands of `python -m ope_gym`: what they print, write and refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ope_gym import Trajectories, evaluate
from ope_gym.cli import main as command
from ope_gym.models.linear import LinearQ
from ope_gym.scale.sources import survey
from ope_gym.scale.workers import Workers
from tests.test_sharded import made, mixed_files

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


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
    target = survey(files, "all", 1000, Workers()).mixture.policies[3]
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
    known = survey(paths, "all", 100, Workers()).mixture.policies
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
