"""Check documents that a run holds: anybody may have written them, with any version.

A shape is a type, a constant, a list of one shape, a dictionary of shapes, or a tuple of
alternatives. A document may have more fields than its shape names.
"""

from __future__ import annotations

import json
import math
from typing import Any

VERDICTS = ("red", "amber", "green")  # as numbers: 0, 1, 2; as in ope_gym.report.scalars
_NUMBER, _COUNT = (int, float), int
_MAYBE = (int, float, None)
_VALUE = {**dict.fromkeys(("value", "low", "high", "fresh_episodes"), _MAYBE), "verdict": VERDICTS}
_ESTIMATE = {
    **_VALUE,
    "name": str,
    "ess": _MAYBE,
    "basis": str,
    **{words: [str] for words in ("reasons", "advice", "notes")},
}
_CURVES = {"x": [_NUMBER], "curves": [{"names": [str], "y": [_MAYBE]}]}
_BEHAVIOURS = {"names": [str], "episodes": [_MAYBE], "weight": [_MAYBE], "left_out": _COUNT}
_EVALUATION = {
    **dict.fromkeys(("headline", "recommended", "data", "regime", "explained", "method"), str),
    "level": _NUMBER,
    "truth": ([_MAYBE], None),
    "estimates": [_ESTIMATE],
    "left_out": _COUNT,
    "ess": ({**_CURVES, "episodes": _COUNT, "bounds": [_NUMBER]}, None),
    "concentration": (_CURVES, None),
    "behaviours": (_BEHAVIOURS, None),
    "overlap": ({"rows": [str], "columns": [str], "matrix": [[_MAYBE]]}, None),
}
_RANKING = {
    "by": str,
    "policies": [{**_VALUE, "name": str, "chance": _MAYBE}],
    "left_out": _COUNT,
    "cautious": str,
}
_FREE = {
    **_VALUE,
    "headline": str,
    "level": _NUMBER,
    "episodes": _COUNT,
    "shares": dict,
}
_SHAPES = {"evaluation": _EVALUATION, "ranking": _RANKING}  # by kind; free values are the others


def parse(content: Any, kind: str) -> dict[str, Any]:
    """Return a document of this kind; raise ValueError if it is none, or not one of ours.

    >>> parse(b'{"kind": "ranking", "by": NaN}', "ranking")
    Traceback (most recent call last):
        ...
    ValueError: NaN is no number
    """
    if not isinstance(content, bytes | str):
        raise ValueError("it is no text")
    try:
        document = json.loads(content, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise ValueError(f"it is no {kind}")
    shape = _SHAPES.get(kind, _FREE)
    for field, part in shape.items():
        if field not in document or not _fits(document[field], part):
            raise ValueError(f"its {field} is missing, or of another kind")
    return document


def _fits(value: Any, shape: Any) -> bool:
    """Tell whether a value has a shape."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            field in value and _fits(value[field], part) for field, part in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(part, shape[0]) for part in value)
    if isinstance(shape, tuple):
        return any(_fits(value, part) for part in shape)
    if isinstance(shape, type):
        return isinstance(value, shape) and not isinstance(value, bool)
    return type(value) is type(shape) and bool(value == shape)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number
