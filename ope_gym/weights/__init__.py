"""Importance weights: which policies could have recorded an episode, and how much it counts."""
