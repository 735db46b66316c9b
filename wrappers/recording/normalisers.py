"""Gymnasium wrappers that change observations or rewards with statistics that drift."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

REWARD, OBSERVATION = "NormalizeReward", "NormalizeObservation"


def warn_of_normalisers(env: Any) -> None:
    """Warn of those beneath a recorder; sub-envs in other processes are not looked into."""
    for name in dict.fromkeys(_normalisers(env)):
        warnings.warn(f"the recorder stands around {_WARNINGS[name]}", UserWarning, stacklevel=3)


_WARNINGS = {
    REWARD: (
        f"{REWARD}: the values will be those of rescaled rewards, whose scale drifts. Record "
        f"beneath it: recorder = RecordTrajectories(env); env = {REWARD}(recorder)"
    ),
    OBSERVATION: (
        f"{OBSERVATION}, whose statistics change at every step: one state is recorded as many "
        "observations, and what a policy says of them is not what it does in that state. Set its "
        "update_running_mean = False before you record"
    ),
}


def _normalisers(env: Any) -> Iterator[str]:
    """Names of the normalisers in a chain of wrappers, single, vector or both."""
    while env is not None:
        for kind in type(env).__mro__:  # by name, for there is a vector twin of each
            at_rest = kind.__name__ == OBSERVATION and not env.update_running_mean
            if kind.__name__ in _WARNINGS and not at_rest:
                yield kind.__name__
        for part in getattr(env, "envs", ()):  # of a vector env in this process
            yield from _normalisers(part)
        env = vars(env).get("env")
