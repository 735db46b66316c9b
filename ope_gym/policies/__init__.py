"""Policies as small frozen snapshots: the protocol, closed-form classes, networks.

acting       what free evaluation asks of a policy: its actions, not their probabilities
base         the protocols, storage, policies that cannot act, what becomes a policy
closed_form  linear, tabular, uniform and Gaussian policies
estimated    behaviour policies estimated from recorded actions
mlp          small networks in numpy, as Stable-Baselines3 trains them
numerics     checks and encodings of arguments, probabilities in plain numpy
torch        TorchPolicy, any torch module; imported only on request
"""

from ope_gym.policies.base import (
    POLICY_KINDS,
    UNREGISTERED,
    FinitePolicy,
    Policy,
    Snapshot,
    StoredPolicy,
    Target,
    UnavailablePolicy,
    UnknownPolicy,
    acting_log_probs,
    acts_unknown,
    as_policy,
    check_target,
    log_prob_moments,
    policy_from_arrays,
    policy_number,
    policy_to_arrays,
    register_converter,
    register_policy,
    resolve_policy,
)
from ope_gym.policies.closed_form import (
    DiagonalGaussian,
    EpsilonGreedyTable,
    LinearSigmoid,
    SoftmaxLinear,
    Uniform,
)
from ope_gym.policies.estimated import EstimatedPolicy
from ope_gym.policies.mlp import EpsilonGreedyMlp, GaussianMlp, Network, SoftmaxMlp, Standardiser

__all__ = [
    "POLICY_KINDS",
    "UNREGISTERED",
    "DiagonalGaussian",
    "EpsilonGreedyMlp",
    "EpsilonGreedyTable",
    "EstimatedPolicy",
    "FinitePolicy",
    "GaussianMlp",
    "LinearSigmoid",
    "Network",
    "Policy",
    "Snapshot",
    "SoftmaxLinear",
    "SoftmaxMlp",
    "Standardiser",
    "StoredPolicy",
    "Target",
    "UnavailablePolicy",
    "Uniform",
    "UnknownPolicy",
    "acting_log_probs",
    "acts_unknown",
    "as_policy",
    "check_target",
    "log_prob_moments",
    "policy_from_arrays",
    "policy_number",
    "policy_to_arrays",
    "register_converter",
    "register_policy",
    "resolve_policy",
]
