"""Options of an evaluation, declared and checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.intervals import METHODS


@dataclass(frozen=True)
class Options:
    """Checked options of an evaluation; see `ope_gym.evaluate`."""

    estimators: tuple[str, ...]
    gamma: float
    cap: float
    interval: str
    level: float
    seed: int
    resamples: int
    reward_range: tuple[float, float] | None
    horizon: int | None


def check_options(
    estimators: str | Iterable[str],
    gamma: float,
    cap: float,
    interval: str,
    level: float,
    rng: int | np.random.Generator | None,
    resamples: int,
    reward_range: tuple[float, float] | None,
    horizon: int | None,
) -> Options:
    """The options, or an error that says which one is wrong."""
    known = tuple(ESTIMATORS)
    names = (estimators,) if isinstance(estimators, str) else tuple(estimators)
    if not names:
        raise ValueError(f"estimators is empty; known are {', '.join(known)}")
    for name in names:
        if name not in known:
            hint = "; fitted q evaluation is DM, the direct method" if name == "FQE" else ""
            raise ValueError(f"estimators has {name!r}; known are {', '.join(known)}{hint}")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma!r}; a discount lies within [0, 1]")
    if not cap > 0.0:
        raise ValueError(f"cap is {cap!r}; it bounds the weights, so it must be above 0")
    if interval not in METHODS:
        raise ValueError(f"interval is {interval!r}; choose one of {', '.join(METHODS)}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level!r}; a confidence level lies within (0, 1), such as 0.95")
    if not resamples >= 2 or resamples % 1:
        raise ValueError(f"resamples is {resamples!r}; a bootstrap needs at least 2, better 1000")
    if horizon is not None and (not horizon >= 1 or horizon % 1):
        raise ValueError(
            f"horizon is {horizon!r}; the longest possible episode has at least 1 step"
        )
    if interval == "betting":
        if reward_range is None:
            raise ValueError(
                'interval="betting" needs reward_range=(lowest, highest) that every reward obeys, '
                "for instance reward_range=(0, 1) for CartPole"
            )
        ends = np.asarray(reward_range, dtype=np.float64)
        if ends.shape != (2,) or not np.all(np.isfinite(ends)) or ends[0] > ends[1]:
            raise ValueError(f"reward_range is {reward_range!r}; give finite (lowest, highest)")
        if horizon is None:
            raise ValueError(
                'interval="betting" needs horizon, the longest possible episode (the time limit): '
                "the longest recorded one may fall short of it, and the interval of the truth"
            )
    return Options(
        names,
        float(gamma),
        float(cap),
        interval,
        float(level),
        check_seed(rng),
        int(resamples),
        reward_range,
        None if horizon is None else int(horizon),
    )


def check_seed(rng: int | np.random.Generator | None) -> int:
    """A seed from a seed, from the next draw of a generator, or 0."""
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(1 << 62))
    seed = int(rng or 0)
    if seed < 0 or seed != (rng or 0):
        raise ValueError(f"rng is {rng!r}; give a seed of 0 or more, or a numpy Generator")
    return seed
