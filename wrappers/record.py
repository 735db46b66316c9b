"""Recording a single environment."""

from __future__ import annotations

import os
from typing import Any, SupportsFloat

import gymnasium as gym
from gymnasium.error import ResetNeeded

from ope_gym.arguments import instance, path_of
from ope_gym.files import PathLike
from wrappers.recording.normalisers import warn_of_normalisers
from wrappers.recording.recorder import Recorder
from wrappers.recording.session import Settings
from wrappers.recording.single import SingleSession, keep


class RecordTrajectories(
    Recorder, gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs
):
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
        held_out: Share of the episodes that the learner must not train on: the property `held_out`
            says whether the current one is held out. Episode i, counted from 0 in the order of the
            starts, is held out if ⌊(i + 1)·share⌋ > ⌊i·share⌋.
        path: A file to which finished episodes are appended as they end. A process that is killed
            loses only the open episode; `Trajectories.load` reads the rest.
        append: Whether to continue an existing file. By default it is continued with a warning,
            as Gymnasium's RecordVideo warns of an existing folder; nothing in it is overwritten.
            True continues it without a warning, and False raises FileExistsError.
        audit: Whether to compare log-probabilities given to `step` with the policy's own.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
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
                f"RecordTrajectories(gym.make({env!r}))"
            )
        if isinstance(env, gym.vector.VectorEnv):
            raise TypeError(f"env is {env}: use wrappers.vector.RecordTrajectories for vector envs")
        instance("env", env, gym.Env, "give an environment, such as gym.make('CartPole-v1')")
        warn_of_normalisers(env)
        horizon = None if env.spec is None else env.spec.max_episode_steps
        self._session: SingleSession = SingleSession(
            Settings(
                env.observation_space, env.action_space, horizon, held_out, path, audit, append
            )
        )
        self._over = True  # only a reset may come next
        self._complete = False  # whether all steps of the open episode are here
        self._recording = False  # complete, and the policy is known: the next step is recorded
        gym.Wrapper.__init__(self, env)

    @property
    def held_out(self) -> bool:
        """Whether the current episode (after its end, the last) is held out from the learner."""
        return self._session.held_out

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode is dropped."""
        self._complete = self._recording = False
        self._session.drop(warn=True)
        self._over = True
        result = self.env.reset(seed=seed, options=options)
        self._session.begin(result[0])
        self._over, self._complete = False, True
        self._recording = self._session.policy_id is not None
        return result

    def step(
        self, action: Any, log_prob: SupportsFloat | None = None
    ) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record it.

        Args:
            action: The action.
            log_prob: Natural log of the probability (density) with which it was chosen. Without
                it the policy computes it when the episode has ended.
        """
        if not self._recording:
            return self._step_unrecorded(action, log_prob)
        try:
            chosen = keep(action)  # now, because the environment may write to it
            result = self.env.step(action)
            self._session.advance(chosen, result[0], result[1], log_prob)
        except BaseException:
            self.abandon()  # it is not known whether the environment has moved
            raise
        terminated, truncated = result[2], result[3]
        if terminated or truncated:
            self._over = True
            self._complete = self._recording = False
            self._session.finish(bool(terminated), bool(truncated))
        return result

    def _step_unrecorded(
        self, action: Any, log_prob: SupportsFloat | None
    ) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        self._session.require_policy()
        if self._complete:  # `follow` was called after the reset
            self._recording = True
            return self.step(action, log_prob)
        if self._over:
            raise ResetNeeded(
                "step after the end of an episode, or before the first: call reset first"
            )
        result = self.env.step(action)
        self._session.skip_step()
        self._over = bool(result[2] or result[3])
        return result

    def abandon(self) -> None:
        """Drop the open episode, without a warning; its further steps are not recorded."""
        self._complete = self._recording = False
        self._session.drop(warn=False)

    def close(self) -> None:
        """Close the environment and the file; may be called again."""
        self.abandon()
        try:
            self._session.close()
        finally:
            super().close()
