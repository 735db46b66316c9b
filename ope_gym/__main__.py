"""Run the command line: `python -m ope_gym`, or `ope-gym` where the package is installed."""

from __future__ import annotations

import warnings

from ope_gym import stopping


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the line of the source."""
    return f"warning: {message}\n"


def script() -> None:
    """Run the command of the command line, and exit with its code."""
    stopping.leave_at_once()
    from ope_gym.cli import main

    warnings.formatwarning = _plain
    stopping.run(main)


if __name__ == "__main__":
    script()
