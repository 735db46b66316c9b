"""Check lemmas 1 and 2 on random problems that are small enough to sum over all data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arrays import FloatArray
from studies.harness.markdown import number, table
from studies.harness.study import Runs, Study, Summary
from studies.lemmas.claims import lemma_claims
from studies.lemmas.problems import (
    EXAMPLE,
    NAMES,
    UNDONE,
    Problem,
    closed_forms,
    enumerated,
    internal_variances,
    printed_difference,
    printed_identity,
    random_steps,
    step_variances,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

FAMILIES = ("equal rewards", "fixed rewards of both signs", "noisy rewards")
STEPS = ("both signs", "one sign", "only the last")  # rewards of the problems of several steps
_LEVELS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Lemmas(Study):
    """Draw in each run one random problem of one step and one of several steps."""

    actions: int = 4  # at most
    behaviours: int = 3  # at most
    draws: int = 4  # at most, by all behaviour policies together

    def __post_init__(self) -> None:
        if self.actions < 2 or self.behaviours < 2 or self.draws < self.behaviours:
            raise ValueError(
                f"actions={self.actions}, behaviours={self.behaviours}, draws={self.draws}: give "
                "at least 2, 2, and as many draws as behaviours"
            )
        if (2 * self.actions) ** self.draws > 10**6:
            raise ValueError(
                f"actions={self.actions}, draws={self.draws}: (2 actions)^draws data sets are "
                "summed; give less"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return closed forms, moments over all data sets, and the paper's printed expressions."""
        rng = np.random.default_rng(seed)
        family = int(rng.integers(len(FAMILIES)))
        problem = self.random_problem(rng, family)
        bias, variance = enumerated(problem)
        return {
            "family": family,
            "closed": closed_forms(problem),
            "bias": bias,
            "variance": variance,
            "internal": internal_variances(problem),
            "printed": printed_difference(problem),
            "lemma": printed_identity(problem),
            "steps": random_steps(rng),
        }

    def random_problem(self, rng: np.random.Generator, family: int) -> Problem:
        """Draw a problem with flat to peaked policies.

        No action has less than 0.1 %, which keeps all sums exact.
        """
        a, k = rng.integers(2, self.actions + 1), rng.integers(2, self.behaviours + 1)
        counts = np.ones(k)
        for _ in range(rng.integers(0, self.draws - k + 1)):
            counts[rng.integers(k)] += 1
        flatness = 10.0 ** rng.uniform(-0.5, 0.7)
        policies = np.maximum(rng.dirichlet(np.full(a, flatness), size=k + 1), 1e-3)
        policies /= policies.sum(axis=1, keepdims=True)
        mean, variance = np.ones(a), np.zeros(a)
        if family > 0:
            mean = rng.normal(size=a)
        if family == 2:
            variance = rng.exponential(size=a) * 10.0 ** rng.uniform(-1, 1)
        return Problem(policies[:-1], counts, policies[-1], mean, variance)

    def summarise(self, runs: Runs) -> Summary:
        """Return largest gaps, shares of problems, quantiles of ratios, and the two examples."""
        closed, family = runs["closed"], runs["family"]
        scale = closed[:, :1]  # gaps are relative to Var BIS
        ratios = {"all": _ratios(closed)}
        for f, name in enumerate(FAMILIES):
            ratios[name] = _ratios(closed[family == f]) if (family == f).any() else ratios["all"]
        bis, fis, ouis, best = closed.T
        off = np.abs(runs["printed"] - (bis - fis)[:, None]) / scale
        steps = runs["steps"]  # (R, kind, 2)
        return {
            "levels": _LEVELS,
            "families": FAMILIES,
            "problems": len(closed),
            "gap": np.abs((runs["variance"] - closed) / scale).max(axis=0),
            "bias": np.abs(runs["bias"]).max(axis=0),
            "dominated": int((fis <= bis * (1 + 1e-12)).sum()),
            "margin": float((1 - fis / bis).min()),
            "internal": float((runs["internal"][:, 1] / runs["internal"][:, 0] - 1).max()),
            "ouis_above_fis": _shares(ouis > fis * (1 + 1e-9), family),
            "ouis_below_fis": _shares(ouis < fis * (1 - 1e-9), family),
            "ouis_above_optimum": _shares(ouis - best > 1e-9 * bis, family),
            "ratios": ratios,
            "printed": [float(np.median(off[:, 0])), float(off[:, 1].max())],
            "lemma": [float(runs["lemma"][:, 0].max()), float(runs["lemma"][:, 1].min())],
            "multi_step": {
                kind: {
                    "above": int((steps[:, j, 1] > steps[:, j, 0] * (1 + 1e-9)).sum()),
                    "quantiles": _quantiles(steps[:, j, 1] / steps[:, j, 0]),
                }
                for j, kind in enumerate(STEPS)
            },
            "example": closed_forms(EXAMPLE),
            "undone": step_variances(*UNDONE),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge lemmas 1 and 2, their closed forms and how far they reach."""
        return lemma_claims(summary)

    def table(self, summary: Summary) -> str:
        """Tabulate ratios of variances, and the two examples."""
        at = [5, 25, 50, 75, 95]
        ratios = []
        for family, above in zip(("all", *FAMILIES), summary["ouis_above_fis"], strict=True):
            for ratio, values in summary["ratios"][family].items():
                share = f"{above:.1%}" if ratio == "OUIS / FIS" else ""
                ratios.append([family, ratio, *(number(values[q]) for q in at), share])
        more = [(kind, row["above"]) for kind, row in summary["multi_step"].items()]
        bis, fis = (number(variance) for variance in summary["undone"])
        return "\n".join(
            [
                f"Ratios of variances on {summary['problems']} random problems of one step: "
                "quantiles.",
                "",
                *table(["rewards", "ratio", *(f"{q} %" for q in at), "above 1"], ratios),
                "",
                "Rewards of 1, π₁ = (.9, .1), π₂ = (.5, .5), uniform target:",
                "",
                *table(NAMES, [[number(v) for v in summary["example"]]]),
                "",
                "Several steps: problems in which Var FIS > Var BIS.",
                "",
                *table(["rewards", "problems"], more),
                "",
                "Target (stay, stay), rewards +1 then −1, behaviours that stay with .9, .5 "
                f"and with .5, .9: Var BIS {bis}, Var FIS {fis}.",
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the distributions of the ratios."""
        from studies.lemmas.picture import lemmas_figure

        return lemmas_figure(summary)


def _ratios(closed: FloatArray) -> dict[str, FloatArray]:
    """Return quantiles of ratios of variances."""
    bis, fis, ouis, best = closed.T
    return {
        "FIS / BIS": _quantiles(fis / bis),
        "OUIS / FIS": _quantiles(ouis / fis),
        "optimum / FIS": _quantiles(best / fis),
        "optimum / OUIS": _quantiles(best / ouis),
    }


def _quantiles(values: FloatArray) -> FloatArray:
    """Return the quantiles at `_LEVELS`."""
    return np.asarray(np.quantile(values, _LEVELS))


def _shares(mask: FloatArray, family: FloatArray) -> list[float]:
    """Return the share of all problems in the mask, then of each family."""
    parts = [mask] + [mask[family == f] for f in range(len(FAMILIES))]
    return [float(part.mean()) if part.size else 0.0 for part in parts]
