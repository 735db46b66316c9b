"""Parts that the single and the vector recorder share."""
