"""Survey who recorded the episodes, and collect the facts about them that verdicts need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, step_numbers
from ope_gym.data.roster import Roster
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.reductions import Arrays, Weighted
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.bootstrap import fingerprint, marked
from ope_gym.inference.conclude import Known
from ope_gym.inference.errors import joined
from ope_gym.inference.estimate import Behaviour, PartialMixture, Sample
from ope_gym.inference.outcomes import Outcomes, RewardSums, tally
from ope_gym.options import Options
from ope_gym.policies import Policy, UnavailablePolicy
from ope_gym.policies.estimated import fitted_models, logger_name, scatter_draws
from ope_gym.preparing.copies import copies, episode_marks
from ope_gym.preparing.weighing import Recorded, has_densities
from ope_gym.scale.sources import Source
from ope_gym.verdict import Reason
from ope_gym.weights.behaviours import Behaviours, behaviours_of, groups_of
from ope_gym.weights.propensities import PropensityReport, PropensitySums

_UNKNOWN = (
    "an unknown policy acted (trajectories.has_propensities is false): use DM or MDR, estimate "
    "them with ope_gym.fit_behaviour, or select(policies=...) the episodes of known ones"
)


@dataclass(frozen=True, eq=False)
class Survey:
    """The recorders of the episodes of a source; n trajectories, K behaviours.

    Args:
        source: The episodes.
        options: Those of the evaluation.
        behaviours: Who could have recorded each of them.
        strata: (n,) groups of like trajectories.
        groups: (K,) of partial mixtures.
        estimated: Model that the propensities were estimated by; empty if they were recorded.
        draws: How many draws of such models there are.
        repeated: How many episodes repeat others, once that is known.
    """

    source: Source
    options: Options
    behaviours: Behaviours
    strata: IntArray
    groups: IntArray
    estimated: str
    draws: int
    repeated: list[int] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, source: Source, options: Options) -> Survey:
        """Survey a source."""
        behaviours, policies = behaviours_of(source.roster), source.policies
        acted = [policies[k] for k in behaviours.policies]
        return cls(
            source,
            options,
            behaviours,
            joined(behaviours.strata),
            groups_of(behaviours, policies, options.weighting.mixture),
            fitted_models(acted),
            scatter_draws(acted),
        )

    @property
    def roster(self) -> Roster:
        """The list of the episodes."""
        return self.source.roster

    @property
    def parted(self) -> str:
        """How mixtures are limited, in words; empty if they are of all behaviours."""
        largest, count = int(np.bincount(self.groups).max()), self.groups.size
        return f"at most {largest:,} of {count:,}" if self.groups.max() > 0 else ""

    @cached_property
    def has_propensities(self) -> bool:
        """Whether the probability of every action is known."""
        data = self.source.data
        return self.roster.known if data is None else data.has_propensities

    @cached_property
    def lacks(self) -> dict[str, str]:
        """Why needs of estimators (`ope_gym.estimators.table.NEEDS`) are not met, in words."""
        lacks = {}
        if not self.has_propensities:
            lacks["propensities"] = _UNKNOWN
        if not self.behaviours.available:
            named = ((k, self.source.policies[k]) for k in self.behaviours.policies)
            k, lost = next((k, p) for k, p in named if isinstance(p, UnavailablePolicy))
            lacks["policies"] = f"policy {k} ({lost.kind!r}) cannot be asked: {lost.remedy}"
        if self.parted:
            lacks["rounds"] = (
                f"mixtures are of {self.parted}: give Weighting(mixture='all') if you can wait"
            )
        return lacks

    def _doubts(self, gathered: Gathered) -> tuple[Reason, ...]:
        """Return why every estimate is amber at best: copies, unrecorded propensities."""
        if not self.repeated:  # the same for all targets
            self.repeated.append(copies(gathered.marks, gathered.densities))
        reasons, size = [], len(self.roster)
        if self.repeated[0]:
            repeated = self.repeated[0]
            reasons.append(Reason("episodes_repeated", repeated=repeated, trajectories=size))
        if self.estimated:
            reasons.append(Reason("propensities_estimated"))
        elif not self.has_propensities:
            reasons.append(Reason("propensities_unknown"))
        return tuple(reasons)

    @cached_property
    def _who_acted(self) -> tuple[Behaviour, ...]:
        """(K,) policies, or loggers where propensities were estimated."""
        behaviours = []
        for name, plan in zip(self.behaviours.names, self.behaviours.plans, strict=True):
            first = self.source.policies[plan[0][1]]
            shown = logger_name(first, fold=True) or name
            numbers = tuple(policy for _, policy in plan)
            behaviours.append(Behaviour(shown, numbers, logger_name(first)))
        return tuple(behaviours)

    def _propensity_model(self, names: Sequence[str]) -> Reason | None:
        """Say how propensities were estimated, and which intervals include their error."""
        if not self.estimated:
            return None
        errors = not self.options.value_alone
        weighted = [name for name in names if errors and ESTIMATORS[name].scheme]
        known = self.source.data is not None and self.draws > 0
        drawn = tuple(name for name in weighted if known and not ESTIMATORS[name].whole)
        fixed = tuple(name for name in weighted if name not in drawn)
        return Reason("propensities_from", model=self.estimated, drawn=drawn, fixed=fixed)

    def known(
        self,
        gathered: Gathered,
        target: Policy,
        names: Sequence[str],
        *,
        origin: str | None,
        q_model: str | None,
        deterministic: bool,
    ) -> Known:
        """Return the facts that verdicts about a target need.

        Args:
            gathered: What the first pass collected.
            target: The policy to evaluate.
            names: The estimators.
            origin: As in `ope_gym.evaluate`.
            q_model: Name of the q model; None without one.
            deterministic: Whether the target takes one action for certain.
        """
        roster, report, gamma = self.roster, gathered.propensities, self.options.gamma
        some = marked(len(roster))
        mark = fingerprint(
            gathered.returns,
            gathered.log_probs[some],
            roster.lengths[some],
            self.behaviours.ids[some],
        )
        mixed = not {ESTIMATORS[name].scheme for name in names} <= {"", "basic"}
        reasons = report.misfit if self.estimated else report.reasons
        if gathered.mismatch is not None:
            reasons += (gathered.mismatch,)
        return Known(
            Sample(
                len(roster),
                roster.steps,
                self.strata,
                self._who_acted,
                self.behaviours.counts,
                gamma,
                roster.regime(target, origin),
                mark,
                PartialMixture.of(self.groups) if mixed and not self.estimated else None,
                q_model,
                self._propensity_model(names),
            ),
            self.behaviours.ids,
            Outcomes.of(
                gathered.discounted,
                gathered.rewards,
                gamma,
                roster.longest,
                roster.limited,
                self.options.return_range,
            ),
            support=report.support,
            missing=report.missing,
            calibration=report.calibration,
            reasons=reasons + self._doubts(gathered),
            clocked=roster.clocked,
            held_out=bool(roster.held_out.any()),
            deterministic=deterministic,
        )


@dataclass(frozen=True, eq=False)
class Gathered:
    """The facts that verdicts need, over all episodes.

    Args:
        returns: (n,) sum of the rewards of each episode.
        discounted: (n,) the same with discount.
        rewards: what possible returns follow from.
        log_probs: (n,) log-probability of its last action, 0 where it is not known.
        marks: (4, n) of `ope_gym.preparing.copies`.
        densities: whether actions are real numbers.
        propensities: checks of the recorded propensities against the policies.
        mismatch: first logged number that its policy contradicts; None if none does.
    """

    returns: FloatArray
    discounted: FloatArray
    rewards: RewardSums
    log_probs: FloatArray
    marks: FloatArray
    densities: bool
    propensities: PropensityReport
    mismatch: Reason | None


@dataclass(frozen=True, eq=False)
class Gathering:
    """Ask for the facts about the recorded data, in the first pass.

    Args:
        target: the policy to evaluate.
        policies: how many policies are known.
        gamma: discount.
    """

    target: Policy
    policies: int
    gamma: float = 1.0

    def part(self, chunk: Weighted) -> _GatheredPart:
        """Collect the facts about the recorded episodes of a chunk."""
        seen: Recorded = chunk.episodes
        data = seen.data
        propensities = PropensitySums(self.target, self.policies)
        kept = chunk.kept.setdefault("propensities", {})
        lost = propensities.update(data, seen.behaviours, seen.groups, kept)
        if lost is not None:  # weights may end before the episodes, where discount leaves nothing
            lost = lost[:, step_numbers(data.offsets) < np.diff(chunk.offsets).max()]
        for scheme, log_w in chunk.log_weights.items():
            propensities.leave(scheme, log_w, chunk.offsets, lost)
        sums, marks, rewards = chunk.once(("tally", self.gamma), lambda: self._tally(data))
        # a copy, to which those of later chunks may be added
        rewards = dataclasses.replace(rewards)
        parts, densities = (Arrays(sums), Arrays(marks)), has_densities(data)
        return _GatheredPart(*parts, densities, rewards, propensities, seen.mismatch)

    def _tally(self, data: Trajectories) -> tuple[FloatArray, FloatArray, RewardSums]:
        """Return (3, n) returns, discounted returns and last log-probabilities, marks, rewards."""
        returns, discounted, rewards = tally(data.rewards, data.offsets, self.gamma)
        last = np.nan_to_num(data.log_probs[data.offsets[1:] - 1])
        return np.stack([returns, discounted, last]), episode_marks(data, returns), rewards

    def total(self, merged: _GatheredPart) -> Gathered:
        """Return the facts of all chunks together."""
        returns, discounted, log_probs = merged.sums.joined()
        report = merged.propensities.finalise()
        return Gathered(
            returns,
            discounted,
            merged.rewards,
            log_probs,
            merged.marks.joined(),
            merged.densities,
            report,
            merged.mismatch,
        )


@dataclass
class _GatheredPart:
    sums: Arrays
    marks: Arrays
    densities: bool
    rewards: RewardSums
    propensities: PropensitySums
    mismatch: Reason | None

    def merge(self, other: _GatheredPart) -> None:
        self.sums.merge(other.sums)
        self.marks.merge(other.marks)
        self.rewards.merge(other.rewards)
        self.propensities.merge(other.propensities)
        self.mismatch = self.mismatch or other.mismatch
