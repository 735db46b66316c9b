"""Measure duels: false decisions under continuous peeking, and the fresh episodes they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.inference.rounds import fewest_episodes
from ope_gym.policies import LinearSigmoid
from studies.duel.claims import duel_claims
from studies.duel.simulation import (
    DIRECTION,
    KINDS,
    LEVEL,
    Problem,
    cartpole,
    differences,
    duels,
    oracle,
    small,
)
from studies.duel.tails import ASSUMPTIONS, CASES, free_duels, holds, shift
from studies.harness.errors import standard_errors
from studies.harness.markdown import number, table
from studies.harness.seeds import streams
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = (
    "CartPole, wide",
    "CartPole, close",
    "small MDP",
    "CartPole, equal values",
    "small MDP, equal values",
)
APART, NULL = NAMES[:3], NAMES[3:]
_POWER = (1.959964 + 1.281552) ** 2  # of a two-sided z test at 5 % that finds 90 %


_COLUMNS = ("fixed", "floor", "oracle")
_LEGEND = (
    "{runs} pools of episodes of each problem, {duels} duels with each, at most {limit} pairs of "
    "fresh episodes, with a look after every round. The columns give mean numbers of episodes:\n\n"
    "- fixed: in the pairs that a z test needs for 90 % power if it knows the variance and the "
    "difference;\n"
    "- floor: the least for a test that always ends with the better policy and is valid for all "
    "returns within the range, even if it is told which policy is better;\n"
    "- oracle: for the best bets of someone who is told that and knows all distributions;\n"
    "- pairs: for bets on pairs with common seeds;\n"
    "- duel: for a duel as users play it.\n\n"
    "Saved: by a duel, compared with pairs. Wrong and decided: pairs / duel. Episodes are cut off "
    "at the limit, which makes long duels look shorter. Whom a duel plays more often was chosen on "
    "problems of this kind, with other episodes."
)


@dataclass(frozen=True)
class Duels(Study):
    """Record in each run new episodes for every problem, and play many duels on fresh ones."""

    duels: int = 70  # of each problem in a run
    limit: int = 500  # pairs of episodes
    pool: int = 4000  # pairs of fresh episodes; more for policies of equal value

    def __post_init__(self) -> None:
        if min(self.duels, self.limit, self.pool) < 1:
            raise ValueError("duels, limit and pool are at least 1")

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return episodes and winners (problems, kinds, duels).

        And (problems,): difference, episodes of a fixed-size test, of the oracle, and the floor;
        episodes and winners without bounds (cases, assumptions, 2, duels), for equal means and for
        others.
        """
        episodes, winner = np.full((2, len(NAMES), len(KINDS), self.duels), math.nan)
        about = np.full((4, len(NAMES)), math.nan)
        *rngs, last = streams(seed, len(NAMES) + 1)
        for i, (name, rng) in enumerate(zip(NAMES, rngs, strict=True)):
            problem = self._problem(name, rng)
            apart = differences(problem)
            mean, span = float(apart.mean()), problem.horizon
            about[0, i] = mean
            if name not in NULL:
                fixed = 2 * _POWER * apart.var() / mean**2
                about[1:, i] = fixed, oracle(problem), fewest_episodes(mean, span, LEVEL)
            for j, found in enumerate(duels(problem, self.duels, self.limit, rng)):
                episodes[i, j], winner[i, j] = found.episodes, found.winner
        free = self._free(last)
        named = dict(zip(("mean", "fixed", "oracle", "floor"), about, strict=True))
        return {"episodes": episodes, "winner": winner, **named, **free}

    def _problem(self, name: str, rng: np.random.Generator) -> Problem:
        number = int(rng.integers(1000))
        if name == "CartPole, equal values":  # mirror images: the mirrored episode is as likely
            return cartpole(_linear(0.9, 0.3), _linear(0.9, -0.3), 5 * self.pool, rng)
        if name == "small MDP, equal values":
            return small(0.0, 15 * self.pool, rng, number)
        if name == "small MDP":
            return small(0.3, 2 * self.pool, rng, number)
        scale = 1.2 if name == "CartPole, wide" else 1.05
        return cartpole(_linear(scale), _linear(0.9), self.pool, rng)

    def _free(self, rng: np.random.Generator) -> dict[str, Any]:
        shape = (len(CASES), len(ASSUMPTIONS), 2, self.duels)
        episodes, winner = np.full((2, *shape), math.nan)
        for i in range(len(CASES)):
            for j, assumption in enumerate(ASSUMPTIONS):
                for k, apart in enumerate((0.0, shift(i))):
                    if assumption == "deviation" and not holds(i, assumption):
                        continue
                    found = free_duels(i, assumption, apart, self.duels, self.limit // 2, rng)
                    episodes[i, j, k], winner[i, j, k] = found.episodes, found.winner
        return {"free_episodes": episodes, "free_winner": winner}

    def summarise(self, runs: Runs) -> Summary:
        """Return means with standard errors over runs, by problem."""
        episodes, winner = runs["episodes"], runs["winner"]  # (R, problems, kinds, duels)
        right = np.sign(runs["mean"])[:, :, None, None]
        null = np.array([name in NULL for name in NAMES])[:, None, None]
        wrong = np.where(null, winner != 0, winner == -right).mean(axis=-1)  # (R, problems, kinds)
        means = episodes.mean(axis=-1)
        free = np.abs(runs["free_winner"][:, :, :, 0]).mean(axis=-1)  # (R, cases, assumptions)
        shifted = runs["free_winner"][:, :, :, 1]
        found: Summary = {
            "runs": len(episodes),
            "duels": episodes.shape[-1],
            "limit": self.limit,
            "names": NAMES,
            "episodes": means.mean(axis=0),
            "wrong": wrong.mean(axis=0),
            "wrong_error": standard_errors(wrong),
            "decided": (winner != 0).mean(axis=(0, -1)),
            "free_wrong": free.mean(axis=0),
            "free_error": standard_errors(free),
            "free_episodes": runs["free_episodes"][:, :, :, 1].mean(axis=(0, -1)),
            "free_decided": (shifted == 1).mean(axis=(0, -1)),
        }
        for name in ("fixed", "oracle", "floor"):
            found[name] = runs[name].mean(axis=0)
        compared = {
            "of a fixed-size test": runs["fixed"],
            "of pairs": means[..., 0],
        }
        for name, other in compared.items():
            log = np.log(means[..., 1] / other)  # (R, problems)
            found[f"over {name}"] = log.mean(axis=0)
            found[f"over {name} error"] = standard_errors(log)
        return found

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge validity and how many episodes a duel saves."""
        return duel_claims(summary, APART, NULL)

    def table(self, summary: Summary) -> str:
        """Tabulate episodes, savings and false decisions."""
        rows = []
        for i, name in enumerate(summary["names"]):
            known = "" if name in NULL else None
            rows.append(
                [
                    name,
                    *(number(summary[x][i]) if known is None else "" for x in _COLUMNS),
                    *(number(x) for x in summary["episodes"][i]),
                    f"{100 * (1 - math.exp(summary['over of pairs'][i])):.0f} %"
                    if known is None
                    else "",
                    " / ".join(f"{100 * x:.1f} %" for x in summary["wrong"][i]),
                    " / ".join(f"{100 * x:.0f} %" for x in summary["decided"][i]),
                ]
            )
        head = ["problem", *_COLUMNS, *KINDS, "saved", "wrong", "decided"]
        free = [
            [
                case,
                assumption if holds(i, assumption) else f"{assumption} (not so here)",
                f"{100 * summary['free_wrong'][i][j]:.1f} %",
                number(summary["free_episodes"][i][j]),
                f"{100 * summary['free_decided'][i][j]:.0f} %",
            ]
            for i, case in enumerate(CASES)
            for j, assumption in enumerate(ASSUMPTIONS)
            if assumption == "symmetric" or holds(i, assumption)
        ]
        return "\n".join(
            [
                _LEGEND.format(**summary),
                "",
                *table(head, rows),
                "",
                "Without bounds, on simulated returns, with at most "
                f"{summary['limit'] // 2} pairs. Wrong: the share of false decisions where the "
                "means are equal. Episodes and right: where they differ by half a standard "
                "deviation of a round (by 1 for t). “Not so here” means that the returns violate "
                "the assumption, so the 5 % are not guaranteed.",
                "",
                *table(["returns", "assumed", "wrong", "episodes", "right"], free),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the episodes of each problem."""
        from studies.harness.pictures import GREEN, PINK, legend_below, new_figure

        shown = [i for i, name in enumerate(summary["names"]) if name not in NULL]
        figure = new_figure(6.0, 3.8)
        axes = figure.add_subplot()
        episodes = np.array(summary["episodes"])[shown]
        for j, (colour, label) in enumerate(zip((PINK, GREEN), KINDS, strict=True)):
            places = np.arange(len(shown)) + 0.27 * (j - 0.5)
            axes.barh(places, episodes[:, j], 0.26, color=colour, label=label)
        floor = np.array(summary["floor"], dtype=np.float64)[shown]
        axes.plot(floor, np.arange(len(shown)), "k|", markersize=12, label="floor")
        axes.set_yticks(range(len(shown)), [summary["names"][i] for i in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("fresh episodes", fontsize=8)
        legend_below(axes, 4)
        return figure


def _linear(scale: float, bias: float = 0.0) -> LinearSigmoid:
    return LinearSigmoid(scale * DIRECTION, bias)
