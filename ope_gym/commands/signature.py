"""Make command-line options from signatures and docstrings.

    def rank(files: list[Path], *, target: str = "last", level: float = 0.95) -> ...

has the options `--target` and `--level` with the defaults of its signature, described by the `Args`
of its docstring. The type says how a value is read:

    bool                       a switch
    list[float]                any number of values
    tuple[float, float]        two values: low and high
    bool | str                 an option with or without a value
    str | None                 a word; none stands for None where that is not the default
    dict[str, str]             any number of NAME=VALUE, also of several uses of the option
    Annotated[str, (a, b)]     one of these words
    Annotated[Path, function]  what the function makes of the word
    Annotated[str, "K"]        a word that the help calls K; any of these three may come together
    a dataclass                its fields, in a group of the help

A first parameter without a default is positional, others without one are required. What cannot be
typed on a command line, such as a function, is left out.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

_METAVARS = {int: "N", float: "X", Path: "FILE"}
_ARGUMENT = re.compile(r"(\w+) (?:is|has) (?:\(.*?\)|'.*?'|\S+?)(?:[;:]|, but) ")


class UsageError(ValueError):
    """A command line that cannot be understood."""


def takes(api: Callable[[], Callable[..., Any]], *names: str) -> Callable[[Any], Any]:
    """Let a command take parameters of a Python function as its `**options`.

    Args:
        api: Function that returns that function, when it is needed.
        names: Names of the parameters.
    """

    def mark(command: Any) -> Any:
        command.taken = api, names
        return command

    return mark


class Command:
    """A function as a command.

    Args:
        function: Function whose parameters are the options.
        prog: Name of the command in its help.
        descriptions: Descriptions of parameters that the function's own docstring leaves out.
        about: Text above the options in the help; by default the function's docstring.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        prog: str,
        descriptions: Mapping[str, str],
        about: str | None = None,
    ) -> None:
        self._function, self._descriptions = function, descriptions
        about = about or _split(function)[0]
        self._parser = _Parser(prog=prog, description=about, formatter_class=_Formatter)
        self._add(function, self._parser)
        files = "FILE [FILE ...] " if self._parser._get_positional_actions() else ""
        self._parser.usage = f"{prog} {files}[options]"

    def parse(self, words: list[str]) -> dict[str, Any]:
        """Return the values of all options by name; raise UsageError for wrong words."""
        values, unknown = self._parser.parse_known_args(words)
        if unknown:
            known = list(self._parser._option_string_actions)
            near = [match for word in unknown for match in get_close_matches(word, known, 1)]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            self._parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return vars(values)

    def call(self, values: Mapping[str, Any]) -> Any:
        """Call the function with parsed values."""
        return _call(self._function, values)

    def _add(self, source: Callable[..., Any], group: argparse._ActionsContainer) -> None:
        """Add the parameters of a function or dataclass to the parser."""
        texts = described(source)
        for parameter in _parameters(source):
            name, default = parameter.name, parameter.default
            if is_dataclass(parameter.hint):
                title = _split(parameter.hint)[0].partition("\n")[0].rstrip(".")  # type: ignore[arg-type]
                self._add(parameter.hint, self._parser.add_argument_group(title))  # type: ignore[arg-type]
            elif declaration := _declaration(parameter.hint):
                text = texts.get(name) or parameter.text
                if not text or text.startswith("as in "):
                    text = self._descriptions.get(name, text)
                if parameter.positional:
                    group.add_argument(name, **declaration | {"nargs": "+"}, help=_help(text))
                elif default is inspect.Parameter.empty:
                    group.add_argument(_flag(name), **declaration, required=True, help=_help(text))
                else:
                    text = _help(text, default)
                    group.add_argument(_flag(name), **declaration, default=default, help=text)


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a function or dataclass, `X | None` as X."""

    name: str
    hint: Any
    default: Any
    positional: bool
    text: str
    optional: bool


def _parameters(source: Callable[..., Any], only: Sequence[str] = ()) -> Iterator[_Parameter]:
    """Yield the parameters of a function or dataclass, of some names alone if they are given."""
    texts = described(source)
    parameters = inspect.signature(source).parameters.values()
    chosen = [p for p in parameters if p.kind is not p.VAR_KEYWORD and (p.name in only or not only)]
    # Others may have types that are known to type checkers alone.
    types = SimpleNamespace(__annotations__={p.name: p.annotation for p in chosen})
    module = vars(sys.modules[inspect.unwrap(source).__module__])
    hints = get_type_hints(types, module, include_extras=True)
    for parameter in chosen:
        hint, default = hints[parameter.name], parameter.default
        free = parameter.kind is not parameter.KEYWORD_ONLY
        if optional := get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
            hint = Union[tuple(kind for kind in get_args(hint) if kind is not NoneType)]  # noqa: UP007
        yield _Parameter(
            parameter.name,
            hint,
            default,
            free and default is parameter.empty,
            texts.get(parameter.name, ""),
            optional,
        )
    if hasattr(source, "taken"):
        api, names = source.taken
        yield from _parameters(api(), names)


def described(*sources: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of the parameters of functions or dataclasses.

    >>> described(takes)["names"]
    'Names of the parameters.'
    """
    entries = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.M)
    return {
        name: " ".join(text.split())
        for source in sources
        for name, text in entries.findall(textwrap.dedent(_split(source)[1]))
    }


def _split(source: Callable[..., Any]) -> tuple[str, str]:
    """Return the docstring without its sections, and the section Args."""
    text, *sections = re.split(r"^(\w+):\n(?= )", inspect.getdoc(source) or "", flags=re.M)
    return text.strip(), dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(text: str, default: Any = None) -> str:
    """Return the description of a parameter as the help of an option, with its default."""
    text = re.sub(r"\b[a-z]+_[a-z]+\b", lambda name: _flag(name[0]), text).rstrip(".")
    text = (text[:1].upper() + text[1:]).replace("%", "%%")
    if default is None or default is False or default == [] or "(default" in text:
        return text
    values = default if isinstance(default, list) else [default]
    return f"{text} (default: {' '.join(map(_typed, values))})"


def _typed(value: Any) -> str:
    """Return a value as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _declaration(hint: Any) -> dict[str, Any]:
    """Return how argparse reads values of a type; nothing if they cannot be typed."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        declaration = _declaration(members[0])
        for extra in members[1:]:
            key = "metavar" if isinstance(extra, str) else "type" if callable(extra) else "choices"
            declaration[key] = extra
        return declaration
    if origin in (Union, UnionType):
        if bool in members:
            return {"nargs": "?", "const": True}
        if Path in members:
            return _declaration(Path)
        return {"type": _number_or_word if int in members else str} if str in members else {}
    if origin is list:
        return {**_declaration(members[0]), "nargs": "*"}
    if origin is dict:
        return {"action": _Gather, "nargs": "+", "metavar": "NAME=VALUE"}
    if origin is tuple:
        return {"type": members[0], "nargs": 2, "metavar": ("LOW", "HIGH")}
    if hint is bool:
        return {"action": "store_true"}
    if hint in _METAVARS:
        return {"type": hint, "metavar": _METAVARS[hint]}
    return {"type": str} if hint is str else {}


def _number_or_word(text: str) -> int | str:
    """Return a whole number as such, and other words as they are."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _call(source: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function, or make a dataclass, with the values of its parameters."""
    arguments = {}
    for parameter in _parameters(source):
        name, value = parameter.name, values.get(parameter.name)
        if is_dataclass(parameter.hint):
            arguments[name] = _call(parameter.hint, values)  # type: ignore[arg-type]
        elif parameter.optional and value == "none":
            arguments[name] = None
        elif name in values:
            is_pair = get_origin(parameter.hint) is tuple and value is not None
            arguments[name] = tuple(value) if is_pair else value  # type: ignore[arg-type]
    return source(**arguments)


def as_options(message: str, values: Mapping[str, Any]) -> str:
    """Return a message about an argument of Python as one about the option of that name.

    >>> as_options("level is 95.0; it lies within (0, 1)", {"level": 95.0})
    '--level 95: it lies within (0, 1)'
    """
    named = _ARGUMENT.match(message)
    if named is None or values.get(named[1]) is None:
        return message
    value = values[named[1]]
    words = map(_typed, value if isinstance(value, list | tuple) else [value])
    return f"{_flag(named[1])} {' '.join(words)}: {message[named.end() :]}"


class _Gather(argparse.Action):
    """Gather the words NAME=VALUE of all uses of an option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        gathered = dict(getattr(namespace, self.dest) or {})
        for word in values:
            name, equals, value = word.partition("=")
            if not equals:
                raise argparse.ArgumentError(self, f"{word!r} is not of the form NAME=VALUE")
            gathered[name] = value
        setattr(namespace, self.dest, gathered)


class _Parser(argparse.ArgumentParser):
    """A parser that raises where others print their usage and end the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _Formatter(argparse.HelpFormatter):
    """Fill paragraphs to the width of the terminal; keep those with indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if re.search(r"^ ", part, re.M) else textwrap.fill(part, width)
            for part in text.split("\n\n")
        )
