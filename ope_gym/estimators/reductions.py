"""Sums over trajectories that can be made chunk by chunk and merged.

An estimator asks for reductions. A reduction makes a part from each chunk of weighted trajectories;
parts are merged in the order of the chunks, and the total is taken once, at the end: estimates of
chunks are never averaged. So an estimator is written once, and runs over one chunk in memory, over
files, over processes or on a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, annuity, place, step_numbers
from ope_gym.estimators.chunks import LARGEST, Column, Weighted, discounts
from ope_gym.inference.outcomes import tally


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
