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


class _Line:
    """The line on the terminal, shown while one or more compilations are under way."""

    def __init__(self) -> None:
        self.wanted, self._depth, self._bar = False, 0, None

    def begin(self) -> None:
        """Show the line if a command wants it."""
        self._depth += 1
        if self.wanted and self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(desc=TEXT, bar_format="{desc}", leave=False)

    def end(self) -> None:
        """Clear the line after the outermost compilation."""
        self._depth -= 1
        if self._depth == 0:
            self.clear()

    def clear(self) -> None:
        """Clear the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_line = _Line()


@contextmanager
def compilation_shown(disable: bool | None = None) -> Iterator[None]:
    """Show a line below the progress bars while numba compiles; it is gone when that is done.

    Args:
        disable: whether to show nothing; None: only where there is no terminal, as in tqdm.
    """
    _line.wanted = not disable and sys.stderr.isatty()
    try:
        yield
    finally:
        _line.wanted = False
        _line.clear()


def watch() -> None:
    """Let numba tell when it compiles."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            _line.begin()

        def on_end(self, event: Any) -> None:
            _line.end()

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]
