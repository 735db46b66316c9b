"""Text tables for people."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    r"""Lines of a table, a rule under its head; columns not named in `left` are put to the right.

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
    """The same in Markdown."""
    rule = [":--" if column in left else "--:" for column in range(len(rows[0]))]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """From reasons by name to names by reason, in order."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return names


def wrap(text: str) -> str:
    """At most 100 characters a line, what follows the first indented."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def number(value: float, digits: int = 5) -> str:
    """Significant digits, or "undefined"."""
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def share(value: float) -> str:
    """A share in per cent; "<0.1%" is not "0%"."""
    if math.isnan(value):
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{value:.1%}"


def chance(value: float) -> str:
    """A probability from draws, never quite 0 or 1."""
    if math.isnan(value):
        return "undefined"
    return "<0.1%" if value < 0.001 else ">99.9%" if value > 0.999 else f"{value:.1%}"


def finite(value: float) -> float | None:
    """For JSON: None where a number is undefined."""
    return float(value) if math.isfinite(value) else None
