"""--set FIELD=VALUE: settings from the command line, checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any

from studies import BESIDE, STUDIES, load_study, study_class
from studies.frame import Study


def chosen_studies(name: str, pairs: Sequence[str]) -> list[Study]:
    """The studies that a command runs: one, or all that there are, with their settings.

    With "all" a setting goes to every study that has such a field. Without settings the studies
    of `BESIDE` come, too.

    Raises:
        ValueError: If no study of the command has a field, or a value does not fit.
    """
    names = list(STUDIES) if name == "all" else [name]
    given = [_split(pair) for pair in pairs]
    known = {each: fields(study_class(each)) for each in names}
    for field, _ in given:
        if not any(field in has for has in known.values()):
            listed = "; ".join(f"{each} has {', '.join(has)}" for each, has in known.items())
            raise ValueError(f"--set {field}=…: no such field: {listed}")
    studies = []
    for each, has in known.items():
        settings = {
            field: _value(each, field, text, *has[field]) for field, text in given if field in has
        }
        studies.append(load_study(each, **settings))
        if name == "all" and not given:
            studies += [load_study(each, **beside) for beside in BESIDE.get(each, ())]
    return studies


def fields(kind: type[Study]) -> dict[str, tuple[Any, Any]]:
    """Type and default of each setting."""
    hints = typing.get_type_hints(kind)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}


def described(hint: Any) -> str:
    """A type in words: "a or b" for choices, "[int, …]" for lists."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"[{described(typing.get_args(hint)[0])}, …]"
    return str(getattr(hint, "__name__", hint))


def _split(pair: str) -> tuple[str, str]:
    field, sign, text = pair.partition("=")
    if not (sign and field.strip() and text.strip()):
        raise ValueError(f"--set {pair}: give FIELD=VALUE")
    return field.strip(), text.strip()


def _value(study: str, field: str, text: str, hint: Any, default: Any) -> Any:
    """The value that a text stands for: JSON, or else the word itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    value = tuple(value) if isinstance(value, list) else value
    if not _fits(value, hint):
        usual = json.dumps(default)
        raise ValueError(
            f"--set {field}={text}: {study} wants {described(hint)}, its default is {usual}"
        )
    return value


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple) and len(value) > 0 and all(_fits(v, inner) for v in value)
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True
