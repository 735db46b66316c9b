"""Check estimates: estimate each recorded policy without its own episodes and compare.

The mean return of a policy's own episodes is a fair measure of its value, and the estimate from the
others' episodes does not use them: where the two disagree by more than both errors allow, the
weights cannot be trusted that far. No environment is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arguments import instance, whole
from ope_gym.arrays import IntArray, evenly, finite
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import one_estimator
from ope_gym.evaluation import Evaluator
from ope_gym.inference.estimate import Estimate
from ope_gym.options import (
    Options,
    OptionValues,
)
from ope_gym.policies import EstimatedPolicy, UnavailablePolicy
from ope_gym.policies.estimated import logger_name
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, Source, load_source
from ope_gym.verdict import COLOURS, Reason
from ope_gym.weights.behaviours import behaviours_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def leave_one_policy_out(
    episodes: Episodes,
    estimator: str = "auto",
    *,
    policies: Sequence[int | str] | None = None,
    limit: int = 24,
    **options: Unpack[OptionValues],
) -> Calibration:
    """Estimate each recorded policy from the others' episodes and compare with its own returns.

    Held-out episodes make a clean check. With the others, a policy is estimated from episodes that
    it learned from, so the estimates of later policies are too high, just as they are in real use.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`; they are read into memory.
        estimator: a name of `ope_gym.ESTIMATORS`.
        policies: numbers of those to check, or "last"; by default all that recorded episodes.
        limit: if there are more policies than this, only this many are checked, evenly spread; each
            takes about as long as an evaluation.
        options: those of `ope_gym.Options`: `held_out`, `q_model`, `gamma`, `interval`, `level`,
            `weighting`, `compute`, `seed`.

    Returns:
        A mapping from the number of a policy to its `Check`; print it for a table.
    """
    whole("limit", limit, expected="check at least 1 policy")
    estimator = one_estimator(estimator)
    checked = Options(**options)
    checked.refuse_value_alone("leave_one_policy_out")
    if checked.kind.name == "betting":
        raise ValueError("interval='betting' has no standard error to compare by; take 'ess-t'")
    source = load_source(episodes, checked.held_out)
    used = source.data
    assert used is not None  # all of it is in memory
    progress = checked.compute.progress or (lambda _: None)  # counts policies here, not steps
    options["compute"] = dataclasses.replace(checked.compute, progress=None)
    options["held_out"] = False  # chosen already
    own = own_episodes(used)
    if policies is not None:
        instance("policies", policies, Sequence, "give a list of numbers of policies")
    wanted = list(own) if policies is None else [_number(source, k) for k in policies]
    skipped = {k: why for k in wanted if (why := _unfit(used, own, k))}
    chosen = [k for k in wanted if k not in skipped]
    left_out = max(0, len(chosen) - limit)
    checks = []
    for k in (chosen[i] for i in evenly(len(chosen), limit)):
        others = np.setdiff1d(np.arange(len(used)), own[k])
        evaluator = Evaluator(used.select(episodes=others), estimator, **options)
        estimate = evaluator.evaluate(used.policies[k])[estimator]
        returns = used.returns(checked.gamma)[own[k]]
        error = float(returns.std(ddof=1) / math.sqrt(returns.size))
        mean = float(returns.mean())
        name = logger_name(used.policies[k])
        checks.append(Check(k, returns.size, mean, error, estimate, checked.level, name))
        progress(1)
    data = "held-out" if used.held_out.all() else "all"
    return Calibration(checks, skipped, data, left_out)


def own_episodes(data: Trajectories) -> dict[int, IntArray]:
    """Return for each policy that acted the episodes that it would have played to any end.

    Where the policy may change during episodes none counts, not even one that ended before the
    change: episodes that end early are not a fair sample of all. Where propensities were
    estimated, the first of a logger's models stands for it, with all episodes of the logger.
    """
    behaviours = behaviours_of(data)
    first: dict[int, int] = {}  # model of each logger
    stands = {}
    for k in map(int, behaviours.policies):
        policy = data.policies[k]
        stands[k] = k
        if isinstance(policy, EstimatedPolicy):
            stands[k] = first.setdefault(policy.logger, k)
    plays = [stands[plan[0][1]] if len(plan) == 1 else -1 for plan in behaviours.plans]
    player = np.array(plays, dtype=np.int64)[behaviours.ids]  # of each episode
    return {k: np.flatnonzero(player == k) for k in dict.fromkeys(stands.values())}


def _unfit(data: Trajectories, own: Mapping[int, IntArray], k: int) -> Reason | None:
    """Return why a policy cannot be checked; None if it can."""
    policy = data.policies[k]
    if isinstance(policy, UnavailablePolicy):
        return Reason("unavailable", remedy=policy.remedy)
    count = own[k].size if k in own else 0
    if count < 2:
        return Reason("few_own")
    if count == len(data):
        return Reason("no_others")
    return None


def _number(source: Source, policy: int | str) -> int:
    """Return the number of a policy to check."""
    number = source.number(policy, "policies")
    if number is None:
        raise TypeError(
            f"policies has {policy!r}; give the numbers of recorded policies, or 'last'"
        )
    return number


@dataclass(frozen=True, eq=False)
class Check:
    """Compare the estimate of one policy from the others' episodes with its own returns.

    Args:
        policy: its number.
        episodes: number of its own episodes.
        own: mean return of these.
        own_error: standard error of that mean.
        estimate: estimate from the others' episodes.
        level: confidence level of the comparison.
        name: name of the logger, where propensities were estimated.
    """

    policy: int
    episodes: int
    own: float
    own_error: float
    estimate: Estimate
    level: float
    name: str = ""

    @property
    def difference(self) -> float:
        """Return the estimate minus the own mean."""
        return self.estimate.value - self.own

    @property
    def error(self) -> float:
        """Return the standard error of the difference: the two rest on different episodes."""
        return math.hypot(self._widened, self.own_error)

    @property
    def z(self) -> float:
        """Return the difference in standard errors; NaN if they are not known."""
        if self.error == 0:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.error

    @property
    def agrees(self) -> bool | None:
        """Tell whether the interval of the difference holds 0; None if that is not known."""
        if not math.isfinite(self.error):
            return None
        from scipy.special import stdtrit

        return abs(self.z) <= float(stdtrit(self._freedom, 0.5 + self.level / 2))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        return {
            "logger": self.name or None,
            "episodes": self.episodes,
            "own": self.own,
            "own_error": self.own_error,
            "difference": finite(self.difference),
            "z": finite(self.z),
            "agrees": self.agrees,
            "estimate": self.estimate.to_dict(),
        }

    @property
    def _widened(self) -> float:
        """Return the standard error of the estimate, widened for its ESS; NaN for an ESS of 1."""
        ess = self.estimate.diagnostics.ess
        if not ess > 1.0 + 1e-9:
            return math.nan
        return self.estimate.standard_error * math.sqrt(ess / (ess - 1.0))

    @property
    def _freedom(self) -> float:
        """Return the degrees of freedom of the difference, by Welch and Satterthwaite."""
        parts = self._widened**2, self.own_error**2
        whole = sum(parts)
        if whole == 0:
            return float(self.episodes - 1)
        shares = [part / whole for part in parts]
        ess = self.estimate.diagnostics.ess
        return 1.0 / (shares[0] ** 2 / (ess - 1.0) + shares[1] ** 2 / (self.episodes - 1.0))


class Calibration(Mapping[int, Check]):
    """Map the numbers of policies to their checks; prints as a table.

    Args:
        checks: one for each policy.
        skipped: reasons why other policies could not be checked, by number.
        data: "held-out" or "all".
        left_out: number of policies beyond the limit.
    """

    def __init__(
        self, checks: Sequence[Check], skipped: Mapping[int, Reason], data: str, left_out: int = 0
    ) -> None:
        self._checks = {check.policy: check for check in checks}
        self.skipped = dict(skipped)
        self.data = data
        self._left_out = left_out

    def __getitem__(self, policy: int) -> Check:
        if policy not in self._checks:
            why = self.skipped.get(policy) or f"there are {', '.join(map(str, self._checks))}"
            raise KeyError(f"policy {policy} was not checked: {why}")
        return self._checks[policy]

    def __iter__(self) -> Iterator[int]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def agreement(self) -> tuple[int, int]:
        """Return how many policies agree, and how many could be compared."""
        told = [check.agrees for check in self.values() if check.agrees is not None]
        return sum(told), len(told)

    @property
    def rmse(self) -> float:
        """Return the root mean square of the differences."""
        return _root_mean_square([check.difference for check in self.values()])

    @property
    def expected_rmse(self) -> float:
        """Return the root mean square to expect from the errors of estimates and own means."""
        return _root_mean_square([check.error for check in self.values()])

    @property
    def colours(self) -> dict[str, tuple[int, int]]:
        """Return by colour of the verdict how many policies have it, and how many of them agree."""
        counts = Counter(check.estimate.verdict.colour for check in self.values())
        agree = Counter(c.estimate.verdict.colour for c in self.values() if c.agrees)
        return {colour: (counts[colour], agree[colour]) for colour in COLOURS}

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        agree, told = self.agreement
        return {
            "data": self.data,
            "agree": agree,
            "compared": told,
            "rmse": finite(self.rmse),
            "expected_rmse": finite(self.expected_rmse),
            "verdicts": {k: {"policies": n, "agree": a} for k, (n, a) in self.colours.items()},
            "policies": {str(k): c.to_dict() for k, c in self.items()},
            "skipped": {str(k): why.to_dict() for k, why in self.skipped.items()},
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(), path)

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
        for why, names in text.grouped({f"{k}": str(w) for k, w in self.skipped.items()}).items():
            lines.append(text.wrap(f"skipped {', '.join(names)}: {why}"))
        return "\n".join(lines)

    def _table(self) -> list[str]:
        name = next(iter(self.values())).estimate.name
        return text.table(
            self.values(),
            {
                "policy": lambda c: c.name or str(c.policy),
                "episodes": lambda c: f"{c.episodes:,}",
                "own mean": lambda c: text.plus_minus(c.own, c.own_error, 4),
                name: lambda c: text.plus_minus(c.estimate.value, c.estimate.standard_error, 4),
                "difference": lambda c: text.number(c.difference, 3),
                "z": lambda c: "undefined" if math.isnan(c.z) else f"{c.z:+.1f}",
                "ESS": lambda c: f"{c.estimate.diagnostics.ess:.1f}",
                "agrees": lambda c: {True: "yes", False: "NO", None: "?"}[c.agrees],
                "verdict": lambda c: c.estimate.verdict.colour,
            },
            left=(7, 8),
        )

    def _summary(self) -> list[str]:
        (agree, told), level = self.agreement, next(iter(self.values())).level
        lines = [f"agree: {agree} of {told}; about {level * told:.1f} would if all is well"]
        if told:
            lines.append(
                f"root mean square difference: {self.rmse:.3g}; {self.expected_rmse:.3g} expected"
            )
        shown = [f"{colour} {n} ({a} agree)" for colour, (n, a) in self.colours.items() if n]
        return [*lines, f"verdicts: {', '.join(shown)}"]


def _root_mean_square(values: Sequence[float]) -> float:
    finite = np.array([value for value in values if math.isfinite(value)])
    return float(np.sqrt(np.mean(finite**2))) if finite.size else math.nan
