"""Regimes of an evaluation: whether the target, or its behaviours, learned from the episodes.

| regime    | what is true                                                                       |
|-----------|------------------------------------------------------------------------------------|
| held-out  | the learner never trained on these episodes: everything classical holds            |
| fresh     | one policy recorded them all, and the target was fixed in advance: the same        |
| adaptive  | policies learned from earlier episodes, the target was fixed in advance: basic     |
|           | weights stay unbiased; weights against a mixture do not, since later policies in    |
|           | their denominator depend on earlier rewards                                        |
| in-sample | the target was trained on these very episodes: estimates are optimistic, some a    |
|           | little and some much; only held-out episodes repair it                             |
| unstated  | nothing is known                                                                   |
"""

from __future__ import annotations

REGIMES = ("held-out", "fresh", "adaptive", "in-sample", "unstated")
LABELS = {"in-sample": "in-sample, optimistic"}


def label(regime: str) -> str:
    """Return the name of a regime as reports show it."""
    return LABELS.get(regime, regime)


def cautions(regime: str, scheme: str, held_out: bool = False) -> tuple[str, ...]:
    """Return the reasons why a result of this regime is amber at best; empty if it is not.

    Args:
        regime: one of `REGIMES`.
        scheme: of the weights.
        held_out: whether some of the episodes are held out, so that they could be used alone.
    """
    if regime == "in-sample":
        remedy = "; evaluate it on the held-out ones alone" if held_out else ""
        return (
            "optimistic, because the policy learned, or may have learned, from these episodes "
            f"(in-sample){remedy}",
        )
    if regime == "adaptive" and scheme != "basic":
        return (
            "adaptive: which episodes there are depends on earlier rewards, which biases mixtures "
            "and averages; BIS and ADR stay right",
        )
    return ()
