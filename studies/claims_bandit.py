"""What the paper says of its bandit, and what the exact curves and the simulation say."""

from __future__ import annotations

import numpy as np

from studies.claims import Claim, Evidence, agreement
from studies.frame import Summary

_BIS, _NIS, _EA, _BEST = range(4)
_SECTION = "section 2.2"
_ENOUGH = 300  # runs from which on their spread tells how far their mean is off


def bandit_claims(summary: Summary) -> list[Claim]:
    """Section 2.2, i to iii, their stronger readings in the text, table 1, and the check."""
    return [
        *_low_variance(summary),
        *_high_variance(summary),
        *_between(summary),
        _path_of_ea(summary),
        _table_1(summary),
        _simulation(summary),
    ]


def _difference(summary: Summary, larger: str, smaller: str, j: int) -> tuple[Evidence, ...]:
    """MSE(larger) − MSE(smaller) at the j-th p, for each N: simulated and exact."""
    names = ("BIS", "NIS", "EA", "ω*")
    exact = np.array(summary["exact_mse"])
    exact = exact[names.index(larger)] - exact[names.index(smaller)]
    mean, error = np.array(summary["differences"][f"{larger} - {smaller}"], dtype=np.float64)
    p = summary["probabilities"][j]
    return tuple(
        Evidence(f"N = {n}, p = {p:g}", mean[i, j], error[i, j], exact=float(exact[i, j]))
        for i, n in enumerate(summary["sizes"])
    )


def _low_variance(summary: Summary) -> list[Claim]:
    j = max(len(summary["probabilities"]) - 2, 0)
    p, mse = summary["probabilities"][j], np.array(summary["exact_mse"])
    ratio = mse[_EA, :, j] / mse[_BEST, :, j]
    return [
        Claim(
            f"{_SECTION}, i",
            "the empirical average is optimal when V_int is low (the best of the three)",
            "MSE(NIS) − MSE(EA)",
            _difference(summary, "NIS", "EA", j),
            "Given the counts its weights are constant, so that nearly all that is left is the "
            "small variance of the rewards.",
        ),
        Claim(
            f"{_SECTION}, i",
            "normalised importance sampling is better than basic when V_int is low",
            "MSE(BIS) − MSE(NIS)",
            _difference(summary, "BIS", "NIS", j),
            "Dividing by the sum of the weights removes most of the variance of the path.",
        ),
        Claim(
            "section 2.1",
            "the optimal weights become those of the empirical average as V_r goes to 0",
            "2 − MSE(EA) / MSE(ω*): is EA within a factor 2 of the optimal weights",
            tuple(
                Evidence(f"N = {n}, p = {p:g}", 2 - ratio[i], note=f"ratio {ratio[i]:.3g}")
                for i, n in enumerate(summary["sizes"])
            ),
            "True of a single action, and at V_r = 0 itself, where every ω with "
            "Σ (ω − 1) π_test r̄ = 0 has no error, EA among them if all actions were drawn. But ω* "
            "does not tend to 1 as V_r → 0: with several actions its limit is "
            "k r̄ J / (π_test V) / Σ (k r̄² / V), which pools the noise of all draws because it "
            "knows r̄. The ratio of the two MSEs stays about constant up to p = 1.",
        ),
    ]


def _high_variance(summary: Summary) -> list[Claim]:
    mse = np.array(summary["exact_mse"])
    ratio = mse[_BIS, :, 0] / mse[_BEST, :, 0]
    p = summary["probabilities"][0]
    roots = [f"{root:.3g}" if root else "none" for root in summary["crossings"]["EA, BIS"]]
    return [
        Claim(
            f"{_SECTION}, ii",
            "basic importance sampling is better than the empirical average when V_int is high",
            "MSE(EA) − MSE(BIS)",
            _difference(summary, "EA", "BIS", 0),
            "EA gives an action that was drawn once the weight of one drawn often. By N the two "
            f"cross at p = {', '.join(roots)}: with much data EA is worse only where rewards are "
            "hardly ever seen.",
        ),
        Claim(
            "section 2.2.1 and introduction",
            "when the rewards have high variance BIS is close to optimal",
            "2 − MSE(BIS) / MSE(ω*): is BIS within a factor 2 of the optimal weights",
            tuple(
                Evidence(f"N = {n}, p = {p:g}", 2 - ratio[i], note=f"ratio {ratio[i]:.3g}")
                for i, n in enumerate(summary["sizes"])
            ),
            "Both weights are linear in k, but not with the same factor: as V_r / r̄² grows ω* "
            "shrinks to 0 (its MSE to J², which goes to 0 with p), while BIS stays unbiased with a "
            "variance that does not fall. Among unbiased weights the statement is right.",
        ),
    ]


def _between(summary: Summary) -> list[Claim]:
    curves = np.array(summary["curves"]["moments"])
    mse = curves[0] ** 2 + curves[1] + curves[2]  # (4, N, p)
    low, high = np.minimum(mse[_BIS], mse[_EA]), np.maximum(mse[_BIS], mse[_EA])
    never, between = [], []
    for i, n in enumerate(summary["sizes"]):
        start, stop = summary["crossings"]["NIS, BIS"][i], summary["crossings"]["EA, NIS"][i]
        band = f"below both for p from {start or 0:.2g} to {stop:.2g}" if stop else ""
        never.append(Evidence(f"N = {n}, all p", float((high[i] - mse[_NIS, i]).min())))
        between.append(Evidence(f"N = {n}, all p", float((mse[_NIS, i] - low[i]).min()), note=band))
    return [
        Claim(
            f"{_SECTION}, iii",
            "NIS is a tradeoff between EA and BIS (the paper prints NIS for BIS): never worse than "
            "both",
            "the smallest max(MSE(EA), MSE(BIS)) − MSE(NIS) over p from 0.01 to 1",
            tuple(never),
            "All three MSEs are straight lines in p, so this is known for all p.",
        ),
        Claim(
            f"{_SECTION}, iii",
            "NIS is a tradeoff between EA and BIS: its MSE lies between theirs",
            "the smallest MSE(NIS) − min(MSE(EA), MSE(BIS)) over p from 0.01 to 1",
            tuple(between),
            "Its weights lie between theirs (table 1), its MSE need not: below the p at which it "
            "crosses EA it is better than both, if only a little better than BIS.",
        ),
    ]


def _path_of_ea(summary: Summary) -> Claim:
    path = np.array(summary["exact_path"])[_EA]
    return Claim(
        f"{_SECTION}",
        "V_path(EA) = 0",
        "V_path(EA) at p = 1",
        tuple(
            Evidence(f"N = {n}", float(path[i]), equal=True, tolerance=1e-6)
            for i, n in enumerate(summary["sizes"])
        ),
        "Only on paths that have every action. An action that was never drawn counts as 0, which "
        "is a bias and a variance: the whole MSE of EA at p = 1.",
    )


def _table_1(summary: Summary) -> Claim:
    largest = summary["sizes"][-1]
    rows = [row for row in summary["table_1"] if row["n"] == largest]
    evidence = []
    for row in rows:
        off = row["mean"] / row["entry"] - 1
        evidence.append(
            Evidence(
                f"π_test = {row['target']:g}, k / (π N) = {row['ratio']:.2f}",
                0.1 - abs(off),
                note=f"{off:+.1%}, and {row['deviation'] / row['mean']:.1%} from path to path",
            )
        )
    return Claim(
        "table 1",
        "ω_NIS is k / (π N) for π_test = ε, 2 / (1 + π N / k) for 1/2, and 1 for 1 − ε",
        f"0.1 − |E ω_NIS / entry − 1| at N = {largest}, exact: is the entry right to 10 %",
        tuple(evidence),
        "The approximation takes the sum over the other actions for its mean 1 − π_test. Given k "
        "that mean is (1 − π_test)(1 − k / N) / (1 − π), a little less for large k, and it varies "
        "from path to path.",
    )


def _simulation(summary: Summary) -> Claim:
    internal = np.array(summary["internal"], dtype=np.float64)
    path = np.array(summary["path"], dtype=np.float64)
    mse, error = (np.array(summary[key], dtype=np.float64) for key in ("mse", "mse_error"))
    exact_internal, exact_path = (np.array(summary[f"exact_{k}"]) for k in ("internal", "path"))
    gap, checked = summary["library"]
    if summary["runs"] < _ENOUGH:
        error, internal[1], path[1] = np.full_like(error, np.nan), np.nan, np.nan
    return Claim(
        "section 2.3",
        "closed forms and simulation agree",
        "simulated − exact, at the worst point",
        (
            *(
                agreement(f"MSE of {name}", mse[z], np.array(summary["exact_mse"])[z], error[z])
                for z, name in enumerate(("BIS", "NIS", "EA", "ω*"))
            ),
            agreement("V_int of BIS, NIS, EA", internal[0], exact_internal, internal[1]),
            agreement("V_path of BIS, NIS", path[0, :2], exact_path[:2], path[1, :2]),
            Evidence(
                "vectorised estimators − `ope_gym.evaluate`",
                gap,
                equal=True,
                tolerance=1e-10,
                note=f"the largest difference on {checked} data sets",
            ),
        ),
        "BIS and EA have closed forms; NIS and ω* are integrals over one variable of the "
        "generating function of the counts, exact to rounding, so nothing rests on the simulation.",
    )
