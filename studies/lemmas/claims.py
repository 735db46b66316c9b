"""Judge the paper's two lemmas by random problems."""

from __future__ import annotations

from studies.harness.claims import FAILS, ROUNDING, Claim, Evidence
from studies.harness.study import Summary


def lemma_claims(summary: Summary) -> list[Claim]:
    """Return the claims of lemmas 1 and 2, of their closed forms and how far they reach."""
    return [_closed_forms(summary), _printed(summary), *_fis(summary), *_ouis(summary)]


def _closed_forms(summary: Summary) -> Claim:
    """Return the claim that the closed forms of the variances are right."""
    names = ("BIS", "FIS", "OUIS", "optimum")
    return Claim(
        "appendix, proof of lemma 1",
        "the closed forms of Var(BIS) and Var(FIS), and both are unbiased",
        "closed form − sum over all data sets, relative to Var(BIS), the largest of all problems",
        (
            *(
                Evidence(f"Var({name})", gap, equal=True, tolerance=ROUNDING)
                for name, gap in zip(names, summary["gap"], strict=True)
            ),
            *(
                Evidence(f"bias of {name}", bias, equal=True, tolerance=ROUNDING)
                for name, bias in zip(names, summary["bias"], strict=True)
            ),
        ),
        "The lines of each variance are right. The terms that are summed are those of "
        "`ope_gym.evaluate_log_probs` (the optimum's are those of `studies.oracle`).",
    )


def _printed(summary: Summary) -> Claim:
    """Return the claim about expressions that the appendix prints."""
    printed, mended = summary["printed"]
    ratio, excess = summary["lemma"]
    return Claim(
        "appendix, proof of lemma 1, as printed",
        "Var(BIS) − Var(FIS) as its first line has it, and Σ 1/a_i Σ a_j = N⁻² ΣΣ a_j / a_i",
        "printed − right value, relative to Var(BIS): the median of the problems, then the largest",
        (
            Evidence("Var(BIS) − Var(FIS)", printed, equal=True, tolerance=ROUNDING),
            Evidence(
                "the same with (r̄² + V), J² / N once, and r̄ π_i",
                mended,
                equal=True,
                tolerance=ROUNDING,
            ),
            Evidence(
                "printed N⁻² ΣΣ a_j / a_i over Σ 1/a_i Σ a_j, −1",
                ratio - 1,
                equal=True,
                tolerance=ROUNDING,
            ),
            Evidence("Σ 1/a_i Σ a_j / N² − 1, the smallest", excess - 1, tolerance=ROUNDING),
        ),
        "Line 1 has three misprints and the identity a factor N⁻² too much; the second line of the "
        "difference and the inequality are right, and so is the lemma.",
    )


def _fis(summary: Summary) -> list[Claim]:
    """Return claims about FIS."""
    problems, steps = summary["problems"], summary["multi_step"]
    bis, fis = summary["undone"]
    return [
        Claim(
            "lemma 1",
            "FIS dominates BIS",
            "the smallest 1 − Var(FIS) / Var(BIS)",
            (
                Evidence(
                    f"{problems} problems of one step",
                    summary["margin"],
                    tolerance=ROUNDING,
                    note=f"{summary['dominated']} of {problems}",
                ),
            ),
            "This is a theorem if each draw is a single action.",
        ),
        Claim(
            "our extension",
            "FIS dominates BIS per decision too, in episodes of several steps",
            "Var(BIS) − Var(FIS), or minus the share of problems in which FIS has more variance",
            (
                *(
                    Evidence(
                        f"random rewards: {kind}",
                        -row["above"] / problems,
                        note=f"FIS above BIS in {row['above']} of {problems}",
                    )
                    for kind, row in steps.items()
                ),
                Evidence(
                    "+1 then −1, by a target that always stays",
                    bis - fis,
                    note=f"Var(BIS) {bis:.4f}, Var(FIS) {fis:.4f}",
                ),
            ),
            "Lemma 1 is about one step, and section 3.4 claims no more. "
            "N² (Var(BIS) − Var(FIS)) is at least Σ over prefixes of P_e² r_t (r_t + 2 E_e[later "
            "rewards]) (Σ_k 1/P_k − N² / Σ_k P_k). The last factor is never negative, but "
            "r_t (r_t + …) is where later rewards are expected to take back more than half of "
            "r_t. So the order is a theorem for one step, for rewards of one sign (CartPole) and "
            "where only the last one is not 0 (Blackjack), and not in general.",
        ),
        Claim(
            "section 3.2",
            "FIS has the unbiased weights that minimise V_int",
            "the largest V_int(FIS) / min V_int − 1",
            (
                Evidence(
                    f"{problems} problems", summary["internal"], equal=True, tolerance=ROUNDING
                ),
            ),
            "V_int has no covariances between actions: α ∝ π_i minimises it action by action.",
        ),
    ]


def _ouis(summary: Summary) -> list[Claim]:
    """Return claims about OUIS."""
    names = ("all", *summary["families"])
    above, below, beaten = (
        summary[f"ouis_{key}"] for key in ("above_fis", "below_fis", "above_optimum")
    )
    half = len(summary["levels"]) // 2
    middle = {name: summary["ratios"][name]["optimum / OUIS"][half] for name in names}
    _, fis, ouis, best = summary["example"]
    why = (
        "The proof minimises the variance of each action separately. But one draw has one action: "
        "the terms of two actions are negatively correlated, and their covariances, which it "
        "drops, are as large as what it keeps. The optimum of the family is a quadratic programme "
        "over all α, see `studies.oracle.optimal_alpha`."
    )
    return [
        Claim(
            "lemma 2",
            "OUIS minimises the MSE among the unbiased estimators of its family",
            "minus the share of problems in which another member has less variance; and for the "
            "example Var(optimum) − Var(OUIS)",
            (
                *(
                    Evidence(
                        f"{n} rewards" if n == "all" else n,
                        -s,
                        note=f"the median of Var(optimum) / Var(OUIS) is {middle[n]:.3g}",
                    )
                    for n, s in zip(names, beaten, strict=True)
                ),
                Evidence("example of two actions", best - ouis),
            ),
            {FAILS: why},
        ),
        Claim(
            "section 3.2 and conclusion",
            "OUIS dominates FIS",
            "minus the share of problems in which OUIS has more variance than FIS; and for the "
            "example Var(FIS) − Var(OUIS)",
            (
                *(
                    Evidence(f"{n} rewards" if n == "all" else n, -a, note=f"less in {b:.1%}")
                    for n, a, b in zip(names, above, below, strict=True)
                ),
                Evidence("example of two actions", fis - ouis),
            ),
            {FAILS: "Neither is always better; with noisy rewards they are nearly the same."},
        ),
    ]
