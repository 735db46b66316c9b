"""The public names of the package and where they live: the one list, which __init__.py reads."""

from ope_gym import models as models
from ope_gym import policies as policies
from ope_gym.analysis.behaviour import BehaviourFit as BehaviourFit
from ope_gym.analysis.behaviour import fit_behaviour as fit_behaviour
from ope_gym.analysis.contributions import contributions as contributions
from ope_gym.analysis.distribution import Distribution as Distribution
from ope_gym.analysis.distribution import distribution as distribution
from ope_gym.analysis.duel import Duel as Duel
from ope_gym.analysis.duel import duel as duel
from ope_gym.analysis.leave_one_out import Calibration as Calibration
from ope_gym.analysis.leave_one_out import leave_one_policy_out as leave_one_policy_out
from ope_gym.analysis.overlap import overlap as overlap
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

__version__: str
__all__: list[str]
