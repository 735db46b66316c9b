"""List the data sets and q models of the study, and make its deliberately wrong q models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ope_gym import Trajectories
from ope_gym.models.base import ActionValues, Baseline, Problem, QModel
from studies.blackjack.study import SCHEDULES
from studies.harness.small_grid import Regime, grid, states_of, table

Env: TypeAlias = Literal["CartPole-v1", "CartPole-v0"]
PowerWeighting: TypeAlias = Literal["return", "reward-to-go"]

GRID_Q = ("exact q", "fitted q", "shifted q", "wrong q")
GRID_SEED = 1  # other MDPs than the ones that auto was designed on
CARTPOLE: tuple[tuple[Env, PowerWeighting], ...] = (
    ("CartPole-v1", "return"),
    ("CartPole-v1", "reward-to-go"),
    ("CartPole-v0", "return"),
    ("CartPole-v0", "reward-to-go"),
)


class Case(NamedTuple):
    """Data of one kind with one q model."""

    group: str
    setting: str
    q: str


def regimes() -> list[Regime]:
    """Return the regimes of the grid."""
    return grid(GRID_SEED)


def cases() -> list[Case]:
    """Return all cases in the order of the results."""
    made = [Case("CartPole", f"{env}, {weighting}", "linear q") for env, weighting in CARTPOLE]
    made += [
        Case("CartPole", "CartPole-v1, return", "dynamics q"),
        Case("CartPole", "CartPole-v1, return", "wrong dynamics q"),
        Case("CartPole", "CartPole-v1, reward-to-go", "dynamics q"),
    ]
    made += [Case("Blackjack", f"Blackjack-v1, {schedule}", "tabular q") for schedule in SCHEDULES]
    return made + [Case("grid", regime.name, q) for regime in regimes() for q in GRID_Q]


@dataclass(frozen=True)
class Mistaken(QModel):
    """A wrong q model: it learns from episodes in which the two actions are swapped."""

    model: QModel

    def fit(self, data: Trajectories, problem: Problem) -> ActionValues:
        """Fit the model to the episodes with swapped actions."""
        swapped = replace(data, actions=1 - np.asarray(data.actions))
        return self.model.fit(swapped, problem)


def grid_q(kind: str, regime: Regime, data: Trajectories) -> Baseline | QModel:
    """Return one of the q models `GRID_Q` for a regime of the grid.

    A linear fit is a correct model here. The shifted q is the exact one plus a tenth of the value:
    the right shape at the wrong level. The wrong q is the exact one of other states.
    """
    from ope_gym.models import LinearQ

    if kind == "fitted q":
        return LinearQ()
    q = regime.exact_q(regime.target)
    v = np.sum(table(regime.target, regime.states) * q, axis=2)
    if kind == "shifted q":
        shift = 0.1 * regime.value(regime.target)
        q, v = q + shift, v + shift
    elif kind == "wrong q":
        order = np.roll(np.arange(regime.states), 1)
        q = 1.5 * q[:, order]
        v = np.sum(table(regime.target, regime.states) * q, axis=2)
    states = states_of(np.asarray(data.observations))
    actions = np.asarray(data.actions)
    return Baseline(q[data.steps, states, actions], v[data.steps, states])
