"""Who recorded the episodes of all shards: counted first, since the mixture needs all counts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import IntArray
from ope_gym.data.schedules import PolicyTable
from ope_gym.data.schema import agree, renumber
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import Trajectories
from ope_gym.inference.estimate import PartialMixture
from ope_gym.policies import UNREGISTERED, Policy, UnavailablePolicy, policy_to_arrays
from ope_gym.weights.behaviours import Behaviours
from ope_gym.weights.mixtures import group_size, interleaved


@dataclass(frozen=True)
class Described:
    """The spaces and the time limit of episodes."""

    observation_space: Space | None
    action_space: Space | None
    horizon: int | None

    def __len__(self) -> int:
        """Not 0: there are episodes, so None stands for something unknown."""
        return 1


@dataclass(frozen=True)
class Part:
    """What the first pass reads of a shard, or of a section of a file.

    Args:
        name: where it is from, for people.
        policies: of its own table.
        first_policies: (n,) who acted in each episode.
        lengths: (n,) steps of each episode.
        held_out: (n,) whether the learner never trained on the episode.
        described: spaces and horizon.
        clocked: whether policies change during episodes.
    """

    name: str
    policies: tuple[Policy, ...]
    first_policies: NDArray[np.int32]
    lengths: IntArray
    held_out: NDArray[np.bool_]
    described: Described
    clocked: bool

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class Census:
    """Who recorded how many episodes, over all parts: `update`, `finalise`.

    Args:
        held_out: count held-out episodes only.
        table: the policies of all parts, equal ones once.
        numbers: of each part, (policies of the part,) their numbers in the table.
        counts: by (policy, held out), its episodes.
        trajectories: how many.
        steps: how many.
        longest: episode.
        described: spaces and horizon of all parts.
    """

    held_out: bool = False
    table: PolicyTable = field(default_factory=PolicyTable)
    numbers: list[NDArray[np.int32]] = field(default_factory=list)
    counts: dict[tuple[int, bool], int] = field(default_factory=dict)
    trajectories: int = 0
    steps: int = 0
    longest: int = 0
    described: Described | None = None

    def update(self, part: Part) -> None:
        """Count the episodes of a part."""
        if part.clocked:
            raise ValueError(
                f"{part.name} has policies that change during episodes, which cannot be evaluated "
                "in shards: load all episodes and use ope_gym.evaluate, or let policies change "
                "between episodes"
            )
        if len(part):
            self._agree(part.described, part.name)
        numbers = np.array([self.table.add(policy) for policy in part.policies], dtype=np.int32)
        self.numbers.append(numbers)
        chosen = part.held_out if self.held_out else np.ones(len(part), dtype=bool)
        if not chosen.any():
            return
        self.trajectories += int(np.count_nonzero(chosen))
        self.steps += int(part.lengths[chosen].sum())
        self.longest = max(self.longest, int(part.lengths[chosen].max()))
        for tag in (False, True):
            counts = np.bincount(part.first_policies[chosen & (part.held_out == tag)])
            for k in np.flatnonzero(counts):
                who = int(numbers[k]), tag
                self.counts[who] = self.counts.get(who, 0) + int(counts[k])

    def finalise(self) -> Mixture:
        """The mixture of all behaviours."""
        if not self.trajectories or self.described is None:
            raise ValueError(
                "shards hold no held-out episode: use data='all' and take the result for optimistic"
                if self.held_out
                else "shards hold no episode: record at least one first"
            )
        acted = np.array(sorted({k for k, _ in self.counts}))
        counts = np.array(
            [sum(self.counts.get((int(k), tag), 0) for tag in (False, True)) for k in acted]
        )
        return Mixture(
            self.trajectories,
            self.steps,
            self.longest,
            tuple(self.table.policies),
            acted,
            counts,
            tuple(sorted(self.counts)),
            tuple(self.numbers),
            self.described,
        )

    def _agree(self, described: Described, name: str) -> None:
        try:
            agree([self.described or described, described])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self.described = self.described or described


@dataclass(frozen=True)
class Mixture:
    """The behaviours of all shards; K of them acted.

    Args:
        trajectories: n.
        steps: S.
        longest: episode.
        policies: all that are known, equal ones once.
        acted: (K,) the numbers of those that acted, rising.
        counts: (K,) their episodes.
        tags: (policy, held out) of the episodes, each once.
        numbers: of each part, (policies of the part,) their numbers among all.
        described: spaces and horizon.
        groups: (K,) of partial mixtures, None for the mixture of all.
    """

    trajectories: int
    steps: int
    longest: int
    policies: tuple[Policy, ...]
    acted: IntArray
    counts: IntArray
    tags: tuple[tuple[int, bool], ...]
    numbers: tuple[NDArray[np.int32], ...]
    described: Described
    groups: IntArray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """(K,) for people."""
        return tuple(f"policy {k}" for k in self.acted)

    def grouped(self, mixture: str | int) -> Mixture:
        """The same, parted as the option `mixture` of `ope_gym.evaluate` says."""
        size = group_size(mixture, self.counts.size)
        if size == self.counts.size:
            return self
        return dataclasses.replace(self, groups=interleaved(self.counts, size))

    @property
    def partial(self) -> PartialMixture | None:
        """Describe the groups of the behaviours; None if every weight is against all of them."""
        return None if self.groups is None else PartialMixture.of(self.groups)

    @property
    def summary(self) -> Trajectories:
        """An episode of one step for each tag: enough to tell the regime."""
        n = len(self.tags)
        zeros = np.zeros(n)
        ids = np.array([k for k, _ in self.tags], dtype=np.int32)
        tags = np.array([tag for _, tag in self.tags])
        return Trajectories(
            zeros,
            zeros,
            zeros,
            zeros,
            ids,
            np.arange(n + 1),
            ~tags,
            tags,
            tags,
            np.arange(n),
            np.full(n, -1, dtype=np.int32),
            policies=self.policies,
        )

    def renumbered(self, part: int, chunk: Trajectories) -> Trajectories:
        """A chunk of a part, with the policies of all shards."""
        changed, _ = renumber(chunk, self.numbers[part], first_schedule=0)
        return dataclasses.replace(changed, policies=self.policies)

    def behaviours(self, chunk: Trajectories) -> Behaviours:
        """Who could have produced each episode of a renumbered chunk: any of all K."""
        ids = np.searchsorted(self.acted, chunk.policy_ids[chunk.offsets[:-1]]).astype(np.int64)
        return dataclasses.replace(self._nobody, ids=ids, strata=ids)

    def counted(
        self, counts: Iterable[tuple[int, IntArray, IntArray]]
    ) -> tuple[IntArray, IntArray]:
        """Behaviours (m,), rising, and their episodes (m,).

        Args:
            counts: parts, some policies of each, and the episodes of these.
        """
        parts, policies, episodes = zip(*counts, strict=True)
        numbers = [self.numbers[part][some] for part, some in zip(parts, policies, strict=True)]
        found, place = np.unique(np.concatenate(numbers), return_inverse=True)
        total = np.zeros(found.size, dtype=np.int64)
        np.add.at(total, place, np.concatenate(episodes))
        return np.searchsorted(self.acted, found), total

    @cached_property
    def _nobody(self) -> Behaviours:
        """The behaviours, without a trajectory."""
        none = np.empty(0, dtype=np.int64)
        return Behaviours(
            ids=none,
            counts=self.counts,
            plans=tuple(((0, int(k)),) for k in self.acted),
            strata=none,
            policies=self.acted,
            available=not any(isinstance(self.policies[k], UnavailablePolicy) for k in self.acted),
        )

    @cached_property
    def marks(self) -> NDArray[np.uint64]:
        """(K,) a number that the content of each policy decides, whatever its place."""
        return np.array([_mark(self.policies[k]) for k in self.acted], dtype=np.uint64)


def _mark(policy: Policy) -> int:
    """Of its name and arrays; of a class that is not registered, of attributes that are arrays."""
    kind, arrays = policy_to_arrays(policy)
    digest = hashlib.blake2b(kind.encode(), digest_size=8)
    if kind.startswith(UNREGISTERED) and not isinstance(policy, UnavailablePolicy):
        values = getattr(policy, "__dict__", {})
        arrays = {
            name: x
            for name, x in values.items()  # numbers may count calls
            if isinstance(x, np.ndarray) and not x.dtype.hasobject
        }
    for name in sorted(arrays):
        array: NDArray[Any] = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")
