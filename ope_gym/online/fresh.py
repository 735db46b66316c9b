"""Returns of fresh episodes, and what they say about a policy in training."""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.intervals import student_t, widened
from ope_gym.inference.outcomes import unseen_beside
from ope_gym.online.estimate import FreeEstimate

_FLOOR = 0.01  # least standard deviation of a return, as a share of the range so far


def fresh_value(
    returns: FloatArray,
    timesteps: int,
    level: float,
    seen: FloatArray | None = None,
) -> FreeEstimate:
    """Return the mean of fresh returns with its t interval, and room for returns not seen yet.

    Returns that are all equal do not make it certain: see `widened`, and their standard deviation
    is at least a hundredth of the range of all returns seen. One return alone takes the standard
    deviation of all that were seen. Where all of these are 0, the error is unknown.

    Args:
        returns: (n,) of fresh episodes.
        timesteps: Timesteps of the training.
        level: Level of the interval.
        seen: all returns of the run so far.
    """
    n, mean = len(returns), float(returns.mean())
    seen = returns if seen is None else seen
    some = returns if n > 1 else seen
    spread = float(some.std(ddof=1)) if some.size > 1 else np.inf
    unseen = unseen_beside(returns, mean, (float(seen.min()), float(seen.max())))
    spread = np.inf if np.isinf(max(unseen)) else max(spread, _FLOOR * float(np.ptp(seen)))
    error, freedom = spread / np.sqrt(n), max(n - 1, 1)
    interval = widened(lambda p: student_t(mean, error, freedom, p), mean, level, n, unseen)
    return FreeEstimate(
        timesteps=timesteps,
        value=mean,
        standard_error=error,
        low=interval.low,
        high=interval.high,
        settled=False,
        spread=spread if np.isfinite(spread) else np.nan,
        episodes=n,
        shares={"fresh": 1.0},
    )
