"""Format results: the sentence that comes first, text tables, JSON and data frames."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ope_gym.arrays import finite
from ope_gym.estimators.table import RECOMMENDED
from ope_gym.files import write_file
from ope_gym.inference.estimate import IN_SAMPLE, Estimate, Sample
from ope_gym.verdict import Reason, Verdict
from ope_gym.verdict import chance as chance

_Row = TypeVar("_Row")

_LARGE = 1e9  # numbers from here on are written with an exponent


def headline(estimate: Estimate, name: str = "the policy") -> str:
    """Say in a sentence or two what a policy is worth, how sure that is, and whether to use it.

    The number has as many digits as its standard error leaves. Estimators other than auto and NFIS
    are named, as in "is worth 281 by MDR (95 %: 256 to 306)". An estimate from episodes that the
    policy learned from is not compared with fresh episodes: it is optimistic, however precise.

    Args:
        estimate: Value of the policy, as a rule `evaluation.best`.
        name: Name of the policy, such as "policy 10"; "it" where it was named before.
    """
    ends, verdict = estimate.interval, estimate.verdict
    by = "" if estimate.name in RECOMMENDED else f" by {estimate.name}"
    reason = next(iter(verdict.reasons), None)
    if not math.isfinite(estimate.value):
        what = "Its value" if name == "it" else f"The value of {name}"
        return f"{what}{by} is unknown: {reason}."
    digits = decimals(estimate)
    worth = f"worth {rounded(estimate.value, digits)}{by}"
    known = not math.isnan(ends.low + ends.high)
    if ends.method == "none":
        worth += " (no error was asked for)"
    elif known:
        low, high = rounded(ends.low, digits), rounded(ends.high, digits)
        worth += f" ({level(ends.level)}: {low} to {high})"
    else:
        worth += " (how sure that is cannot be known)"
    who = sentence(name)
    if verdict.colour == "red":
        return f"{who} may be {worth}, but do not use this number: {reason}."
    if estimate.sample.regime == "in-sample":  # matters more than how few episodes there are
        reason = next((r for r in verdict.reasons if r.code in IN_SAMPLE), reason)
    elif known and math.isfinite(estimate.fresh_episodes):
        worth += f", {Reason('sure', fresh=estimate.fresh_episodes)}"
    care = f" Use with care: {reason}." if verdict.colour == "amber" else ""
    return f"{who} is {worth}.{care}{_whatever_the_model(estimate, digits)}"


def _whatever_the_model(estimate: Estimate, digits: int | None) -> str:
    """Say where the value lies whatever the bias of the model that an estimate rests on."""
    free = estimate.model_free
    if not estimate.by_model or free is None or not math.isfinite(free.low + free.high):
        return ""
    low, high = rounded(free.low, digits), rounded(free.high, digits)
    bias = rounded(estimate.breakdown, digits)
    return f" Whatever the model: {low} to {high}; the above holds up to a model bias of {bias}."


def sentence(name: str) -> str:
    """Return a name as it begins a sentence; names that people gave stay as they are."""
    ours = name == "it" or name.startswith(("policy ", "target ", "the "))
    return name[:1].upper() + name[1:] if ours else name


def decimals(estimate: Estimate) -> int | None:
    """Return how many decimals the error leaves to a value: two digits of the standard error.

    None where there is no error to go by.
    """
    ends = estimate.interval
    digits = places(estimate.standard_error)
    return places((ends.high - ends.low) / 4) if digits is None else digits


def places(error: float) -> int | None:
    """Return the decimals that show two digits of an error; None where it is not positive.

    >>> places(41.3), places(9.94), places(9.96), places(0.021), places(0.0)
    (0, 1, 0, 3, None)
    """
    if not (math.isfinite(error) and error > 0.0):
        return None
    return max(1 - math.floor(math.log10(float(f"{error:.1e}"))), 0)


def rounded(value: float, digits: int | None) -> str:
    """Return a number with so many decimals; without a number of them, with four digits.

    >>> rounded(281.354, 0), rounded(-0.04, 1), rounded(12345.6, 0), rounded(2.5, None)
    ('281', '0.0', '12,346', '2.5')
    """
    if math.isnan(value):
        return "undefined"
    if digits is None or digits > 9 or abs(value) >= _LARGE:
        return f"{value:.4g}"
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if not any(c in "123456789" for c in text) else text


def shorten(name: str, most: int) -> str:
    """Return a name of at most `most` characters.

    >>> shorten("episodes", 8), shorten("episodes", 4)
    ('episodes', 'epi…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def level(confidence: float) -> str:
    """Return a confidence level: 0.95 is "95 %"."""
    return f"{100 * confidence:g} %"


def ends_head(estimate: Estimate, verbose: bool = False) -> str:
    """Return the head of a column of intervals; their method where it is not the usual one."""
    method = estimate.interval.method
    shown = verbose or method != "ess-t"
    return f"{level(estimate.interval.level)} interval" + (f" ({method})" if shown else "")


def estimate_cells(estimate: Estimate, first: Estimate) -> list[str]:
    """Return value, standard error and interval, with the digits that the errors leave.

    Args:
        estimate: Estimate of the row.
        first: First estimate of the table, whose decimals all rows have; but a row with a much
            smaller error has more of them, so that one digit of its error is seen.
    """
    digits, common, ends = decimals(estimate), decimals(first), estimate.interval
    if digits is not None and common is not None:
        digits = max(common, digits - 1)
    error = estimate.standard_error
    return [
        rounded(estimate.value, digits),
        rounded(error, digits) if math.isfinite(error) else number(error),
        f"[{rounded(ends.low, digits)}, {rounded(ends.high, digits)}]",
    ]


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


def table(
    rows: Iterable[_Row],
    columns: Mapping[str, Callable[[_Row], str]],
    left: Collection[int] = (0,),
) -> list[str]:
    """Return the lines of a table with one line for each row.

    Args:
        rows: What the lines show.
        columns: Functions that turn a row into its cell, by the head of the column.
        left: Columns to align to the left.
    """
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return align([list(columns), *cells], left)


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


def itemised(given: Mapping[str, Iterable[object]], every: str = "all") -> list[str]:
    """Return one line for each distinct sentence, headed by the names that share it.

    Args:
        given: Sentences, or reasons, by name.
        every: What to call the names where all of several share a sentence.

    >>> itemised({"a": ["few", "old"], "b": ["few"], "c": ["few"]})
    ['all: few', 'a: old']
    """
    names: dict[str, list[str]] = {}
    for name, sentences in given.items():
        for sentence in sentences:
            names.setdefault(str(sentence), []).append(name)
    return [
        f"{every if len(who) == len(given) > 2 else ', '.join(who)}: {sentence}"
        for sentence, who in names.items()
    ]


def remarks(verdicts: Mapping[str, Verdict], verbose: bool = False) -> list[str]:
    """Return what speaks against estimates, and what would help.

    Args:
        verdicts: Verdicts by name, that of the recommended estimate first.
        verbose: Whether to give advice for all of them rather than the first.
    """
    lines = itemised({name: verdict.against for name, verdict in verdicts.items()})
    if verbose:
        advice = itemised({name: verdict.advice for name, verdict in verdicts.items()})
        lines += [f"what would help {line}" for line in advice]
    else:
        lines += [f"what would help: {words}" for words in next(iter(verdicts.values())).advice]
    return lines


def bases(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return what estimates rest on besides the weights."""
    return itemised({name: verdict.basis for name, verdict in verdicts.items()})


def wrap(text: str, indent: str = "    ") -> str:
    """Break text into lines of at most 100 characters, or those of a narrower terminal.

    All but the first are indented.
    """
    width = min(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100
    kept = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)  # stays with its number
    lines = textwrap.fill(kept, width, subsequent_indent=indent, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}%", " %")


def number(value: float, digits: int = 5) -> str:
    """Return a number with so many significant digits, or "undefined"."""
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def plus_minus(value: float, error: float, digits: int = 3) -> str:
    """Return a value with so many digits, and its standard error with two."""
    return f"{number(value, digits)} ± {number(error, 2)}"


def effective(size: float, enough: float) -> str:
    """Return an effective number of episodes, with a question mark if it is not enough.

    >>> effective(12.34, 10.0), effective(4.0, 10.0)
    ('12.3 ', '4.0?')
    """
    return f"{size:.1f}{' ' if size >= enough else '?'}"


def interval(low: float, high: float, digits: int = 5) -> str:
    """Return the two ends of an interval in brackets."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def episodes(value: float) -> str:
    """Return a number of episodes, with a decimal if it is below ten, or "undefined"."""
    return "undefined" if math.isnan(value) else f"{value:,.{1 if value < 9.95 else 0}f}"


def share(value: float) -> str:
    """Return a share in per cent; a small one is "<0.1 %" rather than "0 %"."""
    if math.isnan(value):
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1 %"
    return f"{100 * value:.1f} %"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    >>> count(1, "episode"), count(2000, "policy", "policies")
    ('1 episode', '2,000 policies')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def actors(sample: Sample) -> str:
    """Describe who acted: "3 behaviours", "2 loggers", "16 policies (33 sequences of them)"."""
    acted = [b for b, n in zip(sample.behaviours, sample.counts, strict=True) if n]
    if sample.propensities:  # folds of one logger are one
        return count(len({b.logger or b.name for b in acted}), "logger")
    if all(len(b.policies) <= 1 for b in acted):
        return count(len(acted), "behaviour")
    policies = {k for b in acted for k in b.policies}
    return f"{count(len(policies), 'policy', 'policies')} ({len(acted):,} sequences of them)"


def size(sample: Sample) -> str:
    """Describe how much data a sample has: "90 episodes, 812 steps, 3 behaviours"."""
    counts = count(sample.trajectories, "episode"), count(sample.steps, "step")
    return f"{counts[0]}, {counts[1]}, {actors(sample)}"


def plain(row: object) -> dict[str, Any]:
    """Return the fields of a dataclass for JSON; undefined numbers are None."""
    return {k: finite(v) if isinstance(v, float) else v for k, v in vars(row).items()}


def to_json(content: Mapping[str, Any], path: str | Path | None = None) -> str:
    """Return plain content as JSON text, and write it to `path` if one is given."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        write_file(path, text + "\n")
    return text


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame; the first column is the index."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame needs pandas: pip install pandas, or use to_dict") from error
    return pandas.DataFrame(rows).set_index(next(iter(rows[0])))
