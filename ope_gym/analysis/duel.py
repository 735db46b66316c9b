"""Decide which of two policies is better with few fresh episodes, and look as often as you like.

A round plays both policies, as a rule with the same seeds, or one that is drawn by lot, whichever
promises a decision sooner. The statements of a duel hold together with probability `level`, however
often you look and whenever you stop: `ope_gym.inference.sequences` and `ope_gym.inference.rounds`
have the argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ope_gym.analysis import duel_state
from ope_gym.analysis.duel_rules import Rules, RuleValues
from ope_gym.arguments import path_of, real, refusal, whole
from ope_gym.data import spaces
from ope_gym.data.trajectories import Trajectories
from ope_gym.inference.intervals import Interval
from ope_gym.inference.rounds import Rounds
from ope_gym.inference.sequences import Assumed
from ope_gym.policies import POLICY_KINDS, Policy, Target, check_target
from ope_gym.policies.base import digest
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, Source, load_source
from ope_gym.verdict import Reason, Verdict

if TYPE_CHECKING:
    import gymnasium as gym
    from typing_extensions import Unpack

NAMES = ("a", "b")
_DECISIONS = {  # by the code of the reason
    "a_better": "a",
    "b_better": "b",
    "too_close": "too close",
    "duel_undecided": "too close",
}
_CERTAIN = 100.0  # log ratio of an episode that only one of the two could have played


class Played(NamedTuple):
    """The return of an episode, and log p_a - log p_b of its actions."""

    total: float
    log_ratio: float


class Duel:
    """Two policies, the rounds that were played, and what is certain after them.

    Made by `ope_gym.duel`; print it for a summary.

        while duel.decision is None:
            name = duel.next()
            episode = play(policies[name], seed=duel.seed)  # yours
            duel.add(name, episode)

    Attributes:
        rules: the terms.
    """

    def __init__(self, policies: tuple[Policy, Policy], rules: Rules) -> None:
        self.rules = rules
        self._policies = dict(zip(NAMES, policies, strict=True))
        points = [0.0, -rules.margin, rules.margin] if rules.margin else [0.0]
        self._sequence = Rounds(
            Assumed(rules.bounds, rules.deviation),
            np.array(points),
            level=rules.level,
            limit=rules.limit,
        )
        self._rounds: list[dict[str, Played]] = []
        self._episodes: list[duel_state.Row] = []  # of all rounds, in their order
        self._saved: tuple[Path, int] | None = None  # where, and how many of them
        self._open: dict[str, Played] = {}
        self._kind: str | None = None  # of episodes: "trajectories" or "returns"
        self._plan = self._sequence.plan()

    # Play ------------------------------------------------------------------------------------

    def next(self) -> str | None:
        """Return which policy to play next, "a" or "b"; None once there is a decision."""
        return self._whom() if self.decision is None else None

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
        if policy in self._open or (self._plan.single[0] and policy != self._whom()):
            alone = " was drawn to play this round alone" if self._plan.single[0] else " is next"
            raise ValueError(
                f"policy is {policy!r}, but {self._whom()!r}{alone}: add an episode of the policy "
                "that next() names"
            )
        kind = "trajectories" if isinstance(episode, Trajectories) else "returns"
        if self._kind not in (None, kind):
            raise ValueError(
                f"the episode of policy {policy!r} is one of {kind}, but this duel was begun with "
                f"{self._kind}: a mixture makes it invalid; give all episodes as trajectories, or "
                "all as returns"
            )
        self._take(policy, self._outcome(policy, episode), kind)

    def _take(self, policy: str, episode: Played, kind: str) -> None:
        """Add an episode to the open round, and close it if that was its last."""
        self._episodes.append(duel_state.Row(len(self._rounds), policy, kind, *episode))
        self._open[policy], self._kind = episode, kind
        if self._plan.single[0] or len(self._open) == len(NAMES):
            self._close(self._open)
            self._open = {}

    def _outcome(self, policy: str, episode: float | Trajectories) -> Played:
        """Return what the bets need of an episode, or raise if it cannot be one of the policy."""
        if not isinstance(episode, Trajectories):
            total = real("episode", episode, "give its return, or the episode as trajectories")
            self._check_return(policy, total)
            return Played(total, _CERTAIN if policy == "a" else -_CERTAIN)
        if len(episode) != 1:
            raise ValueError(f"episode holds {len(episode)} episodes; add one at a time")
        total = float(episode.returns(self.rules.gamma)[0])
        self._check_return(policy, total)
        logs = {
            name: player.log_prob(episode.observations, episode.actions)
            for name, player in self._policies.items()
        }
        impossible = np.flatnonzero(~np.isfinite(logs[policy]))
        if impossible.size:
            step = int(impossible[0])
            raise ValueError(
                f"policy {policy!r} gives its action of step {step} the log-probability "
                f"{logs[policy][step]}: add episodes whose actions were drawn from the policy"
            )
        ratio = logs["a"].sum() - logs["b"].sum()
        return Played(total, float(np.clip(ratio, -_CERTAIN, _CERTAIN)))

    def _check_return(self, policy: str, total: float) -> None:
        if not np.isfinite(total):
            raise ValueError(f"the return of policy {policy!r} is {total}; give a finite one")
        if self.rules.bounds is not None and self.rules.outside(total):
            low, high = self.rules.bounds
            raise ValueError(
                f"the return {total:g} of policy {policy!r} is outside of bounds ({low:g}, "
                f"{high:g}): a duel is valid only within bounds that hold for every episode; start "
                "anew with wider ones"
            )

    def _close(self, played: dict[str, Played]) -> None:
        """Bet on a round that is complete, and plan the next one."""
        self._rounds.append(played)
        both = np.array([[played.get(name, Played(0.0, 0.0)) for name in NAMES]])  # (1, 2, 2)
        who = np.array([NAMES.index(next(iter(played)))])
        self._sequence.add(self._plan, who, both[..., 0], both[..., 1])
        self._plan = self._sequence.plan()

    def play(
        self, env: gym.Env[Any, Any], episodes: int | None = None, *, gate: bool = False
    ) -> str | None:
        """Play until there is a decision, and return it.

        Args:
            env: a single environment, as the policies know it; it is reset with seeds.
            episodes: stop after so many more, decided or not; a round that is open stays open.
            gate: play until `not_worse` is certain instead, or the limit is reached.
        """
        if isinstance(env, str):
            raise TypeError(f"env is {env!r}: give the environment itself, gym.make({env!r})")
        if hasattr(env, "num_envs") or not hasattr(env, "reset"):
            raise refusal("env", env, "give a single environment, such as gym.make('CartPole-v1')")
        last = np.inf if episodes is None else self.episodes + whole("episodes", episodes)
        while self.episodes < last and not (self._gated if gate else self.decision is not None):
            name = self._whom()
            self.add(name, play_episode(env, self._policies[name], self.seed, self.rng()))
        return self.decision

    # Conclude --------------------------------------------------------------------------------

    @property
    def decision(self) -> str | None:
        """The better one: "a" or "b" if it is better, "too close", or None if it is open.

        "too close" if they differ by at most the margin, or if the limit is reached and nothing is
        decided; print the duel to see which.
        """
        return _DECISIONS.get(self.verdict.reasons[0].code)

    @property
    def verdict(self) -> Verdict:
        """The decision with its facts: green once something is certain, else amber."""
        wealth = self._sequence.wealth
        if wealth.above[0, 0]:
            reason = Reason("a_better")
        elif wealth.below[0, 0]:
            reason = Reason("b_better")
        elif self.rules.margin and wealth.above[0, 1] and wealth.below[0, 2]:
            reason = Reason("too_close", margin=self.rules.margin)
        elif self._at_limit:
            reason = Reason("duel_undecided", pairs=self.rules.limit)
        else:
            reason = Reason("duel_open")
        return Verdict.of([reason])

    @property
    def gate_verdict(self) -> Verdict:
        """Whether a may replace b: green if it is not worse, red if it is, else amber."""
        allowed, passed = self.rules.margin, self.not_worse()
        if passed is None and self._at_limit:
            reason = Reason("gate_undecided", pairs=self.rules.limit)
        elif passed is None:
            reason = Reason("duel_open")
        elif not passed:
            reason = (
                Reason("gate_failed_beyond", allowed=allowed) if allowed else Reason("gate_failed")
            )
        elif allowed and self.interval.low < 0.0:
            worse = min(-self.interval.low, allowed)
            reason = Reason("gate_passed_within", worse=worse, allowed=allowed)
        else:
            reason = Reason("gate_passed")
        return Verdict.of([reason])

    @property
    def _at_limit(self) -> bool:
        return self.episodes >= 2 * self.rules.limit

    @property
    def _gated(self) -> bool:
        return self.not_worse() is not None or self._at_limit

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
        return len(self._episodes)

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
        comma = "," if self.decision == "too close" else ""
        return (
            f"{self.verdict.reasons[0]}{comma} after {text.count(self.episodes, 'fresh episode')} "
            f"({self.rules})\nvalue of a minus value of b: "
            f"{text.number(self.difference, 4)}, within {text.interval(ends.low, ends.high, 4)}"
        )

    # Keep ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings: terms, decision, and every round."""
        ends = self.interval
        return {
            **self._terms(),
            "decision": self.decision,
            "verdict": self.verdict.to_dict(),
            "difference": self.difference if self._rounds else None,
            "interval": [x if np.isfinite(x) else None for x in (ends.low, ends.high)],
            "kind": self._kind,
            "rounds": list(self._rounds),
            "open": dict(self._open),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(), path)

    def _terms(self) -> dict[str, Any]:
        """Return what must not change during a duel."""
        digests = {name: _digest(policy) for name, policy in self._policies.items()}
        return {"rules": self.rules.to_dict(), "policies": digests}

    def save(self, path: str | Path) -> None:
        """Keep the state in a file, to go on with `ope_gym.duel(..., state=path)`.

        Saving again to the same file adds the new episodes; a crash loses none that were saved.
        """
        where = Path(path_of("path", path))
        if self._saved is not None and self._saved[0] == where and duel_state.holds_state(where):
            first = self._saved[1]
            duel_state.append(where, first, self._episodes[first:])
        else:
            duel_state.create(where, self._terms(), self._episodes)
        self._saved = where, len(self._episodes)

    def restore(self, path: str | Path) -> None:
        """Take the rounds of a saved duel, or raise if it had other rules or policies."""
        terms, episodes = duel_state.read(path)
        for name, value in self.rules.to_dict().items():
            if (then := terms["rules"].get(name)) != value:
                raise ValueError(
                    f"{name} is {value!r}, but {path} was begun with {then!r}: "
                    "rules that change during a duel void it; give the same, or begin anew with "
                    "another file"
                )
        for name, policy in self._policies.items():
            now, then = _digest(policy), terms["policies"].get(name)
            if None not in (now, then) and now != then:
                raise ValueError(
                    f"policy {name!r} is not the one that state was begun with: give the same, or "
                    "begin anew with another file"
                )
        for number, policy_name, kind, total, log_ratio in episodes:
            alone = self._plan.single[0] and policy_name != self._whom()
            if number != self.rounds or policy_name in self._open or alone:
                raise duel_state.foreign(path)
            self._take(policy_name, Played(total, log_ratio), kind)
        self._saved = Path(path), len(episodes)


def duel(
    a: Target,
    b: Target,
    *,
    data: Episodes | None = None,
    state: str | Path | None = None,
    **rules: Unpack[RuleValues],
) -> Duel:
    """Set two policies against each other, to be decided with few fresh episodes.

    Args:
        a: a policy; or the number of a recorded one, or "last", if there are data.
        b: the other.
        data: recorded episodes, as in `ope_gym.evaluate`: they hold policies and a time limit, and
            show whether bounds can hold. They are no evidence of which policy is better.
        state: file of a saved duel, to go on with it; the other arguments must be those that it
            was begun with.
        rules: those of `ope_gym.analysis.duel_rules.Rules`: one of `bounds`, `reward_range` (with
            `horizon`), `deviation` and `symmetric`, on which all statements rest; `margin`,
            `level`, `gamma`, `limit` in pairs of episodes, `seed`.
    """
    source = None if data is None else load_source(data)
    if source is not None and rules.get("reward_range") is not None:
        rules["horizon"] = rules.get("horizon") or source.roster.horizon
    terms = Rules(**rules)
    if source is not None and source.data is not None:
        terms.check(source.data)
    result = Duel((_policy(a, "a", source), _policy(b, "b", source)), terms)
    if state is not None and duel_state.holds_state(path_of("state", state)):
        result.restore(state)
    return result


def _policy(target: Target, name: str, source: Source | None) -> Policy:
    if source is not None:
        return source.policy(target, name)
    if isinstance(target, int | str):
        raise ValueError(f"{name} is {target!r}, but there are no data: give a policy, or data")
    return check_target(target, name)


def _digest(policy: Policy) -> str | None:
    """Return a hash of a policy as a file would hold it; None if none can."""
    kind = getattr(policy, "kind", None)
    return digest(kind, policy.arrays()) if kind in POLICY_KINDS else None  # type: ignore[attr-defined]


def play_episode(
    env: gym.Env[Any, Any], policy: Policy, seed: int, rng: np.random.Generator
) -> Trajectories:
    """Play one episode of a policy and return it.

    Args:
        env: a single environment.
        policy: policy that plays.
        seed: seed of the reset.
        rng: generator of the actions.
    """
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards = [], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        batch = spaces.stack(env.observation_space, [observation])
        action = spaces.only_action(env.action_space, policy.sample(batch, rng))
        observations.append(observation)
        actions.append(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
    seen = spaces.stack(env.observation_space, observations)
    chosen = spaces.stack(env.action_space, actions)
    return Trajectories.from_arrays(
        seen,
        chosen,
        rewards,
        policy.log_prob(seen, chosen),
        offsets=[0, len(rewards)],
        policies=[policy],
        terminated=terminated,
        truncated=truncated,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
