"""The episodes of a table, listed first and then read chunk by chunk, as those of our files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import LOG_PROB_TOLERANCE, offsets_of
from ope_gym.data import spaces
from ope_gym.data.database import SeenFile
from ope_gym.data.paths import PathLike
from ope_gym.data.schedules import Schedule, check_schedules
from ope_gym.data.schema import COLUMNS, Chunk, Columns, Ints, space_of
from ope_gym.data.spaces import Space
from ope_gym.data.tables import cells
from ope_gym.data.tables.cells import BadCell
from ope_gym.data.tables.header import header_from_json
from ope_gym.data.tables.layout import Layout, Plan, make_plan, policies_of
from ope_gym.data.tables.rows import FileRows, MemoryRows, join_rows, parquet_files, rows_of
from ope_gym.data.tables.survey import Episodes, Labels, Survey
from ope_gym.policies import Policy, UnknownPolicy, acting_log_probs, acts_unknown


@dataclass(frozen=True, eq=False)
class TableSection:
    """The episodes of a table, in blocks: the episodes that begin in one row group.

    Args:
        rows: Where the rows are.
        plan: The columns.
        policies: By number.
        schedules: Which policy acts when, where policies change inside episodes.
        horizon: The time limit, None if there is none.
        blocks: (B,) the row group in which each block begins.
        starts: (B + 1,) the row where the first episode of each block begins, and the last end.
        counts: (B,) episodes of each block.
        episodes: The table of all episodes; None in a part.
        first: Number of the first episode.
    """

    rows: MemoryRows | FileRows
    plan: Plan
    policies: tuple[Policy, ...]
    schedules: tuple[Schedule, ...]
    horizon: int | None
    blocks: Ints
    starts: Ints
    counts: Ints
    episodes: Episodes | None = None
    first: int = 0

    def __len__(self) -> int:
        """Return the number of blocks; each has an episode."""
        return len(self.blocks)

    @property
    def files(self) -> tuple[SeenFile, ...]:
        """The files that it reads."""
        return self.rows.files

    @property
    def name(self) -> str:
        """A name for messages."""
        return self.rows.name

    @property
    def recorded(self) -> bool:
        """Whether all log-probabilities are in the table."""
        return self.plan.log_prob is not None and self.plan.finite

    @property
    def observation_space(self) -> Space | None:
        """None if unknown."""
        return self.plan.observation_space

    @property
    def action_space(self) -> Space | None:
        """None if unknown."""
        return self.plan.action_space

    @property
    def _listed(self) -> Episodes:
        if self.episodes is None:
            raise ValueError("a part of a table has no list of its episodes")
        return self.episodes

    @property
    def lengths(self) -> Ints:
        """(n,) steps of each episode."""
        return np.diff(self._listed.starts)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(n,) whether the learner never trained on the episode."""
        return self._listed.held_out

    @property
    def start_clock(self) -> Ints:
        """(n,) step of the loop at which each episode began, -1 if unknown."""
        return self._listed.start_clock

    @property
    def schedule_ids(self) -> NDArray[np.int32]:
        """(n,) which of `schedules` each episode follows; -1 if its policy does not change."""
        return self._listed.schedule_ids.astype(np.int32)

    @property
    def first_policies(self) -> NDArray[np.int32]:
        """(n,) the policy that acted first in each episode."""
        return self._listed.first_policies.astype(np.int32)

    def part(self, first: int, stop: int) -> TableSection:
        """Return blocks first:stop, to be read elsewhere; without the table of their episodes."""
        return dataclasses.replace(
            self,
            blocks=self.blocks[first:stop],
            starts=self.starts[first : stop + 1],
            counts=self.counts[first:stop],
            episodes=None,
            first=self.first + int(self.counts[:first].sum()),
        )

    def chunks(self, steps: int | None = None) -> Iterator[Chunk]:
        """Yield the episodes, about `steps` steps at a time; None yields all of them at once.

        The offset of a chunk is its first row in the table.
        """
        first, top = self.first, int(self.starts[0])
        waiting: list[Any] = []
        for table in self._tables(steps):
            waiting.append(table)
            if steps is not None and sum(map(len, waiting)) >= steps:
                joined = cells.import_arrow().concat_tables(waiting)
                cut = self._last_start(joined)
                waiting = [joined.slice(cut)]
                if cut:
                    columns = self._columns(joined.slice(0, cut), top)
                    yield Chunk(top, first, columns)
                    first, top = first + len(columns), top + cut
        if waiting:
            joined = cells.import_arrow().concat_tables(waiting)
            yield Chunk(top, first, self._columns(joined, top))
        elif steps is None:
            yield Chunk(0, first, self._no_rows())

    def _tables(self, steps: int | None) -> Iterator[Any]:
        """Yield the rows of the blocks."""
        if not len(self):
            return
        group = int(self.blocks[0])
        row = int(self.rows.groups[:group].sum())
        begin, end = int(self.starts[0]), int(self.starts[-1])
        for table in self.rows.read(self.plan.columns, group, steps):
            low, high = max(begin - row, 0), min(end - row, len(table))
            if low < high:
                yield table.slice(low, high - low)
            row += len(table)
            if row >= end:
                return

    def _last_start(self, table: Any) -> int:
        """Return the row where the last episode begins; it may go on in the next rows."""
        import pyarrow.compute as pc

        ids = cells.plain(table[self.plan.episode])
        differ = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1))
        found = np.flatnonzero(differ.fill_null(True).to_numpy(zero_copy_only=False))
        return int(found[-1]) + 1 if len(found) else 0

    def _columns(self, table: Any, top: int) -> Columns:
        """Return rows that are whole episodes as columns, not checked yet."""
        plan = self.plan

        def place(row: int) -> str:
            return self.place(top + row)

        labels = Labels(plan.labels, grows=False)
        survey = Survey(plan, self.place, top, labels)
        survey.add(table)
        found = survey.finish()
        ids = np.zeros(len(table), dtype=np.int32)
        if plan.policy is not None:
            ids = labels.numbers(table[plan.policy], plan.policy, place).astype(np.int32)
        self._check_numbers(ids, place)
        seen = cells.batch(
            table, plan.observation, plan.observation_space, place, finite=plan.finite
        )
        chosen = cells.batch(table, plan.action, plan.action_space, place, finite=True)
        return Columns(
            observations=seen,
            actions=chosen,
            rewards=cells.floats(table[plan.reward], plan.reward, place),
            log_probs=self._log_probs(table, ids, seen, chosen, place),
            policy_ids=ids,
            offsets=found.starts,
            terminated=found.terminated,
            truncated=found.truncated,
            held_out=found.held_out,
            start_clock=found.start_clock,
            schedule_ids=found.schedule_ids.astype(np.int32),
            schedules=self.schedules,
            policies=self.policies,
            observation_space=self.observation_space,
            action_space=self.action_space,
            horizon=self.horizon,
        )

    def _check_numbers(self, ids: NDArray[np.int32], place: cells.Place) -> None:
        wrong = (ids < 0) | (ids >= len(self.policies))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadCell(
                place(row),
                str(self.plan.policy),
                f"is {ids[row]}, but there are {len(self.policies)} policies, numbered from 0",
            )

    def _log_probs(
        self, table: Any, ids: NDArray[np.int32], seen: Any, chosen: Any, place: cells.Place
    ) -> NDArray[np.float64]:
        """Return recorded log-probabilities, or those that known policies give."""
        name = self.plan.log_prob
        if name is not None:
            logged = cells.floats(table[name], name, place, finite=self.plan.finite)
            discrete = spaces.is_discrete(self.action_space)
            if discrete is None:
                discrete = all(leaf.dtype.kind in "iub" for leaf in batches.leaves(chosen))
            if discrete and (high := logged > LOG_PROB_TOLERANCE).any():
                row = int(np.argmax(high))
                raise BadCell(
                    place(row),
                    name,
                    f"is {logged[row]:g}, above 0, but these are natural logarithms of "
                    "probabilities; if it holds probabilities, take their logarithms",
                )
            return logged
        unknown = acts_unknown(self.policies, ids)
        if unknown is None:
            return acting_log_probs(self.policies, ids, seen, chosen)
        found = np.full(len(ids), np.nan)
        known = np.flatnonzero(~unknown)
        if len(known):
            rows = [batches.take(tree, known) for tree in (seen, chosen)]
            found[known] = acting_log_probs(self.policies, ids[known], *rows)
        return found

    def _no_rows(self) -> Columns:
        none = {
            column.name: spaces.empty(space_of(self, column.name))
            if column.dtype is None
            else np.empty(0, column.dtype)
            for column in COLUMNS
        }
        return Columns(
            **none,
            offsets=np.zeros(1, dtype=np.int64),
            schedules=self.schedules,
            policies=self.policies,
            observation_space=self.observation_space,
            action_space=self.action_space,
            horizon=self.horizon,
        )

    def place(self, row: int) -> str:
        """Name a row in messages."""
        return self.rows.place(row)

    def damaged(self, offset: int, error: Exception) -> Exception:
        """Return the error for contents that cannot be, which says where already."""
        return error


def open_frame(table: Any, layout: Layout) -> TableSection:
    """List the episodes of a table in memory."""
    return _open(MemoryRows(cells.to_table(table)), layout)


def open_parquet(paths: Sequence[PathLike | SeenFile], layout: Layout) -> list[TableSection]:
    """List the episodes of Parquet files and folders.

    A file of ours is a section, with its own policies. Files of others that follow each other are
    one table: episodes may go on in the next file.
    """
    sections: list[TableSection] = []
    waiting: list[FileRows] = []
    for rows in [*map(rows_of, parquet_files(paths)), None]:
        if rows is not None and rows.header is None:
            waiting.append(rows)
            continue
        if waiting:
            sections.append(_open(join_rows(waiting), layout))
            waiting = []
        if rows is not None:
            sections.append(_open(rows, layout))
    return sections


def _open(rows: MemoryRows | FileRows, layout: Layout) -> TableSection:
    header = None if rows.header is None else header_from_json(rows.header, rows.name)
    plan = make_plan(layout, rows.names, header)
    rows.check_alike(plan.columns)
    survey = Survey(plan, rows.place)
    for table in rows.read(plan.structure, 0, None):
        survey.add(table)
    found = survey.finish()
    policies = policies_of(layout, header)
    if plan.grows:
        labels = survey.labels.known or ()
        plan = dataclasses.replace(plan, labels=labels if plan.policy else None, grows=False)
        policies = tuple(UnknownPolicy(str(label)) for label in labels or ("",))
    schedules = tuple(layout.schedules) or (header.schedules if header else ())
    check_schedules(schedules, len(policies))
    # blocks: the row groups in which an episode begins
    groups = np.searchsorted(offsets_of(rows.groups), found.starts[:-1], side="right") - 1
    blocks, firsts, counts = np.unique(groups, return_index=True, return_counts=True)
    return TableSection(
        rows,
        plan,
        policies,
        schedules,
        layout.horizon or (header.horizon if header else None),
        blocks,
        found.starts[[*firsts, len(groups)]],
        counts,
        found,
    )
