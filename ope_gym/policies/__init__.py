"""Policies as small frozen snapshots: the protocol, closed-form classes, networks."""
