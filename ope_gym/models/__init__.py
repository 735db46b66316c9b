"""Q models for doubly robust estimators and the direct method.

TabularQ   finite observations: counts and backward induction
LinearQ    numbers: linear features, in closed form
DynamicsQ  numbers: a learned model of the environment, and the target played in it
NetworkQ   the rest: a small network (loads torch when it fits)
Critic     the values that the learner already has
"""

from ope_gym import batches
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Baseline, Problem, QModel, cross_fit
from ope_gym.models.critic import Critic
from ope_gym.models.dynamics import DynamicsQ
from ope_gym.models.features import Fourier, OneHot, Polynomial
from ope_gym.models.linear import LinearQ, widest_fit
from ope_gym.models.network import NetworkQ
from ope_gym.models.tabular import TabularQ
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

NAMED: dict[str, type[QModel]] = {
    "tabular": TabularQ,
    "linear": LinearQ,
    "dynamics": DynamicsQ,
    "network": NetworkQ,
}
_WIDEST = 64  # numbers in an observation


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
    if whole and isinstance(target, FinitePolicy) and sum(x[0].size for x in seen) <= _WIDEST:
        return TabularQ()
    return default_linear(data, target)


def default_linear(data: Trajectories, target: Policy) -> LinearQ | None:
    """Return a LinearQ for such episodes, or None if their numbers are too many, or no numbers."""
    seen, actions = batches.leaves(data.observations), batches.leaves(data.actions)
    finite = isinstance(target, FinitePolicy) and actions[0].ndim == 1
    plain = len(actions) == 1 and actions[0].dtype.kind in ("iub" if finite else "f")
    numbers = all(leaf.dtype.kind in "iubf" for leaf in seen)
    if numbers and plain and sum(leaf[0].size for leaf in seen) <= _WIDEST:
        return widest_fit(data, target)
    return None
