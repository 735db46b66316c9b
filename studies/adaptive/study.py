"""Study section 3.3: policies that depend on earlier rewards, and targets learned from the data.

Exact biases are sums over all histories, each evaluated by the library. The learned target is
simulated, with estimates from the data it was learned from and from data it never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.estimators.table import WEIGHTED
from studies import oracle
from studies.adaptive.claims import adaptive_claims
from studies.adaptive.exact import (
    EXACT,
    estimates,
    soft_stop_bias,
    stopped_estimates,
    two_round_bias,
)
from studies.harness.errors import mean_and_error
from studies.harness.markdown import number, table
from studies.harness.small_grid import softmax
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

LEARNED = (*WEIGHTED, "EA")
ROUNDS = (1, 2, 3, 4, 5)
_LONGEST = 60  # 2^-60 is below rounding


@dataclass(frozen=True)
class Adaptive(Study):
    """Simulate in each run one learned target and some sequences that stop at their first zero."""

    arms: int = 10
    draws: int = 30  # by each behaviour policy
    stopped: int = 100  # sequences in a run
    epsilon: float = 0.1  # exploration of the learned target

    def __post_init__(self) -> None:
        if self.arms < 2 or self.draws < 1 or self.stopped < 1 or not 0 < self.epsilon <= 1:
            raise ValueError(
                f"arms={self.arms}, draws={self.draws}, stopped={self.stopped}, "
                f"epsilon={self.epsilon}: give at least 2, 1, 1, and more than 0 up to 1"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return means of EA and BIS over stopped sequences (2,), and what `learned` returns."""
        rng = np.random.default_rng(seed)
        ones = rng.geometric(0.5, size=self.stopped) - 1  # before the first zero
        values = np.array([stopped_estimates(min(int(k), _LONGEST)) for k in ones])
        errors, covered, truth = self.learned(rng)
        return {
            "stopped": values.mean(axis=0),
            "errors": errors,
            "covered": covered,
            "value": truth,
        }

    def learned(self, rng: np.random.Generator) -> tuple[FloatArray, NDArray[np.bool_], float]:
        """Return estimate − value and whether the interval contains it, (2, E), and the value.

        The target is ε-greedy in the mean rewards of the training data. It is evaluated from them
        (in-sample), and from as many draws of the same behaviours that it did not see (held out).
        """
        means = np.linspace(0.3, 0.7, self.arms)
        policies = softmax(np.multiply.outer((0.0, 2.0, -2.0), means))
        errors = np.empty((2, len(LEARNED)))
        covered = np.empty((2, len(LEARNED)), dtype=bool)
        ids = np.repeat(np.arange(len(policies)), self.draws)
        target, truth = np.empty(0), np.nan
        edges = policies.cumsum(axis=1)[ids, :-1]
        for row, held_out in enumerate((False, True)):
            actions = (rng.random((ids.size, 1)) >= edges).sum(axis=1)
            rewards = (rng.random(ids.size) < means[actions]).astype(np.float64)
            if not held_out:
                drawn = np.bincount(actions, minlength=self.arms)
                mean = np.bincount(actions, rewards, minlength=self.arms) / np.maximum(drawn, 1)
                target = np.full(self.arms, self.epsilon / self.arms)
                target[mean.argmax()] += 1 - self.epsilon
                truth = float(target @ means)
            found = estimates(policies, ids, actions, rewards, target, LEARNED, held_out=held_out)
            for column, (value, low, high) in enumerate(found):
                errors[row, column] = value - truth
                covered[row, column] = low <= truth <= high
        return errors, covered, truth

    def summarise(self, runs: Runs) -> Summary:
        """Return exact biases, simulated biases with their standard errors, and coverage."""
        series = [2.0 ** -(k + 1) * stopped_estimates(k) for k in range(_LONGEST)]
        in_sample, held_out = runs["errors"][:, 0], runs["errors"][:, 1]
        return {
            "stopped": {
                "exact": oracle.mean_ea_stopped_at_zero(),
                "series": np.sum(series, axis=0),
                "simulated": mean_and_error(runs["stopped"]).T,
                "sequences": len(runs["stopped"]) * self.stopped,
            },
            "soft_stop": {
                "rounds": ROUNDS,
                "bias": _by_name([soft_stop_bias(rounds) for rounds in ROUNDS]),
            },
            "two_rounds": {
                "names": EXACT,
                "fixed": two_round_bias(adaptive=False),
                "adaptive": two_round_bias(adaptive=True),
            },
            "learned": {
                "names": LEARNED,
                "in_sample": mean_and_error(in_sample),
                "held_out": mean_and_error(held_out),
                "difference": mean_and_error(in_sample - held_out),
                "coverage": runs["covered"].mean(axis=0),
                "value": runs["value"].mean(),
            },
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge section 3.3, and targets that were learned from the data."""
        return adaptive_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate exact biases, and the optimism of a learned target."""
        two, learned = summary["two_rounds"], summary["learned"]
        return "\n".join(
            [
                "Stop at the first zero, Bernoulli(1/2):",
                "",
                *_stopped_table(summary["stopped"]),
                "",
                "Exact biases. *Two rounds*: draw one of two Bernoulli(1/2) actions evenly, then "
                "take the same again with .9 after a 1 and with .1 after a 0; uniform target, "
                "J = 1/2. *Fixed*: the second policy comes from another first round. *Less after a "
                "zero*: act with .9 until the first 0, then with .1; the target acts with .9, "
                "J = .45.",
                "",
                *table(
                    ["", "two rounds, fixed", "two rounds, learned", "less after a zero, 5 rounds"],
                    [
                        (
                            name,
                            f"{two['fixed'][i]:+.6f}",
                            f"{two['adaptive'][i]:+.6f}",
                            f"{summary['soft_stop']['bias'][name][-1]:+.6f}",
                        )
                        for i, name in enumerate(two["names"])
                    ],
                ),
                "",
                "Bias for a target that is greedy in the training data, and coverage of its "
                "95 % intervals:",
                "",
                *table(
                    ["", "in-sample", "held out", "in-sample covers", "held out covers"],
                    [
                        (
                            name,
                            *(
                                f"{learned[key][0][i]:+.4f} ± {number(learned[key][1][i], 2)}"
                                for key in ("in_sample", "held_out")
                            ),
                            *(f"{learned['coverage'][row][i]:.1%}" for row in (0, 1)),
                        )
                        for i, name in enumerate(learned["names"])
                    ],
                ),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the three kinds of bias."""
        from studies.adaptive.picture import adaptive_figure

        return adaptive_figure(summary)


def _stopped_table(stop: Summary) -> list[str]:
    """Tabulate the means of EA and BIS over sequences that stop at their first zero."""
    (ea, ea_error), (bis, bis_error) = stop["simulated"]
    exact, (ea_series, bis_series) = stop["exact"], stop["series"]
    rows = [
        ("E[EA]", "1 − ln 2", f"{exact:.6f}", f"{ea_series:.6f}", f"{ea:.4f} ± {ea_error:.4f}"),
        (
            "bias of EA",
            "ln 2 − 1/2",
            f"{exact - 0.5:.6f}",
            f"{ea_series - 0.5:.6f}",
            f"{ea - 0.5:.4f} ± {ea_error:.4f}",
        ),
        ("E[BIS]", "1/2", "", f"{bis_series:.6f}", f"{bis:.4f} ± {bis_error:.4f}"),
    ]
    return table(["", "paper", "exact", "series", "simulated"], rows)


def _by_name(rows: Sequence[FloatArray]) -> dict[str, list[float]]:
    """Return the values of each estimator `EXACT`, one from each row."""
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(EXACT)}
