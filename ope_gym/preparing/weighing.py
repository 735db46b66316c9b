"""Weigh recorded episodes, and weigh them anew with draws of estimated propensities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

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
from ope_gym.estimators.reductions import Weighted, within_discount
from ope_gym.estimators.run import estimator, reduce_chunk, run
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.computed import Computed
from ope_gym.models.base import Baseline, QModel
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import ask_once
from ope_gym.verdict import Reason
from ope_gym.weights.answers import Answers
from ope_gym.weights.behaviours import Behaviours, partial_log_weights, redrawn
from ope_gym.weights.formula import log_weights
from ope_gym.weights.reward_model import cross_fitted_log_weights

_PAST = 8  # columns of past actions, and of past observations
_KEPT = 1 << 20  # steps up to which the mixtures of drawn policies are kept


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
        """Whether mixtures are partial, see `ope_gym.weights.behaviours`."""
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
        residuals = start = direct = visits = unknown = past = ratios = None
        if baseline is not None:
            residuals = baseline.residuals(data.rewards, offsets, self.gamma)
            start, direct = baseline.at_start(offsets), baseline.direct
            visits = baseline.marginal(residuals)
            unknown = None if baseline.visits is None else baseline.visits.unknown
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
            unknown=unknown,
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
            partial, mismatch = partial_log_weights(
                data,
                behaviours,
                self.groups,
                missing,
                density=density,
                reward_model=given,
                first=first,
            )
            bases |= partial
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
        kept: Other numbers by name.
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
    target = ask_once(target, data.observations, data.actions)
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


# of the estimators, their setting, the number of a target, and what was computed for it
Scatter: TypeAlias = Callable[[Sequence[str], Setting, int, Sequence[Computed]], list[Computed]]


class Held(NamedTuple):
    """A target's answers, the q model, and its values at every step."""

    answers: Answers
    model: QModel | Baseline | None
    baseline: Baseline | None


class Redraws:
    """The episodes as recorded by draws of the models that propensities were estimated by.

    Args:
        data: The episodes.
        behaviours: Theirs.
        count: Number of draws; 0 where propensities were recorded.
    """

    def __init__(self, data: Trajectories, behaviours: Behaviours, count: int) -> None:
        self._data, self._behaviours, self._count = data, behaviours, count
        self._kept: dict[int, tuple[Trajectories, Shared]] = {}

    def scatter(
        self,
        weighing: Weighing,
        held: Sequence[Held],
        names: Sequence[str],
        setting: Setting,
        i: int,
        computed: Sequence[Computed],
    ) -> list[Computed]:
        """Add the estimation error of the propensities to each bias of the target `i`.

        The estimators run anew with draws of the fitted models. The root mean square by which a
        value moves holds both: how much it varies with the models, and how far the middle of its
        values lies off, which plain weights do, because 1 / p is convex. In large samples a model
        that learned from the weighed episodes moves against their own chance (Hirano, Imbens and
        Ridder, 2003): the sum of both squares is on the safe side.
        """
        adjusted, draws = list(computed), self._count
        moved = [j for j, n in enumerate(names) if ESTIMATORS[n].scheme and not ESTIMATORS[n].whole]
        if not (draws and moved):
            return adjusted
        target, plain = held[i], dataclasses.replace(setting, draws=None)
        off = np.empty((len(moved), draws))
        for r in range(draws):
            data, shared = self._drawn(r)
            about = target.answers.about(data)
            chunk = weighing.weigh(about, self._behaviours.ids, 0, target.baseline, shared)
            again = run([estimator(names[j], plain) for j in moved], reduce_chunk(chunk))
            off[:, r] = [one.value - computed[j].value for one, j in zip(again, moved, strict=True)]
        for j, row in zip(moved, off, strict=True):
            seen = row[np.isfinite(row)]  # without any weight left there is no value
            error = float(np.sqrt(np.mean(seen**2))) if seen.size else 0.0
            adjusted[j] = dataclasses.replace(
                computed[j],
                bias=float(np.hypot(computed[j].bias, error)),
                report={**computed[j].report, "propensities": error},
            )
        return adjusted

    def _drawn(self, r: int) -> tuple[Trajectories, Shared]:
        """Return the episodes as recorded by the draw r of estimated policies, and its mixtures."""
        drawn = self._kept.get(r)
        if drawn is None:
            drawn = redrawn(self._data, self._behaviours.policies, r), Shared()
        if self._data.n_steps <= _KEPT:
            self._kept[r] = drawn
        return drawn
