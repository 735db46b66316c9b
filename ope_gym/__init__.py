"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from ope_gym.buffer import TrajectoryBuffer
from ope_gym.estimators import ESTIMATORS
from ope_gym.evaluation import Evaluator, evaluate, evaluate_log_probs
from ope_gym.leave_one_out import Calibration, leave_one_policy_out
from ope_gym.past_policies import contributions
from ope_gym.planning import episodes_needed
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
from ope_gym.ranking import Ranking, rank
from ope_gym.results import Difference, Estimate, Evaluation
from ope_gym.trajectories import Schedule, Trajectories

__version__ = "0.1.0"

__all__ = [
    "ESTIMATORS",
    "Calibration",
    "DiagonalGaussian",
    "Difference",
    "EpsilonGreedyTable",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "FinitePolicy",
    "LinearSigmoid",
    "Policy",
    "Ranking",
    "Schedule",
    "SoftmaxLinear",
    "Trajectories",
    "TrajectoryBuffer",
    "Uniform",
    "contributions",
    "episodes_needed",
    "evaluate",
    "evaluate_log_probs",
    "leave_one_policy_out",
    "rank",
    "register_policy",
]
