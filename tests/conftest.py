"""Fixtures of several files, the order of the files, and what is not traced for coverage.

The longest files come first, so that no process ends with one of them while the others have
nothing left to do. Tracing about doubles the time of Python loops and of compilation. So it pauses
while numba compiles, and in files whose subject is not `ope_gym` itself or that mostly train,
simulate or wait: what they execute of it, the tests of its modules execute, too.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from ope_gym.arrays import cores

NOT_TRACED = (
    "test_agents",
    "test_architecture",
    "test_blackjack",
    "test_browser",
    "test_docs",
    "test_end_to_end",
    "test_golden",
    "test_monte_carlo",
    "test_outside",
    "test_power",
    "test_ray",
    "test_sb3",
    "test_studies",
    "test_train",
    "test_words",
)

LONGEST_FIRST = (
    "test_ray",
    "test_docs",
    "test_sb3_free",
    "test_behaviour",
    "test_sources",
    "test_cli",
    "test_studies_cartpole",
    "test_studies_blackjack",
    "test_marginal",
    "test_workers",
    "test_browser",
    "test_golden",
)


def pytest_xdist_auto_num_workers() -> int:
    """Start one more process than there are cores: some tests wait more than they work."""
    return cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; `--no-loadscope-reorder` keeps this order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@contextmanager
def not_traced() -> Iterator[None]:
    """Pause coverage in this thread."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the tests of some files without tracing; a debugger's tracing is left alone."""
    if item.config.pluginmanager.hasplugin("_cov") and item.path.stem.startswith(NOT_TRACED):
        with not_traced():
            return (yield)
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def compile_without_tracing() -> Iterator[None]:
    """Let numba compile without tracing."""
    compile_traced = Dispatcher.compile

    def compile_(self: Any, signature: Any) -> Any:
        with not_traced():
            return compile_traced(self, signature)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compile_)
        yield
