"""Show results as HTML tables: in notebooks, and under the charts of a report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ope_gym.inference.estimate import Estimate
from ope_gym.report import text

# tones that can be read on white and on black: a notebook does not say which it is
_STYLE = """
.ope td, .ope th { text-align: right; } .ope .word { text-align: left; }
.ope .green { color: #1a9870; } .ope .amber { color: #c77700; } .ope .red { color: #d9483b; }
"""


def notebook(estimates: Mapping[str, Estimate], headline: str) -> str:
    """Return the headline, the table and the reasons, for a notebook."""
    parts = [f"<p><b>{escape(headline)}</b></p>", estimate_table(estimates), reasons(estimates)]
    return f'<div class="ope"><style>{_STYLE}</style>{"".join(parts)}</div>'


def estimate_table(estimates: Mapping[str, Estimate]) -> str:
    """Return a row for each estimator, as the text table has them."""
    best = next(iter(estimates.values()))
    ends = text.ends_head(best)
    rows = [["estimator", "value", "std.err", ends, "ESS", "fresh episodes", "verdict"]]
    for name, e in estimates.items():
        ess, fresh = text.episodes(e.diagnostics.ess), text.episodes(e.fresh_episodes)
        rows.append([name, *text.estimate_cells(e, best), ess, fresh, e.verdict.colour])
    return table(rows, words=(0, 6))


def reasons(estimates: Mapping[str, Estimate]) -> str:
    """Return what speaks against the estimates, and what would help the first of them."""
    verdicts = {name: e.verdict for name, e in estimates.items()}
    lines = text.remarks(verdicts) + text.bases(verdicts)
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def table(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Return an HTML table; the first row is its head.

    Args:
        rows: Cells; those that name a verdict get its colour.
        words: Columns of words, aligned to the left.
    """
    return f"<table>{''.join(_row(row, words, head=not k) for k, row in enumerate(rows))}</table>"


def _row(cells: Sequence[str], words: Sequence[int], *, head: bool) -> str:
    tag, marked = "th" if head else "td", []
    for column, content in enumerate(cells):
        classes = ["word"] * (column in words) + [content] * (content in ("green", "amber", "red"))
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        marked.append(f"<{tag}{attribute}>{escape(content)}</{tag}>")
    return f"<tr>{''.join(marked)}</tr>"
