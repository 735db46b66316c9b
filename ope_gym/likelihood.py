"""From recorded policies to log-probabilities: behaviours, their rows, and checks of propensities.

A behaviour is a policy; or, where the loop changed its policy during episodes, the sequence of
policies an episode *would* have followed had it lasted. Grouping episodes by the sequence they did
follow would let the mixture depend on how long they lived, and bias it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ope_gym import trees
from ope_gym.policies import Policy, UnavailablePolicy, log_prob_moments
from ope_gym.trajectories import Trajectories
from ope_gym.weights import FloatArray, IntArray

_ROWS = 1 << 15  # steps evaluated at once
_FALSE_ALARM = 1e-3  # probability of an alarm about propensities that are right
_ROUNDING = 1e-5  # of one log-probability, not to be called a surprise
_MISMATCH = 1e-4  # logged and recomputed log-probabilities may differ by this (float32 networks)


@dataclass(frozen=True)
class Behaviours:
    """Who could have produced each trajectory.

    Args:
        ids: (n,) behaviour of each trajectory.
        counts: (K,) trajectories of each.
        plans: K plans: ((step, policy), ...), from that step of an episode on that policy acts.
        strata: (n,) groups of like trajectories: the behaviour, or where the policy changed during
            episodes the policy at the start, because such behaviours seldom repeat.
        policies: (P,) the policies that occur in the plans, in order.
        available: whether all of them can be asked for probabilities.
    """

    ids: IntArray
    counts: IntArray
    plans: tuple[tuple[tuple[int, int], ...], ...]
    strata: IntArray
    policies: IntArray
    available: bool

    @property
    def names(self) -> tuple[str, ...]:
        """(K,) for people: "policy 3", or "policies 3 then 4 from step 17"."""
        return tuple(_name(plan) for plan in self.plans)

    def rows(self, data: Trajectories, *, only_own: bool = False) -> BehaviourRows:
        """The log-probabilities under all behaviours, block by block."""
        return BehaviourRows(data, self, only_own)


def _name(plan: tuple[tuple[int, int], ...]) -> str:
    if len(plan) == 1:
        return f"policy {plan[0][1]}"
    changes = ", ".join(f"{policy} from step {step}" for step, policy in plan[1:])
    return f"policy {plan[0][1]}, then {changes}"


def behaviours_of(data: Trajectories) -> Behaviours:
    """Group trajectories by the policies they would have followed over the longest episode."""
    longest = int(data.lengths.max())
    start = data.policy_ids[data.offsets[:-1]]
    clocked = data.schedule_ids >= 0
    key = np.stack(  # one row a trajectory; the policy alone where it never changes inside one
        [data.schedule_ids, np.where(clocked, data.start_clock, start)], axis=1
    )
    distinct, inverse = np.unique(key, axis=0, return_inverse=True)
    plans = [_plan(data, int(schedule), int(value), longest) for schedule, value in distinct]
    order = {plan: rank for rank, plan in enumerate(sorted(set(plans)))}
    ids = np.array([order[plan] for plan in plans])[inverse.ravel()]
    kept = tuple(order)
    policies = np.unique([policy for plan in kept for _, policy in plan])
    return Behaviours(
        ids=ids,
        counts=np.bincount(ids, minlength=len(kept)),
        plans=kept,
        strata=start.astype(np.int64) if clocked.any() else ids,
        policies=policies,
        available=not any(isinstance(data.policies[p], UnavailablePolicy) for p in policies),
    )


def _plan(
    data: Trajectories, schedule_id: int, value: int, longest: int
) -> tuple[tuple[int, int], ...]:
    """The plan of a policy (schedule_id < 0), or of an episode that began at clock `value`."""
    if schedule_id < 0:
        return ((0, value),)
    schedule = data.schedules[schedule_id]
    first = int(np.searchsorted(schedule.clocks, value, side="right")) - 1
    stop = int(np.searchsorted(schedule.clocks, value + longest, side="left"))
    plan: list[tuple[int, int]] = []
    for j in range(first, max(stop, first + 1)):
        policy = int(schedule.policies[j])
        step = max(0, int(schedule.clocks[j]) - value)
        if not plan or plan[-1][1] != policy:
            plan.append((step, policy))
    return tuple(plan)


@dataclass
class BehaviourRows:
    """Per-step log-probabilities under each behaviour (K, S), evaluated in blocks.

    The logged numbers stand for the policy that acted; the snapshots give the rest.

    Args:
        data: the trajectories.
        behaviours: their behaviours.
        only_own: evaluate no policy: all rows hold the logged numbers (enough for basic weights).
        mismatch: in words, the first logged number that its snapshot contradicts; empty if none.
    """

    data: Trajectories
    behaviours: Behaviours
    only_own: bool = False
    mismatch: str = field(default="", init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, S)."""
        return len(self.behaviours.plans), self.data.n_steps

    def block(self, start: int, stop: int) -> FloatArray:
        """(K, stop - start) log-probabilities of steps start..stop-1."""
        logged = self.data.log_probs[start:stop]
        if self.only_own:
            return np.ascontiguousarray(np.broadcast_to(logged, (self.shape[0], stop - start)))
        used = self.behaviours.policies
        observations = trees.take(self.data.observations, slice(start, stop))
        actions = trees.take(self.data.actions, slice(start, stop))
        table = stack_log_probs(
            [self.data.policies[p] for p in used], observations, actions, used.tolist()
        )
        columns = np.arange(stop - start)
        acting = np.searchsorted(used, self.data.policy_ids[start:stop])
        self._compare(table[acting, columns], logged, start)
        table[acting, columns] = logged
        plans = self.behaviours.plans
        if all(len(plan) == 1 for plan in plans):
            policies = [plan[0][1] for plan in plans]
            return table if policies == used.tolist() else table[np.searchsorted(used, policies)]
        steps = self.data.steps[start:stop]
        block = np.empty((len(plans), stop - start))
        for row, plan in zip(block, plans, strict=True):
            begins, acts = zip(*plan, strict=True)
            phase = np.searchsorted(begins, steps, side="right") - 1
            row[:] = table[np.searchsorted(used, acts)[phase], columns]
        return block

    def _compare(self, recomputed: FloatArray, logged: FloatArray, start: int) -> None:
        gap = ~(np.abs(recomputed - logged) <= _MISMATCH * (1.0 + np.abs(logged)))  # NaN too
        if not self.mismatch and gap.any():
            row = int(np.argmax(gap))
            episode = int(np.searchsorted(self.data.offsets, start + row, side="right")) - 1
            step = start + row - int(self.data.offsets[episode])
            self.mismatch = (
                f"logged propensities contradict the policy: episode {episode}, step {step} has "
                f"{logged[row]:.6g} but policy {self.data.policy_ids[start + row]} gives "
                f"{recomputed[row]:.6g}"
            )


def stack_log_probs(
    policies: Sequence[Policy], observations: trees.Tree, actions: trees.Tree, names: Sequence[int]
) -> FloatArray:
    """(P, m) log-probabilities of the same actions under several policies."""
    rows = trees.length(actions)
    kind = type(policies[0])
    alike = len(policies) > 1 and all(type(policy) is kind for policy in policies)
    if alike and hasattr(kind, "log_prob_stack"):
        stacked = np.asarray(kind.log_prob_stack(policies, observations, actions))
        if stacked.shape != (len(policies), rows):
            raise ValueError(
                f"{kind.__name__}.log_prob_stack gave shape {stacked.shape} for {len(policies)} "
                f"policies and {rows} steps; it must return ({len(policies)}, {rows})"
            )
        return stacked.astype(np.float64, copy=False)
    table = np.empty((len(policies), rows))
    for row, policy, name in zip(table, policies, names, strict=True):
        row[:] = _checked(policy.log_prob(observations, actions), rows, f"policy {name}")
    return table


def policy_log_probs(policy: Policy, name: str, data: Trajectories) -> FloatArray:
    """(S,) log-probabilities of the recorded actions under a policy, evaluated in blocks."""
    result = np.empty(data.n_steps)
    for start in range(0, data.n_steps, _ROWS):
        rows = slice(start, min(start + _ROWS, data.n_steps))
        observations, actions = trees.take(data.observations, rows), trees.take(data.actions, rows)
        values = policy.log_prob(observations, actions)
        result[rows] = _checked(values, rows.stop - rows.start, name)
    return result


def _checked(values: FloatArray, rows: int, name: str) -> FloatArray:
    values = np.asarray(values)
    if values.shape != (rows,):
        raise ValueError(
            f"{name} gave log-probabilities of shape {values.shape} for {rows} steps; "
            f"its log_prob(observations, actions) must return ({rows},)"
        )
    return values


@dataclass(frozen=True)
class PropensityReport:
    """Checks of the recorded propensities against the policies.

    Args:
        calibration: (all policies,) Z_k = sum [ln pi(a|s) + H] / sqrt(sum Var[ln pi]) over the
            steps at which policy k acted, about standard normal if they were recorded rightly.
        alarms: policies whose surprise is too large for chance, by Bernstein's inequality with the
            largest single surprise as the jump: one rare but legal action raises none.
        support: by scheme, visited steps at which the target may choose an action that its own
            behaviour (basic), or every behaviour (fused, optimal), never would.
    """

    calibration: FloatArray
    alarms: tuple[int, ...]
    support: dict[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """The alarms in words."""
        return tuple(
            f"the propensities of policy {k} look wrongly recorded (Z = {self.calibration[k]:.1f})"
            for k in self.alarms
        )


def check_propensities(
    data: Trajectories, target: Policy, behaviours: Behaviours
) -> PropensityReport:
    """Calibration of each policy that acted, and support of the target."""
    size = len(data.policies)
    surprise, variance, jump = np.zeros(size), np.zeros(size), np.zeros(size)
    own_only, uncovered = 0, 0
    known = (target, *(data.policies[k] for k in behaviours.policies))
    finite = all(hasattr(policy, "probs") for policy in known)
    for start in range(0, data.n_steps, _ROWS):
        rows = slice(start, min(start + _ROWS, data.n_steps))
        observations = trees.take(data.observations, rows)
        target_probs = target.probs(observations) if finite else None  # type: ignore[attr-defined]
        acting = data.policy_ids[rows]
        for k in np.unique(acting):
            policy, mine = data.policies[k], np.flatnonzero(acting == k)
            seen = trees.take(observations, mine)
            moments = log_prob_moments(policy, seen)
            if moments is None:
                variance[k] = np.nan
                continue
            surprises = data.log_probs[rows][mine] - moments[0]
            surprise[k] += np.sum(surprises)
            variance[k] += np.sum(moments[1])
            jump[k] = max(jump[k], np.abs(surprises).max())
            if target_probs is not None:
                taken = policy.probs(seen) > 0
                if taken.shape[1] != target_probs.shape[1]:
                    raise ValueError(
                        f"target has {target_probs.shape[1]} actions, but policy {k} has "
                        f"{taken.shape[1]}: both must be policies of one environment"
                    )
                missing = np.any(~taken & (target_probs[mine] > 0), axis=1)
                own_only += int(np.count_nonzero(missing))
                if missing.any():
                    gap = trees.take(seen, np.flatnonzero(missing))
                    uncovered += _uncovered(data, behaviours, gap, target_probs[mine][missing])
    support = {"basic": own_only, "fused": uncovered, "optimal": uncovered} if finite else {}
    acted = np.bincount(data.policy_ids, minlength=size)
    flat = variance <= acted * _ROUNDING**2  # uniform, deterministic: rounding is all there is
    exact = flat & (np.abs(surprise) <= acted * _ROUNDING)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(exact, 0.0, surprise / np.sqrt(variance))
        exponent = surprise**2 / (2 * variance + jump * np.abs(surprise) / 1.5)
    z[acted == 0] = np.nan
    limit = np.log(2 * np.count_nonzero(acted) / _FALSE_ALARM)
    alarms = np.flatnonzero(((exponent > limit) | flat) & ~exact & (acted > 0))
    return PropensityReport(z, tuple(alarms.tolist()), support)


def _uncovered(
    data: Trajectories, behaviours: Behaviours, observations: trees.Tree, target: FloatArray
) -> int:
    """Steps at which some action of the target has probability zero under every policy."""
    reachable = np.zeros(target.shape, dtype=bool)
    for k in behaviours.policies:
        reachable |= data.policies[k].probs(observations) > 0
    return int(np.count_nonzero(np.any((target > 0) & ~reachable, axis=1)))
