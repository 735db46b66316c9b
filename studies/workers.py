"""The runs of a study by workers: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ope_gym.scale.crews import crew
from ope_gym.scale.tasks import WorkerError
from studies.chunks import Runs
from studies.fingerprint import fingerprint
from studies.seeds import Span, seeds_of

if TYPE_CHECKING:
    from studies.frame import Study


def results_of(
    study: Study, seed: int, todo: Sequence[Span], workers: int, ray: bool | str = False
) -> Generator[tuple[Span, Runs], None, None]:
    """Chunks as they finish. Ctrl-C ends the workers at once."""
    if not todo:
        return
    with crew(min(workers, len(todo)), ray) as hands:
        code = fingerprint(study, seed) if ray else ""
        for index, runs in hands.run(partial(_chunk, study, seed, code), todo):
            yield todo[index], runs


def _chunk(study: Study, seed: int, code: str, span: Span) -> Runs:
    """The runs of a span, if this is the code that asked for them; no code is any code."""
    if code and code != (own := fingerprint(study, seed)):
        raise WorkerError(
            f"{study.name}: a Ray worker has other code or settings ({own} instead of {code}): the "
            "same checkout must be on every node"
        )
    return study.run(seeds_of(seed, span, study.name))
