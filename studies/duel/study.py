"""Measure duels: false decisions under continuous peeking, and the fresh episodes they need."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from studies.duel.claims import duel_claims
from studies.duel.simulation import Problem, cartpole, differences, duels, small
from studies.harness.errors import standard_errors
from studies.harness.markdown import number, table
from studies.harness.seeds import streams
from studies.harness.small_grid import Loggers
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = (
    "CartPole, wide",
    "CartPole, close",
    "small MDP, near loggers",
    "CartPole, far loggers",
    "small MDP, far loggers",
    "CartPole, equal",
    "small MDP, equal",
    "small MDP, misleading data",
)
NULL = ("CartPole, equal", "small MDP, equal")
HEALTHY = (*NAMES[:3], "small MDP, far loggers")  # effective sample sizes from 70 on
POOR = ("CartPole, far loggers",)  # effective sample sizes up to 10
MISLED = ("small MDP, misleading data",)  # healthy weights, but rewards of another problem
_NEAR = (0.5, 0.7, 0.9, 1.1)
_FAR = (0.05, 0.1)
_POWER = (1.959964 + 1.281552) ** 2  # of a two-sided z test at 5 % that finds 90 %


@dataclass(frozen=True)
class Duels(Study):
    """Record in each run new episodes for every problem, and play many duels on fresh ones."""

    duels: int = 70  # of each problem in a run
    limit: int = 500  # rounds
    pool: int = 400  # fresh episodes of each policy

    def __post_init__(self) -> None:
        if min(self.duels, self.limit, self.pool) < 1:
            raise ValueError("duels, limit and pool are at least 1")

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return rounds and winners (problems, 2, duels), without and with recorded episodes.

        And (problems,): difference and deviation of a round in the pool.
        """
        rounds, winner = np.full((2, len(NAMES), 2, self.duels), math.nan)
        mean, deviation = np.full((2, len(NAMES)), math.nan)
        for i, (name, rng) in enumerate(zip(NAMES, streams(seed, len(NAMES)), strict=True)):
            problem = self._problem(name, rng)
            apart = differences(problem)
            mean[i], deviation[i] = apart.mean(), apart.std()
            for j, found in enumerate(duels(problem, self.duels, self.limit, rng).values()):
                rounds[i, j], winner[i, j] = found.rounds, found.winner
        return {"rounds": rounds, "winner": winner, "mean": mean, "deviation": deviation}

    def _problem(self, name: str, rng: np.random.Generator) -> Problem:
        number = int(rng.integers(1000))
        if name == "CartPole, equal":
            return equal(cartpole((1.0, 1.0), _NEAR, self.pool, rng))
        if name == "small MDP, equal":
            return equal(small("similar", 0.0, 4 * self.pool, rng, number))
        if name.startswith("small"):
            loggers: Loggers = "unrelated" if "far" in name else "similar"
            found = small(loggers, 0.3, 4 * self.pool, rng, number)
            return turned(found) if name in MISLED else found
        scales = (1.2, 0.9) if name == "CartPole, wide" else (1.05, 0.9)
        return cartpole(scales, _FAR if "far" in name else _NEAR, self.pool, rng)

    def summarise(self, runs: Runs) -> Summary:
        """Return means with standard errors over runs, by problem."""
        rounds, winner = runs["rounds"], runs["winner"]  # (R, problems, 2, duels)
        right = np.sign(runs["mean"])[:, :, None, None]
        null = np.array([name in NULL for name in NAMES])[:, None, None]
        wrong = np.where(null, winner != 0, winner == -right).mean(axis=-1)  # (R, problems, 2)
        means = rounds.mean(axis=-1)
        log = np.log(means[..., 1] / means[..., 0])  # (R, problems)
        with np.errstate(divide="ignore"):
            fixed = np.median(_POWER * (runs["deviation"] / runs["mean"]) ** 2, axis=0)
        return {
            "runs": len(rounds),
            "duels": rounds.shape[-1],
            "limit": self.limit,
            "names": NAMES,
            "rounds": means.mean(axis=0),
            "rounds_error": standard_errors(means),
            "log": log.mean(axis=0),
            "log_error": standard_errors(log),
            "wrong": wrong.mean(axis=0),
            "wrong_error": standard_errors(wrong),
            "decided": (winner != 0).mean(axis=(0, -1)),
            "fixed": fixed,
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge validity and what recorded episodes save."""
        return duel_claims(summary, HEALTHY, POOR, MISLED, NULL)

    def table(self, summary: Summary) -> str:
        """Tabulate rounds, savings and false decisions."""
        rows = []
        for i, name in enumerate(summary["names"]):
            without, using = summary["rounds"][i]
            saved, error = 1 - math.exp(summary["log"][i]), summary["log_error"][i]
            fixed = summary["fixed"][i]
            rows.append(
                [
                    name,
                    "" if name in NULL else number(fixed),
                    number(without),
                    number(using),
                    "" if name in NULL else f"{100 * saved:.0f} ± {100 * error:.0f} %",
                    " / ".join(f"{100 * x:.1f} %" for x in summary["wrong"][i]),
                    " / ".join(f"{100 * x:.0f} %" for x in summary["decided"][i]),
                ]
            )
        head = ["problem", "fixed size", "without data", "with data", "saved", "wrong", "decided"]
        return "\n".join(
            [
                f"{summary['runs']} recorded data sets of each problem, {summary['duels']} duels "
                f"with each, at most {summary['limit']} rounds of two fresh episodes, looked at "
                "after every round. Columns: rounds that a z test of known variance and "
                "difference, planned for 90 % power, would need (median over data sets); mean "
                "rounds of a duel without and with recorded episodes, and what these save; false "
                "decisions and decisions, without / with. Rounds are cut off at the limit, which "
                "makes long duels look shorter. The limit of the controls and the trust in "
                "recorded episodes were chosen on CartPole policies of this kind, on other "
                "episodes.",
                "",
                *table(head, rows),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the rounds of each problem."""
        from studies.harness.pictures import BLUE, GREEN, legend_below, new_figure

        shown = [i for i, name in enumerate(summary["names"]) if name not in NULL]
        figure = new_figure(6.0, 3.4)
        axes = figure.add_subplot()
        rounds = np.array(summary["rounds"])[shown]
        for j, (colour, label) in enumerate(((BLUE, "without data"), (GREEN, "with data"))):
            axes.barh(
                np.arange(len(shown)) + 0.2 * (2 * j - 1),
                rounds[:, j],
                0.38,
                color=colour,
                label=label,
            )
        axes.set_yticks(range(len(shown)), [summary["names"][i] for i in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("rounds of two fresh episodes", fontsize=8)
        legend_below(axes, 2)
        return figure


def turned(problem: Problem) -> Problem:
    """Return the problem with recorded rewards 1 - r: the better policy looks like the worse."""
    data = dataclasses.replace(problem.data, rewards=1.0 - problem.data.rewards)
    return dataclasses.replace(problem, data=data)


def equal(problem: Problem) -> Problem:
    """Return the problem with one pool for both policies, the rounds of b in another order."""
    a, _ = problem.pools
    other = a.select(episodes=np.roll(np.arange(len(a)), 1))
    return dataclasses.replace(problem, pools=(a, other))
