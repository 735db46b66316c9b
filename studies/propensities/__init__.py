"""Measure intervals with estimated propensities against those with recorded ones."""
