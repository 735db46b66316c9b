"""Commands on a terminal say that kernels are being compiled; everything else is silent."""

import io
from typing import Any

import numpy as np
import pytest
from numba import njit

from ope_gym import cli, kernels  # kernels tell of compilations
from ope_gym.commands import values
from ope_gym.commands.inputs import CommandResult
from ope_gym.compiling import TEXT, compilation_shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compile_something() -> float:
    """Compile a function that calls another one, which is compiled meanwhile."""
    inner: Any = njit(lambda x: x + 1.0)
    outer: Any = njit(lambda x: inner(x))
    return float(outer(1.0))


def test_a_terminal_shows_one_line_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with compilation_shown():
        assert screen.getvalue() == ""
        assert compile_something() == 2.0
        said = screen.getvalue()
        assert said.count(TEXT) == 1
        assert said.endswith("\r")  # the line was overwritten by blanks
        assert said.split("\r")[-2].strip() == ""
    assert screen.getvalue() == said
    compile_something()
    assert screen.getvalue() == said  # a program is not told


@pytest.mark.parametrize("case", ["no terminal", "quiet", "compiled already"])
def test_otherwise_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    screen = io.StringIO() if case == "no terminal" else Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    kernels.cumulate(np.zeros(1), np.array([0, 1]), np.empty(1))
    with compilation_shown(case == "quiet"):
        if case == "compiled already":
            kernels.cumulate(np.zeros(1), np.array([0, 1]), np.empty(1))
        else:
            compile_something()
    assert screen.getvalue() == ""


def test_an_interrupted_compilation_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())

    wrong: Any = njit(lambda x: x.nothing)
    with pytest.raises(Exception, match="nothing"), compilation_shown():
        wrong(1.0)
    assert screen.getvalue().count(TEXT) == 1
    assert screen.getvalue().split("\r")[-2].strip() == ""


def test_commands_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setattr(values, "info", lambda: CommandResult(str(compile_something())))
    assert cli.main(["info"]) == 0
    assert TEXT in screen.getvalue()
    assert capsys.readouterr().out == "2.0\n"
