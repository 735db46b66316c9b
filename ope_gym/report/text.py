"""Format results as text tables, JSON and data frames."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ope_gym.arrays import finite
from ope_gym.inference.estimate import Estimate, Sample


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    r"""Return the lines of a table with a rule under its head.

    Args:
        rows: cells; the first row is the head.
        left: columns to align to the left; the others are aligned to the right.

    >>> print(*align([["policy", "value"], ["a", "1.5"], ["b", "12"]]), sep="\n")
    policy  value
    -------------
    a         1.5
    b          12
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return lines


def markdown(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a Markdown table; the arguments are those of `align`."""
    rule = [":--" if column in left else "--:" for column in range(len(rows[0]))]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Turn reasons by name into names by reason, in order."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return names


def reasons(given: Mapping[str, str]) -> list[str]:
    """Return one line for each distinct reason, headed by the names that have it."""
    return [f"{', '.join(names)}: {reason}" for reason, names in grouped(given).items()]


def headline(estimate: Estimate, name: str = "the policy") -> str:
    """Say in a sentence what a policy is worth, how sure that is, and whether to use it."""
    e, verdict = estimate, estimate.verdict
    who = f"{name[0].upper()}{name[1:]}"
    if not math.isfinite(e.value):
        return f"The value of {name} is unknown: {verdict.reasons[0]}."
    ends = f"{number(e.interval.low, 3)} to {number(e.interval.high, 3)}"
    said = f"{who} is worth {number(e.value, 3)} ({e.interval.level:.0%}: {ends})"
    if math.isfinite(e.worth):
        said += f", as sure as about {episodes(e.worth)} fresh episodes would make you"
    care = {"amber": "Use with care", "red": "Do not use this number"}.get(verdict.colour)
    return f"{said}. {care}: {verdict.reasons[0]}." if care else f"{said}."


def wrap(text: str) -> str:
    """Break text into lines of at most 100 characters, all but the first indented."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def number(value: float, digits: int = 5) -> str:
    """Return a number with so many significant digits, or "undefined"."""
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def interval(low: float, high: float, digits: int = 5) -> str:
    """Return the two ends of an interval in brackets."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def episodes(value: float) -> str:
    """Return a number of episodes, with a decimal if it is below ten, or "undefined"."""
    return "undefined" if math.isnan(value) else f"{value:,.{1 if value < 9.95 else 0}f}"


def share(value: float) -> str:
    """Return a share in per cent; a small one is "<0.1%" rather than "0%"."""
    if math.isnan(value):
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{value:.1%}"


def chance(value: float) -> str:
    """Return a probability that was estimated from draws, never as 0 or 1."""
    if math.isnan(value):
        return "undefined"
    return "<0.1%" if value < 0.001 else ">99.9%" if value > 0.999 else f"{value:.1%}"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    >>> count(1, "episode"), count(2000, "policy", "policies")
    ('1 episode', '2,000 policies')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(sample: Sample) -> str:
    """Describe how much data a sample has: "90 episodes, 812 steps, 3 behaviours"."""
    acted = int(np.count_nonzero(sample.counts))
    return (
        f"{count(sample.trajectories, 'episode')}, {count(sample.steps, 'step')}, "
        f"{count(acted, 'behaviour')}"
    )


def plain(row: object) -> dict[str, Any]:
    """Return the fields of a dataclass for JSON; undefined numbers are None."""
    return {k: finite(v) if isinstance(v, float) else v for k, v in vars(row).items()}


def to_json(content: Mapping[str, Any], path: str | Path | None = None) -> str:
    """Return plain content as JSON text, and write it to `path` if one is given."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame; the first column is the index."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame needs pandas: pip install pandas, or use to_dict") from error
    return pandas.DataFrame(rows).set_index(next(iter(rows[0])))
