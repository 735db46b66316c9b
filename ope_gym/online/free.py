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

The ways to a value are in `ope_gym.online.advantages` and `ope_gym.online.simulation`; each counts
by its error. Where provisional values have been further from the settled ones than they claimed,
the next ones get wider intervals (`ope_gym.online.record`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, one_blas_thread
from ope_gym.inference.intervals import Interval, student_t, widened
from ope_gym.inference.judging import judge_free
from ope_gym.inference.outcomes import unseen_beside
from ope_gym.online.advantages import Advantages, Sums, best_span, fit_advantages, noise_of
from ope_gym.online.record import TrackRecord
from ope_gym.online.simulation import Simulation, latest_steps, simulate
from ope_gym.online.stream import Stream, Window
from ope_gym.policies.acting import ActingPolicy, check_acting, count_actions
from ope_gym.verdict import Reason, Verdict

SHARE = 0.7  # of the advantages: they are estimated, and so is how far policies are apart
_SETTLED = 40  # episodes that must follow a policy before its value is settled,
_LEAST, _MOST = 6144, 24_576  # and the steps that must or may
_ENDS = 16  # episodes that should end in the narrowest window, twice as many to settle,
_NARROW = 2048, 12_288  # which has at least and at most so many steps
_WIDE, _GROWTH = 32_768, 1.5  # steps of the widest window, and of each beside the next narrower
_REACH = 10_000  # most steps of an episode without a time limit that a window must hold
_APART = 2.0  # standard errors by which a simulation may differ from what was seen last
_LEARNT = 16_384  # steps from which the environment is learned
_FLOOR = 0.01  # least standard error, as a share of the range of the returns so far
_STEADY = 0.05  # spread and error, as a share of that range, that are next to nothing
_SECOND = 1.0  # of a squared correction that counts as error: what is of second order
FEW = 10  # ended episodes below which a value claims to be no surer than these
_HOPELESS = 0.03  # share of the weight below which simulating is a waste of time
_PATIENCE = 3  # hopeless simulations in a row after which it rests,
_RETRY = 8  # and evaluations after which it is tried again


@dataclass(frozen=True)
class FreeEstimate:
    """The value of one policy of a training loop.

    Args:
        timesteps: timesteps of the loop when the policy was first evaluated.
        value: mean return of the policy.
        standard_error: standard error of the value.
        low: lower end of the interval.
        high: upper end of the interval.
        settled: whether steps of later policies have confirmed it.
        spread: standard deviation of a return.
        episodes: recorded and fresh episodes that it rests on, whole or in part.
        shares: weight of each method in the value.
        steady: whether all recent episodes returned about the same, and the value is known at least
            as well as that: one episode then tells it, and fresh ones would not tell more.
        ended: how many of the episodes that it rests on have ended, so that their returns are
            known; None if that does not matter.
        bounds: the lowest and highest return of the run so far, between which the value lies.
        steep: whether most of the squared error is that of the correction for policies that acted
            before: the policy changes so fast that their steps say little about it.
        deterministic: whether it is the value of the greedy policy.
        unseen: share of the steps played in the learned environment that lie outside of what was
            recorded.
    """

    timesteps: int
    value: float
    standard_error: float
    low: float
    high: float
    settled: bool
    spread: float
    episodes: int
    shares: dict[str, float]
    steady: bool = False
    ended: int | None = None
    bounds: tuple[float, float] = (-np.inf, np.inf)
    steep: bool = False
    deterministic: bool = False
    unseen: float = 0.0

    def __str__(self) -> str:
        state = "settled" if self.settled else "provisional"
        return (
            f"{self.value:.5g} in [{self.low:.5g}, {self.high:.5g}], as sure as about "
            f"{self.fresh_episodes:.2g} fresh episodes; {state}, of the policy after "
            f"{self.timesteps:,} timesteps"
        )

    @property
    def few(self) -> bool:
        """Whether fewer than 10 returns are known: too few to tell spread and error from them."""
        return self.ended is not None and self.ended < FEW

    @property
    def fresh_episodes(self) -> float:
        """About how many fresh episodes would make you as sure; where `few`, no more than these."""
        count = (self.spread / self.standard_error) ** 2 if self.standard_error > 0 else np.inf
        return min(count, float(self.ended)) if self.few and self.ended is not None else count

    @property
    def played(self) -> bool:
        """Whether it rests on fresh episodes alone."""
        return self.shares == {"fresh": 1.0}

    @property
    def verdict(self) -> Verdict:
        """Whether to trust it, and why."""
        return judge_free(
            self.fresh_episodes,
            episodes=self.episodes,
            ended=self.ended,
            played=self.played,
            steady=self.steady,
            steep=self.steep,
        )

    def possible(self, value: float) -> float:
        """Return a value within the bounds: a mean cannot lie beyond all returns."""
        return float(np.clip(value, *self.bounds))


@dataclass(frozen=True, eq=False)
class _Value:
    sums: Sums
    square: float  # squared error


@dataclass(eq=False)
class _Snapshot:
    policy: ActingPolicy | None
    clock: int  # of its first step,
    stop: int = 0  # and after its last one, when it was valued
    timesteps: int = 0
    early: dict[str, _Value] = field(default_factory=dict)  # values at once, by way
    simulation: Simulation | None = None
    spread: float = np.nan  # of the returns of its time,
    ended: int = 0  # how many these are,
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))  # and they themselves
    fresh: list[float] = field(default_factory=list)


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
        action_bounds: tuple[FloatArray, FloatArray] | None = None,
        gamma: float = 1.0,
        level: float = 0.95,
        seed: int = 0,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be at least 1")
        if horizon is not None and horizon < 1:
            raise ValueError(f"horizon={horizon} must be at least 1")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma={gamma} must be between 0 and 1")
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level} must be between 0 and 1")
        self.horizon, self.gamma, self.level = horizon, gamma, level
        self.record = TrackRecord()
        self._bounds = action_bounds
        self._rng = np.random.default_rng(seed)
        self.stream = Stream(num_envs, -(-2 * _WIDE // num_envs))
        self._current: _Snapshot | None = None
        self._pending: list[_Snapshot] = []
        self._spread, self._range, self._length = np.nan, (np.inf, -np.inf), 0.0
        self._limits = self._range  # of a mean
        self._rest = 0  # evaluations for which the simulation rests
        self._failed = 0  # simulations in a row that counted for nothing

    def follow(self, policy: ActingPolicy | None, greedy: ActingPolicy | None = None) -> None:
        """Say which policy acts from now on.

        Args:
            policy: a frozen snapshot; None if there can be none.
            greedy: what it would be without exploration.
        """
        if greedy is not None:
            check_acting(greedy, "greedy")
        acting = None if policy is None else check_acting(policy, "policy")
        self._current = _Snapshot(acting, self.stream.clock)

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

    @property
    def basis(self) -> Reason:
        """Basis of the values: returns alone, the steps, or a learned environment as well."""
        if self._current is None or self._current.policy is None or not self.stream.numbers:
            return Reason("free_returns")
        return Reason("free_steps" if self.horizon is None else "free_environment")

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
        if self._current is None:
            raise RuntimeError("no policy is known: call follow(policy) first")
        if deterministic:
            raise NotImplementedError("deterministic=True is not there yet")
        if not self.stream.ends:
            return None
        with one_blas_thread():
            return self._evaluate(self._current, timesteps, fresh)

    def _evaluate(
        self, current: _Snapshot, timesteps: int, fresh: FloatArray | None
    ) -> FreeEstimate | None:
        stop = self.stream.clock
        now = replace(current, stop=stop, timesteps=timesteps)
        fitted = self._fit(now, stop - self._widest(), stop)
        if fitted is None:
            return None
        now.fresh = [] if fresh is None else [float(x) for x in fresh]
        now.returns = self._note_returns(fitted.window, now.fresh)
        now.ended = now.returns.size
        now.spread = self._spread
        now.simulation = self._simulate(now.policy)
        now.early = self._values(now, fitted, [(stop - x, stop) for x in self._spans(_ENDS)])
        self._pending = [x for x in self._pending if x.clock >= self.stream.first_clock]
        self._pending.append(now)
        found = self._conclude(now, now.early, settled=False)
        if now.simulation is not None:
            hopeless = found.shares.get("simulation", 0.0) < _HOPELESS
            self._failed = self._failed + 1 if hopeless else 0
            if self._failed >= _PATIENCE:
                self._rest, self._failed = _RETRY, 0
        return found

    def may_settle(self, more: int = 0) -> bool:
        """Return whether a policy may be settled now, or once `more` vector steps were added."""
        clock = self.stream.clock + more
        return bool(self._pending) and clock >= self._pending[0].stop + self._aside()

    def settle(self) -> list[FreeEstimate]:
        """Return settled values of the policies that enough steps have followed since."""
        if not self.may_settle():  # asked after every rollout
            return []
        with one_blas_thread():
            return self._settle()

    def _settle(self) -> list[FreeEstimate]:
        done = []
        while self.may_settle():
            then = self._pending.pop(0)
            start, now = then.clock, self.stream.clock
            spans = self._spans(2 * _ENDS)
            ends = [(start - x // 2, min(start + x // 2, now)) for x in spans]
            fitted = self._fit(then, *ends[-1]) if then.clock >= self.stream.first_clock else None
            if fitted is None:  # its steps are forgotten: it was valued too long ago
                continue
            early = self._conclude(then, then.early, settled=False)
            if then.ended < FEW:  # more have ended since
                returns, _ = self._returns(fitted.window, then.fresh)
                if returns.size > max(then.ended, 2):
                    then.ended, then.spread = returns.size, float(returns.std(ddof=1))
                    then.returns = returns
            found = self._conclude(then, self._values(then, fitted, ends), settled=True)
            done.append(found)
            claimed = (early.standard_error / self.record.inflation()) ** 2
            apart = early.value - found.value
            self.record.add(apart, claimed + found.standard_error**2)
        return done

    # The ways to a value -----------------------------------------------------------------

    def _aside(self) -> int:
        """Return how many vector steps must follow a policy before its value is settled."""
        steps = min(max(_SETTLED * self._length, _LEAST), _MOST)  # asked after every rollout
        return -(-int(steps) // self.stream.num_envs)

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

    def _fit(self, snapshot: _Snapshot, start: int, stop: int) -> Advantages | None:
        window = self.stream.window(max(start, self.stream.first_clock, 0), stop)
        if not window.size or not len(self.stream.starts()):
            return None
        return fit_advantages(
            window,
            snapshot.policy,
            horizon=self.horizon,
            gamma=self.gamma,
            starts=self.stream.starts(),
            rng=self._rng,
        )

    def _best(self, fitted: Advantages, ends: list[tuple[int, int]]) -> tuple[Sums, float, _Value]:
        """Return the sums of the best window, their squared error, and the narrowest window."""
        found = [sums for sums in (fitted.sums(*end) for end in ends) if sums is not None]
        sums, error = best_span(found, SHARE)
        noise = float(noise_of(found, SHARE)[0])
        most = self._spread**2
        return sums, float(np.nan_to_num(error, nan=most)), _Value(found[0], noise)

    def _possible(self, value: float) -> float:
        """Return a value within the limits of a mean."""
        return float(np.clip(value, *self._limits)) if self._limits[0] <= self._limits[1] else value

    def _values(
        self, snapshot: _Snapshot, fitted: Advantages, ends: list[tuple[int, int]]
    ) -> dict[str, _Value]:
        """Return the value of a policy by each way."""
        sums, error, narrow = self._best(fitted, ends)
        values = {"advantages": _Value(sums, error + _SECOND * sums.moved**2)}
        if snapshot.simulation is not None:
            played = snapshot.simulation
            sums, error, _ = self._best(played.corrected(fitted.window), ends)
            error += played.noise + _SECOND * (sums.base - played.value) ** 2
            apart = self._possible(sums.base) - self._possible(narrow.sums.value(SHARE))
            if not apart**2 > _APART**2 * (narrow.square + error) + snapshot.spread**2:
                values["simulation"] = _Value(sums, error)
        if len(snapshot.fresh) > 1:
            mean = float(np.mean(snapshot.fresh))
            variance = max(float(np.var(snapshot.fresh, ddof=1)), snapshot.spread**2)
            count = len(snapshot.fresh)
            values["fresh"] = _Value(Sums(mean, 0.0, np.zeros((0, 2)), 0, count), variance / count)
        return values

    def _simulate(self, policy: ActingPolicy | None) -> Simulation | None:
        """Play a policy in a learned environment; None where there is none."""
        if policy is None or self.horizon is None or self._rest > 0:
            self._rest -= 1
            return None
        stop = self.stream.clock
        names = ("observations", "following", "actions", "rewards", "ended", "clock", "began")
        latest = self.stream.rows(stop - -(-_LEARNT // self.stream.num_envs), stop, *names)
        in_time = (latest["clock"] - latest["began"] + 1 < self.horizon) & (latest["began"] >= 0)
        latest["terminated"] = latest["ended"] & in_time
        played = None
        if latest["observations"].size and latest["observations"].dtype.kind == "f":
            actions = count_actions(policy, latest["observations"])
            played = simulate(
                latest_steps(latest, actions, self._bounds),
                policy,
                self.stream.starts(),
                horizon=self.horizon,
                gamma=self.gamma,
                rng=self._rng,
                bounds=self._bounds,
            )
        if played is None:
            self._rest = _RETRY
        return played

    def _conclude(
        self, snapshot: _Snapshot, values: dict[str, _Value], *, settled: bool
    ) -> FreeEstimate:
        low, high = self._range
        least = (_FLOOR * (high - low)) ** 2 + 1e-300
        said = {name: x.sums.value(SHARE) for name, x in values.items()}
        possible = {name: self._possible(x) for name, x in said.items()}
        squares = {n: x.square + (said[n] - possible[n]) ** 2 + least for n, x in values.items()}
        square = 1.0 / sum(1.0 / x for x in squares.values())
        shares = {name: square / x for name, x in squares.items()}
        value = sum(share * possible[name] for name, share in shares.items())
        # both free ways rest on the same steps, and err together; fresh episodes err by themselves
        free = sum(share * np.sqrt(squares[n]) for n, share in shares.items() if n != "fresh")
        square = free**2 + shares.get("fresh", 0.0) ** 2 * squares.get("fresh", 0.0)
        sums = values["advantages"].sums
        freedom = max(min(len(sums.without), snapshot.ended) - 1, 1)
        error = float(np.sqrt(square)) * (1.0 if settled else self.record.inflation())
        spread, unseen = snapshot.spread, (0.0, 0.0)
        if snapshot.returns.size:
            unseen = unseen_beside(snapshot.returns, value, self._range)
        if np.isinf(max(unseen)):
            error, spread = np.inf, np.nan

        def ends(level: float) -> Interval:
            interval = student_t(value, error, freedom, level)
            low, high = self._possible(interval.low), self._possible(interval.high)
            return replace(interval, low=low, high=high)

        interval = widened(ends, value, self.level, snapshot.ended, unseen)
        return FreeEstimate(
            timesteps=snapshot.timesteps,
            value=value,
            standard_error=error,
            low=interval.low,
            high=interval.high,
            settled=settled,
            spread=spread,
            episodes=sums.episodes + len(snapshot.fresh),
            shares=shares,
            steady=max(error, spread) <= _STEADY * (high - low),
            ended=snapshot.ended,
            bounds=self._limits,
            steep=2.0 * shares["advantages"] * _SECOND * sums.moved**2 > squares["advantages"],
        )

    def _returns(self, window: Window, fresh: list[float]) -> tuple[FloatArray, FloatArray]:
        """Return the returns of a window's whole episodes, and these with those still open."""
        segment = np.cumsum(window.place == 0) - 1
        paid = np.bincount(segment, window.rewards * self.gamma**window.step)
        began = window.step[window.place == 0] == 0
        whole = began & (np.bincount(segment, window.ended) > 0)
        return np.append(paid[whole], fresh), np.append(paid[began], fresh)

    def _note_returns(self, window: Window, fresh: list[float]) -> FloatArray:
        """Update length, spread and range of returns; return those that are known."""
        returns, seen = self._returns(window, fresh)
        self._length = window.size / max(int(window.ended.sum()), 1)
        low, high = self._range
        self._range = float(seen.min(initial=low)), float(seen.max(initial=high))
        if returns.size > 2:
            self._spread = float(returns.std(ddof=1))
        elif np.isnan(self._spread):
            self._spread = (float(np.std(seen)) if seen.size else 0.0) or 1.0
        self._limits = self._range
        m, missed = returns.size, 1.0 - self.level
        known = max(m, self.stream.ends)  # all on one side of the median with chance 2^(1 - known)
        if 0.5 ** (known - 1) > missed:
            from scipy.special import stdtrit

            middle = float(returns.mean()) if m else 0.0
            spread = float(returns.std(ddof=1)) if m > 1 else self._spread if m else np.inf
            half = float(stdtrit(max(m - 1, 1), 1.0 - 0.5 * missed)) * spread / np.sqrt(max(m, 1))
            low, high = self._range
            self._limits = float(min(low, middle - half)), float(max(high, middle + half))
        return returns
