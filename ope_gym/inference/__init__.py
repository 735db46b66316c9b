"""From influence values to an answer: standard error, interval, diagnostics, verdict."""
