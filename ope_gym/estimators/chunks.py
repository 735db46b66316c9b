"""Chunks of weighted trajectories, and which of their weights and rewards an estimator uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray, cuts_of, offsets_of, step_numbers

T = TypeVar("T")
LARGEST = 600.0  # log of the largest weight: a bound that keeps all sums within floats


@dataclass(frozen=True, eq=False)
class Weighted:
    """Some trajectories after weighing: S steps, n trajectories.

    Args:
        offsets: (n + 1,).
        rewards: (S,).
        log_weights: Log weights (S,) by scheme.
        residuals: (S,) r - q + gamma v of the next step; None without a q model.
        start: (n,) the q model's v at the start; None without a q model.
        direct: (n,) v at the start of a q that was learned from all episodes; None without one.
        visits: (2, S) ratio of the target's visits to the recorded ones, and the residual at these
            visits; None where they are unknown.
        unknown: (4, S) ratio of visits to the state of a step, those to actions that no other
            episode shows the q model, what these may be worth, and whether the recorded action is
            one; NaN, or None, if the model cannot tell.
        past: columns (S, p) of the actions and (S, m) of other things that a step shows, by which
            later residuals might be predicted; None where they are unknown.
        step_ratios: (S,) log pi / mu of each action by itself; None where nobody asks for them. The
            weights are no substitute: they stay 0 after an action that the target never takes.
        unit: the largest reward of all chunks, by which squares of rewards stay within floats.
        first: how many trajectories come before these.
        whole: Functions by name that make what an estimator needs of all trajectories at once.
        episodes: the recorded trajectories themselves; None where they were not kept.
        kept: by name, numbers made of these trajectories that do not depend on the target; the
            same dictionary for all targets.
        last_clipped: Log weights that were asked for last, by scheme and clip.
    """

    offsets: IntArray
    rewards: FloatArray
    log_weights: Mapping[str, FloatArray]
    residuals: FloatArray | None = None
    start: FloatArray | None = None
    direct: FloatArray | None = None
    visits: FloatArray | None = None
    unknown: FloatArray | None = None
    past: tuple[NDArray[Any], NDArray[Any]] | None = None
    step_ratios: FloatArray | None = None
    unit: float = 1.0
    first: int = 0
    whole: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    episodes: Any = None
    kept: dict[Any, Any] = field(default_factory=dict)
    last_clipped: dict[tuple[str, Clip], FloatArray] = field(default_factory=dict, init=False)

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """Return what `make` does of numbers that do not depend on the target, made once."""
        if name not in self.kept:
            self.kept[name] = make()
        value: T = self.kept[name]
        return value

    def clipped(self, scheme: str, clip: Clip) -> FloatArray:
        """Return log weights (S,) after a clip; those of the last one are kept, for all who ask."""
        log_w = self.last_clipped.get((scheme, clip))
        if log_w is None:
            log_w = np.minimum(self.log_weights[scheme], clip.limit.take(self.steps))
            self.last_clipped.clear()
            self.last_clipped[scheme, clip] = log_w
        return log_w

    @property
    def steps(self) -> IntArray:
        """(S,) number of each step in its trajectory."""
        return self.once("steps", lambda: step_numbers(self.offsets))


@dataclass(frozen=True, eq=False)
class Clip:
    """An upper bound (T,) on the log weights of each step; compared by identity."""

    limit: FloatArray


@dataclass(frozen=True)
class Column:
    """A choice of weights, and of the numbers they multiply.

    Args:
        scheme: Weighting scheme.
        cap: upper bound of the weights, None without one.
        baseline: weights multiply the residuals of the q model, not the rewards.
        clip: upper bounds of each step, None without any.
    """

    scheme: str
    cap: float | None = None
    baseline: bool = False
    clip: Clip | None = None

    @property
    def log_cap(self) -> float:
        """The log of the cap, inf without one."""
        return np.inf if self.cap is None else float(np.log(self.cap))

    def of(self, chunk: Weighted) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return log weights (S,) before the cap, what they multiply (S,), and the offsets."""
        log_w, pay = chunk.log_weights[self.scheme], chunk.rewards
        if self.clip is not None:
            log_w = chunk.clipped(self.scheme, self.clip)
        if self.baseline:
            assert chunk.residuals is not None  # whoever asks has a q model
            pay = chunk.residuals
        return log_w, pay, chunk.offsets


def discounts(gamma: float, horizon: int) -> FloatArray:
    """Return gamma^t (T,)."""
    return np.asarray(np.float64(gamma) ** np.arange(horizon))


def within_discount(chunk: Weighted, gamma: float) -> Weighted:
    """Keep the steps that gamma leaves any weight: the first ones alone if gamma is 0."""
    if gamma == 1.0:
        return chunk
    lengths = np.diff(chunk.offsets)
    counted = int(np.count_nonzero(gamma ** np.arange(lengths.max()) > 0))
    if counted == lengths.max():
        return chunk
    kept = step_numbers(chunk.offsets) < counted
    return dataclasses.replace(
        chunk,
        rewards=chunk.rewards[kept],
        offsets=offsets_of(np.minimum(lengths, counted)),
        log_weights={scheme: log_w[kept] for scheme, log_w in chunk.log_weights.items()},
        residuals=None if chunk.residuals is None else chunk.residuals[kept],
        visits=None,  # of all steps, each of which speaks for the first ones, too
        past=None,
        step_ratios=None if chunk.step_ratios is None else chunk.step_ratios[kept],
    )


def pieces(chunk: Weighted, steps: int) -> list[Weighted]:
    """Cut a chunk into pieces of about so many steps; they are views, and lack what is whole."""
    return [_piece(chunk, begin, end) for begin, end in cuts_of(chunk.offsets, steps)]


def _piece(chunk: Weighted, begin: int, end: int) -> Weighted:
    """Return trajectories begin..end-1 of a chunk."""
    start, stop = int(chunk.offsets[begin]), int(chunk.offsets[end])

    def steps(column: FloatArray | None) -> FloatArray | None:
        return None if column is None else column[..., start:stop]

    def trajectories(column: FloatArray | None) -> FloatArray | None:
        return None if column is None else column[begin:end]

    return Weighted(
        chunk.offsets[begin : end + 1] - start,
        chunk.rewards[start:stop],
        {scheme: log_w[start:stop] for scheme, log_w in chunk.log_weights.items()},
        residuals=steps(chunk.residuals),
        start=trajectories(chunk.start),
        direct=trajectories(chunk.direct),
        visits=steps(chunk.visits),
        unknown=steps(chunk.unknown),
        step_ratios=steps(chunk.step_ratios),
        unit=chunk.unit,
        first=chunk.first + begin,
    )
