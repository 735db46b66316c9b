"""Off-policy evaluation of policies from the trajectories a training loop leaves behind.

The public names are listed in `__init__.pyi`. Each is loaded when it is first used, so that
importing the package costs next to nothing.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_HOMES = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for name in node.names
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Load a public name or module when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == __name__:
        return import_module(f"{home}.{name}")
    value = getattr(__import__(home, fromlist=[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
