"""Measure the bias from policies and targets that depend on the data."""
