"""Q models for doubly robust estimators and the direct method.

TabularQ   finite observations: counts and backward induction
LinearQ    numbers: linear features, in closed form
DynamicsQ  numbers: a learned model of the environment, and the target played in it
NetworkQ   the rest: a small network (loads torch when it fits)
Critic     the values that the learner already has
"""

from ope_gym import batches
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Baseline, Problem, QModel
from ope_gym.models.critic import Critic
from ope_gym.models.dynamics_q import DynamicsQ
from ope_gym.models.features import Fourier, OneHot, Polynomial
from ope_gym.models.folds import cross_fit
from ope_gym.models.linear import MOST_NUMBERS, LinearQ, default_linear
from ope_gym.models.network import NetworkQ
from ope_gym.models.tabular import TabularQ
from ope_gym.options import Q_MODELS
from ope_gym.policies import FinitePolicy, Policy

__all__ = [
    "NAMED",
    "ActionValues",
    "Baseline",
    "Critic",
    "DynamicsQ",
    "Fourier",
    "LinearQ",
    "NetworkQ",
    "OneHot",
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


def default_model(data: Trajectories, target: Policy) -> QModel | None:
    """Return TabularQ for whole numbers, LinearQ for small arrays of numbers, else None.

    Images, texts and the like need a model of their own, and so do actions with several parts that
    are not plain numbers.
    """
    seen = batches.leaves(data.observations)
    whole = all(leaf.dtype.kind in "iub" for leaf in seen)
    if whole and isinstance(target, FinitePolicy) and sum(x[0].size for x in seen) <= MOST_NUMBERS:
        return TabularQ()
    return default_linear(data, target)
