"""Judge what the library says about its intervals."""

from __future__ import annotations

import math
from itertools import product

from studies.harness.claims import FAILS, HOLDS, UNDECIDED, Claim, Evidence
from studies.harness.study import Summary

SLACK = 0.02  # an approximate interval may cover so much less than its level
_MAIN = ("NFIS", "auto")
_SOURCE = "our extension"
_UNSEEN = (
    "This is to be expected, because the target learned from what happened to go well; but these "
    "small MDPs do not show it."
)


def coverage_claims(summary: Summary) -> list[Claim]:
    """Return claims about ess-t, about betting, and about data that the target learned from."""
    return [
        _ess_t(summary),
        _better(summary),
        _betting(summary),
        _seen(summary),
    ]


def _ess_t(summary: Summary) -> Claim:
    """Return the claim that ess-t covers almost as often as its level."""
    level = summary["level"]
    return Claim(
        _SOURCE,
        f"on held-out data the {level:.0%} ess-t interval of the first choices contains the value "
        f"at least {level - SLACK:.0%} of the time",
        f"coverage − {level - SLACK:g}",
        tuple(
            _level(summary, part, name, "ess-t", level - SLACK)
            for part in ("held-out", "CartPole-v1")
            for name in _MAIN
        ),
        "Returns are skewed and the rarest trajectories weigh most: a sample without them gives a "
        "value that is too low (or too high), and too little spread. The most extreme trajectory "
        "on each side therefore counts twice in the error of ess-t.",
    )


def _better(summary: Summary) -> Claim:
    """Return the claim that ess-t covers better than the normal interval."""
    return Claim(
        _SOURCE,
        "ess-t covers better than value ± z SE",
        "coverage of ess-t − coverage of the normal interval, same data",
        _gain(summary),
        "Degrees of freedom are the effective sample size less one, and the error is cautious.",
    )


def _betting(summary: Summary) -> Claim:
    """Return the claim that betting intervals cover at least as often as their level."""
    level = summary["level"]
    parts = [("held-out", "BIS"), ("held-out", "FIS"), ("adaptive", "BIS")]
    parts += [("CartPole-v1", "BIS"), ("CartPole-v1", "FIS")]
    return Claim(
        _SOURCE,
        "betting intervals contain the value as often as they promise, for every n",
        f"coverage − {level:g}",
        tuple(_level(summary, part, name, "betting", level) for part, name in parts),
        "This is a theorem for independent episodes of policies that were fixed in advance, and "
        "with basic weights also for policies that learn. The tests check it on small cases by "
        "adding up the probabilities of all data sets.",
    )


def _seen(summary: Summary) -> Claim:
    """Return the claim about data that the target learned from."""
    names, k = summary["names"], summary["kinds"].index("ess-t")
    value, error = summary["paired"]["in-sample"]["loss"]
    return Claim(
        _SOURCE,
        "intervals from episodes that the target learned from contain its value less often",
        "coverage on held-out − coverage on in-sample data, ess-t",
        tuple(
            Evidence(name, value[e][k], error[e][k])
            for e, name in enumerate(names)
            if name in ("FIS", "NFIS", "auto")
        ),
        {
            HOLDS: "The target was drawn towards what happened to go well: its estimate is too "
            "high by more than its error shows. No interval of this table corrects that; hold "
            "episodes out.",
            UNDECIDED: _UNSEEN,
            FAILS: _UNSEEN,
        },
    )


def _level(summary: Summary, part: str, name: str, kind: str, level: float) -> Evidence:
    """Return the evidence that coverage is above a level.

    Without any miss the standard error is the change that a single miss would make.
    """
    found, e, k = summary["parts"][part], *_at(summary, name, kind)
    coverage, error = found["coverage"][e][k], found["error"][e][k]
    if error == 0.0:
        sets = summary["data_sets"]  # each source has a third of those of small MDPs
        error = 1.0 / (2.0 + (sets[part] if part in sets else sets["small"] / 3))
    lowest, width = found["lowest"][e][k], found["width"][e][k]
    worst = "" if math.isnan(lowest) else f", with the worst kind of loggers {lowest:.0%}"
    note = f"coverage {coverage:.1%}{worst}, width {width:.2f}"
    return Evidence(f"{part}: {name}", coverage - level, error, note=note)


def _gain(summary: Summary) -> tuple[Evidence, ...]:
    """Return the evidence that differences paired by data set are positive."""
    rows = []
    for part, (e, name) in product(("held-out", "CartPole-v1"), enumerate(summary["names"])):
        values, errors = summary["paired"][part]["gain"]
        # where all runs are alike, the spread is unknown
        error = math.inf if not math.isnan(values[e]) and errors[e] == 0.0 else errors[e]
        rows.append(Evidence(f"{part}: {name}", values[e], error))
    return tuple(rows)


def _at(summary: Summary, name: str, kind: str) -> tuple[int, int]:
    """Return the indices of an estimator and a kind of interval."""
    return summary["names"].index(name), summary["kinds"].index(kind)
