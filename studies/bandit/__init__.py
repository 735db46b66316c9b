"""Compare BIS, NIS, EA and the optimal weights on the paper's bandit."""
