"""Answer questions by evaluations: which policy is best, whom to trust, what to collect next."""
