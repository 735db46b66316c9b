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
from ope_gym.data.tables.rows import Rows
from ope_gym.files import import_arrow

_SORT = "sort the table by episode and step"


class Episodes(NamedTuple):
    """The n episodes of a table.

    Args:
        starts: (n + 1,) row where each begins, and that behind the last one.
        terminated: (n,).
        truncated: (n,).
        held_out: (n,) whether the learner never trained on the episode.
        start_clock: (n,) step of the loop at which it began, -1 if unknown.
        schedule_ids: (n,) which schedule it follows, -1 if its policy does not change.
        first_policies: (n,) number of the policy that acted first.
    """

    starts: Ints
    terminated: Flags
    truncated: Flags
    held_out: Flags
    start_clock: Ints
    schedule_ids: NDArray[np.int32]
    first_policies: NDArray[np.int32]

    @property
    def lengths(self) -> Ints:
        """(n,) steps of each."""
        return np.diff(self.starts)

    def part(self, first: int, stop: int) -> Episodes:
        """Return episodes first:stop."""
        parts: Any = (column[first:stop] for column in self[1:])
        return Episodes(self.starts[first : stop + 1], *parts)


def find_episodes(rows: Rows, plan: Plan) -> Episodes:
    """Return the episodes of a table; further labels of policies are added to those of the plan."""
    differ = cells.import_compute().not_equal
    starts, ids, facts, ends = [], [], [], []
    last = None  # the row before those that are read: they are compared with it
    row = base = 0  # number of the next row; number of the first step in each episode
    for table in rows.read(plan.structure, 0, int(rows.groups[-1])):
        begins = last is None
        joined = table if begins else import_arrow().concat_tables([last, table])
        top = row + len(table) - len(joined)

        def place(i: int, top: int = top) -> str:
            return rows.place(top + i)

        names = cells.labels(joined[plan.episode], plan.episode, place)
        changes = differ(names.slice(1), names.slice(0, len(names) - 1))
        fresh = np.append(begins, np.asarray(changes))
        if plan.step is not None:
            steps = cells.whole_numbers(joined[plan.step], plan.step, place)
            base = int(steps[0] == 1) if begins else base
            _check_steps(steps, fresh, base, plan.step, place)
        ended = _ends(joined, plan, place)
        _check_ends(ended[:, :-1], fresh[1:], plan, place)
        starts.append(np.flatnonzero(fresh) + top)
        ids.append(names.take(np.flatnonzero(fresh)))
        facts.append(_facts(joined, fresh, plan, place))
        ends.append(ended[:, np.flatnonzero(fresh[1:])])
        row = top + len(joined)
        last = joined.slice(len(joined) - 1)
    if last is None:
        none, no = np.empty(0, np.int64), np.empty(0, np.bool_)
        return Episodes(np.zeros(1, np.int64), no, no, no, none, *[none.astype(np.int32)] * 2)
    ends.append(_ends(last, plan, rows.place))
    _check_ends(ends[-1], np.ones(1, np.bool_), plan, lambda i: rows.place(row - 1))
    offsets = np.concatenate([*starts, [row]])
    _check_whole(ids, offsets, plan.episode, rows.place)
    terminated, truncated = np.concatenate(ends, axis=1)
    held_out, clock, schedule, policy = np.concatenate(facts, axis=1)
    numbers = schedule.astype(np.int32), policy.astype(np.int32)
    return Episodes(offsets, terminated, truncated, held_out != 0, clock, *numbers)


def policy_numbers(table: Any, plan: Plan, size: int, place: Place) -> NDArray[np.int32]:
    """Return the policy that acted in each row, one of so many."""
    name = plan.policy or "policy"
    if plan.labels is None:
        numbers = np.zeros(len(table), np.int64)
        if plan.policy:
            numbers = cells.whole_numbers(table[name], name, place)
        _check_range(numbers, 0, (size, "policies"), name, place)
        return numbers.astype(np.int32)
    encoded = cells.labels(table[name], name, place).dictionary_encode()
    rows = np.asarray(encoded.indices)
    listed = encoded.dictionary.to_pylist()
    for i, label in enumerate(listed):
        if label not in plan.labels and not plan.grows:
            known = ", ".join(map(repr, list(plan.labels)[:10]))
            problem = f"policies has no {label!r}, only {known}: add this policy"
            raise BadCell(place(int(np.argmax(rows == i))), name, problem)
        plan.labels.setdefault(label, len(plan.labels))
    return np.asarray(np.array([plan.labels[label] for label in listed], np.int32)[rows])


def _check_range(numbers: Ints, low: int, known: tuple[int, str], name: str, place: Place) -> None:
    """Raise for a number that none of the known policies or schedules has."""
    wrong = (numbers < low) | (numbers >= known[0])
    there = f"but there are {known[0]} {known[1]}, numbered from 0"
    cells.refuse(wrong, name, place, lambda row: f"is {numbers[row]}, {there}")


def _check_steps(steps: Ints, fresh: Flags, base: int, name: str, place: Place) -> None:
    """Raise if steps do not count up by one from the base."""
    wrong = fresh & (steps != base)
    wrong[1:] |= ~fresh[1:] & (np.diff(steps) != 1)

    def problem(row: int) -> str:
        before = int(steps[row - 1])
        what = (
            f"an episode begins with step {steps[row]}, expected {base}"
            if fresh[row]
            else f"step {steps[row]} comes after step {before} of the same episode, expected "
            f"{before + 1}"
        )
        return f"{what}: {_SORT}, remove duplicate rows, and leave out episodes with gaps"

    cells.refuse(wrong, name, place, problem)


def _ends(table: Any, plan: Plan, place: Place) -> Flags:
    """Return (2, rows): terminated and truncated."""
    return np.stack(
        [
            cells.flags(table[value], value, place)
            if isinstance(value, str)
            else np.full(len(table), value)
            for value in (plan.terminated, plan.truncated)
        ]
    )


def _check_ends(ends: Flags, is_last: Flags, plan: Plan, place: Place) -> None:
    """Raise if an episode goes on after its end, or stops before it.

    A value for all episodes is about their last rows only.
    """
    named = [plan.terminated, plan.truncated]
    columns = [name for name in named if isinstance(name, str)]
    for name in columns:
        cells.refuse(
            ends[named.index(name)] & ~is_last,
            name,
            place,
            lambda row: (
                "is true, but the episode goes on in the next row: it belongs at the last "
                "row of an episode; give each episode a name of its own"
            ),
        )
    cells.refuse(
        ~ends.any(axis=0) & is_last,
        " and ".join(columns) or "terminated",
        place,
        lambda row: (
            "the last row of an episode is neither terminated nor truncated: an unfinished "
            "episode has no return; leave it out, or name the column that says how it ended, "
            "terminated=... or truncated=..."
        ),
    )


def _facts(table: Any, fresh: Flags, plan: Plan, place: Place) -> Ints:
    """Return (4, episodes): held out, start clock, schedule and policy in their first rows."""
    facts = np.full((4, len(table)), -1, np.int64)
    if isinstance(plan.held_out, str):
        facts[0] = cells.flags(table[plan.held_out], plan.held_out, place)
    else:
        facts[0] = plan.held_out
    for i, column in ((1, plan.start_clock), (2, plan.schedule)):
        if column is not None:
            facts[i] = cells.whole_numbers(table[column], column, place)
    _check_range(facts[2], -1, (len(plan.schedules), "schedules"), "schedule", place)
    facts[3] = policy_numbers(table, plan, len(plan.policies), place)
    # policies may change inside episodes where schedules say so
    names = (plan.held_out, plan.start_clock, plan.schedule, None if plan.schedule else plan.policy)
    for fact, name in zip(facts, names, strict=True):
        if isinstance(name, str):
            cells.refuse(
                np.append(False, ~fresh[1:] & (fact[1:] != fact[:-1])),
                name,
                place,
                lambda row: (
                    "differs from the row before, of the same episode: it is one value for "
                    "each episode"
                ),
            )
    return facts[:, fresh]


def _check_whole(ids: list[Any], starts: Ints, name: str, place: Place) -> None:
    """Raise if an episode begins a second time."""
    pa = import_arrow()
    encoded = pa.concat_arrays(ids).dictionary_encode()
    codes = np.asarray(encoded.indices)  # numbered in the order in which they first appear
    again = codes != np.arange(len(codes))
    if again.any():
        i = int(np.argmax(again))
        raise BadCell(
            place(int(starts[i])),
            name,
            f"episode {encoded.dictionary[int(codes[i])].as_py()!r} begins again, it began at "
            f"{place(int(starts[np.argmax(codes == codes[i])]))} and other episodes came between: "
            f"{_SORT}, and give each episode a name of its own",
        )
