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

takes about a (2 p + 1)th of the products. Many targets are summed the other way round. Products
f_i f_j and f_i f_next,j are the same for all of them, so for each t there is a product of
(targets, steps) with (steps, products), and one with the powers of u.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import CrossFitted, bounds_of_others, reward_bounds
from ope_gym.models.features import Phi
from ope_gym.models.linear_values import FiniteLinearValues, LinearValues, NearWeights, near_weights
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

_NUMBERS = 1 << 22  # elements of an array for which continuous actions are drawn at once
_SORTED = 1 << 21  # elements of features that are put in order at once
_CACHED = 1 << 18  # of those that are read again at once and should stay in the cache
_AT_A_TIME = 12  # steps at the same time for which a matrix product of their own is worth its call
_MANY = 6  # targets from which it pays to make products of features
_NARROW = 40  # most features of which all products are made
_ALIKE = 3.0  # least mean number of steps with one number, fold and action, for the same
_RUN = 128  # most of them that are multiplied at once
_RUNS = 16  # such products that are held at once
_SHORT = 2  # steps of a run up to which it is not worth a product of its own
_PRODUCTS = 1 << 17  # their elements that should stay in the cache


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
    """The sums of the normal equations of one target, by fold, and the range of the rewards.

    Steps are weighted by `near_weights`. If these are 0 at all steps, because the target never
    takes the recorded actions, all steps count equally. A chunk cannot know this of the others: so
    as long as no weight was above 0, chunks are summed with weights 1, and the first weight above 0
    clears these sums, to which the chunks before it should have added 0.

    Args:
        model: the model to fit; its nearness is 0 if some propensity is unknown.
        phi: the features, d of them with the powers of time, c without.
        gamma: discount.
        sums: (folds, A, (2 p + 1) c, (1 + A) c + 1) as the head of this module says; A is 1 for
            continuous actions.
        bounds: (2, folds) lowest and highest reward in each fold.
        starts: (A d,) sum of E_pi phi over the first steps.
        near: whether some step had a weight above 0.
        chunks: how many there were.
    """

    model: Penalties
    phi: Phi
    gamma: float
    sums: FloatArray
    bounds: FloatArray
    starts: FloatArray
    near: bool = False
    chunks: int = 0

    @classmethod
    def empty(cls, model: Penalties, phi: Phi, gamma: float, folds: int) -> NormalEquations:
        """Return equations to which no step was added."""
        return cls(
            model,
            phi,
            gamma,
            sums=np.zeros(_shape(phi, folds)),
            bounds=np.array([[np.inf] * folds, [-np.inf] * folds]),
            starts=np.zeros(phi.weights),
        )

    @staticmethod
    def size(phi: Phi, folds: int) -> int:
        """Return how many numbers the sums have."""
        return int(np.prod(_shape(phi, folds)))

    @property
    def folds(self) -> int:
        """Number of folds."""
        return len(self.sums)

    def update(
        self,
        data: Trajectories,
        fold: IntArray,
        rng: np.random.Generator | None = None,
        answers: Answers | None = None,
    ) -> None:
        """Add a chunk of whole episodes; see `update_all`."""
        asked = Answers(self.phi.target, data) if answers is None else answers
        update_all([self], data, fold, [asked], rng)

    def merge(self, other: NormalEquations) -> None:
        """Add the chunks that another one has summed."""
        self._count(other.chunks)
        self._widen(other.bounds)
        self.starts += other.starts
        if self._keeps(other.near):
            self.sums += other.sums

    def whole(self) -> LinearValues | FiniteLinearValues:
        """Return the q of all folds."""
        return self._values([None])[0]

    def fold_values(self) -> list[LinearValues | FiniteLinearValues]:
        """Return for each fold the q of all others, and last that of all."""
        return self._values([*range(self.folds), None])

    def _values(self, without: Sequence[int | None]) -> list[LinearValues | FiniteLinearValues]:
        """Return the q of all folds but one, for each of some; None, the last, leaves none out."""
        kind = FiniteLinearValues if self.phi.actions else LinearValues
        systems, answers, scales = self._systems(without)
        thetas = _solved(systems, answers) * scales
        # A' alpha = sum of E_pi phi over the first steps, for the visits
        whole, scale = systems[-1], scales[-1]
        dual = _solved(whole.T[None], (self.starts * scale)[None])[0] * scale
        shape = max(self.phi.actions, 1), -1
        return [
            kind(self.phi, theta.reshape(shape), dual.reshape(shape), self._near_weights)
            for theta in thetas
        ]

    def cross_fitted(self) -> CrossFitted:
        """Return for each fold the values learned from the others, and those learned from all."""
        values = self.fold_values()
        bounds = bounds_of_others(self.bounds)
        return CrossFitted(values, self.phi.target, self.gamma, self.phi.horizon, bounds, True)

    def weigh(self, bounds: FloatArray, answers: Answers) -> FloatArray | None:
        """Begin with a chunk: return the weights (S,) of its steps, or None if it adds nothing.

        Args:
            bounds: (2, folds) lowest and highest reward of the chunk.
            answers: of the target about the chunk.
        """
        self._count(1)
        self._widen(bounds)
        weights = near_weights(answers.data, self.model.nearness, answers)
        if not self._keeps(bool(weights.any())):
            return None
        return weights if self.near else np.ones(weights.size)

    def _count(self, chunks: int) -> None:
        self.chunks += chunks
        if self.chunks > 1 and not self.phi.actions:
            raise ValueError(
                f"target is {self.phi.target!r}, which has no probs(observations), and the "
                "episodes come in several chunks: LinearQ draws continuous actions, and the draws "
                "would depend on the chunks; load all episodes, or leave q_model=None"
            )

    def _widen(self, bounds: FloatArray) -> None:
        self.bounds[0] = np.minimum(self.bounds[0], bounds[0])
        self.bounds[1] = np.maximum(self.bounds[1], bounds[1])

    def _keeps(self, near: bool) -> bool:
        """Return whether a part is to be added, given whether some of its weights are above 0."""
        if near and not self.near:
            self.sums[...] = 0.0
            self.near = True
        return near or not self.near

    @cached_property
    def _near_weights(self) -> NearWeights:
        """The weights of the steps, shared by all folds so that the target is asked once."""
        return NearWeights(self.phi.target, self.model.nearness if self.near else 0.0)

    def _systems(self, without: Sequence[int | None]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return matrices (m, A d, A d) with penalty, right sides (m, A d) and scales (m, A d).

        The features are first divided by the roots of their squares, so that one penalty serves
        features of any scale. `pull` is on the differences from the mean over the actions.

        Args:
            without: m folds to leave out, None for none.
        """
        columns, powers = self.phi.columns, self.phi.powers + 1
        actions, width, m = max(self.phi.actions, 1), self.phi.width, len(without)
        kept = [[float(k != j) for j in range(self.folds)] for k in without]
        sums = np.array(kept) @ self.sums.reshape(self.folds, -1)
        sums = sums.reshape(m, actions, 2 * powers - 1, columns, -1)
        together = np.add.outer(np.arange(powers), np.arange(powers))  # k + l
        # of the next step: axes a, k, l, i, (b, j), and from powers of u to those of u_next
        ahead = self._powers_ahead @ sums[:, :, together, :, columns:-1].reshape(
            m, actions, powers, powers, -1
        )
        ahead = ahead.reshape(m, actions, powers, powers, columns, actions, columns)
        system = -self.gamma * ahead.transpose(0, 1, 2, 4, 5, 3, 6)  # a, k, i, b, l, j
        for action in range(actions):
            now = sums[:, action, together, :, :columns]  # k, l, i, j
            system[:, action, :, :, action] += now.transpose(0, 1, 3, 2, 4)
        system = system.reshape(m, actions * width, actions * width)
        squares = np.einsum("makii->mki", sums[:, :, ::2, :, :columns]).reshape(m, -1) / actions
        scale = np.tile(1.0 / np.sqrt(np.where(squares > 0, squares, 1.0)), actions)
        system *= scale[:, :, None]
        system *= scale[:, None]
        apart = np.eye(actions) - 1.0 / actions
        penalty = self.model.ridge * np.eye(actions) + self.model.pull * apart
        place = np.arange(width)
        blocks = system.reshape(m, actions, width, actions, width)
        blocks[:, :, place, :, place] += penalty  # (width, m, A, A)
        return system, sums[:, :, :powers, :, -1].reshape(m, -1) * scale, scale

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


def update_all(
    equations: Sequence[NormalEquations],
    data: Trajectories,
    fold: IntArray,
    answers: Sequence[Answers],
    rng: np.random.Generator | None = None,
) -> None:
    """Add a chunk of whole episodes to the equations of several targets with the same features.

    Args:
        equations: of each target.
        data: the chunk.
        fold: (n,) of its episodes.
        answers: of each target about the chunk.
        rng: source of the targets' actions, if they are continuous.
    """
    if not len(data):
        return
    phi, longest = equations[0].phi, int(data.lengths.max())
    if longest > phi.horizon:
        raise ValueError(
            f"horizon is {phi.horizon}, but episode {int(data.lengths.argmax())} has {longest} "
            "steps: give the longest possible"
        )
    rng = np.random.default_rng(0) if rng is None else rng
    bounds, begins = reward_bounds(data, fold, equations[0].folds), data.offsets[:-1]
    taken = []
    first = (
        phi(batches.take(data.observations, begins), data.steps[begins]) if phi.actions else None
    )
    for own, asked in zip(equations, answers, strict=True):
        if first is None:
            own.starts += own.phi.expected(data, begins, rng)
        else:  # phi(s, a) is phi(s) in the block of action a, so its mean is pi(a|s) phi(s) there
            own.starts += (asked.columns(begins) @ first).ravel()
        weights = own.weigh(bounds, asked)
        if weights is not None:
            taken.append((own, asked, weights))
    if not taken:
        return
    actions = max(phi.actions, 1)
    chosen = choices(data.actions, data.n_steps, actions) if phi.actions else 0
    group = fold[data.episode_ids] * actions + chosen
    last = np.zeros(data.n_steps, dtype=np.bool_)
    last[data.offsets[1:] - 1] = True
    block = max(256, _SORTED // phi.columns if phi.actions else _NUMBERS // phi.weights)
    for begin in range(0, data.n_steps, block):
        rows = slice(begin, min(begin + block, data.n_steps))
        when = data.steps[rows] if phi.powers else np.zeros(group[rows].size, dtype=np.int64)
        order, sizes = _by_group_and(when, group[rows]), None
        if phi.actions and len(taken) >= _MANY and phi.columns <= _NARROW:
            order, sizes = _by_size_of_run(order, when, group[rows])
        now, ahead = _features([own for own, *_ in taken], data, rows, last[rows], rng)
        some = begin + order
        following, on = np.minimum(some + 1, data.n_steps - 1), ~last[some]
        w, probs = np.empty((len(taken), some.size)), np.empty((len(taken), actions, some.size))
        for i, (_, asked, weights) in enumerate(taken):
            np.take(weights, some, out=w[i])
            np.multiply(asked.columns(following) if phi.actions else 1.0, w[i] * on, out=probs[i])
        left = phi.left(data.steps[some]) if phi.powers else np.zeros(some.size)
        sorted_steps = _Sorted(now, ahead, order, group[some], left, data.rewards[some], sizes)
        if sizes is None:
            sides = [_Side(own, *pair) for (own, *_), *pair in zip(taken, w, probs, strict=True)]
            _add(sorted_steps, sides)
        else:
            _add_many(sorted_steps, [own for own, *_ in taken], w, probs)


def _by_group_and(numbers: IntArray, group: IntArray) -> IntArray:
    """Return the order (n,) of steps by group, and inside a group by a number, such as its time."""
    key = group * (int(np.max(numbers)) + 1) + numbers
    small = key.astype(np.uint16 if key.max() < 1 << 16 else np.int64)  # the former sort faster
    return np.argsort(small, kind="stable")


def _by_size_of_run(
    order: IntArray, when: IntArray, group: IntArray
) -> tuple[IntArray, IntArray | None]:
    """Return an order (n,) of steps by group, by the size of their run, and by time; and the sizes.

    A run are the steps with one group and time, or _RUN of them and the rest. If most runs are too
    small to be multiplied by themselves, the order is left as it is, and there are no sizes.

    Args:
        order: (n,) by group and time.
        when: (n,) time of each step.
        group: (n,) of each step.
    """
    group, when = group[order], when[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1) | np.diff(when, prepend=-1))
    if starts.size * _ALIKE > order.size:
        return order, None
    lengths = np.diff(starts, append=order.size)
    before = (np.arange(order.size) - np.repeat(starts, lengths)) // _RUN * _RUN
    sizes = np.minimum(np.repeat(lengths, lengths) - before, _RUN)
    again = _by_group_and(sizes, group)  # stable, so runs stay together
    return order[again], sizes[again]


@dataclass(frozen=True)
class _Sorted:
    """A block of n steps, and their order by group and time.

    Args:
        now: (c, n) features of the steps, or (c, n + 1) with those of the step after the last.
        ahead: features of the next steps where these are not those of `now`: for each target
            (c, n) their mean over its continuous actions.
        order: (n,) the steps in order; what follows is in this order.
        group: (n,) fold times actions plus action.
        left: (n,) share of the horizon that is left.
        rewards: (n,).
        sizes: (n,) of the run of each step, by which the order goes before time; None if not.
    """

    now: FloatArray
    ahead: list[FloatArray]
    order: IntArray
    group: IntArray
    left: FloatArray
    rewards: FloatArray
    sizes: IntArray | None = None

    def features(self, here: slice) -> tuple[FloatArray, list[FloatArray]]:
        """Return the features (c, m) of some steps in order, and of their next for each target.

        The latter are a single array if they are the same for all targets.
        """
        some = self.order[here]
        now = np.take(self.now, some, axis=1)
        if self.ahead:
            return now, [np.take(x, some, axis=1) for x in self.ahead]
        return now, [np.take(self.now, some + 1, axis=1, mode="clip")]

    @cached_property
    def runs(self) -> tuple[IntArray, IntArray]:
        """Where runs of steps begin in the order, 0 first, and how many steps each has."""
        assert self.sizes is not None
        number = np.arange(self.sizes.size)
        other = np.diff(self.group, prepend=-1) | np.diff(self.sizes, prepend=0)
        alike = np.maximum.accumulate(np.where(other, number, 0))  # where runs of this size begin
        starts = np.flatnonzero((number - alike) % self.sizes == 0)
        return starts, self.sizes[starts]


@dataclass(frozen=True)
class _Side:
    """One target's part in n steps, in their order.

    Args:
        equations: of the target.
        weights: (n,) w.
        probs: (A, n) w pi(b|s) of the next step, 0 after an end.
    """

    equations: NormalEquations
    weights: FloatArray
    probs: FloatArray

    def fill(
        self,
        right: FloatArray,
        here: slice,
        now: FloatArray,
        ahead: FloatArray,
        rewards: FloatArray,
    ) -> None:
        """Write the columns ((1 + A) c + 1, m) of some steps, side by side."""
        columns, weights = len(now), self.weights[here]
        np.multiply(now, weights, out=right[:columns])
        for b, probs in enumerate(self.probs, 1):
            np.multiply(ahead, probs[here], out=right[b * columns : (b + 1) * columns])
        np.multiply(rewards, weights, out=right[-1])


def _features(
    equations: Sequence[NormalEquations],
    data: Trajectories,
    rows: slice,
    last: NDArray[np.bool_],
    rng: np.random.Generator,
) -> tuple[FloatArray, list[FloatArray]]:
    """Return the features of some steps and of those after them, as `_Sorted` has them."""
    phi, size = equations[0].phi, rows.stop - rows.start
    if not phi.actions:
        batch = tuple(batches.take(x, rows) for x in (data.observations, data.actions))
        ahead = [own.phi.expected_next(data, rows, last, rng) for own in equations]
        return phi.plain(batch, size), ahead
    # The features of a step are those of the step after the one before: they are made once.
    seen = slice(rows.start, min(rows.stop + 1, data.n_steps))
    return phi.plain(batches.take(data.observations, seen), seen.stop - seen.start), []


def _add(block: _Sorted, sides: Sequence[_Side]) -> None:
    """Add a block of steps to the sums of several targets, piece by piece."""
    first = sides[0].equations
    folds, actions, high, wide = first.sums.shape
    bounds = np.searchsorted(block.group, np.arange(folds * actions + 1))
    piece = max(64, _CACHED // (high + wide))
    for g in np.flatnonzero(np.diff(bounds)):
        for begin in range(bounds[g], bounds[g + 1], piece):
            here = slice(begin, min(begin + piece, int(bounds[g + 1])))
            now, ahead = block.features(here)
            products = _Products.of(first.phi, now, block.left[here])
            right = np.empty((wide, now.shape[1]))
            for i, side in enumerate(sides):
                own = ahead[i if len(ahead) > 1 else 0]
                side.fill(right, here, now, own, block.rewards[here])
                side.equations.sums[g // actions, g % actions] += products(right)


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
        found = np.empty((len(self.cuts) - 1, len(self.rows), len(right)))
        for own, begin, end in zip(found, self.cuts[:-1], self.cuts[1:], strict=True):
            np.matmul(self.rows[:, begin:end], columns[begin:end], out=own)
        sums = self.powers @ found.reshape(len(found), -1)
        return np.asarray(sums.reshape(-1, len(right)))


def _add_many(
    block: _Sorted, equations: Sequence[NormalEquations], weights: FloatArray, probs: FloatArray
) -> None:
    """Add a block of steps, with runs in order of their size, to the sums of many targets.

    The head of this module says how. Products f_i f_j are made for i <= j, and followed by r f_i.

    Args:
        block: n steps.
        equations: of P targets.
        weights: (P, n) as `_Side` has them.
        probs: (P, A, n) likewise.
    """
    now, (ahead,) = block.features(slice(None))
    columns, (folds, actions, high, _) = len(now), equations[0].sums.shape
    powers, (first, second) = high // columns, np.triu_indices(columns)
    place = np.empty((columns, columns), dtype=np.int64)  # of f_i f_j among the products
    place[first, second] = place[second, first] = np.arange(first.size)
    probs = probs.reshape(len(weights) * actions, -1)
    now, ahead = np.ascontiguousarray(now.T), np.ascontiguousarray(ahead.T)
    starts, sizes = block.runs
    raised = block.left[starts] ** np.arange(powers)[:, None]
    of_group = np.searchsorted(block.group[starts], np.arange(folds * actions + 1))
    scratch = np.empty(max(_PRODUCTS, 2 * _RUNS * columns**2))
    for g in np.flatnonzero(np.diff(of_group)):
        own = np.zeros((powers, len(weights), first.size + columns))
        other = np.zeros((powers, len(probs), columns**2))
        for runs in _pieces(sizes, int(of_group[g]), int(of_group[g + 1])):
            here = slice(int(starts[runs.start]), int(starts[runs.stop - 1] + sizes[runs.stop - 1]))
            f = now[here]
            crossed = np.einsum("si,sj->sij", f, ahead[here]).reshape(len(f), -1)
            pairs = np.empty((len(f), first.size + columns))
            np.multiply(f.take(first, 1), f.take(second, 1), out=pairs[:, : first.size])
            np.multiply(f, block.rewards[here, None], out=pairs[:, first.size :])
            if sizes[runs.start] <= _SHORT:
                of_step = np.repeat(raised[:, runs], sizes[runs], axis=1)
                _add_steps(own, of_step, weights[:, here], pairs)
                _add_steps(other, of_step, probs[:, here], crossed)
                continue
            alike = _alike(sizes[runs])
            _add_runs(own, raised[:, runs], alike, weights[:, here], pairs, scratch)
            _add_runs(other, raised[:, runs], alike, probs[:, here], crossed, scratch)
        found = np.empty((len(equations), powers, columns, (1 + actions) * columns + 1))
        found[..., :columns] = own.take(place, axis=2).swapaxes(0, 1)
        following = other.reshape(powers, len(equations), actions, columns, columns)
        for b in range(actions):
            found[..., (b + 1) * columns : (b + 2) * columns] = following[:, :, b].swapaxes(0, 1)
        found[..., -1] = own[:, :, first.size :].swapaxes(0, 1)
        for one, sums in zip(equations, found, strict=True):
            one.sums[g // actions, g % actions] += sums.reshape(high, -1)


def _pieces(sizes: IntArray, begin: int, end: int) -> Iterator[slice]:
    """Cut the runs begin..end-1, in ascending order of size, into pieces: short runs, then others.

    Args:
        sizes: of all runs.
        begin: first run.
        end: one past the last run.
    """
    long = begin + int(np.searchsorted(sizes[begin:end], _SHORT, side="right"))
    for first, last, step in ((begin, long, _RUN), (long, end, _RUNS)):
        for run in range(first, last, step):
            yield slice(run, min(run + step, last))


def _alike(sizes: IntArray) -> list[tuple[int, int, int, int]]:
    """Return for each size of runs: itself, the first such run, how many, and their first step."""
    first = np.flatnonzero(np.diff(sizes, prepend=0))
    count, begins = np.diff(first, append=sizes.size), (np.cumsum(sizes) - sizes)[first]
    return list(zip(*(x.tolist() for x in (sizes[first], first, count, begins)), strict=True))


def _add_steps(sums: FloatArray, raised: FloatArray, left: FloatArray, right: FloatArray) -> None:
    """Add what `_add_runs` does, with the powers (powers, steps) of each step in the rows.

    Runs of one or two steps have no more products than powers: one large matrix product is faster.
    """
    rows = (raised[:, None] * left).reshape(-1, len(right))
    sums += (rows @ right).reshape(sums.shape)


def _add_runs(
    sums: FloatArray,
    raised: FloatArray,
    alike: Sequence[tuple[int, int, int, int]],
    left: FloatArray,
    right: FloatArray,
    scratch: FloatArray,
) -> None:
    """Add to the sums of rows times columns, once for each power, those of several runs of steps.

    Runs of the same size are multiplied in one call, and so few rows at a time that the products
    stay in the cache until they are multiplied with the powers.

    Args:
        sums: (powers, rows, columns).
        raised: (powers, runs).
        alike: the runs by their size, as `_alike` has them.
        left: (rows, steps).
        right: (steps, columns).
        scratch: room for the products.
    """
    runs, columns = raised.shape[1], right.shape[1]
    step = max(1, _PRODUCTS // (runs * columns))
    for row in range(0, len(left), step):
        some = left[row : row + step]
        found = scratch[: runs * len(some) * columns].reshape(runs, len(some), columns)
        for m, i, times, begin in alike:
            here = slice(begin, begin + m * times)
            rows = some[:, here].reshape(len(some), times, m).transpose(1, 0, 2)
            np.matmul(rows, right[here].reshape(times, m, -1), out=found[i : i + times])
        total = raised @ found.reshape(runs, -1)
        sums[:, row : row + step] += total.reshape(len(raised), len(some), -1)


def _solved(systems: FloatArray, right: FloatArray) -> FloatArray:
    """Solve systems (m, d, d), by least squares if some features are always 0 without a penalty."""
    try:
        return np.asarray(np.linalg.solve(systems, right[:, :, None]))[:, :, 0]
    except np.linalg.LinAlgError:
        return np.stack([_solved_one(*pair) for pair in zip(systems, right, strict=True)])


def _solved_one(system: FloatArray, right: FloatArray) -> FloatArray:
    try:
        return np.asarray(np.linalg.solve(system, right))
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0])
