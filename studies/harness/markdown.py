"""Write numbers, tables, claims and whole studies as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

PERCENTILES = ("paper: 5th", "50th", "95th", "ours: 5th", "50th", "95th")  # head of six columns


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with so many significant digits; very small or large ones get an exponent."""
    if value is None or math.isnan(value):
        return "undefined"
    if value == 0:
        return "0"
    return f"{value:.{digits}g}".replace("-", "−").replace("e−0", "e−")


def amount(value: float) -> str:
    """Format a number with three digits, or with all before the point: 1290, not 1.29e+03."""
    whole = len(str(int(abs(value)))) if math.isfinite(value) else 0
    return number(value, max(3, whole))


def tidy(text: str) -> str:
    """Write one kind of minus before numbers, no sign before 0, and a space before per cent."""
    text = re.sub(r"(?<=\d)%", " %", text)
    text = re.sub(r"(?<![\w`\-−])-(?=\.?\d)", "−", text)
    return re.sub(r"[−+](?=0(?:\.0+)?(?![\d.]))", "", text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table.

    >>> table(["N", "MSE"], [(50, 0.25)])
    ['| N | MSE |', '|---|---|', '| 50 | 0.25 |']
    """
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def claims_table(claims: Sequence[dict[str, Any]], link: str = "") -> str:
    """Return an overview of claims given by `Claim.to_dict`; `link` is the label of their study."""
    rows = []
    for i, claim in enumerate(claims, start=1):
        words = f"[{claim['words']}](#{link}-{i})" if link else claim["words"]
        rows.append((words, claim["source"], _verdict(claim)))
    return tidy("\n".join(table(["claim", "where", "verdict"], rows)))


def claim_section(claim: dict[str, Any], anchor: str = "") -> str:
    """Return one claim with its evidence."""
    evidence = claim["evidence"]
    exact = any(e["exact"] is not None for e in evidence)
    rows = []
    for e in evidence:
        said = e["verdict"] + (f": {e['open']}" if e["open"] else "")
        rows.append(
            [
                e["where"],
                e["shown"] or number(e["difference"]),
                "exact" if e["standard_error"] == 0 else number(e["standard_error"]),
                *["" if e["exact"] is None else number(e["exact"])] * exact,
                said + (f"; {e['note']}" if e["note"] else ""),
            ]
        )
    head = ["where", "measured", "std. error", *["exact value"] * exact, "verdict; note"]
    lines = [
        (f'<a id="{anchor}"></a>' if anchor else "")
        + f"{_verdict(claim, str.capitalize)}: “{claim['words']}” ({claim['source']}).",
        "",
        f"Measured: {claim['measure']}.",
        "",
        *table(head, rows),
        *(["", claim["why"]] if claim["why"] else []),
    ]
    return tidy("\n".join(lines))


def study_section(result: dict[str, Any], picture: str | None, *, brief: bool = False) -> str:
    """Return a study with its tables, picture and claims; if `brief`, only the verdicts of these.

    Args:
        result: content of the study's JSON file.
        picture: path of the picture relative to the page, or None.
        brief: whether to leave out the evidence.
    """
    name, settings = result["label"], result["changed"]
    command = f"python -m studies {result['study']} --runs {result['runs']} --seed {result['seed']}"
    command += "".join(f" --set '{field}={value}'" for field, value in settings.items())
    title = result["title"] + "".join(f", {f} = {v}" for f, v in settings.items())
    parts = [
        f'<a id="{name}"></a>\n\n{"###" if brief else "##"} {title}',
        f"`{command}`, ope_gym {result['version']}, code and settings {result['fingerprint']}.",
        result["table"],
    ]
    if picture:
        parts.append(f"[![{title}]({picture})]({picture})")  # a click shows it at its full size
    if brief:
        parts.append(claims_table(result["claims"]))
    else:
        sections = enumerate(result["claims"], start=1)
        parts += [claim_section(claim, f"{name}-{i}") for i, claim in sections]
    return "\n\n".join(parts) + "\n"


def _verdict(claim: dict[str, Any], form: Callable[[str], str] = str) -> str:
    """Return the verdict in bold, with the reason if there is one."""
    reason = f" ({claim['reason']})" if claim["reason"] else ""
    return f"**{form(claim['verdict'])}**{reason}"
