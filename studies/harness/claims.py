"""Judge claims: what the paper says, what was measured, and the rules for a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
OURS = ("beyond the paper", "our extension", "check")  # sources other than the paper

LIMIT = 3.0  # a difference of fewer standard errors decides nothing
FEWEST = 30  # fewer runs decide nothing
SAME = 0.05  # relative difference up to which a simulated number counts as equal
TAIL = 0.2  # if one run has a larger share of a sum of squares, their mean decides nothing
CLOSE = 2.0  # ratio of MSEs up to which one is "close to optimal"
ENTRY = 0.1  # relative difference up to which an entry of the paper's tables is right
ROUNDING = 1e-9  # tolerance of exact numbers


@dataclass(frozen=True)
class Evidence:
    """One measured difference, signed so that the claim says it is positive (or zero).

    Args:
        where: the setting, such as "N = 50, p = 0.97".
        difference: the measured difference.
        standard_error: paired standard error of the difference; 0 if it is exact.
        exact: the difference without simulation, if it is known; it then decides.
        equal: whether the claim is that the difference is 0.
        tolerance: rounding error allowed to an exact difference.
        limit: a simulated difference of fewer standard errors decides nothing.
        note: further numbers to print for this setting.
        margin: for a simulated difference that is claimed to be 0: the claim holds if the
            difference and `limit` standard errors stay within the margin. With 0 it can only fail.
        open: why the numbers decide nothing, such as "tail"; empty if they do.
        shown: text to print instead of the difference, such as "376 (at most 2)".
    """

    where: str
    difference: float
    standard_error: float = 0.0
    exact: float | None = None
    equal: bool = False
    tolerance: float = 0.0
    limit: float = LIMIT
    note: str = ""
    margin: float = 0.0
    open: str = ""
    shown: str = ""

    @classmethod
    def same(
        cls,
        where: str,
        difference: float,
        error: float,
        of: float,
        *,
        note: str = "",
        open: str = "",
    ) -> Evidence:
        """Return the evidence that a simulated difference is 0, up to the share `SAME` of `of`."""
        margin = SAME * abs(of)
        return cls(where, difference, error, equal=True, margin=margin, note=note, open=open)

    @property
    def simulated(self) -> bool:
        """Return whether the verdict depends on simulated runs."""
        return self.exact is None and self.standard_error != 0.0

    @property
    def verdict(self) -> str:
        """Return holds, does not hold, or undecided, by `RULES`."""
        value = self.difference if self.exact is None else self.exact
        around = self.limit * self.standard_error if self.simulated else 0.0
        if self.open or math.isnan(value) or math.isnan(around):
            return UNDECIDED
        if not self.simulated:
            wrong = abs(value) > self.tolerance if self.equal else value < -self.tolerance
            return FAILS if wrong else HOLDS
        if self.equal:
            if abs(value) > around:
                return FAILS
            return HOLDS if abs(value) + around <= self.margin else UNDECIDED
        return HOLDS if value > around else FAILS if value < -around else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and the evidence for or against it.

    Args:
        source: the section of the paper, or one of `OURS`.
        words: the statement.
        measure: what was measured, such as "MSE(BIS) − MSE(NIS)".
        evidence: differences that must all hold for the claim to hold.
        why: the explanation, or one for each verdict that has one.
    """

    source: str
    words: str
    measure: str
    evidence: tuple[Evidence, ...]
    why: str | Mapping[str, str]

    @property
    def verdict(self) -> str:
        """Return holds if all evidence does, does not hold if any does not, else undecided."""
        found = {evidence.verdict for evidence in self.evidence}
        return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED

    def with_runs(self, runs: int) -> Claim:
        """Return the claim with simulated evidence left open if there are too few runs."""
        if runs >= FEWEST:
            return self
        few = f"fewer than {FEWEST} runs"
        rows = [dataclasses.replace(e, open=few) if e.simulated else e for e in self.evidence]
        return dataclasses.replace(self, evidence=tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the verdicts, their reasons and the explanation that fits."""
        verdict = self.verdict
        rows = [dataclasses.asdict(e) | {"verdict": e.verdict} for e in self.evidence]
        reasons = [e.open for e in self.evidence if e.open] if verdict == UNDECIDED else []
        why = self.why if isinstance(self.why, str) else self.why.get(verdict, "")
        return {
            "source": self.source,
            "words": self.words,
            "measure": self.measure,
            "evidence": rows,
            "why": why,
            "verdict": verdict,
            "reason": ", ".join(dict.fromkeys(reasons)),
        }


RULES = f"""\
- An exact difference decides, even if there is also a simulated one. A rounding error
  ({ROUNDING:g}) is allowed.
- A simulated difference decides if it is more than {LIMIT:g} standard errors from 0. Standard
  errors are paired, because all estimators see the same data in each run. Fewer than {FEWEST} runs
  decide nothing.
- “Equal” and “unbiased” hold if the difference plus {LIMIT:g} standard errors stays within
  {SAME:.0%} of the number compared with (of the value J, for a bias); they do not hold if the
  difference is more than {LIMIT:g} standard errors from 0. In m comparisons with exact numbers, the
  largest deviation may be as large as that of m normal values. If, for half of the numbers,
  {LIMIT:g} standard errors are more than {ENTRY:.0%} of the number, the simulation is *coarse*, and
  nothing is decided.
- *Tail*: if one run makes up more than {TAIL:.0%} of a sum of squares, means and their standard
  errors depend on outcomes that are too rare to show up in these runs. A bias is then undecided. A
  ranking counts only if the estimator with the larger mean square error also has the larger error
  in most runs, by {LIMIT:g} standard errors. If it is the error claimed to be larger that has the
  tail, this never refutes the claim.
- “Close to optimal” means an MSE of at most {CLOSE:g} times the smallest; an entry of the paper's
  tables is right if it is within {ENTRY:.0%}.
- A claim holds if it holds in every setting, and does not hold if it fails in any of them.
  Otherwise it is undecided."""


def agreement(where: str, simulated: FloatArray, exact: FloatArray, errors: FloatArray) -> Evidence:
    """Return the worst of many comparisons of simulated with exact numbers.

    The largest of m normal values is often beyond 3. The limit is therefore larger than `LIMIT`: m
    independent values stay within it as often as a single one within `LIMIT`. The simulation is too
    coarse to decide if half of the numbers are not known to `ENTRY`.
    """
    from scipy.special import ndtr, ndtri

    gap = np.ravel(simulated - exact)
    error = np.maximum(np.ravel(errors), 1e-12 * max(1e-300, float(np.abs(exact).max())))
    z = gap / error
    worst = int(np.argmax(np.abs(z)))
    single = 2 * ndtr(-LIMIT)
    limit = -float(ndtri(-np.expm1(np.log1p(-single) / z.size) / 2))
    beyond = int(np.count_nonzero(np.abs(z) > LIMIT))
    size = np.ravel(np.abs(exact))
    coarse = float(np.median(LIMIT * error / np.where(size > 0, size, error)))
    return Evidence(
        where,
        float(gap[worst]),
        float(error[worst]),
        equal=True,
        limit=limit,
        margin=math.inf,
        open="" if coarse <= ENTRY else "coarse",
        note=f"the worst of {z.size} comparisons is {abs(z[worst]):.1f} standard errors off, "
        f"{beyond} are beyond {LIMIT:g}; the largest of so many may reach {limit:.1f}; half of "
        f"them are known to {coarse:.1%} or better",
    )
