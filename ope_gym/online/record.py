"""Keep how far values given at once were from the settled ones, and widen new ones by it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_HALF = 6.0  # comparisons after which an older one counts half
_BEFORE = 2.0  # squared difference that is expected before there is anything to compare


@dataclass
class TrackRecord:
    """Squared differences of provisional and settled values, in units of their claimed errors."""

    squares: list[float] = field(default_factory=list)

    def add(self, apart: float, claimed: float) -> None:
        """Compare two values of one policy.

        Args:
            apart: by how much the provisional and the settled value differ.
            claimed: sum of their squared errors, before the provisional one was widened.
        """
        if 0.0 < claimed < np.inf and np.isfinite(apart):
            self.squares.append(apart**2 / claimed)

    def inflation(self) -> float:
        """Return the factor by which errors of values at once were too small so far, at least 1."""
        squares = np.array(self.squares)
        weights = 0.5 ** (np.arange(squares.size)[::-1] / _HALF)
        return max(1.0, float(np.sqrt((_BEFORE + weights @ squares) / (1.0 + weights.sum()))))
