"""Write one self-contained page about a policy: it needs no network and no other file."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ope_gym.inference.regimes import label
from ope_gym.report import html, text

if TYPE_CHECKING:
    from ope_gym.analysis.overlap import Overlap
    from ope_gym.analysis.ranking_table import Ranking
    from ope_gym.results import Evaluation

_BODY = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em;
  color: #1c1f23; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
@media (prefers-color-scheme: dark) { body { color: #e6e8ea; background: #121417; } }
@media print { body { margin: 0; } }
"""
_ESS = (
    "Every recorded episode is weighted by how likely the policy is to act as the episode did. The "
    "curve shows how many episodes of the policy itself would be as informative, step by step."
)
_OVERLAP = (
    "How alike two policies act over whole episodes, from nothing in common (no colour) to the "
    "same (full colour). The last row is the evaluated policy: its darkest cells show whose "
    "episodes carry the estimate."
)


def report_page(
    evaluation: Evaluation,
    *,
    ranking: Ranking | None = None,
    overlap: Overlap | None = None,
    title: str = "",
) -> str:
    """Return the page: headline, estimates, reasons, effective sample size, overlap, ranking.

    Args:
        evaluation: of the policy.
        ranking: of the recorded policies, if it is to be shown.
        overlap: of the recorded policies and the evaluated one, if it is to be shown.
        title: of the page; the name of the policy by default.
    """
    sample, best, shown = evaluation.sample, evaluation.best, evaluation.ranked()
    name = title or text.sentence(evaluation.target or "the policy")
    data = f"{text.size(sample)}, gamma {sample.gamma:g}; data: {label(sample.regime)}"
    parts = [
        f"<h1>{escape(name)}</h1>",
        html.headline_box(evaluation.headline, best),
        f'<p class="soft">{escape(data)}</p>',
        "<h2>Estimates</h2>",
        html.forest(shown),
        html.estimate_table(shown),
        "<h2>Reasons for caution</h2>",
        html.reason_list(shown),
        "<h2>Effective sample size over the episode</h2>",
        f'<p class="soft">{escape(_ESS)}</p>',
        html.ess_chart(shown),
    ]
    if overlap is not None:
        parts += ["<h2>Overlap of policies</h2>", f'<p class="soft">{escape(_OVERLAP)}</p>']
        parts.append(html.overlap_chart(overlap.matrix, overlap.evaluated, overlap.recorded))
    if ranking is not None and len(ranking) > 1:
        estimates = {name: r.estimate for name, r in ranking.items()}
        parts += ["<h2>Ranking</h2>", html.headline_box(ranking.headline, ranking.best.estimate)]
        parts += [html.forest(estimates), html.table(ranking.rows(), ranking.words)]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title>'
    look = '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
    look += 'content="light dark">'
    style = f"<style>{_BODY}{html.STYLE}</style>"
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{look}{style}</head>\n'
        f'<body class="ope">\n{body}\n</body></html>\n'
    )
