"""Tell what the episodes of each policy bring to an estimate, and what it would be without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.arguments import whole
from ope_gym.arrays import FloatArray, IntArray, finite
from ope_gym.estimators.table import one_estimator
from ope_gym.evaluation import Evaluator
from ope_gym.inference.errors import centre, join_single
from ope_gym.inference.estimate import Estimate
from ope_gym.policies import Target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, load_source

_FEW = 10.0  # effective episodes below which an error is itself a guess


@dataclass(frozen=True)
class Contribution:
    """Hold what the episodes of one policy bring to an estimate.

    Args:
        name: Name of the policy.
        episodes: Their number n_k.
        weight_share: Their share of the last weights.
        ess: Effective sample size of their last weights.
        ess_share: Its share of the sum over all policies.
        variance_share: Their share of SE^2 = sum_k rho_k^2 s_k^2 / n_k.
        value_without: Estimate from the other episodes, against the mixture of the others.
        standard_error_without: Its standard error; NaN if undefined.
        ess_without: Its effective sample size. Where it is small the standard error is not to be
            trusted: what no episode shows does not vary. NaN where the policy was not left out.
    """

    name: str
    episodes: int
    weight_share: float
    ess: float
    ess_share: float
    variance_share: float
    value_without: float
    standard_error_without: float
    ess_without: float


@dataclass(frozen=True, eq=False)
class Contributions:
    """Hold the contributions of all policies, by number; prints as a table.

    Args:
        rows: Contribution of each policy.
        estimate: Estimate from all episodes.
    """

    rows: tuple[Contribution, ...]
    estimate: Estimate

    def __getitem__(self, index: int) -> Contribution:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        return {
            "estimator": self.estimate.name,
            "value": finite(self.estimate.value),
            "standard_error": finite(self.estimate.standard_error),
            "ess": finite(self.estimate.diagnostics.ess),
            "policies": [text.plain(row) for row in self.rows],
        }

    def __str__(self) -> str:
        e = self.estimate
        head = (
            f"{e.name} {text.number(e.value)} ± {text.number(e.standard_error, 3)}, "
            f"ESS {e.diagnostics.ess:.1f}; what each policy's episodes bring"
        )
        table = text.table(
            self.rows,
            {
                "policy": lambda row: row.name,
                "episodes": lambda row: f"{row.episodes:,}",
                "weight": lambda row: text.share(row.weight_share),
                "ESS": lambda row: f"{row.ess:.1f}",
                "ESS share": lambda row: text.share(row.ess_share),
                "variance": lambda row: text.share(row.variance_share),
                "std.err without": lambda row: (
                    text.number(row.standard_error_without, 3)
                    + (" " if row.ess_without >= _FEW else "?")
                    if row.ess_without >= 0
                    else ""
                ),
                "ESS without": lambda row: f"{row.ess_without:.1f}" if row.ess_without >= 0 else "",
            },
        )
        lines = [head, *table]
        if any(row.ess_without < _FEW for row in self.rows):
            lines.append(f"? with an ESS below {_FEW:g} a small error means little")
        return "\n".join(lines)


def contributions(
    episodes: Episodes,
    target: Target,
    *,
    estimator: str = "NFIS",
    held_out: bool | None = None,
    gamma: float = 1.0,
    limit: int = 50,
) -> Contributions:
    """Tell what each past policy brings to the estimate of `target`.

    Weight and ESS say whose episodes look like the target's; the share of the variance says whose
    spread limits the precision; the error without it, from an evaluation of the others' episodes,
    says what would be lost.

    Args:
        episodes: Recorded episodes, as in `ope_gym.evaluate`; where the policy changed during
            episodes, they count for the policy at their start.
        target: The policy to evaluate, the number of a recorded one, or "last".
        estimator: A weighted estimator of `ope_gym.ESTIMATORS`.
        held_out: True for held-out episodes alone, False for all, None for the held-out ones if
            there are any.
        gamma: Discount within [0, 1].
        limit: Of more policies than this only those with the largest weight are left out in turn;
            each takes as long as an evaluation.
    """
    most = whole("limit", limit)
    source = load_source(episodes, held_out)
    policy, data, name = source.policy(target), source.data, one_estimator(estimator)
    assert data is not None  # all of it is in memory

    def evaluated(part: Any) -> Estimate:
        evaluator = Evaluator(part, name, q_model=None, held_out=False, gamma=gamma)
        return evaluator.evaluate(policy)[name]

    estimate = evaluated(data)
    strata = estimate.sample.strata
    groups, group = np.unique(strata, return_inverse=True)

    def by_group(values: FloatArray) -> FloatArray:
        return np.bincount(group, values, groups.size).astype(np.float64)

    log_last = estimate.diagnostics.log_last
    last = np.exp(log_last - log_last.max(initial=-np.finfo(np.float64).max))
    total, square = by_group(last), by_group(last**2)
    ess = np.divide(total**2, square, out=np.zeros(groups.size), where=square > 0)
    shares = [_shares(x) for x in (total, ess, by_group(_variance(estimate.influence, strata)))]
    heaviest = np.argsort(-total, kind="stable")[:most]
    starters, rows = data.policy_ids[data.offsets[:-1]], []
    for g in range(groups.size):
        own, others = np.flatnonzero(group == g), np.flatnonzero(group != g)
        weight, effective, variance = (share[g] for share in shares)
        numbers = np.nan, np.nan, 0.0 if not others.size else np.nan
        if others.size and g in heaviest:
            rest = evaluated(data.select(episodes=others))
            numbers = rest.value, rest.standard_error, rest.diagnostics.ess
        row = (own.size, weight, float(ess[g]), effective, variance, *numbers)
        rows.append(Contribution(f"policy {starters[own[0]]}", *row))
    return Contributions(tuple(rows), estimate)


def _variance(influence: FloatArray, strata: IntArray) -> FloatArray:
    """Return (n,) what each trajectory adds to SE^2; zero where no spread can be seen."""
    joined = join_single(strata)
    counts = np.bincount(joined)
    scale = np.where(counts > 1, counts / np.maximum(counts - 1.0, 1.0), 0.0)
    return np.asarray(scale[joined] * centre(influence, joined) ** 2 / influence.size**2)


def _shares(parts: FloatArray) -> list[float]:
    """Return the parts as shares of their sum; NaN if all are 0."""
    whole = float(parts.sum())
    return [float(part) / whole if whole > 0 else np.nan for part in parts]
