"""Make the documents of the OPE tab: one evaluation, or one ranking, as plain JSON of bounded size.

The tab draws them as they are. Curves are thinned, long lists and texts are cut, and numbers have
four digits, so that a document stays below `LARGEST` bytes whatever was evaluated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, evenly
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.estimate import Estimate, regime_label
from ope_gym.inference.judging import AMBER_ESS, GREEN_ESS
from ope_gym.report import text

if TYPE_CHECKING:
    from ope_gym.analysis.overlap import Overlap
    from ope_gym.analysis.ranking_table import Ranking
    from ope_gym.online import FreeEstimate
    from ope_gym.results import Evaluation

PLUGIN = "ope"  # name of the tab, and of the plugin data of its documents
LARGEST = 64_000  # bytes of a document
EXPLAINED = {
    "held-out": "The learner never trained on these episodes, so the numbers are not optimistic.",
    "fresh": "One policy recorded these episodes, and the target was fixed before them.",
    "adaptive": (
        "The target was fixed before these episodes, but policies that recorded them learned from "
        "earlier ones: basic weights stay unbiased, weights against a mixture do not quite."
    ),
    "in-sample": (
        "The target was trained on these episodes, or may have been: its value is overestimated "
        "and its interval is too narrow. Hold out a share of the episodes."
    ),
    "unstated": "It is not known whether the learner trained on these episodes.",
}
_POINTS, _CURVES, _POLICIES, _ESTIMATORS = 60, 6, 24, 40  # shown at most
_TEXT = 400  # characters of a sentence


def evaluation_document(
    evaluation: Evaluation,
    *,
    overlap: Overlap | None = None,
    truth: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return what the tab shows of one evaluation.

    Args:
        evaluation: Evaluation to show.
        overlap: Overlap of the recorded policies and the target, if it is to be drawn.
        truth: Value from fresh rollouts and its standard error (NaN if unknown), if known.
    """
    sample, ordered = evaluation.sample, evaluation.ranked()
    best, interval = next(iter(ordered)), evaluation.best.interval
    return {
        "kind": "evaluation",
        "headline": evaluation.headline,
        "recommended": best,
        "data": f"{text.size(sample)}, gamma {sample.gamma:g}"
        + (f"; q model: {sample.q_model}" if sample.q_model else "")
        + (f"; {sample.mixture}" if sample.mixture else ""),
        "regime": regime_label(sample.regime),
        "explained": EXPLAINED[sample.regime],
        "level": interval.level,
        "method": interval.method,
        "truth": None if truth is None else [_number(part) for part in truth],
        "estimates": [_estimate(n, e) for n, e in list(ordered.items())[:_ESTIMATORS]],
        "left_out": max(len(ordered) - _ESTIMATORS, 0),
        "ess": _ess(ordered),
        "concentration": _concentration(ordered),
        "behaviours": _behaviours(evaluation.best),
        "overlap": None if overlap is None else _overlap(overlap),
    }


def ranking_document(ranking: Ranking) -> dict[str, Any]:
    """Return what the tab shows of a ranking: the best policies with their chances."""
    shown = list(ranking.values())[:_POLICIES]
    return {
        "kind": "ranking",
        "by": ranking.best.estimate.name,
        "level": ranking.best.estimate.interval.level,
        "policies": [
            {
                **_estimate(text.shorten(r.name, 40), r.estimate),
                "chance": _number(r.probability_best),
            }
            for r in shown
        ],
        "left_out": len(ranking) - len(shown),
        "cautious": text.shorten(ranking.safest.name, 40),
    }


def free_document(
    estimate: FreeEstimate, kind: str, *, headline: str, level: float
) -> dict[str, Any]:
    """Return what the tab shows of one value of `ope_gym.online`.

    Args:
        estimate: Value to show.
        kind: Its kind, "provisional", "settled" or "fresh".
        headline: Sentence that says what it is worth.
        level: Confidence level of its interval.
    """
    return {
        "kind": kind,
        "headline": headline,
        "value": _number(estimate.value),
        "low": _number(estimate.low),
        "high": _number(estimate.high),
        "fresh_episodes": _number(estimate.claim),
        "verdict": estimate.verdict.colour,
        "level": level,
        "episodes": estimate.episodes,
        "shares": {name: _number(share) for name, share in estimate.shares.items()},
    }


def encode(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON of at most `LARGEST` bytes; pictures go first if it is larger."""
    kept = dict(document)
    for part in ("overlap", "behaviours", "concentration", "ess", None):
        content = json.dumps(kept, separators=(",", ":"), allow_nan=False).encode()
        if len(content) <= LARGEST or part is None:
            break
        kept[part] = None
    return content


def _estimate(name: str, e: Estimate) -> dict[str, Any]:
    """Return one row of the forest, with its verdict in words."""
    d, verdict = e.diagnostics, e.verdict
    return {
        "name": name,
        "value": _number(e.value),
        "low": _number(e.interval.low),
        "high": _number(e.interval.high),
        "error": _number(e.standard_error),
        "ess": _number(d.ess),
        "fresh_episodes": _number(e.fresh_episodes),
        "share": _number(d.max_share),
        "verdict": verdict.colour,
        "reasons": [text.shorten(str(reason), _TEXT) for reason in verdict.reasons[:6]],
        "advice": [text.shorten(str(advice), _TEXT) for advice in verdict.advice[:3]],
        "notes": [text.shorten(str(n), _TEXT) for n in verdict.notes if n.effect == "note"][:3],
        "basis": text.shorten("; ".join(map(str, verdict.basis)), _TEXT),
    }


def _ess(evaluation: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the effective sample sizes over the steps, one curve for estimators that agree.

    Estimators that do not go through the episodes step by step have a single number and no curve.
    """
    curves = {name: e.diagnostics.ess_curve for name, e in weighted(evaluation).items()}
    size = max(curve.size for curve in curves.values())
    steps = evenly(size, _POINTS)
    whole = {name: curve[steps] for name, curve in curves.items() if curve.size == size}
    return {
        "x": steps.tolist(),
        "curves": [_curve(names, values) for names, values in distinct(whole)[:_CURVES]],
        "episodes": next(iter(evaluation.values())).sample.trajectories,
        "bounds": [AMBER_ESS, GREEN_ESS],
    }


def _concentration(evaluation: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the share of the weight in the heaviest episodes, for each kind of weights."""
    shown = weighted(evaluation)
    n = next(iter(shown.values())).sample.trajectories
    taken = heaviest(n, _POINTS)
    curves = {name: concentration(e.diagnostics.log_last)[taken - 1] for name, e in shown.items()}
    return {
        "x": [_number(share) for share in (taken / n).tolist()],
        "curves": [_curve(names, values) for names, values in distinct(curves)[:_CURVES]],
    }


def _behaviours(e: Estimate) -> dict[str, Any]:
    """Return whose episodes hold the weight; of many policies those with the most of it."""
    sample, shares = e.sample, e.diagnostics.behaviour_shares
    order = np.sort(np.argsort(shares, kind="stable")[::-1][:_POLICIES])
    return {
        "names": [text.shorten(sample.behaviours[k].name, 24) for k in order],
        "episodes": [_number(c / sample.trajectories) for c in sample.counts[order].tolist()],
        "weight": [_number(share) for share in shares[order].tolist()],
        "left_out": len(sample.behaviours) - order.size,
    }


def _overlap(overlap: Overlap) -> dict[str, Any]:
    """Return the matrix of overlaps; of many policies as many as can be seen."""
    columns = evenly(len(overlap.recorded), _POLICIES)
    rows = np.append(columns, len(overlap.evaluated) - 1)
    return {
        "rows": [text.shorten(overlap.evaluated[i], 24) for i in rows],
        "columns": [text.shorten(overlap.recorded[j], 24) for j in columns],
        "matrix": [[_number(x) for x in row] for row in overlap.matrix[np.ix_(rows, columns)]],
    }


def _curve(names: Sequence[str], values: Any) -> dict[str, Any]:
    return {"names": list(names), "y": [_number(value) for value in values.tolist()]}


def _number(value: float) -> float | None:
    """Return four digits of a number; None where it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


# Curves -----------------------------------------------------------------------------------------


def weighted(evaluation: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Return the estimates that rest on weights; all of them if none does."""
    direct = {name for name, estimator in ESTIMATORS.items() if estimator.method == "direct"}
    return {n: e for n, e in evaluation.items() if n not in direct} or dict(evaluation)


def concentration(log_weights: FloatArray) -> FloatArray:
    """Return (n,) the share of the weight in the heaviest 1, 2, … episodes; 0 without weight."""
    top = float(log_weights.max())
    if top == -np.inf:
        return np.zeros(log_weights.size)
    held = np.cumsum(np.sort(np.exp(log_weights - top))[::-1])
    return np.asarray(held / held[-1])


def heaviest(n: int, points: int) -> IntArray:
    """Return numbers of heaviest episodes to show, from 1 to n, at most so many.

    >>> heaviest(1000, 4).tolist()
    [1, 10, 100, 1000]
    """
    return np.unique(np.geomspace(1, n, points).round().astype(np.int64))


def distinct(curves: Mapping[str, FloatArray]) -> list[tuple[list[str], FloatArray]]:
    """Group the names of curves that look the same, each group with one of its curves."""
    groups: list[tuple[list[str], FloatArray]] = []
    for name, curve in curves.items():
        for names, other in groups:
            if curve.shape == other.shape and np.allclose(curve, other, rtol=0.01):
                names.append(name)
                break
        else:
            groups.append(([name], curve))
    return groups
