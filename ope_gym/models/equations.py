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

takes about a (2 p + 1)th of the products. Many targets are summed the other way round: products
f_i f_j and f_i f_next,j are the same for all of them, and are the columns; weights are the rows.
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
from ope_gym.models.features import LinearValues, Phi, near_weights
from ope_gym.models.folds import bounds_of_others, reward_bounds
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

_NUMBERS = 1 << 22  # elements of an array for which continuous actions are drawn at once
_SORTED = 1 << 21  # elements of features that are put in order at once
_TOGETHER = 1 << 24  # elements of the weights of all targets at once
_SOLVED = 1 << 20  # elements of systems that are put together at once: large ones one by one
_CACHED = 1 << 18  # of those that are read again at once and should stay in the cache
_MANY = 6  # targets from which it pays to make products of features
_NARROW = 40  # most features of which all products are made
_CALL = 1 << 15  # multiplications that take as long as the call of a matrix product


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
            answers: Answers of each target about the chunk.
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
        block = _SORTED // phi.columns if phi.actions else _NUMBERS // phi.weights
        block = max(256, min(block, _TOGETHER // (len(answers) * (1 + actions))))
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
        phi, targets, on = self.phi, len(weights), ~block.last
        following = np.minimum(block.rows + 1, answers[0].data.n_steps - 1)
        w, probs = np.empty((targets, on.size)), np.empty((targets, actions, on.size))
        for own, ahead, (i, steps) in zip(w, probs, weights.items(), strict=True):
            np.take(steps, block.rows, out=own)
            chances: Any = answers[i].columns(following) if phi.actions else 1.0
            np.multiply(chances, own * on, out=ahead)
        drawn = [self._drawn(block, answers[i], rngs[i]) for i in weights if not phi.actions]
        by_pairs = targets >= _MANY and not drawn and phi.columns <= _NARROW
        add = self._of_pairs if by_pairs else self._of_columns
        cuts = np.searchsorted(block.group, np.arange(folds * actions + 1))
        piece = max(64, _CACHED // (phi.columns**2 * 2 if by_pairs else high + targets * wide))
        for g in np.flatnonzero(np.diff(cuts)):
            begins, end = range(cuts[g], cuts[g + 1], piece), int(cuts[g + 1])
            pieces = [slice(begin, min(begin + piece, end)) for begin in begins]
            sums = add(block, pieces, w, probs, drawn)
            for i, own in zip(weights, sums, strict=True):
                self.sums[i, g // actions, g % actions] += own.reshape(high, wide)

    def _of_columns(
        self,
        block: _Block,
        pieces: Sequence[slice],
        w: FloatArray,
        probs: FloatArray,
        drawn: Sequence[FloatArray],
    ) -> FloatArray:
        """Return the sums (P, 2 p + 1, c, columns) of some steps, with the columns of each target.

        Args:
            block: n steps.
            pieces: where the steps are in it, a few at a time.
            w: (P, n) weights.
            probs: (P, A, n) w pi(b|s_next), 0 after an end.
            drawn: as `_Block.features` takes them.
        """
        targets, actions = probs.shape[:2]
        c, count = self.phi.columns, 2 * self.phi.powers + 1
        sums = np.zeros((count, c, targets * ((1 + actions) * c + 1)))
        for here in pieces:
            now, after = block.features(here, drawn)
            right = np.empty((targets, (1 + actions) * c + 1, now.shape[1]))
            np.multiply(now, w[:, None, here], out=right[:, :c])
            ahead = right[:, c:-1].reshape(targets, actions, c, -1)
            np.multiply(after, probs[:, :, None, here], out=ahead)
            np.multiply(block.rewards[here], w[:, here], out=right[:, -1])
            sums += _moments(now, right.reshape(-1, now.shape[1]), block.left[here], count)
        return sums.reshape(count, c, targets, -1).transpose(2, 0, 1, 3)

    def _of_pairs(
        self,
        block: _Block,
        pieces: Sequence[slice],
        w: FloatArray,
        probs: FloatArray,
        drawn: Sequence[FloatArray],
    ) -> FloatArray:
        """Return what `_of_columns` does, from products f_i f_j that are the same for all targets.

        With 30 targets on CartPole a ranking takes 15 % less time.
        """
        (targets, actions, n), c = probs.shape, self.phi.columns
        count, (first, second) = 2 * self.phi.powers + 1, np.triu_indices(c)
        own = np.zeros((count, targets, first.size + c))
        ahead = np.zeros((count, targets * actions, c * c))
        for here in pieces:
            left, (now, after) = block.left[here], block.features(here, drawn)
            pairs = np.concatenate([now[first] * now[second], now * block.rewards[here]])
            own += _moments(w[:, here], pairs, left, count)
            crossed = (now[:, None] * after).reshape(c * c, -1)
            ahead += _moments(probs.reshape(-1, n)[:, here], crossed, left, count)
        place = np.empty((c, c), dtype=np.int64)  # of f_i f_j among the products
        place[first, second] = place[second, first] = np.arange(first.size)
        sums = np.empty((targets, count, c, (1 + actions) * c + 1))
        sums[..., :c] = own.swapaxes(0, 1)[:, :, place]
        crossed = ahead.reshape(count, targets, actions, c, c).transpose(1, 0, 3, 2, 4)
        sums[..., c:-1].reshape(targets, count, c, actions, c)[...] = crossed
        sums[..., -1] = own[:, :, first.size :].swapaxes(0, 1)
        return sums

    def _drawn(self, block: _Block, answers: Answers, rng: np.random.Generator) -> FloatArray:
        """Return the mean features (c, n) of the next steps over actions that a target draws."""
        ends = np.empty_like(block.last)
        ends[block.order] = block.last
        return self.phi.expected_next(answers, block.span, ends, rng)

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
        folds, thetas = range(self.bounds.shape[1]), list[FloatArray]()
        at_once = max(1, _SOLVED // self.phi.weights**2)
        for begin in range(0, len(without), at_once):
            some = without[begin : begin + at_once]
            kept = np.array([[float(k != fold) for k in folds] for fold in some])
            systems, right, scales = self._systems(np.tensordot(kept, self.sums[target], 1))
            thetas += [*(_solved(systems, right) * scales)]
        # A' alpha = sum of E_pi phi over the first steps, for the visits
        scale = scales[-1]
        dual = _solved(systems[-1:].swapaxes(1, 2), (self.starts[target] * scale)[None])[0] * scale
        shape = max(self.phi.actions, 1), -1
        nearness = self.model.nearness if self.near[target] else 0.0
        return [
            LinearValues(self.phi, theta.reshape(shape), dual.reshape(shape), nearness)
            for theta in thetas
        ]

    def _systems(self, sums: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return matrices (m, A d, A d) with penalty, right sides (m, A d) and scales (m, A d).

        The features are first divided by the roots of their squares, so that one penalty serves
        features of any scale. `pull` is on the differences from the mean over the actions.

        Args:
            sums: (m, A, (2 p + 1) c, (1 + A) c + 1).
        """
        c, powers, width = self.phi.columns, self.phi.powers + 1, self.phi.width
        m, actions = sums.shape[:2]
        sums = sums.reshape(m, actions, 2 * powers - 1, c, -1)
        together = np.add.outer(np.arange(powers), np.arange(powers))  # k + l
        # of the next step, from powers of u to those of u_next: axes a, k, l, (i, b, j)
        ahead = self._powers_ahead @ sums[:, :, together, :, c:-1].reshape(
            m, actions, powers, powers, -1
        )
        ahead = ahead.reshape(m, actions, powers, powers, c, actions, c)
        blocks = -self.gamma * ahead.transpose(0, 1, 2, 4, 5, 3, 6)  # a, k, i, b, l, j
        for a in range(actions):
            blocks[:, a, :, :, a] += sums[:, a, together, :, :c].swapaxes(2, 3)
        squares = np.einsum("makii->mki", sums[:, :, ::2, :, :c]).reshape(m, -1) / actions
        scale = np.tile(1.0 / np.sqrt(np.where(squares > 0, squares, 1.0)), actions)
        systems = blocks.reshape(m, actions * width, actions * width)
        systems *= scale[:, :, None]
        systems *= scale[:, None]
        penalty = (self.model.ridge + self.model.pull) * np.eye(actions) - self.model.pull / actions
        place = np.arange(width)
        systems.reshape(m, actions, width, actions, width)[:, :, place, :, place] += penalty
        return systems, sums[:, :, :powers, :, -1].reshape(m, -1) * scale, scale

    @cached_property
    def _powers_ahead(self) -> FloatArray:
        """(p + 1, p + 1) coefficients of (u - 1 / horizon)^l on u^e, 0 for e > l."""
        powers, less = range(self.phi.powers + 1), -1.0 / self.phi.horizon
        return np.array(
            [[comb(k, e) * less ** (k - e) if e <= k else 0.0 for e in powers] for k in powers]
        )


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

    def features(self, here: slice, drawn: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Return the features (c, m) of some steps in order, and of their next.

        Args:
            here: the steps.
            drawn: for each of P targets means (c, n) over its continuous actions, then the latter
                features are (P, 1, c, m); else they are (c, m), the same for all.
        """
        some = self.order[here]
        now = np.take(self.now, some, axis=1)
        if drawn:
            return now, np.stack([mean.take(some, axis=1)[None] for mean in drawn])
        return now, np.take(self.now, some + 1, axis=1, mode="clip")


def _by_group_and(numbers: IntArray, group: IntArray) -> IntArray:
    """Return the order (n,) of steps by group, and inside a group by a number, such as its time."""
    key = group * (int(np.max(numbers)) + 1) + numbers
    small = key.astype(np.uint16 if key.max() < 1 << 16 else np.int64)  # the former sort faster
    return np.argsort(small, kind="stable")


def _moments(rows: FloatArray, columns: FloatArray, left: FloatArray, powers: int) -> FloatArray:
    """Return sum u^k rows columns', (powers, r, c), over m steps with shares u of time left.

    Where many steps share a time, their products are summed first and multiplied with the powers
    of that time afterwards: far fewer products than of every step with every power.

    Args:
        rows: (r, m).
        columns: (c, m).
        left: (m,) u, equal ones side by side.
        powers: how many k = 0, 1, …
    """
    exponents, shape = np.arange(powers)[:, None], (powers, len(rows), len(columns))
    cuts = [0, *((left[1:] != left[:-1]).nonzero()[0] + 1).tolist(), left.size]
    size, times = len(rows) * len(columns), len(cuts) - 1
    if times * (_CALL + powers * size) > (powers - 1) * left.size * size:
        raised = (left**exponents)[:, None] * rows
        return np.asarray(raised.reshape(-1, left.size) @ columns.T).reshape(shape)
    of_time = np.empty((len(cuts) - 1, *shape[1:]))
    for own, begin, end in zip(of_time, cuts[:-1], cuts[1:], strict=True):
        np.matmul(rows[:, begin:end], columns[:, begin:end].T, out=own)
    sums = left[cuts[:-1]] ** exponents @ of_time.reshape(len(of_time), -1)
    return np.asarray(sums.reshape(shape))


def _solved(systems: FloatArray, right: FloatArray) -> FloatArray:
    """Solve systems (m, d, d), by least squares if some features are always 0 without a penalty."""
    try:
        return np.asarray(np.linalg.solve(systems, right[:, :, None]))[:, :, 0]
    except np.linalg.LinAlgError:
        pairs = zip(systems, right, strict=True)
        return np.stack([np.linalg.lstsq(*pair, rcond=None)[0] for pair in pairs])
