"""The fast numpy underneath the closed-form policies.

Shapes: K policies, n rows, d features, A actions. Work is done in tiles that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ope_gym.policies.base import Floats

BLOCK = 32_768  # elements of a (K, rows) tile: its few float64 temporaries stay in cache
REACH, CELLS = 40, 512  # the table of ln σ covers |x| <= REACH with this many cells a unit
SMALL = 4_096  # below this many elements the plain formula costs less than the table's set-up


def sample_rows(probs: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """One action a row of (n, A) probabilities, by inverting the cumulative sum.

    Dividing by the last sum makes it exactly 1 from the last possible action on, so an action
    of probability 0 is never drawn.
    """
    cumulative = np.cumsum(probs, axis=1)
    refuse_nan(cumulative[:, -1])
    cumulative /= cumulative[:, -1:]
    below = cumulative <= rng.random((len(probs), 1))
    return np.asarray(below.sum(axis=1, dtype=np.int64))


def refuse_nan(probs: Floats) -> None:
    """Stop before a NaN, which fails every comparison, passes for action 0."""
    if np.isnan(probs).any():
        row = int(np.flatnonzero(np.isnan(probs))[0])
        raise ValueError(f"the probabilities of row {row} are nan: look for nan in observations")


def moments_of(probs: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of ln p under p for each row of an (n, A) array; 0 ln 0 = 0."""
    logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0)
    mean = (probs * logs).sum(axis=1)
    return mean, (probs * (logs - mean[:, None]) ** 2).sum(axis=1)


def tiles(n_policies: int, n_rows: int, depth: int = 1) -> Iterator[tuple[slice, slice]]:
    """Slices (policies, rows) that cover a (K, n) array in tiles of about BLOCK / depth."""
    tall = max(1, min(n_policies, 64, BLOCK // (64 * depth)))
    wide = max(64, BLOCK // (tall * depth))
    for row in range(0, n_rows, wide):
        for k in range(0, n_policies, tall):
            yield slice(k, min(k + tall, n_policies)), slice(row, min(row + wide, n_rows))


def log_sigmoid_stack(theta: Floats, x: Floats, chosen: NDArray[np.intp]) -> Floats:
    """The (K, n) values ln σ(±θ_k·(x, 1)), plus for action 1: theta (K, d + 1), x (n, d)."""
    out = np.empty((len(theta), len(x)))
    small = out.size <= SMALL
    scaled_theta = theta if small else theta * CELLS  # a power of two, so nothing is rounded
    work = LogSigmoidTable(0 if small else min(BLOCK, out.size))
    for k, rows in tiles(*out.shape):
        columns = with_one(x[rows])
        columns *= 2.0 * chosen[rows] - 1.0  # d + 1 signs a row instead of K
        if small:
            out[k, rows] = log_sigmoid(theta[k] @ columns)
        else:
            work(scaled_theta[k], columns, out[k, rows])
    return out


def log_softmax_stack(weights: Floats, x: Floats, chosen: NDArray[np.intp]) -> Floats:
    """Log-softmax of the chosen action: weights (K, A, d + 1), x (n, d) -> (K, n)."""
    out = np.empty((len(weights), len(x)))
    for k, rows in tiles(*out.shape, depth=weights.shape[1]):
        columns = with_one(x[rows])
        flat = weights[k].reshape(-1, weights.shape[2]) @ columns
        scores = flat.reshape(-1, weights.shape[1], columns.shape[1])  # (k, A, rows)
        scores -= scores.max(axis=1, keepdims=True)
        picked = scores[:, chosen[rows], np.arange(columns.shape[1])]
        np.exp(scores, out=scores)
        total = scores.sum(axis=1)
        np.log(total, out=total)
        np.subtract(picked, total, out=out[k, rows])
    return out


def with_one(rows: Floats) -> Floats:
    """Features (b, d) as (d + 1, b), the last line 1 for the bias: a C-order matmul operand."""
    columns = np.empty((rows.shape[1] + 1, rows.shape[0]))
    columns[:-1] = rows.T
    columns[-1] = 1.0
    return columns


def log_sigmoid(x: Floats) -> Floats:
    """Elementwise ln σ(x) = min(x, 0) - log1p(exp(-|x|)), without overflow for any x."""
    tail = np.abs(x)
    np.negative(tail, out=tail)
    np.exp(tail, out=tail)
    np.log1p(tail, out=tail)
    return np.subtract(np.minimum(x, 0.0), tail, out=tail)


class LogSigmoidTable:
    """The values ln σ for large tiles, to about 1e-15: a cubic in each of 2 * 40 * 512 cells.

    numpy's float64 exp and log1p are scalar library calls on most machines (8 and 11 ns an
    element); four look-ups and a Horner scheme take less than half of that. The workspace is
    kept from tile to tile, since fresh memory would cost a quarter on top.
    """

    def __init__(self, size: int) -> None:
        self._floats = np.empty((4, size))
        self._index = np.empty(size, dtype=np.intp)

    def __call__(self, scaled_theta: Floats, columns: Floats, out: Floats) -> None:
        """Write ln σ(scores / CELLS) to `out`, scores = scaled_theta @ columns."""
        scores, total, step, term = (w[: out.size].reshape(out.shape) for w in self._floats)
        index = self._index[: out.size].reshape(out.shape)
        np.matmul(scaled_theta, columns, out=scores)
        beyond = None
        if not (scores.max() <= REACH * CELLS and scores.min() >= -REACH * CELLS):
            inside = np.fmax(np.fmin(scores, REACH * CELLS), -REACH * CELLS)  # NaN: an end
            beyond = scores - inside
            scores[...] = inside
        np.rint(scores, out=total)
        np.subtract(scores, total, out=step)
        total += REACH * CELLS
        np.copyto(index, total, casting="unsafe")
        constant, linear, square, cube = _log_sigmoid_cells()
        np.take(cube, index, out=total, mode="clip")
        for coefficient in (square, linear):
            total *= step
            total += np.take(coefficient, index, out=term, mode="clip")
        total *= step
        np.add(total, np.take(constant, index, out=term, mode="clip"), out=out)
        if beyond is not None:
            _extend(beyond, out)


def _extend(beyond: Floats, out: Floats) -> None:
    """Continue ln σ past ±REACH, where it is x below and -exp(-x) above, to the last digit."""
    beyond /= CELLS
    out *= np.exp(-beyond, out=np.ones_like(beyond), where=beyond > 0.0)
    out += np.minimum(beyond, 0.0)


@cache
def _log_sigmoid_cells() -> tuple[Floats, ...]:
    """Coefficients c_j of ln σ(x) ≈ Σ_j c_j u^j, u = (x - node) CELLS, for every node.

    With s = σ(-x) and q = s(1 - s) the derivatives are s, -q, q(1 - 2s), -q(1 - 6q). The fourth
    is folded into the others (u⁴ ≈ r²u² - r⁴/8 on |u| <= r, Chebyshev), which leaves 1/8 of it.
    """
    node = np.arange(-REACH * CELLS, REACH * CELLS + 1) / CELLS
    s = np.exp(log_sigmoid(-node))
    q = s * np.exp(log_sigmoid(node))
    quartic, half_cell = -q * (1 - 6 * q) / 24, 0.5 / CELLS
    cells = [
        log_sigmoid(node) - quartic * half_cell**4 / 8,
        s,
        -q / 2 + quartic * half_cell**2,
        q * (1 - 2 * s) / 6,
    ]
    return tuple(cell / float(CELLS) ** power for power, cell in enumerate(cells))
