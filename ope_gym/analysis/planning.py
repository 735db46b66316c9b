"""Predict how many more episodes of which policy give a wanted standard error.

After m more episodes of policy j the mixture is M' = (n M + m P_j) / N, N = n + m, the weights are
w' = P_e / M', and the estimate is the mean of psi'_i = sum_t gamma^t w'_t r_t over the larger
sample, stratified by policy:

    SE'^2 = (sum_k n_k var_k(psi') + m var_j(psi')) / N^2

var_k is taken over the episodes of k that there are. The new ones are not there yet: var_j(psi') is
taken over all recorded episodes, reweighted to j by u = P_j / M, which is at most n / n_j. For NFIS
psi' = sum_t gamma^t w'_t / W_t (r_t - R_t) with the W and R of today, for reweighting the data to
M' leaves both as they are. With m = 0 it is the standard error of today.

The spread it starts from is an estimate as well, and policies that look better than they are get
chosen. So as many episodes are asked for as keep the error, with probability 0.8, within a tenth of
what is wanted. For a target far from the data (an ESS below 40) that is still too good: what is
rare was not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.analysis.fused_weights import FusedWeights
from ope_gym.arguments import real, whole
from ope_gym.arrays import FloatArray, finite
from ope_gym.inference.errors import squares_of
from ope_gym.inference.errors import standard_error as error_of
from ope_gym.inference.judging import GREEN_ESS
from ope_gym.policies import Policy, Target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes

MOST_EPISODES = 1_000_000
ITSELF = "the target itself"
PROMISED, SLACK = 0.8, 0.1  # chance that the error is at most a tenth above what was asked for
_PRECISION = 200  # the search stops at a bracket of 1/200 of the number of episodes


@dataclass(frozen=True)
class Need:
    """Hold how many more episodes of one policy are needed.

    Args:
        name: name of the policy.
        policy: its number; None if it is not recorded.
        episodes: number of further episodes; None if not reached with as many as were allowed.
        standard_error: predicted with so many, or with as many as were allowed; NaN if no recorded
            episode is possible under this policy.
        ess: effective number of recorded episodes behind the prediction: those that look like this
            policy's or like the target's, whichever are fewer. With few the prediction is rough,
            and more often too small: what is rare was not seen.
    """

    name: str
    policy: int | None
    episodes: int | None
    standard_error: float
    ess: float


@dataclass(frozen=True, eq=False)
class Plan:
    """Hold what to collect to reach a standard error; prints as a table.

    Args:
        needs: one for each policy, the fewest episodes first.
        wanted: the standard error to reach.
        standard_error: the present one.
        trajectories: number of recorded episodes.
        estimator: "NFIS" or "FIS".
        limit: most episodes that were considered.
    """

    needs: tuple[Need, ...]
    wanted: float
    standard_error: float
    trajectories: int
    estimator: str
    limit: int

    @property
    def best(self) -> Need | None:
        """Return the policy of which the fewest episodes are needed; None if none suffices."""
        return self.needs[0] if self.needs[0].episodes is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        return {
            "estimator": self.estimator,
            "trajectories": self.trajectories,
            "standard_error": finite(self.standard_error),
            "wanted": self.wanted,
            "limit": self.limit,
            "needs": [text.plain(need) for need in self.needs],
        }

    def __str__(self) -> str:
        head = (
            f"{self.estimator} has a standard error of {text.number(self.standard_error, 3)} "
            f"from {self.trajectories:,} episodes; to reach {self.wanted:.3g}:"
        )
        other = text.wrap(
            f"by {self.estimator}, because its error after more episodes can be predicted; auto, "
            "the first choice of evaluate, has another value and usually a smaller error"
        )
        if self.standard_error <= self.wanted:
            return f"{head} nothing more is needed\n{other}"
        table = text.table(
            self.needs,
            {
                "collect of": lambda need: need.name,
                "episodes": lambda need: (
                    f">{self.limit:,}" if need.episodes is None else f"{need.episodes:,}"
                ),
                "std.err then": lambda need: text.number(need.standard_error, 3),
                "rests on ESS": lambda need: text.effective(need.ess, GREEN_ESS),
            },
        )
        lines = [head, *table]
        if any(need.ess < GREEN_ESS for need in self.needs):
            lines.append(
                f"? rough, because it rests on fewer than {GREEN_ESS:g} effective episodes; expect "
                "to need more"
            )
        best = self.best
        lines.append(
            "none of them gets there"
            if best is None
            else f"collect {text.count(best.episodes or 0, 'more episode')} of {best.name} to "
            f"reach a standard error of {self.wanted:.3g}"
        )
        lines.append(other)
        return "\n".join(lines)


def episodes_needed(
    episodes: Episodes,
    target: Target,
    standard_error: float,
    *,
    policy: Target | None = None,
    estimator: str = "NFIS",
    held_out: bool | None = None,
    gamma: float = 1.0,
    limit: int = MOST_EPISODES,
) -> Plan:
    """Predict how many more episodes of a policy give a wanted standard error.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`.
        target: the policy to evaluate, the number of a recorded one, or "last".
        standard_error: the standard error to reach.
        policy: the policy to collect with: the number of a recorded one, "last", a policy, or
            "target" for the target itself; None for every policy that recorded episodes, and the
            target.
        estimator: "NFIS" or "FIS"; auto, whose error cannot be predicted, is usually more precise.
        held_out: True for held-out episodes alone, False for all, None for the held-out ones if
            there are any.
        gamma: discount within [0, 1].
        limit: largest number of episodes to consider.
    """
    real("standard_error", standard_error, "give a number above 0", lambda x: 0.0 < x < math.inf)
    whole("limit", limit, expected="consider at least 1 episode")
    fused = FusedWeights(episodes, target, estimator=estimator, held_out=held_out, gamma=gamma)
    now = error_of(fused.current.influence, fused.behaviours.strata)
    if not math.isfinite(now):
        raise ValueError(
            "the present standard error is not known (no episode supports the target, or each "
            "policy has one episode only), so none can be predicted: collect some episodes of the "
            "target first"
        )
    needs = []
    for name, number, candidate in _candidates(fused, policy):
        predict = Prediction(fused, fused.prefix(candidate, name))
        needed, then = _search(predict, now, standard_error, limit)
        effective = min(predict.ess, float(fused.current.weights.ess.min()))
        needs.append(Need(name, number, needed, then, effective))
    needs.sort(
        key=lambda need: (
            limit + 1 if need.episodes is None else need.episodes,
            np.nan_to_num(need.standard_error, nan=np.inf),
        )
    )
    return Plan(tuple(needs), standard_error, now, fused.n, estimator, limit)


class Prediction:
    """Predict the standard error after m more episodes of one policy.

    Args:
        fused: the data, the target and their mixture.
        log_p: (S,) log-probability of the actions up to each step under the policy.
    """

    def __init__(self, fused: FusedWeights, log_p: FloatArray) -> None:
        self._fused = fused
        self._log_ratio = log_p - fused.log_m
        last = self._log_ratio[fused.ends]
        top = float(last.max())
        self._u = np.exp(last - top) if np.isfinite(top) else np.zeros(fused.n)
        total = float(self._u.sum())
        self.ess = total**2 / float(self._u @ self._u) if total > 0 else 0.0

    def __call__(self, m: int) -> float:
        """Return the standard error; NaN if no recorded episode looks like the policy's."""
        return math.sqrt(float(self._terms(m).sum()))

    def bound(self, m: int) -> float:
        """Return what the standard error stays below with probability `PROMISED`.

        The squared error is a sum of terms c_i of the recorded episodes, known as well as a
        variance with f = 2 / (sum c_i^2 / (sum c_i)^2 - 1 / n) degrees of freedom. As in the
        intervals, the largest term counts once more: rare episodes that matter may be missing.
        """
        from scipy.special import gammaincinv

        terms = self._terms(m)
        square = float(terms.sum())
        if not square > 0.0:
            return math.sqrt(square)
        peaked = float(terms @ terms) / square**2 - 1.0 / terms.size
        half = 1.0 / peaked if peaked > 0.0 else np.inf
        factor = half / float(gammaincinv(half, 1.0 - PROMISED)) if half < 1e6 else 1.0
        return math.sqrt((square + float(terms.max())) * factor)

    def _terms(self, m: int) -> FloatArray:
        """Return (n,) how much each recorded episode adds to the squared error."""
        fused, n = self._fused, self._fused.n
        log_w = fused.log_e - fused.log_m
        if m > 0:
            log_w -= np.logaddexp(np.log(n / (n + m)), self._log_ratio + np.log(m / (n + m)))
        psi = fused.influence(log_w)
        terms = squares_of(psi, fused.behaviours.strata)
        if m > 0:
            terms = terms + m * self._new(psi)
        return terms / (n + m) ** 2

    def _new(self, psi: FloatArray) -> FloatArray:
        """Return (n,) the terms of the variance of psi under the policy, from all episodes."""
        if self.ess <= 1.0 + 1e-9:
            return np.full(psi.size, np.nan)
        share = self._u / self._u.sum()
        return np.asarray(share * (psi - share @ psi) ** 2 * self.ess / (self.ess - 1.0))


def _search(predict: Prediction, now: float, wanted: float, limit: int) -> tuple[int | None, float]:
    """Return the fewest episodes, to half a per cent, and the standard error with them."""

    def enough(m: int) -> bool:
        return predict(m) <= wanted and predict.bound(m) <= (1.0 + SLACK) * wanted

    if now <= wanted:
        return 0, now
    if not enough(limit):
        return None, predict(limit)
    low, high = 0, limit
    while high - low > max(1, high // _PRECISION):
        middle = max(low + 1, math.isqrt(low * high or high))  # of the logarithms
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, predict(high)


def _candidates(fused: FusedWeights, policy: Target | None) -> list[tuple[str, int | None, Policy]]:
    """Return name, number and policy of each whose episodes might be collected."""
    policies, target = fused.data.policies, fused.target
    if policy == "target":
        return [(ITSELF, None, target)]
    if policy is not None:
        number = fused.source.number(policy, "policy")
        name = "the given policy" if number is None else f"policy {number}"
        return [(name, number, fused.source.policy(policy, "policy"))]
    candidates: list[tuple[str, int | None, Policy]] = []
    recorded = False
    for k in np.unique(fused.data.policy_ids[fused.data.offsets[:-1]]).tolist():
        itself = type(policies[k]) is type(target) and policies[k] == target
        recorded = recorded or itself
        candidates.append((f"policy {k}, {ITSELF}" if itself else f"policy {k}", k, policies[k]))
    return candidates if recorded else [*candidates, (ITSELF, None, target)]
