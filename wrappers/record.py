"""Recording a single environment."""

from __future__ import annotations

import copy
import os
from typing import Any, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy import ndarray

from ope_gym.batches import Tree
from ope_gym.data import blocks, spaces
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.closed_form import Policy
from wrappers.recording.finished import Finished
from wrappers.recording.normalisers import warn_of_normalisers
from wrappers.recording.session import Recorder

_WAITING_STEPS = 4096  # steps of finished episodes that go to the buffer together, unless
_WAITING_BYTES = 2**24  # their observations are large
_SCALARS = frozenset([int, float, bool, str, np.int64, np.int32, np.float64, np.float32, np.bool_])


class RecordTrajectories(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Records the episodes of an environment, with the probabilities of their actions.

    Everything the environment gives is passed on as it is. Put the wrapper outermost: it records
    what the policy sees and chooses.

    >>> from ope_gym.policies.closed_form import Uniform
    >>> env = RecordTrajectories(gym.make("CartPole-v1", max_episode_steps=5))
    >>> env.follow(Uniform(2))
    0
    >>> _ = env.reset(seed=1)
    >>> while not any(env.step(1)[2:4]):
    ...     pass
    >>> env.buffer
    TrajectoryBuffer(1 episode, 5 steps, 1 policy, 0 held out, mean return 5, length 5)

    Args:
        env: The environment.
        held_out: Share of the episodes that the learner leaves alone: ask `held_out` whether the
            current one is. Number i, in the order of their start, is one of them if
            ⌊(i + 1)·share⌋ > ⌊i·share⌋.
        path: A file to which finished episodes go as they end. A process that is killed loses the
            open episode, no more; `Trajectories.load` reads the rest. A file that exists already
            is continued.
        audit: Whether to compare log-probabilities given to `step` with the policy's own.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        held_out: float = 0.0,
        path: blocks.PathLike | None = None,
        audit: bool = True,
    ) -> None:
        path = None if path is None else os.fspath(path)
        gym.utils.RecordConstructorArgs.__init__(self, held_out=held_out, path=path, audit=audit)
        if isinstance(env, gym.vector.VectorEnv):
            raise TypeError(f"env is {env}: use wrappers.vector.RecordTrajectories for vector envs")
        warn_of_normalisers(env)
        gym.Wrapper.__init__(self, env)
        self._recorder = _EpisodeRecorder(
            env.observation_space,
            env.action_space,
            None if env.spec is None else env.spec.max_episode_steps,
            held_out=held_out,
            path=path,
            audit=audit,
        )
        self._number = 0  # of the current episode, in the order of start
        self._held_out = False
        self._start = 0  # clock at which it began
        self._over = True  # only reset may come next
        self._intact = False  # whether all its steps are here
        self._recording = False  # both, and the policy is known: the next step is recorded

    @property
    def buffer(self) -> TrajectoryBuffer:
        """The finished episodes."""
        return self._recorder.buffer

    @property
    def held_out(self) -> bool:
        """Whether the learner is to leave the current episode (after its end, the last) alone."""
        return self._held_out

    @property
    def clock(self) -> int:
        """Number of steps so far."""
        return self._start + self._recorder.open_steps

    @property
    def dropped_episodes(self) -> int:
        """Number of episodes that were begun and not recorded."""
        return self._recorder.dropped_episodes

    @property
    def dropped_steps(self) -> int:
        """Number of steps of these episodes."""
        return self._recorder.dropped_steps

    def follow(self, policy: Policy) -> int:
        """From now on this policy acts; returns its number. May be called at any time.

        Args:
            policy: A frozen snapshot: what it says about a state must not change later.
        """
        mid_episode = self._recorder.open_steps > 0
        k = self._recorder.follow(policy, self.clock, mid_episode=mid_episode)
        self._recording = self._intact
        return k

    def settled(self, horizon: int | None = None) -> Trajectories:
        """The finished episodes that were begun at least `horizon` steps ago.

        Where rollouts end after a number of steps, `buffer` lacks the episode that is still under
        way, more often a long one. Where they end with an episode, `buffer` is complete.

        Args:
            horizon: The longest possible episode; None for the time limit of the environment.
        """
        return self._recorder.settled(self.clock, horizon)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode is dropped."""
        if self._intact:
            self._drop(warn=True)
        self._over = True
        recorder = self._recorder
        result = self.env.reset(seed=seed, options=options)
        recorder.start(result[0])
        self._held_out = recorder.share > 0 and bool(recorder.is_held_out(self._number))
        self._over, self._intact = False, True
        self._recording = recorder.policy_id is not None
        return result

    def step(
        self, action: Any, log_prob: SupportsFloat | None = None
    ) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record it.

        Args:
            action: The action.
            log_prob: Natural log of the probability (density) with which it was chosen. Without
                it the policy is asked when the episode has ended.
        """
        if not self._recording:
            return self._step_unrecorded(action)
        try:
            chosen = action if action.__class__ in _SCALARS else _kept(action)
            result = self.env.step(action)
            observation, reward, terminated, truncated, _ = result
            over = terminated or truncated
            observations, actions, rewards, given, dtype, shape = self._recorder.rows
            if log_prob is not None:
                given.append((len(rewards), float(log_prob)))
            if not over:  # nobody acts on the last one
                observations.append(
                    observation.tobytes()
                    if observation.__class__ is ndarray
                    and observation.dtype is dtype
                    and (shape is None or observation.shape == shape)
                    else self._recorder.odd(observation)
                )
            actions.append(chosen)
            rewards.append(reward if reward.__class__ is float else float(reward))
        except BaseException:
            self._drop(warn=False)  # whether the environment has moved is not known
            raise
        if over:
            self._finish(bool(terminated), bool(truncated))
        return result

    def _step_unrecorded(
        self, action: Any
    ) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        self._recorder.require_policy()
        if self._over:
            raise ResetNeeded(
                "step after the end of an episode, or before the first: call reset first"
            )
        result = self.env.step(action)
        self._start += 1
        self._over = bool(result[2] or result[3])
        return result

    def abandon(self) -> None:
        """Drop the open episode, without a warning; its further steps are not recorded."""
        self._drop(warn=False)

    def close(self) -> None:
        """Close the environment and the file; may be called again."""
        self._drop(warn=False)
        try:
            self._recorder.close()
        finally:
            super().close()

    def _finish(self, terminated: bool, truncated: bool) -> None:
        start, number, n = self._start, self._number, self._recorder.open_steps
        self._start, self._number = start + n, number + 1
        self._intact = self._recording = False
        self._over = True
        self._recorder.finish((n, terminated, truncated, self._held_out, start, number))

    def _drop(self, *, warn: bool) -> None:
        n = self._recorder.open_steps
        self._start += n
        self._number += n > 0  # an episode without a step has not begun
        self._intact = self._recording = False
        self._recorder.forget_open()
        if n:
            self._recorder.count_dropped(1, n, warn=warn)


# Observations, actions, rewards and (row, given log-probability) of the episodes that wait and,
# behind them, of the open one, which has one more observation; dtype of observations, and their
# shape, but None if it has one axis. A plain tuple: it is unpacked at every step.
_Rows: TypeAlias = tuple[
    list[Any],
    list[Any],
    list[float],
    list[tuple[int, float]],
    "np.dtype[Any] | None",
    "tuple[int, ...] | None",
]


class _EpisodeRecorder(Recorder):
    """The rows of a single env.

    An observation that is an array like the very first one is kept as bytes, which is half the
    work of an array. Bytes of vectors have their length looked at later.
    """

    _all_alike = True  # whether all observations are bytes
    _enough = _WAITING_STEPS
    _first = 0  # row at which the open episode begins

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        horizon: int | None,
        *,
        held_out: float,
        path: blocks.PathLike | None,
        audit: bool,
    ) -> None:
        super().__init__(
            observation_space, action_space, horizon, held_out=held_out, path=path, audit=audit
        )
        self.rows: _Rows = ([], [], [], [], None, None)
        self._shape: tuple[int, ...] = ()  # of the very first observation
        self._n_bytes = 0

    @property
    def open_steps(self) -> int:
        """How many steps the open episode has."""
        return len(self.rows[2]) - self._first

    def start(self, observation: Any) -> None:
        """The first observation of an episode."""
        observations, _, _, _, dtype, _ = self.rows
        is_array = observation.__class__ is ndarray
        if is_array and dtype is None and observation.dtype != object:
            dtype, self._shape = observation.dtype, observation.shape
            self._n_bytes = observation.nbytes
            self._enough = min(_WAITING_STEPS, _WAITING_BYTES // max(1, self._n_bytes))
            shape = None if observation.ndim == 1 else self._shape
            self.rows = (*self.rows[:4], dtype, shape)
        alike = is_array and observation.dtype is dtype and observation.shape == self._shape
        observations.append(observation.tobytes() if alike else self.odd(observation))

    def odd(self, observation: Any) -> Any:
        """A copy of an observation that is not an array like the first one."""
        self._all_alike = False
        return _kept(observation)

    def forget_open(self) -> None:
        """Remove the steps of the open episode."""
        first, given = self._first, self.rows[3]
        for column in self.rows[:3]:
            del column[first:]
        while given and given[-1][0] >= first:
            given.pop()

    def finish(self, labels: tuple[int, bool, bool, bool, int, int]) -> None:
        """The open episode has ended.

        A mistake in given log-probabilities, or a crash, cannot wait.

        Args:
            labels: Length, terminated, truncated, held out, clock at the start, number.
        """
        self._waiting.append((self._first, labels))
        self._first += labels[0]
        at_once = self.path is not None or (self.audit and self.rows[3])
        if at_once or self._first >= self._enough:
            self.drain()

    def _forget(self) -> None:
        n = self._first
        observations, actions, rewards, given, dtype, shape = self.rows
        given = [(row - n, value) for row, value in given if row >= n]
        left: _Rows = (observations[n:], actions[n:], rewards[n:], given, dtype, shape)
        self._all_alike = self._all_alike or not left[0]
        # no call in between: an interrupt cannot leave half of it
        self._waiting, self.rows, self._first = [], left, 0

    def _size(self, batch: list[Any]) -> tuple[int, int]:
        return len(batch), sum(labels[0] for _, labels in batch)

    def _columns(self, batch: list[Any]) -> Finished:
        table = np.array([labels for _, labels in batch], dtype=np.int64)
        rows = slice(batch[0][0], batch[0][0] + int(table[:, 0].sum()))
        n = rows.stop - rows.start
        observations, actions, rewards, pairs, dtype, _ = self.rows
        log_probs, given = np.zeros(n), np.zeros(n, dtype=bool)
        for row, value in pairs:
            if rows.start <= row < rows.stop:
                log_probs[row - rows.start], given[row - rows.start] = value, True
        seen = observations[rows]
        if self._all_alike and set(map(len, seen)) == {self._n_bytes}:
            joined = np.frombuffer(bytearray().join(seen), dtype)
            batch_seen: Tree = joined.reshape(n, *self._shape)
        else:
            shape = self.rows[5] or (-1,)
            seen = [np.frombuffer(x, dtype).reshape(shape) if type(x) is bytes else x for x in seen]
            batch_seen = spaces.stack(self.buffer.observation_space, seen)
        return Finished(
            batch_seen,
            spaces.stack(self.buffer.action_space, actions[rows]),
            np.array(rewards[rows]),
            (log_probs, given) if pairs else None,
            lengths=table[:, 0],
            terminated=table[:, 1].astype(bool),
            truncated=table[:, 2].astype(bool),
            held_out=table[:, 3].astype(bool),
            start_clock=table[:, 4].copy(),
            numbers=table[:, 5],
        )


def _kept(value: Any) -> Any:
    """A copy that the environment and the loop cannot change."""
    kind = value.__class__
    if kind in _SCALARS:
        return value
    if kind is ndarray:
        return value.copy()
    if kind is tuple:
        return tuple(map(_kept, value))
    if kind is dict:
        return {key: _kept(part) for key, part in value.items()}
    return copy.deepcopy(value)
