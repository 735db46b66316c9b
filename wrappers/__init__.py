"""Gymnasium wrappers that record trajectories with the probabilities of their actions."""

from wrappers.collect import collect
from wrappers.record import RecordTrajectories

__all__ = ["RecordTrajectories", "collect"]
