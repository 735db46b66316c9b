"""Evaluation of episodes that do not fit into memory: a few passes over shards.

| pass | reads | finds |
|------|-------|-------|
| 1    | policy tables, lengths, who acted | the shares rho_k of the mixture |
| q    | everything, twice | with a q model: the scale of its features, its normal equations |
| 2    | everything | weights, their sums at each step, plain influence values, diagnostics |
| 3    | everything, or the weights of pass 2 | normalised influence values, bootstrap replicates |

Memory: some blocks of steps, and a few numbers a trajectory and a step of the longest episode;
never a number for every step. The third pass is there because a normalised influence value
compares a trajectory with the means R_t over all of them, and only if something needs it. Every
pass is a set of sums with `update` and `merge`, so the result is that of `ope_gym.evaluate` on all
episodes together, but for rounding, however they are cut. Their order gives the policies their
numbers, and with them the neighbours to which behaviours of a single episode are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ope_gym import poisson
from ope_gym.baselines.contract import FOLDS, Baseline
from ope_gym.baselines.linear import LinearQ
from ope_gym.baselines.linear_sums import (
    Folds,
    LinearBaseline,
    LinearFit,
    ScaleSums,
    needs_scale,
    scaled_features,
)
from ope_gym.estimators import ESTIMATORS
from ope_gym.policies import Policy
from ope_gym.results import Evaluation
from ope_gym.shard_census import Census, Mixture
from ope_gym.shard_passes import (
    NormalisedPass,
    Spool,
    WeightedChunk,
    WeightPass,
    keys_of,
    weigh,
)
from ope_gym.shard_results import estimates_of
from ope_gym.shards import Shard, Shards
from ope_gym.storage import PathLike
from ope_gym.trajectories import Trajectories, join
from ope_gym.validation import Options, check_options
from ope_gym.weights import IntArray

_METHODS = ("weighted", "direct")


def evaluate_shards(
    shards: Shard | Iterable[Shard],
    target: Policy,
    *,
    estimators: str | Iterable[str] = ("BIS", "NBIS", "FIS", "NFIS"),
    data: str = "all",
    origin: str | None = None,
    q_model: LinearQ | None = None,
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | np.random.Generator | None = None,
    resamples: int = 1000,
    block_steps: int = 1 << 17,
    scratch: PathLike | None = None,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """The value of `target`, from episodes that need not fit into memory.

    The result is that of `ope_gym.evaluate` on all episodes together. Bootstrap intervals differ
    in their draws, which depend on the trajectories alone (see `ope_gym.poisson`).

    Args:
        shards: files of episodes, trajectories or buffers, functions that make them, or one of
            these. Each is visited once a pass. Equal policies are one behaviour; policies that
            change during episodes are refused.
        target: the policy to evaluate.
        estimators: BIS, BCIS, NBIS, NBCIS, FIS, FCIS, NFIS, NFCIS, OUIS (deterministic rewards),
            NOUIS; with a q model also DM, DR, WDR, FDR, FWDR.
        data: "all" episodes, or only the "held-out" ones.
        origin: as in `ope_gym.evaluate`.
        q_model: a `LinearQ` for the estimators that need one, with polynomial features (its own) or
            a plain callable; the target then needs a finite action set.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile" or "bca".
        level: confidence level of the intervals.
        rng: seed or generator of the bootstrap draws.
        resamples: bootstrap replicates; they take (2, resamples, longest episode) numbers for every
            normalised estimator.
        block_steps: about how many steps to hold in memory at once.
        scratch: a folder on a disk for the weights of the second pass, 8 bytes a step for each
            weighting scheme and for the reward; without it the third pass evaluates all policies
            again.
        progress: called with the number of steps just done; the second pass does all steps once,
            and normalised estimators do them once more.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.
    """
    options = check_options(estimators, gamma, cap, interval, level, rng, resamples, None, None)
    _refuse(options, target, q_model)
    source = _Source(Shards(shards, block_steps), _census(Shards(shards, block_steps), data))
    mixture, done = source.mixture, progress or (lambda steps: None)
    uses_q = any(ESTIMATORS[name].baseline for name in options.estimators)
    q = source.fit(q_model, target, gamma) if q_model is not None and uses_q else None
    second = WeightPass(mixture, target, options)
    normalised = bool(keys_of(options.estimators, normalised=True))
    with Spool(scratch if normalised else None) as spool:
        for name, chunk, baseline in source.with_values(q):
            spool.add(second.update(name, chunk, baseline))
            done(chunk.n_steps)
        _check_same(mixture, second.counts, 2)
        draws = None
        if interval != "ess-t":
            draws = poisson.PoissonDraws(
                poisson.identities(np.concatenate(second.hashes)), np.concatenate(second.ids),
                options.resamples, options.seed,
            )  # fmt: skip
        third = NormalisedPass(second, draws)
        again: Iterator[WeightedChunk] = iter(())
        if normalised:
            again = spool.chunks() if scratch is not None else _weigh_again(source, second, q)
        for weighted in again:
            third.update(weighted)
            done(weighted.columns["rewards"].size)
    return estimates_of(second, third, origin)


def _refuse(options: Options, target: Policy, q_model: LinearQ | None) -> None:
    if not (hasattr(target, "log_prob") and hasattr(target, "sample")):
        raise TypeError(
            f"target is {target!r}, which has no log_prob and sample: give a policy of "
            "ope_gym.policies, or write one"
        )
    if not (q_model is None or isinstance(q_model, LinearQ)):
        raise TypeError(f"q_model is {q_model!r}; shards need a LinearQ, or None")
    for name in options.estimators:
        if ESTIMATORS[name].method not in _METHODS:
            known = (key for key, c in ESTIMATORS.items() if c.method in _METHODS)
            raise ValueError(
                f"estimators has {name!r}, which cannot be evaluated in shards; choose from "
                f"{', '.join(known)}, or load all episodes and use ope_gym.evaluate"
            )
        if ESTIMATORS[name].baseline and q_model is None:
            raise ValueError(
                f"estimators has {name!r}, which needs a q model: give q_model=LinearQ()"
            )
    if options.interval == "betting":
        raise ValueError(
            "interval='betting' cannot be made from shards: choose 'ess-t', 'percentile' or 'bca'"
        )


def _census(shards: Shards, data: str) -> Census:
    if data not in ("held-out", "all"):
        raise ValueError(f"data is {data!r}; choose 'held-out' or 'all'")
    census = Census(held_out=data == "held-out")
    for part in shards.parts():
        census.update(part)
    return census


class _Source:
    """The chosen episodes of all shards, with the policies of all, pass after pass."""

    def __init__(self, shards: Shards, census: Census) -> None:
        self.mixture = census.finalise()
        self._shards, self._held_out = shards, census.held_out

    def __iter__(self) -> Iterator[tuple[str, Trajectories]]:
        """Where they are from, and some episodes; small shards are joined."""
        names: list[str] = []
        waiting: list[Trajectories] = []
        for number, name, chunk in self._shards.chunks():
            chosen = chunk.select(held_out=True) if self._held_out else chunk
            if len(chosen):
                names.append(name)
                waiting.append(self.mixture.renumbered(number, chosen))
            if sum(part.n_steps for part in waiting) >= self._shards.steps:
                yield self._joined(names, waiting)
                names, waiting = [], []
        if waiting:
            yield self._joined(names, waiting)

    def _joined(self, names: list[str], parts: list[Trajectories]) -> tuple[str, Trajectories]:
        name = names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"
        if len(parts) == 1:
            return name, parts[0]
        return name, dataclasses.replace(join(parts), policies=self.mixture.policies)

    def fit(self, model: LinearQ, target: Policy, gamma: float) -> LinearBaseline:
        """The q model, cross-fitted."""
        mixture = self.mixture
        folds = min(FOLDS, mixture.trajectories)
        if folds < 2:
            raise ValueError("q_model needs at least 2 episodes: it learns from one for another")
        features = model.features
        if needs_scale(model):
            scale = ScaleSums()
            for _, chunk in self:
                scale.update(chunk.observations)
            features = scaled_features(model, scale.finalise())
        assert callable(features)  # `needs_scale` refuses all others
        horizon = max(mixture.longest, mixture.described.horizon or 0)
        sums, fold = LinearFit(model, features, target, gamma, horizon, folds), self._folds(folds)
        for _, chunk in self:
            sums.update(chunk, fold.of(mixture.behaviours(chunk).ids))
        return sums.finalise()

    def with_values(
        self, q: LinearBaseline | None
    ) -> Iterator[tuple[str, Trajectories, Baseline | None]]:
        """All chunks, with the values of the q model if there is one."""
        fold = self._folds(1 if q is None else len(q.values))
        for name, chunk in self:
            ids = fold.of(self.mixture.behaviours(chunk).ids)
            yield name, chunk, None if q is None else q.of(chunk, ids)

    def _folds(self, folds: int) -> Folds:
        return Folds(self.mixture.counts, folds)


def _weigh_again(
    source: _Source, second: WeightPass, q: LinearBaseline | None
) -> Iterator[WeightedChunk]:
    mixture, found = source.mixture, np.zeros_like(source.mixture.counts)
    for name, chunk, baseline in source.with_values(q):
        found += mixture.count(chunk)
        yield weigh(mixture, second.target, second.options, name, chunk, baseline)[0]
    _check_same(mixture, found, 3)


def _check_same(mixture: Mixture, found: IntArray, number: int) -> None:
    """Refuse shards that changed between two passes; `found` are the episodes of behaviours."""
    if not np.array_equal(found, mixture.counts):
        raise ValueError(
            f"shards had {mixture.trajectories} episodes in the first pass and {found.sum()} in "
            f"pass {number}, or of other policies: they must not change while they are read; close "
            "the recorder, and give functions that always make the same episodes"
        )
