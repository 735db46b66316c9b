"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from ope_gym.buffer import TrajectoryBuffer
from ope_gym.estimators import ESTIMATORS
from ope_gym.evaluation import evaluate, evaluate_log_probs
from ope_gym.policies import (
    DiagonalGaussian,
    EpsilonGreedyTable,
    FinitePolicy,
    LinearSigmoid,
    Policy,
    SoftmaxLinear,
    Uniform,
    register_policy,
)
from ope_gym.results import Difference, Estimate, Evaluation
from ope_gym.trajectories import Schedule, Trajectories

__version__ = "0.1.0"

__all__ = [
    "ESTIMATORS",
    "DiagonalGaussian",
    "Difference",
    "EpsilonGreedyTable",
    "Estimate",
    "Evaluation",
    "FinitePolicy",
    "LinearSigmoid",
    "Policy",
    "Schedule",
    "SoftmaxLinear",
    "Trajectories",
    "TrajectoryBuffer",
    "Uniform",
    "evaluate",
    "evaluate_log_probs",
    "register_policy",
]
