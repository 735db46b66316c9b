"""The normal equations of LinearQ, summed over recorded steps for several targets at once.

A step has c features f of its observation, and phi = f u^k for k = 0, ..., p, with u the share of
the horizon that is left. The equations need, in the block of the chosen action a,

    sum w phi phi'                       w f_i f_j u^(k + l)
    sum w phi pi(b|s_next) phi_next'     w pi(b|s_next) f_i f_next,j u^k u_next^l
    sum w r phi                          w r f_i u^k

Since u_next = u - 1 / horizon, u_next^l is a sum of powers of u (the binomial theorem). So of the
(p + 1)^2 products of time only the 2 p + 1 powers of u are summed, in one matrix product:

    rows f_i u^k with k <= 2 p, times columns w f_j, w pi(b|s_next) f_next,j and w r

The rows are the same for all targets. The sums are put in their places when they are solved. All
steps with the same number t have the same u, so where there are many of them

    sum u^k f_i times columns = sum_t u_t^k sum over the steps numbered t of f_i times columns

takes about a (2 p + 1)th of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import CrossFitted
from ope_gym.models.features import Phi
from ope_gym.models.folds import bounds_of_others, reward_bounds
from ope_gym.models.linear_values import LinearValues, near_weights
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

_NUMBERS = 1 << 22  # elements of an array for which continuous actions are drawn at once
_SORTED = 1 << 21  # elements of features that are put in order at once
_CACHED = 1 << 18  # of those that are read again at once and should stay in the cache
_AT_A_TIME = 12  # steps at the same time for which a matrix product of their own is worth its call


class Penalties(Protocol):
    """The settings of a LinearQ that its equations need."""

    @property
    def ridge(self) -> float:
        """Penalty of all weights."""
        ...

    @property
    def pull(self) -> float:
        """Penalty of differences between actions."""
        ...

    @property
    def nearness(self) -> float:
        """How much more steps count that the target would reach."""
        ...


@dataclass
class NormalEquations:
    """The sums of the normal equations of P targets, by fold, and the range of the rewards.

    Steps are weighted by `near_weights`. If these are 0 at all steps, because a target never
    takes the recorded actions, all steps count equally. A chunk cannot know this of the others: so
    as long as no weight was above 0, chunks are summed with weights 1, and the first weight above 0
    clears these sums, to which the chunks before it should have added 0.

    Args:
        model: the model to fit; its nearness is 0 if some propensity is unknown.
        phi: the features, d of them with the powers of time, c without.
        gamma: discount.
        sums: (P, folds, A, (2 p + 1) c, (1 + A) c + 1) as the head of this module says; A is 1 for
            continuous actions.
        bounds: (2, folds) lowest and highest reward in each fold.
        starts: (P, A d) sum of E_pi phi over the first steps.
        near: (P,) whether some step had a weight above 0.
        chunks: how many there were.
    """

    model: Penalties
    phi: Phi
    gamma: float
    sums: FloatArray
    bounds: FloatArray
    starts: FloatArray
    near: NDArray[np.bool_]
    chunks: int = 0

    @classmethod
    def empty(
        cls, model: Penalties, phi: Phi, gamma: float, folds: int, targets: int
    ) -> NormalEquations:
        """Return equations to which no step was added."""
        return cls(
            model,
            phi,
            gamma,
            sums=np.zeros((targets, *_shape(phi, folds))),
            bounds=np.array([[np.inf] * folds, [-np.inf] * folds]),
            starts=np.zeros((targets, phi.weights)),
            near=np.zeros(targets, dtype=np.bool_),
        )

    @staticmethod
    def size(phi: Phi, folds: int) -> int:
        """Return how many numbers the sums of a target have."""
        return int(np.prod(_shape(phi, folds)))

    # Sum -------------------------------------------------------------------------------------

    def update(
        self,
        data: Trajectories,
        fold: IntArray,
        answers: Sequence[Answers],
        rngs: Sequence[np.random.Generator] = (),
    ) -> None:
        """Add a chunk of whole episodes.

        Args:
            data: the chunk.
            fold: (n,) of its episodes.
            answers: of each target about the chunk.
            rngs: source of each target's actions, if they are continuous.
        """
        if not len(data):
            return
        phi, longest = self.phi, int(data.lengths.max())
        if longest > phi.horizon:
            raise ValueError(
                f"horizon is {phi.horizon}, but episode {int(data.lengths.argmax())} has {longest} "
                "steps: give the longest possible"
            )
        self.chunks += 1
        self._check_chunks(answers[0])
        self._widen(reward_bounds(data, fold, self.bounds.shape[1]))
        self._add_starts(data, answers, rngs)
        weights = {}
        for i, asked in enumerate(answers):
            own = near_weights(asked, self.model.nearness)
            if self._keeps(i, bool(own.any())):
                weights[i] = own if self.near[i] else np.ones(own.size)
        actions = max(phi.actions, 1)
        chosen = choices(data.actions, data.n_steps, actions) if phi.actions else 0
        group = fold[data.episode_ids] * actions + chosen
        block = max(256, _SORTED // phi.columns if phi.actions else _NUMBERS // phi.weights)
        for begin in range(0, data.n_steps if weights else 0, block):
            rows = slice(begin, min(begin + block, data.n_steps))
            self._add(_Block.of(phi, data, rows, group[rows]), weights, answers, rngs)

    def merge(self, other: NormalEquations) -> None:
        """Add the chunks that another one has summed."""
        self.chunks += other.chunks
        self._widen(other.bounds)
        self.starts += other.starts
        for i, near in enumerate(other.near):
            if self._keeps(i, bool(near)):
                self.sums[i] += other.sums[i]

    def _check_chunks(self, answers: Answers) -> None:
        if self.chunks > 1 and not self.phi.actions:
            raise ValueError(
                f"target is {answers.target!r}, which has no probs(observations), and the "
                "episodes come in several chunks: LinearQ draws continuous actions, and the draws "
                "would depend on the chunks; load all episodes, or leave q_model=None"
            )

    def _widen(self, bounds: FloatArray) -> None:
        self.bounds[0] = np.minimum(self.bounds[0], bounds[0])
        self.bounds[1] = np.maximum(self.bounds[1], bounds[1])

    def _keeps(self, target: int, near: bool) -> bool:
        """Return whether a part is to be added, given whether some of its weights are above 0."""
        if near and not self.near[target]:
            self.sums[target] = 0.0
            self.near[target] = True
        return near or not self.near[target]

    def _add_starts(
        self,
        data: Trajectories,
        answers: Sequence[Answers],
        rngs: Sequence[np.random.Generator],
    ) -> None:
        begins, phi = data.offsets[:-1], self.phi
        if not phi.actions:
            for starts, asked, rng in zip(self.starts, answers, rngs, strict=True):
                starts += phi.expected(asked, begins, rng)
            return
        # phi(s, a) is phi(s) in the block of action a, so its mean is pi(a|s) phi(s) there
        first = phi(batches.take(data.observations, begins), data.steps[begins])
        for starts, asked in zip(self.starts, answers, strict=True):
            starts += (asked.columns(begins) @ first).ravel()

    def _add(
        self,
        block: _Block,
        weights: dict[int, FloatArray],
        answers: Sequence[Answers],
        rngs: Sequence[np.random.Generator],
    ) -> None:
        """Add a block of steps to the sums of the targets that have weights, piece by piece."""
        _, folds, actions, high, wide = self.sums.shape
        phi, rows, on = self.phi, block.rows, ~block.last
        following = np.minimum(rows + 1, answers[0].data.n_steps - 1)
        w, probs, means = {}, {}, {}
        for i, own in weights.items():
            w[i] = own.take(rows)
            ahead: Any = answers[i].columns(following) if phi.actions else np.ones((1, rows.size))
            probs[i] = ahead * (w[i] * on)
            if not phi.actions:
                ends = np.empty_like(block.last)
                ends[block.order] = block.last
                means[i] = phi.expected_next(answers[i], block.span, ends, rngs[i])
        cuts = np.searchsorted(block.group, np.arange(folds * actions + 1))
        piece = max(64, _CACHED // (high + wide))
        for g in np.flatnonzero(np.diff(cuts)):
            for begin in range(cuts[g], cuts[g + 1], piece):
                here = slice(begin, min(begin + piece, int(cuts[g + 1])))
                now, after = block.features(here)
                columns, products = len(now), _Products.of(phi, now, block.left[here])
                right = np.empty((wide, now.shape[1]))
                ahead_of = right[columns:-1].reshape(actions, columns, -1)
                for i, own in w.items():
                    if means:
                        after = means[i].take(block.order[here], axis=1)
                    np.multiply(now, own[here], out=right[:columns])
                    np.multiply(after, probs[i][:, None, here], out=ahead_of)
                    np.multiply(block.rewards[here], own[here], out=right[-1])
                    self.sums[i, g // actions, g % actions] += products(right)

    # Solve -----------------------------------------------------------------------------------

    def cross_fitted(self) -> list[CrossFitted]:
        """Return what was learned for each target: q of all other folds, and last of all."""
        folds, bounds = self.bounds.shape[1], bounds_of_others(self.bounds)
        return [
            CrossFitted(
                self.values(i, [*range(folds), None]),
                self.gamma,
                self.phi.horizon,
                bounds,
                visits=True,
                shared=True,
            )
            for i in range(len(self.sums))
        ]

    def values(self, target: int, without: Sequence[int | None]) -> list[LinearValues]:
        """Fit one q per entry of `without`, leaving that fold out; the last is None, for none."""
        thetas = []
        for fold in without:
            kept = np.arange(self.bounds.shape[1]) != fold
            system, right, scale = self._system(np.tensordot(kept, self.sums[target], 1))
            thetas.append(_solved(system, right) * scale)
        # A' alpha = sum of E_pi phi over the first steps, for the visits
        dual = _solved(system.T, self.starts[target] * scale) * scale
        shape = max(self.phi.actions, 1), -1
        nearness = self.model.nearness if self.near[target] else 0.0
        return [
            LinearValues(self.phi, theta.reshape(shape), dual.reshape(shape), nearness)
            for theta in thetas
        ]

    def _system(self, sums: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return matrix (A d, A d) with penalty, right side (A d,) and scale (A d,).

        The features are first divided by the roots of their squares, so that one penalty serves
        features of any scale. `pull` is on the differences from the mean over the actions.

        Args:
            sums: (A, (2 p + 1) c, (1 + A) c + 1).
        """
        c, powers, width = self.phi.columns, self.phi.powers + 1, self.phi.width
        actions = len(sums)
        sums = sums.reshape(actions, 2 * powers - 1, c, -1)
        blocks, every = np.empty((actions, powers, c, actions, powers, c)), np.arange(actions)
        for k in range(powers):
            for power in range(powers):
                # of the next step, from powers of u to those of u_next
                ahead = sum(
                    share * sums[:, k + e, :, c:-1]
                    for e, share in enumerate(self._powers_ahead[power])
                )
                blocks[:, k, :, :, power] = -self.gamma * np.reshape(
                    ahead, (actions, c, actions, c)
                )
                blocks[every, k, :, every, power] += sums[:, k + power, :, :c]
        squares = np.einsum("akii->ki", sums[:, ::2, :, :c]).ravel() / actions
        scale = np.tile(1.0 / np.sqrt(np.where(squares > 0, squares, 1.0)), actions)
        system = blocks.reshape(actions * width, actions * width)
        system *= scale[:, None]
        system *= scale
        penalty = (self.model.ridge + self.model.pull) * np.eye(actions) - self.model.pull / actions
        place = np.arange(width)
        system.reshape(actions, width, actions, width)[:, place, :, place] += penalty
        return system, sums[:, :powers, :, -1].ravel() * scale, scale

    @cached_property
    def _powers_ahead(self) -> list[list[float]]:
        """For each power l: the coefficients of (u - 1 / horizon)^l on u^e, e = 0 … l."""
        less = -1.0 / self.phi.horizon
        return [
            [comb(power, e) * less ** (power - e) for e in range(power + 1)]
            for power in range(self.phi.powers + 1)
        ]


def _shape(phi: Phi, folds: int) -> tuple[int, int, int, int]:
    actions, columns = max(phi.actions, 1), phi.columns
    return folds, actions, (2 * phi.powers + 1) * columns, (1 + actions) * columns + 1


@dataclass(frozen=True)
class _Block:
    """A block of n steps, in the order of their group and time.

    Args:
        span: the steps.
        order: (n,) their order; what follows is in this order.
        rows: (n,) the steps.
        group: (n,) fold times actions plus action.
        left: (n,) share of the horizon that is left.
        rewards: (n,).
        last: (n,) whether the episode ends with the step.
        now: features (c, n) of the steps as recorded; of finitely many actions also those of the
            step after the last.
    """

    span: slice
    order: IntArray
    rows: IntArray
    group: IntArray
    left: FloatArray
    rewards: FloatArray
    last: NDArray[np.bool_]
    now: FloatArray

    @classmethod
    def of(cls, phi: Phi, data: Trajectories, span: slice, group: IntArray) -> _Block:
        """Put some steps in order and make their features."""
        when = data.steps[span] if phi.powers else np.zeros(group.size, dtype=np.int64)
        order = _by_group_and(when, group)
        rows = span.start + order
        last = np.zeros(data.n_steps, dtype=np.bool_)
        last[data.offsets[1:] - 1] = True
        left = phi.left(data.steps[rows]) if phi.powers else np.zeros(rows.size)
        if phi.actions:  # the features of a step are those of the step after the one before
            seen = slice(span.start, min(span.stop + 1, data.n_steps))
            batch, count = batches.take(data.observations, seen), seen.stop - seen.start
        else:
            batch = tuple(batches.take(x, span) for x in (data.observations, data.actions))
            count = rows.size
        now = phi.plain(batch, count)
        return cls(span, order, rows, group[order], left, data.rewards[rows], last[rows], now)

    def features(self, here: slice) -> tuple[FloatArray, FloatArray]:
        """Return the features (c, m) of some steps in order, and of their next."""
        some = self.order[here]
        after = np.take(self.now, some + 1, axis=1, mode="clip")
        return np.take(self.now, some, axis=1), after


def _by_group_and(numbers: IntArray, group: IntArray) -> IntArray:
    """Return the order (n,) of steps by group, and inside a group by a number, such as its time."""
    key = group * (int(np.max(numbers)) + 1) + numbers
    small = key.astype(np.uint16 if key.max() < 1 << 16 else np.int64)  # the former sort faster
    return np.argsort(small, kind="stable")


@dataclass(frozen=True)
class _Products:
    """Sum the products of features times powers of time, and columns, over m steps of a group.

    Where many steps share a time, their products are summed first and multiplied with the powers
    of that time afterwards: far fewer products than of every step with every power.

    Args:
        rows: (c, m) features, or ((2 p + 1) c, m) times the powers of each step.
        cuts: where steps of another time begin, with 0 and m; None if the powers are in the rows.
        powers: (2 p + 1, times) those of each time.
    """

    rows: FloatArray
    cuts: list[int] | None = None
    powers: FloatArray | None = None

    @classmethod
    def of(cls, phi: Phi, features: FloatArray, left: FloatArray) -> _Products:
        """Prepare the features (c, m) of steps sorted by the share of the horizon that is left."""
        changes, count = (left[1:] != left[:-1]).nonzero()[0] + 1, 2 * phi.powers + 1
        if changes.size * _AT_A_TIME > left.size:
            return cls(phi.raised(features, left, count))
        cuts = [0, *changes.tolist(), left.size]
        powers = np.ones((count, len(cuts) - 1))
        powers[1:] = left[cuts[:-1]]
        return cls(features, cuts, np.multiply.accumulate(powers, axis=0))

    def __call__(self, right: FloatArray) -> FloatArray:
        """Return the sums ((2 p + 1) c, columns) with columns (columns, m)."""
        columns = right.T
        if self.cuts is None or self.powers is None:
            return np.asarray(self.rows @ columns)
        of_time = np.empty((len(self.cuts) - 1, len(self.rows), len(right)))
        for own, begin, end in zip(of_time, self.cuts[:-1], self.cuts[1:], strict=True):
            np.matmul(self.rows[:, begin:end], columns[begin:end], out=own)
        sums = self.powers @ of_time.reshape(len(of_time), -1)
        return np.asarray(sums.reshape(-1, len(right)))


def _solved(system: FloatArray, right: FloatArray) -> FloatArray:
    """Solve a system, by least squares if some features are always 0 without a penalty."""
    try:
        return np.asarray(np.linalg.solve(system, right))
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0])
