"""Table 2: the value of PoWER's last policy on CartPole from rollouts of the ten before it.

Two sources of data: fresh rollouts of the ten policies, and the very rollouts that PoWER learned
from, which the target fits too well (in-sample).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from agents import Power
from ope_gym import LinearSigmoid, Trajectories, evaluate
from studies.cartpole_simulation import HORIZON, mean_return, rollouts
from studies.claims_cartpole import PAPER, cartpole_claims
from studies.errors import amount, describe, standard_errors, streams
from studies.frame import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.claims import Claim

NAMES = ("BIS", "BCIS", "NBIS", "NBCIS", "FIS", "OUIS", "NFIS", "NFCIS", "NOUIS")
SOURCES = ("fresh", "in-sample")


@dataclass(frozen=True)
class CartPole(Study):
    """RMSE of the value of θ_10."""

    name: ClassVar[str] = "cartpole"
    title: ClassVar[str] = "cartpole: the last policy of PoWER from ten before it (table 2)"
    runs: ClassVar[int] = 400
    chunk: ClassVar[int] = 10

    env: Literal["CartPole-v1", "CartPole-v0"] = "CartPole-v1"
    iterations: int = 10
    rollouts: int = 30  # an iteration
    weighting: Literal["return", "reward-to-go"] = "return"
    cap: float = 10.0
    truth_rollouts: int = 10_000

    def __post_init__(self) -> None:
        if self.env not in HORIZON:
            raise ValueError(f"env={self.env!r} must be one of {', '.join(HORIZON)}")

    def run(self, seeds: Seeds) -> Runs:
        """Values (R, 2, E) and whether intervals cover; truths; returns of the ten policies."""
        found = [self._one(seed) for seed in seeds]
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _one(self, seed: np.random.SeedSequence) -> Runs:
        training, fresh, true = streams(seed, 3)
        policies, trained, target = self.train(training)
        horizon = HORIZON[self.env]
        truth, error = mean_return(target, self.truth_rollouts, horizon, true)
        again = [rollouts(p, self.rollouts, horizon, fresh, held_out=True) for p in policies]
        values, covered = np.empty((2, len(NAMES))), np.empty((2, len(NAMES)), dtype=np.bool_)
        for source, batches in enumerate((again, trained)):
            data = batches[0].merge(*batches[1:])
            estimates = evaluate(data, target, estimators=NAMES, cap=self.cap).values()
            values[source] = [e.value for e in estimates]
            covered[source] = [e.interval.low <= truth <= e.interval.high for e in estimates]
        return {
            "values": values,
            "covered": covered,
            "truth": np.array(truth),
            "truth_error": np.array(error),
            "learned": np.array([batch.returns().mean() for batch in trained]),
        }

    def train(
        self, rng: np.random.Generator
    ) -> tuple[list[LinearSigmoid], list[Trajectories], LinearSigmoid]:
        """The policies θ_0 … that PoWER played, what it learned from, and where it arrived."""
        agent = Power(4, weighting=self.weighting)
        policies, batches = [], []
        for _ in range(self.iterations):
            policies.append(agent.policy)
            batches.append(rollouts(agent.policy, self.rollouts, HORIZON[self.env], rng))
            agent.learn(batches[-1])
        return policies, batches, agent.policy

    def summarise(self, runs: Runs) -> Summary:
        """RMSE, bias, spread and comparisons of the estimators, by source."""
        truth, noise = runs["truth"], runs["truth_error"] ** 2
        errors = runs["values"] - truth[:, None, None]
        optimism = errors[:, 1] - errors[:, 0]
        return {
            "runs": len(truth),
            "env": self.env,
            "weighting": self.weighting,
            "names": NAMES,
            "truth": [truth.mean(), np.sqrt(noise.mean()), *np.percentile(truth, (5, 50, 95))],
            "truth_rollouts": self.truth_rollouts,
            "learned": [*runs["learned"].mean(axis=0), truth.mean()],
            "sources": {
                name: describe(errors[:, s], noise, runs["covered"][:, s])
                for s, name in enumerate(SOURCES)
            },
            "optimism": [optimism.mean(axis=0), standard_errors(optimism)],
            "optimism_median": np.median(optimism, axis=0),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Table 2 and section 3."""
        return cartpole_claims(summary)

    def table(self, summary: Summary) -> str:
        """Table 2 beside ours, and the RMSE by batches of runs."""
        mean, error, low, middle, high = summary["truth"]
        curve = ", ".join(f"{value:.0f}" for value in summary["learned"])
        lines = [
            f"{summary['env']}, {summary['runs']} runs; PoWER weights by the "
            f"{summary['weighting']}. The value of θ_10 is the mean of "
            f"{summary['truth_rollouts']:,} rollouts: {mean:.0f} on average, 5th, 50th and 95th "
            f"percentile {low:.0f}, {middle:.0f}, {high:.0f}, its standard error {amount(error)} "
            "(root mean square); this variance is subtracted from all mean squares. Mean returns "
            f"of θ_0 … θ_10: {curve}.",
            "",
            "RMSE: 5th, 50th and 95th percentile of a bootstrap over runs. RMSE² = bias² + "
            "deviation². Covered: how often the 95 % interval (ess-t) holds the truth.",
        ]
        for name, title in (("fresh", "Fresh rollouts"), ("in-sample", "PoWER’s own rollouts")):
            lines += ["", *_source_table(title, summary["names"], summary["sources"][name])]
        return "\n".join([*lines, "", *_batches(summary)])

    def picture(self, summary: Summary) -> Figure:
        """RMSE beside the paper's, bias, and RMSE by batches."""
        from studies.pictures_tables import cartpole_figure

        return cartpole_figure(summary)


def _source_table(title: str, names: Sequence[str], found: Summary) -> list[str]:
    lines = [
        f"| {title} | paper: 5th | 50th | 95th | ours: 5th | 50th | 95th | bias ± std. error "
        "| deviation | median of \\|error\\| | covered |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for i, name in enumerate(names):
        paper = [f"{value:.2f}" for value in PAPER[name]] if name in PAPER else [""] * 3
        ours = [amount(value) for value in found["rmse_percentiles"][i]]
        lines.append(
            f"| {name} | {' | '.join([*paper, *ours])} | {amount(found['bias'][i])} ± "
            f"{amount(found['bias_error'][i])} | {amount(found['deviation'][i])} | "
            f"{amount(found['median'][i])} | {found['coverage'][i]:.0%} |"
        )
    return lines


def _batches(summary: Summary) -> list[str]:
    """How steady an RMSE is."""
    names, sources = summary["names"], summary["sources"]
    shown = [(s, names.index(e)) for s in sources for e in ("BIS", "BCIS", "NBIS", "FIS", "NFIS")]
    bis, nfis = names.index("BIS"), names.index("NFIS")
    most = " and ".join(
        f"{found['largest_share'][bis]:.0%} ({source}; of NFIS {found['largest_share'][nfis]:.0%})"
        for source, found in sources.items()
    )
    lines = [
        f"BIS is heavy-tailed: RMSE by batches of {sources['fresh']['batch_size']} runs. A single "
        f"run of {summary['runs']} makes {most} of the sum of its squares.",
        "",
        "| batch | " + " | ".join(f"{names[i]}, {source}" for source, i in shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for batch in range(len(sources["fresh"]["batch_rmse"])):
        row = [amount(sources[source]["batch_rmse"][batch][i]) for source, i in shown]
        lines.append(f"| {batch + 1} | " + " | ".join(row) + " |")
    return lines
