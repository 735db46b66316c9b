"""Recording a single environment."""

from __future__ import annotations

import copy
import os
from itertools import chain
from typing import Any, NamedTuple, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from numpy import ndarray

from ope_gym import spaces, storage
from ope_gym.buffer import TrajectoryBuffer
from ope_gym.policies import Policy
from wrappers.finished import Finished
from wrappers.recorder import Recorder

_WAITING_STEPS = 1024  # steps of finished episodes that go to the buffer together


class RecordTrajectories(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Records the episodes of an environment, with the probabilities of their actions.

    Everything the environment gives is passed on as it is. Put the wrapper outermost: it records
    what the policy sees and chooses.

    >>> from ope_gym.policies import Uniform
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
        path: storage.PathLike | None = None,
        audit: bool = True,
    ) -> None:
        path = None if path is None else os.fspath(path)
        gym.utils.RecordConstructorArgs.__init__(self, held_out=held_out, path=path, audit=audit)
        if isinstance(env, gym.vector.VectorEnv):
            raise TypeError(f"env is {env}: use wrappers.vector.RecordTrajectories for vector envs")
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
        self._open_rows()

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
        return self._start + len(self._rewards)

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
        k = self._recorder.follow(policy, self.clock, mid_episode=bool(self._rewards))
        self._recording = self._intact
        return k

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode is dropped."""
        self._drop(warn=True)
        self._over = True
        observation, info = self.env.reset(seed=seed, options=options)
        self._observations.append(_kept(observation))
        self._held_out = bool(self._recorder.is_held_out(self._number))
        self._over, self._intact = False, True
        self._recording = self._recorder.policy_id is not None
        return observation, info

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
            chosen = action if action.__class__ is int else _kept(action)
            observation, reward, terminated, truncated, info = self.env.step(action)
            if log_prob is not None:
                self._log_probs.append((len(self._rewards), float(log_prob)))
            self._actions.append(chosen)
            self._observations.append(
                observation.copy() if observation.__class__ is ndarray else _kept(observation)
            )
            self._rewards.append(reward if reward.__class__ is float else float(reward))
        except BaseException:
            self._drop(warn=False)  # whether the environment has moved is not known
            raise
        if terminated or truncated:
            self._finish(bool(terminated), bool(truncated))
        return observation, reward, terminated, truncated, info

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

    def _open_rows(self) -> None:
        self._observations: list[Any] = []  # one more than the others while an episode is open
        self._actions: list[Any] = []
        self._rewards: list[float] = []
        self._log_probs: list[tuple[int, float]] = []  # (step, value) where given

    def _leave(self) -> None:
        """The current episode takes no further rows; one without any has not begun."""
        self._start += len(self._rewards)
        self._number += bool(self._rewards)
        self._intact = self._recording = False
        self._open_rows()

    def _drop(self, *, warn: bool) -> None:
        n = len(self._rewards)
        self._leave()
        if n:
            self._recorder.count_dropped(1, n, warn=warn)

    def _finish(self, terminated: bool, truncated: bool) -> None:
        episode = _Episode(
            self._observations,
            self._actions,
            self._rewards,
            self._log_probs,
            (terminated, truncated, self._held_out, self._start, self._number),
        )
        self._over = True
        self._leave()
        self._recorder.finish(episode)


class _Episode(NamedTuple):
    observations: list[Any]  # T + 1, the last is not used
    actions: list[Any]
    rewards: list[float]
    log_probs: list[tuple[int, float]]
    labels: tuple[bool, bool, bool, int, int]  # terminated, truncated, held out, clock, number


class _EpisodeRecorder(Recorder):
    def finish(self, episode: _Episode) -> None:
        """Take an episode; a mistake in given log-probabilities, or a crash, cannot wait."""
        self._waiting.append(episode)
        self._waiting_steps += len(episode.rewards)
        at_once = self.path is not None or (self.audit and episode.log_probs)
        if at_once or self._waiting_steps >= _WAITING_STEPS:
            self.drain()

    def _n_steps(self, batch: list[_Episode]) -> int:
        return sum(len(episode.rewards) for episode in batch)

    def _columns(self, batch: list[_Episode]) -> Finished:
        lengths = np.array([len(episode.rewards) for episode in batch])
        log_probs, given = np.zeros(lengths.sum()), np.zeros(lengths.sum(), dtype=bool)
        for first, episode in zip(np.cumsum(lengths) - lengths, batch, strict=True):
            for step, value in episode.log_probs:
                log_probs[first + step], given[first + step] = value, True
        terminated, truncated, held_out, clock, number = zip(
            *(episode.labels for episode in batch), strict=True
        )
        seen = chain.from_iterable(episode.observations[:-1] for episode in batch)
        chosen = chain.from_iterable(episode.actions for episode in batch)
        return Finished(
            spaces.stack(self.buffer.observation_space, list(seen)),
            spaces.stack(self.buffer.action_space, list(chosen)),
            np.array(list(chain.from_iterable(episode.rewards for episode in batch))),
            log_probs,
            given,
            lengths,
            np.array(terminated),
            np.array(truncated),
            np.array(held_out),
            np.array(clock),
            np.array(number),
        )


def _kept(value: Any) -> Any:
    """A copy that the environment and the loop cannot change."""
    kind = value.__class__
    if kind is ndarray:
        return value.copy()
    if kind is tuple:
        return tuple(map(_kept, value))
    if kind is dict:
        return {key: _kept(part) for key, part in value.items()}
    if kind in (int, float, bool, str) or isinstance(value, np.generic):
        return value
    return copy.deepcopy(value)
