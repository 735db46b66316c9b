"""The open episode of a single environment, and the finished ones that wait behind it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, SupportsFloat

import numpy as np
from numpy import ndarray

from ope_gym.batches import Tree
from ope_gym.data import encoding, spaces
from ope_gym.files import MALFORMED
from wrappers.recording.finished import Finished, Gathered
from wrappers.recording.session import Session, Settings

# Finished episodes go to the buffer together after so many steps: then the work for each of these
# batches takes no time that one could measure, and a batch of images little memory.
_WAITING_STEPS = 1024


@dataclass(slots=True)
class _Episode:
    """An episode, step by step; while it is open, it has one more observation.

    Args:
        start: The clock at which it begins.
        number: Its number, in the order of start.
        held_out: Whether the learner must not train on it.
    """

    start: int
    number: int
    held_out: bool = False
    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # that the loop gave, NaN for none
    terminated: bool = False
    truncated: bool = False


class SingleSession(Session):
    """Keeps the open episode of a single env."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._episode = _Episode(0, 0)
        self._waiting_steps = 0

    @property
    def clock(self) -> int:
        """Number of steps so far."""
        return self._episode.start + len(self._episode.rewards)

    @property
    def mid_episode(self) -> bool:
        """Whether the open episode has a step."""
        return len(self._episode.rewards) > 0

    @property
    def held_out(self) -> bool:
        """Whether the current episode (after its end, the last) is."""
        return self._episode.held_out

    def begin(self, observation: Any) -> None:
        """Begin an episode with its first observation."""
        number = self._episode.number
        held_out = self.settings.held_out > 0 and bool(self.is_held_out(number))
        self._episode = _Episode(self.clock, number, held_out, [keep(observation)])

    def skip_step(self) -> None:
        """Count a step that is not recorded."""
        self._episode.start += 1

    def advance(
        self,
        action: Any,
        observation: Any,
        reward: SupportsFloat,
        log_prob: SupportsFloat | None,
    ) -> None:
        """Store a step, and what the policy acts on next."""
        episode = self._episode
        episode.observations.append(keep(observation))
        episode.actions.append(action)
        episode.log_probs.append(math.nan if log_prob is None else float(log_prob))
        episode.rewards.append(float(reward))

    def finish(self, terminated: bool, truncated: bool) -> None:
        """End the open episode; hand it over at once where an error or a crash cannot wait."""
        episode = self._episode
        episode.observations.pop()  # no action follows the last one
        episode.terminated, episode.truncated = terminated, truncated
        waiting = self._ended or self._kept
        self._waiting_steps = len(episode.rewards) + (self._waiting_steps if waiting else 0)
        next_one = _Episode(self.clock, episode.number + 1, episode.held_out)
        # no call in between: an interrupt cannot leave half of it
        self._ended += (episode,)
        self._episode = next_one
        audited = self.settings.audit and not all(map(math.isnan, episode.log_probs))
        if audited or self._waiting_steps >= _WAITING_STEPS or not self._can_wait():
            self.hand_over()

    def drop(self, *, warn: bool) -> None:
        """Forget the open episode."""
        clock, steps, number = self.clock, len(self._episode.rewards), self._episode.number
        # an episode without a step has not begun
        self._episode = _Episode(clock, number + (steps > 0), self._episode.held_out)
        if steps:
            self.count_dropped(1, steps, warn=warn)

    def _steps(self, ended: _Episode) -> int:
        return len(ended.rewards)

    def _gather(self, ended: list[_Episode]) -> Gathered:
        settings, joined = self.settings, ended[0] if len(ended) == 1 else _Episode(0, 0)
        for episode in ended if len(ended) > 1 else ():
            joined.observations += episode.observations
            joined.actions += episode.actions
            joined.rewards += episode.rewards
            joined.log_probs += episode.log_probs
        facts = [
            (0, e.start, len(e.rewards), e.terminated, e.truncated, e.held_out, e.number)
            for e in ended
        ]
        steps = (
            spaces.stack(settings.observation_space, joined.observations),
            spaces.stack(settings.action_space, joined.actions),
            np.array(joined.rewards),
            np.array(joined.log_probs),
        )
        return Gathered(steps, np.array(facts, dtype=np.int64).T)

    def _columns(self, gathered: Gathered) -> Finished:
        observations, actions, rewards, log_probs = gathered.steps
        facts = gathered.facts
        return Finished(observations, actions, rewards, log_probs, facts, vector=False)

    def _packed(self, steps: Tree) -> tuple[str, bytes] | None:
        named = SimpleNamespace(**dict(zip(encoding.STORED, steps, strict=True)))
        try:
            return encoding.encode(named, described=self.settings)
        except MALFORMED:
            return None


_CONSTANTS = frozenset([int, float, bool, str, *(np.dtype(x).type for x in "?bhilqBHILQefd")])


def keep(value: Any) -> Any:
    """Return a copy that neither the environment nor the loop can change."""
    kind = value.__class__
    if kind in _CONSTANTS:
        return value
    if kind is ndarray:
        return value.copy()
    if kind is tuple:
        return tuple(map(keep, value))
    if kind is dict:
        return {key: keep(part) for key, part in value.items()}
    return copy.deepcopy(value)
