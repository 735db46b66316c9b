"""Which trajectories may be used: the regime of an evaluation, told from tags and policies.

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

import numpy as np

from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy

REGIMES = ("held-out", "fresh", "adaptive", "in-sample", "unstated")
ORIGINS = ("learned", "fixed")
LABELS = {"in-sample": "in-sample, optimistic"}


def label(regime: str) -> str:
    """The regime as it is shown to people."""
    return LABELS.get(regime, regime)


def regime_of(data: Trajectories, target: Policy, origin: str | None = None) -> str:
    """The regime in which `data` tell of `target`.

    Args:
        data: recorded episodes.
        target: the policy to evaluate.
        origin: "learned" if the target was trained on episodes of `data` that are not held out,
            "fixed" if it was chosen before them or apart from them. None: a target that is one of
            the recorded policies learned from the episodes of the policies before it; any other is
            taken for a learner that saw everything.
    """
    if origin is not None and origin not in ORIGINS:
        raise ValueError(f"origin is {origin!r}; choose one of {', '.join(ORIGINS)}")
    if data.held_out.all():
        return "held-out"
    seen = np.unique(data.policy_ids[~data.held_out[data.episode_ids]])
    if origin is None:
        known = [k for k, policy in enumerate(data.policies) if _same(policy, target)]
        origin = "fixed" if known and known[0] <= seen[0] else "learned"
    if origin == "learned":
        return "in-sample"
    return "fresh" if np.unique(data.policy_ids).size == 1 else "adaptive"


def cautions(regime: str, scheme: str) -> tuple[str, ...]:
    """Why a result of this regime is amber at best; empty if it is not."""
    if regime == "in-sample":
        return (
            "in-sample, optimistic: the target learned from these episodes (or nothing says that "
            "it did not); evaluate it on held-out ones, data='held-out'",
        )
    if regime == "adaptive" and scheme != "basic":
        return (
            "adaptive: which episodes there are depends on earlier rewards, which biases mixtures "
            "and averages; BIS and ADR stay right",
        )
    return ()


def held_out_only(data: Trajectories, which: str) -> Trajectories:
    """The episodes that `data="held-out"` or `"all"` asks for."""
    if which not in ("held-out", "all"):
        raise ValueError(f"data is {which!r}; choose 'held-out' or 'all'")
    if which == "all":
        return data
    if not data.held_out.any():
        raise ValueError(
            f"data='held-out', but none of the {len(data)} episodes is held out: record with a "
            "held-out share, or use data='all' and take the result for optimistic"
        )
    return data.select(held_out=True)


def _same(policy: Policy, target: Policy) -> bool:
    try:
        return policy is target or bool(policy == target)
    except Exception:  # a foreign policy may compare as it likes
        return False
