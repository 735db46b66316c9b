"""Recording a vector environment, in the process that steps it."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import ArrayLike, NDArray

from ope_gym.arguments import path_of
from ope_gym.files import PathLike
from ope_gym.policies import Policy
from wrappers.recording.autoreset import autoreset_of
from wrappers.recording.batched import BatchedSession
from wrappers.recording.normalisers import warn_of_normalisers
from wrappers.recording.recorder import Recorder
from wrappers.recording.session import Settings

if TYPE_CHECKING:
    _Wrapper: TypeAlias = VectorWrapper[Any, Any, Any, Any, NDArray[Any]]
else:  # not generic before Gymnasium 1.4
    _Wrapper = VectorWrapper


class RecordTrajectories(Recorder, _Wrapper, gym.utils.RecordConstructorArgs):
    """Records the episodes of all sub-envs, with the probabilities of their actions.

    The twin of `wrappers.RecordTrajectories`, for every autoreset mode. Finished episodes go to the
    buffer many at a time, at the latest when it is read; errors in them are raised then.

    Evaluate `settled()`, not `buffer`, while episodes are under way.

    >>> from ope_gym.policies import Uniform
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
        held_out: Share of the episodes that the learner must not train on; episodes are numbered by
            their start, and by sub-env where several start at once.
        path: A file to which finished episodes are appended as they end.
        append: Whether to continue an existing file; by default it is, with a warning.
        audit: Whether to compare log-probabilities given to `step` with the policy's own.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, NDArray[Any]],
        *,
        held_out: float = 0.0,
        path: PathLike | None = None,
        append: bool | None = None,
        audit: bool = True,
    ) -> None:
        path = None if path is None else os.fspath(path_of("path", path))
        gym.utils.RecordConstructorArgs.__init__(
            self, held_out=held_out, path=path, append=append, audit=audit
        )
        if isinstance(env, str):
            raise TypeError(
                f"env is {env!r}, the name of an environment: give the environment itself, "
                f"RecordTrajectories(gym.make_vec({env!r}, num_envs=8))"
            )
        if not isinstance(env, VectorEnv):
            raise TypeError(f"env is {env}: use wrappers.RecordTrajectories for a single env")
        autoreset = autoreset_of(env)
        warn_of_normalisers(env)
        seen, chosen = env.single_observation_space, env.single_action_space
        self._session: BatchedSession = BatchedSession(
            Settings(seen, chosen, _time_limit(env), held_out, path, audit, append),
            env.num_envs,
            autoreset,
        )
        self._untrainable = bytearray()  # truth values, num_envs for each step since `follow`
        VectorWrapper.__init__(self, env)  # last: an object that has an env closes it when deleted

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(num_envs,) whether the current episodes are held out from the learner.

        Ask before `step`: after it, in the same-step mode, the next episode may be the current one.
        """
        return self._session.held_out.copy()

    @property
    def finished_episodes(self) -> int:
        """Number of recorded episodes that have ended."""
        return self._session.finished_episodes

    def follow(self, policy: Policy) -> int:
        """See `Recorder.follow`; `trainable` counts its rows from here."""
        self._untrainable = bytearray()
        return super().follow(policy)

    def trainable(self) -> NDArray[np.bool_]:
        """Return (steps, num_envs) which rows since the last `follow` the learner may train on.

        Left out are held-out episodes and, in the next-step mode, rows that only reset a sub-env.
        """
        return ~np.frombuffer(self._untrainable, dtype=bool).reshape(-1, self.num_envs)

    def limit(self, episodes: ArrayLike | None) -> None:
        """Record only a given number of the episodes that begin from now on.

        Args:
            episodes: (num_envs,) how many of each sub-env; None for all.
        """
        quota = None if episodes is None else np.array(episodes, dtype=np.int64)
        if quota is not None and quota.shape != (self.num_envs,):
            raise ValueError(f"episodes has shape {quota.shape}, expected ({self.num_envs},)")
        self._session.quota = quota

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
            self._session.drop(mask, warn=True)
            self._session.restart(observations, mask)
        except BaseException:
            self._session.lose_track()
            raise
        return observations, infos

    def step(
        self, actions: Any, log_prob: ArrayLike | None = None
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step the sub-envs and record it.

        Args:
            actions: One action for each sub-env.
            log_prob: (num_envs,) natural logs of the probabilities (densities) with which they were
                chosen; any number where a sub-env is only reset. Without them the policy computes
                them later.
        """
        session = self._session
        session.require_policy()
        if session.clock == 0 or session.autoreset.by_hand:
            self._require_reset()
        untrainable = session.untrainable().tobytes()  # now: the step may begin the next episodes
        session.act(actions, log_prob)
        try:
            result = self.env.step(actions)
            observations, rewards, terminations, truncations, _ = result
            session.advance(observations, rewards, terminations, truncations)
        except BaseException:
            session.lose_track()
            raise
        self._untrainable += untrainable
        session.hand_over_if_due()
        return result

    def abandon(self) -> None:
        """Drop all open episodes, without a warning; their further steps are not recorded."""
        self._session.drop(warn=False)

    def close(self, **kwargs: Any) -> None:
        """Close the environment and the file; may be called again."""
        try:
            before = self.dropped_episodes
            self.abandon()
            self._warn_of_unfinished(self.dropped_episodes - before)
            self._session.close()
        finally:
            self.env.close(**kwargs)

    def _warn_of_unfinished(self, episodes: int) -> None:
        """Warn if the end of the recording cuts many episodes off, which are the long ones."""
        if episodes >= 10 and episodes > 0.1 * len(self.buffer):
            warnings.warn(
                f"closed with {episodes} unfinished episodes beside {len(self.buffer)} finished "
                "ones: long episodes are missing, so the recorded returns are biased. Play a fixed "
                "number of episodes to their end (wrappers.collect does)",
                UserWarning,
                stacklevel=3,
            )

    def _require_reset(self) -> None:
        ended = self._session.ended
        if ended.any():
            raise ResetNeeded(
                f"step, but sub-envs {np.flatnonzero(ended).tolist()} have ended or were never "
                "reset: call reset first (with options={'reset_mask': ...} for some of them)"
            )

    def _require_masks(self) -> None:
        """Raise if the env may ignore a reset mask: Gymnasium defines it for the disabled mode."""
        known = isinstance(self.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        if not known and not self._session.autoreset.by_hand:
            raise ValueError(
                f"options['reset_mask']: it is not known whether {self.unwrapped} with "
                f"autoreset_mode={self.metadata['autoreset_mode']} resets only these sub-envs; "
                "reset all of them"
            )


def _time_limit(env: VectorEnv[Any, Any, Any]) -> int | None:
    """Return the time limit of the sub-envs; None if there is none or it is not known."""
    base = env.unwrapped
    if env.spec is not None:
        limit = env.spec.kwargs.get("max_episode_steps", env.spec.max_episode_steps)
    elif isinstance(base, SyncVectorEnv):  # not made by make_vec, but its sub-envs are at hand
        limits = {None if e.spec is None else e.spec.max_episode_steps for e in base.envs}
        limit = limits.pop() if len(limits) == 1 else None
    else:
        limit = None
    return None if limit == -1 else limit
