"""Evaluate the policies of a training loop while it runs, at no extra step of the environment."""

from ope_gym.online.estimate import FreeEstimate
from ope_gym.online.free import FreeEvaluation

__all__ = ["FreeEstimate", "FreeEvaluation"]
