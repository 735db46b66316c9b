"""Recorded episodes prepared for estimators: surveyed, fitted and weighed."""
