"""Q models for doubly robust estimators and the direct method.

TabularQ   finite observations: counts and backward induction
LinearQ    numbers: linear features, in closed form
DynamicsQ  numbers: a learned model of the environment, and the target played in it
NetworkQ   the rest: a small network (loads torch when it fits)
Critic     the values that the learner already has
"""

from ope_gym.models.base import ActionValues, Baseline, QModel, cross_fit, default_model
from ope_gym.models.critic import Critic
from ope_gym.models.dynamics import DynamicsQ
from ope_gym.models.features import Fourier, OneHot, Polynomial
from ope_gym.models.linear import LinearQ
from ope_gym.models.network import NetworkQ
from ope_gym.models.tabular import TabularQ

__all__ = [
    "ActionValues",
    "Baseline",
    "Critic",
    "DynamicsQ",
    "Fourier",
    "LinearQ",
    "NetworkQ",
    "OneHot",
    "Polynomial",
    "QModel",
    "TabularQ",
    "cross_fit",
    "default_model",
]
