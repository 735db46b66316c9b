"""Judge what the paper says about CartPole (table 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from studies.harness.claims import FAILS, HOLDS, SAME, UNDECIDED, Claim, Evidence
from studies.harness.errors import larger_rmse, tail, unbiased
from studies.harness.markdown import amount
from studies.harness.study import Summary

PAPER = {  # 5th, 50th, 95th percentile of the RMSE; 400 runs
    "BIS": (122.32, 236.73, 321.40),
    "BCIS": (84.65, 87.30, 90.24),
    "NBIS": (39.34, 43.22, 47.52),
    "NBCIS": (31.02, 32.77, 34.63),
    "FIS": (23.10, 25.38, 27.91),
    "OUIS": (23.13, 25.82, 28.77),
    "NFIS": (7.06, 7.91, 8.66),
}
SIMILAR = 0.01  # relative difference of RMSEs up to which OUIS is similar to FIS

_RMSE = (
    "ln(RMSE / RMSE), standard error of a paired bootstrap over runs; with a tail the share of "
    "runs in which the error is the larger one, − ½"
)
_PLAIN = ("BIS", "FIS", "OUIS")


def cartpole_claims(summary: Summary) -> list[Claim]:
    """Return the claims of table 2 and section 3, and of targets learned from the data."""
    return [*_table_2(summary), *_bias(summary)]


def _table_2(summary: Summary) -> list[Claim]:
    """Return the claims of table 2 on both sources of data."""
    sources, names = summary["sources"], summary["names"]

    def ranked(
        where: str, words: str, pairs: list[tuple[str, str]], why: str | dict[str, str]
    ) -> Claim:
        rows = [
            row
            for source, found in sources.items()
            for row in larger_rmse(source, found, names, pairs)
        ]
        return Claim(where, words, _RMSE, tuple(rows), why)

    gap = PAPER["OUIS"][1] / PAPER["FIS"][1] - 1
    return [
        ranked(
            "section 3.1, table 2",
            "FIS dominates BIS",
            [("BIS", "FIS")],
            {
                HOLDS: "The denominator of a fused weight contains the policy nearest to the "
                "target, so no weight exceeds 1/ρ_k times the ratio to that policy; a "
                "basic weight of θ_0 has no such bound."
            },
        ),
        Claim(
            "section 3.4, table 2",
            f"OUIS has similar performance to FIS: RMSEs within {SIMILAR:.0%}",
            f"{SIMILAR:g} − |RMSE(OUIS) / RMSE(FIS) − 1|",
            tuple(_similar(source, found, names) for source, found in sources.items()),
            {
                HOLDS: "Prefixes of more than a few steps are so unlikely that p / (1 − p) is p. "
                f"The {gap:.1%} between the two in the paper's table cannot come from the same "
                "rollouts, unless the two were bootstrapped separately and with few draws."
            },
        ),
        ranked(
            "table 2",
            "normalising pays: BIS, BCIS > NBIS > NFIS",
            [("BIS", "NBIS"), ("BCIS", "NBIS"), ("NBIS", "NFIS")],
            {
                HOLDS: "Normalising makes an estimate a mean of returns that occurred. BCIS trades "
                "the variance of BIS for a bias: clipped weights sum to less than n."
            },
        ),
        ranked(
            "table 2",
            "the rest of the printed order: BIS > BCIS, NBIS > NBCIS > FIS, OUIS > NFIS",
            [
                ("BIS", "BCIS"),
                ("NBIS", "NBCIS"),
                ("NBCIS", "FIS"),
                ("NBCIS", "OUIS"),
                ("FIS", "NFIS"),
                ("OUIS", "NFIS"),
            ],
            "The paper does not say which PoWER it ran, from which θ, for how many steps, or how "
            "it found the true value. The size of the errors depends on how far and how steadily "
            "PoWER learns; for ours, the mean returns above the table show it.",
        ),
    ]


def _similar(source: str, found: dict[str, Any], names: Sequence[str]) -> Evidence:
    """Return the evidence that the RMSEs of OUIS and FIS are similar."""
    i, j = names.index("OUIS"), names.index("FIS")
    ratio = math.exp(found["pairs"]["log_ratio"][i][j])
    error = ratio * found["pairs"]["log_ratio_error"][i][j]
    note = f"RMSE(OUIS) / RMSE(FIS) = {ratio:.6f}"
    return Evidence(source, SIMILAR - abs(ratio - 1), error, note=note)


def _bias(summary: Summary) -> list[Claim]:
    """Return claims about biases."""
    names, fresh, own = summary["names"], summary["sources"]["fresh"], summary["optimism"]
    other, value = summary["independent"], summary["truth"][0]
    behaviours = summary["bis_by_behaviour"][0]
    seen = 1 + fresh["bias"][names.index("BIS")] / value
    return [
        Claim(
            "section 3.1",
            "BIS, FIS and OUIS are unbiased (on fresh rollouts)",
            "bias, in units of return",
            unbiased("fresh", fresh, names, _PLAIN, value),
            "These rollouts are independent of how the ten policies and the target were learned, "
            f"so all three are unbiased. BIS shows {seen:.0%} of the value: the rest is in weights "
            "that are too rare to occur in so many runs. The row by policy shows where it is "
            f"missing: {amount(behaviours[0])} for θ_0, {amount(behaviours[-1])} for "
            f"θ_{len(behaviours) - 1}, the nearest to the target.",
        ),
        Claim(
            "section 3.3",
            "importance sampling is unbiased when the policies depend on earlier rewards (PoWER's "
            "own rollouts, the last policy of another PoWER for target)",
            "estimate in-sample − estimate from fresh rollouts, paired by run",
            _paired(names, other, _PLAIN, margin=SAME * value),
            {
                HOLDS: "The target is independent of the data, as section 3.3 has it. The study "
                "`adaptive` has exact examples in which FIS is biased.",
                FAILS: "The target is independent of the data, as section 3.3 has it. A policy "
                "that was fitted to lucky rollouts is in the denominator of their fused weights, "
                "which it makes smaller; the study `adaptive` has exact examples.",
                UNDECIDED: "The target is independent of the data, as section 3.3 has it, but far "
                "from some of the policies, so the estimates have long tails. The study `adaptive` "
                "decides it for FIS and OUIS, with exact examples.",
            },
        ),
        Claim(
            "beyond the paper, learned target",
            "on the rollouts that PoWER learned from, its last policy is valued higher than on "
            "fresh ones by all estimators",
            "estimate in-sample − estimate from fresh rollouts, paired by run",
            _paired(names, own, names, coverage=summary["sources"]),
            "Each policy was fitted to the rollouts that went well, and so was the target: the "
            "same luck is in the estimate. No weighting corrects it; only held-out rollouts do. "
            "Section 3.3 is about another effect, for which the target is independent of the data.",
        ),
    ]


def _paired(
    names: Sequence[str],
    found: dict[str, Any],
    shown: Sequence[str],
    *,
    margin: float | None = None,
    coverage: dict[str, Any] | None = None,
) -> tuple[Evidence, ...]:
    """Return the evidence that differences in-sample − fresh are positive.

    With a margin: that they are 0.
    """
    rows = []
    for i, name in ((names.index(name), name) for name in shown):
        share = found["largest_share"][i]
        note = (
            f"median {amount(found['median'][i])}; the largest run has {share:.0%} of the squares"
        )
        if coverage:
            inside, outside = (coverage[s]["coverage"][i] for s in ("in-sample", "fresh"))
            note += f"; 95 % intervals cover {inside:.0%}, fresh {outside:.0%}"
        rows.append(
            Evidence(
                name,
                found["mean"][i],
                found["error"][i],
                equal=margin is not None,
                margin=margin or 0.0,
                open=tail(share),
                note=note,
            )
        )
    return tuple(rows)
