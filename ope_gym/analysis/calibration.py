"""Estimates beside the mean returns they should meet: who agrees, how often, by how much."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ope_gym.report import text
from ope_gym.results import Estimate

_COLOURS = ("green", "amber", "red")


@dataclass(frozen=True, eq=False)
class Check:
    """One policy: the estimate from the others' episodes beside its own.

    Args:
        policy: its number.
        episodes: its own.
        own: mean return of these.
        own_error: standard error of that.
        estimate: from the others' episodes.
        level: of the comparison.
    """

    policy: int
    episodes: int
    own: float
    own_error: float
    estimate: Estimate
    level: float

    @property
    def difference(self) -> float:
        """Estimate minus own mean."""
        return self.estimate.value - self.own

    @property
    def error(self) -> float:
        """Standard error of the difference: the two rest on different episodes."""
        return math.hypot(self._widened, self.own_error)

    @property
    def z(self) -> float:
        """The difference in standard errors; NaN if they are not known."""
        if self.error == 0:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.error

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the difference holds 0; None if it cannot be told."""
        if not math.isfinite(self.error):
            return None
        from scipy.special import stdtrit

        return abs(self.z) <= float(stdtrit(self._freedom, 0.5 + self.level / 2))

    @property
    def covers(self) -> bool | None:
        """Whether the interval of the estimate holds the own mean; None if undefined."""
        ends = self.estimate.interval
        return None if math.isnan(ends.low + ends.high) else self.own in ends

    @property
    def expected_cover(self) -> float:
        """Probability of that if all is well; below the level, for the own mean errs as well."""
        if not math.isfinite(self.error) or self.covers is None:
            return math.nan
        from scipy.special import stdtr

        ends, value = self.estimate.interval, self.estimate.value
        if self.error == 0:
            return 1.0
        above = stdtr(self._freedom, (ends.high - value) / self.error)
        return float(above - stdtr(self._freedom, (ends.low - value) / self.error))

    @property
    def _widened(self) -> float:
        """Plain standard error of the estimate, widened for its ESS; NaN for an ESS of 1."""
        ess = self.estimate.diagnostics.ess
        if not ess > 1.0 + 1e-9:
            return math.nan
        return self.estimate.standard_error * math.sqrt(ess / (ess - 1.0))

    @property
    def _freedom(self) -> float:
        """Degrees of freedom of the difference, by Welch and Satterthwaite."""
        parts = self._widened**2, self.own_error**2
        whole = sum(parts)
        if whole == 0:
            return float(self.episodes - 1)
        shares = [part / whole for part in parts]
        ess = self.estimate.diagnostics.ess
        return 1.0 / (shares[0] ** 2 / (ess - 1.0) + shares[1] ** 2 / (self.episodes - 1.0))


class Calibration(Mapping[int, Check]):
    """The checks of all policies by number; prints as a table."""

    def __init__(
        self, checks: Sequence[Check], skipped: Mapping[int, str], data: str, left_out: int = 0
    ) -> None:
        self._checks = {check.policy: check for check in checks}
        self.skipped = dict(skipped)
        self.data = data
        self._left_out = left_out

    def __getitem__(self, policy: int) -> Check:
        if policy not in self._checks:
            why = self.skipped.get(policy, f"there are {', '.join(map(str, self._checks))}")
            raise KeyError(f"policy {policy} was not checked: {why}")
        return self._checks[policy]

    def __iter__(self) -> Iterator[int]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def agreement(self) -> tuple[int, int]:
        """How many agree, of how many that can be told."""
        told = [check.agrees for check in self.values() if check.agrees is not None]
        return sum(told), len(told)

    @property
    def coverage(self) -> float:
        """Share of the intervals that hold the own mean; NaN without any."""
        covers = [check.covers for check in self.values() if check.covers is not None]
        return float(np.mean(covers)) if covers else math.nan

    @property
    def expected_coverage(self) -> float:
        """What that share would be if all is well, given the errors of the own means."""
        shares = [check.expected_cover for check in self.values() if check.covers is not None]
        return float(np.mean(shares)) if shares else math.nan

    @property
    def rmse(self) -> float:
        """Root mean square of the differences."""
        return _root_mean_square([check.difference for check in self.values()])

    @property
    def expected_rmse(self) -> float:
        """What that would be if all is well: the errors of estimates and own means."""
        return _root_mean_square([check.error for check in self.values()])

    @property
    def colours(self) -> dict[str, tuple[int, int]]:
        """By colour of the verdict: policies, and how many of them agree."""
        counts = Counter(check.estimate.verdict.colour for check in self.values())
        agree = Counter(c.estimate.verdict.colour for c in self.values() if c.agrees)
        return {colour: (counts[colour], agree[colour]) for colour in _COLOURS}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; undefined numbers are None."""
        agree, told = self.agreement
        return {
            "data": self.data,
            "agree": agree,
            "compared": told,
            "coverage": text.finite(self.coverage),
            "expected_coverage": text.finite(self.expected_coverage),
            "rmse": text.finite(self.rmse),
            "expected_rmse": text.finite(self.expected_rmse),
            "verdicts": {k: {"policies": n, "agree": a} for k, (n, a) in self.colours.items()},
            "policies": {
                str(k): {
                    "episodes": c.episodes,
                    "own": c.own,
                    "own_error": c.own_error,
                    "difference": text.finite(c.difference),
                    "z": text.finite(c.z),
                    "agrees": c.agrees,
                    "estimate": c.estimate.to_dict(),
                }
                for k, c in self.items()
            },
            "skipped": {str(k): why for k, why in self.skipped.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        lines = [f"each policy estimated from the episodes of the others; data: {self.data}"]
        if self._checks:
            lines += [*self._table(), *self._summary()]
        else:
            lines.append("no policy could be checked")
        if self._left_out:
            lines.append(
                f"{self._left_out:,} more policies were left out: raise limit to check all"
            )
        for why, names in text.grouped({f"{k}": w for k, w in self.skipped.items()}).items():
            lines.append(text.wrap(f"skipped {', '.join(names)}: {why}"))
        return "\n".join(lines)

    def _table(self) -> list[str]:
        name = next(iter(self.values())).estimate.name
        rows = [
            ["policy", "episodes", "own mean", name, "difference", "z", "ESS", "agrees", "verdict"]
        ]
        for k, c in self.items():
            e = c.estimate
            rows.append(
                [
                    str(k),
                    f"{c.episodes:,}",
                    f"{text.number(c.own, 4)} ± {text.number(c.own_error, 2)}",
                    f"{text.number(e.value, 4)} ± {text.number(e.standard_error, 2)}",
                    text.number(c.difference, 3),
                    "undefined" if math.isnan(c.z) else f"{c.z:+.1f}",
                    f"{e.diagnostics.ess:.1f}",
                    {True: "yes", False: "NO", None: "?"}[c.agrees],
                    e.verdict.colour,
                ]
            )
        return text.align(rows, left=(7, 8))

    def _summary(self) -> list[str]:
        (agree, told), level = self.agreement, next(iter(self.values())).level
        lines = [f"agree: {agree} of {told}; about {level * told:.1f} would if all is well"]
        if told:
            lines.append(
                f"own mean inside the interval: {self.coverage:.0%}; "
                f"{self.expected_coverage:.0%} expected, for own means err as well"
            )
            lines.append(
                f"root mean square difference: {self.rmse:.3g}; {self.expected_rmse:.3g} expected"
            )
        shown = [f"{colour} {n} ({a} agree)" for colour, (n, a) in self.colours.items() if n]
        return [*lines, f"verdicts: {', '.join(shown)}"]


def _root_mean_square(values: Sequence[float]) -> float:
    finite = np.array([value for value in values if math.isfinite(value)])
    return float(np.sqrt(np.mean(finite**2))) if finite.size else math.nan
