"""Past the paper: estimators with a q model against NFIS, the best of the paper.

On the CartPole and Blackjack data of tables 2 and 3 (fresh rollouts), and over a grid of small MDPs
with an exact, a fitted and a wrong q. Everything is paired: all estimators see the same data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from agents.blackjack import value
from ope_gym import Policy, Trajectories, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.models.base import ActionValues, Baseline, QModel
from studies.beyond.claims import beyond_claims
from studies.blackjack.simulation import rollouts as games
from studies.blackjack.study import SCHEDULES, Blackjack
from studies.cartpole.simulation import HORIZON, mean_return, rollouts
from studies.cartpole.study import CartPole
from studies.harness.errors import largest_share, resample
from studies.harness.seeds import streams
from studies.harness.small_grid import Regime, grid, states_of, table
from studies.harness.study import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

ASKED = ("NFIS", "auto", "FWDR", "WDR", "FDR", "DR", "DM", "MAGIC", "FISCV", "FIS")
UNSHRUNK = "auto, k = 1"  # as it would be if all of the correction were believed
GRID_Q = ("exact q", "fitted q", "shifted q", "wrong q")
NAMES = (*ASKED[:2], UNSHRUNK, *ASKED[2:])
GRID_SEED = 1  # other MDPs than the ones that auto was designed on
_CARTPOLE: tuple[
    tuple[Literal["CartPole-v1", "CartPole-v0"], Literal["return", "reward-to-go"]], ...
]
_CARTPOLE = (
    ("CartPole-v1", "return"),
    ("CartPole-v1", "reward-to-go"),
    ("CartPole-v0", "return"),
    ("CartPole-v0", "reward-to-go"),
)


class Case(NamedTuple):
    """One problem with one q model."""

    group: str
    setting: str
    q: str


def cases() -> list[Case]:
    """All of them, in the order of the results."""
    made = [Case("CartPole", f"{env}, {weighting}", "linear q") for env, weighting in _CARTPOLE]
    made += [
        Case("CartPole", "CartPole-v1, return", "dynamics q"),
        Case("CartPole", "CartPole-v1, return", "wrong dynamics q"),
        Case("CartPole", "CartPole-v1, reward-to-go", "dynamics q"),
    ]
    made += [Case("Blackjack", f"Blackjack-v1, {schedule}", "tabular q") for schedule in SCHEDULES]
    return made + [Case("grid", regime.name, q) for regime in grid(GRID_SEED) for q in GRID_Q]


@dataclass(frozen=True)
class Mistaken:
    """A q model that learns from episodes whose two actions are taken for each other."""

    model: QModel

    def fit(
        self,
        data: Trajectories,
        target: Policy,
        *,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> ActionValues:
        """The values of a world in which left is right."""
        swapped = Trajectories.from_arrays(
            data.observations,
            1 - np.asarray(data.actions),
            data.rewards,
            data.log_probs,
            offsets=data.offsets,
            policies=data.policies,
            policy_ids=data.policy_ids,
            terminated=data.terminated,
            truncated=data.truncated,
            held_out=data.held_out,
            horizon=data.horizon,
        )
        return self.model.fit(swapped, target, gamma=gamma, horizon=horizon, rng=rng)


@dataclass(frozen=True)
class Beyond(Study):
    """RMSE relative to NFIS."""

    name: ClassVar[str] = "beyond"
    title: ClassVar[str] = "beyond: estimators with a q model against NFIS"
    runs: ClassVar[int] = 400
    chunk: ClassVar[int] = 10
    takes: ClassVar[str] = "an hour"

    truth_rollouts: int = 10_000
    every: int = 10  # runs for one that has all cases: those but CartPole with a linear q are dear

    def __post_init__(self) -> None:
        if self.truth_rollouts < 2 or self.every < 1:
            raise ValueError(
                f"truth_rollouts={self.truth_rollouts}, every={self.every}: give at least 2 and 1"
            )

    def run(self, seeds: Seeds) -> Runs:
        """Values (R, cases, E), truths, variances of the truths and c of auto (R, cases).

        NaN where a case is left out of a run.
        """
        found = [list(self._one(seed)) for seed in seeds]
        keys = ("values", "truth", "noise", "c")
        return {
            key: np.array([[one[i] for one in run] for run in found]) for i, key in enumerate(keys)
        }

    def _one(
        self, seed: np.random.SeedSequence
    ) -> Iterator[tuple[FloatArray, float, float, float]]:
        from ope_gym.models import DynamicsQ, LinearQ

        cartpole, blackjack, small = streams(seed, 3)
        kept = []
        for env, weighting in _CARTPOLE:
            kept.append(self._recorded(env, weighting, cartpole))
            yield _found(*kept[-1], LinearQ())
        if seed.spawn_key[-1] % self.every:
            nothing = np.full(len(NAMES), math.nan), math.nan, math.nan, math.nan
            yield from [nothing] * (len(cases()) - len(_CARTPOLE))
            return
        for which, model in ((0, DynamicsQ()), (0, Mistaken(DynamicsQ())), (1, DynamicsQ())):
            yield _found(*kept[which], model)
        yield from self._blackjack(blackjack)
        for regime in grid(GRID_SEED):
            data, target, truth = regime.simulate(small)
            for q in GRID_Q:
                yield _found(data, target, truth, 0.0, _grid_q(q, regime, data))

    def _recorded(
        self,
        env: Literal["CartPole-v1", "CartPole-v0"],
        weighting: Literal["return", "reward-to-go"],
        rng: np.random.Generator,
    ) -> tuple[Trajectories, Policy, float, float]:
        """Fresh rollouts of PoWER's policies, its last one, the value and its variance."""
        study = CartPole(env=env, weighting=weighting)
        policies, _, target = study.train(rng)
        horizon = HORIZON[env]
        batches = [rollouts(p, study.rollouts, horizon, rng, held_out=True) for p in policies]
        truth, error = mean_return(target, self.truth_rollouts, horizon, rng)
        return batches[0].merge(*batches[1:]), target, truth, error**2

    def _blackjack(
        self, rng: np.random.Generator
    ) -> Iterator[tuple[FloatArray, float, float, float]]:
        from ope_gym.models import TabularQ

        study = Blackjack()
        for schedule in range(len(SCHEDULES)):
            policies = study.train(schedule, rng)
            target = policies[-1]
            data = games(policies, study.rollouts, rng)
            yield _found(data, target, value(target), 0.0, TabularQ())

    def summarise(self, runs: Runs) -> Summary:
        """RMSE of NFIS and ratios to it with paired 95 % intervals, by case and estimator."""
        errors = runs["values"] - runs["truth"][..., None]
        squares = errors**2 - runs["noise"][..., None]
        done = np.isfinite(runs["truth"])  # (R, cases)
        counts = done.sum(axis=0)
        again = np.stack(
            [resample(int(some.sum())) @ squares[some, i] for i, some in enumerate(done.T)], axis=1
        )  # (B, cases, E)
        mse = np.nanmean(squares, axis=0)
        base = NAMES.index("NFIS")
        with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # few runs: noise may exceed all errors
            logs = 0.5 * (np.log(again) - np.log(again[..., base : base + 1]))
            ratio = np.sqrt(mse / mse[:, base : base + 1])
            low, high = np.exp(np.nanpercentile(logs, (2.5, 97.5), axis=0))
        auto = NAMES.index("auto")
        listed = cases()
        linear = [i for i, case in enumerate(listed) if case.q == "linear q"]
        mean = logs[:, linear, auto].mean(axis=1)
        return {
            "runs": counts,
            "names": NAMES,
            "cases": [list(case) for case in listed],
            "rmse": np.sqrt(np.maximum(mse, 0.0)),
            "ratio": ratio,
            "low": low,
            "high": high,
            "log_error": np.where(counts[:, None] > 1, logs.std(axis=0), math.nan),
            "bias": np.nanmean(errors, axis=0),
            "largest_share": [
                largest_share(errors[some, i][:, [base, auto]]).max()
                for i, some in enumerate(done.T)
            ],
            "c": np.nanpercentile(runs["c"], (5, 50, 95), axis=0).T,
            "geometric": [
                float(np.exp(np.log(ratio[linear, auto]).mean())),
                float(mean.std()) if len(errors) > 1 else math.nan,
            ],
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """What the recommendation promises."""
        return beyond_claims(summary)

    def table(self, summary: Summary) -> str:
        """The paper's data case by case, the grid in short and its worst cases."""
        return _table(summary)

    def picture(self, summary: Summary) -> Figure:
        """Ratios with intervals."""
        from studies.beyond.picture import beyond_figure

        return beyond_figure(summary)


def _found(
    data: Trajectories, target: Policy, truth: float, noise: float, q_model: Baseline | QModel
) -> tuple[FloatArray, float, float, float]:
    """Values (E,), the truth, its variance, and c of auto."""
    found = evaluate(data, target, estimators=ASKED, q_model=q_model)
    values = {name: found[name].value for name in ASKED}
    values[UNSHRUNK] = values["auto"] + found["auto"].report["left out"]
    return np.array([values[name] for name in NAMES]), truth, noise, found["auto"].report["c"]


def _grid_q(kind: str, regime: Regime, data: Trajectories) -> Baseline | QModel:
    """The exact q; a linear fit, which is a right model here; the exact q of other states.

    Or the exact q shifted by a tenth of the value: of the right shape, at a wrong level.
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


def _table(summary: Summary) -> str:
    names, ratio = summary["names"], np.array(summary["ratio"])
    low, high = np.array(summary["low"]), np.array(summary["high"])
    shown = [name for name in names if name != "NFIS"]
    lines = [
        "RMSE relative to NFIS on the same data, with paired 95 % intervals (bootstrap over runs); "
        "below 1 is better. c: 5th, 50th and 95th percentile of the share of the q model's "
        "correction that auto takes.",
        "",
        "| data | q model | runs | RMSE of NFIS | " + " | ".join(shown) + " | c |",
        "|---|---|---|---|" + "---|" * (len(shown) + 1),
    ]
    base = names.index("NFIS")
    rows = [i for i, (group, *_) in enumerate(summary["cases"]) if group != "grid"]
    for i in rows:
        _, setting, q = summary["cases"][i]
        cells = [
            f"{ratio[i, e]:.2f} [{low[i, e]:.2f}, {high[i, e]:.2f}]"
            for e, name in enumerate(names)
            if name != "NFIS"
        ]
        c = ", ".join(f"{part:.2f}" for part in summary["c"][i])
        lines.append(
            f"| {setting} | {q} | {summary['runs'][i]} | {summary['rmse'][i][base]:.3g} | "
            f"{' | '.join(cells)} | {c} |"
        )
    mean, error = summary["geometric"]
    lines += [
        "",
        f"Geometric mean of auto with a linear q over the four CartPole settings: {mean:.3f} "
        f"(standard error of its logarithm {error:.3f}).",
        "",
        f"The grid of small MDPs, {summary['runs'][-1]} runs: geometric mean and largest ratio to "
        "NFIS over its regimes.",
        "",
        "| q model | " + " | ".join(shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for q in GRID_Q:
        inside = [
            i for i, case in enumerate(summary["cases"]) if case[0] == "grid" and case[2] == q
        ]
        cells = [
            f"{np.exp(np.log(ratio[inside, e]).mean()):.2f}, {ratio[inside, e].max():.2f}"
            for e, name in enumerate(names)
            if name != "NFIS"
        ]
        lines.append(f"| {q} | {' | '.join(cells)} |")
    auto = names.index("auto")
    inside = [i for i, case in enumerate(summary["cases"]) if case[0] == "grid"]
    worst = sorted(inside, key=lambda i: -ratio[i, auto])[:8]
    lines += ["", "| the worst of the grid for auto | q model | ratio |", "|---|---|---|"]
    for i in worst:
        _, setting, q = summary["cases"][i]
        lines.append(
            f"| {setting} | {q} | {ratio[i, auto]:.2f} [{low[i, auto]:.2f}, {high[i, auto]:.2f}] |"
        )
    return "\n".join(lines)
