"""The logging agents: PoWER, epsilon-greedy Monte-Carlo control, softmax-linear."""
