"""Every public function returns what `tests/golden.json` holds; see `tests.golden`."""

import math

import pytest

from tests import golden
from tests.golden_library import Results

REMEDY = "if the change is meant: python -m tests.golden --write --only PREFIX ..."


@pytest.fixture(scope="module")
def found() -> Results:
    return golden.compute()


def test_numbers_are_as_stored(found: Results) -> None:
    _compare(found, words=False)


def test_words_are_as_stored(found: Results) -> None:
    _compare(found, words=True)


def _compare(found: Results, *, words: bool) -> None:
    stored, now = (
        {key: value for key, value in results.items() if key.startswith("text/") == words}
        for results in (golden.read(), golden.storable(found))
    )
    lines = golden.differences(stored, now)
    assert not lines, "\n".join([REMEDY, *lines])


def test_memory_files_chunks_and_workers_agree(found: Results) -> None:
    lines = golden.twin_differences(found)
    assert not lines, "\n".join(lines)
    for prefix in golden.TWINS:  # none is left out but Ray
        assert prefix.endswith("ray/") or any(key.startswith(prefix) for key in found)


def test_differences_are_seen() -> None:
    stored = {"a/value": 1.0, "a/influence": [1e-14, 2.0], "a/colour": "red", "a/nan": [math.nan]}
    assert not golden.differences(stored, dict(stored), exact=True)
    off = golden.relative("a/value", 1.0, 1.0 + 1e-8)
    assert off == pytest.approx(1e-8)
    assert golden.relative("a/influence", [1e-14, 2.0], [-3e-14, 2.0]) < 1e-13
    changed = {"a/value": 1.0 + 1e-8, "a/influence": [0.1, 2.0], "a/colour": "green", "b": 1}
    lines = golden.differences(stored, changed)
    assert [line.split(":")[0] for line in lines] == ["b", *stored]
    assert not golden.differences({"a": 1.0}, {"a": 1.0 + 1e-12})
    assert golden.differences({"a": 1.0}, {"a": 1.0 + 1e-12}, exact=True)
