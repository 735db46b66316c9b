"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""
