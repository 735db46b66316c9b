"""Record a vector environment and value its policy from the same steps."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray

from ope_gym.online import FreeEvaluation
from ope_gym.policies import Policy
from wrappers.free import VectorSteps
from wrappers.vector import RecordTrajectories

__all__ = ["FreeRecorder"]

_WAITING = 256  # vector steps that are handed over together: observations may be large


class FreeRecorder(RecordTrajectories):
    """A recorder whose held-out episodes, or all if none are, also go to a free evaluation.

    Args:
        env: The vector environment.
        free: The evaluation, which follows the policies that the recorder follows.
        recording: Further arguments of `RecordTrajectories`.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, NDArray[Any]],
        free: FreeEvaluation,
        **recording: Any,
    ) -> None:
        super().__init__(env, **recording)
        self._free, self._steps = free, VectorSteps(env)
        self._withheld = bool(recording.get("held_out"))

    def follow(self, policy: Policy) -> int:
        """See `Recorder.follow`."""
        self._hand_over()
        self._free.follow(policy)
        return super().follow(policy)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See `RecordTrajectories.reset`."""
        observations, infos = super().reset(seed=seed, options=options)
        self._steps.restart(observations, (options or {}).get("reset_mask"))
        return observations, infos

    def step(self, actions: Any, log_prob: ArrayLike | None = None) -> Any:
        """See `RecordTrajectories.step`."""
        learnt = ~self.held_out if self._withheld else None
        result = super().step(actions, log_prob)
        self._steps.step(actions, *result, skip=learnt)
        if len(self._steps) >= _WAITING:
            self._hand_over()
        return result

    def _hand_over(self) -> None:
        if len(self._steps):
            self._free.add(**self._steps.take())
