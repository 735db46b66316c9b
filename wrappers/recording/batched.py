"""The open episodes of a vector environment, and the finished ones that wait in its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wrappers.recording.autoreset import Autoreset
from wrappers.recording.file import EpisodeFile
from wrappers.recording.finished import Finished, Gathered
from wrappers.recording.rows import Rows
from wrappers.recording.session import Session, Settings

# Finished episodes go to the buffer together after so many rows, or vector steps.
_WAITING_ROWS, _WAITING_STEPS = 24_576, 256


class BatchedSession(Session):
    """Keeps the rows of N sub-envs, and which episode each of them is in.

    A loop that steps environments of its own kind calls `restart` after a reset, `follow` when the
    policy changes, and in each step `act` before and `advance` after it, then `hand_over_if_due`:

    >>> from gymnasium.spaces import Box, Discrete
    >>> from ope_gym.policies import Uniform
    >>> from wrappers.recording.autoreset import SAME_STEP
    >>> session = BatchedSession(Settings(Box(-1, 1, (1,)), Discrete(2), 2), 3, SAME_STEP)
    >>> session.restart(np.zeros((3, 1)))
    >>> session.follow(Uniform(2))
    0
    >>> for terminated in (False, True, False, True):
    ...     session.act(np.array([0, 1, 1]), None)
    ...     terminations, truncations = np.full(3, terminated), np.zeros(3, dtype=bool)
    ...     session.advance(np.zeros((3, 1)), np.ones(3), terminations, truncations)
    ...     session.hand_over_if_due()
    >>> session.buffer
    TrajectoryBuffer(6 episodes, 12 steps, 1 policy, 0 held out, mean return 2, length 2)

    Args:
        settings: The environment and the options.
        num_envs: N.
        autoreset: When sub-envs are reset.
        file: A file that other sessions write to, too, in place of one of its own.
    """

    def __init__(
        self,
        settings: Settings,
        num_envs: int,
        autoreset: Autoreset,
        file: EpisodeFile | None = None,
    ) -> None:
        super().__init__(settings, file)
        self.rows = Rows(settings.observation_space, settings.action_space, num_envs)
        self.autoreset = autoreset
        self.quota: NDArray[np.int64] | None = None  # (N,) episodes that may still begin
        self.finished_episodes = 0
        self.held_out = np.zeros(num_envs, dtype=bool)  # whether the current episode is
        self.ended = np.ones(num_envs, dtype=bool)  # the next thing to happen is a reset
        self._lost = np.zeros(num_envs, dtype=bool)  # an error left them in an unknown state
        self._open = np.zeros(num_envs, dtype=bool)  # a recorded episode is under way, or about to
        self._start = np.zeros(num_envs, dtype=np.int64)
        self._number = np.zeros(num_envs, dtype=np.int64)
        self._numbered = 0
        self._patience = min(max(_WAITING_ROWS // num_envs, 1), _WAITING_STEPS)
        self._due = self._patience

    @property
    def clock(self) -> int:
        """Number of vector steps so far."""
        return self.rows.clock

    @property
    def mid_episode(self) -> bool:
        """Whether a recorded episode has begun and not ended."""
        return bool(self._under_way().any())

    @property
    def steps(self) -> int:
        """Number of steps of all sub-envs so far, recorded or not."""
        return self.clock * len(self._open)

    def untrainable(self) -> NDArray[np.bool_]:
        """Return (N,) in which sub-envs the learner must not train on the coming step."""
        return self.held_out | self.ended if self.autoreset.skips_step else self.held_out

    def restart(self, observations: Any, mask: NDArray[np.bool_] | None = None) -> None:
        """Begin episodes after a reset of all sub-envs, or of those in the mask."""
        mask = np.ones(len(self._open), dtype=bool) if mask is None else mask
        self.rows.see(observations)
        self._begin(np.flatnonzero(mask))
        self.ended = self.ended & ~mask
        self._lost &= ~mask

    def act(self, actions: Any, log_prob: ArrayLike | None) -> None:
        """Store the actions of the coming step, and their log-probabilities if known."""
        if self.rows.full:
            self.hand_over()
            (under_way,) = self._under_way().nonzero()
            self.rows.make_room(under_way, self._start[under_way])
        self.rows.act(actions, log_prob)

    def advance(
        self,
        observations: Any,
        rewards: NDArray[Any],
        terminations: NDArray[Any],
        truncations: NDArray[Any],
    ) -> None:
        """Store the outcome of a step, close the episodes that ended and begin the next ones."""
        begun = self._about_to_begin()
        self._numbered += int(np.count_nonzero(begun))
        if self.quota is not None:
            self.quota -= begun
        self.rows.advance(rewards)
        self.rows.see(observations)
        done = np.logical_or(terminations, truncations)
        (envs,) = (done & self._open).nonzero()
        if len(envs):
            start, number = self._start[envs], self._number[envs]
            flags = terminations[envs], truncations[envs], self.held_out[envs]
            self._ended.append(np.array([envs, start, self.clock - start, *flags, number]))
            self._open[envs] = False
            self.finished_episodes += len(envs)
        restarted = self.autoreset.restarted(self.ended, done)
        self.ended = done
        if restarted is not None:
            (envs,) = (restarted & ~self._lost).nonzero()
            if len(envs):
                self._begin(envs)

    def hand_over_if_due(self) -> None:
        """Hand over the episodes that wait if there may be many; a file has them at once."""
        if not (self._ended or self._kept) or (self.clock < self._due and self._can_wait()):
            return
        self._due = self.clock + self._patience
        self.hand_over()

    def drop(self, mask: NDArray[np.bool_] | None = None, *, warn: bool) -> None:
        """Forget the open episodes of all sub-envs, or of those in the mask."""
        gone = self._open.copy() if mask is None else self._open & mask
        lengths = (self.clock - self._start)[gone]
        self._open[gone] = False
        if lengths.any():
            self.count_dropped(int((lengths > 0).sum()), int(lengths.sum()), warn=warn)

    def lose_track(self) -> None:
        """Record no sub-env before its next reset: an error hides which of them have moved."""
        self.drop(warn=False)
        self._lost[:] = True

    def _under_way(self) -> NDArray[np.bool_]:
        """Return (N,) whether a recorded episode has begun and not ended."""
        return self._open & (self._start < self.clock)

    def _about_to_begin(self) -> NDArray[np.bool_]:
        """Return (N,) whether the coming step is the first of a recorded episode."""
        return np.asarray(self._open & (self._start == self.clock))

    def _begin(self, envs: NDArray[np.int64]) -> None:
        """Begin episodes of these sub-envs with the next step, as far as the quota allows.

        They get their numbers now, but a number counts as used only with the step: a reset that
        is followed by another one begins no episode.
        """
        if self.quota is not None:
            self.held_out[envs] = False
            envs = envs[self.quota[envs] > 0]
        self._open[envs] = True
        self._start[envs] = self.clock
        (begun,) = self._about_to_begin().nonzero()  # some may have been reset before
        self._number[begun] = np.arange(self._numbered, self._numbered + len(begun))
        if self.settings.held_out:
            self.held_out[begun] = self.is_held_out(self._number[begun])

    # Those that ended are tables of facts, see `Gathered`.

    def _gather(self, ended: list[NDArray[np.int64]]) -> Gathered:
        facts = ended[0] if len(ended) == 1 else np.concatenate(ended, axis=1)
        return Gathered(self.rows.read(*facts[:3]), facts)

    def _steps(self, ended: NDArray[np.int64]) -> int:
        return int(ended[2].sum())

    def _columns(self, gathered: Gathered) -> Finished:
        return Finished(*self.rows.columns(gathered.steps), gathered.facts, vector=True)

    def _packed(self, steps: NDArray[Any]) -> tuple[str, bytes] | None:
        layout = self.rows.layout
        return None if layout is None else (layout, steps.tobytes())


def equal_shares(episodes: int, num_envs: int) -> NDArray[np.int64]:
    """Return (num_envs,) how many episodes each sub-env plays, fixed in advance.

    The first episodes to end, whichever they are, would be the short ones.

    >>> equal_shares(7, 3)
    array([3, 2, 2])
    """
    return episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
