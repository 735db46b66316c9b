"""Write one self-contained page about a policy: it needs no network and no other file.

The charts are those of the OPE tab: the page holds the tab's scripts, and its documents as JSON.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ope_gym.report import html, text
from ope_gym.report.documents import evaluation_document, ranking_document

if TYPE_CHECKING:
    from ope_gym.analysis.overlap import Overlap
    from ope_gym.analysis.ranking_table import Ranking
    from ope_gym.results import Evaluation

_STATIC = Path(__file__).parent / "tab" / "static"
_MODULES = ("svg.js", "theme.js", "evaluation.js", "page.js")  # each after those that it imports
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<style>{style}</style></head>
<body><div id="main"><main>
<header><div class="where">{title} · {data}</div>
<h1><span class="badge {colour}">{colour}</span>{headline}</h1></header>
<noscript>The charts need JavaScript; the tables do not.</noscript>
<div id="details"></div>
{tables}
</main></div>
<script type="application/json" id="documents">{documents}</script>
<script type="module">{script}</script>
</body></html>
"""


def report_page(
    evaluation: Evaluation,
    *,
    ranking: Ranking | None = None,
    overlap: Overlap | None = None,
    title: str = "",
) -> str:
    """Return the page: headline, estimates, reasons, effective sample size, overlap, ranking.

    Args:
        evaluation: Values of the policy.
        ranking: Ranking of the recorded policies, if it is to be shown.
        overlap: Overlap of the recorded policies and the evaluated one, if it is to be shown.
        title: Title of the page; the name of the policy by default.
    """
    documents: dict[str, Any] = {"evaluation": evaluation_document(evaluation, overlap=overlap)}
    tables = [("All estimates", html.estimate_table(evaluation.ranked()))]
    if ranking is not None and len(ranking) > 1:
        documents["ranking"] = ranking_document(ranking)
        told = f"<p>{escape(ranking.headline)}</p>"
        tables.append(("All policies", told + html.table(ranking.rows(), ranking.words)))
    return _PAGE.format(
        title=escape(title or text.sentence(evaluation.target or "the policy")),
        data=escape(documents["evaluation"]["data"]),
        colour=evaluation.best.verdict.colour,
        headline=escape(evaluation.headline),
        tables="\n".join(
            f'<section class="card"><h3>{head}</h3>{table}</section>' for head, table in tables
        ),
        style=(_STATIC / "style.css").read_text(encoding="utf-8"),
        # in a script element only "<" can end the data or begin a comment
        documents=json.dumps(documents, allow_nan=False).replace("<", r"\u003c"),
        script=_script(),
    )


def _script() -> str:
    """Return the tab's modules that draw evaluations as one script, without imports."""
    modules = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _MODULES)
    return re.sub(r"^import [^;]*;\n|^export ", "", modules, flags=re.MULTILINE)
