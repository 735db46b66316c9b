"""Facts about the recorded episodes that verdicts need, collected in the first pass over them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, step_numbers
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.chunks import Weighted
from ope_gym.estimators.reductions import Arrays
from ope_gym.inference.outcomes import RewardSums, tally
from ope_gym.policies import Policy
from ope_gym.scale.weighing import Recorded
from ope_gym.verdict import Reason
from ope_gym.weights.propensities import PropensityReport, PropensitySums


@dataclass(frozen=True, eq=False)
class Gathered:
    """The facts that verdicts need, over all episodes.

    Args:
        returns: (n,) sum of the rewards of each episode.
        discounted: (n,) the same with discount.
        rewards: what possible returns follow from.
        log_probs: (n,) log-probability of its last action, 0 where it is not known.
        propensities: checks of the recorded propensities against the policies.
        mismatch: first logged number that its policy contradicts; None if none does.
    """

    returns: FloatArray
    discounted: FloatArray
    rewards: RewardSums
    log_probs: FloatArray
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
        sums, rewards = chunk.once(("tally", self.gamma), lambda: self._tally(data))
        # a copy, to which those of later chunks may be added
        rewards = dataclasses.replace(rewards)
        return _GatheredPart(Arrays(sums), rewards, propensities, seen.mismatch)

    def _tally(self, data: Trajectories) -> tuple[FloatArray, RewardSums]:
        """Return (3, n) returns, discounted returns and last log-probabilities; and all rewards."""
        returns, discounted, rewards = tally(data.rewards, data.offsets, self.gamma)
        last = np.nan_to_num(data.log_probs[data.offsets[1:] - 1])
        return np.stack([returns, discounted, last]), rewards

    def total(self, merged: _GatheredPart) -> Gathered:
        """Return the facts of all chunks together."""
        returns, discounted, log_probs = merged.sums.joined()
        report = merged.propensities.finalise()
        return Gathered(returns, discounted, merged.rewards, log_probs, report, merged.mismatch)


@dataclass
class _GatheredPart:
    sums: Arrays
    rewards: RewardSums
    propensities: PropensitySums
    mismatch: Reason | None

    def merge(self, other: _GatheredPart) -> None:
        self.sums.merge(other.sums)
        self.rewards.merge(other.rewards)
        self.propensities.merge(other.propensities)
        self.mismatch = self.mismatch or other.mismatch
