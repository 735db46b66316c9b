"""train.py and `python -m ope_gym` as a user runs them."""

import contextlib
import errno
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest

import ope_gym
import train
from agents.small import SmallRun
from ope_gym.cli import main as command
from ope_gym.files import DamagedFileError
from ope_gym.report.training import is_surer

ROOT = Path(__file__).parent.parent
SEEDED = ("--seed", "3", "--vector-envs", "4", "--estimators", "NFIS", "BIS")


def small(logdir: Path, *more: str) -> list[str]:
    return [
        "--policies",
        "3",
        "--rollouts",
        "6",
        "--truth-episodes",
        "20",
        "--quiet",
        "--logdir",
        str(logdir),
        *more,
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on CartPole, with a saved file, JSON and what it printed."""
    folder = tmp_path_factory.mktemp("train")
    files = ["--save", str(folder / "all.ope"), "--json", str(folder / "result.json")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train.main(small(folder / "runs", *SEEDED, *files)) == 0
    (folder / "printed.txt").write_text(out.getvalue(), encoding="utf-8")
    return folder


def test_table_says_regime_truth_and_where_things_are(finished: Path) -> None:
    text = (finished / "printed.txt").read_text(encoding="utf-8")
    assert re.search(r"^NFIS .* (green|amber|red) .*se$", text, re.MULTILINE)
    assert "data: held-out" in text
    assert "from truth" in text
    assert "fresh rollouts:" in text
    assert "never saw these episodes" in text
    assert f"tensorboard --logdir {finished / 'runs'}" in text
    assert "FIS, " not in text.split("verdict")[0]


def test_without_held_out_episodes_the_result_is_called_optimistic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(small(tmp_path, "--held-out", "0", "--truth-episodes", "0")) == 0
    text = capsys.readouterr().out
    assert "The policy was trained on these episodes of CartPole-v1" in text
    assert "data: in-sample, optimistic" in text
    assert "from truth" not in text


@pytest.mark.parametrize("name", ["CartPole", "CartPole-v1", "NoSuch"])
def test_an_id_without_a_version_is_the_latest(name: str) -> None:
    assert train.with_version(name) == ("CartPole-v1" if "Cart" in name else "NoSuch")


def test_file_holds_all_episodes_and_the_target(finished: Path) -> None:
    (recorded,) = finished.glob("runs/*/episodes.ope")
    data = ope_gym.Trajectories.load(recorded)
    saved = ope_gym.Trajectories.load(finished / "all.ope")
    assert len(data) == len(saved) == 3 * 12
    assert data.held_out.sum() == 3 * 6
    assert len(data.policies) == 4  # the last one was evaluated and never acted
    np.testing.assert_array_equal(data.rewards, saved.rewards)


def test_saved_file_gives_the_same_evaluation(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(finished / "all.ope"), finished / "again.json"
    assert command(["evaluate", path, "--json", str(out)]) == 0
    assert "Policy 3 " in capsys.readouterr().out
    again, first = (json.loads(p.read_text()) for p in (out, finished / "result.json"))
    assert again["estimates"]["NFIS"]["value"] == first["estimates"]["NFIS"]["value"]
    assert again["regime"] == first["regime"] == "held-out"


def test_verdicts_have_their_colour_on_a_terminal(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["evaluate", str(finished / "all.ope")]
    assert command(words) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")  # a narrower terminal breaks lines elsewhere
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\x1b\[3[123]m(green|amber|red)\x1b\[0m", shown)
    assert re.sub(r"\x1b\[\d+m", "", shown) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(words) == 0
    assert capsys.readouterr().out == plain


def test_info_has_a_line_for_each_policy(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["info", str(finished / "all.ope")]) == 0
    text = capsys.readouterr().out
    assert "36 episodes" in text
    assert "time limit 500" in text
    assert re.search(r"^policy 0: 12 episodes, mean return .*LinearSigmoid", text, re.MULTILINE)
    assert "policy 3: 0 episodes" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "9"], "(0 to 3)"),
        (["--target", "best"], "--target best: give a policy, the number of a recorded one"),
        (["--gamma", "2"], "--gamma 2: a discount lies within [0, 1]"),
        (["--estimators", "NIFS"], "--estimators NIFS: did you mean 'NFIS'?"),
        (["--interval", "betting"], "give --reward-range LOW HIGH"),
    ],
)
def test_command_names_what_is_wrong(
    finished: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["evaluate", str(finished / "all.ope"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_command_refuses_a_foreign_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"something else")
    assert command(["info", str(path)]) == 2
    assert "not an ope_gym file" in capsys.readouterr().err
    assert command(["info", str(tmp_path / "none")]) == 2


def test_same_seed_same_numbers(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    assert train.main(small(tmp_path, *SEEDED, "--json", str(out))) == 0
    assert out.read_text() == (finished / "result.json").read_text()


MADE_OF_NOTHING = ("GymV21Environment-v0", "GymV26Environment-v0")  # wrap others


@pytest.mark.filterwarnings("ignore")  # of old versions
@pytest.mark.parametrize("name", [name for name in gym.registry if name not in MADE_OF_NOTHING])
def test_every_environment_ends_with_an_answer_or_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log there
    monkeypatch.setattr(train, "time_limit", lambda name: {"max_episode_steps": 10})
    fewest = ["--policies", "2", "--rollouts", "2", "--vector-envs", "2", "--timesteps", "32"]
    fast = ["--truth-episodes", "2", "--q-model", "none", "--estimators", "NFIS"]
    code = train.main(["--env", name, "--quiet", "--logdir", str(tmp_path), *fewest, *fast])
    printed = capfd.readouterr()
    if code:
        (line,) = printed.err.splitlines()
        assert code == 2
        assert line.startswith(f"train.py: {name} cannot be made: ")
    else:
        assert re.search(r"policy .*worth|Nothing was learned", printed.out, re.IGNORECASE)
        assert "2 fresh rollouts" in printed.out
        (path,) = tmp_path.glob("*/episodes.ope")
        assert len(ope_gym.Trajectories.load(path))


@pytest.mark.parametrize(
    ("free", "weighted", "first"),
    [
        (("green", 40.0), ("red", 60.0), True),
        (("red", 90.0), ("amber", 20.0), False),
        (("green", 40.0), ("amber", 76.0), False),
        (("amber", 20.0), ("amber", math.nan), True),
    ],
)
def test_the_surer_value_comes_first(
    free: tuple[str, float], weighted: tuple[str, float], first: bool
) -> None:
    def judged(colour: str, fresh: float) -> Any:
        return SimpleNamespace(verdict=SimpleNamespace(colour=colour), fresh_episodes=fresh)

    evaluation: Any = SimpleNamespace(best=judged(*weighted))
    assert is_surer(judged(*free), evaluation) is first


def test_a_run_in_which_nothing_is_reached_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(small(tmp_path, "--env", "MountainCar-v0", "--policies", "1")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Nothing was learned: all 12 episodes returned -200")


@pytest.mark.parametrize(
    ("env", "agent"),
    [("CartPole-v1", "dqn"), ("Blackjack-v1", "a2c"), ("Pendulum-v1", "sac")],
)
def test_agents_of_stable_baselines3(
    env: str, agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("stable_baselines3")
    options = ["--agent", agent, "--timesteps", "205", "--truth-episodes", "2"]
    with one_thread():
        assert train.main(["--env", env, *options, "--quiet", "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"The policy after 2\d\d timesteps (is|may be) worth", printed)
    assert "2 fresh rollouts" in printed
    assert not re.search(r"^\d+ timesteps: |Evaluations: ", printed, re.MULTILINE)  # quiet
    recorded = bool(list(tmp_path.glob("*/episodes.ope")))
    assert recorded == ("evaluate again" in printed)


def test_what_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    assert train.main(["--agent", "ppo", "--logdir", str(tmp_path)]) == 2
    assert 'pip install -e ".[sb3]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "Nowhere-v0"], "Nowhere"),
        (["--agent", "sac"], "--agent sac: the actions are Discrete(2); give ppo, a2c or dqn"),
        (["--policies", "0"], "--policies 0: give at least 1"),
        (["--vector-envs", "0"], "--vector-envs 0: give at least 1"),
        (["--held-out", "1"], "--held-out 1: give a share"),
        (["--estimators", "NIFS"], "--estimators NIFS: did you mean 'NFIS'?"),
        (["--interval", "wald"], "--interval: invalid choice: 'wald'"),
        (["--gamma", "1.5"], "--gamma 1.5: a discount"),
        (["--level", "95"], "--level 95: a confidence level"),
        (["--seed", "-1"], "--seed -1: give a whole number"),
        (["--logdir", __file__], f"--logdir: {__file__} is a file; give a folder"),
        (["--save", "no/folder.ope"], "--save: no/folder.ope cannot be written"),
    ],
)
def test_wrong_options_end_at_once(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: ")
    assert words in line


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(["--help"])
    text = capsys.readouterr().out
    assert "Examples:" in text
    for name in train.Args.__dataclass_fields__:
        option = name.replace("_", "-")
        assert f"--{option}" in text


def test_ctrl_c_keeps_and_evaluates_what_was_recorded(tmp_path: Path) -> None:
    arguments = [
        "--estimators",
        "NFIS",
        "--iterations",
        "100000",
        "--rollouts",
        "4",
        "--quiet",
        "--logdir",
        str(tmp_path),
        "--save",
        str(tmp_path / "kept.ope"),
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )
    try:
        out, err = _interrupt_when_recording(process, tmp_path)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "stopped after" in err
    assert "NFIS" in out
    (head,) = re.findall(r"^([\d,]+) episodes.*data: held-out$", out, re.MULTILINE)
    assert int(head.replace(",", "")) % 4 == 0  # complete iterations alone
    assert len(ope_gym.Trajectories.load(tmp_path / "kept.ope")) >= 8


def _episodes_of(path: Path) -> int:
    """Return how many episodes are in a file that is being written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return len(ope_gym.Trajectories.load(path))
        except (DamagedFileError, OSError):  # nothing is there yet
            return 0


def _interrupt_when_recording(process: "subprocess.Popen[str]", folder: Path) -> tuple[str, str]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # until some iterations are on disk
        found = list(folder.glob("*/episodes.ope"))
        if found and _episodes_of(found[0]) >= 12:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=120)


_SIGNAL_AT_IMPORT = """
import os, runpy, sys
number, module = int(sys.argv[1]), sys.argv[2]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
if sys.argv[3] == "train.py":
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.argv = sys.argv[3:]
runpy.run_module("ope_gym", run_name="__main__")
"""


def _run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


posix = pytest.mark.skipif(sys.platform == "win32", reason="sends signals to itself")


@posix
@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("argparse", signal.SIGINT),
        ("numpy.random", signal.SIGTERM),
        ("gymnasium.envs", signal.SIGINT),
        ("numba", signal.SIGINT),
        ("numba.core.typing.arraydecl", signal.SIGINT),
        ("ope_gym.report.tensorboard", signal.SIGINT),  # when the training has begun
        ("tensorboard.compat.proto", signal.SIGTERM),
    ],
)
def test_a_signal_while_modules_are_imported(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    options = small(tmp_path, "--env", "CartPole-v1")
    done = _run(_SIGNAL_AT_IMPORT, str(int(number)), module, "train.py", *options)
    assert done.returncode == 128 + number, done.stderr
    lines = list(filter(None, done.stderr.split("\n")))
    assert lines[-1].startswith("stopped")
    assert lines[:-1] in ([], [train.ASKED])


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_is_imported(number: signal.Signals, finished: Path) -> None:
    words = ["ope_gym", "evaluate", str(finished / "all.ope")]
    done = _run(_SIGNAL_AT_IMPORT, str(int(number)), "numba.core.types", *words)
    assert (done.returncode, done.stderr) == (128 + number, "\nstopped\n")


_SIGNAL_AT_EVALUATION = """
import os, sys, train
from ope_gym import stopping
evaluate = train.SmallRun.evaluate
signals = iter([None, *map(int, sys.argv[1].split())])  # the first evaluation is let alone
def stopped(self):
    number = next(signals, None)
    if number is not None:
        os.kill(os.getpid(), number)
    return evaluate(self)
train.SmallRun.evaluate = stopped
sys.argv = sys.argv[1:]
stopping.run(train.main)
"""


def test_a_run_that_is_stopped_before_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "conduct", stopped)
    assert train.main(small(tmp_path, *SEEDED)) == 130
    assert capsys.readouterr().err == "\nstopped; nothing was recorded\n"
    assert not list(tmp_path.glob("*/episodes.ope"))


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_whose_episodes_never_fit_on_the_disk_says_so(
    ends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def conduct(run: object, args: object, logdir: Path) -> int:
        (logdir / "episodes.ope").touch()  # as far as it came
        if ends:
            return 0
        raise full

    monkeypatch.setattr(train, "conduct", conduct)
    monkeypatch.setattr(SmallRun, "close", mock.Mock(side_effect=full))
    assert train.main(small(tmp_path, *SEEDED)) == 2
    assert capsys.readouterr().err == f"\ntrain.py: {full}; nothing was recorded\n"


@posix
@pytest.mark.parametrize(("numbers", "code"), [("2 2", 130), ("15", 143), ("2 15", 143)])
def test_a_signal_that_ends_all(numbers: str, code: int, tmp_path: Path) -> None:
    """Ctrl-C again while the record is evaluated, or SIGTERM."""
    options = small(tmp_path, *SEEDED, "--save", str(tmp_path / "all.ope"))
    done = _run(_SIGNAL_AT_EVALUATION, numbers, *options)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    (recorded,) = tmp_path.glob("*/episodes.ope")
    stopped = "stopped after 2 of 3 policies"
    last = f"stopped; the episodes are in {recorded}"
    assert lines == ([stopped] if numbers == "15" else [train.ASKED, stopped, last])
    for path in (recorded, tmp_path / "all.ope"):
        assert len(ope_gym.Trajectories.load(path)) == 2 * 12
    assert not done.stdout


_SIGNALS_AT_COMPILATIONS = """
import os, runpy, sys
from numba.core import event
bursts = iter(sys.argv[1].split())  # signals as compilations begin
class Impatient(event.Listener):
    def on_start(self, event):
        burst = next(bursts, "0")
        if "GONE" in os.environ:
            os.rmdir(os.environ.pop("GONE"))
        for _ in range(int(burst)):
            os.kill(os.getpid(), 2)
    def on_end(self, event):
        pass
event.register("numba:compile", Impatient())
sys.argv = sys.argv[2:]
if sys.argv[0] == "train.py":
    runpy.run_path(sys.argv[0], run_name="__main__")
runpy.run_module("ope_gym", run_name="__main__")
"""


@posix
@pytest.mark.parametrize("bursts", ["1", "2", "1 1", "0 1 0 0 1"])
def test_ctrl_c_while_kernels_are_compiled(
    bursts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends the training, and what was recorded is evaluated; the second one ends all."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))  # where nothing is yet
    options = small(tmp_path, *SEEDED, "--save", str(tmp_path / "all.ope"))
    done = _run(_SIGNALS_AT_COMPILATIONS, bursts, "train.py", *options)
    assert done.returncode == 130, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    (recorded,) = tmp_path.glob("*/episodes.ope")
    assert lines[0] == train.ASKED
    assert re.fullmatch(r"stopped after [01] of 3 policies", lines[1])
    assert set(lines[2:]) <= {f"stopped; the episodes are in {recorded}"}
    assert ("NFIS" in done.stdout) == (bursts == "1")
    for path in (recorded, tmp_path / "all.ope"):
        assert len(ope_gym.Trajectories.load(path)) == 12


@posix
def test_ctrl_c_twice_while_a_command_compiles(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    words = ["ope_gym", "evaluate", str(finished / "all.ope")]
    done = _run(_SIGNALS_AT_COMPILATIONS, "2", *words)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")


@posix
def test_what_cannot_be_saved_after_ctrl_c_twice_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("GONE", str(tmp_path / "gone"))
    options = small(tmp_path, *SEEDED, "--save", str(tmp_path / "gone" / "all.ope"))
    done = _run(_SIGNALS_AT_COMPILATIONS, "2", "train.py", *options)
    assert "stopped after" in done.stderr
    assert f"cannot save {tmp_path / 'gone' / 'all.ope'}" in done.stderr


_AN_ERROR = """
import os, sys
from ope_gym import stopping
def main():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except BaseException as error:
        raise ValueError("of a library") from error
    raise ValueError("of its own")
stopping.run(main)
"""


@posix
def test_an_error_after_a_signal_is_its_doing() -> None:
    done = _run(_AN_ERROR, "2")
    assert (done.returncode, done.stderr) == (130, "\nstopped: of a library\n")
    done = _run(_AN_ERROR, "0")
    assert (done.returncode, done.stderr) == (2, "-c: of its own\n")


@posix
def test_ctrl_c_in_the_first_seconds(tmp_path: Path) -> None:
    """At any time from the first line of the program on there is no traceback."""
    for i in range(4):
        process = subprocess.Popen(
            [sys.executable, "train.py", *small(tmp_path / str(i), "--rollouts", "2000")],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        time.sleep(0.3 + 0.6 * i)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        lines = list(filter(None, err.splitlines()))
        assert lines[-1].startswith("stopped"), err
        assert lines[:-1] in ([], [train.ASKED]), err


# Every file of examples/: what it imports beside ope_gym, how to run it small, what it prints.
# Those of libraries that constraints.txt does not pin run where these are installed.
EXAMPLES: dict[str, tuple[str, list[str], list[str]]] = {
    "hand_written_loop.py": ("gymnasium", [], ["NFIS", "data: held-out"]),
    "optuna_ppo.py": (
        "optuna",
        ["--trials", "2", "--timesteps", "2048", "--eval-freq", "1024"],
        [r"^2 trials, 0 pruned; the best is worth \d"],
    ),
    "ppo_cartpole.py": (
        "torch",
        ["--total-timesteps", "1536", "--num-envs", "2", "--eval-freq", "1500"],
        ["^1,536 timesteps: worth "],
    ),
    "rllib_offline.py": (
        "tree",  # RLlib is a part of Ray, but what it imports is not
        ["--write", "steps", "--iterations", "2", "--batch", "200"],
        ["NBIS", r"2 policies"],
    ),
    "rllib_ppo.py": (
        "tree",
        ["--iterations", "3", "--batch", "512", "--num-envs", "2", "--eval-freq", "1000"],
        ["timesteps: worth", r"ope: .*'value': \d"],
    ),
    "sb3_ppo.py": (
        "stable_baselines3",
        ["--timesteps", "512", "--num-envs", "2", "--n-steps", "64", "--eval-freq", "256"],
        ["^256 timesteps: worth", "^The policy after 512 timesteps is worth"],
    ),
    "tianshou_ppo.py": (
        "tianshou",
        ["--epochs", "1", "--steps", "2048", "--eval-freq", "1000"],
        ["timesteps: worth"],
    ),
    "torchrl_ppo.py": (
        "torchrl",
        ["--timesteps", "2048", "--num-envs", "2", "--eval-freq", "1000"],
        ["timesteps: worth"],
    ),
}


def test_every_example_is_listed_and_run_where_its_host_is_installed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some as a user starts them; the others here, where their libraries are loaded already."""
    needed, options, expected = EXAMPLES[name]
    pytest.importorskip(needed)
    command = [str(ROOT / "examples" / name), *options]
    if needed not in ("torch", "stable_baselines3"):  # others warn, and here warnings are errors
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", command)
        with one_thread():
            runpy.run_path(command[0], run_name="__main__")
        printed = capsys.readouterr().out
    for words in expected:
        assert re.search(words, printed, re.MULTILINE), words


def test_a_line_in_the_yml_of_rl_baselines3_zoo(tmp_path: Path) -> None:
    pytest.importorskip("rl_zoo3")
    words = "-m rl_zoo3.train --algo ppo --env CartPole-v1 --eval-freq -1 -n 10240 --conf-file"
    done = subprocess.run(
        [sys.executable, *words.split(), str(ROOT / "examples" / "zoo.yml")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The policy after 10,240 timesteps is worth") == 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, and afterwards as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
