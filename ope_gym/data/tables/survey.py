"""Find the episodes of a table: which rows are theirs, how they end, who acted.

The rows of an episode are in one stretch and in the order of time. Any other table is refused, not
sorted: rows that are missing, duplicated or out of order mean that the table is not what its owner
thinks it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym.data.schema import Flags, Ints
from ope_gym.data.tables import cells
from ope_gym.data.tables.cells import BadCell, Place
from ope_gym.data.tables.layout import Plan

_SORT = "sort the table by episode and step"


class Episodes(NamedTuple):
    """The n episodes of a table.

    Args:
        starts: (n + 1,) row where each begins, and the number of all rows.
        terminated: (n,).
        truncated: (n,).
        held_out: (n,).
        start_clock: (n,) -1 if unknown.
        schedule_ids: (n,) -1 if there is none.
        first_policies: (n,) number of the policy that acted first.
    """

    starts: Ints
    terminated: Flags
    truncated: Flags
    held_out: Flags
    start_clock: Ints
    schedule_ids: Ints
    first_policies: Ints


class Labels:
    """Number the labels of policies.

    Args:
        known: The label of each policy; None where a column has numbers.
        grows: Whether further labels get further numbers.
    """

    def __init__(self, known: tuple[Any, ...] | None, *, grows: bool) -> None:
        self._numbers = None if known is None else {label: k for k, label in enumerate(known)}
        self._grows = grows

    @property
    def known(self) -> tuple[Any, ...] | None:
        """The label of each policy."""
        return None if self._numbers is None else tuple(self._numbers)

    def numbers(self, column: Any, name: str, place: Place) -> Ints:
        """Return the policy of each row."""
        if self._numbers is None:
            return cells.whole_numbers(column, name, place)
        encoded = cells.labels(column, name, place).dictionary_encode()
        rows = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        table = np.empty(len(encoded.dictionary), dtype=np.int64)
        for i, label in enumerate(encoded.dictionary.to_pylist()):
            if label not in self._numbers and not self._grows:
                row = int(np.argmax(rows == i))
                known = ", ".join(map(repr, list(self._numbers)[:10]))
                raise BadCell(
                    place(row), name, f"policies has no {label!r}, only {known}: add this policy"
                )
            table[i] = self._numbers.setdefault(label, len(self._numbers))
        return np.asarray(table[rows])


class Survey:
    """Go through the rows of a table, some at a time.

    Args:
        plan: The columns.
        place: Names a row of the table in messages.
        first: The row with which it begins, for messages.
        labels: Numbers of the policies; by default as the plan has them.
    """

    def __init__(
        self, plan: Plan, place: Place, first: int = 0, labels: Labels | None = None
    ) -> None:
        self._plan, self._place, self._row, self._first = plan, place, first, first
        self.labels = labels or Labels(plan.labels, grows=plan.grows)
        self._last: Any = None  # the last row so far, to compare with the next
        self._base = 0  # the number of the first step
        self._known: dict[Any, int] = {}  # the row where each episode begins
        self._starts: list[Ints] = []
        self._ends: list[NDArray[np.bool_]] = []
        self._facts: list[Ints] = []

    def add(self, table: Any) -> None:
        """Go on with further rows, an Arrow table with the columns of `Plan.structure`."""
        if not len(table):
            return
        begins = self._last is None
        if begins:
            joined = table
        else:
            joined = cells.import_arrow().concat_tables([self._last, table.select(self._names)])
        top = self._row - (not begins)  # the row of the table that is first in `joined`

        def place(row: int) -> str:
            return self._place(top + row)

        fresh = self._fresh(joined, place, top, begins)
        self._check_steps(joined, fresh, place, begins)
        ends = self._flags(joined, place)
        self._check_ends(ends, fresh, place)
        self._facts.append(self._facts_of(joined, fresh, place))
        self._starts.append(np.flatnonzero(fresh) + top)
        self._ends.append(ends[:, np.flatnonzero(fresh[1:])])
        self._row = top + len(joined)
        self._last = table.select(self._names).slice(len(table) - 1)

    @property
    def _names(self) -> list[str]:
        return self._plan.structure

    def finish(self) -> Episodes:
        """Return the episodes; raise if the last one has not ended."""
        if self._last is None:
            none = np.empty(0, dtype=np.int64)
            no = none.astype(np.bool_)
            return Episodes(np.zeros(1, np.int64), no, no, no, none, none, none)
        ends = self._flags(self._last, lambda row: self._place(self._row - 1))
        self._check_ends(ends, np.ones(2, dtype=bool), lambda row: self._place(self._row - 1))
        ended = np.concatenate([*self._ends, ends], axis=1)
        facts = np.concatenate(self._facts, axis=1)
        starts = np.concatenate([*self._starts, [self._row]]) - self._first
        return Episodes(starts, ended[0], ended[1], facts[0] != 0, *facts[1:])

    def _fresh(self, joined: Any, place: Place, top: int, begins: bool) -> Flags:
        """Return which rows begin an episode; the first row is one that was seen before."""
        import pyarrow.compute as pc

        name = self._plan.episode
        ids = cells.labels(joined[name], name, place)
        fresh = np.full(len(ids), begins)
        differ = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1))
        fresh[1:] = differ.to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(fresh)
        for row, label in zip(rows.tolist(), ids.take(rows).to_pylist(), strict=True):
            known = self._known.setdefault(label, top + row)
            if known != top + row:
                raise BadCell(
                    place(row),
                    name,
                    f"episode {label!r} begins again, it began at {self._place(known)} and other "
                    f"episodes came between: {_SORT}, and give each episode a name of its own",
                )
        return fresh

    def _check_steps(self, joined: Any, fresh: Flags, place: Place, begins: bool) -> None:
        """Raise if steps do not count up by one from 0, or all from 1."""
        name = self._plan.step
        if name is None:
            return
        steps = cells.whole_numbers(joined[name], name, place)
        if begins:
            self._base = int(steps[0] == 1)
        wrong = fresh & (steps != self._base)
        wrong[1:] |= ~fresh[1:] & (np.diff(steps) != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadCell(place(row), name, self._step_problem(steps, fresh, row))

    def _step_problem(self, steps: Ints, fresh: Flags, row: int) -> str:
        step = int(steps[row])
        if fresh[row]:
            return (
                f"an episode begins with step {step}, expected {self._base}: steps before it are "
                f"missing, or out of order; {_SORT}, and count the steps of each episode from 0"
            )
        before = int(steps[row - 1])
        if step == before:
            return f"step {step} appears twice in an episode: remove duplicate rows"
        if step < before:
            return f"step {step} comes after step {before} of the same episode: {_SORT}"
        lost = f"{before + 1}" if step == before + 2 else f"{before + 1} to {step - 1}"
        return (
            f"step {step} comes after step {before}, without {lost} between them: {_SORT}, or "
            "leave such episodes out"
        )

    def _flags(self, joined: Any, place: Place) -> NDArray[np.bool_]:
        """Return (2, rows): terminated and truncated."""
        found = [
            np.full(len(joined), value)
            if isinstance(value, bool)
            else cells.flags(joined[value], value, place)
            for value in (self._plan.terminated, self._plan.truncated)
        ]
        return np.stack(found)

    def _check_ends(self, ends: NDArray[np.bool_], fresh: Flags, place: Place) -> None:
        """Raise if an episode goes on after its end, or stops before it.

        A value for all episodes is about their last rows only.
        """
        plan = self._plan
        columns = [name for name in (plan.terminated, plan.truncated) if isinstance(name, str)]
        for i, name in enumerate((plan.terminated, plan.truncated)):
            wrong = ends[i, : len(fresh) - 1] & ~fresh[1:]
            if isinstance(name, str) and wrong.any():
                raise BadCell(
                    place(int(np.argmax(wrong))),
                    name,
                    "is true, but the episode goes on in the next row: it belongs at the last row "
                    "of an episode; give each episode a name of its own",
                )
        open_ends = ~ends[:, : len(fresh) - 1].any(axis=0) & fresh[1:]
        if open_ends.any():
            raise BadCell(
                place(int(np.argmax(open_ends))),
                " and ".join(columns) or "terminated",
                "the last row of an episode is neither terminated nor truncated: an unfinished "
                "episode has no return; leave it out, or name the column that says how it ended, "
                "terminated=... or truncated=...",
            )

    def _facts_of(self, joined: Any, fresh: Flags, place: Place) -> Ints:
        """Return (4, episodes): held out, start clock, schedule and policy at the first rows."""
        plan, size = self._plan, len(joined)
        found: list[Ints] = []
        for value, absent in ((plan.held_out, 0), (plan.start_clock, -1), (plan.schedule, -1)):
            if not isinstance(value, str):
                found.append(np.full(size, absent if value is None else int(value)))
            elif value == plan.held_out:
                found.append(cells.flags(joined[value], value, place).astype(np.int64))
            else:
                found.append(cells.whole_numbers(joined[value], value, place))
        if plan.policy is None:
            found.append(np.zeros(size, dtype=np.int64))
        else:
            found.append(self.labels.numbers(joined[plan.policy], plan.policy, place))
        facts = np.stack(found)
        names = (plan.held_out, plan.start_clock, plan.schedule, plan.policy)
        for i, name in enumerate(names):
            changes = ~fresh[1:] & (facts[i, 1:] != facts[i, :-1])
            if changes.any() and not (name == plan.policy and plan.schedule is not None):
                raise BadCell(
                    place(int(np.argmax(changes)) + 1),
                    str(name),
                    "differs from the row before, of the same episode: it is one value for each "
                    "episode",
                )
        return facts[:, fresh]
