"""The runs of a study by workers: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ope_gym.scale.workers import WorkerError, start_workers
from studies.chunks import Runs
from studies.fingerprint import fingerprint
from studies.seeds import Span, seeds_of

if TYPE_CHECKING:
    from studies.frame import Study


def results_of(
    study: Study, seed: int, todo: Sequence[Span], workers: int, ray: bool | str = False
) -> Generator[tuple[Span, Runs], None, None]:
    """Yield the chunks in their order. Ctrl-C ends the workers at once."""
    if not todo:
        return
    with start_workers(min(workers, len(todo)), ray) as crew:
        code = fingerprint(study, seed) if ray else ""
        yield from zip(todo, crew.in_order(partial(_chunk, study, seed, code), todo), strict=True)


def _chunk(study: Study, seed: int, code: str, span: Span) -> Runs:
    """The runs of a span, if this is the code that asked for them; no code is any code."""
    if code and code != (own := fingerprint(study, seed)):
        raise WorkerError(
            f"{study.name}: a Ray worker has other code or settings ({own} instead of {code}): the "
            "same checkout must be on every node"
        )
    return study.run(seeds_of(seed, span, study.name))
