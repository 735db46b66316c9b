"""Measure how often intervals contain the value, and how wide they are.

All kinds of intervals of the main estimators, on small MDPs and CartPole: on held-out data, on data
whose policies learned from earlier episodes (adaptive), and on the data that the target learned
from (in-sample).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from studies.cartpole.simulation import HORIZON, mean_return
from studies.cartpole.study import CartPole
from studies.coverage.claims import coverage_claims
from studies.coverage.intervals import KINDS, all_intervals
from studies.harness.errors import standard_errors
from studies.harness.markdown import table
from studies.harness.seeds import streams
from studies.harness.small_grid import SOURCES, grid
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("BIS", "NBIS", "FIS", "NFIS", "auto")
_ENV: Final = "CartPole-v1"


@dataclass(frozen=True)
class Coverage(Study):
    """Draw in each run data sets of all sources for some regimes of the grid, and of CartPole."""

    level: float = 0.95
    resamples: int = 200  # of a bootstrap
    every: int = 4  # a run takes every 4th regime of the grid, starting at random; 1 takes all
    grid_seed: int = 1  # other MDPs than those that auto was designed on
    cartpole: int = 4  # data sets in a run
    truth_rollouts: int = 10_000

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0 or self.every < 1 or self.cartpole < 1:
            raise ValueError(
                f"level={self.level}, every={self.every}, cartpole={self.cartpole}: a level is "
                "between 0 and 1, the others are at least 1"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return whether intervals contain the value, and relative widths.

        Both are (sources, regimes, E, K), NaN for regimes left out, and (data sets, E, K) for
        CartPole.
        """
        regimes = grid(self.grid_seed)
        small = np.full((2, len(SOURCES), len(regimes), len(NAMES), len(KINDS)), math.nan)
        first, *rngs = streams(seed, 1 + len(regimes) + self.cartpole)
        for r in range(int(first.integers(self.every)), len(regimes), self.every):
            regime = regimes[r]
            for s, source in enumerate(SOURCES):
                data, target, truth = regime.simulate(rngs[r], source)
                found = all_intervals(
                    data,
                    target,
                    NAMES,
                    level=self.level,
                    resamples=self.resamples,
                    reward_range=regime.reward_range,
                    horizon=regime.horizon,
                )
                small[:, s, r] = found.holds(truth), found.width(self.level)
        cart = np.array([self._cartpole(rng) for rng in rngs[len(regimes) :]])
        return {
            "holds": small[0],
            "width": small[1],
            "cart_holds": cart[:, 0],
            "cart_width": cart[:, 1],
        }

    def _cartpole(self, rng: np.random.Generator) -> FloatArray:
        """Return coverage and widths (2, E, K) for PoWER's last policy, from fresh rollouts."""
        study, horizon = CartPole(env=_ENV), HORIZON[_ENV]
        policies, _, target = study.train(rng)
        truth, _ = mean_return(target, self.truth_rollouts, horizon, rng)
        found = all_intervals(
            study.fresh(policies, rng),
            target,
            NAMES,
            level=self.level,
            resamples=self.resamples,
            reward_range=(0.0, 1.0),
            horizon=horizon,
        )
        return np.stack([found.holds(truth), found.width(self.level)])

    def summarise(self, runs: Runs) -> Summary:
        """Return coverage with standard errors and median widths, (E, K) each, by source."""
        regimes = grid(self.grid_seed)
        kinds = np.array([regime.loggers for regime in regimes])
        parts: dict[str, dict[str, Any]] = {
            source: _described(runs["holds"][:, s], runs["width"][:, s], kinds)
            for s, source in enumerate(SOURCES)
        }
        parts[_ENV] = _described(
            runs["cart_holds"], runs["cart_width"], np.full(self.cartpole, "drifting")
        )
        return {
            "runs": len(runs["holds"]),
            "level": self.level,
            "names": NAMES,
            "kinds": KINDS,
            "regimes": [regime.name for regime in regimes],
            "data_sets": {
                part: np.count_nonzero(~np.isnan(runs[key][..., NAMES.index("NFIS"), 0]))
                for part, key in (("small", "holds"), (_ENV, "cart_holds"))
            },
            "parts": parts,
            "by_regime": {
                source: _mean(runs["holds"][:, s], (0,)) for s, source in enumerate(SOURCES)
            },
            "paired": _paired(runs),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge the library's statements about its intervals."""
        return coverage_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate coverage and widths by source, then by kind of loggers."""
        names, kinds, count = summary["names"], summary["kinds"], summary["data_sets"]
        lines = [
            f"{summary['runs']} runs: {count['small']} data sets of {len(summary['regimes'])} small"
            f" MDPs, a third from each source, and {count[_ENV]} held-out ones of {_ENV}; the level"
            f" is {summary['level']:.0%}. Each entry: coverage ± standard error (lowest by kind of "
            "loggers), median width (value ± z SE is 1). Betting uses the terms of the plain "
            "estimators.",
        ]
        for source, part in summary["parts"].items():
            rows = [
                [name, *(_cell(part, e, k) for k in range(len(kinds)))]
                for e, name in enumerate(names)
            ]
            lines += ["", *table([source, *kinds], rows)]
        return "\n".join([*lines, "", *_loggers(summary), "", *_worst(summary)])

    def picture(self, summary: Summary) -> Figure:
        """Draw coverage against width, by source."""
        from studies.coverage.picture import coverage_figure

        return coverage_figure(summary)


def _described(holds: FloatArray, width: FloatArray, kinds: NDArray[np.str_]) -> dict[str, Any]:
    """Describe arrays (R, regimes or data sets, E, K); only runs are independent of each other.

    Undefined intervals are left out; `undefined` is their share.
    """
    missing = np.isnan(holds)
    done = ~missing[..., :1]  # normal intervals are nearly always defined
    by_loggers = {
        str(kind): _mean(holds[:, kinds == kind], (0, 1)) for kind in dict.fromkeys(kinds.tolist())
    }
    lowest = np.min([np.nan_to_num(found, nan=1.0) for found in by_loggers.values()], axis=0)
    return {
        "coverage": _mean(holds, (0, 1)),
        "error": standard_errors(_mean(holds, (1,))),
        "width": _median(width),
        "undefined": _mean(np.where(done, missing, math.nan), (0, 1)),
        "by_loggers": by_loggers,
        "lowest": lowest if len(by_loggers) > 1 else lowest * math.nan,
    }


def _paired(runs: Runs) -> dict[str, Any]:
    """Return differences (E,) on the same data, with standard errors.

    On held-out data `gain` is the coverage of ess-t − normal; `loss` is coverage on held-out −
    in-sample data.
    """
    at = {kind: k for k, kind in enumerate(KINDS)}
    found = {}
    for part, holds in (("held-out", runs["holds"][:, 0]), (_ENV, runs["cart_holds"])):
        gain = _mean(holds[..., at["ess-t"]] - holds[..., at["normal"]], (1,))
        found[part] = {"gain": [_mean(gain, (0,)), standard_errors(gain)]}
    optimism = _mean(runs["holds"][:, 0], (1,)) - _mean(runs["holds"][:, 2], (1,))  # (R, E, K)
    found["in-sample"] = {"loss": [_mean(optimism, (0,)), standard_errors(optimism)]}
    return found


def _mean(values: FloatArray, axes: tuple[int, ...]) -> FloatArray:
    """Return the mean of what is not NaN, or NaN if nothing is left."""
    present = ~np.isnan(values)
    count = present.sum(axis=axes)
    total = np.where(present, values, 0.0).sum(axis=axes)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), math.nan))


def _median(width: FloatArray) -> FloatArray:
    """Return the median (E, K) of what is finite."""
    flat = width.reshape(-1, *width.shape[2:])
    result = np.full(flat.shape[1:], math.nan)
    for at in np.ndindex(*result.shape):
        column = flat[(slice(None), *at)]
        if np.isfinite(column).any():
            result[at] = np.median(column[np.isfinite(column)])
    return result


def _loggers(summary: Summary) -> list[str]:
    """Tabulate the coverage of ess-t by kind of loggers."""
    names, k = summary["names"], summary["kinds"].index("ess-t")
    found = summary["parts"]["held-out"]["by_loggers"]
    rows = [[kind, *(_percent(row[k]) for row in rows)] for kind, rows in found.items()]
    return [
        "Coverage of ess-t on held-out data by kind of loggers:",
        "",
        *table(["loggers", *names], rows),
    ]


def _worst(summary: Summary) -> list[str]:
    """Tabulate the regimes in which ess-t covers least, and how often intervals are undefined."""
    names, k = summary["names"], summary["kinds"].index("ess-t")
    shown = [names.index(name) for name in ("NFIS", "auto")]
    found = np.array(summary["by_regime"]["held-out"])[..., k]  # (regimes, E)
    order = np.argsort(np.nan_to_num(found[:, shown].min(axis=1), nan=1.0))[:6]
    sets = max(summary["data_sets"]["small"] / len(SOURCES) / len(summary["regimes"]), 1.0)
    missing = summary["parts"]["held-out"]["undefined"]
    absent = ", ".join(f"{names[e]} {missing[e][k]:.1%}" for e in range(len(names)))
    rows = [[summary["regimes"][r], *(_percent(found[r, e]) for e in shown)] for r in order]
    return [
        "An average hides the worst cases. These are the regimes in which ess-t covers least on "
        f"held-out data, of about {sets:.0f} data sets each. If a fitted q explains almost all of "
        "the reward except for an action that is hardly ever seen, the error of auto can be too "
        "small, because no episode shows how wrong q is there. Undefined intervals (of ess-t, "
        f"left out above): {absent}.",
        "",
        *table(["regime", *(names[e] for e in shown)], rows),
    ]


def _cell(part: dict[str, Any], e: int, k: int) -> str:
    """Format coverage ± standard error (lowest), width; empty if there is no interval."""
    if math.isnan(part["coverage"][e][k]):
        return ""
    error = part["error"][e][k]
    spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
    lowest = _percent(part["lowest"][e][k])
    text = f"{100 * part['coverage'][e][k]:.1f}{spread} %" + (f" ({lowest})" if lowest else "")
    return f"{text}, {part['width'][e][k]:.2f}"


def _percent(value: float) -> str:
    """Format a share; empty if it is undefined."""
    return "" if math.isnan(value) else f"{100 * value:.0f} %"
