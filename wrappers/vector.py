"""Recording a vector environment, in the process that steps it."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import ArrayLike, NDArray

from ope_gym.data import blocks
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.closed_form import Policy
from wrappers.recording.batched import VectorRecorder
from wrappers.recording.normalisers import warn_of_normalisers


class RecordTrajectories(
    VectorWrapper[Any, Any, Any, Any, NDArray[Any]], gym.utils.RecordConstructorArgs
):
    """Records the episodes of all sub-envs, with the probabilities of their actions.

    The twin of `wrappers.RecordTrajectories`, for every autoreset mode. Episodes are put together
    many at a time, at the latest when the buffer is read; errors in them are raised then.

    Evaluate `settled()`, not `buffer`, while episodes are under way.

    >>> from ope_gym.policies.closed_form import Uniform
    >>> env = RecordTrajectories(gym.make_vec("CartPole-v1", num_envs=2, max_episode_steps=5))
    >>> env.follow(Uniform(2))
    0
    >>> _ = env.reset(seed=1)
    >>> for _ in range(5):
    ...     _ = env.step(np.array([1, 1]))
    >>> env.buffer
    TrajectoryBuffer(2 episodes, 10 steps, 1 policy, 0 held out, mean return 5, length 5)

    Args:
        env: The vector environment.
        held_out: Share of the episodes that the learner leaves alone; episodes are numbered in the
            order of their start, and of the sub-envs where several start at once.
        path: A file to which finished episodes go as they end.
        audit: Whether to compare log-probabilities given to `step` with the policy's own.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, NDArray[Any]],
        *,
        held_out: float = 0.0,
        path: blocks.PathLike | None = None,
        audit: bool = True,
    ) -> None:
        path = None if path is None else os.fspath(path)
        gym.utils.RecordConstructorArgs.__init__(self, held_out=held_out, path=path, audit=audit)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"env is {env}: use wrappers.RecordTrajectories for a single env")
        self._mode = _autoreset_mode(env)
        warn_of_normalisers(env)
        self._recorder = VectorRecorder(
            env.single_observation_space,
            env.single_action_space,
            _horizon(env),
            env.num_envs,
            held_out=held_out,
            path=path,
            audit=audit,
        )
        self._ended = np.ones(env.num_envs, dtype=bool)  # sub-envs whose reset comes next
        self._astray = np.zeros(env.num_envs, dtype=bool)  # an error left them in an unknown state
        self._any_astray = False
        self._left_alone = bytearray()  # truth values, num_envs of each step since follow
        super().__init__(env)  # last: what has an env is closed when it is deleted

    @property
    def buffer(self) -> TrajectoryBuffer:
        """The finished episodes."""
        return self._recorder.buffer

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(num_envs,) whether the learner is to leave the current episode alone.

        Ask before `step`: after it, in the same-step mode, the next episode may be the current one.
        """
        return self._recorder.held_out.copy()

    @property
    def clock(self) -> int:
        """Number of calls of `step` so far."""
        return self._recorder.rows.clock

    @property
    def finished_episodes(self) -> int:
        """Number of recorded episodes that have ended."""
        return self._recorder.finished_episodes

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
        recorder = self._recorder
        self._left_alone = bytearray()
        return recorder.follow(policy, self.clock, mid_episode=bool(recorder.under_way().any()))

    def trainable(self) -> NDArray[np.bool_]:
        """(steps, num_envs) which rows the learner may train on, of all since the last `follow`.

        Not those of held-out episodes, nor those of the next-step mode in which a sub-env is reset.
        """
        return ~np.frombuffer(self._left_alone, dtype=bool).reshape(-1, self.num_envs)

    def settled(self, horizon: int | None = None) -> Trajectories:
        """The finished episodes that were begun at least `horizon` steps ago.

        In the middle of a run `buffer` lacks the episodes that are still under way, which are
        the long ones; its mean return is too low. Of those begun so early none is under way.

        Args:
            horizon: The longest possible episode; None for the time limit of the environment.
        """
        return self._recorder.settled(self.clock, horizon)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the sub-envs, those of `options["reset_mask"]` if given; open episodes are dropped.

        Args:
            seed: As the environment takes it.
            options: As the environment takes them.
        """
        mask = np.ones(self.num_envs, dtype=bool)
        if options is not None and "reset_mask" in options:
            self._require_masks()
            mask = np.array(options["reset_mask"])  # now, because the environment may take it out
        try:
            observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
            self._recorder.drop(mask, warn=True)
            self._recorder.rows.see(observations)
        except BaseException:
            self._go_astray()
            raise
        self._recorder.begin(np.flatnonzero(mask))
        self._ended &= ~mask
        self._astray &= ~mask
        self._any_astray = bool(self._astray.any())
        return observations, infos

    def step(
        self, actions: Any, log_prob: ArrayLike | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step the sub-envs and record it.

        Args:
            actions: One action for each sub-env.
            log_prob: (num_envs,) natural logs of the probabilities (densities) with which they were
                chosen; where a sub-env is only reset, anything. Without them the policy is asked.
        """
        recorder = self._recorder
        recorder.require_policy()
        if self.clock == 0 or self._mode is AutoresetMode.DISABLED:
            self._require_reset()
        only_reset = self._mode is AutoresetMode.NEXT_STEP
        left_alone = recorder.held_out | self._ended if only_reset else recorder.held_out
        flags = left_alone.tobytes()  # now, because the next episodes may begin in this step
        recorder.act(actions, log_prob)
        try:
            result = self.env.step(actions)
            observations, rewards, terminations, truncations, _ = result
            done = np.logical_or(terminations, truncations)
            recorder.advance(observations, rewards, terminations, truncations, done)
        except BaseException:
            self._go_astray()
            raise
        self._left_alone += flags
        if self._mode is not AutoresetMode.DISABLED:
            was_reset = done if self._mode is AutoresetMode.SAME_STEP else self._ended
            if self._any_astray:
                was_reset = was_reset & ~self._astray
            (envs,) = was_reset.nonzero()
            if len(envs):
                recorder.begin(envs)
        self._ended = done
        recorder.drain_if_due()
        return result

    def abandon(self) -> None:
        """Drop all open episodes, without a warning; their further steps are not recorded."""
        self._recorder.drop(warn=False)

    def limit(self, episodes: ArrayLike | None) -> None:
        """Of the episodes that begin from now on record only so many.

        Args:
            episodes: (num_envs,) how many of each sub-env; None for all.
        """
        quota = None if episodes is None else np.array(episodes, dtype=np.int64)
        if quota is not None and quota.shape != (self.num_envs,):
            raise ValueError(f"episodes has shape {quota.shape}, expected ({self.num_envs},)")
        self._recorder.quota = quota

    def close(self, **kwargs: Any) -> None:
        """Close the environment and the file; may be called again."""
        try:
            before = self._recorder.dropped_episodes
            self._recorder.drop(warn=False)
            self._recorder.warn_of_cut(self._recorder.dropped_episodes - before)
            self._recorder.close()
        finally:
            self.env.close(**kwargs)

    def _go_astray(self) -> None:
        """Which sub-envs have moved is not known: none is recorded before its next reset."""
        self._recorder.drop(warn=False)
        self._astray[:] = self._any_astray = True

    def _require_reset(self) -> None:
        if self._ended.any():
            raise ResetNeeded(
                f"step, but sub-envs {np.flatnonzero(self._ended).tolist()} have ended or were "
                "never reset: call reset first (with options={'reset_mask': ...} for some of them)"
            )

    def _require_masks(self) -> None:
        known = isinstance(self.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        if self._mode is not AutoresetMode.DISABLED and not known:
            raise ValueError(
                f"options['reset_mask']: whether {self.unwrapped} with autoreset_mode="
                f"{self._mode} resets only these sub-envs is not known; reset all of them"
            )


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    try:
        return AutoresetMode(env.metadata["autoreset_mode"])
    except (KeyError, ValueError):
        raise ValueError(
            f"env.metadata['autoreset_mode'] of {env} is "
            f"{env.metadata.get('autoreset_mode', 'missing')}: which rows are transitions depends "
            f"on it; set it to one of {[str(mode) for mode in AutoresetMode]}"
        ) from None


def _horizon(env: VectorEnv[Any, Any, Any]) -> int | None:
    """The time limit of the sub-envs."""
    base = env.unwrapped
    if env.spec is not None:
        limit = env.spec.kwargs.get("max_episode_steps", env.spec.max_episode_steps)
    elif isinstance(base, SyncVectorEnv):  # not made by make_vec, but its parts are at hand
        limits = {None if e.spec is None else e.spec.max_episode_steps for e in base.envs}
        limit = limits.pop() if len(limits) == 1 else None
    else:
        limit = None
    return None if limit == -1 else limit
