"""Reproduce table 3: evaluate the last of ten policies of Monte-Carlo control on Blackjack.

The data are 100 fresh rollouts of each policy, including the target's own. The true value is exact,
by dynamic programming, and checked with rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agents import epsilon_1, epsilon_2
from agents.blackjack import SHAPE, value
from ope_gym import Weighting, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.policies import EpsilonGreedyTable
from studies.blackjack.claims import PAPER, blackjack_claims
from studies.blackjack.simulation import control, returns, rollouts
from studies.harness.errors import describe, mean_and_error
from studies.harness.markdown import PERCENTILES, number, table
from studies.harness.seeds import streams
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("BIS", "FIS", "OUIS", "NBIS", "NFIS", "NOUIS")
SCHEDULES = ("ε¹", "ε²")


@dataclass(frozen=True)
class Blackjack(Study):
    """Compare estimators of the value of the last policy by their MSE."""

    episodes: int = 5000  # to learn from
    every: int = 500  # episodes between snapshots
    rollouts: int = 100  # of each snapshot
    truth_rollouts: int = 10_000  # to check the exact value
    greedy_target: bool = False  # evaluate the last policy without its ε
    reward_model: Literal["deterministic", "cross-fit"] = "deterministic"  # of OUIS

    def __post_init__(self) -> None:
        if self.every < 1 or self.episodes % self.every:
            raise ValueError(
                f"episodes={self.episodes} must be a multiple of every={self.every}: the last "
                "snapshot is the target"
            )
        if self.rollouts < 1 or self.truth_rollouts < 2:
            raise ValueError(
                f"rollouts={self.rollouts}, truth_rollouts={self.truth_rollouts}: give at least 1 "
                "and 2"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return values, coverage and effective sample sizes (2, E), and true values (2,).

        The first axis is the schedule. `rolled` and `variance` are of rollouts of the target.
        """
        values, ess = np.empty((2, len(SCHEDULES), len(NAMES)))
        covered = np.empty(values.shape, dtype=np.bool_)
        truth, rolled, variance = np.empty((3, len(SCHEDULES)))
        generators = streams(seed, 3 * len(SCHEDULES))
        for s in range(len(SCHEDULES)):
            learning, fresh, true = generators[3 * s : 3 * s + 3]
            policies = self.train(s, learning)
            target = policies[-1]
            if self.greedy_target:
                target = EpsilonGreedyTable(target.greedy, 0.0, 2)
            data = rollouts(policies, self.rollouts, fresh)
            weighting = Weighting(reward_model=self.reward_model)
            found = list(evaluate(data, target, NAMES, weighting=weighting).values())
            truth[s] = exact = value(target)
            games = returns(target, self.truth_rollouts, true)
            rolled[s], variance[s] = games.mean(), games.var(ddof=1)
            values[s] = [e.value for e in found]
            ess[s] = [e.diagnostics.ess for e in found]
            covered[s] = [e.interval.low <= exact <= e.interval.high for e in found]
        return {
            "values": values,
            "covered": covered,
            "ess": ess,
            "truth": truth,
            "rolled": rolled,
            "variance": variance,
        }

    def train(self, schedule: int, rng: np.random.Generator) -> list[EpsilonGreedyTable]:
        """Return the snapshots of Monte-Carlo control."""
        epsilon = schedule_of(schedule, self.episodes)
        tables = control(played(schedule, self.episodes), self.every, rng).greedy
        return [
            EpsilonGreedyTable(table.reshape(SHAPE), epsilon((k + 1) * self.every + 1), 2)
            for k, table in enumerate(tables)
        ]

    def summarise(self, runs: Runs) -> Summary:
        """Return MSE, bias, spread and comparisons of the estimators, by schedule."""
        errors = runs["values"] - runs["truth"][..., None]  # (R, 2, E)
        check = runs["rolled"] - runs["truth"]
        gap = errors[..., NAMES.index("FIS")] ** 2 - errors[..., NAMES.index("OUIS")] ** 2  # (R, 2)
        games = self.rollouts * (self.episodes // self.every)
        return {
            "runs": len(errors),
            "names": NAMES,
            "games": games,
            "schedules": {
                name: describe(errors[:, s], np.zeros(len(errors)), runs["covered"][:, s])
                for s, name in enumerate(SCHEDULES)
            },
            "ess": runs["ess"].mean(axis=0),  # (2, E)
            "truth": [runs["truth"].mean(axis=0), runs["truth"].std(axis=0)],
            "variance": runs["variance"].mean(axis=0),  # of the target's return
            "plain": runs["variance"].mean(axis=0) / games,  # MSE of so many games of the target
            "check": mean_and_error(check),
            "truth_rollouts": self.truth_rollouts,
            "wider": mean_and_error(gap[:, 1] - gap[:, 0]),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge table 3 and section 3.4."""
        return blackjack_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate table 3 beside our results."""
        lines = [
            f"{summary['runs']} runs. MSE × 1000: 5th, 50th and 95th percentile of a bootstrap "
            "over runs. Covered: how often the 95 % interval (ess-t) contains the true value."
        ]
        for s, name in enumerate(summary["schedules"]):
            mean, spread = (part[s] for part in summary["truth"])
            gap, error = (part[s] for part in summary["check"])
            lines += [
                "",
                f"{name}: the target is worth {mean:.4f} on average (± {spread:.4f} between runs) "
                f"by dynamic programming; {summary['truth_rollouts']:,} rollouts of each differ "
                f"from it by {number(gap)} ± {number(error, 2)}. The variance of its return is "
                f"{summary['variance'][s]:.3f}: the mean of {summary['games']:,} games that it "
                f"played itself would have the MSE {1000 * summary['plain'][s]:.3f} / 1000.",
                "",
                *_schedule_table(
                    name, summary["names"], summary["schedules"][name], summary["ess"][s]
                ),
            ]
        return "\n".join(lines)

    def picture(self, summary: Summary) -> Figure:
        """Draw the MSE beside the paper's, and the paired differences."""
        from studies.blackjack.picture import blackjack_figure

        return blackjack_figure(summary)


def schedule_of(schedule: int, episodes: int) -> Callable[[int], float]:
    """Return schedule ε¹ (0) or ε² (1), a function of the number of the episode."""
    return epsilon_1 if schedule == 0 else partial(epsilon_2, n_iter=episodes)


@cache
def played(schedule: int, episodes: int) -> FloatArray:
    """Return ε of each episode, (episodes,)."""
    epsilon = schedule_of(schedule, episodes)
    return np.array([epsilon(t) for t in range(1, episodes + 1)])


def _schedule_table(
    title: str, names: Sequence[str], found: Summary, ess: Sequence[float]
) -> list[str]:
    """Tabulate the paper's MSEs beside ours for one schedule."""
    head = [title, *PERCENTILES, "bias × 1000 ± std. error", "deviation × 1000"]
    rows = []
    for i, name in enumerate(names):
        paper = [f"{1000 * part:.1f}" for part in PAPER[title][name]]
        ours = [f"{1000 * part:.3f}" for part in found["mse_percentiles"][i]]
        bias, error = (number(1000 * found[key][i], 2) for key in ("bias", "bias_error"))
        deviation, coverage = f"{1000 * found['deviation'][i]:.1f}", f"{found['coverage'][i]:.1%}"
        rows.append(
            [name, *paper, *ours, f"{bias} ± {error}", deviation, coverage, f"{ess[i]:.0f}"]
        )
    return table([*head, "covered", "mean ESS"], rows)
