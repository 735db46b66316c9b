"""Show results as HTML: tables, lists and charts as inline SVG, for notebooks and for pages.

Colours are classes of the style sheet, so that a page follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.diagnostics import GREEN_ESS
from ope_gym.inference.estimate import Estimate
from ope_gym.report import text

STYLE = """
.ope { --line: #d5d8dc; --soft: #6b7280; --mark: #2563a8; --other: #b45309;
  --green: #15803d; --amber: #b45309; --red: #b91c1c; --panel: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  .ope { --line: #3a4048; --soft: #9aa3ad; --mark: #7ab3f0; --other: #f0b266;
    --green: #4ade80; --amber: #fbbf24; --red: #f87171; --panel: #1d2126; } }
.ope .headline { font-size: 1.15em; line-height: 1.45; border-left: 4px solid var(--soft);
  padding: .5em .9em; margin: .6em 0; background: var(--panel); }
.ope .headline.green { border-color: var(--green); }
.ope .headline.amber { border-color: var(--amber); }
.ope .headline.red { border-color: var(--red); }
.ope table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.ope th, .ope td { padding: .25em .7em; text-align: right; border-bottom: 1px solid var(--line); }
.ope th { font-weight: 600; color: var(--soft); }
.ope td.word, .ope th.word { text-align: left; }
.ope b.green { color: var(--green); } .ope b.amber { color: var(--amber); }
.ope b.red { color: var(--red); } .ope .soft { color: var(--soft); }
.ope svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.ope svg text { fill: currentColor; } .ope svg .soft { fill: var(--soft); }
.ope svg .grid { stroke: var(--line); } .ope svg .line { stroke: var(--mark); fill: none; }
.ope svg .line.other { stroke: var(--other); stroke-dasharray: 6 4; }
.ope svg .green { stroke: var(--green); fill: var(--green); }
.ope svg .amber { stroke: var(--amber); fill: var(--amber); }
.ope svg .red { stroke: var(--red); fill: var(--red); }
.ope svg .cell { fill: var(--mark); } .ope ul { padding-left: 1.2em; }
"""
_WIDTH, _LEFT, _RIGHT, _ROW = 720, 130, 150, 26
_POINTS = 300  # of a line, at most


def fragment(estimates: Mapping[str, Estimate], headline: str) -> str:
    """Return the headline, the table and the reasons, for a notebook."""
    best = next(iter(estimates.values()))
    parts = [headline_box(headline, best), estimate_table(estimates), reason_list(estimates)]
    return f'<div class="ope"><style>{STYLE}</style>{"".join(parts)}</div>'


def headline_box(headline: str, best: Estimate) -> str:
    """Return the headline in the colour of its verdict."""
    return f'<p class="headline {best.verdict.colour}">{escape(headline)}</p>'


def estimate_table(estimates: Mapping[str, Estimate]) -> str:
    """Return a row for each estimator, as the text table has them."""
    best = next(iter(estimates.values()))
    ends = text.ends_head(best)
    rows = [["estimator", "value", "std.err", ends, "ESS", "fresh episodes", "verdict"]]
    for name, e in estimates.items():
        ess, fresh = text.episodes(e.diagnostics.ess), text.episodes(e.fresh_episodes)
        rows.append([name, *text.estimate_cells(e, best), ess, fresh, e.verdict.colour])
    return table(rows, words=(0, 6))


def table(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Return an HTML table; the first row is its head.

    Args:
        rows: cells; those that name a verdict get its colour.
        words: columns of words, aligned to the left.
    """

    def cell(tag: str, column: int, content: str) -> str:
        word = ' class="word"' if column in words else ""
        shown = escape(content)
        if content in ("green", "amber", "red"):
            shown = f'<b class="{content}">{shown}</b>'
        return f"<{tag}{word}>{shown}</{tag}>"

    lines = [
        "<tr>" + "".join(cell("td" if i else "th", j, c) for j, c in enumerate(row)) + "</tr>"
        for i, row in enumerate(rows)
    ]
    return f"<table>{''.join(lines)}</table>"


def reason_list(estimates: Mapping[str, Estimate]) -> str:
    """Return what speaks against the estimates, and what would help the first of them."""
    verdicts = {name: e.verdict for name, e in estimates.items()}
    doubted = {k: v.reasons if v.colour != "green" else () for k, v in verdicts.items()}
    lines = text.itemised(doubted)
    lines += [f"what would help: {words}" for words in next(iter(verdicts.values())).advice]
    lines += text.reasons({name: e.basis for name, e in estimates.items() if e.basis})
    if not lines:
        return '<p class="soft">Nothing was found that speaks against these numbers.</p>'
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def forest(estimates: Mapping[str, Estimate]) -> str:
    """Draw values with their intervals, a row each; the markers show the verdict by their shape."""
    shown = {name: e for name, e in estimates.items() if math.isfinite(e.value)}
    if not shown:
        return '<p class="soft">No estimate is defined, so there is nothing to draw.</p>'
    numbers = [
        x
        for e in shown.values()
        for x in (e.value, e.interval.low, e.interval.high)
        if math.isfinite(x)
    ]
    axis = _Axis.around(min(numbers), max(numbers), _LEFT, _WIDTH - _RIGHT)
    height = _ROW * len(shown) + 34
    first = next(iter(shown.values()))
    parts = [_grid(axis, 0, height - 24)]
    for row, (name, e) in enumerate(shown.items()):
        y, colour = row * _ROW + 16, e.verdict.colour
        low = e.interval.low if math.isfinite(e.interval.low) else e.value
        high = e.interval.high if math.isfinite(e.interval.high) else e.value
        label = f"{text.estimate_cells(e, first)[0]}, {colour}"
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<line class="{colour}" x1="{axis(low):.1f}" x2="{axis(high):.1f}" y1="{y}" y2="{y}" '
            'stroke-width="2.5"/>'
        )
        parts.append(_marker(axis(e.value), y, colour))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 14}" y="{y + 4}">{escape(label)}</text>')
    return _svg(height, "values with their intervals", parts)


def ess_chart(estimates: Mapping[str, Estimate]) -> str:
    """Draw the effective sample size at each step of the episode, of the first two estimates."""
    curves: dict[str, FloatArray] = {}
    for name, e in estimates.items():
        alike = [k for k, c in curves.items() if np.array_equal(c, e.diagnostics.ess_curve)]
        if alike:
            curves[f"{alike[0]}, {name}"] = curves.pop(alike[0])
        elif len(curves) < 2:
            curves[name] = e.diagnostics.ess_curve
    steps = max(curve.size for curve in curves.values())
    top = max(float(np.nanmax(curve)) for curve in curves.values())
    height, bottom = 230, 196
    across = _Axis.around(0, max(steps - 1, 1), 56, _WIDTH - 20, pad=0.0)
    up = _Axis.around(0, max(top, GREEN_ESS), bottom, 16, pad=0.0)
    parts = [_grid(across, 16, bottom), *(_level(up, tick) for tick in up.ticks)]
    y = up(GREEN_ESS)
    parts.append(
        f'<line class="grid" stroke-dasharray="4 4" x1="56" x2="{_WIDTH - 20}" y1="{y:.1f}" '
        f'y2="{y:.1f}"/><text class="soft" x="{_WIDTH - 24}" y="{y - 4:.1f}" '
        f'text-anchor="end">{GREEN_ESS:g}: enough for green</text>'
    )
    for i, (name, curve) in enumerate(curves.items()):
        rows = np.unique(np.linspace(0, curve.size - 1, min(curve.size, _POINTS)).astype(int))
        points = " ".join(f"{across(t):.1f},{up(float(curve[t])):.1f}" for t in rows)
        other = " other" if i else ""
        parts.append(f'<polyline class="line{other}" stroke-width="2" points="{points}"/>')
        x = 70 + 170 * i
        parts.append(
            f'<line class="line{other}" stroke-width="2" x1="{x}" x2="{x + 24}" y1="8" y2="8"/>'
        )
        parts.append(f'<text x="{x + 30}" y="12">{escape(name)}</text>')
    parts.append(f'<text class="soft" x="{_WIDTH / 2}" y="{height - 4}">step of the episode</text>')
    return _svg(height, "effective sample size at each step", parts)


def overlap_chart(matrix: FloatArray, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Draw how alike policies act: 1 is the same, 0 nothing in common."""
    size = max(14, min(34, (_WIDTH - _LEFT - 20) // max(len(columns), 1)))
    parts = []
    for i, name in enumerate(rows):
        y = 22 + i * size
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + size / 2 + 4:.0f}" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        for j, share in enumerate(matrix[i]):
            x, strength = _LEFT + j * size, 0.0 if math.isnan(share) else float(share)
            parts.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" '
                f'fill-opacity="{0.04 + 0.96 * strength:.2f}"><title>{escape(name)} and '
                f"{escape(columns[j])}: {share:.2f}</title></rect>"
            )
    for j, name in enumerate(columns):
        if len(columns) <= 12 or j % 4 == 0 or j == len(columns) - 1:
            number = escape(name.removeprefix("policy "))
            parts.append(
                f'<text class="soft" x="{_LEFT + (j + 0.5) * size - 1:.0f}" y="14" '
                f'text-anchor="middle">{number}</text>'
            )
    return _svg(30 + len(rows) * size, "overlap of policies", parts)


class _Axis:
    """A scale from numbers to places, with ticks at round numbers."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high, self.start, self.stop = low, high, start, stop

    @classmethod
    def around(cls, low: float, high: float, start: float, stop: float, pad: float = 0.04) -> _Axis:
        room = (high - low) * pad or (0.0 if high > low else max(abs(low), 1.0) * 0.1)
        return cls(low - room, high + room, start, stop)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        """About five round numbers within the scale."""
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(axis: _Axis, top: float, bottom: float) -> str:
    """Return vertical lines at the ticks, with their numbers below."""
    return "".join(
        f'<line class="grid" x1="{axis(t):.1f}" x2="{axis(t):.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="soft" x="{axis(t):.1f}" y="{bottom + 15}" text-anchor="middle">{t:,g}</text>'
        for t in axis.ticks
    )


def _level(axis: _Axis, tick: float) -> str:
    """Return the number of a horizontal level."""
    return f'<text class="soft" x="48" y="{axis(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'


def _marker(x: float, y: float, colour: str) -> str:
    """Return a disc for green, a diamond for amber, a cross for red."""
    if colour == "green":
        return f'<circle class="green" cx="{x:.1f}" cy="{y}" r="5"/>'
    if colour == "amber":
        corners = f"{x:.1f},{y - 6} {x + 6:.1f},{y} {x:.1f},{y + 6} {x - 6:.1f},{y}"
        return f'<polygon class="amber" points="{corners}"/>'
    cross = f"M{x - 5:.1f} {y - 5} l10 10 m0 -10 l-10 10"
    return f'<path class="red" d="{cross}" stroke-width="2.5" style="fill:none"/>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
