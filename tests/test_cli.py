"""The commands of `python -m ope_gym`: what they print, write and refuse."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import ope_gym
from ope_gym import (
    Betting,
    Bootstrap,
    Compute,
    Evaluator,
    Options,
    Trajectories,
    Weighting,
    __version__,
    cli,
    contributions,
    distribution,
    duel,
    episodes_needed,
    evaluate,
    fit_behaviour,
    leave_one_policy_out,
    rank,
)
from ope_gym.cli import main as command
from ope_gym.commands import values
from ope_gym.models.linear import LinearQ
from tests.builders import recorded
from tests.file_builders import made, merged, mixed_files

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("block_steps", ["150", "100000"])
def test_several_files_from_the_command_line(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], block_steps: str
) -> None:
    names = [str(path) for path in files]
    result = tmp_path / "result.json"
    arguments = ["evaluate", *names, "--target", "3", "--estimators", "NFIS", "FWDR"]
    arguments += ["--block-steps", block_steps, "--q-model", "linear", "--data"]
    assert command([*arguments, "all", "--json", str(result), "--workers", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Policy 3 of {names[0]} ")
    together = merged([Trajectories.load(path) for path in files])
    target = Evaluator(files).policies[3]
    expected = evaluate(together, target, ["NFIS", "FWDR"], q_model=LinearQ())
    found = json.loads(result.read_text())
    for name, estimate in expected.items():
        assert found["estimates"][name]["value"] == pytest.approx(estimate.value, rel=1e-9)
    assert command([*arguments, "auto", "--workers", "1"]) == 0
    assert capsys.readouterr().out == said.out


def test_every_flag_reaches_its_option(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Seen(Evaluator):
        def __init__(self, *args: Any, **options: Any) -> None:
            seen.update(options, names=args[1])
            super().__init__(*args, **options)

    monkeypatch.setattr(ope_gym, "Evaluator", Seen)
    words = ["--estimators", "FIS", "NFIS", "--q-model", "none", "--gamma", "0.9", "--level", "0.8"]
    words += ["--interval", "bca", "--resamples", "30", "--cap", "3", "--mixture", "2"]
    words += ["--seed", "7", "--block-steps", "99", "--data", "all", "--return-range", "0", "99"]
    assert command(["evaluate", str(files[1]), *words]) == 0
    compute = seen.pop("compute")
    assert compute == Compute(1, False, 99, compute.progress)
    assert seen == {
        "names": ["FIS", "NFIS"],
        "held_out": False,
        "q_model": None,
        "gamma": 0.9,
        "interval": Bootstrap(30, "bca"),
        "level": 0.8,
        "return_range": (0.0, 99.0),
        "weighting": Weighting(3.0, 2),
        "seed": 7,
    }
    betting = ["--interval", "betting", "--reward-range", "0", "1", "--horizon", "20"]
    assert command(["evaluate", str(files[1]), "--estimators", "FIS", *betting]) == 0
    assert seen["interval"] == Betting((0.0, 1.0), 20)


def test_a_progress_bar_ends_where_the_work_does(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[tuple[str, int | None, int]] = []

    class Bar:
        def __init__(self, unit: str, total: int | None = None) -> None:
            self.unit, self.total, self.done = unit, total, 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            totals.append((self.unit, self.total, self.done))

        def update(self, count: int) -> None:
            self.done += count

        def reset(self, total: int) -> None:
            self.total = total

    monkeypatch.setattr(values, "progress_bar", Bar)
    for more in ([], ["--block-steps", "150"], ["--block-steps", "150", "--workers", "2"]):
        assert command(["evaluate", *map(str, files), *more]) == 0
    assert command(["rank", str(files[1]), "--policies", "0-2"]) == 0
    steps = 61 * 20
    assert totals == [
        ("steps", steps, steps),
        ("steps", 5 * steps, 5 * steps),
        ("steps", 5 * steps, 5 * steps),
        ("policies", 3, 3),
    ]


@pytest.mark.parametrize("name", ["rank", "plan", "check"])
def test_the_other_commands_take_several_files(
    files: list[Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if all episodes were in one."""
    paths = [str(files[1]), str(files[4])]
    whole = tmp_path / "whole.ope"
    together = merged([Trajectories.load(path) for path in paths])
    together.save(whole)
    said = []
    for given in (paths, [str(whole)]):
        result = tmp_path / "result.json"
        chosen = ["--target", "1"] if name == "plan" else []  # "last" depends on the last file
        assert command([name, *given, *chosen, "--json", str(result)]) == 0
        said.append((capsys.readouterr().out, result.read_text()))
    named = said[0][0].replace(f" of {paths[0]}", "").replace(f" of {paths[1]}", "")
    assert (named, said[0][1]) == said[1]
    if name == "rank":
        everyone = range(len(together.policies))
        expected = str(rank(together, list(everyone), "auto"))
    elif name == "plan":
        expected = str(contributions(together, 1, estimator="NFIS"))
    else:
        expected = str(leave_one_policy_out(together, "auto"))
    assert expected in said[0][0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is needed")
def test_a_table_is_not_lost_with_its_file(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["evaluate", str(files[1]), "--q-model", "none", "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("Policy ")
    assert "No space left" in said.err


def test_one_file_in_blocks_from_the_command_line(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name, chosen = str(files[1]), ["--estimators", "NFIS", "BIS", "auto", "MAGIC"]
    assert command(["evaluate", name, *chosen]) == 0
    usual = capsys.readouterr().out
    assert command(["evaluate", name, *chosen, "--block-steps", "100"]) == 0
    assert capsys.readouterr().out == usual
    assert command(["evaluate", name]) == 0
    common = capsys.readouterr().out
    assert command(["evaluate", name, "--block-steps", "100"]) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines()[1:] if line]
    assert [row for row in rows if row in evaluate(name, "last")] == list(evaluate(name, "last"))
    assert "; q model: LinearQ" in said
    assert common == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["evaluate", "--estimators", "ADR", "--block-steps", "20"],
            "'ADR', which needs all episodes in memory",
        ),
        (
            ["evaluate", "--q-model", "tabular", "--block-steps", "20"],
            "take a LinearQ, 'default' or None",
        ),
        (["evaluate", "--return-range", "1", "0"], "--return-range 1 0: give the lowest and"),
        (["evaluate", "--interval", "betting"], "--interval betting: give --reward-range LOW HIGH"),
        (
            ["evaluate", "--interval", "betting", "--reward-range", "0", ".1", "--horizon", "20"],
            "--reward-range 0 0.1: the reward is",
        ),
        (["evaluate", "--estimators", "DM", "--q-model", "none"], "'DM', which needs a q model"),
        (["evaluate", "--estimators", "NIFS"], "--estimators NIFS: did you mean 'NFIS'?"),
        (["evaluate", "--level", "95"], "--level 95: a confidence level lies within (0, 1)"),
        (["evaluate", "--level", "x"], "--level: invalid float value: 'x' (see "),
        (["evaluate", "--target", "99"], "--target 99: give a policy, the number of a recorded"),
        (["evaluate", "--target", "best"], "--target best: give a policy, the number of a"),
        (["evaluate", "--workers", "0"], "--workers 0: give a whole number of workers"),
        (["evaluate", "--workers", "2", "--ray"], "workers is 2 and ray is True"),
        (["evaluate", "--block-steps", "0"], "--block-steps 0: hold at least 1 step at once"),
        (["evaluate", "--json", "no/x.json"], "--json: no/x.json cannot be written; give a file"),
        (["evaluate", "--json", "."], "--json: . cannot be written"),
        (["evaluate", "--json", "-"], "--json: - cannot be written"),
        (["evaluate", "--data", "held-out"], "none of the 3 episodes is held out"),
        (["evaluate", "--jsn", "x"], "unrecognized arguments: --jsn x; did you mean --json? (see "),
        (["rank", "--policies", "none.zip"], "'none.zip', and there is no such file"),
        (["rank", "--policies", "99"], "--policies 99: give"),
        (["rank", "--policies", "0-99999999999"], "--policies 0-99999999999: give"),
        (["evaluate", "--target", "²"], "--target ²: give a policy"),
        (["plan", "--collect", "best"], "--collect best: give"),
        (
            ["distribution", "--quantiles", "2"],
            "quantile level is 2.0; give a share within",
        ),
        (["rank", "--figure", "x.foo"], "--figure: x.foo has none of the endings .png"),
        (["check", "none.ope"], "'none.ope', and there is no such file"),
        (["report"], "the following arguments are required: --html"),
        (["evalute"], "there is no command 'evalute'; did you mean evaluate?"),
        (["duel"], "there is no command 'duel'; did you mean gate?"),
        (["x"], "there is no command 'x'; choose from info,"),
    ],
)
def test_what_the_command_line_refuses(
    files: list[Path], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, which speaks of options."""
    assert command([words[0], str(files[0]), str(files[2]), *words[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m ope_gym: ")
    assert message in line


def test_no_command_overwrites_episodes(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = tmp_path / "run.ope", tmp_path / "link.png"
    path.write_bytes(files[0].read_bytes())
    link.symlink_to(path)
    for name, flag in (
        ("evaluate", "--json"),
        ("report", "--html"),
        ("fit-behaviour", "--save"),
        ("rank", "--figure"),
    ):
        assert command([name, str(path), flag, str(link)]) == 2
        assert f"{flag}: {link} is a file of episodes; give another" in capsys.readouterr().err
    assert path.read_bytes() == files[0].read_bytes()


def test_ray_needs_ray(
    files: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(["evaluate", "--ray", str(files[0])]) == 2
    assert "the following arguments are required: FILE" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert command(["evaluate", str(files[0]), "--ray"]) == 2
    assert 'pip install -e ".[ray]" -c constraints.txt' in capsys.readouterr().err


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 2
    text = capsys.readouterr().err
    assert command(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert all(f"ope-gym {name}" in text for name in cli.COMMANDS)
    assert max(map(len, text.splitlines())) <= 80
    assert command(["--version"]) == 0
    assert capsys.readouterr().out == f"ope-gym {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_a_command_describes_every_option(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        command([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    for line, following in pairwise([*lines, ""]):
        if line.startswith("  --"):
            described = re.search(r"  --\S.*  \S", line) or following.startswith(" " * 20)
            assert described, line


def test_defaults_are_those_of_python() -> None:
    for name, function in (
        ("evaluate", evaluate),
        ("rank", rank),
        ("check", leave_one_policy_out),
        ("plan", episodes_needed),
        ("fit-behaviour", fit_behaviour),
        ("distribution", distribution),
        ("gate", duel),
    ):
        values = cli.load(name).parse(["a.ope", *(["--env", "x"] if name == "gate" else [])])
        parameters = inspect.signature(function).parameters
        defaults = vars(Options()) | {k: p.default for k, p in parameters.items()}
        defaults["interval"] = "ess-t"  # of Options it is an object
        defaults = {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty}
        for option in (values.keys() & defaults.keys()) - {"data"}:
            assert values[option] == defaults[option], (name, option)


def test_names_of_columns_are_for_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ope"
    made(0, 12, 9).save(path)
    assert command(["evaluate", str(path), "--column", "reward=r"]) == 2
    assert f"--column names columns of tables, but {path} is none" in capsys.readouterr().err


def test_a_table_of_unknown_loggers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its labels are shown, and the remedies are those that there are."""
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    plain, ours = tmp_path / "theirs.parquet", tmp_path / "ours.parquet"
    who = ["new", "new", "old"]
    named = {"user": [0, 1, 2], "step": [0] * 3, "observation": [0.5] * 3, "action": [0, 1, 0]}
    table = pyarrow.table({**named, "reward": [1.0] * 3, "policy": who})
    parquet.write_table(table, plain)
    assert command(["info", str(plain)]) == 2
    assert "--column episode=..." in capsys.readouterr().err
    assert command(["info", str(plain), "--column", "episode=user"]) == 0
    Trajectories.from_frame(plain, episode="user").to_parquet(ours)
    assert command(["info", str(ours)]) == 0
    said = capsys.readouterr().out
    assert "policy 0: 2 episodes, mean return 1, UnknownPolicy('new')" in said
    assert "policy 1: 1 episodes, mean return 1, UnknownPolicy('old')" in said
    for name in ("evaluate", "rank"):
        assert command([name, str(ours)]) == 2
        said = capsys.readouterr().err
        assert "nothing recorded how it acts; estimate it with ope_gym.fit_behaviour" in said
        assert "give the policy itself (on the command line --target package." in said


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
        f"warning: {paths[1]}: 0 of 6 episodes used, as none is held out; held_out=False (--data "
        "all) takes them\n"
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
    assert capsys.readouterr().out.startswith(f"Policy 2 of {few} ")
    assert command(["evaluate", many, few, "--target", "5", *chosen]) == 0
    assert capsys.readouterr().out.startswith(f"Policy 5 of {many} ")
    dataclasses.replace(data, policies=()).select(episodes=slice(0)).save(empty)
    assert command(["evaluate", many, empty, *chosen]) == 2
    assert f"--target last: {empty}, the last file, holds no" in capsys.readouterr().err


def test_info_numbers_policies_over_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.ope", "b.ope")]
    for i, path in enumerate(paths):
        made(i, 12, 9).save(path)
    known = Evaluator(paths).policies
    assert command(["info", *paths]) == 0
    said = capsys.readouterr().out.splitlines()
    assert paths == [line for line in said if line in paths]
    for number, policy in enumerate(known):
        found = [line for line in said if line.startswith(f"policy {number}: ")]
        assert found
        assert all(line.endswith(repr(policy)) for line in found)


def test_info_shows_the_range_of_a_box_and_not_all_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ope"
    low, high = np.zeros((8, 8, 3)), np.arange(8 * 8 * 3.0).reshape(8, 8, 3)
    box = spaces.Box(low, high, dtype=np.float64)
    space = spaces.Dict(seen=box, known=spaces.Discrete(2))
    data = made(0, 12, 9)
    seen = {"known": np.ones(data.n_steps, np.int64), "seen": np.zeros((data.n_steps, 8, 8, 3))}
    dataclasses.replace(data, observation_space=space, observations=seen).save(path)
    assert command(["info", str(path)]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("observations ")]
    boxes = "Dict('seen': Box((8, 8, 3), float64, 0 to 191), 'known': Discrete(2))"
    assert line.startswith(f"observations {boxes}, actions ")


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
    data = made(0, 12, 9)
    data.save(path)
    good = path.read_bytes()
    at = good.index(data.rewards[:2].tobytes())
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    assert command(["evaluate", str(path)]) == 2
    assert "Trajectories.load(path, recover=True).save(new_path)" in capsys.readouterr().err


def test_workers_that_are_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.ope")
    made(0, 12, 9).save(path)
    chosen = ["evaluate", path, "--estimators", "NFIS", "--data", "all"]
    assert command(chosen) == 0
    said = capsys.readouterr()
    assert command([*chosen, "--workers", "2"]) == 0
    assert capsys.readouterr() == said
    assert said.err == ""


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


def test_what_cannot_be_shown_or_checked_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No episode to describe, no policy to check: the exit code says so."""
    path = tmp_path / "none.ope"
    data = recorded(0).trajectories
    data.select(policies=0).save(path)
    assert command(["check", str(path)]) == 2
    assert "no policy could be checked" in capsys.readouterr().out
    data.select(episodes=[]).save(path)
    assert command(["info", str(path)]) == 2
    assert "0 episodes" in capsys.readouterr().out
