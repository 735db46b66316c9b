"""Judge duels: are they valid, and what do recorded episodes save."""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.harness.claims import Claim, Evidence
from studies.harness.study import Summary

_GOAL = 0.6  # rounds with recorded episodes over rounds without
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
    kinds = ("without data", "with data")

    def rare(name: str, j: int) -> Evidence:
        wrong, error = summary["wrong"][at[name]][j], summary["wrong_error"][at[name]][j]
        error = max(error, math.sqrt(0.05 * 0.95 / (summary["runs"] * summary["duels"])))
        return Evidence(f"{name}, {kinds[j]}", 0.05 - wrong, error, note=f"{wrong:.2%} are false")

    def saved(name: str, goal: float) -> Evidence:
        log, error = summary["log"][at[name]], summary["log_error"][at[name]]
        part = f"{100 * abs(1 - math.exp(log)):.0f} % {'fewer' if log < 0 else 'more'}"
        return Evidence(name, math.log(goal) - log, error, note=part)

    return [
        Claim(
            "our extension",
            "At most 5 % of the duels of equal policies end with a winner, looked at after every "
            "round.",
            "5 % − share of false decisions",
            tuple(rare(name, j) for name in null for j in (0, 1)),
            "",
        ),
        Claim(
            "our extension",
            "Where the effective sample size is healthy, recorded episodes save 40 % of the fresh "
            "ones.",
            "ln 0.6 − ln(rounds with / rounds without)",
            tuple(saved(name, _GOAL) for name in healthy),
            "The luck of the policies' own actions is what recorded episodes can take away. Where "
            "the chance of the environment decides, common seeds have taken it away already. And "
            "a bet is limited by the range of the returns, which no data make smaller.",
        ),
        Claim(
            "our extension",
            "Recorded episodes of the same problem never cost more than 5 %.",
            "ln 1.05 − ln(rounds with / rounds without)",
            tuple(saved(name, _WORSE) for name in (*healthy, *poor)),
            "",
        ),
        Claim(
            "our extension",
            "Nor do recorded episodes that mislead: green verdicts, and the wrong policy ahead.",
            "ln 1.05 − ln(rounds with / rounds without)",
            tuple(saved(name, _WORSE) for name in misled),
            "Bets on the wrong side are lost, and the right side has the smaller part of the error "
            "probability. A duel then takes longer; it does not err more often.",
        ),
        Claim(
            "our extension",
            "Misleading recorded episodes make at most 5 % of the decisions false.",
            "5 % − share of false decisions",
            tuple(rare(name, 1) for name in misled),
            "",
        ),
    ]
