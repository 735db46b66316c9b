"""Run the command line: `python -m ope_gym`, or `ope-gym` where the package is installed."""

from __future__ import annotations

import sys
import warnings

from ope_gym import stopping


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the line of the source."""
    return f"warning: {stopping.escaped(str(message))}\n"


def script() -> None:
    """Run the command of the command line, and exit with its code."""
    stopping.leave_at_once()
    warnings.formatwarning = _plain
    try:
        from ope_gym.cli import main
    except Exception as error:  # memory that does not suffice, or a broken installation
        print(f"ope-gym: {stopping.in_one_line(error)}", file=sys.stderr)
        sys.exit(3 if sys.argv[1:2] == ["gate"] else 2)
    stopping.run(main)


if __name__ == "__main__":
    script()
