"""How a command that was stopped leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

STOPPED = 130  # as shells have it for Ctrl-C
_PATIENCE = 5.0  # seconds


def leave(code: int) -> NoReturn:
    """End the process; the threads of a pool may wait for workers that are gone, but not for ever.

    Python itself would wait for all threads. Without it, what they hold is not given back, and
    multiprocessing warns of leaked semaphores.
    """
    if code == STOPPED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
        deadline = time.monotonic() + _PATIENCE
        others = [thread for thread in threading.enumerate() if not thread.daemon]
        others.remove(threading.main_thread())
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        ray = sys.modules.get("ray")
        if ray is not None:  # whose threads crash when Python goes first
            ray.shutdown()
        if ray is not None or any(thread.is_alive() for thread in others):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)
