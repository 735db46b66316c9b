"""Compare estimators with a q model to NFIS, the best estimator of the paper.

The data are those of tables 2 and 3 (fresh rollouts on CartPole and Blackjack), and a grid of small
MDPs with an exact, a fitted, a shifted and a wrong q. All estimators see the same data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.blackjack import value
from ope_gym import Trajectories, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.models.base import Baseline, QModel
from ope_gym.policies import Policy
from studies.beyond.cases import (
    CARTPOLE,
    GRID_Q,
    Env,
    Mistaken,
    PowerWeighting,
    cases,
    grid_q,
    regimes,
)
from studies.beyond.claims import beyond_claims
from studies.blackjack.simulation import rollouts
from studies.blackjack.study import SCHEDULES, Blackjack
from studies.cartpole.simulation import HORIZON, mean_return
from studies.cartpole.study import CartPole
from studies.harness.errors import largest_share, resample
from studies.harness.markdown import table
from studies.harness.seeds import streams
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

ASKED = ("NFIS", "auto", "FWDR", "WDR", "FDR", "DR", "DM", "MAGIC", "FIS")
UNSHRUNK = "auto, k = 1"  # auto if it used the whole correction of the q model
NAMES = (*ASKED[:2], UNSHRUNK, *ASKED[2:])


@dataclass(frozen=True)
class Beyond(Study):
    """Measure the RMSE relative to NFIS."""

    truth_rollouts: int = 10_000
    every: int = 10  # only every 10th run has all cases; the others CartPole with a linear q, fast

    def __post_init__(self) -> None:
        if self.truth_rollouts < 2 or self.every < 1:
            raise ValueError(
                f"truth_rollouts={self.truth_rollouts}, every={self.every}: give at least 2 and 1"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return values (cases, E), true values, their variances and c of auto (cases,).

        NaN where a case is left out of the run.
        """
        found = zip(*self._all_cases(seed), strict=True)
        return dict(zip(("values", "truth", "noise", "c"), map(np.array, found), strict=True))

    def _all_cases(
        self, seed: np.random.SeedSequence
    ) -> Iterator[tuple[FloatArray, float, float, float]]:
        """Yield the results of each case, see `_found`."""
        from ope_gym.models import DynamicsQ, LinearQ

        cartpole, blackjack, small = streams(seed, 3)
        kept = []
        for env, weighting in CARTPOLE:
            kept.append(self._recorded(env, weighting, cartpole))
            yield _found(*kept[-1], LinearQ())
        if seed.spawn_key[-1] % self.every:
            nothing = np.full(len(NAMES), math.nan), math.nan, math.nan, math.nan
            yield from [nothing] * (len(cases()) - len(CARTPOLE))
            return
        for which, model in ((0, DynamicsQ()), (0, Mistaken(DynamicsQ())), (1, DynamicsQ())):
            yield _found(*kept[which], model)
        yield from self._blackjack(blackjack)
        for regime in regimes():
            data, target, truth = regime.simulate(small)
            for q in GRID_Q:
                yield _found(data, target, truth, 0.0, grid_q(q, regime, data))

    def _recorded(
        self,
        env: Env,
        weighting: PowerWeighting,
        rng: np.random.Generator,
    ) -> tuple[Trajectories, Policy, float, float]:
        """Return fresh rollouts of PoWER's policies, its last policy, its value and variance."""
        study = CartPole(env=env, weighting=weighting)
        policies, _, target = study.train(rng)
        data = study.fresh(policies, rng)
        truth, error = mean_return(target, self.truth_rollouts, HORIZON[env], rng)
        return data, target, truth, error**2

    def _blackjack(
        self, rng: np.random.Generator
    ) -> Iterator[tuple[FloatArray, float, float, float]]:
        """Yield the results for both schedules of exploration."""
        from ope_gym.models import TabularQ

        study = Blackjack()
        for schedule in range(len(SCHEDULES)):
            policies = study.train(schedule, rng)
            target = policies[-1]
            data = rollouts(policies, study.rollouts, rng)
            yield _found(data, target, value(target), 0.0, TabularQ())

    def summarise(self, runs: Runs) -> Summary:
        """Return RMSEs, and ratios to that of NFIS with paired 95 % intervals, (cases, E)."""
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
            # with few runs the noise of the truth may exceed all errors
            warnings.simplefilter("ignore", RuntimeWarning)
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
        """Judge whether auto is as good as recommended."""
        return beyond_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate the paper's data case by case, the grid in short, and its worst cases."""
        return _table(summary)

    def picture(self, summary: Summary) -> Figure:
        """Draw the ratios with their intervals."""
        from studies.beyond.picture import beyond_figure

        return beyond_figure(summary)


def _found(
    data: Trajectories, target: Policy, truth: float, noise: float, q_model: Baseline | QModel
) -> tuple[FloatArray, float, float, float]:
    """Return the values (E,), the true value, its variance, and c of auto."""
    found = evaluate(data, target, estimators=ASKED, q_model=q_model)
    values = {name: found[name].value for name in ASKED}
    values[UNSHRUNK] = values["auto"] + found["auto"].report["left out"]
    return np.array([values[name] for name in NAMES]), truth, noise, found["auto"].report["c"]


def _table(summary: Summary) -> str:
    """Tabulate ratios of RMSE to that of NFIS."""
    names, listed, ratio = summary["names"], summary["cases"], np.array(summary["ratio"])
    low, high = np.array(summary["low"]), np.array(summary["high"])
    shown = [name for name in names if name != "NFIS"]
    columns = [names.index(name) for name in shown]
    base, auto = names.index("NFIS"), names.index("auto")

    def cell(i: int, e: int) -> str:
        return f"{ratio[i, e]:.2f} [{low[i, e]:.2f}, {high[i, e]:.2f}]"

    rows = []
    for i, (group, setting, q) in enumerate(listed):
        if group != "grid":
            c = ", ".join(f"{part:.2f}" for part in summary["c"][i])
            start = [setting, q, summary["runs"][i], f"{summary['rmse'][i][base]:.3g}"]
            rows.append([*start, *(cell(i, e) for e in columns), c])
    in_grid = []
    for q in GRID_Q:
        inside = [i for i, case in enumerate(listed) if case[0] == "grid" and case[2] == q]
        found = [ratio[inside, e] for e in columns]
        in_grid.append([q, *(f"{np.exp(np.log(r).mean()):.2f}, {r.max():.2f}" for r in found)])
    inside = [i for i, case in enumerate(listed) if case[0] == "grid"]
    worst = sorted(inside, key=lambda i: -ratio[i, auto])[:8]
    mean, error = summary["geometric"]
    return "\n".join(
        [
            "RMSE relative to NFIS on the same data, with paired 95 % intervals (bootstrap over "
            "runs); below 1 is better. c: 5th, 50th and 95th percentile of the share of the q "
            "model's correction that auto takes.",
            "",
            *table(["data", "q model", "runs", "RMSE of NFIS", *shown, "c"], rows),
            "",
            f"Geometric mean of auto with a linear q over the four CartPole settings: {mean:.3f} "
            f"(standard error of its logarithm {error:.3f}).",
            "",
            f"The grid of small MDPs, {summary['runs'][-1]} runs: geometric mean and largest ratio "
            "to NFIS over its regimes.",
            "",
            *table(["q model", *shown], in_grid),
            "",
            *table(
                ["the worst of the grid for auto", "q model", "ratio"],
                [(*listed[i][1:], cell(i, auto)) for i in worst],
            ),
        ]
    )
