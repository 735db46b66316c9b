"""Find studies by name and give them settings from `--set FIELD=VALUE`, checked before any run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import typing
from collections.abc import Sequence
from typing import Any

from studies import STUDIES
from studies.harness.study import Study


def study_class(name: str) -> type[Study]:
    """Return the class of a study: the subclass of `Study` in studies/NAME/study.py."""
    module = importlib.import_module(f"studies.{name}.study")
    return next(
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Study) and kind.__module__ == module.__name__
    )


def load_study(name: str, **settings: Any) -> Study:
    """Return a study; `settings` replace the defaults of its fields."""
    return study_class(name)(**settings)


def chosen_studies(name: str, pairs: Sequence[str]) -> list[Study]:
    """Return the studies that a command runs, with their settings.

    Args:
        name: of a study, or "all". All studies come with their variants, and a study with those
            that belong to it, if there are no settings.
        pairs: settings FIELD=VALUE; with "all" each goes to every study that has the field.

    Raises:
        ValueError: If no study of the command has a field, or a value does not fit.
    """
    names = list(STUDIES) if name == "all" else [name]
    if name != "all" and not pairs:
        names += STUDIES[name].also
    given = [_split(pair) for pair in pairs]
    kinds = {each: study_class(each) for each in names}
    known = {each: fields(kind) for each, kind in kinds.items()}
    for field, _ in given:
        if not any(field in has for has in known.values()):
            listed = "; ".join(f"{each} has {', '.join(has)}" for each, has in known.items())
            raise ValueError(f"--set {field}=…: no such field: {listed}")
    studies = []
    for each, has in known.items():
        settings = {
            field: _value(each, field, text, *has[field]) for field, text in given if field in has
        }
        studies.append(kinds[each](**settings))
        if name == "all" and not given:
            studies += [kinds[each](**variant) for variant in STUDIES[each].variants]
    return studies


def listed_studies() -> list[str]:
    """Return one line for each study and one for each of its fields, for the help."""
    lines = []
    for name in STUDIES:
        plan = STUDIES[name]
        lines.append(f"  {name}: {plan.runs} runs{plan.takes and f', {plan.takes}'}")
        for field, (hint, default) in fields(study_class(name)).items():
            usual = json.dumps(default, ensure_ascii=False).strip('"')
            lines.append(f"    {field}={usual}  ({described(hint)})")
    return lines


def fields(kind: type[Study]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each setting."""
    hints = typing.get_type_hints(kind)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}


def described(hint: Any) -> str:
    """Return a type in words: "a or b" for choices, "[int, …]" for lists."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"[{described(typing.get_args(hint)[0])}, …]"
    return str(getattr(hint, "__name__", hint))


def _split(pair: str) -> tuple[str, str]:
    """Return the field and the text of FIELD=VALUE."""
    field, sign, text = pair.partition("=")
    if not (sign and field.strip() and text.strip()):
        raise ValueError(f"--set {pair}: give FIELD=VALUE")
    return field.strip(), text.strip()


def _value(study: str, field: str, text: str, hint: Any, default: Any) -> Any:
    """Return the value that a text stands for: JSON, or else the word itself."""
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
    """Return whether a value is of the type of its field."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple) and len(value) > 0 and all(_fits(v, inner) for v in value)
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True
