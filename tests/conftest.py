"""Fixtures of several files: processes take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ope_gym.scale.workers import Workers, start_workers


@pytest.fixture(scope="module")
def crew() -> Iterator[Workers]:
    """Start two processes for all tests of a file."""
    with start_workers(2) as made:
        yield made


@pytest.fixture
def shared_crew(crew: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every evaluation by two processes use those of the file."""

    @contextmanager
    def start(workers: int = 1, ray: bool | str | None = False) -> Iterator[Workers]:
        assert workers <= 2
        assert not ray
        yield crew if workers == 2 else Workers()

    monkeypatch.setattr("ope_gym.evaluation.start_workers", start)
