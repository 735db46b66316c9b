"""Derive the random numbers of a run from the seed, the study's name and the number of the run."""

from __future__ import annotations

import zlib
from typing import TypeAlias

import numpy as np

Span: TypeAlias = tuple[int, int]  # runs start, …, stop - 1


def seeds_of(seed: int, span: Span, study: str = "") -> list[np.random.SeedSequence]:
    """Return the seeds of runs start, …, stop - 1 of a study; no two studies share a seed."""
    key = zlib.crc32(study.encode())
    return [np.random.SeedSequence(seed, spawn_key=(key, run)) for run in range(*span)]


def streams(seed: np.random.SeedSequence, count: int) -> list[np.random.Generator]:
    """Return independent generators for one run; calling again with `seed` gives the same ones."""
    keys = [(*seed.spawn_key, stream) for stream in range(count)]
    return [
        np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=key)) for key in keys
    ]
