"""Turn what people have into policies: Stable-Baselines3 models, saved ones, torch modules.

A converter is found by the package that the class of an object, or one of its bases, comes from,
and is imported when it is first needed: this module imports neither torch nor Stable-Baselines3.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

Converter = Callable[[Any], Any]

# By package: a function that makes a policy of an object, or the place of one, "module:name".
_CONVERTERS: dict[str, Converter | str] = {
    "stable_baselines3": "wrappers.sb3.convert:policy_of",
    "sb3_contrib": "wrappers.sb3.convert:policy_of",
    "torch": "ope_gym.policies.torch:TorchPolicy",
}
_READERS = {".zip": "wrappers.sb3.convert:load_policy"}  # by ending of a file


def register_converter(package: str, convert: Converter) -> None:
    """Let objects of a package stand wherever a policy is expected.

    Args:
        package: Name of the package that their class, or a base of it, comes from.
        convert: Function that returns a policy for such an object.
    """
    _CONVERTERS[package] = convert


def is_saved(target: object) -> bool:
    """Return whether a target is the path of a saved model, such as "ppo_cartpole.zip"."""
    if not isinstance(target, str | os.PathLike):
        return False
    return os.path.splitext(os.fspath(target))[1] in _READERS


def as_policy(target: Any, name: str = "target") -> Any:
    """Return the policy of a model, a saved model or a torch module; other objects as they are.

    Args:
        target: A policy, a model of Stable-Baselines3, the path of a saved one (.zip), or a torch
            module that returns logits or a distribution.
        name: Name of the argument, for messages.
    """
    if hasattr(target, "log_prob") and hasattr(target, "sample"):
        return target
    if is_saved(target):
        path = os.fspath(target)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{name} is {path!r}, and there is no such file")
        return _imported(_READERS[os.path.splitext(path)[1]], name)(path)
    for base in type(target).__mro__:
        convert = _CONVERTERS.get(base.__module__.partition(".")[0])
        if convert is not None:
            return (_imported(convert, name) if isinstance(convert, str) else convert)(target)
    return target


def _imported(place: str, name: str) -> Any:
    module, _, function = place.partition(":")
    try:
        return getattr(import_module(module), function)
    except ImportError as error:
        raise ImportError(
            f"{name} is a model of Stable-Baselines3, which is not installed: pip install "
            f'"ope-gym[sb3]" ({error})'
        ) from error
