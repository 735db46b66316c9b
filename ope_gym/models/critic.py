"""Critic: the values that a learner already has, as a baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Problem, QModel, of_chosen

Values: TypeAlias = Callable[..., Any]  # a function of numpy batches, or a torch module


@dataclass(frozen=True)
class Critic(QModel):
    """Use the critic of the learner; nothing is fitted.

        q(s, a) = q(observations, actions), or v(observations) for every action if only v is given

    With q, v is worked out from it and the target's actions, as for every Q model. With V alone,
    q(s, a) = V(s): its mean over the target's actions is V(s) again, so the residual is
    r - V(s) + gamma V(s'), the one-step error of the critic, and the estimate is as unbiased as
    with any other q.

    Cost: one forward pass over the steps, A or 16 of them with q.
    Use it where the loop has a critic of a policy near the target. Weaknesses: V does not tell
    actions apart, so the variance that comes from the choice of actions stays. A critic that was
    trained on these very episodes is not cross-fitted, and the estimate inherits its optimism. Most
    critics do not know how many steps are left.

    Args:
        q: callable on numpy batches (observations, actions) -> (n,); with `all_actions` it is
            given observations only and returns (n, A).
        v: callable on numpy observations -> (n,). Give q or v, not both. For a torch module the
            batches become tensors and no gradient is kept.
        all_actions: whether q gives the values of all actions at once, as a DQN network does.
    """

    q: Values | None = None
    v: Values | None = None
    all_actions: bool = False

    def __post_init__(self) -> None:
        if (self.q is None) == (self.v is None):
            raise ValueError("give either q or v: the values at a state follow from q")
        if self.all_actions and self.q is None:
            raise ValueError("all_actions=True is about q, but only v was given: give q")
        name, given = ("q", self.q) if self.q is not None else ("v", self.v)
        if not callable(given):
            raise TypeError(f"{name} is {given!r}: give a callable on batches, or a torch module")

    def fit(self, data: Trajectories, problem: Problem) -> CriticValues | AllActionValues:
        """Return the values of the critic itself."""
        return AllActionValues(self) if self.all_actions else CriticValues(self)


@dataclass(frozen=True)
class CriticValues(ActionValues):
    """The critic's q, or its v for every action."""

    critic: Critic

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        n = len(steps)
        if self.critic.q is not None:
            return _column("q", _ask(self.critic.q, observations, actions), (n,))
        assert self.critic.v is not None
        return _column("v", _ask(self.critic.v, observations), (n,))


@dataclass(frozen=True)
class AllActionValues(ActionValues):
    """The values of all actions at once."""

    critic: Critic

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return of_chosen(self.q_all(observations, steps), actions)

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return q (n, A) of every action."""
        assert self.critic.q is not None
        return _column("q", _ask(self.critic.q, observations), (len(steps), None))


def _ask(values: Values, *inputs: Tree) -> Any:
    """Call with numpy batches, or a torch module with tensors in the dtype of its parameters."""
    if not (hasattr(values, "parameters") and hasattr(values, "state_dict")):
        answer = values(*inputs)
        return answer.detach().cpu().numpy() if hasattr(answer, "detach") else answer
    import torch

    first = next((p for p in values.parameters() if p.is_floating_point()), torch.empty(0))

    def tensor(leaf: Any) -> Any:
        made = torch.as_tensor(np.array(leaf), device=first.device)
        return made.to(first.dtype) if made.is_floating_point() else made

    training = values.training  # type: ignore[attr-defined]
    values.eval()  # type: ignore[attr-defined]
    try:
        with torch.no_grad():
            answer = values(*(batches.map_leaves(tensor, batch) for batch in inputs))
    finally:
        values.train(training)  # type: ignore[attr-defined]
    return answer.cpu().numpy()


def _column(name: str, found: Any, shape: tuple[int | None, ...]) -> FloatArray:
    values = np.asarray(found, dtype=np.float64)
    if values.ndim == len(shape) + 1 and values.shape[-1] == 1:
        values = values[..., 0]
    wrong = len(values.shape) != len(shape) or any(
        wanted not in (None, given) for given, wanted in zip(values.shape, shape, strict=True)
    )
    if wrong:
        wanted = ", ".join("A" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} of the critic gave shape {values.shape}; expected ({wanted})")
    return values
