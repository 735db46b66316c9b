"""Evaluate, compare and describe recorded policies; only `gate` plays any.

usage: ope-gym COMMAND FILE [FILE ...] [options]

What is it worth?
  ope-gym info episodes.ope                         what is in the file
  ope-gym evaluate episodes.ope                     the value of the last policy
  ope-gym rank episodes.ope --policies 5-9 last     which of them is best
  ope-gym distribution episodes.ope --below 100     quantiles, tail, failures
  ope-gym report episodes.ope --html report.html    all of it on a page

Can it be trusted, and what would help?
  ope-gym check episodes.ope                        estimates beside true means
  ope-gym plan episodes.ope --standard-error 2      what to collect, how much
  ope-gym fit-behaviour log.parquet --save fitted.ope
                                                    missing propensities
  ope-gym gate episodes.ope --env CartPole-v1 --bounds 0 500
                                                    is the new checkpoint better

Further examples
  ope-gym evaluate episodes.ope --target 3 --data all --interval bca
  ope-gym evaluate episodes.ope --estimators NFIS FIS --json result.json
  ope-gym evaluate run_*.ope --workers 8            files larger than memory
  ope-gym evaluate table.parquet folder             tables, a row for a step
  ope-gym evaluate log.csv --column reward=clicks --target module:function

`ope-gym COMMAND --help` explains a command, `ope-gym estimators` lists what
--estimators takes, `ope-gym --version` tells the version; `python -m ope_gym`
is the same as `ope-gym`. Files of episodes are written by train.py and by the
recorders of the package wrappers, Parquet files by `Trajectories.to_parquet`;
--column names the columns of Parquet and CSV files from elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ope_gym import __version__, stopping
from ope_gym.commands.signature import Command, UsageError, as_options, described

if TYPE_CHECKING:
    from ope_gym.commands.inputs import CommandResult

# The module of each command, which is imported when the command is given.
COMMANDS = {
    "info": "values",
    "estimators": "values",
    "evaluate": "values",
    "rank": "values",
    "distribution": "values",
    "report": "values",
    "check": "values",
    "plan": "collecting",
    "fit-behaviour": "collecting",
    "gate": "gate",
}
_LIKE = {"duel": "gate"}  # what the Python API calls it
_CODES = {"green": 32, "amber": 33, "red": 31}  # of terminals, whose 33 is a dark yellow
_WRONG, _UNABLE_TO_GATE = 2, 3  # 2 is the code of a gate that is undecided


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = sys.argv[1:] if words is None else words
    name, *rest = given or [""]
    if name in ("", "-h", "--help"):
        print(__doc__, end="", file=sys.stdout if name else sys.stderr)
        return 0 if name else _WRONG
    if name == "--version":
        print(f"ope-gym {__version__}")
        return 0
    values: dict[str, Any] = {}
    try:
        command = load(name)
        values = command.parse(rest)
        _keep_recordings(values)
        result: CommandResult = command.call(values)
        _print(result.text)
        for path, write in result.writes:
            if path is not None:
                write(path)
    except KeyboardInterrupt:
        again = "; give the same command to go on" if values.get("state") else ""
        print(f"\nstopped{again}", file=sys.stderr)
        return stopping.exit_code()
    except BaseException as error:  # whatever environments and policies of others raise
        stopping.raise_if_stopped()
        if sys.flags.dev_mode or (isinstance(error, SystemExit) and not values):  # of --help
            raise
        print(f"{_program()}: {as_options(stopping.in_one_line(error), values)}", file=sys.stderr)
        return unable(name)
    return result.code


def unable(name: str) -> int:
    """Return the exit code of a command that could not be run."""
    return _UNABLE_TO_GATE if name == "gate" else _WRONG


def load(name: str) -> Command:
    """Return the command of that name; raise UsageError if there is none."""
    if name not in COMMANDS:
        near = [_LIKE[name]] if name in _LIKE else get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {name!r}; {hint}")
    from ope_gym.commands.inputs import SHARED
    from ope_gym.options import Compute, Options, Weighting

    module = import_module(f"ope_gym.commands.{COMMANDS[name]}")
    descriptions = described(Options, Weighting, Compute) | SHARED
    return Command(getattr(module, name.replace("-", "_")), f"{_program()} {name}", descriptions)


def _keep_recordings(values: dict[str, Any]) -> None:
    """Raise if a file of episodes would be overwritten."""
    read = {os.path.realpath(path) for path in values.get("files", ())}
    for name, path in values.items():
        if isinstance(path, Path) and os.path.realpath(path) in read:
            raise UsageError(f"--{name}: {path} is a file of episodes; give another one")


def _program() -> str:
    return "ope-gym" if Path(sys.argv[0]).stem == "ope-gym" else "python -m ope_gym"


def coloured(text: str) -> str:
    """Return a text with the names of verdicts in their colours, if a terminal shows it.

    https://no-color.org
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return re.sub(
        r"\b(green|amber|red)\b", lambda word: f"\x1b[{_CODES[word[0]]}m{word[0]}\x1b[0m", text
    )


def _print(text: str) -> None:
    """Print to a reader that may have gone, as `head` does; names from files cannot act on it."""
    try:
        print(coloured(stopping.escaped(text)), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error
