"""What `auto` needs beyond NFIS, from shards: FWDR and NFIS with weights that are cut.

The limits follow from the sums of all weights (pass 2), influence values from the sums of all
weights that are cut (pass 3); so with a q model `auto` takes a fourth pass.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.estimators.reductions import WeightSums
from ope_gym.scale.passes import Key, NormalisedPass, WeightedChunk

CALM, ROBUST = Key("cut", False, False), Key("cut", False, True)


@dataclass
class CutSums:
    """Sums of the weights that are cut.

    Args:
        gamma: discount.
        sums: by what they are of.
        above: at how many steps a weight was above its limit.
    """

    gamma: float
    sums: dict[Key, WeightSums] = field(init=False)
    above: int = 0

    def __post_init__(self) -> None:
        self.sums = {key: WeightSums(self.gamma, None) for key in (CALM, ROBUST)}

    def update(self, chunk: WeightedChunk) -> None:
        """Add some trajectories."""
        for key, sums in self.sums.items():
            sums.update(*chunk.arguments(key))
        self.above += int(np.count_nonzero(chunk.columns["fused"] > chunk.columns["cut"]))

    def merge(self, other: CutSums) -> None:
        """Add the trajectories of another, after the own."""
        for key, sums in self.sums.items():
            sums.merge(other.sums[key])
        self.above += other.above


@dataclass(frozen=True)
class Cut:
    """What was found of the weights that are cut, in both passes."""

    found: CutSums
    normalised: NormalisedPass

    @property
    def share(self) -> float:
        """Of the steps, those whose weight was cut."""
        return self.found.above / self.found.sums[CALM].steps


def with_cut(chunk: WeightedChunk, limit: FloatArray) -> WeightedChunk:
    """The chunk with fused weights that are cut at limits (T,) as well."""
    offsets = chunk.offsets
    steps = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    cut = np.minimum(chunk.columns["fused"], limit[steps])
    return dataclasses.replace(chunk, columns={**chunk.columns, "cut": cut})
