"""The result of a ranking: policies from best to worst, with differences and probabilities."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.analysis.best import DRAWS, probability_best
from ope_gym.arrays import FloatArray
from ope_gym.inference.regimes import label
from ope_gym.report import text
from ope_gym.results import Difference, Estimate, Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Ranked:
    """One policy of a ranking.

    Args:
        name: of the policy.
        estimate: its value, error, interval, diagnostics and verdict.
        difference: paired difference to the best, this minus best; None for the best itself.
        probability_best: that it is the best of those ranked; NaN if its error is unknown.
    """

    name: str
    estimate: Estimate
    difference: Difference | None
    probability_best: float


@dataclass(frozen=True, eq=False)
class Pairwise:
    """Paired differences of all policies, row minus column; (P, P) each.

    Args:
        names: (P,) best first.
        values: differences of the estimates.
        standard_errors: of the differences.
        low: lower ends of their intervals.
        high: upper ends.
        level: of each interval by itself, not of all together.
    """

    names: tuple[str, ...]
    values: FloatArray
    standard_errors: FloatArray
    low: FloatArray
    high: FloatArray
    level: float

    def __str__(self) -> str:
        rows = [["row - column", *self.names]]
        for i, name in enumerate(self.names):
            clear = (self.low[i] > 0) | (self.high[i] < 0)
            cells = [
                ""
                if i == j
                else f"{text.number(self.values[i, j], 3)} ± "
                f"{text.number(self.standard_errors[i, j], 2)}{'*' if clear[j] else ' '}"
                for j in range(len(self.names))
            ]
            rows.append([name, *cells])
        note = f"* the {self.level:.0%} interval of this difference by itself does not hold 0"
        return "\n".join([*text.align(rows), note])


class Ranking(Mapping[str, Ranked]):
    """Policies from best to worst by their estimated values; prints as a table."""

    def __init__(self, ranked: Sequence[Ranked]) -> None:
        self._ranked = {r.name: r for r in ranked}

    @classmethod
    def of(cls, estimates: Mapping[str, Estimate], *, draws: int = DRAWS, seed: int = 0) -> Ranking:
        """Rank estimates of one estimator on the same trajectories; undefined ones come last."""
        values = {name: e.value for name, e in estimates.items()}
        order = sorted(
            values, key=lambda name: -values[name] if np.isfinite(values[name]) else np.inf
        )
        chances = probability_best([estimates[name] for name in order], draws=draws, seed=seed)
        best = order[0]
        return cls(
            [
                Ranked(
                    name,
                    estimates[name],
                    None if name == best else _difference(estimates, name, best),
                    float(chance),
                )
                for name, chance in zip(order, chances, strict=True)
            ]
        )

    def __getitem__(self, name: str) -> Ranked:
        if name not in self._ranked:
            raise KeyError(f"{name!r} was not ranked; there are {', '.join(self._ranked)}")
        return self._ranked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranked)

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def best(self) -> Ranked:
        """The policy of the largest estimate."""
        return next(iter(self.values()))

    @property
    def safest(self) -> Ranked:
        """The policy whose interval has the highest lower end: the cautious choice."""
        lows = [r.estimate.interval.low for r in self.values()]
        return list(self.values())[int(np.argmax(np.nan_to_num(lows, nan=-np.inf)))]

    @property
    def sample(self) -> Sample:
        """The trajectories; its regime is that of the best policy."""
        return self.best.estimate.sample

    def difference(self, minuend: str, subtrahend: str) -> Difference:
        """Paired difference of two of the policies."""
        pair = {name: self[name].estimate for name in (minuend, subtrahend)}
        return _difference(pair, minuend, subtrahend)

    def differences(self) -> Pairwise:
        """Paired differences of every two policies."""
        names, size = tuple(self), len(self)
        numbers = np.zeros((4, size, size))
        for i, row in enumerate(names):
            for j, column in enumerate(names[:i]):
                d = self.difference(row, column)
                numbers[:, i, j] = d.value, d.standard_error, d.interval.low, d.interval.high
                numbers[:, j, i] = -d.value, d.standard_error, -d.interval.high, -d.interval.low
        values, errors, low, high = numbers
        return Pairwise(names, values, errors, low, high, self.best.estimate.interval.level)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; undefined numbers are None."""
        sample = self.sample
        return {
            "trajectories": sample.trajectories,
            "steps": sample.steps,
            "behaviours": dict(zip(sample.behaviours, sample.counts.tolist(), strict=True)),
            "gamma": sample.gamma,
            "best": self.best.name,
            "safest": self.safest.name,
            "policies": {name: _as_dict(r) for name, r in self.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row a policy, the best first; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas: pip install pandas, or use to_dict"
            ) from error
        rows = [
            {
                "policy": name,
                "value": r.estimate.value,
                "standard_error": r.estimate.standard_error,
                "low": r.estimate.interval.low,
                "high": r.estimate.interval.high,
                "to_best": r.difference.value if r.difference else 0.0,
                "to_best_error": r.difference.standard_error if r.difference else 0.0,
                "probability_best": r.probability_best,
                "ess": r.estimate.diagnostics.ess,
                "verdict": r.estimate.verdict.colour,
                "regime": label(r.estimate.sample.regime),
            }
            for name, r in self.items()
        ]
        return pandas.DataFrame(rows).set_index("policy")

    def plot(self) -> Figure:
        """Values with their intervals, and the probabilities of being best, as a figure."""
        from ope_gym.report.ranking_figures import ranking_figure

        return ranking_figure(self)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={r.estimate.value:.6g}" for name, r in self.items())
        return f"Ranking({values})"

    def __str__(self) -> str:
        head, rows, reasons = self._parts()
        return "\n".join([head, *text.align(rows, _LEFT), *map(text.wrap, reasons)])

    def markdown(self) -> str:
        """The table in Markdown, with the reasons of the verdicts."""
        head, rows, reasons = self._parts()
        listed = [f"- {reason}" for reason in reasons]
        return "\n".join([f"{head}.", "", *text.markdown(rows, _LEFT), "", *listed])

    def _parts(self) -> tuple[str, list[list[str]], list[str]]:
        """Head, rows and remarks of the table."""
        sample, first = self.sample, self.best.estimate
        regimes = [label(r.estimate.sample.regime) for r in self.values()]
        behaviours = np.count_nonzero(sample.counts)
        head = (
            f"{_count(len(self), 'policy', 'policies')} by {first.name}, from "
            f"{sample.trajectories:,} episodes of {_count(int(behaviours), 'behaviour')}, gamma "
            f"{sample.gamma:g}" + (f"; data: {regimes[0]}" if len(set(regimes)) == 1 else "")
        )
        interval = f"{first.interval.level:.0%} interval ({first.interval.method})"
        rows = [
            ["policy", "value", "std.err", interval, "to the best", "P(best)", "ESS", "verdict"]
        ]
        for r in self.values():
            e, d = r.estimate, r.difference
            rows.append(
                [
                    r.name,
                    text.number(e.value),
                    text.number(e.standard_error, 3),
                    f"[{text.number(e.interval.low, 4)}, {text.number(e.interval.high, 4)}]",
                    "best"
                    if d is None
                    else f"{text.number(d.value, 3)} ± {text.number(d.standard_error, 2)}",
                    text.chance(r.probability_best),
                    f"{e.diagnostics.ess:.1f}",
                    e.verdict.colour,
                ]
            )
        if len(set(regimes)) > 1:
            for row, regime in zip(rows, ["data", *regimes], strict=True):
                row.append(regime)
        return head, rows, self._remarks()

    def _remarks(self) -> list[str]:
        verdicts = {r.name: r.estimate.verdict for r in self.values()}
        reasons = text.grouped({k: str(v) for k, v in verdicts.items() if v.colour != "green"})
        remarks = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        notes = {r.name: r.estimate.sample.mixture for r in self.values()}
        parted = text.grouped({name: str(note) for name, note in notes.items() if note})
        remarks += [f"{', '.join(names)}: {note}" for note, names in parted.items()]
        if self.safest is not self.best:
            low = self.safest.estimate.interval.low
            remarks.append(
                f"cautious choice: {self.safest.name}, whose interval has the highest lower end, "
                f"{text.number(low, 4)}"
            )
        if any(v.colour == "red" for v in verdicts.values()):
            remarks.append("P(best) is rough where verdicts are red")
        left_out = [r.name for r in self.values() if np.isnan(r.probability_best)]
        if left_out:
            remarks.append(f"P(best) leaves out {', '.join(left_out)}: the error is not known")
        return remarks


_LEFT = (0, 7, 8)  # columns of the table that hold words


def _difference(estimates: Mapping[str, Estimate], minuend: str, subtrahend: str) -> Difference:
    difference = estimates[minuend].difference(estimates[subtrahend])
    return dataclasses.replace(difference, minuend=minuend, subtrahend=subtrahend)


def _as_dict(ranked: Ranked) -> dict[str, Any]:
    d = ranked.difference
    return {
        **ranked.estimate.to_dict(),
        "mixture": None
        if (part := ranked.estimate.sample.mixture) is None
        else dataclasses.asdict(part),
        "probability_best": text.finite(ranked.probability_best),
        "to_best": None
        if d is None
        else {
            "value": text.finite(d.value),
            "standard_error": text.finite(d.standard_error),
            "low": text.finite(d.interval.low),
            "high": text.finite(d.interval.high),
        },
    }


def _count(size: int, one: str, many: str = "") -> str:
    return f"{size:,} {one if size == 1 else many or one + 's'}"
