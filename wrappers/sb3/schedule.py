"""When to evaluate a policy in training, so that it takes next to nothing of the CPU time.

What an evaluation costs depends on networks, actions and episodes, so it is measured. CPU time
hardly depends on what else the machine does, but it is not exactly the same in two runs: where a
seeded run is to be evaluated at the same timesteps everywhere, give `eval_freq`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import process_time
from typing import Any

__all__ = ["Schedule"]

_SHARE = 0.02  # of the CPU time for evaluations: recording steps takes about another hundredth
_OFTEN, _POINTS = 10_000, 50  # timesteps between evaluations, and how many of these are enough


class Schedule:
    """Says when an evaluation is due. The one at the end of a training takes place in any case.

    Args:
        every: Timesteps between evaluations; None for as often as they can be afforded.
    """

    def __init__(self, every: int | None) -> None:
        self._fixed = every
        self.every = every or 1  # timesteps, at least
        self._began = self._end = self._latest = 0  # timesteps; of the training, of an evaluation
        self._start = self._spent = self._cost = 0.0  # CPU seconds; of the latest evaluation

    def begin(self, model: Any) -> None:
        """Prepare for `learn`."""
        self._began = self._latest = int(model.num_timesteps)
        self._end = int(model._total_timesteps)
        self._start, self._spent, self._cost = process_time(), 0.0, 0.0
        self.every = self._fixed or max(_OFTEN, self._end // _POINTS)

    @contextlib.contextmanager
    def evaluating(self, timesteps: int) -> Iterator[None]:
        """Time an evaluation."""
        self._latest, before = timesteps, self._spent
        with self.spending():
            yield
        self._cost = self._spent - before

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Time what else is done for values."""
        start = process_time()
        try:
            yield
        finally:
            self._spent += process_time() - start

    def due(self, timesteps: int) -> bool:
        """Return whether to evaluate now.

        What is left of the share, of the CPU time that the whole training will take at this rate,
        pays for evaluations at equal distances, as expensive as the latest, up to the last one.
        """
        since = timesteps - self._latest
        if since < self.every or self._fixed or not self._cost:
            return since >= self.every
        training = process_time() - self._start - self._spent
        whole = training * (self._end - self._began) / (timesteps - self._began)
        affordable = max(int((_SHARE * whole - self._spent) / self._cost), 1)
        return since * affordable >= self._end - self._latest
