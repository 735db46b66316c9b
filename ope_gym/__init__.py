"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from ope_gym import baselines as baselines
    from ope_gym import minari as minari
    from ope_gym import oracle as oracle
    from ope_gym import overlap as overlap
    from ope_gym import sharded as sharded
    from ope_gym import tensorboard as tensorboard
    from ope_gym import torch_policy as torch_policy
else:
    _LATER = ("baselines", "minari", "oracle", "overlap", "sharded", "tensorboard", "torch_policy")

    def __getattr__(name: str) -> object:
        """Modules that are loaded when they are used."""
        if name in _LATER:
            return import_module(f"ope_gym.{name}")
        raise AttributeError(f"module 'ope_gym' has no attribute {name!r}")


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
