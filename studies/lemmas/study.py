"""Lemmas 1 and 2 on random problems, by enumeration of all data sets: BIS, FIS, OUIS, the optimum.

A plain estimator is the mean of ψ_i = Σ_t w_i,t r_i,t. Given the shares of the behaviours ψ depends
on one trajectory alone, so one call of the library on a list of all trajectories gives every ψ, and
the estimate on any data set is a mean of such numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ope_gym import Weighting, evaluate_log_probs
from ope_gym.arrays import FloatArray
from studies import oracle
from studies.harness.markdown import number
from studies.harness.study import Runs, Seeds, Study, Summary
from studies.lemmas.claims import lemma_claims

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.harness.claims import Claim

FAMILIES = ("equal rewards", "fixed rewards of both signs", "noisy rewards")
STEPS = ("both signs", "one sign", "only the last")  # rewards of the problems of several steps
NAMES = ("BIS", "FIS", "OUIS", "optimum")
_LEVELS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Problem:
    """Behaviours (K, A) with n_k draws each; rewards r̄ ± √V, each sign as likely."""

    policies: FloatArray
    counts: FloatArray
    target: FloatArray
    mean: FloatArray
    variance: FloatArray


@dataclass(frozen=True)
class Lemmas(Study):
    """One random problem of one step and one of several steps a run."""

    name: ClassVar[str] = "lemmas"
    title: ClassVar[str] = "lemmas: several behaviours, random problems (lemmas 1 and 2)"
    runs: ClassVar[int] = 1000
    chunk: ClassVar[int] = 50
    takes: ClassVar[str] = "half a minute"

    actions: int = 4  # at most
    behaviours: int = 3  # at most
    draws: int = 4  # at most, in all

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

    def run(self, seeds: Seeds) -> Runs:
        """Closed forms, enumerated moments, and the paper's printed expressions."""
        rows: dict[str, list[object]] = {}
        for seed in seeds:
            rng = np.random.default_rng(seed)
            family = int(rng.integers(len(FAMILIES)))
            problem = self.random_problem(rng, family)
            bias, variance = enumerated(problem)
            for key, value in {
                "family": family,
                "closed": closed_forms(problem),
                "bias": bias,
                "variance": variance,
                "internal": internal_variances(problem),
                "printed": printed_difference(problem),
                "lemma": printed_identity(problem),
                "steps": random_steps(rng),
            }.items():
                rows.setdefault(key, []).append(value)
        return {key: np.array(values) for key, values in rows.items()}

    def random_problem(self, rng: np.random.Generator, family: int) -> Problem:
        """From flat to peaked policies; no action below 0.1 %, which keeps all sums exact."""
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
        """Largest gaps, shares of problems, quantiles of ratios, and the two examples."""
        closed, family = runs["closed"], runs["family"]
        scale = closed[:, :1]  # Var BIS: the gaps are relative to it
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
        """Lemmas 1 and 2, their closed forms and their reach."""
        return lemma_claims(summary)

    def table(self, summary: Summary) -> str:
        """Ratios of variances, and the two examples."""
        at = [5, 25, 50, 75, 95]
        lines = [
            f"Ratios of variances on {summary['problems']} random problems of one step: quantiles.",
            "",
            "| rewards | ratio | " + " | ".join(f"{q} %" for q in at) + " | above 1 |",
            "|---|---|" + "---|" * (len(at) + 1),
        ]
        above = summary["ouis_above_fis"]
        for f, family in enumerate(("all", *summary["families"])):
            for ratio, values in summary["ratios"][family].items():
                share = f"{above[f]:.1%}" if ratio == "OUIS / FIS" else ""
                cells = " | ".join(number(values[q]) for q in at)
                lines.append(f"| {family} | {ratio} | {cells} | {share} |")
        lines += [
            "",
            "Rewards of 1, π₁ = (.9, .1), π₂ = (.5, .5), uniform target:",
            "",
            f"| {' | '.join(NAMES)} |",
            "|" + "---|" * 4,
            f"| {' | '.join(number(v) for v in summary['example'])} |",
            "",
            "Several steps: problems in which Var FIS > Var BIS.",
            "",
            "| rewards | problems |",
            "|---|---|",
        ]
        lines += [f"| {k} | {row['above']} |" for k, row in summary["multi_step"].items()]
        bis, fis = summary["undone"]
        lines += [
            "",
            "Target (stay, stay), rewards +1 then −1, behaviours that stay with .9, .5 "
            f"and with .5, .9: Var BIS {number(bis)}, Var FIS {number(fis)}.",
        ]
        return "\n".join(lines)

    def picture(self, summary: Summary) -> Figure:
        """Distributions of the ratios."""
        from studies.lemmas.picture import lemmas_figure

        return lemmas_figure(summary)


def _ratios(closed: FloatArray) -> dict[str, FloatArray]:
    bis, fis, ouis, best = closed.T
    return {
        "FIS / BIS": _quantiles(fis / bis),
        "OUIS / FIS": _quantiles(ouis / fis),
        "optimum / FIS": _quantiles(best / fis),
        "optimum / OUIS": _quantiles(best / ouis),
    }


def _quantiles(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, _LEVELS))


def _shares(mask: FloatArray, family: FloatArray) -> list[float]:
    """Of all problems, then of each family."""
    parts = [mask] + [mask[family == f] for f in range(len(FAMILIES))]
    return [float(part.mean()) if part.size else 0.0 for part in parts]


# --- one step ---------------------------------------------------------------------------------


def closed_forms(problem: Problem) -> FloatArray:
    """Variances of BIS, FIS, OUIS (with the true r̄ and V), and of the optimum of the family."""
    given = (problem.policies, problem.target, problem.mean, problem.variance, problem.counts)
    forms = (oracle.variance_bis, oracle.variance_fis, oracle.variance_ouis)
    found = np.array([*(form(*given) for form in forms), oracle.variance_optimal(*given)])
    return np.where(found > 1e-12 * found[0], found, 0.0)  # what rounding leaves of 0


def internal_variances(problem: Problem) -> FloatArray:
    """V_int of the best weights for it, and of FIS: the same, says section 3.2."""
    noise = np.maximum(problem.variance, 1.0)
    given = (problem.policies, problem.target, np.zeros_like(noise), noise, problem.counts)
    return np.array([oracle.variance_optimal(*given), oracle.variance_fis(*given)])


def enumerated(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Bias and variance of BIS, FIS, OUIS and the optimum over all data sets."""
    terms = library_terms(problem)
    given = (problem.policies, problem.target, problem.mean, problem.variance, problem.counts)
    rewards = _rewards(problem)
    alpha = oracle.optimal_alpha(*given)
    terms["optimum"] = (alpha * problem.target / problem.policies)[..., None] * rewards
    n = problem.counts.sum()
    owners = np.repeat(np.arange(len(problem.counts)), problem.counts.astype(int))
    chances = [np.repeat(problem.policies[k] / 2, 2) for k in owners]
    chance = reduce(np.multiply.outer, chances)
    moments = []
    for name in NAMES:
        value = reduce(np.add.outer, [terms[name][k].ravel() / n for k in owners])
        mean = float((chance * value).sum())
        moments.append((mean, float((chance * (value - mean) ** 2).sum())))
    found = np.array(moments).T
    return found[0] - problem.target @ problem.mean, found[1]


def library_terms(problem: Problem) -> dict[str, FloatArray]:
    """ψ (K, A, 2) of every draw: behaviour, action, sign of the reward's deviation."""
    k, a = problem.policies.shape
    # n_k copies of each draw of behaviour k, so that the shares are those of the problem
    ids = np.repeat(np.arange(k), 2 * a * problem.counts.astype(int))
    copies = [np.tile(np.arange(2 * a), int(count)) for count in problem.counts]
    actions, signs = np.divmod(np.concatenate(copies), 2)
    with np.errstate(divide="ignore"):
        target, behaviours = np.log(problem.target), np.log(problem.policies)
    found = evaluate_log_probs(
        target[actions],
        behaviours[:, actions],
        ids,
        _rewards(problem)[actions, signs],
        np.arange(ids.size + 1),
        estimators=NAMES[:3],
        weighting=Weighting(reward_model=(problem.mean[actions], problem.variance[actions])),
    )
    first = np.searchsorted(ids, np.arange(k))
    rows = first[:, None] + np.arange(2 * a)
    return {name: e.influence[rows].reshape(k, a, 2) for name, e in found.items()}


def _rewards(problem: Problem) -> FloatArray:
    """(A, 2)."""
    deviation = np.sqrt(problem.variance)
    return np.stack([problem.mean - deviation, problem.mean + deviation], axis=1)


def printed_difference(problem: Problem) -> FloatArray:
    """Var BIS − Var FIS: as the appendix prints its first line, and with its three errors mended.

    Printed: (r̄ + V) for (r̄² + V), Σ_i J² / N for J² / N, and r̄² π_i for r̄ π_i in a square.
    """
    pi = np.repeat(problem.policies, problem.counts.astype(int), axis=0)  # (N, A)
    n, e, r, v = len(pi), problem.target, problem.mean, problem.variance
    total, value = pi.sum(axis=0), e @ r
    harmonic = (1 / pi).sum(axis=0) / n**2
    fused = (e**2 * (r**2 + v) / total).sum()
    printed = (e**2 * (r + v) * harmonic).sum() - n * value**2 / n - fused
    printed += (((e * r**2 * pi / total).sum(axis=1)) ** 2).sum()
    mended = (e**2 * (r**2 + v) * harmonic).sum() - value**2 / n - fused
    mended += (((e * r * pi / total).sum(axis=1)) ** 2).sum()
    return np.array([printed, mended])


def printed_identity(problem: Problem) -> FloatArray:
    """Σ 1/a_i Σ a_j over the printed N⁻² ΣΣ a_j / a_i, and over N², which it is to exceed."""
    a = np.repeat(problem.policies, problem.counts.astype(int), axis=0)
    product = (1 / a).sum(axis=0) * a.sum(axis=0)
    printed = (a[None] / a[:, None]).sum(axis=(0, 1)) / len(a) ** 2
    return np.array([float((printed / product).max()), float((product / len(a) ** 2).min())])


# --- several steps ----------------------------------------------------------------------------


def random_steps(rng: np.random.Generator) -> FloatArray:
    """(3, 2) Var BIS and Var FIS of a random problem, for three kinds of rewards on its paths."""
    horizon = int(rng.integers(2, 4))
    stay = rng.uniform(0.05, 0.95, size=(int(rng.integers(2, 4)), horizon))
    target = rng.uniform(0.05, 0.95, size=horizon)
    rewards = rng.normal(size=(2**horizon, horizon))
    for path, t in itertools.product(range(2**horizon), range(horizon)):
        rewards[path, t] = rewards[path >> (horizon - 1 - t) << (horizon - 1 - t), t]
    last = np.where(np.arange(horizon) == horizon - 1, rewards, 0.0)
    return np.array([step_variances(stay, target, r) for r in (rewards, np.abs(rewards), last)])


def step_variances(stay: FloatArray, target: FloatArray, rewards: FloatArray) -> FloatArray:
    """Variances of per-decision BIS and FIS from one episode of each behaviour.

    Args:
        stay: (K, T) probability of action 0 at each step.
        target: (T,) the same of the target.
        rewards: (2^T, T) on each path; path 0 stays always, its last step is its lowest bit.
    """
    behaviours, horizon = stay.shape
    paths = np.array(list(itertools.product((0, 1), repeat=horizon)))  # (2^T, T)
    with np.errstate(divide="ignore"):
        own = np.log(np.where(paths == 0, stay[:, None], 1 - stay[:, None]))  # (K, 2^T, T)
        wanted = np.log(np.where(paths == 0, target, 1 - target))
    ids = np.repeat(np.arange(behaviours), len(paths))
    found = evaluate_log_probs(
        np.tile(wanted.ravel(), behaviours),
        np.tile(own.reshape(behaviours, -1), (1, behaviours)),
        ids,
        np.tile(rewards.ravel(), behaviours),
        np.arange(0, ids.size * horizon + 1, horizon),
        estimators=["BIS", "FIS"],
    )
    chance = np.exp(own.sum(axis=2))  # (K, 2^T)
    variances = []
    for estimate in found.values():
        terms = estimate.influence.reshape(chance.shape)
        mean = (chance * terms).sum(axis=1, keepdims=True)
        variances.append((chance * (terms - mean) ** 2).sum() / behaviours**2)
    return np.array(variances)


EXAMPLE = Problem(
    policies=np.array([[0.9, 0.1], [0.5, 0.5]]),
    counts=np.ones(2),
    target=np.array([0.5, 0.5]),
    mean=np.ones(2),
    variance=np.zeros(2),
)
UNDONE = (  # what the first step pays the second takes back
    np.array([[0.9, 0.5], [0.5, 0.9]]),
    np.array([1.0, 1.0]),
    np.tile([1.0, -1.0], (4, 1)),
)
