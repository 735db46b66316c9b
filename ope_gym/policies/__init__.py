"""Policies as small frozen snapshots: the protocol, closed-form classes, networks."""

from ope_gym.policies import mlp as mlp  # registers its kinds: any file may hold them
