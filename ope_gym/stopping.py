"""End commands with one line, whatever ends them, and with the exit code that shells expect.

While a command imports its modules, a signal ends the process at once: there is nothing to close.
From then on it is a KeyboardInterrupt where the command is, so that files are closed, workers ended
and scratch folders removed on the way out. numba and other libraries may turn that into an error of
their own; whatever comes out after a signal is taken for its doing. This module imports nothing
heavy, because it comes before everything else.

`held_back` is for everybody: it keeps signals out of the few lines that they must not cut in two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

# Errors whose message says what is wrong; of others it may be as little as a key.
_TELLING = (ValueError, TypeError, OSError, RuntimeError, ImportError)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received = 0  # the last signal that was raised; 0 if there is none
_holds = False  # whether `held_back` holds signals back


def exit_code() -> int:
    """Return the exit code after a signal: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (_received or signal.SIGINT)


def leave_at_once() -> None:
    """Let signals end the process with one line; call it before the imports of a command."""
    _handle(_leave)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command, raise signals there as KeyboardInterrupt, and exit: with 2 on an error."""
    try:
        _handle(_raise)
        code = main()
    except BaseException as error:
        stopped = bool(_received) or isinstance(error, KeyboardInterrupt)
        if isinstance(error, SystemExit) or (sys.flags.dev_mode and not stopped):
            raise
        _handle(signal.SIG_IGN)
        reason = "" if isinstance(error, KeyboardInterrupt) else f": {in_one_line(error)}"
        print(
            f"\nstopped{reason}" if stopped else os.path.basename(sys.argv[0]) + reason,
            file=sys.stderr,
        )
        code = exit_code() if stopped else 2
    _handle(signal.SIG_IGN)  # nothing is left to stop
    sys.exit(code)


def in_one_line(error: BaseException) -> str:
    """Return what went wrong in a line; where its message alone says little, also where it was."""
    words = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        words = f"{error.filename}: {error.strerror}".removeprefix("None: ")
    if not words or not isinstance(error, _TELLING):
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        words = f"{type(error).__name__}: {words}".removesuffix(": ")
        if place is not None:
            file = os.path.basename(place.tb_frame.f_code.co_filename)
            words += f" ({file}, line {place.tb_lineno}; python -X dev shows more)"
    return escaped(words)


def escaped(text: str) -> str:
    r"""Return text that a terminal takes for text: control and other unseen characters as escapes.

    >>> print(escaped("\x1b[2Jred"))
    \x1b[2Jred
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt if a signal came: an error after it is its doing."""
    if _received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_asks(words: str) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C of the block ask to stop; another one, and SIGTERM, stop it at once.

    Args:
        words: Words to print when it is asked.

    Yields:
        A function that tells whether it was asked.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, before)
        _write(words)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the end of the block, which must be short.

    Signals that nobody handles in Python are left alone: they end the process as before.
    """
    global _holds  # one block inside another holds nothing back itself
    if _holds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    waiting: list[signal.Signals] = []

    def wait(number: int, frame: FrameType | None) -> None:
        sent = signal.Signals(number)
        if _holds:
            waiting.append(sent)
        else:
            before[sent](number, frame)

    try:
        _holds = True
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, wait)
        yield
    finally:
        try:
            for number in reversed(before):  # Ctrl-C last: it may come at once
                signal.signal(number, before[number])
        finally:
            _holds = False
        for number in waiting[:1]:
            signal.raise_signal(number)


def _handle(handler: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    _write("stopped")
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = number
    raise KeyboardInterrupt


def _write(words: str) -> None:
    """Write a line to standard error, also where a signal has interrupted another writer."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{words}\n".encode())
