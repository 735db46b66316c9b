"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from importlib import import_module
from typing import TYPE_CHECKING

from ope_gym.analysis.contributions import contributions
from ope_gym.analysis.leave_one_out import Calibration, leave_one_policy_out
from ope_gym.analysis.planning import episodes_needed
from ope_gym.analysis.ranking import rank
from ope_gym.analysis.ranking_table import Ranking
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schedules import Schedule
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.evaluation import Evaluator, evaluate
from ope_gym.inference.estimate import Difference, Estimate
from ope_gym.inference.intervals import Betting, Bootstrap, EssT
from ope_gym.log_probs import evaluate_log_probs
from ope_gym.options import Compute, Options, Weighting
from ope_gym.results import Evaluation

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ope_gym import models as models
    from ope_gym import policies as policies
    from ope_gym.analysis import overlap as overlap
    from ope_gym.data import minari as minari
    from ope_gym.report import tensorboard as tensorboard
else:
    _LATER = {
        "models": "ope_gym.models",
        "minari": "ope_gym.data.minari",
        "overlap": "ope_gym.analysis.overlap",
        "policies": "ope_gym.policies",
        "tensorboard": "ope_gym.report.tensorboard",
    }

    def __getattr__(name: str) -> object:
        """Load a module when it is first used."""
        if name in _LATER:
            return import_module(_LATER[name])
        raise AttributeError(f"module 'ope_gym' has no attribute {name!r}")


__all__ = [
    "ESTIMATORS",
    "Betting",
    "Bootstrap",
    "Calibration",
    "Compute",
    "Difference",
    "EssT",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "Options",
    "Ranking",
    "Schedule",
    "Trajectories",
    "TrajectoryBuffer",
    "Weighting",
    "contributions",
    "episodes_needed",
    "evaluate",
    "evaluate_log_probs",
    "leave_one_policy_out",
    "rank",
]
