"""Gymnasium wrappers that record trajectories with the probabilities of their actions."""
