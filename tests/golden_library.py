"""Every call of ope_gym that the golden results need, with plain options.

Whoever changes the interface of the library edits this module, and nothing else of `tests.golden`:
what the functions here take and store stays as it is.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

import ope_gym
from ope_gym import cli as command_line
from ope_gym.analysis.overlap import overlap
from ope_gym.models import (
    Baseline,
    Critic,
    DynamicsQ,
    LinearQ,
    NetworkQ,
    Polynomial,
    TabularQ,
)
from ope_gym.policies import (
    DiagonalGaussian,
    EpsilonGreedyMlp,
    EpsilonGreedyTable,
    GaussianMlp,
    LinearSigmoid,
    Network,
    SoftmaxLinear,
    SoftmaxMlp,
    Uniform,
    UnknownPolicy,
)
from studies import oracle
from tests.builders import plain_options
from tests.golden_data import Recording

__all__ = [  # what the cases build data, targets and q models from
    "Baseline",
    "Critic",
    "DiagonalGaussian",
    "DynamicsQ",
    "EpsilonGreedyMlp",
    "EpsilonGreedyTable",
    "GaussianMlp",
    "LinearQ",
    "LinearSigmoid",
    "Network",
    "NetworkQ",
    "Polynomial",
    "SoftmaxLinear",
    "SoftmaxMlp",
    "TabularQ",
    "Uniform",
]

Results: TypeAlias = dict[str, Any]
ESTIMATORS = tuple(ope_gym.ESTIMATORS)


def make_data(recording: Recording, policies: Sequence[Any], **spaces: Any) -> Any:
    """Make trajectories by appending episode after episode to a buffer.

    `spaces` may hold observation_space and action_space.
    """
    buffer = ope_gym.TrajectoryBuffer(horizon=recording.horizon, **spaces)
    numbers = np.array([buffer.add_policy(policy) for policy in policies])
    changes = list(recording.changes)
    for i, (begin, end) in enumerate(pairwise(recording.offsets.tolist())):
        while changes and changes[0][0] < end:
            clock, k = changes.pop(0)
            buffer.change_policy(int(numbers[k]), clock, mid_episode=clock > begin)
        seen, actions = recording.observations[begin:end], recording.actions[begin:end]
        ids = recording.policy_ids[begin:end]
        logs = np.empty(end - begin)
        for k in np.unique(ids).tolist():
            logs[ids == k] = policies[k].log_prob(seen[ids == k], actions[ids == k])
        buffer.append(
            seen,
            actions,
            recording.rewards[begin:end],
            logs,
            numbers[ids],
            terminated=bool(recording.terminated[i]),
            truncated=not recording.terminated[i],
            held_out=bool(recording.held_out[i]),
            start_clock=begin if recording.changes else None,
        )
    return buffer.view()


def make_unknown(recording: Recording, log_probs: ArrayLike, **spaces: Any) -> Any:
    """Make trajectories of a policy of which nothing is known, from arrays."""
    return ope_gym.Trajectories.from_arrays(
        recording.observations,
        recording.actions,
        recording.rewards,
        log_probs,
        offsets=recording.offsets,
        policies=[UnknownPolicy()],
        terminated=recording.terminated,
        truncated=~recording.terminated,
        horizon=recording.horizon,
        **spaces,
    )


def run_evaluate(data: Any, target: Any, estimators: Any = None, **options: Any) -> Any:
    options.setdefault("held_out", False)
    return ope_gym.evaluate(data, target, estimators, **plain_options(**options))


def run_several(data: Any, targets: Sequence[Any], estimators: Any, **options: Any) -> list[Any]:
    """Evaluate several targets on data that are made ready once."""
    options.setdefault("held_out", False)
    evaluator = ope_gym.Evaluator(data, estimators, **plain_options(**options))
    return [evaluator.evaluate(target) for target in targets]


def run_arrays(arrays: Mapping[str, Any], estimators: Any = None, **options: Any) -> Any:
    """Evaluate arrays of log-probabilities; `baseline` is (q, v)."""
    return ope_gym.evaluate_log_probs(**arrays, estimators=estimators, **plain_options(**options))


def run_files(files: Sequence[Path], target: Any, estimators: Any, **options: Any) -> Any:
    """Evaluate files; options are also chunk_steps, workers and ray."""
    options.setdefault("held_out", False)
    return ope_gym.evaluate(list(files), target, estimators, **plain_options(**options))


def run_rank(data: Any, targets: Any, **options: Any) -> Any:
    options.setdefault("held_out", False)
    return ope_gym.rank(data, targets, **plain_options(**options))


def run_leave_one_out(data: Any, **options: Any) -> Any:
    return ope_gym.leave_one_policy_out(data, **plain_options(**options))


def run_contributions(data: Any, target: Any, **options: Any) -> Any:
    options.setdefault("held_out", False)
    return ope_gym.contributions(data, target, **plain_options(**options))


def run_needed(data: Any, target: Any, standard_error: float, **options: Any) -> Any:
    options.setdefault("held_out", False)
    return ope_gym.episodes_needed(data, target, standard_error, **plain_options(**options))


def run_overlap(data: Any, target: Any) -> Any:
    return overlap(data, target, held_out=False)


def run_command(*arguments: str) -> str:
    """Run `python -m ope_gym` and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert command_line.main(list(arguments)) == 0
    return said.getvalue()


def save(data: Any, path: Path) -> Path:
    data.save(path)
    return path


def load(path: Path) -> Any:
    return ope_gym.Trajectories.load(path)


def difference(one: Any, other: Any) -> list[float]:
    """Return the paired difference of two estimates: value, error, interval."""
    d = one.difference(other)
    return [d.value, d.standard_error, d.interval.low, d.interval.high]


def checksum(values: ArrayLike) -> list[float]:
    """Return sum, root of the sum of squares, first, middle and last entry."""
    x = np.asarray(values, dtype=np.float64).ravel()
    return [
        math.fsum(x) if np.isfinite(x).all() else math.nan,
        math.sqrt(math.fsum(x * x)),
        float(x[0]),
        float(x[x.size // 2]),
        float(x[-1]),
    ]


def put_evaluation(results: Results, case: str, evaluation: Any, *, words: bool = True) -> None:
    """Store all estimates of an evaluation; of a bootstrap only what depends on its draws."""
    first = evaluation[min(evaluation, key=ESTIMATORS.index)]
    if first.interval.method in ("percentile", "bca"):
        for name, e in evaluation.items():
            ends = [e.interval.low, e.interval.high]
            results[f"bootstrap/{case}/{name}"] = ends + (
                [] if e.replicates is None else [e.replicates.size, *checksum(e.replicates)]
            )
        return
    sample = evaluation.sample
    results[f"{case}/sample"] = [sample.trajectories, sample.steps, sample.gamma, sample.regime]
    results[f"{case}/counts"] = sample.counts.tolist()
    if sample.mixture is not None:
        results[f"{case}/mixture"] = [sample.mixture.groups, sample.mixture.size]
    for name, e in evaluation.items():
        d, key = e.diagnostics, f"{case}/{name}"
        results[f"{key}/value"] = e.value
        results[f"{key}/standard_error"] = e.standard_error
        results[f"{key}/interval"] = [e.interval.low, e.interval.high]
        results[f"{key}/weights"] = [
            d.ess,
            d.ess_step,
            d.max_share,
            d.mean_weight,
            d.pareto_k,
            d.capped_share,
            d.support_violations,
        ]
        results[f"{key}/influence"] = checksum(e.influence)
        results[f"{key}/colour"] = e.verdict.colour
        if e.report:
            results[f"{key}/report"] = [e.report[k] for k in sorted(e.report)]
    d = first.diagnostics  # of the plainest weights; those of others have the same code
    results[f"{case}/curves"] = [
        *checksum(d.ess_curve),
        *checksum(d.behaviour_shares),
        *checksum(d.behaviour_ess),
    ]
    if d.calibration is not None:
        results[f"{case}/calibration"] = d.calibration.tolist()
    if words:
        said: dict[str, list[str]] = {}
        for name, e in evaluation.items():
            said.setdefault(str(e.verdict), []).append(name)
        results[f"text/{case}"] = [f"{', '.join(names)}: {text}" for text, names in said.items()]


def put_ranking(results: Results, case: str, ranking: Any) -> None:
    names = list(ranking)
    pairs = [ranking.difference(a, b) for i, a in enumerate(names) for b in names[:i]]
    if ranking.best.estimate.interval.method in ("percentile", "bca"):
        ends = [[d.interval.low, d.interval.high] for d in pairs]
        results[f"bootstrap/{case}"] = checksum(ends)
        results[f"bootstrap/{case}/draws"] = [r.probability_best for r in ranking.values()]
        return
    results[f"{case}/order"] = [*ranking, ranking.safest.name]
    results[f"{case}/values"] = [r.estimate.value for r in ranking.values()]
    results[f"{case}/differences"] = [
        x for d in pairs for x in (d.value, d.standard_error, d.interval.low, d.interval.high)
    ]
    results[f"draws/{case}"] = [r.probability_best for r in ranking.values()]
    results[f"text/{case}"] = str(ranking)


def put_leave_one_out(results: Results, case: str, found: Any) -> None:
    for k, c in found.items():
        e = c.estimate
        results[f"{case}/{k}"] = [
            c.episodes,
            c.own,
            c.own_error,
            e.value,
            e.standard_error,
            c.z,
            c.agrees,
        ]
    results[f"{case}/summary"] = [
        *found.agreement,
        found.rmse,
        found.expected_rmse,
    ]
    results[f"text/{case}"] = str(found)


def put_rows(results: Results, case: str, found: Any, rows: Sequence[Any]) -> None:
    """Store a table whose rows are small dataclasses, and its text."""
    for i, row in enumerate(rows):
        results[f"{case}/{i}"] = list(vars(row).values())
    results[f"text/{case}"] = str(found)


def put_oracle(results: Results) -> None:
    """Store exact variances of a bandit with two behaviours and two actions."""
    table, target, mean, variance = [[0.2, 0.8], [0.6, 0.4]], [0.5, 0.5], [1.0, 2.0], [0.5, 0.1]
    for name in ("bis", "fis", "ouis", "optimal"):
        exact = getattr(oracle, f"variance_{name}")
        results[f"oracle/variance-{name}"] = exact(table, target, mean, variance, [3, 4])
    moments = oracle.moments_ea([0.2, 0.8], 6, target, mean, variance)
    results["oracle/moments-ea"] = [moments.bias, moments.internal, moments.path]
