"""Run any study: seeds, workers, kept runs, rules for claims, pictures and the report."""
