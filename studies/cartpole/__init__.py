"""Evaluate the last policy of PoWER on CartPole."""
