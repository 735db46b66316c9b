"""List the cells of the study: problems, numbers of loggers and sizes, in groups.

    for cell in cells(seed=0):
        data, target, truth = cell.simulate(np.random.default_rng(0))

Processes, loggers and targets are drawn from the seed: estimators were designed on `DESIGN_SEED`,
and are reported on with `REPORT_SEED`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ope_gym import Trajectories
from ope_gym.policies import FinitePolicy
from studies.outside import families
from studies.outside.finite import Setup
from studies.outside.grids import gridworld, learned
from studies.outside.problems import (
    delayed,
    graph,
    hidden_chain,
    model_fail,
    model_win,
    on_policy,
    rare_reward,
    ring,
    saturated,
    small_mdp,
)

Fault: TypeAlias = Literal["", "wrong propensities", "missing action"]
Make: TypeAlias = Callable[[np.random.Generator, int], Setup]

DESIGN_SEED, REPORT_SEED = 0, 2


class Problem(NamedTuple):
    """A problem, its group, and the numbers of loggers and episodes it comes with."""

    group: str
    make: Make
    hidden: bool = False
    sizes: tuple[tuple[int, int], ...] = (
        (1, 50),
        (8, 50),
        (1, 200),
        (8, 200),
        (1, 1000),
        (8, 1000),
    )


_bandit = families.bandit
_SHORT = ((1, 50), (8, 50), (1, 200), (8, 200))
_ALARM = ((1, 200), (8, 200), (1, 1000), (8, 1000))
_FAULTY = {
    "small MDP, 10 steps": _ALARM,
    "small MDP, 30 steps": _ALARM,
    "gridworld, near, 25 steps": _ALARM,
}


def _graph(
    layers: int,
    slip: float,
    noise: Literal["", "normal"],
    sparse: bool,
    hidden: int = 0,
    crossing: bool = False,
) -> Problem:
    """Return a graph with states that are seen, or hidden ones."""
    make = partial(
        graph,
        layers=layers,
        slip=slip,
        noise=noise,
        sparse=sparse,
        hidden=hidden,
        crossing=crossing,
    )
    return Problem("hidden graph" if hidden else "graph", make, hidden > 0)


def problems(seed: int) -> dict[str, Problem]:
    """Return all problems by name."""
    found = {
        "graph 4, exact moves, dense": _graph(4, 0.0, "", False),
        "graph 4, slips, N(0, 1), sparse": _graph(4, 0.25, "normal", True),
        "graph 16, exact moves, N(0, 1), dense": _graph(16, 0.0, "normal", False),
        "graph 16, slips, dense": _graph(16, 0.25, "", False),
        "graph 16, slips, sparse": _graph(16, 0.25, "", True),
        "graph 16, crossing, slips, dense": _graph(16, 0.1, "", False, crossing=True),
        "hidden graph 4, crossing, exact moves": _graph(4, 0.0, "", False, 1, crossing=True),
        "hidden graph 4, slips, N(0, 1), one group": _graph(4, 0.25, "normal", False, 4),
        "hidden graph 16, slips, dense": _graph(16, 0.25, "", False, 1),
        "hidden graph 16, crossing, slips, dense": _graph(16, 0.1, "", False, 1, crossing=True),
        "hidden graph 16, exact moves, sparse, groups of 4": _graph(16, 0.0, "", True, 4),
        "ModelFail 2": Problem("ModelFail", partial(model_fail, loops=1), True),
        "ModelFail 8": Problem("ModelFail", partial(model_fail, loops=4), True),
        "ModelFail 20": Problem("ModelFail", partial(model_fail, loops=10), True),
        "ModelWin 20": Problem("ModelWin", partial(model_win, horizon=20)),
        "ModelWin 50": Problem("ModelWin", partial(model_win, horizon=50)),
        "action of 2 steps ago": Problem("memory", partial(delayed, lag=2, horizon=10), True),
        "action of 3 steps ago": Problem("memory", partial(delayed, lag=3, horizon=15), True),
        "action of 8 steps ago": Problem("memory", partial(delayed, lag=8, horizon=30), True),
        "hidden mood": Problem("memory", partial(hidden_chain, horizon=20), True),
    }
    for kind, horizon in (("near", 25), ("near", 100), ("far", 50), ("far", 100)):
        make = partial(gridworld, far=kind == "far", horizon=horizon)
        found[f"gridworld, {kind}, {horizon} steps"] = Problem("gridworld", make)
    for states, horizon, sizes in (
        (20, 200, _SHORT),
        (50, 200, _SHORT),
        (20, 1000, _SHORT),
        (50, 1000, _SHORT[:2]),
    ):
        make = partial(ring, states=states, horizon=horizon)
        found[f"ring of {states}, {horizon} steps"] = Problem("ring", make, sizes=sizes)
    for env in ("CliffWalking-v1", "FrozenLake8x8-v1", "Taxi-v4"):
        found[env] = Problem("learned tables", partial(learned, env=env))
    found |= {
        "t rewards": Problem("rewards", partial(on_policy, horizon=5, noise="t")),
        "Pareto rewards": Problem("rewards", partial(on_policy, horizon=5, noise="pareto")),
        "rare reward": Problem("rewards", rare_reward),
        "saturated": Problem("rewards", saturated, sizes=_SHORT),
    }
    for horizon in (10, 30):
        make = partial(small_mdp, horizon=horizon)
        found[f"small MDP, {horizon} steps"] = Problem("faults", make, sizes=_ALARM)
    for name, group, make in (
        ("20 contexts, 100 actions", "sparse tables", partial(_bandit, contexts=20, arms=100)),
        ("20 contexts, 10 actions", "sparse tables", partial(_bandit, contexts=20, arms=10)),
        ("1,000 arms", "sparse tables", partial(_bandit, contexts=1, arms=1000, greed=2.0)),
        ("exploring in 6 %", "sparse tables", partial(_bandit, contexts=10, arms=10, explore=0.06)),
        ("exploring in 20 %", "sparse tables", partial(_bandit, contexts=5, arms=20, explore=0.2)),
        ("six states, three seen", "aliased", partial(families.aliased, horizon=10, merged=3)),
        ("six states, four seen", "aliased", partial(families.aliased, horizon=20, merged=4)),
        ("queue", "queues", partial(families.queue, horizon=50)),
        ("queue, as numbers", "queues", partial(families.queue, horizon=30, numbers=True)),
        ("inventory", "queues", partial(families.inventory, horizon=20)),
        ("inventory, as numbers", "queues", partial(families.inventory, horizon=20, numbers=True)),
        ("5 steps, in 5 %", "bad logger", partial(families.bad_logger, horizon=5, rare=0.05)),
        ("3 steps, in 10 %", "bad logger", partial(families.bad_logger, horizon=3, rare=0.1)),
        ("one in 50 steps", "catastrophes", partial(families.catastrophe, chance=0.02)),
        ("lognormal, 1.5", "heavy tails", partial(families.heavy, noise="lognormal")),
        ("Pareto, 1.5", "heavy tails", partial(families.heavy, noise="pareto 1.5")),
    ):
        found[f"{group}: {name}"] = Problem(group, make, hidden=group == "aliased")
    return found


@dataclass(frozen=True)
class Cell:
    """A problem with a number of loggers and of episodes.

    Args:
        group: of the report.
        name: of the problem.
        hidden: whether the observation tells less than the state.
        n: episodes in all.
        loggers: number of behaviour policies.
        seed: of the process, the loggers and the target.
        fault: in what was recorded, to be found by an alarm.
        arrays: whether only arrays of log-probabilities are at hand, no policies.
    """

    group: str
    name: str
    hidden: bool
    n: int
    loggers: int
    seed: int = DESIGN_SEED
    fault: Fault = ""
    arrays: bool = False

    @property
    def setup(self) -> Setup:
        """Return the process with its policies; made once for each problem."""
        return _setup(self.name, self.loggers, self.seed, self.fault)

    def simulate(self, rng: np.random.Generator) -> tuple[Trajectories, FinitePolicy, float]:
        """Return episodes, the target, and its value."""
        setup = self.setup
        return setup.simulate(self.n, rng), setup.policy, setup.truth

    def __str__(self) -> str:
        loggers = "1 logger" if self.loggers == 1 else f"{self.loggers} loggers"
        fault = f", {self.fault}" if self.fault else ""
        return f"{self.name}, {loggers}, n = {self.n}{fault}{' (arrays)' if self.arrays else ''}"


def cells(seed: int = DESIGN_SEED) -> list[Cell]:
    """Return all cells without faults."""
    return [
        Cell(found.group, name, found.hidden, n, loggers, seed)
        for name, found in problems(seed).items()
        for loggers, n in found.sizes
        if found.group != "faults"
    ]


def fault_cells(seed: int = DESIGN_SEED) -> list[Cell]:
    """Return cells with a fault in what was recorded, and their twins without one."""
    known, made = problems(seed), []
    for name, sizes in _FAULTY.items():
        for loggers, n in sizes:
            whole = Cell("faults", name, known[name].hidden, n, loggers, seed)
            wrong = replace(whole, fault="wrong propensities")
            made += [whole, replace(whole, arrays=True), wrong, replace(wrong, arrays=True)]
            made.append(replace(whole, fault="missing action"))
    return made


@cache
def _setup(name: str, loggers: int, seed: int, fault: Fault) -> Setup:
    """Make a problem; the seed of its generator is that of the cell and the name."""
    key = zlib.crc32(name.encode())
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(key,)))
    made = problems(seed)[name].make(rng, loggers)
    if fault == "wrong propensities":
        return made.misrecorded()
    if fault == "missing action":
        return made.unsupported()
    return made
