"""Show results: text tables, figures, TensorBoard. Nothing is computed here."""
