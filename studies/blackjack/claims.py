"""Judge what the paper says about Blackjack (table 3)."""

from __future__ import annotations

import math

from studies.harness.claims import ENTRY, FAILS, HOLDS, Claim, Evidence
from studies.harness.errors import larger_mse, unbiased
from studies.harness.markdown import number
from studies.harness.study import Summary

PAPER = {  # 5th, 50th, 95th percentile of the MSE; 2,000 runs
    "ε¹": {
        "BIS": (0.1251, 0.1255, 0.1261),
        "FIS": (0.1249, 0.1254, 0.1258),
        "OUIS": (0.1250, 0.1253, 0.1258),
        "NBIS": (0.0427, 0.0438, 0.0450),
        "NFIS": (0.0347, 0.0354, 0.0363),
        "NOUIS": (0.0363, 0.0374, 0.0383),
    },
    "ε²": {
        "BIS": (0.0905, 0.0910, 0.0915),
        "FIS": (0.0870, 0.0875, 0.0880),
        "OUIS": (0.0855, 0.0860, 0.0865),
        "NBIS": (0.0523, 0.0535, 0.0546),
        "NFIS": (0.0429, 0.0441, 0.0453),
        "NOUIS": (0.0458, 0.0468, 0.0479),
    },
}

_MSE = "MSE − MSE, paired by run"
_SOURCE = "section 3.4, table 3"


def blackjack_claims(summary: Summary) -> list[Claim]:
    """Return claims about orderings, then magnitudes, then checks of the true values."""
    return [*_plain(summary), *_normalised(summary), *_magnitudes(summary), *_truth(summary)]


def _ranked(
    summary: Summary, words: str, pairs: list[tuple[str, str]], why: str | dict[str, str]
) -> Claim:
    """Return a claim about orderings of MSEs with both schedules."""
    evidence = [
        row
        for name, found in summary["schedules"].items()
        for row in larger_mse(name, found, summary["names"], pairs)
    ]
    return Claim(_SOURCE, words, _MSE, tuple(evidence), why)


def _plain(summary: Summary) -> list[Claim]:
    """Return claims about BIS, FIS and OUIS."""
    names, (first, second) = summary["names"], summary["schedules"]
    i, j = names.index("FIS"), names.index("OUIS")

    def gap(name: str) -> tuple[float, float, str]:
        found = summary["schedules"][name]
        difference = found["pairs"]["difference"][i][j]
        note = f"{100 * difference / found['mse'][i]:+.1f} % of the MSE of FIS"
        return difference, found["pairs"]["difference_error"][i][j], note

    none, none_error, none_note = gap(first)
    some, some_error, some_note = gap(second)
    share = summary["ess"][1][j] / summary["ess"][1][i]
    return [
        _ranked(
            summary,
            "FIS has a smaller MSE than BIS",
            [("BIS", "FIS")],
            {
                HOLDS: "Where an early policy rarely took the action of the target, the basic "
                "weight is (1 − ε/2) / (ε_k/2); the mixture contains policies that took it often."
            },
        ),
        Claim(
            _SOURCE,
            "with ε¹ differences between OUIS and FIS cannot be observed",
            "MSE(FIS) − MSE(OUIS)",
            (
                Evidence.same(
                    first, none, none_error, summary["schedules"][first]["mse"][i], note=none_note
                ),
            ),
            {
                FAILS: "Games are short, so p / (1 − p) is far from p: the two are different "
                "estimators with either schedule, and paired runs show a difference that separate "
                "intervals do not."
            },
        ),
        Claim(
            _SOURCE,
            "with ε² OUIS has a lower MSE than FIS, as expected",
            "MSE(FIS) − MSE(OUIS)",
            (Evidence(second, some, some_error, note=some_note),),
            {
                FAILS: "With ε² the last policies are nearly deterministic: the one action of a "
                "short game has p = 0.975, so p / (1 − p) is 39 where an early policy has about 1. "
                "OUIS relies on the last policies, and its effective sample size is "
                f"{share:.0%} of that of FIS. OUIS is not the optimum of its family (the proof "
                "leaves out covariances), and p / (1 − p) takes rewards for deterministic given "
                "the actions, while most of their variance comes from the cards; "
                "`--set reward_model=cross-fit` puts that variance in."
            },
        ),
        Claim(
            _SOURCE,
            "the gap between FIS and OUIS is larger with ε², where the policies differ more",
            "MSE(FIS) − MSE(OUIS) with ε² − the same with ε¹",
            (Evidence(f"{second} − {first}", *summary["wider"]),),
            f"MSE(FIS) − MSE(OUIS) is {number(1000 * some)} thousandths with ε² and "
            f"{number(1000 * none)} with ε¹; the paper means a gap in favour of OUIS.",
        ),
    ]


def _normalised(summary: Summary) -> list[Claim]:
    """Return claims about normalised estimators."""
    return [
        _ranked(
            summary,
            "NFIS < NOUIS < NBIS",
            [("NOUIS", "NFIS"), ("NBIS", "NOUIS")],
            {
                FAILS: "NOUIS inherits the weights of OUIS: it is close to NFIS where policies are "
                "alike, and loses where they differ. (Better weights in the unbiased case are no "
                "guarantee of a better normalised estimator, the paper says.)"
            },
        ),
        _ranked(
            summary,
            "normalised estimators have a smaller MSE",
            [("BIS", "NBIS"), ("FIS", "NFIS"), ("OUIS", "NOUIS")],
            "Normalising helps if Σ w r is correlated with Σ w, that is, if returns have one "
            "sign. Returns are −1, 0 and 1 with a mean near 0, so there is little to gain; the "
            "paper's factor of two to three does not appear.",
        ),
        _ranked(
            summary,
            "the rest of the printed order: OUIS > NBIS",
            [("OUIS", "NBIS")],
            {
                FAILS: "Plain fused estimators are not worse than normalised basic ones, since "
                "normalising gains little here."
            },
        ),
    ]


def _magnitudes(summary: Summary) -> list[Claim]:
    """Return the claim about the size of the MSEs."""
    evidence = []
    for name, found in summary["schedules"].items():
        for i, estimator in enumerate(summary["names"]):
            paper = PAPER[name][estimator][1]
            evidence.append(
                Evidence(
                    f"{name}: {estimator}",
                    found["mse"][i] - paper,
                    found["mse_error"][i],
                    equal=True,
                    margin=ENTRY * paper,
                    note=f"paper {paper:.4f}, ours {found['mse'][i]:.5f}",
                )
            )
    return [
        Claim(
            _SOURCE,
            "the MSEs are 0.04 to 0.13",
            "MSE − MSE in the paper",
            tuple(evidence),
            {FAILS: _impossible(summary)},
        )
    ]


def _impossible(summary: Summary) -> str:
    """Explain why the printed magnitudes cannot belong to these estimators."""
    runs, (low, middle, high) = 2000, PAPER["ε¹"]["BIS"]
    width = (high - low) / middle
    # the mean of 2,000 squares of a normal error: its 5th to 95th percentile is 3.29 √(2 / 2000)
    normal = 2 * 1.645 * math.sqrt(2 / runs)
    bias, other = math.sqrt(middle), math.sqrt(PAPER["ε¹"]["NBIS"][1])
    spread = (high - low) * math.sqrt(runs) / (2 * 1.645 * 2 * bias)
    return (
        f"They cannot come from 1,000 games. A return is −1, 0 or 1, with variance "
        f"{summary['variance'][0]:.2f}; the mean of 1,000 returns has the MSE "
        f"{summary['plain'][0]:.4f}, and weights with the effective sample sizes above make it a "
        "few times larger, not a hundred times. Nor do the printed intervals fit an unbiased "
        f"estimator: the squares of normal errors vary so much that over {runs:,} runs the 5th and "
        f"95th percentile of their mean lie {normal:.0%} of the MSE apart; for BIS the paper has "
        f"{width:.1%}. So narrow an interval needs nearly the same error in every run: a constant "
        f"{bias:.2f} with a spread of {spread:.2f} gives just that. A wrong truth alone cannot be "
        f"it: plain and normalised estimators differ by their mean weight only, which is 1, and "
        f"still one would be off by {bias:.2f} and the other by {other:.2f}. So the paper's "
        "weights, or its returns, are not what its text says, and only orderings are left to "
        "compare."
    )


def _truth(summary: Summary) -> list[Claim]:
    """Return claims about unbiasedness, and the check of the true values."""
    schedules, values = summary["schedules"], summary["truth"][0]
    return [
        Claim(
            "section 3.1 and 3.2",
            "BIS, FIS and OUIS are unbiased (on fresh rollouts)",
            "bias",
            tuple(
                row
                for (name, found), value in zip(schedules.items(), values, strict=True)
                for row in unbiased(name, found, summary["names"], ("BIS", "FIS", "OUIS"), value)
            ),
            {HOLDS: "The rollouts are independent of what the policies were learned from."},
        ),
        Claim(
            "check",
            "rollouts of the target agree with its exact value",
            f"mean of {summary['truth_rollouts']:,} rollouts − value by dynamic programming, mean "
            "over runs",
            tuple(
                Evidence.same(name, summary["check"][0][s], summary["check"][1][s], values[s])
                for s, name in enumerate(schedules)
            ),
            {HOLDS: "So the orderings above do not depend on errors of the true value."},
        ),
    ]
