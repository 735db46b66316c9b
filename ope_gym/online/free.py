"""Value the current policy of a training loop from the steps the loop takes anyway.

    free = FreeEvaluation(num_envs=8, horizon=500)
    for rollout in training:
        free.follow(policy)                  # the policy that acts in this rollout
        free.add(observations, actions, rewards, terminated, truncated, following)
        estimate = free.evaluate(timesteps)  # at once, provisional
        for estimate in free.settle():       # of earlier policies, now better known
            ...

A value is provisional at first: it rests on the policy's own rollout and those before it. Once as
many steps have followed as came before, it is settled. Two ways lead to a value: advantages
(`ope_gym.online.advantages`) and a learned environment (`ope_gym.online.simulation`). Each counts
as much as it has been right so far in the same run (`ope_gym.online.record`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ope_gym.arrays import FloatArray
from ope_gym.online.advantages import Advantages, Latent, advantages
from ope_gym.online.record import TrackRecord, blend
from ope_gym.online.simulation import learn_simulator, simulate
from ope_gym.online.stream import Stream, Window
from ope_gym.policies import FinitePolicy, Policy

SHARE = 0.7  # of the advantages: they are estimated, and so is how far policies are apart
_ASIDE = 6144  # steps on either side of a policy that settle its value
_LATEST = 8192  # steps behind a value at once
_LEARNT = 16_384  # steps from which the environment is learned
_ROOM = 1.25  # a window is at least so many times as long as the longest episode
_FLOOR = 0.01  # least standard error, as a share of the range of the returns so far
_HOPELESS = 0.03  # share of the weight below which simulating is a waste of time
_RETRY = 8  # evaluations after which a hopeless simulation is tried again


@dataclass(frozen=True)
class FreeEstimate:
    """The value of one policy of a training loop.

    Args:
        timesteps: of the loop when the policy was valued first.
        value: mean return of the policy.
        standard_error: of the value.
        low: lower end of the interval.
        high: upper end of the interval.
        settled: whether steps of later policies have confirmed it.
        spread: standard deviation of a return.
        episodes: recorded episodes that it rests on.
        shares: weight of each way to the value.
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

    @property
    def worth(self) -> float:
        """About how many fresh episodes would make you as sure."""
        return (self.spread / self.standard_error) ** 2 if self.standard_error > 0 else np.inf


@dataclass(eq=False)
class _Snapshot:
    policy: Policy
    latent: Latent | None
    clock: int
    timesteps: int = 0
    early: dict[str, float] = field(default_factory=dict)  # values at once, by way
    fresh: list[float] = field(default_factory=list)


class FreeEvaluation:
    """Values of the policies of a training loop, at no extra step of the environment.

    Args:
        num_envs: environments that are stepped side by side.
        horizon: time limit of an episode in steps; None if there is none, or it is unknown.
        action_bounds: lowest and highest action to which the loop clips what the policy says.
        gamma: discount; 1 gives the mean return.
        level: of the intervals.
        seed: of the episodes that are played in the learned environment.
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
        longest = 0 if horizon is None else 2 * horizon
        self.stream = Stream(num_envs, -(-3 * _LATEST // num_envs) + longest)
        self._current: _Snapshot | None = None
        self._pending: list[_Snapshot] = []
        self._spread, self._range = np.nan, (np.inf, -np.inf)
        self._rest = 0  # evaluations for which the simulation rests

    def follow(self, policy: Policy, latent: Latent | None = None) -> None:
        """Say which policy acts from now on.

        Args:
            policy: a frozen snapshot.
            latent: hidden units (n, h) of the loop's networks, from observations (n, ...).
        """
        self._current = _Snapshot(policy, latent, self.stream.clock)

    def add(
        self,
        observations: NDArray[Any],
        actions: NDArray[Any],
        rewards: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        following: NDArray[Any],
        skip: NDArray[Any] | None = None,
    ) -> None:
        """Add T vector steps of the policy followed; see `Stream.add`."""
        self.stream.add(observations, actions, rewards, terminated, truncated, following, skip)

    def evaluate(
        self, timesteps: int = 0, fresh: FloatArray | None = None
    ) -> FreeEstimate | None:
        """Return a provisional value of the current policy; None while no episode has begun.

        Args:
            timesteps: of the loop, for the record.
            fresh: returns of episodes that this policy played elsewhere, to be pooled.
        """
        now = self._current
        if now is None:
            raise RuntimeError("no policy is known: call follow(policy) first")
        stop = self.stream.clock
        window = self._window(stop - -(-_LATEST // self.stream.num_envs), stop)
        if window is None:
            return None
        now.timesteps = timesteps
        now.fresh = [] if fresh is None else [float(x) for x in fresh]
        self._note_returns(window, now.fresh)
        found = self._advantages(window, now)
        values = {"advantages": found.value(SHARE), "simulation": self._simulate(now)}
        now.early = values
        self._pending.append(now)
        variance = self._spread**2
        errors = {name: self.record.mean_square(name) * variance for name in values}
        own = found.error(SHARE)
        if np.isfinite(own):  # never surer than the spread over groups of episodes
            errors["advantages"] = max(errors["advantages"], own**2)
        return self._conclude(now, values, errors, found.episodes, settled=False)

    def settle(self) -> list[FreeEstimate]:
        """Return settled values of the policies that enough steps have followed since."""
        done, aside = [], -(-_ASIDE // self.stream.num_envs)
        while self._pending and self.stream.clock >= self._pending[0].clock + aside:
            then = self._pending.pop(0)
            window = self._window(then.clock - aside, then.clock + aside)
            if window is None:
                continue
            found = self._advantages(window, then)
            reference, error = found.value(SHARE), found.error(SHARE)
            values = {"advantages": reference, "simulation": then.early["simulation"]}
            variance = self._spread**2
            drift = (1.0 - SHARE) * found.moved
            errors = {
                "advantages": np.nan_to_num(error**2, nan=variance) + drift**2,
                "simulation": self.record.mean_square("simulation") * variance,
            }
            done.append(self._conclude(then, values, errors, found.episodes, settled=True))
            for name, early in then.early.items():
                self.record.add(name, early - reference, self._spread)
        return done

    # The ways to a value -----------------------------------------------------------------

    def _window(self, start: int, stop: int) -> Window | None:
        """Return the window between two clocks, longer if episodes are; None if it is empty."""
        longest = self.stream.longest(stop - start)
        start = min(start, stop - int(_ROOM * longest) - 1)
        if self.stream.clock == 0:
            return None
        window = self.stream.window(max(start, self.stream.first_clock, 0), stop)
        return window if window.began.size else None

    def _advantages(self, window: Window, snapshot: _Snapshot) -> Advantages:
        return advantages(
            window,
            snapshot.policy,
            snapshot.latent,
            horizon=self.horizon,
            gamma=self.gamma,
            starts=self.stream.starts(),
            rng=self._rng,
        )

    def _simulate(self, snapshot: _Snapshot) -> float:
        """Return the value in a learned environment; NaN where there is none."""
        if self.horizon is None or self._rest > 0:
            self._rest -= 1
            return float("nan")
        policy, latest = snapshot.policy, self.stream.latest(_LEARNT)
        actions = 0
        if isinstance(policy, FinitePolicy):
            actions = policy.probs(latest["observations"][:1]).shape[1]
        simulator = learn_simulator(latest, actions, self._bounds)
        if simulator is None:
            self._rest = _RETRY
            return float("nan")
        value, _ = simulate(
            simulator,
            policy,
            self.stream.starts(),
            horizon=self.horizon,
            gamma=self.gamma,
            rng=self._rng,
            bounds=self._bounds,
        )
        return value

    def _conclude(
        self,
        snapshot: _Snapshot,
        values: dict[str, float],
        errors: dict[str, float],
        episodes: int,
        *,
        settled: bool,
    ) -> FreeEstimate:
        if len(snapshot.fresh) > 1:
            values = {**values, "fresh": float(np.mean(snapshot.fresh))}
            variance = max(float(np.var(snapshot.fresh, ddof=1)), self._spread**2)
            errors = {**errors, "fresh": variance / len(snapshot.fresh)}
        low, high = self._range
        least = (_FLOOR * (high - low)) ** 2 + 1e-300
        errors = {name: error + least for name, error in errors.items()}
        value, square = blend(values, errors)
        shares = {n: square / errors[n] for n, x in values.items() if np.isfinite(x)}
        if not settled and 0 < shares.get("simulation", 1.0) < _HOPELESS:
            self._rest = _RETRY
        freedom = max(self.record.freedom(), 7.0 if settled else 3.0)
        half = float(stdtrit(freedom, 0.5 + 0.5 * self.level)) * np.sqrt(square)
        return FreeEstimate(
            timesteps=snapshot.timesteps,
            value=value,
            standard_error=float(np.sqrt(square)),
            low=value - half,
            high=value + half,
            settled=settled,
            spread=self._spread,
            episodes=episodes + len(snapshot.fresh),
            shares=shares,
        )

    def _note_returns(self, window: Window, fresh: list[float]) -> None:
        """Update the spread and the range of returns from the episodes that ended in a window."""
        episode = np.cumsum(window.first) - 1
        paid = np.bincount(episode, window.rewards * self.gamma**window.step)
        whole = np.bincount(episode, window.ended) > 0
        returns = np.append(paid[whole], fresh)
        if returns.size:
            low, high = self._range
            self._range = min(low, float(returns.min())), max(high, float(returns.max()))
        if returns.size > 2:
            self._spread = float(returns.std(ddof=1))
        elif np.isnan(self._spread):
            self._spread = float(np.std(paid)) or 1.0
