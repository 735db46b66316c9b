"""Warnings of Gymnasium wrappers whose statistics drift while episodes are recorded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

_REWARD, _OBSERVATION = "NormalizeReward", "NormalizeObservation"


def warn_of_normalisers(env: Any) -> None:
    """Warn of normalising wrappers beneath a recorder, except in other processes."""
    for name in dict.fromkeys(_normalisers(env)):
        warnings.warn(
            f"the recorder is wrapped around {_WARNINGS[name]}", UserWarning, stacklevel=3
        )


_WARNINGS = {
    _REWARD: (
        f"{_REWARD}: the values will be those of rescaled rewards, whose scale drifts. Record "
        f"beneath it: recorder = RecordTrajectories(env); env = {_REWARD}(recorder)"
    ),
    _OBSERVATION: (
        f"{_OBSERVATION}, whose statistics change at every step: one state is recorded as many "
        "different observations, to which a policy gives different probabilities. Set its "
        "update_running_mean = False before you record"
    ),
}


def _normalisers(env: Any) -> Iterator[str]:
    """Yield the names of the normalisers in a chain of wrappers, single, vector or both."""
    while env is not None:
        for kind in type(env).__mro__:  # by name, because each has a vector twin
            frozen = kind.__name__ == _OBSERVATION and not env.update_running_mean
            if kind.__name__ in _WARNINGS and not frozen:
                yield kind.__name__
        for part in getattr(env, "envs", ()):  # of a vector env in this process
            yield from _normalisers(part)
        env = vars(env).get("env")
