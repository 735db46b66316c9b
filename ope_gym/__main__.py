"""Run the command line: `python -m ope_gym`."""

from __future__ import annotations

import warnings

from ope_gym import stopping

if __name__ == "__main__":
    stopping.leave_at_once()

from ope_gym.cli import main


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the line of the source."""
    return f"warning: {message}\n"


if __name__ == "__main__":
    warnings.formatwarning = _plain
    stopping.run(main)
