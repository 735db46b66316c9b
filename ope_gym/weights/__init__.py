"""Importance weights: who could have recorded an episode, and how much it counts for the target."""
