"""Adaptive data: a target fixed in advance, behaviours learned from the episodes before them.

    Gamma_i = v_i,0 + sum_t gamma^t w_i,t e_i,t,   w = P_e / P_own,   e_t = r_t - q_t + gamma v_t+1
    J = sum_i h_b(i) Gamma_i / sum_i h_b(i)

Behaviours 0, 1, ... are rounds in the order of time. The q of round k is learned from earlier
rounds alone (`past_only` in `ope_gym.models.folds`), the weights are basic, and h_k is known before
round k: given the past, each Gamma has the mean J, so h (Gamma - J) is a sequence of martingale
differences. Fused weights have no such property: their mixture contains policies shaped by later
rewards.

    SE^2 = sum_i h_b(i)^2 (Gamma_i - J)^2 / (sum_i h_b(i))^2

`ope_gym.weights.rounds` takes h_k proportional to 1 / sigma_k, which makes all rounds equally
noisy, as the central limit theorem for martingales asks; sigma_k^2 is the variance of Gamma under
behaviour k, estimated from earlier episodes by importance weighting.

Exact: with h fixed in advance (for example all 1) the mean of the estimate is J, for any learner
and any past-only q, if each behaviour can do whatever the target can, and if policies change only
between episodes. Not exact: with h from the data, h is still known in advance but the division by
sum h leaves a bias of order 1 / n; the interval is asymptotic. An episode during which the policy
changed is counted to the round in which it began.

Use it where policies learn from the data and no held-out episodes exist. Weakness: basic weights
are noisier than fused ones, hopeless where early policies are far from the target; the first round
has no q. It does not help a target that was trained on these very episodes.
Cost: one fit of q a round, and for h one pass over (K, S) log-probabilities and O(n K) memory.

References: Hadad et al. (2021), Confidence intervals for policy evaluation in adaptive experiments;
Bibaut et al. (2021), Post-contextual-bandit inference; Zhan et al. (2021), Off-policy evaluation
via adaptive weighting with data from contextual bandits.
"""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Steps, Whole, ask
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting, StepSums
from ope_gym.inference.computed import Computed


def adaptive(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute the stabilised doubly robust estimate.

    Hadad et al. (2021), https://arxiv.org/abs/1911.02768; Bibaut et al. (2021),
    https://arxiv.org/abs/2106.00418.

    The trajectories come with the residuals of a q model that learned from earlier rounds alone,
    and with the weights (K,) of the rounds.
    """
    chunk, weights = yield from ask(Whole("rounds"))
    sums = StepSums(setting.column(c), setting.gamma)
    totals = sums.total(sums.part(chunk))
    influence = weighted_mean(totals.psi + chunk.start, setting.rounds, weights)
    used = weights[np.unique(setting.rounds)]
    draws = setting.draws
    return Computed(
        float(influence.mean()),
        influence,
        totals.weights,
        replicates=None if draws is None else draws.pooled().means(influence),
        report={"largest over smallest weight of a round": float(used.max() / used.min())},
        pooled=True,  # as the sum of a martingale
    )


def weighted_mean(terms: FloatArray, ids: IntArray, weights: FloatArray) -> FloatArray:
    """Return J + n h (Gamma - J) / sum h, the influence values (n,) of J, whose mean it is.

    Args:
        terms: (n,) Gamma: plain influence of basic weights on residuals, plus v at the start.
        ids: (n,) round of each trajectory.
        weights: (K,) h, above 0; ones give the plain mean.
    """
    h = weights[ids]
    with np.errstate(invalid="ignore"):  # of terms that are not finite
        value = h @ terms / h.sum()
        return np.asarray(value + terms.size * h * (terms - value) / h.sum())
