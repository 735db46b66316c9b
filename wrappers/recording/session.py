"""What both recorders share: from finished episodes to the buffer and its file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data import blocks, files, space_json
from ope_gym.data.schema import Steps
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import PropensityMismatch, Trajectories
from ope_gym.policies.closed_form import Policy
from wrappers.recording.finished import Finished, LiveBuffer

_ASK_ROWS = (
    4096  # a policy's arrays for more are fresh pages of memory, which cost more than itself
)
AUDIT_TOLERANCE = 1e-4  # a float32 network, asked twice, differs by less; a wrong policy by more

Taken: TypeAlias = tuple[Finished, Steps, NDArray[np.int32]]
"""Episodes that are in the buffer, their steps as it has them, (S,) which policy acted."""


class Recorder:
    """Policies and their changes, the finished episodes that wait, the buffer, the file.

    Args:
        observation_space: Of one env.
        action_space: Of one env.
        horizon: The time limit, None if there is none.
        held_out: Share of the episodes that the learner leaves alone.
        path: File to which finished episodes go at once, or None.
        audit: Whether to compare given log-probabilities with those of the policy.
    """

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
        if not 0 <= held_out <= 1:
            raise ValueError(f"held_out={held_out} must be a share of the episodes, 0 to 1")
        if path is not None and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise FileNotFoundError(f"path={os.fspath(path)!r}: its folder does not exist")
        self.buffer = LiveBuffer(observation_space, action_space, horizon=horizon)
        self.buffer.recorder = self
        self.share = held_out
        self.path = path
        self.audit = audit
        self.policy_id: int | None = None
        self.dropped_episodes = 0
        self.dropped_steps = 0
        self._changes: list[tuple[int, int, bool]] = []  # clock, policy, inside an episode?
        self._writer: blocks.BlockWriter | None = None
        self._waiting: list[Any] = []  # finished, and not in the buffer yet
        self._unwritten: list[Taken] = []  # in the buffer, and not in the file yet
        self._draining = False
        self._warned = False

    # Policies ----------------------------------------------------------------------------

    def follow(self, policy: Policy, clock: int, *, mid_episode: bool) -> int:
        """From `clock` on `policy` acts; its number."""
        k = self.buffer.add_policy(policy)
        if k != self.policy_id:
            self.buffer.change_policy(k, clock, mid_episode=mid_episode)
            self._changes.append((clock, k, mid_episode))
            self.policy_id = k
        self._sync_file()
        return k

    def require_policy(self) -> None:
        """Raise if nobody said who acts."""
        if self.policy_id is None:
            raise RuntimeError(
                "step without a policy: call follow(policy) before the first step, and again "
                "whenever the policy changes, so that the probabilities of the actions are known"
            )

    def is_held_out(self, numbers: Any) -> Any:
        """Whether the episodes with these numbers are: decided by the number alone."""
        return np.floor((numbers + 1) * self.share) > np.floor(numbers * self.share)

    # Episodes that are not recorded ------------------------------------------------------

    def count_dropped(self, episodes: int, steps: int, *, warn: bool) -> None:
        """Count open episodes that will never be complete."""
        self.dropped_episodes += episodes
        self.dropped_steps += steps
        if warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"reset before the end: {episodes} unfinished episode(s) of {steps} steps were "
                "dropped, since an episode without its end has no return; dropped_episodes and "
                "dropped_steps count further ones without a warning",
                UserWarning,
                stacklevel=4,
            )

    def warn_of_cut(self, episodes: int) -> None:
        """Warn if many of all episodes are dropped at the end: what is left are the short ones."""
        if episodes >= 10 and episodes > 0.1 * len(self.buffer):
            warnings.warn(
                f"closed with {episodes} unfinished episodes beside {len(self.buffer)} finished "
                "ones: long episodes are missing, so the recorded returns are biased. Play a fixed "
                "number of episodes to their end (wrappers.collect does)",
                UserWarning,
                stacklevel=3,
            )

    def settled(self, clock: int, horizon: int | None) -> Trajectories:
        """The episodes of `settled_mask`."""
        return self.buffer.select(episodes=self.settled_mask(clock, horizon))

    def settled_mask(self, clock: int, horizon: int | None) -> NDArray[np.bool_]:
        """(n,) which episodes were begun so early that the longest possible has ended by `clock`.

        Which episodes these are is decided before they are played, so that none is missing for
        being long.

        Args:
            clock: Now.
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
        return np.asarray(self.buffer.view().start_clock <= clock - longest)

    # Episodes that are -------------------------------------------------------------------

    def _batch(self) -> Any:
        """All that wait."""
        return self._waiting

    def _part(self, batch: Any, first: int, last: int) -> Any:
        """The episodes first … last - 1 of a batch."""
        return batch[first:last]

    def _size(self, batch: Any) -> tuple[int, int]:
        """How many episodes a batch has, and how many steps."""
        raise NotImplementedError

    def _columns(self, batch: Any) -> Finished:
        """A batch as columns."""
        raise NotImplementedError

    def _forget(self) -> None:
        self._waiting = []

    def drain(self) -> None:
        """Put the finished episodes that wait into the buffer, and into the file.

        Those with an error are dropped and counted; the error of the first is raised after the
        others are safe.
        """
        if self._draining:  # the buffer asks for its own length
            return
        self._draining = True
        before = len(self.buffer)
        try:
            if not self._waiting:
                return
            error = self._take_in(self._batch())
            self._forget()
            self._write()
            if error is not None:
                raise error
        except BaseException:
            if len(self.buffer) != before:  # interrupted: nothing may be taken twice
                self._forget()
            raise
        finally:
            self._draining = False

    def _take_in(self, batch: Any) -> Exception | None:
        """All episodes at once; if that fails, half of them and the other half. The first error."""
        try:
            done = self._take(self._columns(batch))
            if self.path is not None:  # else let go of what the buffer does not need
                self._unwritten.append(done)
            return None
        except Exception as error:
            episodes, steps = self._size(batch)
            if episodes == 1:
                self.count_dropped(1, steps, warn=False)
                if isinstance(error, PropensityMismatch):  # it says so itself
                    return error
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                explained = kind(f"{error}; the episode was dropped, not recorded")
                explained.__cause__ = error
                return explained
        half = episodes // 2
        first = self._take_in(self._part(batch, 0, half))
        second = self._take_in(self._part(batch, half, episodes))
        return second if first is None else first

    def _take(self, finished: Finished) -> Taken:
        ids = self._policy_ids(finished)
        if finished.given is None:
            log_probs = self._ask(finished, ids)
        else:
            log_probs, given = finished.given
            if self.audit or not given.all():
                found = self._ask(finished, ids)
                if self.audit:
                    self._compare(finished, found, ids)
                log_probs = np.where(given, log_probs, found)
        steps = self.buffer.append_many(
            finished.observations,
            finished.actions,
            finished.rewards,
            log_probs,
            ids,
            lengths=finished.lengths,
            terminated=finished.terminated,
            truncated=finished.truncated,
            held_out=finished.held_out,
            start_clock=finished.start_clock,
            copy=False,
        )
        return finished, steps, ids

    def _policy_ids(self, finished: Finished) -> NDArray[np.int32]:
        """(S,) which policy acted."""
        last_change, k, _ = self._changes[-1]
        if finished.start_clock.min() >= last_change:
            return np.full(len(finished.rewards), k, dtype=np.int32)
        table = np.array(self._changes, dtype=np.int64)
        found = np.searchsorted(table[:, 0], finished.clocks, side="right") - 1
        return np.asarray(table[found, 1], dtype=np.int32)

    def _ask(self, finished: Finished, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """(S,) what the acting policies say."""
        found, policies = np.empty(len(ids)), self.buffer.policies
        for k, rows in _blocks(ids):
            seen, chosen = (
                batches.take(x, rows) for x in (finished.observations, finished.actions)
            )
            answer, expected = policies[k].log_prob(seen, chosen), found[rows].shape
            if np.shape(answer) != expected:
                raise ValueError(
                    f"policy {k}: log_prob gave shape {np.shape(answer)} instead of {expected}, "
                    "one number for each step"
                )
            found[rows] = answer
        return found

    def _compare(
        self, finished: Finished, found: NDArray[np.float64], ids: NDArray[np.int32]
    ) -> None:
        assert finished.given is not None
        log_probs, given = finished.given
        wrong = given & ~(np.abs(found - log_probs) <= AUDIT_TOLERANCE)
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        ends = np.cumsum(finished.lengths)
        i = int(np.searchsorted(ends, row, side="right"))
        step = int(row - ends[i] + finished.lengths[i])
        n = int(wrong[ends[i] - finished.lengths[i] : ends[i]].sum())
        raise PropensityMismatch(
            f"{finished.name(i)}, step {step}: log_prob was given as "
            f"{log_probs[row]:.6g}, but policy {ids[row]}, "
            f"{self.buffer.policies[ids[row]]!r}, gives {found[row]:.6g} ({n} of "
            f"{finished.lengths[i]} steps differ by more than {AUDIT_TOLERANCE:g}); the episode "
            "was dropped, not recorded. Call follow with the policy that acts before it acts, and "
            "give the log-probability of the action that is executed",
            episode=int(finished.numbers[i]),
            step=step,
        )

    # The file ----------------------------------------------------------------------------

    def _sync_file(self) -> blocks.BlockWriter | None:
        """The open file, with all policies and changes; None if there is no path."""
        if self.path is None:
            return None
        env = self.buffer.observation_space, self.buffer.action_space, self.buffer.horizon
        if self._writer is None:
            _require_same_env(self.path, *env)
            self._writer = blocks.BlockWriter(self.path)
        # By what the writer says it has: a call that failed, or was interrupted after its work was
        # done, may not shift the numbers of the policies.
        writer, done = self._writer, self._writer.appended
        if "spaces" not in done:
            files.write_spaces(writer, *env)
        for policy in self.buffer.policies[done.get("policy", 0) :]:
            files.write_policy(writer, policy)
        for clock, k, mid_episode in self._changes[done.get("changes", 0) :]:
            files.write_change(writer, k, clock, mid_episode=mid_episode)
        return writer

    def _write(self) -> None:
        """Bring the file up to the buffer; what cannot be written now stays for the next time."""
        try:
            while self._unwritten:
                writer = self._sync_file()
                if writer is None:
                    return
                before, again = writer.appended.get("episodes", 0), False
                try:
                    self._write_one(writer, *self._unwritten[0])
                except Exception as error:
                    again = isinstance(error, OSError)  # others would come again and again
                    raise
                except BaseException:
                    again = writer.appended.get("episodes", 0) == before
                    raise
                finally:
                    if not again:
                        del self._unwritten[0]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: the last episodes are in the buffer, but not in the file; the "
                "next write or close tries again, and buffer.save can put them elsewhere",
                os.fspath(self.path or ""),
            ) from error

    def _write_one(
        self,
        writer: blocks.BlockWriter,
        finished: Finished,
        steps: Steps,
        ids: NDArray[np.int32],
    ) -> None:
        by_episode = [
            finished.lengths,
            finished.terminated,
            finished.truncated,
            finished.held_out,
            finished.start_clock,
            np.zeros_like(finished.lengths),  # the one schedule there is
        ]
        files.write_episodes(
            writer,
            **steps._asdict(),
            policy_ids=ids,
            episodes=np.array(by_episode, dtype=np.int64).T,
            observation_space=self.buffer.observation_space,
            action_space=self.buffer.action_space,
        )

    def close(self) -> None:
        """Hand over what waits and release the file; may be called again."""
        try:
            self.drain()
            self._write()  # what an earlier error has left
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file: a copy that records on begins a section of its own."""
        return self.__dict__ | {"_writer": None, "_unwritten": []}


def _blocks(ids: NDArray[np.int32]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Policies and some of the rows in which they act, until all are covered."""
    alone = ids.min() == ids.max()
    for k in ids[:1] if alone else np.unique(ids):
        own = None if alone else np.flatnonzero(ids == k)
        for first in range(0, len(ids) if own is None else len(own), _ASK_ROWS):
            block = slice(first, first + _ASK_ROWS)
            yield int(k), block if own is None else own[block]


def _require_same_env(
    path: blocks.PathLike,
    observation_space: Space | None,
    action_space: Space | None,
    horizon: Any,
) -> None:
    """Episodes of two envs in one file could not be read back together."""
    if not os.path.exists(path) or os.path.getsize(path) < len(blocks.MAGIC):
        return  # nothing is in it; the writer sees whether it is ours
    ours = {
        "observation_space": space_json.space_to_json(observation_space),
        "action_space": space_json.space_to_json(action_space),
        "horizon": horizon,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a cut tail: the writer warns, too
        for block in blocks.read_blocks(path):
            if block.kind == "spaces" and block.meta != ours:
                raise ValueError(
                    f"path={os.fspath(path)!r} holds episodes of another environment "
                    f"({block.meta}), this one has {ours}; choose another file"
                )
