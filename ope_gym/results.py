"""Hold the results of several estimators: an `Evaluation`, and `Differences` of two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ope_gym.arguments import instance, real, refusal
from ope_gym.estimators.table import ALIASES, ESTIMATORS, RECOMMENDED, by_recommendation
from ope_gym.inference.estimate import Difference, Estimate, Sample, regime_label
from ope_gym.report import html, text
from ope_gym.verdict import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ALIKE = 1.25  # of an error: what 1.5 times as many episodes would gain


class Differences(dict[str, Difference]):
    """Hold the differences of two targets by estimator; prints a line each."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {d.value:.5g} ± {d.standard_error:.2g}, "
            f"{100 * d.interval.level:g} % ({d.interval.method}) "
            f"{text.interval(d.interval.low, d.interval.high)}"
            for name, d in self.items()
        )


class Evaluation(Mapping[str, Estimate]):
    """Map the names of estimators to their estimates of one policy's value; prints as a table.

    Its order is the one in which they were asked for; a table shows the recommended ones first.

    Args:
        estimates: Estimates by estimator.
        target: name of the policy, such as "policy 10"; empty if it has none.
    """

    def __init__(self, estimates: Mapping[str, Estimate], target: str = "") -> None:
        self._estimates = dict(estimates)
        self.target = target

    def __getitem__(self, name: str) -> Estimate:
        name = ALIASES.get(name, name)
        if name not in self._estimates:
            raise KeyError(f"{name!r} was not evaluated; there are {', '.join(self._estimates)}")
        return self._estimates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._estimates)

    def __len__(self) -> int:
        return len(self._estimates)

    @property
    def best(self) -> Estimate:
        """Return the recommended estimate: auto, else NFIS, else the most reliable of the others.

        NFIS comes before auto where its colour is better, the two agree and their errors are about
        the same: then the model adds nothing but its assumptions.

        Of the others it is the first green one, or without any the first amber one, in the order of
        `ope_gym.estimators.table.by_recommendation`. One that rests on a model alone comes after
        all that have weights: its colour cannot show that the model is wrong.
        """
        order = by_recommendation(self)
        if order[0] not in RECOMMENDED and len(order) > 1:
            order.sort(key=lambda name: COLOURS.index(self[name].verdict.colour))
            order.sort(key=lambda name: name in ESTIMATORS and not ESTIMATORS[name].scheme)
        if tuple(order[:2]) == RECOMMENDED and self._as_good(*(self[n] for n in RECOMMENDED)):
            return self[order[1]]
        return self[order[0]]

    @staticmethod
    def _as_good(first: Estimate, second: Estimate) -> bool:
        """Tell whether the second says the same as the first, as exactly, and with less doubt."""
        colours = [COLOURS.index(e.verdict.colour) for e in (first, second)]
        apart = abs(first.value - second.value)
        codes = {reason.code for reason in first.verdict.reasons}
        return bool(
            colours[1] < colours[0]
            and "actions_unknown" not in codes  # which are a guess of both
            and apart <= first.standard_error
            and second.standard_error <= _ALIKE * first.standard_error
        )

    def ranked(self) -> dict[str, Estimate]:
        """Return the estimates with the recommended ones first, as a table shows them."""
        front = [name for name in (self.best.name, *RECOMMENDED) if name in self._estimates]
        return {name: self[name] for name in dict.fromkeys([*front, *self])}

    @property
    def headline(self) -> str:
        """Return the answer in words: what the policy is worth, how sure, and whether to use it."""
        return text.headline(self.best, self.target or "the policy")

    def named(self, target: str) -> Evaluation:
        """Return the same estimates under a name of the policy, such as "policy 10"."""
        return Evaluation(self._estimates, target)

    def select(self, names: Iterable[str]) -> Evaluation:
        """Return the estimates of these estimators, as far as they are there; all if none is."""
        known = "give names of estimators, such as ['auto', 'NFIS']"
        if isinstance(names, str):
            raise refusal("names", names, known)
        wanted = {ALIASES.get(name, name) for name in instance("names", names, Iterable, known)}
        chosen = {name: e for name, e in self.items() if name in wanted}
        return Evaluation(chosen or self._estimates, self.target)

    @property
    def sample(self) -> Sample:
        """Return the sample that all estimates rest on."""
        return next(iter(self._estimates.values())).sample

    def difference(self, other: Evaluation) -> Differences:
        """Return the paired differences self - other by estimator: which target is better."""
        instance("other", other, Evaluation, "give the evaluation of another target")
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
            "headline": self.headline,
            "target": self.target or None,
            "best": self.best.name,
            **sample.to_dict(),
            "regime": regime_label(sample.regime),
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
                    "fresh_episodes": e.fresh_episodes,
                    "max_share": e.diagnostics.max_share,
                    "mean_weight": e.diagnostics.mean_weight,
                    "verdict": e.verdict.colour,
                    "regime": regime_label(e.sample.regime),
                }
                for name, e in self.items()
            ]
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html.notebook(self.ranked(), self.headline)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={estimate.value:.6g}" for name, estimate in self.items())
        return f"Evaluation({values})"

    def __str__(self) -> str:
        return self.table()

    def table(
        self, truth: float | None = None, truth_error: float = 0.0, *, verbose: bool = False
    ) -> str:
        """Return the answer in words, and a table of the estimates with what speaks against them.

        Args:
            truth: the value, if it is known from elsewhere; adds the distance to it in standard
                errors.
            truth_error: standard error of the truth.
            verbose: whether to add notes, the advice for each estimator, the kind of the intervals
                and numbers of the estimators' own.
        """
        head = ["estimator", "value", "std.err", text.ends_head(self.best, verbose)]
        rows = [[*head, "ESS", "fresh episodes", "verdict"]]
        rows += [
            [
                name,
                *text.estimate_cells(e, self.best),
                text.episodes(e.diagnostics.ess),
                text.episodes(e.fresh_episodes),
                e.verdict.colour,
            ]
            for name, e in self.ranked().items()
        ]
        if truth is not None:
            truth = real("truth", truth, "give a finite value, or None if it is unknown")
            truth_error = real("truth_error", truth_error, "give its standard error")
            rows[0].append("from truth")
            for row, e in zip(rows[1:], self.ranked().values(), strict=True):
                off, error = e.value - truth, math.hypot(e.standard_error, truth_error)
                distance = off / error if error else math.copysign(math.inf, off) if off else 0.0
                row.append("undefined" if math.isnan(distance) else f"{distance:+.1f} se")
        if self.best.interval.method == "none":  # the values alone
            rows = [[*row[:2], row[4], *row[6:]] for row in rows]
        left = (0, rows[0].index("verdict"))
        lines = [text.wrap(self.headline, ""), "", *self._head(), *text.align(rows, left=left)]
        return "\n".join([*lines, *(text.wrap(line) for line in self._remarks(verbose))])

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
        head = f"{text.size(sample)}, gamma {sample.gamma:g}; data: {regime_label(sample.regime)}"
        if sample.q_model is not None:
            head += f"; q model: {sample.q_model}"
        if sample.propensities:
            head += f"; propensities: {sample.propensities}"
        return [head, *([str(sample.mixture)] if sample.mixture else [])]

    def _remarks(self, verbose: bool) -> list[str]:
        """Return why results are not green, what would help, and what they rest on."""
        shown = self.ranked()
        judged = {name: e.verdict for name, e in shown.items()}
        lines = text.remarks(judged, verbose) + text.bases(judged)
        if verbose:
            notes = {k: [n for n in v.notes if n.effect == "note"] for k, v in judged.items()}
            lines += text.itemised({k: [f"note: {n}" for n in v] for k, v in notes.items()})
            lines += [
                f"{name}: " + ", ".join(f"{key} = {number:.2g}" for key, number in e.report.items())
                for name, e in shown.items()
                if e.report
            ]
        return lines
