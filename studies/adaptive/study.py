"""Section 3.3: policies that depend on earlier rewards, and targets learned from the data.

Exact biases are sums over all histories, each evaluated by the library; the learned target is
simulated, with estimates from the data it was learned from and from data it never saw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym import SoftmaxLinear, Trajectories, evaluate
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import WEIGHTED
from studies import oracle
from studies.adaptive.claims import adaptive_claims
from studies.harness.errors import mean_and_error
from studies.harness.markdown import number
from studies.harness.study import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

History: TypeAlias = tuple[tuple[int, float], ...]  # (action, reward) of each round
EXACT = ("BIS", "FIS", "OUIS", "NBIS", "NFIS", "NOUIS", "EA")
LEARNED = (*WEIGHTED, "EA")
ROUNDS = (1, 2, 3, 4, 5)
_LONGEST = 60  # 2^-60 is below rounding


@dataclass(frozen=True)
class Adaptive(Study):
    """A learned target and some sequences that stop at their first zero, a run."""

    name: ClassVar[str] = "adaptive"
    title: ClassVar[str] = "adaptive: policies that learn from the data (section 3.3)"
    runs: ClassVar[int] = 1000
    chunk: ClassVar[int] = 50
    takes: ClassVar[str] = "half a minute"

    arms: int = 10
    draws: int = 30  # of each behaviour
    stopped: int = 100  # sequences a run
    epsilon: float = 0.1  # of the learned target

    def __post_init__(self) -> None:
        if self.arms < 2 or self.draws < 1 or self.stopped < 1 or not 0 < self.epsilon <= 1:
            raise ValueError(
                f"arms={self.arms}, draws={self.draws}, stopped={self.stopped}, "
                f"epsilon={self.epsilon}: give at least 2, 1, 1, and more than 0 up to 1"
            )

    def run(self, seeds: Seeds) -> Runs:
        """Mean of EA over stopped sequences (R, 2); errors and coverage (R, 2, estimators)."""
        stopped, errors, covered, worth = [], [], [], []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            ones = rng.geometric(0.5, size=self.stopped) - 1  # before the first zero
            values = np.array([stopped_estimates(min(int(k), _LONGEST)) for k in ones])
            stopped.append(values.mean(axis=0))
            error, inside, truth = self.learned(rng)
            errors.append(error)
            covered.append(inside)
            worth.append(truth)
        return {
            "stopped": np.array(stopped),
            "errors": np.array(errors),
            "covered": np.array(covered),
            "value": np.array(worth),
        }

    def learned(self, rng: np.random.Generator) -> tuple[FloatArray, NDArray[np.bool_], float]:
        """Estimate − value and whether the interval holds it, (2, estimators); the value.

        The target is ε-greedy in the mean rewards of the training data. It is evaluated from them
        (in-sample), and from as many draws of the same behaviours that it did not see (held out).
        """
        means = np.linspace(0.3, 0.7, self.arms)
        policies = np.stack([_softmax(temperature * means) for temperature in (0.0, 2.0, -2.0)])
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
        """Exact biases, simulated biases with their errors, coverage."""
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
        """Section 3.3, and what it leaves out."""
        return adaptive_claims(summary)

    def table(self, summary: Summary) -> str:
        """Exact biases, and the optimism of a learned target."""
        stop, two, learned = summary["stopped"], summary["two_rounds"], summary["learned"]
        (ea, ea_error), (bis, bis_error) = stop["simulated"]
        lines = [
            "Stop at the first zero, Bernoulli(1/2):",
            "",
            "| | paper | exact | series | simulated |",
            "|---|---|---|---|---|",
            f"| E[EA] | 1 − ln 2 | {stop['exact']:.6f} | {stop['series'][0]:.6f} "
            f"| {ea:.4f} ± {ea_error:.4f} |",
            f"| bias of EA | ln 2 − 1/2 | {stop['exact'] - 0.5:.6f} | "
            f"{stop['series'][0] - 0.5:.6f} | {ea - 0.5:.4f} ± {ea_error:.4f} |",
            f"| E[BIS] | 1/2 | | {stop['series'][1]:.6f} | {bis:.4f} ± {bis_error:.4f} |",
            "",
            "Exact biases. *Two rounds*: draw one of two Bernoulli(1/2) actions evenly, then take "
            "the same again with .9 after a 1 and with .1 after a 0; uniform target, J = 1/2. "
            "*Fixed*: the second policy comes from another first round. *Less after a zero*: act "
            "with .9 until the first 0, then with .1; the target acts with .9, J = .45.",
            "",
            "| | two rounds, fixed | two rounds, learned | less after a zero, 5 rounds |",
            "|---|---|---|---|",
        ]
        for name, fixed, after in zip(two["names"], two["fixed"], two["adaptive"], strict=True):
            soft = summary["soft_stop"]["bias"][name][-1]
            lines.append(f"| {name} | {fixed:+.6f} | {after:+.6f} | {soft:+.6f} |")
        lines += [
            "",
            "Bias for a target that is greedy in the training data, and coverage of its "
            "95 % intervals:",
            "",
            "| | in-sample | held out | in-sample covers | held out covers |",
            "|---|---|---|---|---|",
        ]
        for i, name in enumerate(learned["names"]):
            cells = [
                f"{learned[key][0][i]:+.4f} ± {number(learned[key][1][i], 2)}"
                for key in ("in_sample", "held_out")
            ]
            shares = [f"{learned['coverage'][row][i]:.1%}" for row in (0, 1)]
            lines.append(f"| {name} | {' | '.join([*cells, *shares])} |")
        return "\n".join(lines)

    def picture(self, summary: Summary) -> Figure:
        """The three kinds of bias."""
        from studies.adaptive.picture import adaptive_figure

        return adaptive_figure(summary)


# --- the library on small data sets -----------------------------------------------------------


def estimates(
    policies: FloatArray,
    ids: IntArray,
    actions: IntArray,
    rewards: FloatArray,
    target: FloatArray,
    names: Sequence[str],
    *,
    held_out: bool = False,
) -> list[tuple[float, float, float]]:
    """(value, low, high) of each estimator on one-step data; policies (K, A), target (A,)."""
    data = Trajectories.from_arrays(
        np.zeros((ids.size, 0)),
        actions,
        rewards,
        np.log(policies[ids, actions]),
        offsets=np.arange(ids.size + 1),
        policies=[_policy(p) for p in policies],
        policy_ids=ids,
        terminated=True,
        held_out=held_out,
    )
    found = evaluate(data, _policy(target), estimators=names)
    return [(e.value, e.interval.low, e.interval.high) for e in found.values()]


def _policy(probs: FloatArray) -> SoftmaxLinear:
    return SoftmaxLinear(np.zeros((probs.size, 0)), np.log(probs))


def _softmax(scores: FloatArray) -> FloatArray:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


@cache
def stopped_estimates(ones: int) -> FloatArray:
    """EA and BIS of the only action there is, which paid 1 so often and then 0."""
    rewards = np.append(np.ones(ones), 0.0)
    zeros = np.zeros(ones + 1, dtype=np.int64)
    found = estimates(np.ones((1, 1)), zeros, zeros, rewards, np.ones(1), ["EA", "BIS"])
    return np.array([value for value, _, _ in found])


# --- exact: sums over histories ---------------------------------------------------------------


def bias_over_histories(
    rounds: int,
    policy: Callable[[History], FloatArray],
    pays: FloatArray,
    target: FloatArray,
    *,
    fixed: bool = False,
) -> FloatArray:
    """Exact biases of `EXACT` after some rounds of one draw each, (7,).

    Args:
        rounds: how many.
        policy: probabilities (A,) of the next action after a history.
        pays: (A,) probability of reward 1, else 0.
        target: (A,).
        fixed: the policies follow another history of the same law, independent of the data.
    """
    value, total = float(target @ pays), np.zeros(len(EXACT))
    outcomes = [(a, r) for a in range(pays.size) for r in (0.0, 1.0) if r == 0 or pays[a] > 0]
    histories = list(itertools.product(outcomes, repeat=rounds))
    for plan in histories if fixed else [None]:
        for history in histories:
            led_by = history if plan is None else plan
            policies = np.stack([policy(led_by[:t]) for t in range(rounds)])
            chance = _chance(history, policies, pays)
            if plan is not None:
                chance *= _chance(plan, policies, pays)
            if chance > 0:
                actions, rewards = (np.array(part) for part in zip(*history, strict=True))
                found = estimates(
                    policies, np.arange(rounds), actions, rewards.astype(float), target, EXACT
                )
                total += chance * np.array([v for v, _, _ in found])
    return total - value


def _chance(history: History, policies: FloatArray, pays: FloatArray) -> float:
    return math.prod(
        float(policies[t, a]) * float(pays[a] if r else 1 - pays[a])
        for t, (a, r) in enumerate(history)
    )


@cache
def two_round_bias(*, adaptive: bool) -> FloatArray:
    """Win, stay with .9; lose, shift with .9. Both actions are Bernoulli(1/2): J = 1/2."""

    def policy(history: History) -> FloatArray:
        if not history:
            return np.array([0.5, 0.5])
        action, reward = history[0]
        stay = 0.9 if reward else 0.1
        return np.where(np.arange(2) == action, stay, 1 - stay)

    half = np.array([0.5, 0.5])
    return bias_over_histories(2, policy, half, half, fixed=not adaptive)


@cache
def soft_stop_bias(rounds: int) -> FloatArray:
    """The paper's example mended: act (Bernoulli(1/2)) rarely after the first 0, not never.

    Idle pays 0. The target acts with .9, so J = 0.45.
    """

    def policy(history: History) -> FloatArray:
        stopped = any(action == 1 and reward == 0 for action, reward in history)
        act = 0.1 if stopped else 0.9
        return np.array([1 - act, act])

    return bias_over_histories(rounds, policy, np.array([0.0, 0.5]), np.array([0.1, 0.9]))


def _by_name(rows: Sequence[FloatArray]) -> dict[str, list[float]]:
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(EXACT)}
