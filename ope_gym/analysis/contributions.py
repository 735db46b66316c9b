"""Tell what the episodes of each policy bring to an estimate, and what it would be without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.analysis.fused_weights import FusedWeights
from ope_gym.arrays import FloatArray, IntArray, finite, offsets_of
from ope_gym.estimators.run import weigh_arrays
from ope_gym.inference.errors import centre, join_single, standard_error
from ope_gym.policies import Target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes

_CANCELLED = 1e-6  # below this share of the mixture, subtracting a policy loses too many digits
_FEW = 10.0  # effective episodes below which an error is itself a guess


@dataclass(frozen=True)
class Contribution:
    """Hold what the episodes of one policy bring to an estimate.

    Args:
        name: Name of the policy.
        episodes: Their number n_k.
        weight_share: their share of the last weights.
        ess: effective sample size of their last weights.
        ess_share: its share of the sum over all policies.
        variance_share: their share of SE^2 = sum_k rho_k^2 s_k^2 / n_k.
        value_without: the estimate from the other episodes, against the mixture of the others.
        standard_error_without: its standard error; NaN if undefined.
        ess_without: its effective sample size. Where it is small the standard error is not to be
            trusted: what no episode shows does not vary.
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
        rows: one for each policy.
        estimator: "NFIS" or "FIS".
        value: the estimate from all episodes.
        standard_error: its standard error.
        ess: its effective sample size.
    """

    rows: tuple[Contribution, ...]
    estimator: str
    value: float
    standard_error: float
    ess: float

    def __getitem__(self, index: int) -> Contribution:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        return {
            "estimator": self.estimator,
            "value": finite(self.value),
            "standard_error": finite(self.standard_error),
            "ess": finite(self.ess),
            "policies": [text.plain(row) for row in self.rows],
        }

    def __str__(self) -> str:
        head = (
            f"{self.estimator} {text.number(self.value)} ± {text.number(self.standard_error, 3)}, "
            f"ESS {self.ess:.1f}; what each policy's episodes bring"
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
                ),
                "ESS without": lambda row: f"{row.ess_without:.1f}",
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
) -> Contributions:
    """Tell what each past policy brings to the estimate of `target`.

    Weight and ESS say whose episodes look like the target's; the share of the variance says whose
    spread limits the precision; the error without it says what would be lost.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`; where the policy changed during
            episodes, they count for the policy at their start.
        target: the policy to evaluate, the number of a recorded one, or "last".
        estimator: "NFIS" or "FIS".
        held_out: True for held-out episodes alone, False for all, None for the held-out ones if
            there are any.
        gamma: discount within [0, 1].
    """
    fused = FusedWeights(episodes, target, estimator=estimator, held_out=held_out, gamma=gamma)
    current, strata = fused.current, fused.behaviours.strata
    groups, group = np.unique(strata, return_inverse=True)
    starters = fused.data.policy_ids[fused.data.offsets[:-1]]

    def by_group(values: FloatArray) -> FloatArray:
        return np.bincount(group, values, groups.size).astype(np.float64)

    total, square = by_group(current.weights.last), by_group(current.weights.last**2)
    ess = np.divide(total**2, square, out=np.zeros(groups.size), where=square > 0)
    shares = map(_shares, (total, ess, by_group(_variance(current.influence, strata))))
    rows = []
    for g, parts in enumerate(zip(*shares, strict=True)):
        weight, effective, variance = parts
        mine = group == g
        name, count = f"policy {starters[mine][0]}", int(mine.sum())
        numbers = (weight, float(ess[g]), effective, variance, *_without(fused, mine))
        rows.append(Contribution(name, count, *numbers))
    error, least = standard_error(current.influence, strata), float(current.weights.ess.min())
    return Contributions(tuple(rows), estimator, current.value, error, least)


def _without(fused: FusedWeights, left_out: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return value, standard error and effective sample size from the other episodes.

    Their weights are against the mixture of the policies that recorded them.

    Args:
        fused: all episodes and their mixture.
        left_out: (n,) mask of episodes; all those of some behaviours.
    """
    if left_out.all():
        return np.nan, np.nan, 0.0
    data, ids = fused.data, fused.behaviours.ids
    kept, rows = np.flatnonzero(~left_out), np.flatnonzero(~np.repeat(left_out, data.lengths))
    lengths = data.lengths[kept]
    offsets = offsets_of(lengths)
    log_m = _subtracted(fused, ids[left_out], rows)
    poor = np.maximum.reduceat(np.isnan(log_m), offsets[:-1])
    if poor.any():
        log_m[np.repeat(poor, lengths)] = fused.log_mixture(
            data.select(episodes=kept[poor]),
            ids[kept[poor]],
            np.bincount(ids[kept], minlength=fused.behaviours.counts.size),
        )
    log_w, rewards = fused.log_e[rows] - log_m, data.rewards[rows]
    others = weigh_arrays(log_w, rewards, offsets, fused.gamma, normalised=fused.normalised)
    error = standard_error(others.influence, fused.behaviours.strata[kept])
    return others.value, error, float(others.weights.ess.min())


def _subtracted(fused: FusedWeights, left_out: IntArray, rows: IntArray) -> FloatArray:
    """Return the log of the mixture without one policy at some rows; NaN where little is left.

    n / (n - n_k) (M - n_k / n P_k) needs one policy's probabilities instead of all others'.
    """
    plans = {fused.behaviours.plans[k] for k in np.unique(left_out)}
    if len(plans) > 1 or len(next(iter(plans))) > 1:  # more than one policy: compute it anew
        return np.full(rows.size, np.nan)
    ((_, number),) = plans.pop()
    log_p = fused.prefix(fused.data.policies[number], f"policy {number}")[rows]
    log_m, n = fused.log_m[rows], fused.n
    with np.errstate(over="ignore"):
        left = 1.0 - np.exp(np.log(left_out.size / n) + log_p - log_m)
    good = left > _CANCELLED
    result = np.full(rows.size, np.nan)
    result[good] = log_m[good] + np.log(left[good]) + np.log(n / (n - left_out.size))
    return result


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
