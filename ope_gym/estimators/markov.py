"""Check whether the observations are Markov states, and the q model right: do past steps matter?

If q is right and the observation is a Markov state, the residual e_t = r_t - q_t + gamma v_t+1 has
mean 0 whatever happened before step t. So past actions, observations and rewards must not predict
it. (Past residuals are left out: an error of q in a state makes the residual of the step to it too
large and that of the step from it too small.) They are columns x of a regression of e on x, and

    W = b' C^-1 b,   b the coefficients, C their covariance, robust to unequal spread (HC3)

has the distribution of Hotelling's T^2 if they do not predict it, about chi-squared for many steps.
C is known from as many steps as (sum e^2)^2 / sum e^4, fewer where few residuals matter (a sparse
reward), and five of them are needed for each column. No direction has a smaller variance than
residuals of equal spread would give it: where rare rewards and rare residuals never meet, the
spread seen is too small. C is multiplied by 1.25, since a residual also has the noise of a q that
was learned from the other four folds. A hidden state, or a q model of the wrong shape, makes W
large; the episodes of one policy suffice. Steps that no other fold has seen say nothing and are
left out.

What is past are the actions of the last three steps, the observation and the reward of the last,
and the sums of all actions and rewards since the start: what was done long ago shows in these, if
less clearly. Three sets of columns are tried, as far as there are enough steps, each at its share
of the level: the action before, all that is past, and all that times the current action.

Episodes of one step have no past. A table of states and actions has every shape, so there is
nothing to check where observations are whole numbers; where they are real numbers, nothing shows
whether q has the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Steps, Weighted
from ope_gym.verdict import Reason

ALPHA = 0.05  # probability to reject a state that is Markov; auto then asks how much it matters
_LAGS = 3
_FEW = 3  # actions with which the columns are multiplied
_ROUNDING = 1e-9  # of the largest reward, not to be called a residual
_SINGULAR = 1e-6  # relative size of directions that the columns do not span
_LEARNED = 1.25  # variance of a residual with a q learned from four folds of five
_STEPS = 5.0  # least number of effective steps for each column
_LEVERAGE = 0.2  # least 1 - leverage of a step
_MANY = 4  # targets from which it pays to make products of columns
_BLOCK = 1 << 13  # steps whose columns stay in the cache
_PIECE = 1 << 10  # the same of products of columns
_KEPT = 1 << 17  # steps of a chunk whose columns are kept for the next target

T = TypeVar("T")


@dataclass(frozen=True)
class MarkovCheck:
    """The result of the check.

    Args:
        chance: probability of such residuals if the past does not matter; NaN if it was not
            checked.
        past: whether there are past steps that could matter; episodes of one step have none.
    """

    chance: float
    past: bool = True

    @property
    def failed(self) -> bool:
        """Whether past steps predict the residuals."""
        return self.chance < ALPHA

    @property
    def unchecked(self) -> bool:
        """Whether it is unknown if past steps predict the residuals."""
        return bool(np.isnan(self.chance))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The assumption of an estimate from the model, or what speaks against it."""
        if self.unchecked:
            return (Reason("markov_untested" if self.past else "shape_untested"),)
        if not self.past:
            return (Reason("no_past"),)
        return (Reason("markov_failed" if self.failed else "markov_passed", p=self.chance),)


def check_markov() -> Steps[MarkovCheck]:
    """Test whether past steps predict the residuals of the q model."""
    (sums,) = yield (PastSums(),)
    if not sums.known or not all(np.all(np.isfinite(square)) for square in sums.square):
        return MarkovCheck(np.nan)
    if not sums.past:
        return MarkovCheck(np.nan if sums.numbers else 1.0, past=False)
    if not sums.moments[1] > 0.0:  # q is exact, and there is nothing to predict; or no step counts
        return MarkovCheck(1.0 if sums.moments[0] else np.nan)
    roots = tuple(Root.of(a, b) for a, b in zip(sums.square, sums.product, strict=True))
    (squares,) = yield (PastSquares(roots),)
    steps, second, fourth = sums.moments
    least = _LEARNED * second / steps
    pairs = zip(roots, squares.sums, strict=True)
    chances = [_chance(root, square, second**2 / fourth, least) for root, square in pairs]
    known = [chance for chance in chances if not np.isnan(chance)]
    return MarkovCheck(min(1.0, len(known) * min(known)) if known else np.nan)


def _chance(root: Root, square: FloatArray, effective: float, least: float) -> float:
    """Return the probability of such coefficients by chance; NaN if there are too few steps.

    Args:
        root: orthonormal columns and the coefficients on them.
        square: (m, m) sums of their squares times those of the residuals that are left.
        effective: number of steps from which the covariance is known.
        least: least variance of a coefficient, that of residuals of equal spread.
    """
    from scipy.special import fdtrc

    m, freedom = root.coefficients.size, effective - 1.0
    if not m or effective < _STEPS * m:
        return np.nan
    size, axes = np.linalg.eigh(square * _LEARNED)
    statistic = float(np.sum((axes.T @ root.coefficients) ** 2 / np.maximum(size, least)))
    left = freedom - m + 1.0
    return float(fdtrc(m, left, statistic * left / (m * freedom)))


class Part(NamedTuple):
    """Some steps of a block, and the columns of past steps that may predict their residuals.

    Args:
        here: (m,) which of the steps of the block that count; None for all.
        columns: (p, m).
        sets: for each set of columns, the rows of `columns` that are part of it and their place in
            the set; all other columns of the set are 0 at these steps.
    """

    here: IntArray | None
    columns: FloatArray
    sets: tuple[tuple[slice, slice], ...]

    def residuals(self, all_steps: FloatArray) -> FloatArray:
        """Return those (P, m) of these steps."""
        return all_steps if self.here is None else np.take(all_steps, self.here, axis=1)


class PastColumns:
    """Columns of past steps, block by block: all at once take far more than the episodes.

    They do not depend on the target, so those of a small chunk are kept for the next one.

    Args:
        chunk: the trajectories.
    """

    def __init__(self, chunk: Weighted) -> None:
        assert chunk.past is not None
        self.steps, self._rewards = chunk.steps, chunk.rewards / chunk.unit
        self._actions, self._others = chunk.past
        total = np.cumsum(self._rewards) - self._rewards
        self._total = total - np.repeat(total[chunk.offsets[:-1]], np.diff(chunk.offsets))
        self._keeps = self.steps.size <= _KEPT
        self._made: dict[Any, Any] = {}

    @classmethod
    def of(cls, chunk: Weighted) -> PastColumns:
        """Return those of a chunk, as another target may have left them."""
        assert chunk.past is not None
        # a target that is finite and one that is not see the actions in different ways
        key = ("past columns", *((x.shape, x.dtype.str) for x in chunk.past))
        if key not in chunk.kept:
            chunk.kept[key] = cls(chunk)
        past_columns: PastColumns = chunk.kept[key]
        return past_columns

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` does, made once if the chunk is small."""
        if not self._keeps:
            return make()
        if key not in self._made:
            self._made[key] = make()
        value: T = self._made[key]
        return value

    @property
    def sizes(self) -> list[int]:
        """How many columns each set has."""
        actions = self._actions.shape[1]
        plain = actions * (_LAGS + 1) + self._others.shape[1] + 2
        return [actions, plain] + [(actions + 1) * plain] * (0 < actions < _FEW)

    def parts(self, begin: int, here: IntArray | None) -> list[Part]:
        """Return the parts of the block that begins at a step, of those steps that count.

        Where each step has one of a few actions, a part has the steps of one action: its columns
        times the other actions are 0.
        """
        rows = slice(begin, min(begin + _BLOCK, self.steps.size))
        plain, now = self._plain(rows), self._actions[rows]
        if here is not None:
            plain, now = plain[:, here], now[here]
        (actions, size), everything = self.sizes[:2], slice(None)
        sets = (slice(actions), slice(actions)), (everything, everything)
        if not 0 < actions < _FEW:
            return [Part(None, plain, sets)]
        if now.dtype == np.bool_ and (actions == 1 or not now.all(axis=1).any()):
            parts = []
            for a, chosen in enumerate([*now.T, ~now.any(axis=1)]):
                some, place = np.flatnonzero(chosen), slice(a * size, (a + 1) * size)
                own = (*sets, (everything, place))
                parts += [Part(some, np.take(plain, some, axis=1), own)] * (some.size > 0)
            return parts
        factors = now.T.astype(np.float64)
        factors = np.concatenate([factors, 1.0 - factors.sum(axis=0, keepdims=True)])
        columns = np.concatenate([plain, *(plain * row for row in factors)])
        sets = sets[0], (slice(size), everything)
        return [Part(None, columns, (*sets, (slice(size, None), everything)))]

    def _plain(self, rows: slice) -> FloatArray:
        """Return the columns (p, n) of the second set, at some steps."""
        steps, actions = self.steps[rows], self._actions
        early = np.flatnonzero(steps < _LAGS)
        plain, row = np.zeros((self.sizes[1], steps.size)), 0
        lags = [(actions, k) for k in range(1, _LAGS + 1)]
        for columns, k in (*lags, (self._others, 1), (self._rewards[:, None], 1)):
            own = plain[row : row + columns.shape[1]]
            first = max(rows.start - k, 0)
            own[:, first + k - rows.start :] = columns[first : max(rows.stop - k, first)].T
            own[:, early[steps[early] < k]] = 0.0
            row += len(own)
        scale = 1.0 / np.sqrt(np.maximum(steps, 1))
        np.multiply(self._taken(rows).T, scale, out=plain[row:-1])
        np.multiply(self._total[rows], scale, out=plain[-1])
        return plain

    def _taken(self, rows: slice) -> FloatArray:
        """Return the sums (n, actions) of all actions before each step of its episode."""
        steps = self.steps[rows]
        first = rows.start - int(steps[0])  # where the episode of the first of the steps begins
        taken = self._actions[first : rows.stop].astype(np.float64)
        before = np.cumsum(taken, axis=0) - taken
        here = np.arange(rows.start - first, len(taken))
        return np.asarray(before[here] - before[here - steps])


@dataclass(frozen=True)
class Design:
    """The residuals of a block of steps for P targets, and columns of past steps.

    Args:
        begin: first step of the block.
        columns: where its columns come from.
        here: which of its steps count; None for all.
        residuals: (P, m) theirs, of each target.
    """

    begin: int
    columns: PastColumns
    here: IntArray | None
    residuals: FloatArray

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the steps that count, with their columns."""
        return self._once("parts", lambda: self.columns.parts(self.begin, self.here))

    def squares(self) -> list[FloatArray]:
        """Return for each part (p, p) the products of its columns with each other."""
        return self._once("squares", lambda: [x.columns @ x.columns.T for x in self.parts])

    def inflation(self, roots: Sequence[Root]) -> list[list[FloatArray]]:
        """Return for each part and each set 1 / (1 - leverage) (m,) of its steps."""
        key = "inflation", *(r.map.tobytes() for r in roots)
        return self._once(
            key,
            lambda: [
                [
                    _inflation(part.columns[rows], root.map[place])
                    for (rows, place), root in zip(part.sets, roots, strict=True)
                ]
                for part in self.parts
            ],
        )

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        return make() if self.here is not None else self.columns.once((self.begin, key), make)


def alike(
    chunks: Sequence[Weighted], keys: Sequence[object] | None = None
) -> Iterator[tuple[list[int], Iterator[Design]]]:
    """Yield the places of chunks whose steps all count, then others, and their designs together.

    Args:
        chunks: the same steps, weighed for several targets.
        keys: only chunks with equal ones are taken together.
    """
    groups: dict[object, list[int]] = {}
    seen: dict[int, NDArray[np.bool_] | None] = {}
    for place, chunk in enumerate(chunks):
        if chunk.visits is None or chunk.past is None:
            continue
        seen[place] = _counting(chunk)
        key = None if keys is None else keys[place]
        groups.setdefault(key if seen[place] is None else (place,), []).append(place)
    for places in groups.values():
        yield places, _designs([chunks[place] for place in places], seen[places[0]])


def _counting(chunk: Weighted) -> NDArray[np.bool_] | None:
    """Return which steps (S,) other folds have seen, and the next step, too; None for all."""
    assert chunk.visits is not None
    seen = chunk.visits[0] != 0
    if seen.all():
        return None
    ahead = np.append(seen[1:], True)
    ahead[chunk.offsets[1:] - 1] = True
    return np.asarray(seen & ahead)


def _designs(chunks: Sequence[Weighted], seen: NDArray[np.bool_] | None) -> Iterator[Design]:
    """Yield the residuals of several targets with columns of past steps, block by block."""
    columns, unit = PastColumns.of(chunks[0]), chunks[0].unit
    for begin in range(0, columns.steps.size, _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        here = None if seen is None else np.flatnonzero(seen[rows])
        answer = np.stack([x.visits[1, rows] for x in chunks if x.visits is not None]) / unit
        answer = answer if here is None else answer[:, here]
        answer[~(np.abs(answer) > _ROUNDING)] = 0.0
        yield Design(begin, columns, here, answer)


@dataclass
class _Sums:
    """Sums over the chunks so far.

    Args:
        square: Squares (p, p) of each set of columns.
        product: Products (p,) of each set with the residuals.
        moments: (3,) number of residuals, sums of their second and fourth powers.
        known: whether all chunks have what is needed.
        past: whether any episode has more than one step.
        numbers: whether observations have real numbers.
    """

    square: list[FloatArray]
    product: list[FloatArray]
    moments: FloatArray
    known: bool = True
    past: bool = True
    numbers: bool = False

    def merge(self, other: _Sums) -> None:
        """Add the sums of later chunks."""
        self.known = self.known and other.known
        if not self.known:
            return
        self.square = [a + b for a, b in zip(self.square, other.square, strict=True)]
        self.product = [a + b for a, b in zip(self.product, other.product, strict=True)]
        self.moments = self.moments + other.moments
        self.past = self.past or other.past
        self.numbers = self.numbers or other.numbers


@dataclass(frozen=True, eq=False)
class Root:
    """A map from columns to orthonormal ones, compared by identity.

    Args:
        map: (p, m).
        coefficients: (m,) of the residuals on the orthonormal columns.
    """

    map: FloatArray
    coefficients: FloatArray

    @classmethod
    def of(cls, square: FloatArray, product: FloatArray) -> Root:
        """Make the map from the sums; directions that are not spanned are dropped."""
        scale = np.sqrt(np.diag(square))
        unit = np.where(scale > 0, 1.0 / np.where(scale > 0, scale, 1.0), 0.0)
        size, axes = np.linalg.eigh(square * unit[:, None] * unit)
        kept = size > _SINGULAR
        made = unit[:, None] * axes[:, kept] / np.sqrt(size[kept])
        return cls(made, made.T @ product)


@dataclass(frozen=True)
class PastSums:
    """Sum the products of the columns with each other and with the residuals."""

    def part(self, chunk: Weighted) -> _Sums:
        """Sum over a chunk."""
        return self.parts([self], [chunk])[0]

    @staticmethod
    def parts(requests: Sequence[PastSums], chunks: Sequence[Weighted]) -> list[_Sums]:
        """Sum over a chunk for several targets; where all their steps count, together."""
        totals: list[_Sums] = [_Sums([], [], np.zeros(3), known=False) for _ in chunks]
        for places, blocks in alike(chunks):
            for design in blocks:
                for place, some in zip(places, _sums(design), strict=True):
                    if totals[place].known:
                        totals[place].merge(some)
                    else:
                        totals[place] = some
        for own, chunk in zip(totals, chunks, strict=True):
            own.past = chunk.rewards.size > chunk.offsets.size - 1
            own.numbers = chunk.past is not None and chunk.past[1].shape[1] > 0
        return totals

    def total(self, merged: _Sums) -> _Sums:
        """Return the sums over all trajectories."""
        return merged


def _sums(design: Design) -> list[_Sums]:
    """Return the sums of each target over a block."""
    e, sizes = design.residuals, design.columns.sizes
    second = e * e
    moments = np.stack([np.full(len(e), e.shape[1]), second.sum(axis=1), (second**2).sum(axis=1)])
    square = [np.zeros((size, size)) for size in sizes]
    product = [np.zeros((len(e), size)) for size in sizes]
    for part, own in zip(design.parts, design.squares(), strict=True):
        crossed = part.residuals(e) @ part.columns.T
        for j, (rows, place) in enumerate(part.sets):
            square[j][place, place] += own[rows, rows]
            product[j][:, place] += crossed[:, rows]
    return [_Sums(square, [x[i] for x in product], moments[:, i]) for i in range(len(e))]


@dataclass
class _Squares:
    sums: list[FloatArray]

    def merge(self, other: _Squares) -> None:
        """Add the sums of later chunks."""
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]


@dataclass(frozen=True)
class PastSquares:
    """Sum the squares (m, m) that the robust covariance of the coefficients is made of."""

    roots: tuple[Root, ...]

    def part(self, chunk: Weighted) -> _Squares:
        """Sum over a chunk."""
        return self.parts([self], [chunk])[0]

    @staticmethod
    def parts(requests: Sequence[PastSquares], chunks: Sequence[Weighted]) -> list[_Squares]:
        """Sum over a chunk for several targets; where all their steps count, together."""
        totals = [_Squares([np.zeros(2 * x.map.shape[:1]) for x in r.roots]) for r in requests]
        maps = [tuple(root.map.tobytes() for root in r.roots) for r in requests]
        for places, blocks in alike(chunks, maps):
            roots = [requests[place].roots for place in places]
            fitted = [
                np.stack([x.map @ x.coefficients for x in own]) for own in zip(*roots, strict=True)
            ]
            for design in blocks:
                for part, inflation in zip(design.parts, design.inflation(roots[0]), strict=True):
                    e = part.residuals(design.residuals)
                    for j, (rows, put) in enumerate(part.sets):
                        sums = _squares(part.columns[rows], inflation[j], e, fitted[j][:, put])
                        for place, square in zip(places, sums, strict=True):
                            totals[place].sums[j][put, put] += square
        for own, request in zip(totals, requests, strict=True):
            pairs = zip(own.sums, request.roots, strict=True)
            own.sums = [r.map.T @ square @ r.map for square, r in pairs]
        return totals

    def total(self, merged: _Squares) -> _Squares:
        """Return the sums over all trajectories."""
        return merged


def _inflation(columns: FloatArray, made: FloatArray) -> FloatArray:
    """Return 1 / (1 - leverage) (n,) of steps, of columns (p, n) and the map (p, m) of a root."""
    leverage = np.einsum("pn,pn->n", columns, (made @ made.T) @ columns)
    return np.asarray(1.0 / np.maximum(1.0 - leverage, _LEVERAGE))


def _squares(
    columns: FloatArray, inflation: FloatArray, residuals: FloatArray, coefficients: FloatArray
) -> FloatArray:
    """Sum the squares (P, p, p) of columns times what is left of the residuals of P targets.

    Args:
        columns: (p, n).
        inflation: (n,) 1 / (1 - leverage).
        residuals: (P, n).
        coefficients: (P, p) of the residuals on the columns.
    """
    if len(residuals) < _MANY:
        rest = (residuals - coefficients @ columns) * inflation
        return np.stack([scaled @ scaled.T for scaled in (columns * one for one in rest)])
    first, second = np.triu_indices(len(columns))
    sums, ends = np.zeros((len(residuals), first.size)), np.cumsum(np.arange(len(columns), 0, -1))
    for begin in range(0, inflation.size, _PIECE):
        here = slice(begin, begin + _PIECE)
        some = np.ascontiguousarray(columns[:, here])
        rest = residuals[:, here] - coefficients @ some
        rest *= inflation[here]
        rest *= rest
        products = np.empty((first.size, some.shape[1]))
        for i, end in enumerate(ends):
            np.multiply(some[i:], some[i], out=products[end - len(columns) + i : end])
        sums += rest @ products.T
    matrices = np.empty((len(residuals), len(columns), len(columns)))
    matrices[:, first, second] = matrices[:, second, first] = sums
    return matrices
