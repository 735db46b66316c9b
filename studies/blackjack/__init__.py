"""Evaluate the last policy of Monte-Carlo control on Blackjack."""
