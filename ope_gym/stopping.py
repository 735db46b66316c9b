"""End commands on Ctrl-C and SIGTERM with one line, and with the exit code that shells expect.

`held_back` is for everybody: it keeps signals out of the few lines that they must not cut in two.

While a command imports its modules, a signal ends the process at once: there is nothing to close,
and an exception inside an import may come out as any other. From then on it is raised as `Stopped`,
so that files are closed, workers ended and scratch folders removed on the way out. The first one
waits until a module is imported or a kernel compiled; a second one does not wait for anything. This
module imports nothing heavy, because it comes before everything else.
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

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IMPORT = "<frozen importlib._bootstrap>"
_PATIENCE = 0.05  # seconds after which a signal that was swallowed is sent again
_came = False  # whether a signal came, which makes the next one the second
_raised = 0  # the signal that was raised last; 0 if there is none
_broken = 0  # the signal that broke an import or a compilation off; 0 if there is none
_holds = False  # whether `held_back` holds signals back


class Stopped(KeyboardInterrupt):
    """Raised where a signal arrives, Ctrl-C or SIGTERM.

    Attributes:
        number: The signal.
        again: Whether another one came before it.
    """

    def __init__(self, number: int, *, again: bool = False) -> None:
        super().__init__(f"signal {number}")
        self.number, self.again = number, again


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code after a signal: 130 after Ctrl-C, 143 after SIGTERM."""
    # Ray raises a KeyboardInterrupt of its own where ours was raised
    return 128 + int(getattr(stop, "number", _raised or signal.SIGINT))


def urgent(stop: KeyboardInterrupt) -> bool:
    """Return whether there is little time: after SIGTERM, and after a second Ctrl-C."""
    return exit_code(stop) == 128 + signal.SIGTERM or getattr(stop, "again", False)


def leave_at_once() -> None:
    """Let signals end the process with one line; call it before the imports of a command."""
    _handle(_leave)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command, raise signals there as `Stopped`, and exit."""
    try:
        sys.unraisablehook = _raise_again(sys.unraisablehook)
        _handle(_raise)
        code = main()
        _handle(signal.SIG_IGN)  # nothing is left to stop
    except KeyboardInterrupt as stop:
        _handle(signal.SIG_IGN)
        print("\nstopped", file=sys.stderr)
        code = exit_code(stop)
    sys.exit(code)


def check() -> None:
    """Raise `Stopped` if a signal came and compiled code swallowed it; call it in long loops."""
    if _raised:
        raise Stopped(_raised)


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """Raise `Stopped` where a second signal came out of the block as some other error.

    Imports and numba turn what is raised inside them into errors of their own. The second signal
    does not wait for their end, so a command that catches errors needs this around its work.
    """
    global _broken
    try:
        yield
    except Exception as error:
        if _broken:
            raise Stopped(_broken, again=True) from error
        raise
    finally:
        _broken = 0  # errors from here on are not its doing


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the end of the block; a second one gets through at once.

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
        if _holds and not waiting:
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
        for number in waiting:
            signal.raise_signal(number)


def _handle(handler: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopped\n")
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    global _came, _raised, _broken
    again, _came = _came, True
    if _delicate(frame):
        if not again:
            sys.setprofile(_raise_after(number))
            return
        _broken = number
    sys.setprofile(None)
    _raised = number
    raise Stopped(number, again=again)


def _send_again(number: int) -> None:
    timer = threading.Timer(_PATIENCE, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _raise_again(shown: Callable[[Any], object]) -> Any:
    """Return a hook that sends a signal again if a destructor or a callback swallowed it."""

    def hook(unraisable: Any) -> None:
        global _came, _raised, _broken
        error = unraisable.exc_value
        if isinstance(error, Stopped):
            _came, _raised, _broken = error.again, 0, 0  # or it would count twice
            _send_again(error.number)
        else:
            shown(unraisable)

    return hook


def _raise_after(number: int) -> Any:
    """Return a profiler that raises a signal where the code that cannot be broken off is left."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        global _came
        if event == "return" and _whole(frame) and not _delicate(frame.f_back):
            _came = False  # it is still the first
            _raise(number, frame.f_back)

    return profile


def _delicate(frame: FrameType | None) -> bool:
    """Return whether a frame was called, over any others, by code that cannot be broken off."""
    while frame is not None:
        if _whole(frame):
            return True
        frame = frame.f_back
    return False


def _whole(frame: FrameType) -> bool:
    """Return whether a frame imports a module, or is numba's, which compiles or loads a kernel.

    Modules and the tables of numba would be left half made, and what is evaluated after Ctrl-C
    would fail.
    """
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename == _IMPORT or module.partition(".")[0] == "numba"
