"""Off-policy evaluation inside Stable-Baselines3."""

from wrappers.sb3.callback import OPECallback

__all__ = ["OPECallback"]
