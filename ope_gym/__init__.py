"""Off-policy evaluation of policies from the trajectories a training loop leaves behind."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ope_gym import models as models
    from ope_gym import policies as policies
    from ope_gym.analysis import overlap as overlap
    from ope_gym.analysis.behaviour import BehaviourFit as BehaviourFit
    from ope_gym.analysis.behaviour import fit_behaviour as fit_behaviour
    from ope_gym.analysis.contributions import contributions as contributions
    from ope_gym.analysis.distribution import Distribution as Distribution
    from ope_gym.analysis.distribution import distribution as distribution
    from ope_gym.analysis.duel import Duel as Duel
    from ope_gym.analysis.duel import duel as duel
    from ope_gym.analysis.leave_one_out import Calibration as Calibration
    from ope_gym.analysis.leave_one_out import leave_one_policy_out as leave_one_policy_out
    from ope_gym.analysis.planning import episodes_needed as episodes_needed
    from ope_gym.analysis.ranking import rank as rank
    from ope_gym.analysis.ranking_table import Ranking as Ranking
    from ope_gym.data import minari as minari
    from ope_gym.data import tables as tables
    from ope_gym.data.buffer import TrajectoryBuffer as TrajectoryBuffer
    from ope_gym.data.schedules import Schedule as Schedule
    from ope_gym.data.trajectories import Trajectories as Trajectories
    from ope_gym.estimators.table import ESTIMATORS as ESTIMATORS
    from ope_gym.evaluation import Evaluator as Evaluator
    from ope_gym.evaluation import evaluate as evaluate
    from ope_gym.inference.estimate import Difference as Difference
    from ope_gym.inference.estimate import Estimate as Estimate
    from ope_gym.inference.intervals import Betting as Betting
    from ope_gym.inference.intervals import Bootstrap as Bootstrap
    from ope_gym.inference.intervals import EssT as EssT
    from ope_gym.log_probs import evaluate_log_probs as evaluate_log_probs
    from ope_gym.online.free import FreeEstimate as FreeEstimate
    from ope_gym.online.free import FreeEvaluation as FreeEvaluation
    from ope_gym.options import Compute as Compute
    from ope_gym.options import Options as Options
    from ope_gym.options import Weighting as Weighting
    from ope_gym.report import tensorboard as tensorboard
    from ope_gym.results import Evaluation as Evaluation
else:
    # Loaded when they are first used, so that importing the package costs next to nothing.
    _HOMES = {
        "BehaviourFit": "ope_gym.analysis.behaviour",
        "Betting": "ope_gym.inference.intervals",
        "Bootstrap": "ope_gym.inference.intervals",
        "Calibration": "ope_gym.analysis.leave_one_out",
        "Compute": "ope_gym.options",
        "Difference": "ope_gym.inference.estimate",
        "Distribution": "ope_gym.analysis.distribution",
        "Duel": "ope_gym.analysis.duel",
        "ESTIMATORS": "ope_gym.estimators.table",
        "EssT": "ope_gym.inference.intervals",
        "Estimate": "ope_gym.inference.estimate",
        "Evaluation": "ope_gym.results",
        "Evaluator": "ope_gym.evaluation",
        "FreeEstimate": "ope_gym.online.free",
        "FreeEvaluation": "ope_gym.online.free",
        "Options": "ope_gym.options",
        "Ranking": "ope_gym.analysis.ranking_table",
        "Schedule": "ope_gym.data.schedules",
        "Trajectories": "ope_gym.data.trajectories",
        "TrajectoryBuffer": "ope_gym.data.buffer",
        "Weighting": "ope_gym.options",
        "contributions": "ope_gym.analysis.contributions",
        "distribution": "ope_gym.analysis.distribution",
        "duel": "ope_gym.analysis.duel",
        "episodes_needed": "ope_gym.analysis.planning",
        "evaluate": "ope_gym.evaluation",
        "evaluate_log_probs": "ope_gym.log_probs",
        "fit_behaviour": "ope_gym.analysis.behaviour",
        "leave_one_policy_out": "ope_gym.analysis.leave_one_out",
        "rank": "ope_gym.analysis.ranking",
    }
    _MODULES = {
        "models": "ope_gym.models",
        "minari": "ope_gym.data.minari",
        "overlap": "ope_gym.analysis.overlap",
        "policies": "ope_gym.policies",
        "tables": "ope_gym.data.tables",
        "tensorboard": "ope_gym.report.tensorboard",
    }

    def __getattr__(name: str) -> object:
        """Load a public name or module when it is first used."""
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'ope_gym' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*globals(), *_HOMES, *_MODULES])


__all__ = [
    "ESTIMATORS",
    "BehaviourFit",
    "Betting",
    "Bootstrap",
    "Calibration",
    "Compute",
    "Difference",
    "Distribution",
    "Duel",
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
    "distribution",
    "duel",
    "episodes_needed",
    "evaluate",
    "evaluate_log_probs",
    "fit_behaviour",
    "leave_one_policy_out",
    "rank",
]
