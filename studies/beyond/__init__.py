"""Compare estimators with a q model to NFIS."""
