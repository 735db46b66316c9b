"""Keep how right each way to a value was so far in this run, and weigh the ways by it.

A value given at once can be compared with the settled value of the same policy a little later. The
mean square of these differences, in units of the variance of a return, tells how far each way may
be believed in this very run: with m_c for way c,

    value = sum_c x_c / m_c  /  sum_c 1 / m_c,        m_c = (p_c + sum_i D_i^2) / (1 + n)

p_c is what is believed before there is anything to compare. The settled value has an error of its
own, which makes m_c too large rather than too small. Older differences count less: half as much
after each `_HALF` newer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PRIOR = {"advantages": 0.25, "simulation": 1.0}  # squared errors in units of a return's variance
_HALF = 6.0


@dataclass
class TrackRecord:
    """The squared differences of each way, latest last, in units of a return's variance."""

    squares: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PRIOR})

    def add(self, name: str, difference: float, spread: float) -> None:
        """Add the difference between an early and the settled value of one policy."""
        if np.isfinite(difference) and spread > 0.0:
            self.squares[name].append((difference / spread) ** 2)

    def mean_square(self, name: str) -> float:
        """Return the mean square error of a way, in units of a return's variance."""
        squares = np.array(self.squares[name])
        weights = 0.5 ** (np.arange(squares.size)[::-1] / _HALF)
        return float((PRIOR[name] + weights @ squares) / (1.0 + weights.sum()))

    def freedom(self) -> float:
        """Return how many comparisons the errors rest on, the prior counting as one."""
        weights = 0.5 ** (np.arange(len(self.squares["advantages"])) / _HALF)
        return 1.0 + float(weights.sum())


def blend(values: dict[str, float], errors: dict[str, float]) -> tuple[float, float]:
    """Return the mean of values weighted by 1 / squared error, and its squared error.

    Args:
        values: by way; NaN where there is none.
        errors: squared errors by way.
    """
    known = {name: x for name, x in values.items() if np.isfinite(x)}
    weights = {name: 1.0 / errors[name] for name in known}
    total = sum(weights.values())
    return sum(weights[name] * x for name, x in known.items()) / total, 1.0 / total
