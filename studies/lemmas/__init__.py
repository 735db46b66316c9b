"""Check the paper's two lemmas on random problems."""
