"""Keep the behaviours that matter: the episodes of those nearest to the target, and no others.

    d_k = mean over states s of E_a~target [log pi_e(a|s) - log pi_k(a|s)]

is the divergence of behaviour k from the target, on a sample of recorded states, with actions drawn
anew from the target. Neither rewards nor recorded actions enter, nor any weight of a trajectory
that is used: to choose by those would bias the estimate.

What is left: for behaviours chosen in advance FIS from the kept episodes is unbiased, as from any
data. Here the choice depends on the states in the sample, which are part of the data: the bias is
the sum over choices of the covariance between "this is chosen" and the estimate from it. It is 0
if other data would have led to the same choice, small if to nearly the same. Two examples, not a
bound, in which the states tell the choice between policies that are as near (`kept_half` in
tests/test_mixtures.py, 2000 runs of 2, 8 and 30 episodes a policy): where they also tell what was
paid, 0.486, 0.492 and 0.499 instead of 0.5, that is 0.11, 0.14 and 0.05 standard errors; where all
are paid 1 and policies are near where they seldom go, 1.031, 1.012 and 1.005, that is 0.33, 0.27
and 0.21. It shrinks as the error does. Where policies learned
from the data they depend on the data anyway, kept or not, as the regime says. To be exact, choose
the policies yourself: `trajectories.select(policies=...)`.
"""

from __future__ import annotations

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, positive
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.closed_form import Policy
from ope_gym.weights.behaviours import Behaviours, behaviours_of, follow_plans, stack_log_probs

_STATES, _ACTIONS = 256, 4  # of the sample, and drawn at each
_SLICE = 512  # behaviours at once


def nearest(data: Trajectories, target: Policy, keep: int, seed: int) -> IntArray:
    """The episodes, in order, of the `keep` behaviours nearest to the target.

    Args:
        data: recorded episodes.
        target: the policy to evaluate.
        keep: how many behaviours; all episodes if there are no more.
        seed: of the sample of states and actions.
    """
    if not positive(keep):
        raise ValueError(
            f"keep is {keep!r}; give the number of behaviours whose episodes are used, or None for "
            "all"
        )
    behaviours = behaviours_of(data)
    if keep >= len(behaviours.plans):
        return np.arange(len(data))
    if not behaviours.available:
        raise ValueError(
            f"keep is {keep}, but some policy cannot be asked for probabilities, so nobody knows "
            "how near it is: import the module that registers its class, or select(policies=...)"
        )
    far = divergences(data, behaviours, target, seed)
    latest = -np.arange(far.size)  # of equal ones
    kept = np.zeros(far.size, dtype=bool)
    kept[np.lexsort((latest, far))[:keep]] = True
    return np.flatnonzero(kept[behaviours.ids])


def divergences(
    data: Trajectories, behaviours: Behaviours, target: Policy, seed: int
) -> FloatArray:
    """(K,) mean divergence per step of each behaviour from the target; inf without support."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.choice(data.n_steps, min(_STATES, data.n_steps), replace=False), _ACTIONS)
    observations, steps = batches.take(data.observations, rows), data.steps[rows]
    actions = target.sample(observations, rng)
    own = np.asarray(target.log_prob(observations, actions), dtype=np.float64)
    result = np.empty(len(behaviours.plans))
    for begin in range(0, result.size, _SLICE):
        members = np.arange(begin, min(begin + _SLICE, result.size))
        some = behaviours.part(members, np.empty(0, dtype=np.int64))
        table = stack_log_probs(
            [data.policies[k] for k in some.policies],
            observations,
            actions,
            some.policies.tolist(),
        )
        result[members] = np.mean(own - follow_plans(table, some, steps), axis=1)
    return result
