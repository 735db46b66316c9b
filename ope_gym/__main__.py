"""Run the command line: `python -m ope_gym`."""

from __future__ import annotations

import signal
import sys
import warnings

from ope_gym.cli import main


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the line of the source."""
    return f"warning: {message}\n"


if __name__ == "__main__":
    warnings.formatwarning = _plain
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
    sys.exit(code)
