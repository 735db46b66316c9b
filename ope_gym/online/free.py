"""Value the policies of a training loop from the steps that the loop takes anyway.

    free = FreeEvaluation(num_envs=8, horizon=500)
    for rollout in training:
        free.follow(policy, greedy)          # snapshots; the greedy one if its value is wanted
        free.add(observations, actions, rewards, terminated, truncated, following)
        estimate = free.evaluate(timesteps)  # of the policy that acts: at once, provisional
        estimate = free.evaluate(timesteps, deterministic=True)  # of the greedy one
        for estimate in free.settle():       # of earlier policies, now better known
            ...

A value is provisional at first: it rests on the policy's own rollout and those before it. Once
enough later steps are there too, it is settled.

**A policy** is a frozen snapshot with `sample(observations, rng)`, which returns one action a row.
If its actions are finitely many, it has `probs(observations)`, (n, A); if they are real numbers, it
may have `action_moments(observations)`, mean and variance of each part (n, m) (otherwise they are
estimated by draws). Nothing asks for the probability of a recorded action, so learners need not
record any, and a snapshot needs no `log_prob`. Observations are those of the environment: a
snapshot holds the statistics of a VecNormalize. Actions are in the units of `sample`, and clipped
to `action_bounds` where the environment is learned.

**Who acted when** does not matter, only how far those policies are from the one that is asked for:
their actions tell. A loop whose policy stays the same in a rollout calls `follow` before it. A loop
whose policy changes every few steps (DQN, SAC, TD3) only adds steps, and calls `follow` right
before `evaluate`, with the snapshot that is to be valued.

**The greedy policy** (`deterministic=True`) is a snapshot of the same kind: `probs` with a
single 1, or moments without variance. It is played in the learned environment, which is tested on
the policy that acts. Where played states leave what was recorded, `estimate.unseen` is large, and
its verdict says that the value is not known yet.

**What cannot be modelled.** `follow(None)` where no snapshot can be taken (recurrent policies), and
`add(None, None, rewards, terminated, truncated)` where observations are no plain arrays (dicts) or
do not hold the state. Images, and all arrays of more than `MOST_NUMBERS` numbers each, count as
None. Then rewards and lengths alone tell the value: the last episodes, and the life table of those
that are open. `free.basis` is a `Reason` that says what the values of this run rest on.

The ways to a value are in `ope_gym.online.advantages` and `ope_gym.online.simulation`; how they
become one value, each counting by its error, in `ope_gym.online.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arguments import confidence, discount, whole
from ope_gym.arrays import FloatArray, one_blas_thread
from ope_gym.inference.intervals import Interval, student_t, widened
from ope_gym.inference.outcomes import unseen_beside
from ope_gym.online.advantages import ValueFit
from ope_gym.online.estimate import FreeEstimate
from ope_gym.online.gathering import Moment, Returns, Scale, Span
from ope_gym.online.rules import Entry, Evidence, TrackRecord
from ope_gym.online.simulation import Bounds, Learned, Task
from ope_gym.online.stream import Stream
from ope_gym.policies.acting import ActingPolicy, check_acting
from ope_gym.verdict import Reason

__all__ = ["FreeEstimate", "FreeEvaluation", "widest_window"]

_ENDS = 16  # episodes that should end in the narrowest window, twice as many to settle,
_NARROW = 2048, 12_288  # which has at least and at most so many steps
_WIDE, _GROWTH = 32_768, 1.5  # steps of the widest window, and of each beside the next narrower
_REACH = 10_000  # most steps of an episode without a time limit that a window must hold
_LEARNT = 16_384  # steps from which the environment is learned
_STEADY = 0.05  # spread and error, as a share of the range of returns, that are next to nothing


@dataclass(eq=False)
class _Followed:
    """A policy of the loop, and the greedy one.

    Args:
        policies: by name, "acting" and "greedy".
        clock: of the first step.
        stop: the clock when it was valued; -1 before.
        timesteps: of the loop at that time.
        index: number of the evaluation in the record.
        returns: known returns of that time.
        fresh: returns of episodes played elsewhere, by name.
    """

    policies: dict[str, ActingPolicy | None]
    clock: int
    stop: int = -1
    timesteps: int = 0
    index: int = -1
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))
    fresh: dict[str, FloatArray] = field(default_factory=dict)


def widest_window(num_envs: int, longest: int) -> int:
    """Return the length of the widest window, in vector steps.

    It holds a whole episode wherever it is cut: nobody knows what lies beyond all of its steps.
    """
    return max(-(-_WIDE // num_envs), 2 * longest)


class FreeEvaluation:
    """Values of the policies of a training loop, at no extra step of the environment.

    Args:
        num_envs: environments that are stepped side by side.
        horizon: time limit of an episode in steps; None if there is none, or it is unknown.
        action_bounds: lowest and highest action to which the loop clips what the policy says.
        gamma: discount; 1 gives the mean return.
        level: confidence level of the intervals.
        seed: seed of the episodes that are played in the learned environment.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        horizon: int | None = None,
        action_bounds: Bounds | None = None,
        gamma: float = 1.0,
        level: float = 0.95,
        seed: int = 0,
    ) -> None:
        whole("num_envs", num_envs)
        whole("seed", seed, 0)
        self.horizon = None if horizon is None else whole("horizon", horizon)
        self.gamma, self.level = discount(gamma), confidence(level)
        self.record = TrackRecord()
        self.stream = Stream(num_envs, -(-2 * _WIDE // num_envs))
        self._task = None if horizon is None else Task(horizon, gamma, action_bounds)
        self._rng = np.random.default_rng(seed)
        self._current: _Followed | None = None
        self._moment: Moment | None = None
        self._pending: list[_Followed] = []
        self._settled: list[FreeEstimate] = []
        self._spread, self._range, self._length = np.nan, (np.inf, -np.inf), 0.0
        self._limits = self._range  # of a mean

    def follow(self, policy: ActingPolicy | None, greedy: ActingPolicy | None = None) -> None:
        """Say which policy acts from now on.

        Args:
            policy: a frozen snapshot; None if there can be none.
            greedy: what it would be without exploration.
        """
        policies = {"acting": None if policy is None else check_acting(policy, "policy")}
        if greedy is not None:
            policies["greedy"] = check_acting(greedy, "greedy")
        self._current = _Followed(policies, self.stream.clock)

    def add(
        self,
        observations: NDArray[Any] | None,
        actions: NDArray[Any] | None,
        rewards: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        following: NDArray[Any] | None = None,
        skip: NDArray[Any] | None = None,
    ) -> None:
        """Add T vector steps of the policy followed; see `Stream.add`."""
        self.stream.add(observations, actions, rewards, terminated, truncated, following, skip)
        self.stream.keep = 2 * self._widest()
        self._moment = None

    @property
    def basis(self) -> Reason:
        """Basis of the values: returns alone, the steps, or a learned environment as well."""
        if self._current is None or not self._models(self._current):
            return Reason("free_returns")
        return Reason("free_steps" if self._task is None else "free_environment")

    def evaluate(
        self,
        timesteps: int = 0,
        fresh: FloatArray | None = None,
        *,
        deterministic: bool = False,
    ) -> FreeEstimate | None:
        """Return a provisional value of the current policy; None while no episode has ended.

        Args:
            timesteps: timesteps of the loop, to label the estimate.
            fresh: returns of episodes that this policy played elsewhere, to be pooled.
            deterministic: whether to value the greedy policy in place of the one that acts.
        """
        current, name = self._current, "greedy" if deterministic else "acting"
        if current is None:
            raise RuntimeError("no policy is known: call follow(policy) first")
        if name not in current.policies:
            raise ValueError("deterministic=True needs the greedy policy: follow(policy, greedy)")
        if not self.stream.ends:
            return None
        with one_blas_thread():
            return self._evaluate(current, name, timesteps, fresh)

    def settle(self) -> list[FreeEstimate]:
        """Return settled values of the policies that enough steps have followed since.

        They come with the next evaluation; by themselves if evaluations are rare.
        """
        wait = self._widest() // 2
        if self._pending and self.stream.clock >= self._pending[0].clock + wait:
            with one_blas_thread():
                self._settle(self._gather())
        done, self._settled = self._settled, []
        return done

    # One evaluation ----------------------------------------------------------------------

    def _evaluate(
        self, current: _Followed, name: str, timesteps: int, fresh: FloatArray | None
    ) -> FreeEstimate | None:
        moment, stop = self._gather(), self.stream.clock
        if moment is None:
            return None
        if current.stop != stop:  # the first question at this time
            if current.stop >= 0:
                current = self._current = replace(current, fresh={})
            current.stop, current.timesteps = stop, timesteps
            current.index = len(self.record.entries)
            self.record.entries.append(Entry())
            self._settle(moment)
            self._pending.append(current)
        if fresh is not None:
            current.fresh[name] = np.asarray(fresh, dtype=np.float64)
        current.returns = self._note_returns(moment.returns, current.fresh.get(name))
        early = self.record.entries[current.index].early
        for one in dict.fromkeys(("acting", name)):  # the greedy one is tested on the other
            if one not in early:
                spans = [(stop - x, stop) for x in self._spans(_ENDS)]
                early[one] = self._evidence(moment, current, one, spans)
        return self._conclude(current, name, settled=False)

    def _settle(self, moment: Moment | None) -> None:
        """Settle the policies that enough steps have followed."""
        aside = self._widest() // 4  # a settled value has seen as much after it as before
        while self._pending and self.stream.clock >= self._pending[0].stop + aside:
            then = self._pending.pop(0)
            if moment is None or then.clock < moment.fit.window.clock.min():
                continue  # its steps are forgotten: it was valued too long ago
            if moment.returns.paid.size > then.returns.size:  # more have ended since
                then.returns = moment.returns.paid
            start, now, entry = then.clock, moment.clock, self.record.entries[then.index]
            for name in entry.early:
                spans = [(start - x // 2, min(start + x // 2, now)) for x in self._spans(2 * _ENDS)]
                entry.late[name] = self._evidence(moment, then, name, spans)
                self._settled.append(self._conclude(then, name, settled=True))

    def _gather(self) -> Moment | None:
        """Return what all policies share that are valued now; None before the first episode."""
        if self._moment is None:
            stop, widest = self.stream.clock, self._widest()
            start = min([stop - widest, *(x.clock - widest // 2 for x in self._pending[:1])])
            window = self.stream.window(max(start, self.stream.first_clock, 0), stop)
            starts = self.stream.starts()
            if not window.size or not len(starts):
                return None
            fit = ValueFit.of(window, horizon=self.horizon, gamma=self.gamma, starts=starts)
            self._length = window.size / max(int(window.ended.sum()), 1)
            returns, policy = Returns.of(window, self.gamma), None
            if self._current is not None:
                policy = self._current.policies["acting"]
            learned = None
            if policy is not None and self._task is not None:
                latest = stop - -(-_LEARNT // self.stream.num_envs)
                learned = Learned.of(window, latest, policy, self._task)
            self._moment = Moment(stop, fit, returns, learned, starts, self._rng)
        return self._moment

    def _evidence(
        self, moment: Moment, followed: _Followed, name: str, spans: list[Span]
    ) -> Evidence:
        policies = followed.policies
        explorer = policies["acting"] if name == "greedy" else None
        scale = Scale(*self._range, self._limits, self._spread, self._length)
        return moment.evidence(policies[name], explorer, spans, followed.stop, scale)

    def _conclude(self, followed: _Followed, name: str, *, settled: bool) -> FreeEstimate:
        """Return the value by the free ways and by fresh episodes."""
        found = self.record.value(followed.index, name, settled=settled)
        (value, square), shares, spread = found.value, dict(found.shares), found.spread
        fresh = followed.fresh.get(name, np.empty(0))
        if fresh.size > 1:  # they err by themselves
            noise = max(float(fresh.var(ddof=1)), spread**2) / fresh.size
            share = square / (square + noise)
            value += share * (float(fresh.mean()) - value)
            square *= 1.0 - share
            shares = {way: (1.0 - share) * x for way, x in shares.items()} | {"fresh": share}
        error = float(np.sqrt(square))
        ended, unseen = followed.returns.size, (0.0, 0.0)
        if ended:
            unseen = unseen_beside(followed.returns, value, self._range)
        if np.isinf(max(unseen)):
            error, spread = np.inf, np.nan

        def ends(level: float) -> Interval:
            interval = student_t(value, error, max(ended - 1, 1), level)
            low, high = np.clip([interval.low, interval.high], *found.limits).tolist()
            return replace(interval, low=low, high=high)

        interval = widened(ends, value, self.level, ended, unseen)
        simulated = self.record.entries[followed.index].early[name].simulated
        return FreeEstimate(
            timesteps=followed.timesteps,
            value=value,
            standard_error=error,
            low=interval.low,
            high=interval.high,
            settled=settled,
            spread=spread,
            episodes=ended,
            shares=shares,
            steady=max(error, spread) <= _STEADY * (self._range[1] - self._range[0]),
            ended=ended,
            bounds=found.limits,
            deterministic=name == "greedy",
            unseen=float(name == "greedy") if simulated is None else simulated.unseen,
            length=self._length,
        )

    # Sizes -------------------------------------------------------------------------------

    def _widest(self) -> int:
        """Return the length of the widest window, in vector steps."""
        reach = min(self.stream.longest, self.horizon or _REACH)
        return widest_window(self.stream.num_envs, reach)

    def _spans(self, ends: int) -> list[int]:
        """Return the lengths of the windows to compare, in vector steps, the narrowest first."""
        n = self.stream.num_envs
        narrow = int(np.clip(ends * self._length, *_NARROW))
        widest, spans = self._widest(), [-(-narrow // n)]
        while spans[-1] * _GROWTH <= widest:
            spans.append(int(spans[-1] * _GROWTH))
        return spans

    def _models(self, followed: _Followed) -> bool:
        """Return whether there are policies and observations to model."""
        return followed.policies["acting"] is not None and self.stream.numbers > 0

    def _note_returns(self, known: Returns, fresh: FloatArray | None) -> FloatArray:
        """Update spread, range and limits of returns; return those that are known."""
        fresh = np.empty(0) if fresh is None else fresh
        returns, seen = np.append(known.paid, fresh), np.append(known.seen, fresh)
        low, high = self._range
        self._range = float(seen.min(initial=low)), float(seen.max(initial=high))
        if returns.size > 2:
            self._spread = float(returns.std(ddof=1))
        elif np.isnan(self._spread):
            self._spread = (float(np.std(seen)) if seen.size else 0.0) or 1.0
        self._limits = self._range
        m, missed = returns.size, 1.0 - self.level
        count = max(m, self.stream.ends)  # all on one side of the median with chance 2^(1 - count)
        if 0.5 ** (count - 1) > missed:
            from scipy.special import stdtrit

            middle = float(returns.mean()) if m else 0.0
            spread = float(returns.std(ddof=1)) if m > 1 else self._spread if m else np.inf
            half = float(stdtrit(max(m - 1, 1), 1.0 - 0.5 * missed)) * spread / np.sqrt(max(m, 1))
            low, high = self._range
            self._limits = float(min(low, middle - half)), float(max(high, middle + half))
        return returns
