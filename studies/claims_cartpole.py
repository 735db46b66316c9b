"""What the paper says of CartPole (table 2), and what our runs say."""

from __future__ import annotations

import math
from typing import Any

from studies.claims import Claim, Evidence
from studies.errors import amount, larger_rmse
from studies.frame import Summary

PAPER = {  # 5th, 50th, 95th percentile of the RMSE; 400 runs
    "BIS": (122.32, 236.73, 321.40),
    "BCIS": (84.65, 87.30, 90.24),
    "NBIS": (39.34, 43.22, 47.52),
    "NBCIS": (31.02, 32.77, 34.63),
    "FIS": (23.10, 25.38, 27.91),
    "OUIS": (23.13, 25.82, 28.77),
    "NFIS": (7.06, 7.91, 8.66),
}
SIMILAR = 0.01  # share of the RMSE within which OUIS is to be FIS

_RMSE = "ln(RMSE / RMSE), standard error of a paired bootstrap over runs"
_ORDER = [
    ("BIS", "BCIS"), ("BCIS", "NBIS"), ("NBIS", "NBCIS"), ("NBCIS", "FIS"), ("NBCIS", "OUIS"),
    ("FIS", "NFIS"), ("OUIS", "NFIS"),
]  # fmt: skip


def cartpole_claims(summary: Summary) -> list[Claim]:
    """Of the paper, on fresh and on in-sample data; then what it leaves out."""
    return [
        *(claim for source in summary["sources"] for claim in _table_2(summary, source)),
        *_bias(summary),
    ]


def _table_2(summary: Summary, source: str) -> list[Claim]:
    found, names = summary["sources"][source], summary["names"]

    def ranked(words: str, pairs: list[tuple[str, str]], why: str, where: str = "table 2") -> Claim:
        evidence = larger_rmse(source, found, names, pairs)
        return Claim(where, f"{words} ({source} data)", _RMSE, evidence, why)

    return [
        ranked(
            "FIS dominates BIS",
            [("BIS", "FIS")],
            "The denominator of a fused weight holds the policy nearest to the target, so no "
            "weight exceeds 1/ρ_k times the ratio to that policy; a basic weight of θ_0 has no "
            "such bound.",
            "section 3.1, table 2",
        ),
        Claim(
            "section 3.4, table 2",
            f"OUIS has similar performance to FIS: within {SIMILAR:.0%} ({source} data)",
            f"{SIMILAR:g} − |RMSE(OUIS) / RMSE(FIS) − 1|",
            (_similar(source, found, names),),
            "Prefixes of more than a few steps are so unlikely that p / (1 − p) is p. The 1.7 % "
            "between the two in the paper's table cannot come from the same rollouts.",
        ),
        ranked(
            "the larger weights, the larger the error: BIS, BCIS > NBIS > NFIS",
            [("BIS", "NBIS"), ("BCIS", "NBIS"), ("NBIS", "NFIS")],
            "Normalising makes an estimate a mean of returns that occurred. BCIS trades the "
            "variance of BIS for a bias: capped weights sum to less than n.",
        ),
        ranked(
            "BIS > FIS > NFIS",
            [("BIS", "FIS"), ("FIS", "NFIS")],
            "Fusing bounds the weights, normalising takes out what their sum varies by.",
        ),
        ranked(
            "the printed order: BIS > BCIS > NBIS > NBCIS > FIS, OUIS > NFIS",
            _ORDER,
            _order_why(found, names),
        ),
    ]


def _similar(source: str, found: dict[str, Any], names: list[str]) -> Evidence:
    i, j = names.index("OUIS"), names.index("FIS")
    ratio = math.exp(found["pairs"]["log_ratio"][i][j])
    error = ratio * found["pairs"]["log_ratio_error"][i][j]
    note = f"RMSE(OUIS) / RMSE(FIS) = {ratio:.6f}"
    return Evidence(source, SIMILAR - abs(ratio - 1), error, note=note)


def _order_why(found: dict[str, Any], names: list[str]) -> str:
    wrong = [
        f"{a} ({amount(found['rmse'][names.index(a)])}) is not above {b} "
        f"({amount(found['rmse'][names.index(b)])})"
        for a, b in _ORDER
        if not found["pairs"]["log_ratio"][names.index(a)][names.index(b)] > 0
    ]
    said = "; ".join(wrong) if wrong else "Every neighbour is on its side"
    return (
        f"{said}. The paper leaves the variant of PoWER open, its initial θ, the number of steps "
        "and how the truth was found; magnitudes follow from how far and how steadily it learns, "
        "which the mean returns above the table show for ours."
    )


def _bias(summary: Summary) -> list[Claim]:
    names, own = summary["names"], summary["sources"]

    def bis(source: str) -> str:
        i, found = names.index("BIS"), own[source]
        return f"{amount(found['bias'][i])} ± {amount(found['bias_error'][i])}"

    def unbiased(source: str) -> tuple[Evidence, ...]:
        found = own[source]
        return tuple(
            Evidence(
                f"{name}, {source}",
                found["bias"][names.index(name)],
                found["bias_error"][names.index(name)],
                equal=True,
            )
            for name in ("FIS", "OUIS")
        )

    return [
        Claim(
            "section 3.3",
            "importance sampling is unbiased when the policies depend on earlier rewards: FIS, "
            "OUIS (on the rollouts PoWER learned from)",
            "bias, in units of return",
            unbiased("in-sample"),
            "Each policy was fitted to the rollouts that went well, and so was the target. The "
            f"same luck is in the estimate. (BIS shows {bis('in-sample')}, which says nothing: "
            "mean and standard error hang on a few runs.)",
        ),
        Claim(
            "section 3.1",
            "FIS and OUIS are unbiased (on fresh rollouts)",
            "bias, in units of return",
            unbiased("fresh"),
            "Given the ten policies and the target these data are independent of both. BIS is "
            f"unbiased, too; what it shows, {bis('fresh')}, is the mark of its tail: most of its "
            "mean is in runs too rare to be among these.",
        ),
        Claim(
            "beyond the paper",
            "on the rollouts that PoWER learned from all estimates are higher than on fresh ones",
            "estimate in-sample − estimate from fresh rollouts, paired by run",
            tuple(
                Evidence(
                    name,
                    summary["optimism"][0][i],
                    summary["optimism"][1][i],
                    note=f"median {amount(summary['optimism_median'][i])}; 95 % intervals cover "
                    f"{own['in-sample']['coverage'][i]:.0%}, fresh "
                    f"{own['fresh']['coverage'][i]:.0%}",
                )
                for i, name in enumerate(names)
            ),
            "No weighting repairs it; only rollouts that were held out do.",
        ),
    ]
