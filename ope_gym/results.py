"""Results: an `Estimate` with its error, diagnostics and verdict; an `Evaluation` of several."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import standard_error
from ope_gym.inference.diagnostics import Diagnostics, Verdict
from ope_gym.inference.intervals import Interval, cautious_error, ess_t, percentile
from ope_gym.inference.regimes import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PartialMixture:
    """Describe mixtures of a part of the behaviours; see `ope_gym.weights.mixtures`.

    Args:
        behaviours: number of behaviours recorded.
        groups: number of groups into which they are split.
        size: behaviours of the largest group.
    """

    behaviours: int
    groups: int
    size: int

    @classmethod
    def of(cls, groups: IntArray) -> PartialMixture | None:
        """Describe the groups (K,) of the behaviours; None if there is but one group.

        >>> print(PartialMixture.of(np.array([0, 1, 0])))
        partial mixtures of 2 of 3 behaviours
        """
        sizes = np.bincount(groups)
        return cls(groups.size, sizes.size, int(sizes.max())) if sizes.size > 1 else None

    def __str__(self) -> str:
        return f"partial mixtures of {self.size:,} of {self.behaviours:,} behaviours"


@dataclass(frozen=True, eq=False)
class Sample:
    """The trajectories that estimates rest on.

    Args:
        trajectories: how many.
        steps: how many in all.
        strata: (n,) the groups inside which trajectories are alike.
        behaviours: (K,) names of the behaviours.
        counts: (K,) trajectories of each.
        gamma: discount.
        regime: what the learner saw of the data, one of `ope_gym.inference.regimes.REGIMES`.
        fingerprint: equal for equal data, so that differences are only taken between such.
        mixture: where weights are against parts of the behaviours; None where against all.
        q_model: name of the q model of shards, or "none", if an estimator uses one.
    """

    trajectories: int
    steps: int
    strata: IntArray = field(repr=False)
    behaviours: tuple[str, ...] = field(repr=False)
    counts: IntArray = field(repr=False)
    gamma: float
    regime: str
    fingerprint: tuple[float, ...] = field(repr=False)
    mixture: PartialMixture | None = None
    q_model: str | None = None


@dataclass(frozen=True, eq=False)
class Difference:
    """A paired difference of two estimates on the same trajectories: minuend - subtrahend."""

    minuend: str
    subtrahend: str
    value: float
    standard_error: float
    interval: Interval

    def __str__(self) -> str:
        low, high, level = self.interval.low, self.interval.high, self.interval.level
        return (
            f"{self.minuend} - {self.subtrahend}: {self.value:.6g} ± {self.standard_error:.3g}, "
            f"{level:.0%} [{low:.6g}, {high:.6g}]"
        )


@dataclass(frozen=True, eq=False)
class Estimate:
    """The value of a policy by one estimator.

    Args:
        name: of the estimator.
        value: the estimate; NaN if the data do not support one.
        standard_error: from the influence values, inside strata; NaN if undefined.
        interval: confidence interval, with `low`, `high` and `level`.
        diagnostics: of the weights.
        verdict: whether to trust it, and why.
        influence: (n,) influence value of each trajectory.
        replicates: (R,) bootstrap replicates, if the interval is a bootstrap.
        sample: the data it rests on.
        seed: of the bootstrap draws.
        report: numbers of its own: for "auto" the share `c` of the q model's correction.
    """

    name: str
    value: float
    standard_error: float
    interval: Interval
    diagnostics: Diagnostics = field(repr=False)
    verdict: Verdict
    influence: FloatArray = field(repr=False)
    sample: Sample = field(repr=False)
    replicates: FloatArray | None = field(default=None, repr=False)
    seed: int | None = field(default=None, repr=False)
    report: dict[str, float] = field(default_factory=dict, repr=False)

    def difference(self, other: Estimate) -> Difference:
        """Paired difference self - other: two targets or two estimators on the same trajectories.

        Percentiles of the shared bootstrap draws where both have them, ess-t from the influence
        values otherwise.
        """
        if self.sample.fingerprint != other.sample.fingerprint:
            raise ValueError(
                f"other ({other.name}) rests on other trajectories than {self.name}: a paired "
                "difference needs both from the same data; evaluate both targets on one set"
            )
        if self.sample.gamma != other.sample.gamma:
            raise ValueError(
                f"other ({other.name}) has gamma {other.sample.gamma:g}, but {self.name} has "
                f"{self.sample.gamma:g}: a difference needs one discount"
            )
        if self.interval.level != other.interval.level:
            raise ValueError(
                f"{self.name} has level {self.interval.level} and {other.name} "
                f"{other.interval.level}: evaluate both at one level"
            )
        value = self.value - other.value
        error = standard_error(self.influence - other.influence, self.sample.strata)
        level = self.interval.level
        mine, theirs = self.replicates, other.replicates
        if mine is None or theirs is None or self.seed != other.seed or mine.size != theirs.size:
            ess = min(self.diagnostics.ess, other.diagnostics.ess)
            cautious = cautious_error(self.influence - other.influence, self.sample.strata)
            interval = ess_t(value, cautious, ess, level)
        else:
            interval = percentile(mine - theirs, level)
        return Difference(self.name, other.name, value, error, interval)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; undefined numbers are None."""
        d = self.diagnostics
        return {
            "estimator": self.name,
            "regime": label(self.sample.regime),
            "value": _number(self.value),
            "standard_error": _number(self.standard_error),
            "interval": {
                "low": _number(self.interval.low),
                "high": _number(self.interval.high),
                "level": self.interval.level,
                "method": self.interval.method,
            },
            "verdict": {
                "colour": self.verdict.colour,
                "reasons": list(self.verdict.reasons),
                "advice": list(self.verdict.advice),
            },
            "diagnostics": {
                "ess": _number(d.ess),
                "ess_step": d.ess_step,
                "ess_curve": _numbers(d.ess_curve),
                "behaviour_shares": _numbers(d.behaviour_shares),
                "behaviour_ess": _numbers(d.behaviour_ess),
                "max_share": _number(d.max_share),
                "mean_weight": _number(d.mean_weight),
                "uncovered": _number(d.uncovered),
                "pareto_k": _number(d.pareto_k),
                "capped_share": _number(d.capped_share),
                "support_violations": d.support_violations,
                "calibration": None if d.calibration is None else _numbers(d.calibration),
            },
            "report": {key: _number(value) for key, value in self.report.items()},
        }


class Differences(dict[str, Difference]):
    """Differences of two targets by estimator; prints a line each."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {d.value:.5g} ± {d.standard_error:.2g}, "
            f"{d.interval.level:.0%} ({d.interval.method}) "
            f"[{_text(d.interval.low)}, {_text(d.interval.high)}]"
            for name, d in self.items()
        )


class Evaluation(Mapping[str, Estimate]):
    """Estimates of one policy's value by several estimators; prints as a table."""

    def __init__(self, estimates: Mapping[str, Estimate]) -> None:
        self._estimates = dict(estimates)

    def __getitem__(self, name: str) -> Estimate:
        if name not in self._estimates:
            raise KeyError(f"{name!r} was not evaluated; there are {', '.join(self._estimates)}")
        return self._estimates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._estimates)

    def __len__(self) -> int:
        return len(self._estimates)

    @property
    def sample(self) -> Sample:
        """The trajectories the estimates rest on."""
        return next(iter(self.values())).sample

    def difference(self, other: Evaluation) -> Differences:
        """Paired differences self - other of each estimator: which of two targets is better."""
        shared = [name for name in self if name in other._estimates]
        if not shared:
            raise ValueError(
                f"other has none of the estimators {', '.join(self)}; it has {', '.join(other)}"
            )
        return Differences({name: self[name].difference(other[name]) for name in shared})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; undefined numbers are None."""
        sample = self.sample
        return {
            "trajectories": sample.trajectories,
            "steps": sample.steps,
            "behaviours": dict(zip(sample.behaviours, sample.counts.tolist(), strict=True)),
            "gamma": sample.gamma,
            "regime": label(sample.regime),
            "mixture": None if sample.mixture is None else asdict(sample.mixture),
            "estimates": {name: estimate.to_dict() for name, estimate in self.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row an estimator; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas: pip install pandas, or use to_dict"
            ) from error
        rows = [
            {
                "estimator": name,
                "value": estimate.value,
                "standard_error": estimate.standard_error,
                "low": estimate.interval.low,
                "high": estimate.interval.high,
                "ess": estimate.diagnostics.ess,
                "max_share": estimate.diagnostics.max_share,
                "mean_weight": estimate.diagnostics.mean_weight,
                "verdict": estimate.verdict.colour,
                "regime": label(estimate.sample.regime),
            }
            for name, estimate in self.items()
        ]
        return pandas.DataFrame(rows).set_index("estimator")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={estimate.value:.6g}" for name, estimate in self.items())
        return f"Evaluation({values})"

    def __str__(self) -> str:
        return self.table()

    def table(self, truth: float | None = None, truth_error: float = 0.0) -> str:
        """The estimates as a text table, with the reasons of those that are not green.

        Args:
            truth: the value, if it is known from elsewhere; adds the distance to it in standard
                errors.
            truth_error: standard error of the truth.
        """
        sample, first = self.sample, next(iter(self.values()))
        behaviours = np.count_nonzero(sample.counts)
        head = (
            f"{_count(sample.trajectories, 'episode')}, {_count(sample.steps, 'step')}, "
            f"{_count(int(behaviours), 'behaviour')}, gamma {sample.gamma:g}; "
            f"data: {label(sample.regime)}"
        )
        if sample.q_model is not None:
            head += f"; q model: {sample.q_model}"
        if sample.mixture is not None:
            head += f"\n{sample.mixture}"
        interval = f"{first.interval.level:.0%} interval ({first.interval.method})"
        rows = [["estimator", "value", "std.err", interval, "ESS", "verdict"]]
        for name, e in self.items():
            ends = f"[{_text(e.interval.low)}, {_text(e.interval.high)}]"
            ess = f"{e.diagnostics.ess:.1f}"
            rows.append(
                [name, _text(e.value), _text(e.standard_error), ends, ess, e.verdict.colour]
            )
        if truth is not None:
            rows[0].append("off truth")
            for row, e in zip(rows[1:], self.values(), strict=True):
                off, error = e.value - truth, math.hypot(e.standard_error, truth_error)
                distance = off / error if error else math.copysign(math.inf, off) if off else 0.0
                row.append("undefined" if math.isnan(distance) else f"{distance:+.1f} se")
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 5) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([head, *lines, *self._reasons()])

    def plot(self, truth: float | None = None, truth_error: float = 0.0) -> Figure:
        """The estimates with their intervals as a matplotlib figure; needs the extra `plots`.

        Args:
            truth: the value, if it is known from elsewhere.
            truth_error: standard error of the truth; its band is two of them on either side.
        """
        from ope_gym.report.figures import forest_figure

        return forest_figure(self, truth=truth, truth_error=truth_error)

    def _reasons(self) -> list[str]:
        """Why results are not green, estimators with the same reasons on one line."""
        grouped: dict[str, list[str]] = {}
        for name, estimate in self.items():
            if estimate.verdict.colour != "green":
                grouped.setdefault(str(estimate.verdict), []).append(name)
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in grouped.items()]
        reasons += [
            f"{name}: " + ", ".join(f"{key} = {number:.2g}" for key, number in e.report.items())
            for name, e in self.items()
            if e.report
        ]
        return [textwrap.fill(reason, 100, subsequent_indent="    ") for reason in reasons]


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: FloatArray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _text(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.5g}"
