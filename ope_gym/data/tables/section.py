"""The episodes of a table, listed first and then read chunk by chunk, as those of our files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import LOG_PROB_TOLERANCE
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.database import SeenFile
from ope_gym.data.schedules import Schedule, check_schedules
from ope_gym.data.schema import Chunk, Columns, Ints
from ope_gym.data.spaces import Space
from ope_gym.data.tables import cells
from ope_gym.data.tables.header import header_from_json
from ope_gym.data.tables.layout import Layout, Plan, make_plan
from ope_gym.data.tables.rows import Rows, join_rows, rows_in_memory, rows_of, table_files
from ope_gym.data.tables.survey import Episodes, find_episodes, policy_numbers
from ope_gym.files import MALFORMED, PathLike, import_arrow
from ope_gym.policies import Policy, UnknownPolicy, acting_log_probs, acts_unknown


@dataclass(frozen=True, eq=False)
class TableSection:
    """Episodes of a table, in blocks: the episodes that begin in one row group.

    Args:
        rows: Where the rows are.
        plan: The columns.
        policies: Policies by number.
        episodes: The episodes.
        blocks: (B + 1,) among these, the first episode of each block, and their number.
        first: Number of the first episode in the whole table.
    """

    rows: Rows
    plan: Plan
    policies: tuple[Policy, ...]
    episodes: Episodes
    blocks: Ints
    first: int = 0

    def __len__(self) -> int:
        """Return the number of blocks; each has an episode."""
        return len(self.blocks) - 1

    @property
    def counts(self) -> Ints:
        """(B,) episodes of each block."""
        return np.diff(self.blocks)

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
    def horizon(self) -> int | None:
        """The time limit, None if there is none."""
        return self.plan.horizon

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Which policy acts when, where policies change inside episodes."""
        return tuple(self.plan.schedules)

    def part(self, first: int, stop: int) -> TableSection:
        """Return blocks first:stop, to be read elsewhere."""
        blocks = self.blocks[first : stop + 1]
        begin, end = int(blocks[0]), int(blocks[-1])
        episodes = self.episodes.part(begin, end)
        return dataclasses.replace(
            self, episodes=episodes, blocks=blocks - begin, first=self.first + begin
        )

    def chunks(self, steps: int | None = None) -> Iterator[Chunk]:
        """Yield the episodes, about `steps` steps at a time; None yields all of them at once.

        The offset of a chunk is its first row in the table.
        """
        starts = self.episodes.starts
        row, done = int(starts[0]), 0
        waiting: list[Any] = []
        for table in self.rows.read(self.plan.values, row, int(starts[-1]), steps):
            waiting.append(table)
            row += len(table)
            ended = int(np.searchsorted(starts, row, side="right")) - 1  # episodes read whole
            size = int(starts[ended] - starts[done])
            if row < starts[-1] and (steps is None or size < steps):
                continue
            joined = import_arrow().concat_tables(waiting)
            yield self._chunk(done, ended, joined.slice(0, size))
            waiting, done = [joined.slice(size)], ended
        if row != starts[-1]:
            raise ValueError(f"{self.name} has fewer rows than it had when it was opened")

    def place(self, row: int) -> str:
        """Name a row in messages."""
        return self.rows.place(row)

    def damaged(self, offset: int, error: Exception) -> Exception:
        """Return the error for contents that cannot be; most say where already."""
        if isinstance(error, ValueError | TypeError):
            return error
        return ValueError(f"{self.name} cannot be read as a table of steps: {error}")

    def _chunk(self, first: int, stop: int, table: Any) -> Chunk:
        """Return episodes first:stop, not checked yet."""
        top = int(self.episodes.starts[first])
        try:
            columns = self._columns(self.episodes.part(first, stop), table)
        except MALFORMED as error:
            raise self.damaged(top, error) from error
        return Chunk(top, self.first + first, columns)

    def _columns(self, episodes: Episodes, table: Any) -> Columns:
        plan, top = self.plan, int(episodes.starts[0])

        def place(row: int) -> str:
            return self.place(top + row)

        ids = policy_numbers(table, plan, len(self.policies), place)
        seen, chosen = (
            cells.batch(table, spec, space, place, finite=finite)
            for spec, space, finite in (
                (plan.observation, plan.observation_space, plan.finite),
                (plan.action, plan.action_space, True),
            )
        )
        by_episode = episodes._asdict()
        offsets = by_episode.pop("starts") - top
        del by_episode["first_policies"]
        return Columns(
            observations=seen,
            actions=chosen,
            rewards=cells.floats(table[plan.reward], plan.reward, place),
            log_probs=self._log_probs(table, ids, seen, chosen, place),
            policy_ids=ids,
            offsets=offsets,
            **by_episode,
            schedules=self.schedules,
            policies=self.policies,
            observation_space=plan.observation_space,
            action_space=plan.action_space,
            horizon=plan.horizon,
        )

    def _log_probs(
        self, table: Any, ids: NDArray[np.int32], seen: Tree, chosen: Tree, place: cells.Place
    ) -> NDArray[np.float64]:
        """Return recorded log-probabilities, or those that known policies give."""
        name = self.plan.log_prob
        if name is not None:
            logged = cells.floats(table[name], name, place, finite=self.plan.finite)
            discrete = spaces.is_discrete(self.action_space)
            if discrete is None:
                discrete = all(leaf.dtype.kind in "iub" for leaf in batches.leaves(chosen))
            if discrete:
                cells.refuse(
                    logged > LOG_PROB_TOLERANCE,
                    name,
                    place,
                    lambda row: (
                        f"is {logged[row]:g}, above 0, but these are natural logarithms of "
                        "probabilities; if it holds probabilities, take their logarithms"
                    ),
                )
            return logged
        unknown = acts_unknown(self.policies, ids)
        if unknown is None:
            return acting_log_probs(self.policies, ids, seen, chosen)
        log_probs = np.full(len(ids), np.nan)
        if len(known := np.flatnonzero(~unknown)):
            trees = (batches.take(tree, known) for tree in (seen, chosen))
            log_probs[known] = acting_log_probs(self.policies, ids[known], *trees)
        return log_probs


def open_frame(table: Any, layout: Layout) -> TableSection:
    """List the episodes of a table in memory."""
    return _open(rows_in_memory(cells.to_table(table)), layout)


def open_tables(paths: Sequence[PathLike | SeenFile], layout: Layout) -> list[TableSection]:
    """List the episodes of Parquet and CSV files and of folders of them.

    A file of ours is a section, with its own policies. Files of others that follow each other are
    one table: episodes may go on in the next file.
    """
    tables: list[list[Rows]] = []
    for rows in map(rows_of, table_files(paths)):
        if tables and rows.header is None and tables[-1][0].header is None:
            tables[-1].append(rows)
        else:
            tables.append([rows])
    return [_open(join_rows(parts), layout) for parts in tables]


def _open(rows: Rows, layout: Layout) -> TableSection:
    header = None if rows.header is None else header_from_json(rows.header, rows.name)
    plan = make_plan(layout, rows.names, header)
    rows.check_alike([*plan.structure, *plan.values])
    episodes = find_episodes(rows, plan)
    policies = plan.policies
    if plan.grows:
        policies = tuple(UnknownPolicy(str(label)) for label in plan.labels or ())
    check_schedules(plan.schedules, len(policies))
    plan = dataclasses.replace(plan, policies=(), grows=False)  # the section has them
    groups = np.searchsorted(rows.groups, episodes.starts[:-1], side="right")
    firsts = np.unique(groups, return_index=True)[1]
    blocks = np.append(firsts, len(groups)) if len(groups) else np.zeros(1, np.int64)
    return TableSection(rows, plan, policies, episodes, blocks)
