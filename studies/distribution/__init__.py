"""Measure how often intervals of the distribution of returns contain the truth."""
