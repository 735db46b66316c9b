"""Chunks of weighted trajectories, and sums over them that can be made chunk by chunk and merged.

An estimator is a generator that asks for reductions: each `yield` is sent their totals, and what it
returns is the result. A reduction makes a part from each chunk of weighted trajectories; parts are
merged in the order of the chunks, and the total is taken once, at the end: estimates of chunks are
never averaged. So an estimator is written once, and runs over one chunk in memory, over files, over
processes or on a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray, annuity, cuts_of, offsets_of, place, step_numbers
from ope_gym.inference.outcomes import tally

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


class Reduction(Protocol):
    """A request for a total over all trajectories; frozen, so that equal ones are answered once.

    One that holds numbers of all trajectories also has `slice(trajectories)`, which keeps those
    that a task needs. One with `in_threads = True` is made of `pieces` of a large chunk, several
    at a time. One with a static `parts(requests, chunks)` makes those of several targets together.
    """

    def part(self, chunk: Weighted) -> Any:
        """Return the part of a chunk: an object with `merge(other)`, for the next chunk's."""
        ...

    def total(self, merged: Any) -> Any:
        """Return the answer, from the parts of all chunks merged in order."""
        ...


# An estimator: yields the reductions it needs next, is sent their totals, returns its result.
Steps: TypeAlias = Generator[tuple[Reduction, ...], tuple[Any, ...], T]


def ask(request: Reduction) -> Steps[Any]:
    """Ask for one reduction and return its total."""
    (total,) = yield (request,)
    return total


def together(*generators: Steps[Any]) -> Steps[list[Any]]:
    """Run generators side by side; yield the requests of all, return the results of all."""
    results: list[Any] = [None] * len(generators)
    wanted: dict[int, tuple[Reduction, ...]] = {}

    def advance(i: int, answers: tuple[Any, ...] | None) -> None:
        try:
            wanted[i] = generators[i].send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            wanted.pop(i, None)
            results[i] = end.value

    for i in range(len(generators)):
        advance(i, None)
    while wanted:
        sizes = {i: len(requests) for i, requests in wanted.items()}
        answers = list((yield tuple(r for requests in wanted.values() for r in requests)))
        for i, size in sizes.items():
            advance(i, tuple(answers[:size]))
            del answers[:size]
    return results


class Arrays:
    """Arrays (n,) of the chunks so far, in order; with more axes, trajectories are the last."""

    def __init__(self, array: FloatArray) -> None:
        self.parts = [array]

    def merge(self, other: Arrays) -> None:
        """Append the arrays of later chunks."""
        self.parts += other.parts

    def joined(self) -> FloatArray:
        """Return one array for all trajectories."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=-1)


@dataclass(frozen=True)
class Starts:
    """Collect the q model's v at the start of each trajectory, (n,).

    Args:
        direct: Values of the q that was learned from all episodes, if there is one.
    """

    direct: bool = False

    def part(self, chunk: Weighted) -> Arrays:
        """Return the values of a chunk."""
        assert chunk.start is not None  # whoever asks has a q model
        return Arrays(chunk.direct if self.direct and chunk.direct is not None else chunk.start)

    def total(self, merged: Arrays) -> FloatArray:
        """Return the values of all trajectories."""
        return merged.joined()


@dataclass(frozen=True)
class Returns:
    """Collect the discounted return of each trajectory, (n,)."""

    gamma: float

    def part(self, chunk: Weighted) -> Arrays:
        """Return those of a chunk."""
        made = chunk.once(
            ("returns", self.gamma), lambda: tally(chunk.rewards, chunk.offsets, self.gamma)[1]
        )
        return Arrays(made)

    def total(self, merged: Arrays) -> FloatArray:
        """Return those of all trajectories."""
        return merged.joined()


@dataclass(frozen=True)
class Whole:
    """Ask for something that needs all trajectories at once: they must be in one chunk."""

    name: str

    def part(self, chunk: Weighted) -> Any:
        """Compute it from the only chunk."""
        return chunk.whole[self.name]()

    def total(self, merged: Any) -> Any:
        """Return it unchanged."""
        return merged


@dataclass(frozen=True)
class Bets:
    """Sum discounted weighted rewards above the lowest, and below the highest, possible: (2, n).

    After its end a trajectory is paid 0 with its last weight until the horizon.

    Args:
        column: which weights.
        gamma: discount.
        reward_range: lowest and highest possible reward.
        horizon: longest possible episode.
    """

    column: Column
    gamma: float
    reward_range: tuple[float, float]
    horizon: int

    def part(self, chunk: Weighted) -> Arrays:
        """Sum along the trajectories of a chunk."""
        log_w, rewards, offsets = self.column.of(chunk)
        self._check(rewards, offsets, chunk.first)
        lengths = np.diff(offsets)
        weights = np.exp(np.minimum(log_w, min(self.column.log_cap, LARGEST)))
        discount = discounts(self.gamma, self.horizon + 1)[step_numbers(offsets)]
        left = annuity(self.gamma, self.horizon)
        after = weights[offsets[1:] - 1] * (left[self.horizon] - left[lengths])
        low, high = min(self.reward_range[0], 0.0), max(self.reward_range[1], 0.0)
        paid = [
            np.add.reduceat(weights * gain * discount, offsets[:-1]) + after * idle
            for gain, idle in ((rewards - low, -low), (high - rewards, high))
        ]
        return Arrays(np.stack(paid))

    def total(self, merged: Arrays) -> FloatArray:
        """Return the sums of all trajectories."""
        return merged.joined()

    def _check(self, rewards: FloatArray, offsets: IntArray, first: int) -> None:
        """Raise if a reward lies outside the range, or an episode is longer than the horizon."""
        low, high = self.reward_range
        outside = np.flatnonzero((rewards < low) | (rewards > high))
        if outside.size:
            episode, step = place(int(outside[0]), offsets)
            raise ValueError(
                f"reward_range is {self.reward_range}, but the reward is {rewards[outside[0]]} at "
                f"episode {first + episode}, step {step}: widen it"
            )
        lengths = np.diff(offsets)
        if lengths.max() > self.horizon:
            raise ValueError(
                f"horizon is {self.horizon}, but episode {first + int(lengths.argmax())} has "
                f"{lengths.max()} steps: give the longest possible"
            )
