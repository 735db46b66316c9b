"""Decide which of two policies is better with few fresh episodes, and look as often as you like.

A round plays both policies, as a rule with the same seeds, or one that is drawn by lot, whichever
promises a decision sooner. The statements of a duel hold together with probability `level`, however
often you look, whenever you stop, and whatever the recorded episodes are:
`ope_gym.inference.sequences` and `ope_gym.inference.rounds` have the argument, and
`ope_gym.analysis.duel_prior` says what is taken from recorded episodes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.analysis.duel_prior import Control, expect
from ope_gym.arrays import annuity_of
from ope_gym.data import spaces
from ope_gym.data.trajectories import Trajectories
from ope_gym.inference.intervals import Interval
from ope_gym.inference.rounds import Rounds
from ope_gym.inference.sequences import Assumed, Prior
from ope_gym.models.base import QModel
from ope_gym.options import Options
from ope_gym.policies import POLICY_KINDS, Policy, Target, check_target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, Source, load_source

if TYPE_CHECKING:
    import gymnasium as gym

NAMES = ("a", "b")
LIMIT = 1000
_VERSION = 3
_LARGEST = 100.0  # log ratio that counts as certain

Played = tuple[float, float, float]  # return, control and log ratio of an episode


@dataclass(frozen=True)
class Rules:
    """The terms of a duel, which stay as they are from the first round on.

    Args:
        bounds: lowest and highest possible return of an episode, if there are any.
        deviation: largest standard deviation of the difference of a pair; without bounds and
            deviation the difference of two independent returns is symmetric around its mean.
        margin: difference that does not matter.
        level: probability with which all statements hold.
        gamma: discount.
        limit: pairs of episodes after which a duel ends undecided, as "too close".
        seed: of environments and actions.
    """

    bounds: tuple[float, float] | None
    deviation: float | None
    margin: float
    level: float
    gamma: float
    limit: int
    seed: int

    @property
    def symmetric(self) -> bool:
        """Whether symmetry is what the statements rest on."""
        return self.bounds is None and self.deviation is None


class Duel:
    """Two policies, the rounds that were played, and what is certain after them.

    Made by `ope_gym.duel`; print it for a summary.

        while duel.verdict is None:
            name = duel.next()
            episode = play(policies[name], seed=duel.seed)  # yours
            duel.add(name, episode)

    Attributes:
        rules: the terms.
        prior: what was expected before the first round.
    """

    def __init__(
        self,
        policies: tuple[Policy, Policy],
        rules: Rules,
        prior: Prior,
        controls: tuple[Control | None, Control | None],
    ) -> None:
        self.rules, self.prior = rules, prior
        self._policies, self._controls = dict(zip(NAMES, policies, strict=True)), controls
        self._digests = {name: _digest(one) for name, one in self._policies.items()}
        self._limits = np.array([c.limit for c in controls if c is not None])
        points = [0.0, -rules.margin, rules.margin] if rules.margin else [0.0]
        self._sequence = Rounds(
            Assumed(rules.bounds, rules.deviation),
            self._limits,
            np.array(points),
            level=rules.level,
            limit=rules.limit,
            prior=prior,
        )
        self._rounds: list[dict[str, Played]] = []
        self._open: dict[str, Played] = {}
        self._kind: str | None = None  # of episodes: "trajectories" or "returns"
        self._plan = self._sequence.plan()

    # Play ------------------------------------------------------------------------------------

    def next(self) -> str | None:
        """Return which policy to play next, "a" or "b"; None once there is a verdict."""
        return self._whom() if self.verdict is None else None

    def _whom(self) -> str:
        """Return who plays the next episode of this round."""
        if self._plan.single[0]:
            lot = np.random.default_rng([self.rules.seed, len(self._rounds), 3]).random()
            return NAMES[int(lot >= self._plan.share[0])]
        return next(name for name in NAMES if name not in self._open)

    @property
    def seed(self) -> int:
        """The seed of the next episode, for `env.reset(seed=...)`: the same for both of a pair.

        If symmetric=True each episode has its own: a common seed could make the difference of two
        returns skewed although their distributions are equal.
        """
        return int(np.random.SeedSequence(self._key(0, 4)).generate_state(1)[0] >> 1)

    def rng(self) -> np.random.Generator:
        """Return the generator of the next episode's actions: the same numbers for a pair.

        If symmetric=True each episode has its own, see `seed`.
        """
        return np.random.default_rng(self._key(1, 5))

    def _key(self, common: int, second: int) -> list[int]:
        """Return what seeds this round; `second` tells apart the second one of independent two."""
        apart = self.rules.symmetric and bool(self._open)
        return [self.rules.seed, len(self._rounds), second if apart else common]

    def add(self, policy: str, episode: float | Trajectories) -> None:
        """Take a fresh episode.

        Args:
            policy: "a" or "b", as `next` says.
            episode: the episode as trajectories, with actions drawn from the policy; or its return
                alone, discounted by gamma, which says less. Give all episodes as trajectories, or
                all as returns: a round of one episode is fair to both policies only if what is told
                of the episode does not depend on who was drawn to play it.
        """
        if policy not in NAMES:
            raise ValueError(f"policy is {policy!r}; give 'a' or 'b'")
        if self._plan.single[0] and policy != self._whom():
            raise ValueError(
                f"policy is {policy!r}, but {self._whom()!r} was drawn to play this round alone: "
                "add an episode of the policy that next() names"
            )
        if policy in self._open:
            other = NAMES[1 - NAMES.index(policy)]
            raise ValueError(
                f"policy {policy!r} was played in this round; {other!r} is next: this round is one "
                "episode of each"
            )
        kind = "trajectories" if isinstance(episode, Trajectories) else "returns"
        if self._kind not in (None, kind):
            raise ValueError(
                f"the episode of policy {policy!r} is one of {kind}, but this duel was begun with "
                f"{self._kind}: a mixture makes it invalid; give all episodes as trajectories, or "
                "all as returns"
            )
        self._open[policy] = self._outcome(policy, episode)
        self._kind = kind
        if self._plan.single[0] or len(self._open) == len(NAMES):
            self._close(self._open)
            self._open = {}

    def _outcome(self, policy: str, episode: float | Trajectories) -> Played:
        """Return the return of an episode, its control (0 without one) and its log ratio."""
        if not isinstance(episode, Trajectories):
            self._check_return(policy, float(episode))
            return float(episode), 0.0, _LARGEST if policy == "a" else -_LARGEST
        if len(episode) != 1:
            raise ValueError(f"episode holds {len(episode)} episodes; add one at a time")
        total = float(episode.returns(self.rules.gamma)[0])
        self._check_return(policy, total)
        a, b = (p.log_prob(episode.observations, episode.actions) for p in self._policies.values())
        own = a if policy == "a" else b
        if not np.all(np.isfinite(own)):
            step = int(np.flatnonzero(~np.isfinite(own))[0])
            raise ValueError(
                f"policy {policy!r} gives its action of step {step} the log-probability "
                f"{own[step]}: add episodes whose actions were drawn from the policy"
            )
        ratio = float(np.clip(a.sum() - b.sum(), -_LARGEST, _LARGEST))
        control = self._controls[NAMES.index(policy)]
        if control is None or self._plan.single[0]:
            return total, 0.0, ratio
        rng = np.random.default_rng([self.rules.seed, len(self._rounds), 2])
        return total, float(control.of(episode, rng)[0]), ratio

    def _check_return(self, policy: str, total: float) -> None:
        if self.rules.bounds is None:
            if not np.isfinite(total):
                raise ValueError(f"the return of policy {policy!r} is {total}; give a finite one")
            return
        low, high = self.rules.bounds
        slack = 1e-9 * max(abs(low), abs(high))
        if not low - slack <= total <= high + slack:
            raise ValueError(
                f"the return {total:g} of policy {policy!r} is outside of bounds ({low:g}, "
                f"{high:g}): a duel is valid only within bounds that hold for every episode; start "
                "anew with wider ones"
            )

    def _close(self, played: dict[str, Played]) -> None:
        """Bet on a round that is complete, and plan the next one."""
        self._rounds.append(dict(played))
        unplayed = 0.0, 0.0, 0.0
        both = np.array([played.get(name, unplayed) for name in NAMES])  # (2, 3)
        used = [c is not None for c in self._controls]
        luck = (both[:, 1] * [1.0, -1.0])[used]
        who = np.array([NAMES.index(next(iter(played)))])
        self._sequence.add(self._plan, who, both[None, :, 0], both[None, :, 2], luck[None])
        self._plan = self._sequence.plan()

    def play(
        self, env: gym.Env[Any, Any], episodes: int | None = None, *, gate: bool = False
    ) -> str | None:
        """Play until there is a verdict, and return it.

        Args:
            env: a single environment, as the policies know it; it is reset with seeds.
            episodes: stop after so many more, verdict or not; a round that is open stays open.
            gate: play until `not_worse` is certain instead, or the limit is reached.
        """
        if isinstance(env, str):
            raise TypeError(f"env is {env!r}: give the environment itself, gym.make({env!r})")
        if hasattr(env, "num_envs"):
            raise TypeError(f"env is {env}, a vector environment: give a single one")
        left = np.inf if episodes is None else episodes
        while left > 0 and not (self._gated if gate else self.verdict is not None):
            name = self._whom()
            self.add(name, play_episode(env, self._policies[name], self.seed, self.rng()))
            left -= 1
        return self.verdict

    @property
    def _gated(self) -> bool:
        return self.not_worse() is not None or self.episodes >= 2 * self.rules.limit

    # Conclude --------------------------------------------------------------------------------

    @property
    def verdict(self) -> str | None:
        """The decision: "a" or "b" if it is better, "too close", or None if it is open.

        "too close" if they differ by at most the margin, or if the limit is reached and nothing is
        decided; print the duel to see which.
        """
        wealth = self._sequence.wealth
        above, below = wealth.above[0], wealth.below[0]
        if above[0]:
            return "a"
        if below[0]:
            return "b"
        ended = self._within_margin or self.episodes >= 2 * self.rules.limit
        return "too close" if ended else None

    @property
    def _within_margin(self) -> bool:
        """Whether the two are certain to differ by at most the margin."""
        wealth = self._sequence.wealth
        return bool(self.rules.margin and wealth.above[0, 1] and wealth.below[0, 2])

    def not_worse(self) -> bool | None:
        """Tell whether a is at most the margin worse: True or False once certain, None before."""
        at, wealth = 1 if self.rules.margin else 0, self._sequence.wealth
        if wealth.above[0, at]:
            return True
        return False if wealth.below[0, at] else None

    @property
    def rounds(self) -> int:
        """How many rounds are complete."""
        return len(self._rounds)

    @property
    def episodes(self) -> int:
        """How many fresh episodes were played."""
        return sum(map(len, self._rounds)) + len(self._open)

    @property
    def difference(self) -> float:
        """Estimate of the value of a minus that of b; NaN before the first round."""
        return float(self._sequence.mean[0]) if self._rounds else np.nan

    @property
    def interval(self) -> Interval:
        """The values of a minus b that are not refuted: valid at every look."""
        return self._sequence.wealth.interval()

    def __str__(self) -> str:
        ends = self.interval
        close = f"too close, at most {self.rules.margin:g} apart,"
        if not self._within_margin:
            close = f"limit of {text.count(self.rules.limit, 'pair')} reached, nothing decided,"
        words = {None: "open", "a": "a is better", "b": "b is better", "too close": close}
        return (
            f"{words[self.verdict]} after {text.count(self.episodes, 'fresh episode')} "
            f"({self.confidence()})\nvalue of a minus value of b: "
            f"{text.number(self.difference, 4)}, within {text.interval(ends.low, ends.high, 4)}"
        )

    def confidence(self) -> str:
        """Return how sure the statements are, and what they rest on where there are no bounds."""
        level = 100 * self.rules.level
        sure = f"{level:g} % confidence, valid even if you look after every episode"
        return f"{sure}{self._assumption()}"

    def _assumption(self) -> str:
        if self.rules.bounds is not None:
            return ""
        if self.rules.symmetric:
            return ", if the difference of two independent returns is symmetric around its mean"
        return f", if the standard deviation of a round is at most {self.rules.deviation:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings: terms, verdict, and every round."""
        ends = self.interval
        return {
            "version": _VERSION,
            "rules": {**vars(self.rules), "bounds": _as_list(self.rules.bounds)},
            "prior": {
                key: value.tolist() if isinstance(value, np.ndarray) else float(value)
                for key, value in vars(self.prior).items()
            },
            "policies": self._digests,
            "limits": self._limits.tolist(),
            "verdict": self.verdict,
            "difference": None if not self._rounds else self.difference,
            "interval": [x if np.isfinite(x) else None for x in (ends.low, ends.high)],
            "kind": self._kind,
            "rounds": [{name: list(one) for name, one in r.items()} for r in self._rounds],
            "open": {name: list(one) for name, one in self._open.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write the state to a JSON file, to go on with `ope_gym.duel(..., state=path)`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def duel(
    a: Target,
    b: Target,
    *,
    data: Episodes | None = None,
    bounds: tuple[float, float] | None = None,
    reward_range: tuple[float, float] | None = None,
    horizon: int | None = None,
    deviation: float | None = None,
    symmetric: bool = False,
    margin: float = 0.0,
    level: float = 0.95,
    gamma: float = 1.0,
    limit: int = LIMIT,
    q_model: QModel | str | None = "default",
    held_out: bool | None = None,
    seed: int = 0,
    state: str | Path | None = None,
) -> Duel:
    """Set two policies against each other, to be decided with few fresh episodes.

    Args:
        a: a policy; or the number of a recorded one, or "last", if there are data.
        b: the other.
        data: recorded episodes, as in `ope_gym.evaluate`. They only say what to expect: the
            statements hold even if they mislead.
        bounds: lowest and highest possible return of an episode.
        reward_range: instead of bounds: lowest and highest possible reward of a step.
        horizon: with reward_range: the longest possible episode; by default the recorded limit.
        deviation: instead of bounds: the largest possible standard deviation of the difference of
            two returns with the same seed. Valid for every such distribution, skewed or not; twice
            the true number makes a duel four times as long.
        symmetric: instead of bounds: assume that the difference of two independent returns is
            symmetric around its mean, as it is if the returns of the two policies have the same
            distribution except for a shift. All statements are then valid, even with heavy tails
            and infinite variance. Every episode has a seed of its own, because with common seeds
            equal distributions are not enough. If one policy fails rarely and badly, the assumption
            is wrong, and the duel may be too.
        margin: a difference that does not matter, 0 or more: with it, a duel between two policies
            that are about equal ends as "too close" before the limit.
        level: probability with which all statements hold, at every look.
        gamma: discount of the returns.
        limit: pairs of episodes, played together or alone, after which a duel ends undecided, as
            "too close".
        q_model: as in `ope_gym.evaluate`, for the control variate; None for none.
        held_out: as in `ope_gym.evaluate`.
        seed: seed of the environment and of the actions, round by round.
        state: file of a saved duel, to go on with it; the other arguments must be those that it
            was begun with.
    """
    Options(gamma=gamma, level=level, seed=seed)  # raises
    if not (np.isfinite(margin) and margin >= 0.0):
        raise ValueError(f"margin is {margin!r}; give a difference of 0 or more")
    if not limit >= 1 or limit % 1:
        raise ValueError(f"limit is {limit!r}; give a whole number of pairs, at least 1")
    source = None if data is None else load_source(data, held_out)
    policies = tuple(_policy(target, name, source) for target, name in ((a, "a"), (b, "b")))
    recorded = None if source is None else source.roster.horizon
    free = _free(bounds, reward_range, deviation, symmetric)
    ends = None if free else _bounds(bounds, reward_range, horizon or recorded, gamma)
    rules = Rules(ends, deviation, float(margin), float(level), float(gamma), int(limit), int(seed))
    prior, controls = Prior(), (None, None)
    if source is not None:
        _check_recorded(source, ends, gamma)
        model = None if ends is None else q_model  # no control keeps differences symmetric
        middle = 0.0 if ends is None else sum(ends) / 2
        prior, controls = expect(source, policies, gamma, reward_range, model, seed, middle)  # type: ignore[arg-type, assignment]
    saved = None if state is None or not Path(state).exists() else _read(Path(state), rules)
    if saved is not None:
        _check_policies(policies, saved["policies"])
        prior, controls = _as_saved(saved, prior, controls)  # type: ignore[assignment]
    found = Duel(policies, rules, prior, controls)  # type: ignore[arg-type]
    if saved is not None:
        for played in saved["rounds"]:
            found._close({name: tuple(one) for name, one in played.items()})
        found._open = {name: tuple(one) for name, one in saved["open"].items()}
        found._kind = saved["kind"]
    return found


def _free(
    bounds: tuple[float, float] | None,
    reward_range: tuple[float, float] | None,
    deviation: float | None,
    symmetric: bool,
) -> bool:
    """Return whether a duel goes without bounds, or raise if it is told two things at once."""
    named = {
        "bounds": bounds is not None or reward_range is not None,
        "deviation": deviation is not None,
        "symmetric": symmetric,
    }
    given = [name for name, is_given in named.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given: a duel rests on one of them")
    if deviation is not None and not (np.isfinite(deviation) and deviation > 0.0):
        raise ValueError(f"deviation is {deviation!r}; give a standard deviation above 0")
    return given in (["deviation"], ["symmetric"])


def _policy(target: Target, name: str, source: Source | None) -> Policy:
    if source is not None:
        return source.policy(target, name)
    if isinstance(target, int | str):
        raise ValueError(f"{name} is {target!r}, but there are no data: give a policy, or data")
    return check_target(target, name)


def _bounds(
    bounds: tuple[float, float] | None,
    reward_range: tuple[float, float] | None,
    horizon: int | None,
    gamma: float,
) -> tuple[float, float]:
    """Return lowest and highest return, or raise if they cannot be known."""
    if bounds is None and reward_range is None:
        raise ValueError(
            "a duel needs bounds, the lowest and highest possible return, such as (0, 500) for "
            "CartPole-v1; or reward_range, with a recorded time limit or horizon. Without bounds "
            "no number of episodes can exclude a rare return that is large enough to decide, "
            "unless you can say more: give deviation, the largest standard deviation of the "
            "difference of two returns, or symmetric=True"
        )
    if bounds is not None:
        given, name = bounds, "bounds"
    else:
        assert reward_range is not None
        if horizon is None:
            raise ValueError(
                "reward_range needs horizon, the longest possible episode: no time limit is "
                "recorded; or give bounds of the return"
            )
        unit = annuity_of(gamma, horizon)
        given = min(reward_range[0], 0.0) * unit, max(reward_range[1], 0.0) * unit
        name = "reward_range"
    low, high = (float(end) for end in given)
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"{name} is {given!r}; give finite (lowest, highest), lowest < highest")
    return low, high


def _read(path: Path, rules: Rules) -> dict[str, Any]:
    """Return a saved state, or raise if it belongs to other rules."""
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if saved.get("version") != _VERSION:
        raise ValueError(
            f"{path} is not a state of a duel of version {_VERSION}: give another file"
        )
    then = saved["rules"]
    for name, value in vars(rules).items():
        old = tuple(then[name]) if isinstance(then[name], list) else then[name]
        if old != value:
            raise ValueError(
                f"{name} is {value!r}, but {path} was begun with {old!r}: rules that change during "
                "a duel void it; give the same, or begin anew with another file"
            )
    return saved


def _digest(policy: Policy) -> str | None:
    """Return a hash of a policy as a file would hold it; None if none can."""
    kind = getattr(policy, "kind", None)
    if kind not in POLICY_KINDS:
        return None
    known = hashlib.blake2b(kind.encode(), digest_size=16)
    for name, array in sorted(policy.arrays().items()):  # type: ignore[attr-defined]
        known.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        known.update(array.tobytes())
    return known.hexdigest()


def _check_policies(policies: tuple[Policy, ...], saved: dict[str, str | None]) -> None:
    """Raise if a policy is certain to be another one than that of a saved duel."""
    for name, policy in zip(NAMES, policies, strict=True):
        now, then = _digest(policy), saved[name]
        if None not in (now, then) and now != then:
            raise ValueError(
                f"policy {name!r} is not the one that state was begun with: give the same, or "
                "begin anew with another file"
            )


def _as_saved(
    saved: dict[str, Any], prior: Prior, controls: tuple[Control | None, Control | None]
) -> tuple[Prior, tuple[Control | None, Control | None]]:
    """Return the prior of a saved duel, with controls only if these have the same limits."""
    arrays = {
        key: np.array(value) if isinstance(value, list) else float(value)
        for key, value in saved["prior"].items()
    }
    limits = [c.limit for c in controls if c is not None]
    if limits != saved["limits"]:
        raise ValueError(
            "state was saved with other recorded episodes or another q_model: give the same data, "
            "or begin anew with another file"
        )
    return Prior(**arrays), controls  # type: ignore[arg-type]


def _check_recorded(source: Source, bounds: tuple[float, float] | None, gamma: float) -> None:
    """Raise if a recorded return shows that the bounds do not hold."""
    if bounds is None:
        return
    assert source.data is not None  # all of it is in memory
    returns = source.data.returns(gamma)
    slack = 1e-9 * max(map(abs, bounds))
    outside = np.flatnonzero((returns < bounds[0] - slack) | (returns > bounds[1] + slack))
    if outside.size:
        i = int(outside[0])
        raise ValueError(
            f"bounds are ({bounds[0]:g}, {bounds[1]:g}), but the recorded episode {i} returned "
            f"{returns[i]:g}: a duel is valid only within bounds that hold for every episode; give "
            "wider ones"
        )


def _as_list(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else list(bounds)


def play_episode(
    env: gym.Env[Any, Any], policy: Policy, seed: int, rng: np.random.Generator
) -> Trajectories:
    """Play one episode of a policy and return it.

    Args:
        env: a single environment.
        policy: that plays.
        seed: of the reset.
        rng: of the actions.
    """
    observation, _ = env.reset(seed=seed)
    seen: list[Any] = []
    actions: list[Any] = []
    rewards: list[float] = []
    terminated = truncated = False
    while not (terminated or truncated):
        batch = spaces.stack(env.observation_space, [observation])
        action = spaces.only_action(env.action_space, policy.sample(batch, rng))
        seen.append(observation)
        actions.append(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
    observations = spaces.stack(env.observation_space, seen)
    chosen = spaces.stack(env.action_space, actions)
    return Trajectories.from_arrays(
        observations,
        chosen,
        rewards,
        policy.log_prob(observations, chosen),
        offsets=[0, len(rewards)],
        policies=[policy],
        terminated=terminated,
        truncated=truncated,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
