"""Evaluate the policies of a training loop while it runs, at no extra step of the environment."""

from ope_gym.online.free import FreeEstimate, FreeEvaluation

__all__ = ["FreeEstimate", "FreeEvaluation"]
