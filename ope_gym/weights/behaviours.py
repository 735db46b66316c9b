"""Behaviours, and the log-probabilities of the recorded actions under each of them.

A behaviour is a policy; or, where the loop changed its policy during episodes, the sequence of
policies an episode *would* have followed had it lasted. Grouping episodes by the sequence they did
follow would let the mixture depend on how long they lived, and bias it.

Mixtures of many behaviours are partial, so that cost stays linear in steps:

    w_i,t = P_e,t / sum_{k in g} (n_k / n_g) P_k,t,   g the group of i's behaviour, n_g its episodes

The behaviours are split into groups by their order and their numbers of episodes alone. These
numbers must not depend on outcomes, as for any mixture. Then each group by itself is a data set
with its own mixture, its FIS is unbiased wherever some behaviour *of the group* can do what the
target can, and so is the mean of all; NFIS stays consistent. Groups of one are basic weights, one
group of all is the whole mixture. Evaluating the policies costs steps times the size of a group,
instead of steps times behaviours: with an update per episode, linear instead of quadratic.

Groups are interleaved: each takes one of every G neighbours, so that each spans the whole training
history and its mixture is a quadrature of the whole one. Contiguous blocks of history lose most of
the precision, since the first block weighs its episodes against the first policies alone:
`docs/scale.md` measures both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.roster import Roster
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy, UnavailablePolicy
from ope_gym.policies.estimated import EstimatedPolicy, estimated_folds
from ope_gym.verdict import Reason
from ope_gym.weights.formula import log_weights

ROWS = 1 << 14  # steps evaluated at once: the layers of a small network stay in cache
_MISMATCH = 1e-4  # logged and recomputed log-probabilities may differ by this (float32 networks)


@dataclass(frozen=True)
class Behaviours:
    """The behaviours that could have produced each trajectory.

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
    def shared(self) -> Behaviours:
        """These behaviours without the ids of trajectories, as all parts of the data share them."""
        nobody = np.empty(0, dtype=np.int64)
        return replace(self, ids=nobody, strata=nobody)

    @property
    def names(self) -> tuple[str, ...]:
        """(K,) names for messages: "policy 3", or "policy 3, then 4 from step 17"."""
        return tuple(_name(plan) for plan in self.plans)

    def rows(
        self, data: Trajectories, *, only_own: bool = False, episodes: IntArray | None = None
    ) -> BehaviourRows:
        """Return the log-probabilities under all behaviours, to be read block by block."""
        return BehaviourRows(data, self, only_own, episodes)

    def part(self, members: IntArray, ids: IntArray) -> Behaviours:
        """Return some of the behaviours, numbered anew; `ids` number their trajectories."""
        plans = tuple(self.plans[k] for k in members)
        policies = np.unique([policy for plan in plans for _, policy in plan])
        return Behaviours(ids, self.counts[members], plans, ids, policies, self.available)


def _name(plan: tuple[tuple[int, int], ...]) -> str:
    if len(plan) == 1:
        return f"policy {plan[0][1]}"
    changes = ", ".join(f"{policy} from step {step}" for step, policy in plan[1:])
    return f"policy {plan[0][1]}, then {changes}"


def behaviours_of(data: Trajectories | Roster) -> Behaviours:
    """Group trajectories by the policies they would have followed over the longest episode."""
    data = Roster.of(data) if isinstance(data, Trajectories) else data
    longest = int(data.lengths.max())
    start = data.first_policies
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


def _plan(data: Roster, schedule_id: int, value: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Return the plan of policy `value` (schedule_id < 0), or of an episode begun at that clock."""
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

    Where a policy acted itself its logged log-probability is used; snapshots give all others.

    Args:
        data: the trajectories.
        behaviours: their behaviours.
        only_own: evaluate no policy: all rows hold the logged numbers (enough for basic weights).
        episodes: (n,) numbers of the trajectories in messages; 0, 1, ... unless given.
        mismatch: first logged number that its snapshot contradicts; None if none does.
    """

    data: Trajectories
    behaviours: Behaviours
    only_own: bool = False
    episodes: IntArray | None = None
    mismatch: Reason | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, S)."""
        return len(self.behaviours.plans), self.data.n_steps

    def block(self, start: int, stop: int) -> FloatArray:
        """Return (K, stop - start) log-probabilities of steps start..stop-1."""
        logged = self.data.log_probs[start:stop]
        if self.only_own:
            return np.ascontiguousarray(np.broadcast_to(logged, (self.shape[0], stop - start)))
        used = self.behaviours.policies
        observations = batches.take(self.data.observations, slice(start, stop))
        actions = batches.take(self.data.actions, slice(start, stop))
        table = stack_log_probs(
            [self.data.policies[p] for p in used], observations, actions, used.tolist()
        )
        place = np.full(len(self.data.policies), -1)
        place[used] = np.arange(used.size)
        acting, columns = place[self.data.policy_ids[start:stop]], np.arange(logged.size)
        if acting.min() < 0:  # not all behaviours are here
            columns = np.flatnonzero(acting >= 0)
            acting, logged = acting[columns], logged[columns]
        cells = acting * table.shape[1] + columns
        self._compare(np.take(table, cells), logged, start + columns)
        np.put(table, cells, logged)
        return follow_plans(table, self.behaviours, self.data.steps[start:stop])

    def _compare(self, recomputed: FloatArray, logged: FloatArray, rows: IntArray) -> None:
        gap = ~(np.abs(recomputed - logged) <= _MISMATCH * (1.0 + np.abs(logged)))  # NaN too
        if self.mismatch is None and gap.any():
            first = int(np.argmax(gap))
            row = int(rows[first])
            episode = int(np.searchsorted(self.data.offsets, row, side="right")) - 1
            step = row - int(self.data.offsets[episode])
            number = episode if self.episodes is None else int(self.episodes[episode])
            self.mismatch = Reason(
                "propensity_contradicted",
                episode=number,
                step=step,
                logged=float(logged[first]),
                policy=int(self.data.policy_ids[row]),
                given=float(recomputed[first]),
            )


def follow_plans(table: FloatArray, behaviours: Behaviours, steps: IntArray) -> FloatArray:
    """Turn log-probabilities (P, m) under policies into those (K, m) under behaviours.

    Args:
        table: (P, m) under `behaviours.policies`.
        behaviours: whose plans say who acts.
        steps: (m,) the step of each column in its episode.
    """
    used, plans = behaviours.policies, behaviours.plans
    if all(len(plan) == 1 for plan in plans):
        policies = [plan[0][1] for plan in plans]
        return table if policies == used.tolist() else table[np.searchsorted(used, policies)]
    columns = np.arange(steps.size)
    block = np.empty((len(plans), steps.size))
    for row, plan in zip(block, plans, strict=True):
        begins, acts = zip(*plan, strict=True)
        phase = np.searchsorted(begins, steps, side="right") - 1
        row[:] = table[np.searchsorted(used, acts)[phase], columns]
    return block


def stacks(policies: Sequence[Policy]) -> bool:
    """Tell whether the policies are of base class, which can be asked for all of them at once."""
    kind = type(policies[0])
    if len(policies) < 2 or any(type(policy) is not kind for policy in policies):
        return False
    for base in kind.__mro__:  # a subclass with another `log_prob` is asked for that
        if "log_prob_stack" in vars(base) or "log_prob" in vars(base):
            return "log_prob_stack" in vars(base)
    return False


def stack_log_probs(
    policies: Sequence[Policy],
    observations: batches.Tree,
    actions: batches.Tree,
    names: Sequence[int],
) -> FloatArray:
    """Return (P, m) log-probabilities of the same actions under several policies."""
    rows = batches.length(actions)
    kind: Any = type(policies[0])
    if stacks(policies):
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
    """Return (S,) log-probabilities of the recorded actions under a policy, made in blocks."""
    result = np.empty(data.n_steps)
    for start in range(0, data.n_steps, ROWS):
        rows = slice(start, min(start + ROWS, data.n_steps))
        observations, actions = (
            batches.take(data.observations, rows),
            batches.take(data.actions, rows),
        )
        values = policy.log_prob(observations, actions)
        result[rows] = _checked(values, rows.stop - rows.start, name)
    return result


def redrawn(data: Trajectories, used: IntArray, r: int) -> Trajectories:
    """Return episodes as if the draw r of estimated policies had recorded them.

    Args:
        data: the episodes.
        used: (P,) numbers of the policies that occur.
        r: number of the draw, see `ope_gym.policies.estimated.EstimatedPolicy.drawn`.
    """
    policies, own = list(data.policies), np.array(data.log_probs)
    for k in used:
        policy = policies[k]
        if not isinstance(policy, EstimatedPolicy):
            continue
        policies[k] = other = policy.drawn(r)
        rows = np.flatnonzero(data.policy_ids == k)
        own[rows] = other.log_prob(
            batches.take(data.observations, rows), batches.take(data.actions, rows)
        )
    return replace(data, policies=tuple(policies), log_probs=own)


def _checked(values: FloatArray, rows: int, name: str) -> FloatArray:
    values = np.asarray(values)
    if values.shape != (rows,):
        raise ValueError(
            f"{name} gave log-probabilities of shape {values.shape} for {rows} steps; "
            f"its log_prob(observations, actions) must return ({rows},)"
        )
    return values


# Partial mixtures ------------------------------------------------------------------------------

LIMIT = 256  # behaviours up to which "auto" takes the mixture of all
SIZE = 64  # of the groups beyond


@dataclass(frozen=True, eq=False)
class Part:
    """The trajectories of a group of behaviours.

    Args:
        members: (K_g,) the behaviours.
        episodes: (n_g,) the trajectories.
        rows: (S_g,) their steps.
        data: these trajectories alone; policies keep their numbers.
        behaviours: the members numbered 0, 1, ...
    """

    members: IntArray
    episodes: IntArray
    rows: IntArray
    data: Trajectories
    behaviours: Behaviours


def group_size(mixture: str | int, behaviours: int) -> int:
    """Return the most behaviours a group may have, from the option `mixture`."""
    if mixture == "auto":
        return behaviours if behaviours <= LIMIT else SIZE
    if mixture == "all":
        return behaviours
    return min(int(mixture), behaviours)


def groups_of(behaviours: Behaviours, policies: Sequence[Policy], mixture: str | int) -> IntArray:
    """Return (K,) the group of each behaviour: its mixtures are of the behaviours of one group.

    Where propensities were estimated, a group is a fold: all models in it left the same episodes
    out, and weigh no others.

    Args:
        behaviours: who recorded the episodes.
        policies: the recorded ones, by number.
        mixture: the option, see `ope_gym.options.Weighting`.
    """
    if mixture == "auto":
        folds = estimated_folds([policies[plan[0][1]] for plan in behaviours.plans])
        if folds is not None:
            return np.unique(folds, return_inverse=True)[1].astype(np.int64)
    size = group_size(mixture, len(behaviours.plans))
    return interleaved(behaviours.counts, size)


def interleaved(counts: IntArray, size: int) -> IntArray:
    """Return (K,) the group of each behaviour: the fewest groups, each across all history.

    Of every G neighbours each group takes one; the one with the most trajectories goes to the group
    that has the fewest so far, which keeps groups alike where the counts differ.

    Args:
        counts: (K,) trajectories of each behaviour, in the order of training.
        size: most behaviours of a group.
    """
    behaviours = counts.size
    groups = -(-behaviours // size)
    result, totals = np.empty(behaviours, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    for begin in range(0, behaviours, groups):
        some = begin + np.argsort(-counts[begin : begin + groups], kind="stable")
        fewest = np.argsort(totals, kind="stable")[: some.size]
        result[some] = fewest
        totals[fewest] += counts[some]
    return result


def parts(data: Trajectories, behaviours: Behaviours, groups: IntArray) -> Iterator[Part]:
    """Yield the groups one after the other.

    Args:
        data: all trajectories.
        behaviours: theirs.
        groups: (K,) from `interleaved`, or any other numbers 0, 1, ...
    """
    of_episode = groups[behaviours.ids]
    order, by_group = np.argsort(of_episode, kind="stable"), np.argsort(groups, kind="stable")
    present, firsts = np.unique(of_episode[order], return_index=True)
    stops = np.cumsum(np.bincount(groups))
    local = np.empty(groups.size, dtype=np.int64)
    local[by_group] = np.arange(groups.size) - np.repeat(
        stops - np.diff(stops, prepend=0), np.diff(stops, prepend=0)
    )
    for group, episodes in zip(present, np.split(order, firsts[1:]), strict=True):
        members = by_group[stops[group - 1] if group else 0 : stops[group]]
        ids = local[behaviours.ids[episodes]]
        begin, lengths = data.offsets[:-1][episodes], data.lengths[episodes]
        rows = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
        rows += np.arange(rows.size)
        yield Part(
            members, episodes, rows, data.select(episodes=episodes), behaviours.part(members, ids)
        )


def partial_log_weights(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    schemes: Iterable[str],
    *,
    density: bool = False,
    reward_model: tuple[FloatArray, FloatArray] | None = None,
    first: int = 0,
) -> tuple[dict[str, FloatArray], Reason | None]:
    """Compute log weights (S,) for a target with log-probability 0, each group by itself.

    Adding a target's own prefix sums gives its weights.

    Args:
        data: all trajectories.
        behaviours: theirs.
        groups: (K,) group of each behaviour.
        schemes: names from `ope_gym.weights.formula.SCHEMES`.
        density: as in `log_weights`.
        reward_model: mean (S,) and variance (S,), as in `log_weights`.
        first: number of the first trajectory, for messages.

    Returns:
        The weights, and the first logged number that its policy contradicts.
    """
    wanted: list[str] = list(schemes)
    mismatch: Reason | None = None
    result = {scheme: np.empty(data.n_steps) for scheme in wanted}
    for part in parts(data, behaviours, groups):
        rows = part.behaviours.rows(part.data, episodes=first + part.episodes)
        model = None if reward_model is None else tuple(x[part.rows] for x in reward_model)
        log_ws = log_weights(
            np.zeros(part.rows.size),
            rows,
            part.behaviours.ids,
            part.data.offsets,
            wanted,
            counts=part.behaviours.counts,
            density=density,
            reward_model=model,  # type: ignore[arg-type]
            names=(part.members, first + part.episodes),
        )
        for scheme, log_w in log_ws.items():
            result[scheme][part.rows] = log_w
        mismatch = mismatch or rows.mismatch
    return result, mismatch
