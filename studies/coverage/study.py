"""How often intervals hold the value, and how wide they are: small MDPs and CartPole.

Every kind of interval for the main estimators, on held-out data, on data whose policies learned
from earlier episodes (adaptive), and on the data that the target learned from (in-sample).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from studies.cartpole.simulation import HORIZON, mean_return, rollouts
from studies.cartpole.study import CartPole
from studies.coverage.claims import coverage_claims
from studies.coverage.intervals import KINDS, all_intervals, known
from studies.harness.errors import standard_errors
from studies.harness.seeds import streams
from studies.harness.small_grid import SOURCES, grid
from studies.harness.study import Runs, Seeds, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

NAMES = ("BIS", "NBIS", "FIS", "NFIS", "auto")  # those that the library has not are left out
_ENV: Final = "CartPole-v1"


@dataclass(frozen=True)
class Coverage(Study):
    """Some regimes of the grid, a data set from each source, and some of CartPole, a run."""

    name: ClassVar[str] = "coverage"
    title: ClassVar[str] = "coverage: how often intervals hold the value, and how wide they are"
    runs: ClassVar[int] = 100
    chunk: ClassVar[int] = 1
    takes: ClassVar[str] = "5 minutes"

    level: float = 0.95
    resamples: int = 200  # of a bootstrap
    every: int = 4  # a run takes every 4th regime of the grid, from a random one on; 1 takes all
    grid_seed: int = 1  # other MDPs than those that auto was designed on
    cartpole: int = 4  # data sets a run
    truth_rollouts: int = 10_000

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0 or self.every < 1 or self.cartpole < 1:
            raise ValueError(
                f"level={self.level}, every={self.every}, cartpole={self.cartpole}: a level is "
                "between 0 and 1, the others are at least 1"
            )

    def run(self, seeds: Seeds) -> Runs:
        """Whether intervals hold (E, K) and relative widths, by source and regime; CartPole's."""
        found = [self._one(seed) for seed in seeds]
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _one(self, seed: np.random.SeedSequence) -> Runs:
        names, regimes = known(NAMES), grid(self.grid_seed)
        small = np.full((2, len(SOURCES), len(regimes), len(names), len(KINDS)), math.nan)
        first, *rngs = streams(seed, 1 + len(regimes) + self.cartpole)
        for r in range(int(first.integers(self.every)), len(regimes), self.every):
            regime = regimes[r]
            for s, source in enumerate(SOURCES):
                data, target, truth = regime.simulate(rngs[r], source)
                found = all_intervals(
                    data,
                    target,
                    names,
                    level=self.level,
                    resamples=self.resamples,
                    reward_range=regime.reward_range,
                    horizon=regime.horizon,
                )
                small[:, s, r] = found.holds(truth), found.width(self.level)
        cart = np.array([self._cartpole(rng, names) for rng in rngs[len(regimes) :]])
        return {
            "holds": small[0],
            "width": small[1],
            "cart_holds": cart[:, 0],
            "cart_width": cart[:, 1],
        }

    def _cartpole(self, rng: np.random.Generator, names: Sequence[str]) -> FloatArray:
        """(2, E, K) for the last policy of PoWER, from fresh rollouts of the ten before it."""
        study, horizon = CartPole(env=_ENV), HORIZON[_ENV]
        policies, _, target = study.train(rng)
        truth, _ = mean_return(target, self.truth_rollouts, horizon, rng)
        first, *more = (rollouts(p, study.rollouts, horizon, rng, held_out=True) for p in policies)
        found = all_intervals(
            first.merge(*more),
            target,
            names,
            level=self.level,
            resamples=self.resamples,
            reward_range=(0.0, 1.0),
            horizon=horizon,
        )
        return np.stack([found.holds(truth), found.width(self.level)])

    def summarise(self, runs: Runs) -> Summary:
        """Coverage with its error and median widths by source, (E, K) each; by regime as well."""
        regimes, names = grid(self.grid_seed), known(NAMES)
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
            "names": names,
            "kinds": KINDS,
            "regimes": [regime.name for regime in regimes],
            "data_sets": {
                part: np.count_nonzero(~np.isnan(runs[key][..., names.index("NFIS"), 0]))
                for part, key in (("small", "holds"), (_ENV, "cart_holds"))
            },
            "parts": parts,
            "by_regime": {
                source: _mean(runs["holds"][:, s], (0,)) for s, source in enumerate(SOURCES)
            },
            "paired": _paired(runs),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """What the library says of its intervals."""
        return coverage_claims(summary)

    def table(self, summary: Summary) -> str:
        """Coverage and widths by source, then by kind of loggers."""
        names, kinds, count = summary["names"], summary["kinds"], summary["data_sets"]
        lines = [
            f"{summary['runs']} runs: {count['small']} data sets of {len(summary['regimes'])} small"
            f" MDPs, a third from each source, and {count[_ENV]} held-out ones of {_ENV}; the level"
            f" is {summary['level']:.0%}. Each entry: coverage ± standard error (lowest by kind of "
            "loggers), median width (value ± z SE is 1). Betting and HCOPE rest on the terms of "
            "the plain estimators: a normalised one has the interval of the plain one.",
        ]
        for source, part in summary["parts"].items():
            lines += ["", f"| {source} | " + " | ".join(kinds) + " |", "|---" * 7 + "|"]
            for e, name in enumerate(names):
                cells = [_cell(part, e, k) for k in range(len(kinds))]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return "\n".join([*lines, "", *_loggers(summary), "", *_worst(summary)])

    def picture(self, summary: Summary) -> Figure:
        """Coverage against width, by source."""
        from studies.coverage.picture import coverage_figure

        return coverage_figure(summary)


def _described(holds: FloatArray, width: FloatArray, kinds: NDArray[np.str_]) -> dict[str, Any]:
    """Of (R, regimes or data sets, E, K): runs are independent, what is inside a run is averaged.

    Undefined intervals are left out; `undefined` is their share.
    """
    missing, done = np.isnan(holds), ~np.isnan(holds[..., :1])  # normal: as good as always there
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
    """Differences (E,) on the same data, held-out: ess-t − normal, ln width HCOPE / betting."""
    at = {kind: k for k, kind in enumerate(KINDS)}
    found = {}
    for part, holds, width in (
        ("held-out", runs["holds"][:, 0], runs["width"][:, 0]),
        (_ENV, runs["cart_holds"], runs["cart_width"]),
    ):
        gain = _mean(holds[..., at["ess-t"]] - holds[..., at["normal"]], (1,))
        with np.errstate(invalid="ignore"):
            ratio = _mean(np.log(width[..., at["HCOPE"]] / width[..., at["betting"]]), (1,))
        found[part] = {
            "gain": [_mean(gain, (0,)), standard_errors(gain)],
            "ratio": [_mean(ratio, (0,)), standard_errors(ratio)],
        }
    optimism = _mean(runs["holds"][:, 0], (1,)) - _mean(runs["holds"][:, 2], (1,))  # (R, E, K)
    found["in-sample"] = {"loss": [_mean(optimism, (0,)), standard_errors(optimism)]}
    return found


def _mean(values: FloatArray, axes: tuple[int, ...]) -> FloatArray:
    """Mean of what is defined; NaN of nothing."""
    present = ~np.isnan(values)
    count = present.sum(axis=axes)
    total = np.where(present, values, 0.0).sum(axis=axes)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), math.nan))


def _median(width: FloatArray) -> FloatArray:
    """(E, K) median over all that is finite."""
    flat = width.reshape(-1, *width.shape[2:])
    result = np.full(flat.shape[1:], math.nan)
    for at in np.ndindex(*result.shape):
        column = flat[(slice(None), *at)]
        if np.isfinite(column).any():
            result[at] = np.median(column[np.isfinite(column)])
    return result


def _loggers(summary: Summary) -> list[str]:
    """Coverage of ess-t by kind of loggers."""
    names, k = summary["names"], summary["kinds"].index("ess-t")
    lines = ["Coverage of ess-t on held-out data by kind of loggers:", ""]
    lines += ["| loggers | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, found in summary["parts"]["held-out"]["by_loggers"].items():
        lines.append(f"| {kind} | " + " | ".join(_percent(row[k]) for row in found) + " |")
    return lines


def _worst(summary: Summary) -> list[str]:
    """The regimes in which ess-t covers least, and how often intervals are undefined."""
    names, k = summary["names"], summary["kinds"].index("ess-t")
    shown = [names.index(name) for name in ("NFIS", "auto") if name in names]
    found = np.array(summary["by_regime"]["held-out"])[..., k]  # (regimes, E)
    order = np.argsort(np.nan_to_num(found[:, shown].min(axis=1), nan=1.0))[:6]
    sets = max(summary["data_sets"]["small"] / len(SOURCES) / len(summary["regimes"]), 1.0)
    head = " | ".join(names[e] for e in shown)
    missing = summary["parts"]["held-out"]["undefined"]
    absent = ", ".join(f"{names[e]} {missing[e][k]:.1%}" for e in range(len(names)))
    lines = [
        f"An average hides the worst: the regimes in which ess-t covers least on held-out data, of "
        f"about {sets:.0f} data sets each. Where a fitted q explains almost all of the reward but "
        "for an action that is hardly ever seen, the error of auto can be too small: it knows "
        "nothing of q where no episode went. Undefined intervals (of ess-t, left out above): "
        f"{absent}.",
        "",
        f"| regime | {head} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for r in order:
        cells = " | ".join(_percent(found[r, e]) for e in shown)
        lines.append(f"| {summary['regimes'][r]} | {cells} |")
    return lines


def _cell(part: dict[str, Any], e: int, k: int) -> str:
    if math.isnan(part["coverage"][e][k]):
        return ""
    error = part["error"][e][k]
    spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
    lowest = _percent(part["lowest"][e][k])
    text = f"{100 * part['coverage'][e][k]:.1f}{spread} %" + (f" ({lowest})" if lowest else "")
    return f"{text}, {part['width'][e][k]:.2f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.0f} %"
