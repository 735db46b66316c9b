"""Define what a study is: runs from seeds, a summary, and claims, a table and a picture from it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from studies import STUDIES, Plan
from studies.harness.claims import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Seeds: TypeAlias = Sequence[np.random.SeedSequence]  # one for each run
Runs: TypeAlias = dict[str, NDArray[Any]]  # the first axis of each array is the run
Summary: TypeAlias = dict[str, Any]  # the findings of a study as plain data, ready for JSON


@dataclasses.dataclass(frozen=True)
class Study(ABC):
    """An experiment: many independent runs and the conclusions drawn from them.

    A subclass is a frozen dataclass whose fields are its settings. It defines `run_once`, or `run`
    if it can do many runs together. Workers receive a copy, so they must be able to import its
    module. Only runs may be slow: everything else is computed again from their arrays each time.
    `claims`, `table` and `picture` get the summary as plain data.
    """

    @property
    def name(self) -> str:
        """Return the name of the study, which is that of its folder."""
        return type(self).__module__.split(".")[1]

    @property
    def plan(self) -> Plan:
        """Return how many runs there are by default, and the like."""
        return STUDIES[self.name]

    def run(self, seeds: Seeds) -> Runs:
        """Return the results of one run for each seed, stacked."""
        found = [self.run_once(seed) for seed in seeds]
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return the numbers or arrays of one run; all its randomness comes from the seed."""
        raise NotImplementedError

    @abstractmethod
    def summarise(self, runs: Runs) -> Summary:
        """Return the findings over all runs; arrays become lists."""

    @abstractmethod
    def claims(self, summary: Summary) -> list[Claim]:
        """Return the statements that the study checks, with their evidence."""

    @abstractmethod
    def table(self, summary: Summary) -> str:
        """Return the findings as Markdown."""

    @abstractmethod
    def picture(self, summary: Summary) -> Figure:
        """Draw the findings; import matplotlib here, so that studies run without it."""
