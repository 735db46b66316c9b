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

from ope_gym.verdict import Reason

REGIMES = ("held-out", "fresh", "adaptive", "in-sample", "unstated")
IN_SAMPLE = ("in_sample", "in_sample_though_held_out")  # reasons of that regime
LABELS = {"in-sample": "in-sample, optimistic"}


def label(regime: str) -> str:
    """Return the name of a regime as reports show it."""
    return LABELS.get(regime, regime)


def doubts(regime: str, scheme: str, held_out: bool = False) -> tuple[Reason, ...]:
    """Return the reasons why a result of this regime is amber at best; empty if it is not.

    Args:
        regime: One of `REGIMES`.
        scheme: Weighting scheme; empty without weights.
        held_out: Whether some of the episodes are held out, so that they could be used alone.
    """
    if regime == "in-sample":
        return (Reason("in_sample_though_held_out" if held_out else "in_sample"),)
    if regime == "adaptive" and scheme != "basic":
        return (Reason("adaptive"),)
    return ()
