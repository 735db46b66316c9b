"""Can these estimates be trusted? Estimate each recorded policy without its own episodes and look.

The mean return of a policy's own episodes is a fair measure of its value, and the estimate from the
others' episodes knows nothing of them: where the two disagree by more than both errors allow, the
weights do not carry that far. It costs no environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.analysis.calibration import Calibration, Check
from ope_gym.arrays import IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.evaluation import Evaluator
from ope_gym.inference import regimes
from ope_gym.policies.closed_form import UnavailablePolicy
from ope_gym.weights.behaviours import behaviours_of

if TYPE_CHECKING:
    from ope_gym.data.buffer import TrajectoryBuffer
    from ope_gym.models.base import QModel

__all__ = ["Calibration", "Check", "leave_one_policy_out"]


def leave_one_policy_out(
    trajectories: Trajectories | TrajectoryBuffer,
    *,
    estimator: str = "auto",
    data: str | None = None,
    policies: Sequence[int] | None = None,
    limit: int = 24,
    q_model: QModel | str | None = "default",
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | None = None,
    resamples: int = 1000,
    progress: Callable[[int], object] | None = None,
) -> Calibration:
    """Estimate each recorded policy from the others' episodes and compare with its own returns.

    Held-out episodes make a clean check. With the others, a policy is estimated from the episodes
    that it learned from: estimates of later policies are too high then, as they are in use.

    Args:
        trajectories: recorded episodes.
        estimator: a name of `ope_gym.ESTIMATORS`.
        data: "held-out" or "all"; by default held-out where there are any.
        policies: numbers of those to check; by default all that recorded.
        limit: of more policies than this, as many are checked, evenly spread; each takes about as
            long as an evaluation.
        q_model: as in `ope_gym.evaluate`, and so are the options up to `resamples`.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile" or "bca".
        level: confidence level of intervals and comparisons.
        rng: seed.
        resamples: bootstrap replicates.
        progress: called with 1 after each policy.

    Returns:
        A mapping from the number of a policy to its `Check`; print it for a table.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit!r}; check at least 1 policy")
    if interval == "betting":
        raise ValueError("interval='betting' has no standard error to compare by; take 'ess-t'")
    whole = trajectories.view()
    if data is None:
        data = "held-out" if whole.held_out.any() else "all"
    used = regimes.held_out_only(whole, data)
    if not len(used):
        raise ValueError("trajectories is empty: record at least one episode first")
    own = own_episodes(used)
    wanted = list(own) if policies is None else list(policies)
    for k in wanted:
        if not 0 <= k < len(used.policies):
            raise ValueError(f"policies has {k}: the data have 0 to {len(used.policies) - 1}")
    skipped = {k: why for k in wanted if (why := _unfit(used, own, k))}
    chosen = [k for k in wanted if k not in skipped]
    left_out = max(0, len(chosen) - limit)
    if left_out:
        spread = np.linspace(0, len(chosen) - 1, limit).round().astype(np.int64)
        chosen = [chosen[i] for i in np.unique(spread)]
    checks = []
    for k in chosen:
        others = np.setdiff1d(np.arange(len(used)), own[k])
        evaluator = Evaluator(
            used.select(episodes=others),
            estimators=estimator,
            q_model=q_model,
            gamma=gamma,
            cap=cap,
            interval=interval,
            level=level,
            rng=rng,
            resamples=resamples,
        )
        estimate = evaluator.evaluate(used.policies[k])[estimator]
        returns = used.returns(gamma)[own[k]]
        error = float(returns.std(ddof=1) / math.sqrt(returns.size))
        checks.append(Check(k, returns.size, float(returns.mean()), error, estimate, level))
        if progress is not None:
            progress(1)
    return Calibration(checks, skipped, data, left_out)


def own_episodes(data: Trajectories) -> dict[int, IntArray]:
    """By policy that acted, the episodes it would have followed to any end.

    Where the policy may change during episodes none counts, not even one that ended before the
    change: the long ones are missing from those.
    """
    behaviours = behaviours_of(data)
    own: dict[int, IntArray] = {int(k): np.empty(0, np.int64) for k in behaviours.policies}
    for b, plan in enumerate(behaviours.plans):
        if len(plan) == 1:
            own[plan[0][1]] = np.flatnonzero(behaviours.ids == b)
    return own


def _unfit(data: Trajectories, own: Mapping[int, IntArray], k: int) -> str:
    """Why a policy cannot be checked; empty if it can."""
    if isinstance(data.policies[k], UnavailablePolicy):
        return "the policy cannot be asked for probabilities"
    count = own[k].size if k in own else 0
    if count < 2:
        return "fewer than 2 episodes of its own"
    if count == len(data):
        return "there are no episodes of others"
    return ""
