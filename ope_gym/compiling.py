"""Say on a terminal that kernels are being compiled, which takes seconds the first time.

Compiled code is kept on disk, so later runs say nothing. Only commands ask for this: in a program
the library is silent. `ope_gym.kernels` calls `watch` when it is imported, so that commands which
need no kernel do not wait for numba.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TEXT = "compiling for the first time, a few seconds ..."
_shows = False  # whether a command runs on a terminal
_bar: Any = None  # the line on the terminal


@contextmanager
def compilation_shown(quiet: bool = False) -> Iterator[None]:
    """Show a line below the progress bars while numba compiles, unless `quiet`; then clear it."""
    global _shows
    _shows = not quiet and sys.stderr.isatty()
    try:
        yield
    finally:
        _shows = False
        _clear()


def watch() -> None:
    """Let numba tell when it compiles."""
    from numba.core import event

    class Listener(event.Listener):
        depth = 0  # a compilation compiles what it calls

        def on_start(self, event: Any) -> None:
            global _bar
            self.depth += 1
            if _shows and _bar is None:
                from tqdm import tqdm

                _bar = tqdm(desc=TEXT, bar_format="{desc}", leave=False)

        def on_end(self, event: Any) -> None:
            self.depth -= 1
            if not self.depth:
                _clear()

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]


def _clear() -> None:
    global _bar
    if _bar is not None:
        _bar.close()
        _bar = None
