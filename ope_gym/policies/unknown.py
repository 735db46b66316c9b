"""The policy that nobody recorded: data say what it did, not how likely that was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym.policies.base import Policy, UnavailablePolicy, register_policy

UNKNOWN = "unknown"


@register_policy
class UnknownPolicy(UnavailablePolicy):
    """A policy of which nothing is known.

    Where it acted, and only there, trajectories may have NaN for the log-probability: "not
    recorded". Two of them are never equal, since nothing says that they are one policy.
    """

    kind = UNKNOWN  # type: ignore[misc]  # of the class, for the registry

    def __init__(self) -> None:
        super().__init__(UNKNOWN, {})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> UnknownPolicy:
        """There is nothing to read."""
        return cls()

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return (id(self),)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __repr__(self) -> str:
        return "UnknownPolicy()"

    def _refuse(self, method: str) -> NoReturn:
        raise RuntimeError(
            f"{method} of an unknown policy: these data do not say who acted, so there are no "
            "weights against a mixture of policies. Where the probabilities of the actions are "
            "recorded (trajectories.has_propensities) use estimators with basic weights, such as "
            "BIS and NBIS; where they are not, use DM, which has no weights"
        )


def acts_unknown(policies: tuple[Policy, ...], policy_ids: ArrayLike) -> NDArray[np.bool_] | None:
    """(S,) where an unknown policy acted; None if nowhere."""
    if not any(issubclass(kind, UnknownPolicy) for kind in set(map(type, policies))):
        return None
    unknown = np.array([isinstance(policy, UnknownPolicy) for policy in policies], dtype=bool)
    return np.asarray(unknown[np.asarray(policy_ids)])
