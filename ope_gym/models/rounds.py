"""A q model for each round of an adaptive experiment, learned from earlier rounds alone."""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import annuity
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import Baseline, QModel, values_at
from ope_gym.policies import Policy
from ope_gym.weights.behaviours import Behaviours

_ROWS = 1 << 16  # steps evaluated at once


def past_only(
    model: QModel,
    data: Trajectories,
    target: Policy,
    behaviours: Behaviours,
    gamma: float,
    horizon: int,
    rng: np.random.Generator,
) -> Baseline:
    """Return the values in each round, learned from the episodes of earlier rounds; 0 in the first.

    The bounds q is clipped to come from earlier rewards, too.

    Args:
        model: what learns; it is fitted once a round.
        data: recorded episodes.
        target: the policy to evaluate.
        behaviours: who acted, in the order of time.
        gamma: discount.
        horizon: longest possible episode.
        rng: of the learner, and of the target's continuous actions.
    """
    q, v = np.zeros(data.n_steps), np.zeros(data.n_steps)
    round_of = behaviours.ids[data.episode_ids]
    returns = annuity(gamma, horizon)
    for k in np.unique(behaviours.ids)[1:]:
        past = data.select(episodes=np.flatnonzero(behaviours.ids < k))
        values = model.fit(past, target, gamma=gamma, horizon=horizon, rng=rng)
        seen = past.rewards
        bounds = min(float(seen.min()), 0.0) * returns, max(float(seen.max()), 0.0) * returns
        rows = np.flatnonzero(round_of == k)
        for begin in range(0, rows.size, _ROWS):
            some = rows[begin : begin + _ROWS]
            q[some], v[some] = values_at(values, data, target, some, bounds, rng)
    return Baseline(q, v)
