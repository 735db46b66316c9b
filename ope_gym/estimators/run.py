"""Run estimators by name, side by side: equal requests are answered once, one pass a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, in_threads
from ope_gym.estimators.adaptive import adaptive
from ope_gym.estimators.auto import auto
from ope_gym.estimators.empirical_average import empirical_average
from ope_gym.estimators.magic import magic
from ope_gym.estimators.marginal import direct, mdr
from ope_gym.estimators.reductions import (
    Bets,
    Column,
    Reduction,
    Steps,
    Weighted,
    ask,
    pieces,
    together,
)
from ope_gym.estimators.table import ESTIMATORS, Composition
from ope_gym.estimators.weighted import Setting, StepSums, StepTotals, weigh_column, weighted
from ope_gym.inference.computed import Computed
from ope_gym.inference.intervals import Betting

_PIECE = 1 << 17  # steps of a large chunk that a thread takes at once; twice as many of a huge one
Reduce = Callable[[Sequence[Reduction]], Sequence[Any]]


METHODS: dict[str, Callable[[Composition, Setting], Steps[Computed]]] = {
    "weighted": weighted,
    "direct": direct,
    "auto": auto,
    "magic": magic,
    "marginal": mdr,
    "adaptive": adaptive,
    "average": empirical_average,
}


def estimator(name: str, setting: Setting, betting: Betting | None = None) -> Steps[Computed]:
    """Run an estimator of the table.

    Args:
        name: Name of the estimator.
        setting: what all estimators of an evaluation share.
        betting: the interval, if it is one by betting, which needs sums of its own.
    """
    c = ESTIMATORS[name]
    if c.method != "weighted" and (c.method != "auto" or setting.has_q):
        setting = dataclasses.replace(setting, errors=True)  # its value rests on influence values
    steps = METHODS[c.method](c, setting)
    if betting is None:
        return (yield from steps)
    assert betting.reward_range is not None
    assert betting.horizon is not None
    column = Column(c.scheme, setting.cap if c.capped else None)
    bets = Bets(column, setting.gamma, betting.reward_range, betting.horizon)
    computed: Computed
    computed, sums = yield from together(steps, ask(bets))
    return dataclasses.replace(computed, bets=sums)


@dataclass(frozen=True)
class Aimed:
    """A request about one of several targets, whose weighted trajectories come together.

    Args:
        target: its number among them.
        request: what is wanted.
    """

    target: int
    request: Reduction

    @property
    def in_threads(self) -> bool:
        """Whether it is made of pieces, see `Reduction`."""
        return bool(getattr(self.request, "in_threads", False))

    def part(self, chunk: Any) -> Any:
        """Return the part of a chunk, which is a list: it was weighted for each target."""
        return self.request.part(chunk[self.target])

    def total(self, merged: Any) -> Any:
        """Return the answer."""
        return self.request.total(merged)

    def slice(self, trajectories: slice) -> Aimed:
        """Keep what a task needs."""
        cut = getattr(self.request, "slice", None)
        return self if cut is None else Aimed(self.target, cut(trajectories))


def aim(target: int, generator: Steps[Any]) -> Steps[Any]:
    """Run a generator whose requests are about one of several targets."""
    try:
        wanted = next(generator)
        while True:
            wanted = generator.send((yield tuple(Aimed(target, one) for one in wanted)))
    except StopIteration as end:
        return end.value


def run(generators: Sequence[Steps[Any]], reduce: Reduce) -> list[Any]:
    """Run estimators, answering each distinct request once.

    Args:
        generators: the estimators.
        reduce: makes the totals of reductions in one pass over all trajectories.
    """
    everything = together(*generators)
    try:
        requests = next(everything)
        while True:
            distinct = list(dict.fromkeys(requests))
            totals = dict(zip(distinct, reduce(distinct), strict=True))
            requests = everything.send(tuple(totals[request] for request in requests))
    except StopIteration as end:
        return list(end.value)


def reduce_chunk(chunk: Any) -> Reduce:
    """Answer requests from one chunk that holds all trajectories; a list of them if `Aimed`.

    Of a large one, in threads: how it is cut depends on the data alone, and the parts are merged in
    order, so the number of threads changes no bit.
    """
    chunks: list[Weighted] = chunk if isinstance(chunk, list) else [chunk]
    cut: list[Any] = []
    steps = int(chunks[0].offsets[-1])
    if steps >= 2 * _PIECE:
        size = 2 * _PIECE if steps >= 8 * _PIECE else _PIECE
        cut = [list(some) for some in zip(*(pieces(one, size) for one in chunks), strict=True)]
        cut = cut if isinstance(chunk, list) else [some[0] for some in cut]

    def reduce(requests: Sequence[Reduction]) -> list[Any]:
        apart = [request for request in requests if cut and getattr(request, "in_threads", False)]
        merged: list[Any] = []
        if apart:
            for parts in in_threads(lambda piece: [r.part(piece) for r in apart], cut):
                merge_all(merged, parts)
        known = dict(zip(apart, merged, strict=True))
        rest = [r for r in requests if r not in known]
        known |= zip(rest, parts_of(rest, chunk), strict=True)
        return [r.total(known[r]) for r in requests]

    return reduce


def parts_of(requests: Sequence[Any], chunk: Any) -> list[Any]:
    """Return the parts of a chunk, those of like requests about several targets made together."""
    together: dict[type, list[Aimed]] = {}
    for request in requests:
        if isinstance(request, Aimed) and hasattr(request.request, "parts"):
            together.setdefault(type(request.request), []).append(request)
    known: dict[Any, Any] = {}
    for kind, some in together.items():
        if len(some) > 1:
            parts = kind.parts([one.request for one in some], [chunk[one.target] for one in some])  # type: ignore[attr-defined]
            known |= zip(some, parts, strict=True)
    return [known[r] if r in known else r.part(chunk) for r in requests]


def merge_all(merged: list[Any], parts: Sequence[Any]) -> None:
    """Merge each of several parts into the sums so far."""
    if not merged:
        merged.extend(parts)
        return
    for total, part in zip(merged, parts, strict=True):
        total.merge(part)


def weigh_arrays(
    log_weights: FloatArray,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    *,
    cap: float | None = None,
    normalised: bool = False,
) -> Computed:
    """Compute a weighted estimate from arrays, all trajectories at once and without a q model."""
    n = offsets.size - 1
    nobody = np.zeros(n, dtype=np.int64)
    setting = Setting(n, nobody, nobody, np.array([n]), gamma)
    chunk = Weighted(offsets, rewards, {"given": log_weights})
    computed: Computed
    (computed,) = run(
        [weigh_column(Column("given", cap), normalised, setting)], reduce_chunk(chunk)
    )
    return computed


def sum_arrays(
    log_weights: FloatArray,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    cap: float | None = None,
) -> StepTotals:
    """Sum weights at each step from arrays, all trajectories at once."""
    request = StepSums(Column("given", cap), gamma)
    return request.total(request.part(Weighted(offsets, rewards, {"given": log_weights})))
