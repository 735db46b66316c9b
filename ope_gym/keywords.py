"""Say what to give instead of a keyword argument that a function does not know."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence: the known keyword that a name resembles, else all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}=?" if close else f"; it takes {', '.join(known)}"


def explained(
    function: Callable[P, R],
    instead: Callable[[str, Sequence[str]], str] = nearest,
    options: Iterable[str] = (),
) -> Callable[P, R]:
    """Let a function say what to give instead of a keyword that it does not know.

    Args:
        function: the function, or the `__init__` of a class.
        instead: returns the end of the message for a name, given the known ones.
        options: the keywords that stand behind `**` in its signature.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    if len(known) < len(parameters):
        known += options
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{called} has no argument {name}={instead(name, known)}")
        return function(*args, **kwargs)

    return checked


def explained_class(cls: C) -> C:
    """Let a class say what to give instead of a keyword that it does not know."""
    cls.__init__ = explained(cls.__init__)  # type: ignore[misc]
    return cls
