"""Hold the results of several estimators: an `Evaluation`, and `Differences` of two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ope_gym.inference.estimate import Difference, Estimate, Sample
from ope_gym.inference.regimes import label
from ope_gym.report import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Differences(dict[str, Difference]):
    """Hold the differences of two targets by estimator; prints a line each."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {d.value:.5g} ± {d.standard_error:.2g}, "
            f"{d.interval.level:.0%} ({d.interval.method}) "
            f"{text.interval(d.interval.low, d.interval.high)}"
            for name, d in self.items()
        )


class Evaluation(Mapping[str, Estimate]):
    """Map the names of estimators to their estimates of one policy's value; prints as a table."""

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
        """Return the sample that all estimates rest on."""
        return next(iter(self.values())).sample

    def difference(self, other: Evaluation) -> Differences:
        """Return the paired differences self - other by estimator: which target is better."""
        shared = [name for name in self if name in other._estimates]
        if not shared:
            raise ValueError(
                f"other has none of the estimators {', '.join(self)}; it has {', '.join(other)}: "
                "evaluate both targets with the same estimators"
            )
        return Differences({name: self[name].difference(other[name]) for name in shared})

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined numbers are None."""
        sample = self.sample
        return {
            **sample.to_dict(),
            "regime": label(sample.regime),
            "mixture": asdict(sample.mixture) if sample.mixture else None,
            "estimates": {name: estimate.to_dict() for name, estimate in self.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(), path)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row for each estimator; needs pandas."""
        return text.to_frame(
            [
                {
                    "estimator": name,
                    "value": e.value,
                    "standard_error": e.standard_error,
                    "low": e.interval.low,
                    "high": e.interval.high,
                    "ess": e.diagnostics.ess,
                    "worth": e.worth,
                    "max_share": e.diagnostics.max_share,
                    "mean_weight": e.diagnostics.mean_weight,
                    "verdict": e.verdict.colour,
                    "regime": label(e.sample.regime),
                }
                for name, e in self.items()
            ]
        )

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={estimate.value:.6g}" for name, estimate in self.items())
        return f"Evaluation({values})"

    def __str__(self) -> str:
        return self.table()

    def table(self, truth: float | None = None, truth_error: float = 0.0) -> str:
        """Return the estimates as a text table, with the reasons of those that are not green.

        Args:
            truth: the value, if it is known from elsewhere; adds the distance to it in standard
                errors.
            truth_error: standard error of the truth.
        """
        first = next(iter(self.values())).interval
        ends = f"{first.level:.0%} interval ({first.method})"
        rows = [["estimator", "value", "std.err", ends, "ESS", "worth", "verdict"]]
        rows += [
            [
                name,
                text.number(e.value),
                text.number(e.standard_error),
                text.interval(e.interval.low, e.interval.high),
                f"{e.diagnostics.ess:.1f}",
                text.episodes(e.worth),
                e.verdict.colour,
            ]
            for name, e in self.items()
        ]
        if truth is not None:
            rows[0].append("from truth")
            for row, e in zip(rows[1:], self.values(), strict=True):
                off, error = e.value - truth, math.hypot(e.standard_error, truth_error)
                distance = off / error if error else math.copysign(math.inf, off) if off else 0.0
                row.append("undefined" if math.isnan(distance) else f"{distance:+.1f} se")
        return "\n".join([*self._head(), *text.align(rows, left=(0, 6)), *self._remarks()])

    def plot(self, truth: float | None = None, truth_error: float = 0.0) -> Figure:
        """Draw the estimates with their intervals by matplotlib; needs the extra `plots`.

        Args:
            truth: the value, if it is known from elsewhere.
            truth_error: standard error of the truth; its band is two of them on either side.
        """
        from ope_gym.report.figures import forest_figure

        return forest_figure(self, truth=truth, truth_error=truth_error)

    def _head(self) -> list[str]:
        """Return the lines above the table: the data, and whether mixtures are partial."""
        sample = self.sample
        head = f"{text.size(sample)}, gamma {sample.gamma:g}; data: {label(sample.regime)}"
        if sample.q_model is not None:
            head += f"; q model: {sample.q_model}"
        return [head, *([str(sample.mixture)] if sample.mixture else [])]

    def _remarks(self) -> list[str]:
        """Return why results are not green, what they rest on, and numbers of the estimators."""
        verdicts = {name: e.verdict for name, e in self.items()}
        lines = text.reasons({k: str(v) for k, v in verdicts.items() if v.colour != "green"})
        notes = {k: f"note: {'; '.join(v.notes)}" for k, v in verdicts.items() if v.notes}
        lines += text.reasons(notes)
        lines += text.reasons({name: e.basis for name, e in self.items() if e.basis})
        lines += [
            f"{name}: " + ", ".join(f"{key} = {number:.2g}" for key, number in e.report.items())
            for name, e in self.items()
            if e.report
        ]
        return [text.wrap(line) for line in lines]
