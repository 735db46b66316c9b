"""The passes over shards: weights and their sums, then normalised influence and replicates.

Each pass is a set of sums with `update` and `merge`: two workers that each saw some parts of the
shards, merged in order, are one that saw them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ope_gym import batches, kernels
from ope_gym.arrays import FloatArray, IntArray, check_finite, check_log_probs
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.reductions import InfluenceSums, WeightSums, normalised_value
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Problem
from ope_gym.evaluation import has_densities
from ope_gym.inference import bootstrap
from ope_gym.models.base import Baseline
from ope_gym.options import Options
from ope_gym.policies import Policy
from ope_gym.scale.census import Mixture
from ope_gym.weights.behaviours import Behaviours, policy_log_probs
from ope_gym.weights.formula import log_weights
from ope_gym.weights.mixtures import partial_log_weights
from ope_gym.weights.propensities import PropensitySums


class Key(NamedTuple):
    """What estimators that share their sums have in common, as in `Composition`."""

    scheme: str
    capped: bool
    baseline: bool


FUSED = Key("fused", False, False)


def keys_of(estimators: Iterable[str], *, normalised: bool = False) -> list[Key]:
    """Of the weighted estimators, or of the normalised ones alone."""
    chosen = [ESTIMATORS[name] for name in estimators]
    return sorted(
        {
            Key(c.scheme, c.capped, c.baseline)
            for c in chosen
            if c.method in ("weighted", "auto") and (c.normalised or not normalised)
        }
    )


@dataclass(frozen=True)
class WeightedChunk:
    """Some trajectories as the sums need them: S steps, n trajectories.

    Args:
        offsets: (n + 1,).
        columns: (S,) each: "rewards", with a q model "residuals", and the log weights by scheme.
    """

    offsets: IntArray
    columns: dict[str, FloatArray]

    def arguments(self, key: Key) -> tuple[FloatArray, FloatArray, IntArray]:
        """Log weights (S,), what is paid (S,) and offsets, for the sums of a key."""
        pay = self.columns["residuals" if key.baseline else "rewards"]
        return self.columns[key.scheme], pay, self.offsets


@dataclass
class WeightPass:
    """The second pass.

    Args:
        mixture: what the first pass found.
        target: the policy to evaluate.
        options: of the evaluation.
        begin: how many trajectories come before the first.
        sums: by what they are of.
        propensities: checks of what was recorded.
        ids: (n,) in parts, behaviour of each trajectory.
        hashes: (n,) in parts, of what each trajectory holds.
        starts: (n,) in parts, the q model's v at the start; empty without a q model.
        mismatch: the first logged number that its policy contradicts, in words.
    """

    mixture: Mixture
    target: Policy
    options: Options
    begin: int = 0
    sums: dict[Key, WeightSums] = field(init=False)
    propensities: PropensitySums = field(init=False)
    ids: list[IntArray] = field(default_factory=list)
    hashes: list[bootstrap.HashArray] = field(default_factory=list)
    starts: list[FloatArray] = field(default_factory=list)
    mismatch: str = ""

    def __post_init__(self) -> None:
        options = self.options
        self.sums = {
            key: WeightSums(options.gamma, options.cap if key.capped else None)
            for key in keys_of(options.estimators)
        }
        self.propensities = PropensitySums(self.target, len(self.mixture.policies))
        self._marks = self.mixture.marks

    def __getstate__(self) -> dict[str, Any]:
        """To be merged elsewhere, where the mixture with all its policies is known."""
        known = ("mixture", "target", "options", "_marks")
        return {name: value for name, value in vars(self).items() if name not in known}

    def update(
        self, name: str, data: Trajectories, baseline: Baseline | None = None
    ) -> WeightedChunk:
        """Add some renumbered episodes of the part called `name`; their weights."""
        behaviours = self.mixture.behaviours(data)
        first = self.begin + sum(map(len, self.ids))
        chunk, mismatch = weigh(
            self.mixture, self.target, self.options, name, data, baseline, first
        )
        if mismatch and not self.mismatch:
            self.mismatch = f"{mismatch} (in {name}; episodes are counted over all shards)"
        for key, sums in self.sums.items():
            sums.update(*chunk.arguments(key))
        self.propensities.update(data, behaviours, self.mixture.groups)
        columns = [*batches.leaves(data.observations), *batches.leaves(data.actions)]
        columns += [data.rewards, data.log_probs]
        hashes = bootstrap.content_hashes(columns, data.offsets)
        self.ids.append(behaviours.ids)
        self.hashes.append(bootstrap.with_marks(hashes, self._marks[behaviours.ids]))
        if baseline is not None:
            self.starts.append(baseline.at_start(data.offsets))
        return chunk

    def merge(self, other: WeightPass) -> None:
        """Add the episodes of another, after the own."""
        for key, sums in self.sums.items():
            sums.merge(other.sums[key])
        self.propensities.merge(other.propensities)
        self.ids += other.ids
        self.hashes += other.hashes
        self.starts += other.starts
        self.mismatch = self.mismatch or other.mismatch


@dataclass
class NormalisedPass:
    """The third pass.

    Args:
        sums: of the second pass, over all trajectories; see `NormalisedPass.after`.
        trajectories: how many there are in all.
        draws: of the bootstrap, of the trajectories to come; None without one.
        influence: by what it is of.
        replicates: by what they are of.
    """

    sums: dict[Key, WeightSums]
    trajectories: int
    draws: bootstrap.PoissonDraws | None
    influence: dict[Key, InfluenceSums] = field(init=False)
    replicates: dict[Key, bootstrap.NormalisedReplicates] = field(init=False)

    @classmethod
    def after(
        cls,
        sums: Mapping[Key, WeightSums],
        trajectories: int,
        draws: bootstrap.PoissonDraws | None,
    ) -> NormalisedPass:
        """What follows the pass that made `sums`: it needs those of each step alone."""
        steps = {key: WeightSums(s.gamma, s.cap, s.columns) for key, s in sums.items()}
        return cls(steps, trajectories, draws)

    def __post_init__(self) -> None:
        self.influence = {
            key: InfluenceSums(s.gamma, s.cap, s.columns, self.trajectories)
            for key, s in self.sums.items()
        }
        self.replicates = {
            key: bootstrap.NormalisedReplicates(self.draws, s.gamma, s.cap, s.columns.peak)
            for key, s in self.sums.items()
            if self.draws is not None and np.isfinite(normalised_value(s.columns, s.gamma))
        }

    def update(self, chunk: WeightedChunk) -> None:
        """Add some trajectories."""
        for sums in (self.influence, self.replicates):
            for key, one in sums.items():
                one.update(*chunk.arguments(key))

    def merge(self, other: NormalisedPass) -> None:
        """Add the trajectories of another, after the own."""
        for key, influence in self.influence.items():
            influence.merge(other.influence[key])
        for key, replicates in self.replicates.items():
            replicates.merge(other.replicates[key])


def weigh(
    mixture: Mixture,
    target: Policy,
    options: Options,
    name: str,
    data: Trajectories,
    baseline: Baseline | None = None,
    first: int = 0,
) -> tuple[WeightedChunk, str]:
    """The weights of a renumbered chunk, and which policy contradicts what was logged.

    `first` is the number of its first episode among the chosen ones of all shards.
    """
    density = has_densities(data)
    offsets = data.offsets.astype(np.int64, copy=False)
    schemes = sorted({key.scheme for key in keys_of(options.estimators)})
    behaviours = mixture.behaviours(data)
    log_w: dict[str, FloatArray] = {}
    mismatch = ""
    try:
        check_finite(data.rewards, "rewards", offsets, first)
        if schemes and not data.has_propensities:
            raise ValueError(
                "an unknown policy acted, and weights need the probabilities of all actions"
            )
        if schemes:
            own = policy_log_probs(target, "target", data)
            check_log_probs(own, "target_log_probs", offsets, density, first)
            log_w, mismatch = _log_weights(mixture, data, behaviours, own, schemes, density, first)
    except ValueError as error:
        raise ValueError(f"{name}, episodes counted over all shards: {error}") from error
    problem = Problem(data.rewards, offsets, behaviours.ids, log_w, options.gamma, options.cap)
    if baseline is not None:
        problem.residuals = baseline.residuals(data.rewards, offsets, options.gamma)
    problem = problem.within_discount()
    columns = {"rewards": problem.rewards, **problem.log_w}
    if problem.residuals is not None:
        columns["residuals"] = problem.residuals
    return WeightedChunk(problem.offsets, columns), mismatch


def _log_weights(
    mixture: Mixture,
    data: Trajectories,
    behaviours: Behaviours,
    own: FloatArray,
    schemes: list[str],
    density: bool,
    first: int,
) -> tuple[dict[str, FloatArray], str]:
    """Log weights (S,) by scheme of a target with log-probabilities `own` (S,), and a mismatch."""
    alone = schemes == ["basic"]  # needs no mixture
    if mixture.groups is None or alone:
        episodes = first + np.arange(len(data))
        rows = behaviours.rows(data, only_own=alone, episodes=episodes)
        found = log_weights(
            own,
            rows,
            behaviours.ids,
            data.offsets,
            schemes,
            counts=mixture.counts,
            density=density,
            names=(np.arange(mixture.counts.size), episodes),
        )
        return found, rows.mismatch
    found, mismatch = partial_log_weights(
        data, behaviours, mixture.groups, schemes, density=density, first=first
    )
    prefix = np.empty(own.size)
    kernels.cumulate(own, 0, len(data), data.offsets, prefix)
    return {scheme: base + prefix for scheme, base in found.items()}, mismatch
