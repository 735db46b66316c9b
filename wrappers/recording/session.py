"""Sessions, the part of both recorders that takes finished episodes to the file and the buffer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schema import join
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import PropensityMismatch, Trajectories, nothing
from ope_gym.files import PathLike
from ope_gym.policies import Policy, acting_log_probs
from ope_gym.stopping import held_back
from wrappers.recording.file import EpisodeFile, PolicyChange, check_path
from wrappers.recording.finished import Finished, Gathered

AUDIT_TOLERANCE = 1e-4  # a float32 network, asked twice, differs by less; a wrong policy by more


class LiveBuffer(TrajectoryBuffer):
    """A buffer that fetches the latest finished episodes before it is read.

    Many short episodes cost much less together than one by one, so a session lets them wait. No
    reader notices.

    Args:
        settings: Spaces and time limit.
        fetch: Appends the episodes that wait; called before each read.
    """

    def __init__(self, settings: Settings, fetch: Callable[[], None]) -> None:
        seen, chosen = settings.observation_space, settings.action_space
        super().__init__(seen, chosen, horizon=settings.horizon)
        self._fetch = fetch

    def view(self) -> Trajectories:
        """Return everything recorded so far, as read-only columns."""
        self._fetch()
        return super().view()

    def extend(self, trajectories: Trajectories | TrajectoryBuffer) -> None:
        """See `TrajectoryBuffer.extend`."""
        self._fetch()
        super().extend(trajectories)

    def clear(self) -> None:
        """See `TrajectoryBuffer.clear`."""
        try:
            self._fetch()
        finally:
            super().clear()

    def __len__(self) -> int:
        self._fetch()
        return super().__len__()

    def __getstate__(self) -> dict[str, Any]:
        """Fetch first: whoever pickles the session after it hands over, too."""
        self._fetch()
        return self.__dict__


@dataclass(frozen=True)
class Settings:
    """The environment's spaces and time limit, and the options of its recording.

    Args:
        observation_space: Space of one (sub-)env.
        action_space: Space of one (sub-)env.
        horizon: The time limit, None if there is none.
        held_out: Share of the episodes that the learner must not train on.
        path: File to which finished episodes are appended, or None.
        audit: Whether to compare given log-probabilities with those of the policy.
        append: Whether to continue a file that exists; None continues it with a warning.
    """

    observation_space: Space
    action_space: Space
    horizon: int | None
    held_out: float = 0.0
    path: PathLike | None = None
    audit: bool = True
    append: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.held_out, Real) or not 0 <= self.held_out <= 1:
            raise ValueError(f"held_out={self.held_out} must be a share of the episodes, 0 to 1")
        if self.path is not None:
            check_path(self.path, self.append, stacklevel=6)


class Session(ABC):
    """Keeps the policies and their changes, the finished episodes that wait, buffer and file.

    `SingleSession` and `BatchedSession` keep the open episodes; they add finished ones to
    `_ended`, and say what the clock is and how those that ended become columns.

    Args:
        settings: The environment and the options.
        file: A file that other sessions write to, too, in place of one of its own.
    """

    def __init__(self, settings: Settings, file: EpisodeFile | None = None) -> None:
        self.settings = settings
        self.buffer = LiveBuffer(settings, self.hand_over)
        self.policy_id: int | None = None
        self.dropped_episodes = 0
        self.dropped_steps = 0
        self._changes: list[PolicyChange] = []
        if file is None and settings.path is not None:
            file = EpisodeFile(settings.path)
        self._file = file
        self._loop = -1 if file is None else file.join(self.buffer, self._changes)
        self._ended: list[Any] = []  # finished, in the form of the session
        self._kept: list[Gathered] = []  # finished before these; in the tail of the file
        self._warned = False

    # Defined by the two kinds of session -------------------------------------------------

    @property
    @abstractmethod
    def clock(self) -> int:
        """Number of (vector) steps so far."""

    @property
    @abstractmethod
    def mid_episode(self) -> bool:
        """Whether a recorded episode has begun and not ended."""

    @abstractmethod
    def _gather(self, ended: list[Any]) -> Gathered:
        """Return the steps and facts of elements of `_ended`."""

    @abstractmethod
    def _steps(self, ended: Any) -> int:
        """Return the number of steps of an element of `_ended`."""

    @abstractmethod
    def _columns(self, gathered: Gathered) -> Finished:
        """Return the columns of gathered episodes."""

    @abstractmethod
    def _packed(self, steps: Tree) -> tuple[str, bytes] | None:
        """Return layout and bytes of gathered steps; None if they cannot be written as they are."""

    # Policies ----------------------------------------------------------------------------

    def follow(self, policy: Policy) -> int:
        """Record that this policy acts from now on, and return its number."""
        k = self.buffer.add_policy(policy)
        if k != self.policy_id:
            with held_back():
                clock, mid_episode = self.clock, self.mid_episode
                self.buffer.change_policy(k, clock, mid_episode=mid_episode)
                self._changes.append((clock, k, mid_episode))
                self.policy_id = k
        if self._file is not None:
            self._file.write()
            self.hand_over()  # while the policy goes into the file anyway
        return k

    def require_policy(self) -> None:
        """Raise if `follow` was never called."""
        if self.policy_id is None:
            raise RuntimeError(
                "step without a policy: call follow(policy) before the first step, and again "
                "whenever the policy changes, so that the probabilities of the actions are known"
            )

    def is_held_out(self, numbers: Any) -> Any:
        """Return which of the episodes with these numbers are held out; outcomes play no role."""
        share = self.settings.held_out
        return np.floor((numbers + 1) * share) > np.floor(numbers * share)

    # Unfinished episodes -----------------------------------------------------------------

    def count_dropped(self, episodes: int, steps: int, *, warn: bool) -> None:
        """Count episodes that will never be in the buffer."""
        self.dropped_episodes += episodes
        self.dropped_steps += steps
        if warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"reset before the end: {episodes} unfinished episode(s) of {steps} steps were "
                "dropped, because an episode without its end has no return; dropped_episodes and "
                "dropped_steps count further ones without a warning",
                UserWarning,
                stacklevel=4,
            )

    def settled_mask(self, horizon: int | None = None) -> NDArray[np.bool_]:
        """Return (n,) which finished episodes were begun at least `horizon` steps ago.

        All episodes begun by then have ended, so that none is missing for being long.

        Args:
            horizon: The longest possible episode; None for the time limit of the environment.
        """
        longest = self.buffer.horizon if horizon is None else horizon
        if longest is None:
            raise ValueError(
                "horizon is None and the environment names no time limit: give settled(horizon) "
                "the length of the longest possible episode"
            )
        if longest < 1:
            raise ValueError(f"horizon={longest} must be at least 1 step")
        return np.asarray(self.buffer.view().start_clock <= self.clock - longest)

    # Finished episodes -------------------------------------------------------------------

    def _can_wait(self) -> bool:
        """Make episodes that have just ended safe; return whether the buffer can wait for them."""
        if self._file is None or not self._ended:
            return True
        try:
            gathered = self._gather(self._ended)
        except Exception:  # `hand_over` says which episode is to blame
            return False
        self._kept += (gathered,)  # no call in between: no interrupt leaves half of it
        self._ended = []
        if not self._file.answers and np.isnan(self._columns(gathered).log_probs.sum()):
            return False
        packed = self._packed(gathered.steps)
        if packed is None:
            return False
        facts = gathered.facts[1:6]
        return self._file.keep(self._loop, *packed, facts, self._policies_at(facts[0]))

    def hand_over(self) -> None:
        """Put the finished episodes that wait into the buffer, and into the file.

        Where that fails, they are tried one by one: episodes with an error are dropped and counted,
        and the first error is raised once the others are safe.
        """
        if not (self._ended or self._kept):
            return
        error: Exception | None = None
        with held_back():
            try:
                if self._ended:
                    self._kept += (self._gather(self._ended),)
                    self._ended = []
                parts = [self._append(self._columns(Gathered.joined(self._kept)))]
            except Exception:
                parts, error = self._append_one_by_one()
            self._ended, self._kept = [], []
            if self._file is not None:  # in one piece: all that its tail has
                self._file.append(self._loop, self._joined(parts))
        if error is not None:
            raise error

    def _append_one_by_one(self) -> tuple[list[Trajectories], Exception | None]:
        """Append the valid episodes, count the others, and return the error of the first."""
        parts: list[Trajectories] = []
        first_error: Exception | None = None
        for episode, steps in self._singles():
            try:
                parts.append(self._append(self._columns(episode())))
            except Exception as error:
                self.count_dropped(1, steps, warn=False)
                first_error = first_error or _explained(error)
        return parts, first_error

    def _singles(self) -> Iterator[tuple[Callable[[], Gathered], int]]:
        """Yield functions that return an episode each, and its steps."""
        for kept in self._kept:
            for i, steps in enumerate(kept.facts[2].tolist()):
                yield partial(kept.episode, i), steps
        for ended in self._ended:
            yield partial(self._gather, [ended]), self._steps(ended)

    def _joined(self, parts: list[Trajectories]) -> Trajectories:
        if not parts:
            settings = self.settings
            return nothing(settings.observation_space, settings.action_space, settings.horizon)
        return parts[0] if len(parts) == 1 else join(parts)

    def __getstate__(self) -> dict[str, Any]:
        """Hand over first: a copy must not write episodes that wait here."""
        self.hand_over()
        return self.__dict__

    def close(self) -> None:
        """Hand over the episodes that wait and release the file; may be called again."""
        with held_back():
            try:
                self.hand_over()
            finally:
                if self._file is not None:
                    self._file.close()

    def _append(self, finished: Finished) -> Trajectories:
        """Append episodes to the buffer, all or none."""
        ids = self._policy_ids(finished)
        return self.buffer.append_many(
            finished.observations,
            finished.actions,
            finished.rewards,
            self._log_probs(finished, ids),
            ids,
            lengths=finished.lengths,
            **finished.ends,
            start_clock=finished.start_clock,
            copy=False,
        )

    def _policy_ids(self, finished: Finished) -> NDArray[np.int32]:
        """Return (S,) which policy acted."""
        last_change, k, _ = self._changes[-1]
        if finished.start_clock.min() >= last_change:
            return np.full(len(finished.rewards), k, dtype=np.int32)
        return np.asarray(self._policies_at(finished.clocks()), dtype=np.int32)

    def _policies_at(self, clocks: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Return which policy acted at each clock, one number for all if it is the latest."""
        last_change, k, _ = self._changes[-1]
        if clocks.min() >= last_change:
            return k
        changed, policies, _ = np.array(self._changes, dtype=np.int64).T
        acting: NDArray[np.int64] = policies[np.searchsorted(changed, clocks, side="right") - 1]
        return acting

    def _log_probs(self, finished: Finished, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return (S,) the log-probabilities that the loop gave, and the policy's own elsewhere."""
        log_probs, audit = finished.log_probs, self.settings.audit
        given = ~np.isnan(log_probs)
        if given.all() and not audit:
            return log_probs
        policies = self.buffer.policies
        computed = acting_log_probs(policies, ids, finished.observations, finished.actions)
        if not given.any():
            return computed
        if audit:
            self._audit(finished, computed, ids)
        return np.where(given, log_probs, computed)

    def _audit(
        self, finished: Finished, computed: NDArray[np.float64], ids: NDArray[np.int32]
    ) -> None:
        """Raise if a log-probability that the loop gave is not that of the policy."""
        log_probs = finished.log_probs
        wrong = ~np.isnan(log_probs) & ~(np.abs(computed - log_probs) <= AUDIT_TOLERANCE)
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        i, step = finished.locate(row)
        length = int(finished.lengths[i])
        n = int(wrong[row - step :][:length].sum())
        raise PropensityMismatch(
            f"{finished.name(i)}, step {step}: log_prob was given as {log_probs[row]:.6g}, but "
            f"policy {ids[row]}, {self.buffer.policies[ids[row]]!r}, gives {computed[row]:.6g} "
            f"({n} of {length} steps differ by more than {AUDIT_TOLERANCE:g}); the episode was "
            "dropped, not recorded. Call follow with the policy that acts before it acts, and "
            "give the log-probability of the action that is executed",
            episode=int(finished.facts[6, i]),
            step=step,
        )


def _explained(error: Exception) -> Exception:
    """Return an error that also says that the episode was dropped."""
    if isinstance(error, PropensityMismatch):  # its message says so
        return error
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    explained = kind(f"{error}; the episode was dropped, not recorded")
    explained.__cause__ = error
    return explained
