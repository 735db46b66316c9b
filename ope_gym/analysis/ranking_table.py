"""Hold and print a ranking: policies from best to worst, their differences and probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import finite
from ope_gym.inference.estimate import Difference, Estimate, Sample, regime_label
from ope_gym.report import text
from ope_gym.verdict import Reason, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIKELY = 0.5  # probability from which the best policy is more likely than all others together


@dataclass(frozen=True, eq=False)
class Ranked:
    """Hold one policy of a ranking.

    Args:
        name: name of the policy.
        estimate: its value, error, interval, diagnostics and verdict.
        difference: paired difference to the best, this minus best; None for the best itself.
        probability_best: probability that it is the best of all; NaN if its error is
            unknown.
    """

    name: str
    estimate: Estimate
    difference: Difference | None
    probability_best: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined numbers are None."""
        d, mixture = self.difference, self.estimate.sample.mixture
        return {
            **self.estimate.to_dict(),
            "mixture": dataclasses.asdict(mixture) if mixture else None,
            "probability_best": finite(self.probability_best),
            "to_best": d
            and {
                "value": finite(d.value),
                "standard_error": finite(d.standard_error),
                "low": finite(d.interval.low),
                "high": finite(d.interval.high),
            },
        }


class Ranking(Mapping[str, Ranked]):
    """Map the names of policies to their places, from best to worst; prints as a table."""

    words = (0, 7, 8)  # columns of the table that hold words

    def __init__(self, ranked: Sequence[Ranked]) -> None:
        self._ranked = {r.name: r for r in ranked}

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
        """Return the policy with the largest estimate."""
        return next(iter(self.values()))

    @property
    def headline(self) -> str:
        """Return the answer in words: which policy is best, how sure that is, and its value."""
        best, size = self.best, len(self)
        chance, who = best.probability_best, text.sentence(best.name)
        if size == 1 or not np.isfinite(best.estimate.value):
            return text.headline(best.estimate, best.name)
        if np.isnan(chance):
            place = f"has the largest estimate of {size:,}; how sure that is cannot be known."
        elif chance < LIKELY:
            place = f"has the largest estimate of {size:,}, but {self._doubt}."
        else:
            likely = "" if chance > 0.95 else "probably "
            place = f"is {likely}the best of {size:,}: P(best) {text.chance(chance)}."
        return f"{who} {place} {text.headline(best.estimate, 'it')}"

    @property
    def safest(self) -> Ranked:
        """Return the cautious choice: the policy whose interval has the highest lower end."""
        lows = [r.estimate.decisive.interval.low for r in self.values()]
        return list(self.values())[int(np.argmax(np.nan_to_num(lows, nan=-np.inf)))]

    @property
    def verdict(self) -> Verdict:
        """Whether to trust the choice: the value of the best policy, and its place."""
        best, reasons = self.best, self._notes()
        if len(self) > 1 and np.isnan(best.probability_best):
            reasons.append(Reason("best_unknown"))
        elif best.probability_best < LIKELY:
            reasons.append(self._doubt)
        of_best = best.estimate.verdict
        return Verdict.of([*of_best.reasons, *of_best.advice, *of_best.notes, *reasons])

    @property
    def _doubt(self) -> Reason:
        return Reason("best_doubtful", chance=self.best.probability_best)

    def _notes(self) -> list[Reason]:
        """Return what a careful reader should know of the places."""
        notes = []
        if self.safest is not self.best:
            low = self.safest.estimate.decisive.interval.low
            notes.append(Reason("safest", policy=self.safest.name, low=low))
        if any(r.estimate.verdict.colour == "red" for r in self.values()):
            notes.append(Reason("chances_rough"))
        unknown = tuple(r.name for r in self.values() if np.isnan(r.probability_best))
        if unknown:
            notes.append(Reason("chances_partial", unknown=unknown))
        return notes

    @property
    def sample(self) -> Sample:
        """Return the sample of the best policy; the regimes of the others may differ."""
        return self.best.estimate.sample

    def difference(self, minuend: str, subtrahend: str) -> Difference:
        """Return the paired difference of two of the policies."""
        gap = self[minuend].estimate.difference(self[subtrahend].estimate)
        return dataclasses.replace(gap, minuend=minuend, subtrahend=subtrahend)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined numbers are None."""
        return {
            "headline": self.headline,
            **self.sample.to_dict(),
            "best": self.best.name,
            "safest": self.safest.name,
            "verdict": self.verdict.to_dict(),
            "policies": {name: r.to_dict() for name, r in self.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(), path)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row for each policy, best first; needs pandas."""
        rows = []
        for name, r in self.items():
            e, d = r.estimate, r.difference
            rows.append(
                {
                    "policy": name,
                    "value": e.value,
                    "standard_error": e.standard_error,
                    "low": e.interval.low,
                    "high": e.interval.high,
                    "to_best": d.value if d else 0.0,
                    "to_best_error": d.standard_error if d else 0.0,
                    "probability_best": r.probability_best,
                    "ess": e.diagnostics.ess,
                    "verdict": e.verdict.colour,
                    "regime": regime_label(e.sample.regime),
                }
            )
        return text.to_frame(rows)

    def plot(self, *, limit: int = 30) -> Figure:
        """Draw values with their intervals, and the probabilities of being best.

        Args:
            limit: how many policies to draw; a line says how many others there are.
        """
        from ope_gym.report.figures import ranking_figure

        estimates = {name: r.estimate for name, r in self.items()}
        return ranking_figure(estimates, [r.probability_best for r in self.values()], limit=limit)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={r.estimate.value:.6g}" for name, r in self.items())
        return f"Ranking({values})"

    def __str__(self) -> str:
        return self.table()

    def table(self, *, verbose: bool = False) -> str:
        """Return the answer in words, and a table of the policies with what speaks against them.

        Args:
            verbose: whether to add the advice for each policy and the kind of the intervals.
        """
        lines = [text.wrap(self.headline, ""), "", self._head()]
        lines += [*text.align(self.rows(verbose), self.words)]
        return "\n".join([*lines, *map(text.wrap, self._remarks(verbose))])

    @property
    def _regimes(self) -> list[str]:
        return [regime_label(r.estimate.sample.regime) for r in self.values()]

    def _head(self) -> str:
        """Return the line above the table."""
        sample, regimes = self.sample, self._regimes
        data = f"; data: {regimes[0]}" if len(set(regimes)) == 1 else ""
        return (
            f"{text.count(len(self), 'policy', 'policies')} by {self.best.estimate.name}, from "
            f"{sample.trajectories:,} episodes of {text.actors(sample)}, gamma "
            f"{sample.gamma:g}{data}"
        )

    def rows(self, verbose: bool = False) -> list[list[str]]:
        """Return the cells of the table; the regimes only where they differ."""
        ends = text.ends_head(self.best.estimate, verbose)
        rows = [["policy", "value", "std.err", ends, "to the best", "P(best)", "ESS", "verdict"]]
        for r in self.values():
            e, d = r.estimate, r.difference
            rows.append(
                [
                    r.name,
                    *text.estimate_cells(e, self.best.estimate),
                    text.plus_minus(d.value, d.standard_error) if d else "best",
                    text.chance(r.probability_best),
                    text.episodes(e.diagnostics.ess),
                    e.verdict.colour,
                ]
            )
        regimes = self._regimes
        if len(set(regimes)) > 1:
            for row, regime in zip(rows, ["data", *regimes], strict=True):
                row.append(regime)
        return rows

    def _remarks(self, verbose: bool = False) -> list[str]:
        """Return what the table cannot show: reasons, partial mixtures, the cautious choice."""
        verdicts = {r.name: r.estimate.verdict for r in self.values()}
        mixtures = {r.name: r.estimate.sample.mixture for r in self.values()}
        remarks = text.remarks(verdicts, verbose)
        remarks += text.itemised({name: [part] if part else [] for name, part in mixtures.items()})
        return remarks + [str(note) for note in self._notes()]
