"""Checks at the doors: errors name the argument, its value, where it stands, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.estimators import ESTIMATORS
from ope_gym.intervals import METHODS
from ope_gym.weights import LOG_PROB_TOLERANCE, FloatArray, IntArray, bad_log_prob


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
        names, float(gamma), float(cap), interval, float(level), check_seed(rng), int(resamples),
        reward_range, None if horizon is None else int(horizon),
    )  # fmt: skip


def check_seed(rng: int | np.random.Generator | None) -> int:
    """A seed from a seed, from the next draw of a generator, or 0."""
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(1 << 62))
    seed = int(rng or 0)
    if seed < 0 or seed != (rng or 0):
        raise ValueError(f"rng is {rng!r}; give a seed of 0 or more, or a numpy Generator")
    return seed


def positive(value: object) -> int:
    """A whole number above 0, or 0 for anything else."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return max(int(value), 0)
    return 0


def check_offsets(offsets: ArrayLike, steps: int) -> IntArray:
    """Offsets (n + 1,) that cut `steps` rows into non-empty trajectories."""
    array = np.asarray(offsets)
    if array.ndim == 1 and array.size < 2:
        raise ValueError("offsets has no trajectory: record at least one episode first")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"offsets has shape {array.shape} and type {array.dtype}; "
            "it must be (n + 1,) integers: trajectory i is rows offsets[i]:offsets[i + 1]"
        )
    array = array.astype(np.int64)
    short = np.flatnonzero(np.diff(array) <= 0)
    if short.size:
        i = int(short[0])
        raise ValueError(
            f"offsets goes from {array[i]} to {array[i + 1]} at episode {i}; it must increase, "
            "because every episode has at least one step"
        )
    if array[0] != 0 or array[-1] != steps:
        raise ValueError(
            f"offsets runs from {array[0]} to {array[-1]}; it must run from 0 to the {steps} steps "
            "of rewards"
        )
    return array


def as_floats(values: ArrayLike, name: str) -> FloatArray:
    """A float64 array; copied only if it is none yet."""
    try:
        return np.asarray(values).astype(np.float64, casting="same_kind", copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error


def check_column(values: ArrayLike, name: str, steps: int | None = None) -> FloatArray:
    """A float64 column (S,)."""
    array = np.ascontiguousarray(as_floats(values, name))
    if array.ndim != 1 or (steps is not None and array.size != steps):
        expected = "(S,)" if steps is None else f"({steps},), one entry a step"
        raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
    return array


def check_finite(values: FloatArray, name: str, offsets: IntArray, first: int = 0) -> None:
    """No NaN and no infinity; `first` is the number of the first episode."""
    from ope_gym import kernels

    largest = np.finfo(np.float64).max
    row = kernels.first_outside(values, -largest, largest)
    if row >= 0:
        episode, step = place(row, offsets)
        raise ValueError(
            f"{name} is {values[row]} at episode {first + episode}, step {step}: "
            "drop or repair that episode before evaluating"
        )


def check_log_probs(
    values: FloatArray, name: str, offsets: IntArray, density: bool, first: int = 0
) -> None:
    """Not NaN, not +inf, and at most 0 unless they are densities; -inf is allowed."""
    from ope_gym import kernels

    limit = np.finfo(np.float64).max if density else LOG_PROB_TOLERANCE
    row = kernels.first_outside(values, -np.inf, limit)
    if row >= 0:
        episode, step = place(row, offsets)
        raise bad_log_prob(name, float(values[row]), first + episode, step)


def place(row: int, offsets: IntArray) -> tuple[int, int]:
    """Episode and step of a row."""
    episode = int(np.searchsorted(offsets, row, side="right")) - 1
    return episode, row - int(offsets[episode])
