"""Judge duels: are they valid, and how many fresh episodes do they save."""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.duel.simulation import KINDS
from studies.duel.tails import ASSUMPTIONS, CASES, holds
from studies.harness.claims import Claim, Evidence
from studies.harness.study import Summary

_GOAL = 0.6  # episodes over episodes of what is compared with


def duel_claims(summary: Summary, apart: Sequence[str], null: Sequence[str]) -> list[Claim]:
    """Return the claims with their evidence.

    Args:
        summary: the numbers.
        apart: problems whose policies differ.
        null: problems whose policies are worth the same.
    """
    at = {name: i for i, name in enumerate(summary["names"])}
    chance = math.sqrt(0.05 * 0.95 / (summary["runs"] * summary["duels"]))

    def rare(name: str, wrong: float, error: float) -> Evidence:
        return Evidence(name, 0.05 - wrong, max(error, chance), note=f"{wrong:.2%} are false")

    def few(name: str, j: int) -> Evidence:
        i = at[name]
        return rare(f"{name}, {KINDS[j]}", summary["wrong"][i][j], summary["wrong_error"][i][j])

    def saved(name: str, over: str) -> Evidence:
        log, error = summary[f"over {over}"][at[name]], summary[f"over {over} error"][at[name]]
        part = f"{100 * abs(1 - math.exp(log)):.0f} % {'fewer' if log < 0 else 'more'}"
        return Evidence(name, math.log(_GOAL) - log, error, note=part)

    def compare(words: str, over: str, why: str) -> Claim:
        measured = f"ln {_GOAL:g} − ln(episodes of a duel / episodes {over})"
        evidence = tuple(saved(name, over) for name in apart)
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
            "A duel takes 40 % fewer fresh episodes than a test of fixed size that knows the "
            "variance and the difference.",
            "of a fixed-size test",
            "Such a test assumes a normal distribution, which bounds on the returns do not "
            "guarantee. A duel must also rule out rare returns at the ends of the range: that "
            "alone takes a third of the fixed size, and even the oracle takes up to a half.",
        ),
        compare("A duel takes 40 % fewer fresh episodes than bets on pairs.", "of pairs", ""),
        Claim(
            "our extension",
            "Without bounds, at most 5 % of the duels between policies of equal value end with a "
            "winner, where the returns are as assumed.",
            "5 % − share of false decisions",
            tuple(free),
            "",
        ),
    ]
