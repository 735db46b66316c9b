"""Weigh recorded episodes: whoever reads them, and however many at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import (
    FloatArray,
    IntArray,
    check_finite,
    check_log_probs,
    one_step_earlier,
)
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.chunks import Weighted, within_discount
from ope_gym.models.base import Baseline
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import asked
from ope_gym.verdict import Reason
from ope_gym.weights.answers import Answers
from ope_gym.weights.behaviours import Behaviours
from ope_gym.weights.formula import log_weights
from ope_gym.weights.mixtures import partial_log_weights
from ope_gym.weights.reward_model import cross_fitted_log_weights

_PAST = 8  # columns of past actions, and of past observations


@dataclass(frozen=True, eq=False)
class Weighing:
    """How episodes are weighed; K behaviours.

    Args:
        behaviours: Who could have recorded them, without the ids of the episodes.
        groups: (K,) of partial mixtures.
        schemes: Weighting schemes that are needed.
        gamma: Discount.
        reward_model: That of the optimal scheme; arrays only if all episodes are in one chunk.
    """

    behaviours: Behaviours
    groups: IntArray
    schemes: tuple[str, ...]
    gamma: float = 1.0
    reward_model: str | tuple[FloatArray, FloatArray] = "deterministic"

    @property
    def parted(self) -> bool:
        """Whether mixtures are partial, see `ope_gym.weights.mixtures`."""
        return int(self.groups.max()) > 0

    def weigh(
        self,
        answers: Answers,
        ids: IntArray,
        first: int,
        baseline: Baseline | None,
        shared: Shared,
        bounds: FloatArray | None = None,
    ) -> Weighted:
        """Compute the importance weights of some episodes.

        Args:
            answers: the episodes, and what the target says of them.
            ids: (n,) their behaviours.
            first: number of the first episode, for messages.
            baseline: q and v of their steps; None without a q model.
            shared: what was computed for other targets; the missing parts are added.
            bounds: lowest and highest reward of all episodes, if these are not all.
        """
        data = answers.data
        offsets = data.offsets.astype(np.int64, copy=False)
        check_finite(data.rewards, "rewards", offsets, first)
        behaviours = dataclasses.replace(self.behaviours, ids=ids, strata=ids)
        bases, log_w, own = shared.bases, dict[str, FloatArray](), np.empty(0)
        if self.schemes:
            own, prefix = self._target_prefix(answers, offsets, first)
            missing = sorted(set(self.schemes) - bases.keys())
            if missing:
                shared.mismatch = self._add_bases(bases, missing, data, behaviours, first)
            log_w = {scheme: bases[scheme] + prefix for scheme in self.schemes}
        residuals = start = direct = visits = past = ratios = None
        if baseline is not None:
            residuals = baseline.residuals(data.rewards, offsets, self.gamma)
            start, direct = baseline.at_start(offsets), baseline.direct
            visits = baseline.marginal(residuals)
            past = past_columns(data, answers.target)
            if visits is not None and "basic" in bases and own.size:
                basic = bases["basic"]
                ratios = own + (basic - one_step_earlier(basic, offsets, 0.0))
        groups = self.groups if self.parted else None
        recorded = Recorded(data, behaviours, groups, shared.mismatch, own)
        weighted = Weighted(
            offsets,
            data.rewards,
            log_w,
            residuals=residuals,
            start=start,
            direct=direct,
            visits=visits,
            past=past,
            step_ratios=ratios,
            unit=float(np.abs(data.rewards if bounds is None else bounds).max(initial=0.0)) or 1.0,
            first=first,
            episodes=recorded,
            kept=shared.kept,
        )
        return within_discount(weighted, self.gamma)

    def _target_prefix(
        self, answers: Answers, offsets: IntArray, first: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return log-probabilities (S,) under the target, and their sums up to each step."""
        from ope_gym.kernels import prefix_sums

        data = answers.data
        if not data.has_propensities:
            raise ValueError(
                "an unknown policy acted, and weights need the probabilities of all actions: use "
                "DM or MDR, or select(policies=...) the episodes of known policies"
            )
        own = answers.log_probs
        check_log_probs(own, "target_log_probs", offsets, has_densities(data), first)
        return own, prefix_sums(own, offsets)

    def _add_bases(
        self,
        bases: dict[str, FloatArray],
        missing: list[str],
        data: Trajectories,
        behaviours: Behaviours,
        first: int,
    ) -> Reason | None:
        """Add log weights for a target with log-probability 0; return a mismatch, if any."""
        density, model = has_densities(data), self.reward_model
        given = model if isinstance(model, tuple) else None
        if self.parted and missing != ["basic"]:
            found, mismatch = partial_log_weights(
                data,
                behaviours,
                self.groups,
                missing,
                density=density,
                reward_model=given,
                first=first,
            )
            bases |= found
            return mismatch
        certain, episodes = np.zeros(data.n_steps), first + np.arange(len(data))
        rows = behaviours.rows(data, only_own=missing == ["basic"], episodes=episodes)
        if "optimal" in missing and model == "cross-fit" and not density:
            bases["optimal"] = cross_fitted_log_weights(data, certain, behaviours, rows)
            missing = [scheme for scheme in missing if scheme != "optimal"]
        if missing:
            bases |= log_weights(
                certain,
                rows,
                behaviours.ids,
                data.offsets,
                missing,
                counts=behaviours.counts,
                density=density,
                reward_model=given,
                names=(np.arange(behaviours.counts.size), episodes),
            )
        return rows.mismatch


@dataclass
class Shared:
    """Numbers made of some episodes that do not depend on the target, for the next target.

    Args:
        bases: by scheme, log weights for a target with log-probability 0; adding a target's own
            prefix sum gives its weights.
        mismatch: first logged number that its policy contradicts; None if none does.
        kept: by name, other numbers.
    """

    bases: dict[str, FloatArray] = field(default_factory=dict)
    mismatch: Reason | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Recorded:
    """The recorded episodes behind weighted ones.

    Args:
        data: the episodes.
        behaviours: who could have recorded them.
        groups: (K,) of partial mixtures; None for the mixture of all.
        mismatch: first logged number that its policy contradicts; None if none does.
        own: (S,) log-probabilities under the target; empty if no weights are needed.
    """

    data: Trajectories
    behaviours: Behaviours
    groups: IntArray | None
    mismatch: Reason | None
    own: FloatArray


def past_columns(data: Trajectories, target: Policy) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return columns of the actions (S, p), and of observations that are real numbers (S, m).

    A few finite actions are 0/1 columns, one less than there are actions. Where the columns are
    those of one array they are a part of it, not a copy.
    """
    taken = _numbers(data.actions, "iubf")
    target = asked(target, data.observations, data.actions)
    if isinstance(target, FinitePolicy) and taken.shape[1] == 1:
        actions = target.probs(batches.take(data.observations, slice(0, 1))).shape[1]
        if actions <= _PAST:
            taken = taken == np.arange(actions - 1)
    return taken, _numbers(data.observations, "f")


def _numbers(batch: batches.Tree, kinds: str) -> NDArray[Any]:
    """Return the first columns of the leaves that hold numbers of such kinds."""
    n = batches.length(batch)
    kept = [x for x in batches.leaves(batch) if x.dtype.kind in kinds]
    leaves = [x.reshape(n, -1)[:, :_PAST] for x in kept]
    if len(leaves) == 1:
        return leaves[0]
    return np.hstack([np.empty((n, 0)), *leaves])[:, :_PAST]


def has_densities(data: Trajectories) -> bool:
    """Tell whether actions are continuous; without a space, if they are not whole numbers."""
    if data.discrete is not None:
        return not data.discrete
    return any(leaf.dtype.kind not in "iub" for leaf in batches.leaves(data.actions))
