"""Measure duels: how often they err under continuous peeking, and how many episodes they save."""
