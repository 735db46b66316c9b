"""Reproduce table 2: evaluate PoWER's last policy on CartPole from rollouts of the ten before it.

Two sources of data: fresh rollouts of the ten policies, and the rollouts that PoWER learned from
(in-sample). Two targets: the last policy of this PoWER, which fits its own rollouts too well, and
the last policy of another PoWER, which is independent of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agents import Power
from ope_gym import Trajectories, Weighting, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.policies import LinearSigmoid
from studies.cartpole.claims import PAPER, cartpole_claims
from studies.cartpole.simulation import HORIZON, mean_return, rollouts
from studies.harness.errors import describe, largest_share, mean_and_error
from studies.harness.markdown import PERCENTILES, amount, table
from studies.harness.seeds import streams
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("BIS", "BCIS", "NBIS", "NBCIS", "FIS", "OUIS", "NFIS", "NFCIS", "NOUIS")
SOURCES = ("fresh", "in-sample")


@dataclass(frozen=True)
class CartPole(Study):
    """Compare estimators of the value of θ_10 by their RMSE."""

    env: Literal["CartPole-v1", "CartPole-v0"] = "CartPole-v1"
    iterations: int = 10
    rollouts: int = 30  # in each iteration
    weighting: Literal["return", "reward-to-go"] = "return"
    exploration: Literal["action", "parameters"] = "action"
    cap: float = 10.0
    truth_rollouts: int = 10_000

    def __post_init__(self) -> None:
        if self.env not in HORIZON:
            raise ValueError(f"env={self.env!r} must be one of {', '.join(HORIZON)}")
        if self.iterations < 1 or self.rollouts < 1 or self.truth_rollouts < 2 or self.cap <= 0:
            raise ValueError(
                f"iterations={self.iterations}, rollouts={self.rollouts}, cap={self.cap}, "
                f"truth_rollouts={self.truth_rollouts}: give at least 1, 1, more than 0, and 2"
            )
        self.learner(0)  # raises if weighting and exploration cannot be combined

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return values (targets, sources, E), coverage (sources, E), the true value and more."""
        training, fresh, true, elsewhere = streams(seed, 4)
        policies, trained, target = self.train(training)
        other = self.train(elsewhere)[-1]
        sources = [self.fresh(policies, fresh), trained[0].merge(*trained[1:])]
        truth, error = mean_return(target, self.truth_rollouts, HORIZON[self.env], true)
        values = np.empty((2, 2, len(NAMES)))
        covered = np.empty((2, len(NAMES)), dtype=np.bool_)
        by_behaviour = np.empty(self.iterations)
        for t, policy in enumerate((target, other)):
            for s, data in enumerate(sources):
                found = evaluate(data, policy, NAMES, weighting=Weighting(self.cap))
                values[t, s] = [e.value for e in found.values()]
                if t == 0:
                    ends = [e.interval for e in found.values()]
                    covered[s] = [end.low <= truth <= end.high for end in ends]
                if t == s == 0:  # BIS on the episodes of each policy alone
                    by_behaviour = found["BIS"].influence.reshape(self.iterations, -1).mean(axis=1)
        return {
            "values": values,
            "covered": covered,
            "truth": truth,
            "truth_error": error,
            "learned": np.array([batch.returns().mean() for batch in trained]),
            "bis": by_behaviour - truth,
        }

    def learner(self, seed: int) -> Power:
        """Return PoWER at θ_0 = 0; the seed is used to perturb parameters."""
        return Power(4, weighting=self.weighting, exploration=self.exploration, seed=seed)

    def train(
        self, rng: np.random.Generator
    ) -> tuple[list[LinearSigmoid], list[Trajectories], LinearSigmoid]:
        """Return the policies that PoWER played, the batches it learned from, and its last policy.

        When parameters explore, each rollout of a batch has its own policy, a perturbed θ_k.
        """
        horizon, batches = HORIZON[self.env], []
        played: list[LinearSigmoid] = []
        agent = self.learner(int(rng.integers(2**63)))
        for _ in range(self.iterations):
            acting = [agent.policy]
            if self.exploration == "parameters":
                acting = [agent.perturbed() for _ in range(self.rollouts)]
            each = self.rollouts // len(acting)
            first, *rest = [rollouts(policy, each, horizon, rng) for policy in acting]
            batches.append(first.merge(*rest))
            agent.learn(batches[-1])
            played += acting
        return played, batches, LinearSigmoid(agent.theta)

    def fresh(self, policies: Sequence[LinearSigmoid], rng: np.random.Generator) -> Trajectories:
        """Return fresh rollouts of the policies, as many in all as PoWER had."""
        each = self.rollouts * self.iterations // len(policies)
        first, *more = [
            rollouts(policy, each, HORIZON[self.env], rng, held_out=True) for policy in policies
        ]
        return first.merge(*more)

    def summarise(self, runs: Runs) -> Summary:
        """Return RMSE, bias, spread and comparisons of the estimators by source and target."""
        truth, noise = runs["truth"], runs["truth_error"] ** 2
        errors = runs["values"][:, 0] - truth[:, None, None]
        own, other = (runs["values"][:, t, 1] - runs["values"][:, t, 0] for t in (0, 1))
        return {
            "runs": len(truth),
            "env": self.env,
            "weighting": self.weighting,
            "exploration": self.exploration,
            "names": NAMES,
            "truth": [truth.mean(), np.sqrt(noise.mean()), *np.percentile(truth, (5, 50, 95))],
            "truth_rollouts": self.truth_rollouts,
            "learned": [*runs["learned"].mean(axis=0), truth.mean()],
            "sources": {
                name: describe(errors[:, s], noise, runs["covered"][:, s])
                for s, name in enumerate(SOURCES)
            },
            "bis_by_behaviour": mean_and_error(runs["bis"]),
            "optimism": _gap(own),
            "independent": _gap(other),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge table 2 and section 3."""
        return cartpole_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate table 2 beside our results, and the RMSE by batches of runs."""
        mean, error, low, middle, high = summary["truth"]
        curve = ", ".join(f"{value:.0f}" for value in summary["learned"])
        lines = [
            f"{summary['env']}, {summary['runs']} runs; PoWER weights by the "
            f"{summary['weighting']} and explores by the {summary['exploration']}. The value of "
            f"θ_10 is the mean of {summary['truth_rollouts']:,} rollouts: {mean:.0f} on average, "
            "5th, 50th and 95th "
            f"percentile {low:.0f}, {middle:.0f}, {high:.0f}, its standard error {amount(error)} "
            "(root mean square); this variance is subtracted from all mean squares. Mean returns "
            f"of θ_0 … θ_10: {curve}.",
            "",
            "RMSE: 5th, 50th and 95th percentile of a bootstrap over runs. RMSE² = bias² + "
            "deviation². Largest run: its share of the sum of squares. Covered: how often the 95 % "
            "interval (ess-t) contains the true value.",
        ]
        for name, title in (("fresh", "Fresh rollouts"), ("in-sample", "PoWER’s own rollouts")):
            lines += ["", *_source_table(title, summary["names"], summary["sources"][name])]
        return "\n".join([*lines, "", *_by_behaviour(summary), "", *_batches(summary)])

    def picture(self, summary: Summary) -> Figure:
        """Draw the RMSE beside the paper's, the bias, and the RMSE by batches."""
        from studies.cartpole.picture import cartpole_figure

        return cartpole_figure(summary)


def _source_table(title: str, names: Sequence[str], found: Summary) -> list[str]:
    """Tabulate the paper's RMSEs beside ours from one source of data."""
    head = [title, *PERCENTILES, "bias ± std. error", "deviation", "median of \\|error\\|"]
    rows = []
    for i, name in enumerate(names):
        paper = [f"{value:.2f}" for value in PAPER[name]] if name in PAPER else [""] * 3
        ours = [amount(value) for value in found["rmse_percentiles"][i]]
        bias = f"{amount(found['bias'][i])} ± {amount(found['bias_error'][i])}"
        sizes = [amount(found[key][i]) for key in ("deviation", "median")]
        shares = [f"{found[key][i]:.0%}" for key in ("largest_share", "coverage")]
        rows.append([name, *paper, *ours, bias, *sizes, *shares])
    return table([*head, "largest run", "covered"], rows)


def _by_behaviour(summary: Summary) -> list[str]:
    """Tabulate the bias of BIS on each policy's fresh rollouts; in theory all are 0."""
    bias, error = summary["bis_by_behaviour"]
    cells = [f"{amount(b)} ± {amount(e)}" for b, e in zip(bias, error, strict=True)]
    return [
        "The bias that BIS shows on the fresh rollouts of each policy alone (its average is the "
        "bias above; in theory all are 0):",
        "",
        *table([f"θ_{k}" for k in range(len(bias))], [cells]),
    ]


def _batches(summary: Summary) -> list[str]:
    """Tabulate RMSEs by batches of runs, to show how steady they are."""
    names, sources = summary["names"], summary["sources"]
    shown = [(s, names.index(e)) for s in sources for e in ("BIS", "BCIS", "NBIS", "FIS", "NFIS")]
    rows = [
        [batch + 1, *(amount(sources[source]["batch_rmse"][batch][i]) for source, i in shown)]
        for batch in range(len(sources["fresh"]["batch_rmse"]))
    ]
    return [
        f"RMSE by batches of {sources['fresh']['batch_size']} runs: that of BIS depends on a few "
        "runs.",
        "",
        *table(["batch", *(f"{names[i]}, {source}" for source, i in shown)], rows),
    ]


def _gap(difference: FloatArray) -> Summary:
    """Describe differences in-sample − fresh (R, E), paired by run."""
    mean, error = mean_and_error(difference)
    return {
        "mean": mean,
        "error": error,
        "median": np.median(difference, axis=0),
        "largest_share": largest_share(difference),
    }
