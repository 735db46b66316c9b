"""Off-policy evaluation inside Stable-Baselines3."""

try:
    import stable_baselines3  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "stable_baselines3":
        raise
    raise ModuleNotFoundError(
        "wrappers.sb3 needs Stable-Baselines3, which is not installed: "
        'pip install "stable-baselines3>=2.9"',
        name=error.name,
    ) from error

from wrappers.sb3.callback import OPECallback
from wrappers.sb3.episodes import Recording

__all__ = ["OPECallback", "Recording"]
