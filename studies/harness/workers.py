"""Do the runs of a study in processes of this machine or on a Ray cluster.

All use of `ope_gym.scale` by the studies is here.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

from ope_gym.scale.ray import WorkerError, connect
from ope_gym.scale.workers import Workers
from studies.harness.fingerprint import fingerprint
from studies.harness.seeds import Span, seeds_of
from studies.harness.study import Runs, Study

__all__ = ["RAY_HELP", "WorkerError", "connect", "ray_address", "results_of"]

RAY_HELP = (
    "compute on a Ray cluster: auto, local (a new one here), HOST:PORT or ray://HOST:PORT; alone, "
    "the one of RAY_ADDRESS, else one that runs on this machine, else a new one here"
)


def results_of(
    study: Study, seed: int, todo: Sequence[Span], workers: int, ray: bool | str = False
) -> Generator[tuple[Span, Runs], None, None]:
    """Yield each span of runs with its results, in order; Ctrl-C ends the workers at once."""
    code = fingerprint(study, seed) if ray else ""
    run = partial(_run_span, study, seed, code)
    with closing(Workers(workers, ray).in_order(run, todo)) as runs:
        yield from zip(todo, runs, strict=True)


def _run_span(study: Study, seed: int, code: str, span: Span) -> Runs:
    """Run a span in a worker.

    Raises:
        WorkerError: If `code` is given and is not the fingerprint of the worker's own code.
    """
    if code and code != (own := fingerprint(study, seed)):
        raise WorkerError(
            f"{study.name}: a Ray worker has other code or settings ({own} instead of {code}): put "
            "the same checkout on every node"
        )
    return study.run(seeds_of(seed, span, study.name))


def ray_address(text: str) -> str:
    """Return the address of a cluster as --ray takes it."""
    if text not in ("auto", "local") and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address of a Ray cluster: give auto, local, HOST:PORT or "
            "ray://HOST:PORT, or --ray alone"
        )
    return text
