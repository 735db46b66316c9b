"""Claims of the paper, what was measured, and whether they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
LIMIT = 3.0  # standard errors within which a difference says nothing


@dataclass(frozen=True)
class Evidence:
    """One measured difference, signed so that the claim says it is positive (or zero).

    Args:
        where: the setting, "N = 50, p = 0.97".
        difference: as measured.
        standard_error: paired, of the difference; 0 if it is exact.
        exact: the difference without simulation, where it can be had; it then decides.
        equal: the claim is that the difference is 0.
        tolerance: of rounding, for what is exact.
        limit: standard errors within which a difference says nothing.
        note: what else to know of this setting.
    """

    where: str
    difference: float
    standard_error: float = 0.0
    exact: float | None = None
    equal: bool = False
    tolerance: float = 0.0
    limit: float = LIMIT
    note: str = ""

    @property
    def verdict(self) -> str:
        """Holds, does not hold, or undecided: beyond `limit` standard errors counts."""
        value = self.difference if self.exact is None else self.exact
        margin = self.limit * self.standard_error if self.exact is None else 0.0
        if math.isnan(value) or math.isnan(margin):
            return UNDECIDED
        if self.equal:
            return HOLDS if abs(value) <= margin + self.tolerance else FAILS
        if margin == 0.0:
            return HOLDS if value >= -self.tolerance else FAILS
        return HOLDS if value > margin else FAILS if value < -margin else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """What the paper says, and what was found.

    Args:
        source: where it says so.
        words: what it says.
        measure: what the differences are, "MSE(BIS) − MSE(NIS)".
        evidence: all of it must hold for the claim to hold.
        why: the explanation, above all where it does not hold.
    """

    source: str
    words: str
    measure: str
    evidence: tuple[Evidence, ...]
    why: str

    @property
    def verdict(self) -> str:
        """Holds if all evidence does; does not hold if any does not."""
        found = {evidence.verdict for evidence in self.evidence}
        return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the verdicts."""
        rows = [{**asdict(evidence), "verdict": evidence.verdict} for evidence in self.evidence]
        return {**asdict(self), "evidence": rows, "verdict": self.verdict}


def mean_and_error(values: Array) -> tuple[float, float]:
    """Mean over runs and its standard error; NaN error for a single run."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def paired(where: str, larger: Array, smaller: Array, *, exact: float | None = None) -> Evidence:
    """Evidence that the mean of `larger` is the larger one, run by run on the same data."""
    difference, error = mean_and_error(larger - smaller)
    return Evidence(where, difference, error, exact)


def agreement(where: str, simulated: Array, exact: Array, errors: Array) -> Evidence:
    """The worst of many comparisons of simulated with exact numbers.

    The largest of m normal values is often beyond 3: the comparison counts as equal up to the limit
    that m independent ones would stay within as often as a single one stays within `LIMIT`.
    """
    from scipy.special import ndtr, ndtri

    gap = np.ravel(simulated - exact)
    error = np.maximum(np.ravel(errors), 1e-12 * max(1e-300, float(np.abs(exact).max())))
    z = gap / error
    worst = int(np.argmax(np.abs(z)))
    single = 2 * ndtr(-LIMIT)
    limit = -float(ndtri(-np.expm1(np.log1p(-single) / z.size) / 2))
    beyond = int(np.count_nonzero(np.abs(z) > LIMIT))
    return Evidence(
        where,
        float(gap[worst]),
        float(error[worst]),
        equal=True,
        limit=limit,
        note=f"the worst of {z.size} comparisons is {abs(z[worst]):.1f} standard errors off, "
        f"{beyond} are beyond {LIMIT:g}; the largest of so many may reach {limit:.1f}",
    )


def claims_table(claims: Sequence[dict[str, Any]]) -> str:
    """Markdown overview of claims as `Claim.to_dict` gives them."""
    lines = ["| claim | where | verdict |", "|---|---|---|"]
    lines += [f"| {c['words']} | {c['source']} | **{c['verdict']}** |" for c in claims]
    return "\n".join(lines)


def claim_section(claim: dict[str, Any]) -> str:
    """Markdown of one claim with its evidence."""
    rows = [
        f"**{claim['verdict'].capitalize()}**: “{claim['words']}” ({claim['source']}).",
        "",
        f"Measured: {claim['measure']}.",
        "",
        "| where | measured | std. error | exact | |",
        "|---|---|---|---|---|",
    ]
    for e in claim["evidence"]:
        exact = "" if e["exact"] is None else number(e["exact"])
        error = "exact" if e["standard_error"] == 0 else number(e["standard_error"])
        said = e["verdict"] + (f"; {e['note']}" if e["note"] else "")
        rows.append(f"| {e['where']} | {number(e['difference'])} | {error} | {exact} | {said} |")
    return "\n".join([*rows, "", claim["why"]])


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table: 3 significant digits, small and large ones with an exponent."""
    if value is None or math.isnan(value):
        return "undefined"
    if value == 0:
        return "0"
    return f"{value:.{digits}g}".replace("-", "−").replace("e−0", "e−")
