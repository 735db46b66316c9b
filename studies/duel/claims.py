"""Judge duels: are they valid, and how many fresh episodes do they save."""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.duel.simulation import KINDS
from studies.duel.tails import ASSUMPTIONS, CASES, holds
from studies.harness.claims import Claim, Evidence
from studies.harness.study import Summary

_GOAL = 0.6  # episodes over episodes of what is compared with
_WORSE = 1.05


def duel_claims(
    summary: Summary,
    healthy: Sequence[str],
    poor: Sequence[str],
    misled: Sequence[str],
    null: Sequence[str],
) -> list[Claim]:
    """Return the claims with their evidence."""
    at = {name: i for i, name in enumerate(summary["names"])}
    chance = math.sqrt(0.05 * 0.95 / (summary["runs"] * summary["duels"]))

    def rare(name: str, wrong: float, error: float) -> Evidence:
        return Evidence(name, 0.05 - wrong, max(error, chance), note=f"{wrong:.2%} are false")

    def few(name: str, j: int) -> Evidence:
        i = at[name]
        return rare(f"{name}, {KINDS[j]}", summary["wrong"][i][j], summary["wrong_error"][i][j])

    def saved(name: str, goal: float, over: str) -> Evidence:
        log, error = summary[f"over {over}"][at[name]], summary[f"over {over} error"][at[name]]
        part = f"{100 * abs(1 - math.exp(log)):.0f} % {'fewer' if log < 0 else 'more'}"
        return Evidence(name, math.log(goal) - log, error, note=part)

    def compare(words: str, over: str, names: Sequence[str], goal: float, why: str) -> Claim:
        measured = f"ln {goal:g} − ln(episodes with data / episodes {over})"
        evidence = tuple(saved(name, goal, over) for name in names)
        return Claim("our extension", words, measured, evidence, why)

    free = [
        rare(f"{case}, {assumption}", summary["free_wrong"][i][j], summary["free_error"][i][j])
        for i, case in enumerate(CASES)
        for j, assumption in enumerate(ASSUMPTIONS)
        if holds(i, assumption)
    ]
    return [
        Claim(
            "our extension",
            "Of the duels between policies of equal value, at most 5 % end with a winner, even "
            "with a look after every round.",
            "5 % − share of false decisions",
            tuple(few(name, j) for name in null for j in range(len(KINDS))),
            "",
        ),
        compare(
            "Where the effective sample size is healthy, a duel takes 40 % fewer fresh episodes "
            "than a test of fixed size that knows the variance and the difference.",
            "of a fixed-size test",
            healthy,
            _GOAL,
            "Such a test assumes a normal distribution, which bounds on the returns do not "
            "guarantee. A duel must also rule out rare returns at the ends of the range: that "
            "alone takes a third of the fixed size, and even the oracle takes up to a half.",
        ),
        compare(
            "Where the effective sample size is healthy, a duel takes 40 % fewer fresh episodes "
            "than bets on pairs without recorded episodes.",
            "of pairs",
            healthy,
            _GOAL,
            "",
        ),
        compare(
            "Where the effective sample size is healthy, a duel takes 40 % fewer fresh episodes "
            "than the same duel without recorded episodes.",
            "without data",
            healthy,
            _GOAL,
            "This is not possible where the range of the returns limits the bets: see the columns "
            "floor and oracle. Even the oracle, which knows what no recorded episodes can prove, "
            "saves only 24 % to 35 %. And a duel trusts recorded episodes little, so that "
            "misleading ones cost little.",
        ),
        compare(
            "Recorded episodes of the same problem never cost more than 5 %.",
            "without data",
            (*healthy, *poor),
            _WORSE,
            "",
        ),
        compare(
            "Misleading recorded episodes (their verdicts are green, but they show the wrong "
            "policy ahead, or a third of the true difference) cost at most 5 %.",
            "without data",
            misled,
            _WORSE,
            "",
        ),
        Claim(
            "our extension",
            "Misleading recorded episodes make at most 5 % of the decisions false.",
            "5 % − share of false decisions",
            tuple(few(name, len(KINDS) - 1) for name in misled),
            "",
        ),
        Claim(
            "our extension",
            "Without bounds, at most 5 % of the duels between policies of equal value end with a "
            "winner, where the returns are as assumed.",
            "5 % − share of false decisions",
            tuple(free),
            "",
        ),
    ]
