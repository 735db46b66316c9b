"""Answer questions by evaluations: which policy is best, what to trust, what to collect next."""
