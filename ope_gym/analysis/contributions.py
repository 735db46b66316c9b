"""Which past policies carry an estimate, and what it would be without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import centre, join_single, standard_error
from ope_gym.inference.diagnostics import AMBER_ESS
from ope_gym.report import text
from ope_gym.weights.fused import Fused

if TYPE_CHECKING:
    from ope_gym.data.buffer import TrajectoryBuffer
    from ope_gym.data.trajectories import Trajectories
    from ope_gym.policies.closed_form import Policy


@dataclass(frozen=True)
class Contribution:
    """What the episodes of one policy bring to an estimate.

    Args:
        name: of the policy.
        episodes: n_k.
        weight_share: of the last weights.
        ess: effective sample size of its last weights.
        ess_share: of the sum over all policies.
        variance_share: of SE^2 = sum_k rho_k^2 s_k^2 / n_k.
        value_without: the estimate from the other episodes, against the mixture of the others.
        standard_error_without: the standard error of that; NaN if undefined.
        ess_without: the effective sample size of that. Where it is small the error is, too, and
            only seems so: what nobody shows does not vary.
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
class Contributions(Sequence[Contribution]):
    """The contributions of all policies, by number; prints as a table.

    Args:
        rows: one a policy.
        estimator: "NFIS" or "FIS".
        value: the estimate from all episodes.
        standard_error: of it.
        ess: its effective sample size.
    """

    rows: tuple[Contribution, ...]
    estimator: str
    value: float
    standard_error: float
    ess: float

    @overload
    def __getitem__(self, index: int) -> Contribution: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Contribution]: ...
    def __getitem__(self, index: int | slice) -> Contribution | Sequence[Contribution]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; undefined numbers are None."""
        return {
            "estimator": self.estimator,
            "value": text.finite(self.value),
            "standard_error": text.finite(self.standard_error),
            "ess": text.finite(self.ess),
            "policies": [
                {k: text.finite(v) if isinstance(v, float) else v for k, v in vars(row).items()}
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        head = (
            f"{self.estimator} {text.number(self.value)} ± "
            f"{text.number(self.standard_error, 3)}, ESS {self.ess:.1f}; what each policy's "
            "episodes bring"
        )
        titles = [
            "policy",
            "episodes",
            "weight",
            "ESS",
            "ESS share",
            "variance",
            "std.err without",
            "ESS without",
        ]
        cells = [
            [
                row.name,
                f"{row.episodes:,}",
                text.share(row.weight_share),
                f"{row.ess:.1f}",
                text.share(row.ess_share),
                text.share(row.variance_share),
                text.number(row.standard_error_without, 3)
                + (" " if row.ess_without >= AMBER_ESS else "?"),
                f"{row.ess_without:.1f}",
            ]
            for row in self.rows
        ]
        lines = [head, *text.align([titles, *cells])]
        if any(row.ess_without < AMBER_ESS for row in self.rows):
            lines.append(f"? with an ESS below {AMBER_ESS:g} a small error means little")
        return "\n".join(lines)


def contributions(
    trajectories: Trajectories | TrajectoryBuffer,
    target: Policy,
    *,
    estimator: str = "NFIS",
    data: str = "all",
    gamma: float = 1.0,
) -> Contributions:
    """What each past policy brings to the estimate of `target`.

    Weight and ESS say whose episodes look like the target's; the share of the variance says whose
    spread limits the precision; the error without it says what would be lost.

    Args:
        trajectories: recorded episodes; where the policy changed during episodes, they count for
            the policy at their start.
        target: the policy to evaluate.
        estimator: "NFIS" or "FIS".
        data: "all" episodes, or only the "held-out" ones.
        gamma: discount within [0, 1].
    """
    fused = Fused(trajectories, target, estimator=estimator, data=data, gamma=gamma)
    found, strata = fused.current, fused.behaviours.strata
    groups, group = np.unique(strata, return_inverse=True)
    top = float(found.log_last.max())
    last = np.exp(found.log_last - (top if np.isfinite(top) else 0.0))
    total, square = _sums(group, last), _sums(group, last**2)
    ess = np.divide(total**2, square, out=np.zeros(groups.size), where=square > 0)
    variance = _sums(group, _variance(found.influence, strata))
    rows = []
    for g in range(groups.size):
        mine = group == g
        value, error, effective = _without(fused, mine)
        row = Contribution(
            f"policy {_number(fused, mine)}",
            int(mine.sum()),
            _share(total, g),
            float(ess[g]),
            _share(ess, g),
            _share(variance, g),
            value,
            error,
            effective,
        )
        rows.append(row)
    error = standard_error(found.influence, strata)
    return Contributions(tuple(rows), estimator, found.value, error, float(found.ess.min()))


def _number(fused: Fused, mine: NDArray[np.bool_]) -> int:
    first = fused.data.offsets[:-1][mine][0]
    return int(fused.data.policy_ids[first])


def _without(fused: Fused, mine: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Value, standard error and effective sample size of the other episodes."""
    if mine.all():
        return np.nan, np.nan, 0.0
    found = fused.without(mine)
    error = standard_error(found.influence, fused.behaviours.strata[~mine])
    return found.value, error, float(found.ess.min())


def _variance(influence: FloatArray, strata: IntArray) -> FloatArray:
    """(n,) what each trajectory adds to SE^2; zero where no spread can be seen."""
    joined = join_single(strata)
    counts = np.bincount(joined)
    scale = np.where(counts > 1, counts / np.maximum(counts - 1.0, 1.0), 0.0)
    return np.asarray(scale[joined] * centre(influence, joined) ** 2 / influence.size**2)


def _sums(group: IntArray, values: FloatArray) -> FloatArray:
    """Sums of the values by group."""
    return np.asarray(np.bincount(group, values), dtype=np.float64)


def _share(parts: FloatArray, index: int) -> float:
    whole = float(parts.sum())
    return float(parts[index]) / whole if whole > 0 else np.nan
