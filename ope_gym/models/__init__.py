"""Q models for doubly robust estimators and the direct method.

TabularQ   finite observations: counts and backward induction
LinearQ    numbers: linear features, in closed form
DynamicsQ  numbers: a learned model of the environment, and the target played in it
NetworkQ   the rest: a small network (loads torch when it fits)
Critic     the values that the learner already has
"""

from ope_gym.models.base import ActionValues, Baseline, Problem, QModel
from ope_gym.models.critic import Critic
from ope_gym.models.dynamics_q import DynamicsQ
from ope_gym.models.features import Polynomial
from ope_gym.models.folds import cross_fit
from ope_gym.models.linear import LinearQ, default_linear, default_model
from ope_gym.models.network import NetworkQ
from ope_gym.models.tabular import TabularQ
from ope_gym.options import Q_MODELS

__all__ = [
    "NAMED",
    "ActionValues",
    "Baseline",
    "Critic",
    "DynamicsQ",
    "LinearQ",
    "NetworkQ",
    "Polynomial",
    "Problem",
    "QModel",
    "TabularQ",
    "cross_fit",
    "default_linear",
    "default_model",
    "named_model",
]

NAMED: dict[str, type[QModel]] = dict(
    zip(Q_MODELS, (TabularQ, LinearQ, DynamicsQ, NetworkQ), strict=True)
)


def named_model(name: str) -> QModel:
    """Return the model of that name with its default settings."""
    if name not in NAMED:
        raise ValueError(
            f"q_model is {name!r}; give 'default', {', '.join(map(repr, NAMED))}, None, a model of "
            "ope_gym.models or a Baseline"
        )
    return NAMED[name]()
