"""Count how often intervals contain the value."""
