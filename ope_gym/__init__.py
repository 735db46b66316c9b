"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from ope_gym.estimators import ESTIMATORS
from ope_gym.evaluation import evaluate, evaluate_log_probs
from ope_gym.results import Estimate, Evaluation

__all__ = ["ESTIMATORS", "Estimate", "Evaluation", "evaluate", "evaluate_log_probs"]
