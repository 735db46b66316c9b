"""Recorded episodes as columns: trajectories, a buffer that grows, files that keep them."""
