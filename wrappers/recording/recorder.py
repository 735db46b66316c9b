"""The properties and methods that the recorders of single and of vector environments share."""

from __future__ import annotations

from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy
from wrappers.recording.session import Session


class Recorder:
    """Base class of `wrappers.RecordTrajectories` and `wrappers.vector.RecordTrajectories`."""

    _session: Session

    @property
    def buffer(self) -> TrajectoryBuffer:
        """The finished episodes."""
        return self._session.buffer

    @property
    def clock(self) -> int:
        """Number of calls of `step` so far."""
        return self._session.clock

    @property
    def dropped_episodes(self) -> int:
        """Number of episodes that were begun and not recorded."""
        return self._session.dropped_episodes

    @property
    def dropped_steps(self) -> int:
        """Number of steps of the episodes that were not recorded."""
        return self._session.dropped_steps

    def follow(self, policy: Policy) -> int:
        """Record that this policy acts from now on, and return its number; call it at any time.

        Args:
            policy: A frozen snapshot: its probabilities must not change later. Of a torch module or
                a Stable-Baselines3 model a snapshot is taken, a new one at each call.
        """
        return self._session.follow(policy)

    def settled(self, horizon: int | None = None) -> Trajectories:
        """Return the finished episodes that were begun at least `horizon` steps ago.

        In the middle of a run `buffer` lacks the episodes that are still under way, and long
        episodes are under way more often: its mean return is biased. Of the episodes begun so
        early none is under way. Where rollouts end with an episode, `buffer` is complete.

        Args:
            horizon: The longest possible episode; None for the time limit of the environment.
        """
        return self.buffer.select(episodes=self._session.settled_mask(horizon))
