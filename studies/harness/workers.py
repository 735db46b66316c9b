"""Do the runs of a study in processes of this machine or on a Ray cluster.

All use of `ope_gym.scale` by the studies is here.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from ope_gym.scale.ray import RAY_HELP, connected, ray_address
from ope_gym.scale.tasks import WorkerError, ignoring_interrupts
from ope_gym.scale.workers import start_workers
from studies.harness.fingerprint import fingerprint
from studies.harness.seeds import Span, seeds_of
from studies.harness.study import Runs, Study

__all__ = [
    "RAY_HELP",
    "WorkerError",
    "connected",
    "ignoring_interrupts",
    "ray_address",
    "results_of",
]


def results_of(
    study: Study, seed: int, todo: Sequence[Span], workers: int, ray: bool | str = False
) -> Generator[tuple[Span, Runs], None, None]:
    """Yield each span of runs with its results, in order; Ctrl-C ends the workers at once."""
    if not todo:
        return
    with start_workers(min(workers, len(todo)), ray) as crew:
        code = fingerprint(study, seed) if ray else ""
        yield from zip(
            todo, crew.in_order(partial(_run_span, study, seed, code), todo), strict=True
        )


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
