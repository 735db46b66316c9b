"""Estimate the propensities of recorded actions where nobody wrote them down.

The episodes of each logger are split into folds. The probability of an action comes from a model
that learned from the other folds of its logger, and where an episode is weighed against a mixture
of loggers, all models in that mixture left out its fold. In-sample probabilities are too large for
the very actions that were taken: weights against them are too small, and no error shows it.

A fitted model can be right only if the logger decided by what is in the observations. Data cannot
show whether it did, so the verdict of such an estimate is never green.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arguments import choice, refusal, whole
from ope_gym.arrays import FloatArray, IntArray, finite, folds_within
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.behaviour import LEARNERS, Learner, candidates
from ope_gym.models.folds import FOLDS
from ope_gym.policies.estimated import ALL, EstimatedPolicy
from ope_gym.policies.numerics import flat_leaves
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, load_source

MODELS = ("auto", *LEARNERS)
_STREAM = 271828  # of random numbers, beside the seed
_STEEP = 3.0  # standard errors of the slope that are not chance
_KNOWN = 0.25  # standard error of a slope from which on too little is known to call it right


@dataclass(frozen=True)
class LoggerFit:
    """Say how well the actions of one logger are predicted, in episodes that were left out.

    Args:
        name: Name of the logger.
        episodes: Number of episodes that it recorded.
        steps: Number of steps in them.
        log_loss: Mean of -ln of the estimated probability of the action.
        marginal: The same for the shares of its actions, which ignore the observations.
        slope: Exponent that fits the probabilities to the actions best: 1 if they are right, below
            1 if they are too sure, above 1 if too cautious. NaN for shares: none is defined.
        slope_error: Its standard error, by episodes.
    """

    name: str
    episodes: int
    steps: int
    log_loss: float
    marginal: float
    slope: float
    slope_error: float

    @property
    def explained(self) -> float:
        """Share of the marginal's log loss that the observations explain; below 0 if they harm."""
        return 1.0 - self.log_loss / self.marginal if self.marginal > 0.0 else 0.0

    @property
    def calibrated(self) -> bool | None:
        """Whether the slope is 1 within chance; None where none is defined, as for shares."""
        if not np.isfinite(self.slope_error):
            return None
        return abs(self.slope - 1.0) <= _STEEP * self.slope_error

    @property
    def judgement(self) -> str:
        """The slope in words; nothing where there is none."""
        if np.isnan(self.slope):
            return ""
        if self.calibrated is False:
            return "NOT calibrated"
        return "calibrated" if self.slope_error <= _KNOWN else "too few to tell"

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        derived = {"explained": finite(self.explained), "calibrated": self.calibrated}
        return {**text.plain(self), **derived}


@dataclass(frozen=True, eq=False)
class BehaviourFit:
    """Hold episodes with estimated propensities, and how good these are; prints as a table.

    Attributes:
        trajectories: the episodes, to be given to `ope_gym.evaluate` and all other functions.
        policies: Policies fitted to all episodes of a logger, by its name.
        model: name of the one that was fitted.
        losses: log loss per left-out step of every model that was tried.
        loggers: Quality of the fit to each logger.
    """

    trajectories: Trajectories = field(repr=False)
    policies: dict[str, EstimatedPolicy] = field(repr=False)
    model: str
    losses: dict[str, float]
    loggers: tuple[LoggerFit, ...]

    @property
    def calibrated(self) -> bool | None:
        """Whether the probabilities of all loggers agree with their actions, as far as is known."""
        told = {logger.calibrated for logger in self.loggers}
        return False if False in told else None if None in told else True

    def __str__(self) -> str:
        tried = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        folds = len({p.fold for p in self.trajectories.policies})  # type: ignore[attr-defined]
        table = text.table(
            self.loggers,
            {
                "logger": lambda one: one.name,
                "episodes": lambda one: f"{one.episodes:,}",
                "steps": lambda one: f"{one.steps:,}",
                "log loss": lambda one: f"{one.log_loss:.4f}",
                "marginal": lambda one: f"{one.marginal:.4f}",
                "explained": lambda one: f"{100 * one.explained:.1f} %",
                "slope": lambda one: (
                    f"{one.slope:.2f} ± {one.slope_error:.2f}" if one.judgement else ""
                ),
                "": lambda one: one.judgement,
            },
            left=(0, 7),
        )
        head = (
            f"propensities estimated by {self.model}, cross-fitted in {folds} folds; log loss of "
            f"left-out steps: {tried}"
        )
        lines = [text.wrap(head), *table]
        if self.calibrated is False:
            lines.append(
                text.wrap(
                    "a slope below 1 says that the probabilities are too sure, above 1 that they "
                    "are too cautious: try another model, or more of what the loggers saw"
                )
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; undefined numbers are None."""
        return {
            "model": self.model,
            "losses": dict(self.losses),
            "calibrated": self.calibrated,
            "loggers": [logger.to_dict() for logger in self.loggers],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(), path)


def fit_behaviour(
    episodes: Episodes,
    *,
    model: str = "auto",
    by: str | ArrayLike | None = "policy",
    actions: int | None = None,
    folds: int = FOLDS,
    seed: int = 0,
) -> BehaviourFit:
    """Estimate the probabilities of recorded actions, where they were not recorded.

    `result.trajectories` holds the same episodes with estimated propensities: all functions take
    them, and every result says that they were estimated.

    Args:
        episodes: recorded episodes with finitely many actions, as in `ope_gym.evaluate`; known
            propensities are replaced too.
        model: "shares" (of the actions, whatever was observed), "counts" (observations of few
            whole numbers), "logit" (multinomial), "logit2" (with products of numbers), "network";
            or "auto", the one of shares, counts, logit and logit2 that predicts left-out steps
            best. Logits and networks are those of scikit-learn, the extra `behaviour`.
        by: loggers: "policy" for the recorded policy numbers, None for one logger of all
            episodes, or (n,) a name for each episode, such as its hospital.
        actions: number of actions; by default what the action space says, or the largest seen.
        folds: number of folds into which the episodes of each logger are split.
        seed: seed of the network, and of the draws of estimation errors.
    """
    data = load_source(episodes, held_out=False).data
    assert data is not None  # all of it is in memory
    choice("model", model, MODELS)
    whole("folds", folds, 2)
    whole("seed", seed, 0)
    if actions is not None:
        whole("actions", actions)
    chosen, size = _chosen(data, actions)
    names, logger = _loggers(data, by)
    fold = _folds(names, logger, int(folds))
    task = _Task(data, chosen, size, names, logger, fold, seed)
    kinds = {leaf.dtype.kind for leaf in flat_leaves(data.observations)}
    if model == "counts" and not kinds <= set("iub"):
        raise ValueError(
            "model is 'counts', which counts states of whole numbers, but observations have "
            "fractions: take 'logit', or make classes of them"
        )
    tried = candidates(data.observations) if model == "auto" else (model,)
    fitted = {name: task.left_out(task.cross_fit(LEARNERS[name])) for name in tried}
    losses = {name: -float(data.log_probs.mean()) for name, data in fitted.items()}
    best = min(losses, key=lambda name: losses[name])
    return task.report(best, fitted[best], losses)


@dataclass(frozen=True, eq=False)
class _Task:
    """Episodes whose propensities are to be estimated; G loggers, F folds.

    Args:
        data: the episodes.
        chosen: (S,) number of the action.
        size: Number of actions.
        names: (G,) of the loggers.
        logger: (n,) of each episode.
        fold: (n,) of each episode.
        seed: Seed of the learner.
    """

    data: Trajectories
    chosen: IntArray
    size: int
    names: tuple[str, ...]
    logger: IntArray
    fold: IntArray
    seed: int

    def fit(self, learner: Learner, g: int, left_out: int) -> EstimatedPolicy:
        """Fit the episodes of a logger, but for one fold; `ALL` leaves none out."""
        mine = self.logger == g
        data = self.data.select(episodes=np.flatnonzero(mine & (self.fold != left_out)))
        taken = np.bincount(self.chosen[mine[self.data.episode_ids]], minlength=self.size) > 0
        compact = np.cumsum(taken) - 1  # numbers of the actions that were taken at all
        columns = learner.columns(data.observations)
        x = learner.inputs(data.observations, columns)
        chosen = compact[np.asarray(data.actions, dtype=np.int64).reshape(-1)]
        rng = np.random.default_rng([self.seed, _STREAM, g])  # the same for all folds of a logger
        policy, scatter = learner.fit(x, chosen, int(taken.sum()), rng)
        name = self.names[g] if len(self.names) > 1 else ""  # "all" says nothing elsewhere
        return EstimatedPolicy(policy, columns, learner.degree, taken, g, left_out, scatter, name)

    def cross_fit(self, learner: Learner) -> dict[tuple[int, int], EstimatedPolicy]:
        """Fit every logger as often as it has folds."""
        pairs = sorted(set(zip(self.logger.tolist(), self.fold.tolist(), strict=True)))
        return {pair: self.fit(learner, *pair) for pair in pairs}

    def left_out(self, fitted: dict[tuple[int, int], EstimatedPolicy]) -> Trajectories:
        """Return the episodes as recorded by the models that left them out."""
        number = {pair: i for i, pair in enumerate(fitted)}
        pairs = zip(self.logger.tolist(), self.fold.tolist(), strict=True)
        ids = np.array([number[pair] for pair in pairs], dtype=np.int32)
        data = dataclasses.replace(
            self.data,
            policy_ids=ids[self.data.episode_ids],
            policies=tuple(fitted.values()),
            schedules=(),
            schedule_ids=np.full(len(self.data), -1, self.data.schedule_ids.dtype),
        )
        log_probs = np.log(_probs(data)[np.arange(self.chosen.size), self.chosen])
        return dataclasses.replace(data, log_probs=log_probs)

    def report(self, name: str, data: Trajectories, losses: dict[str, float]) -> BehaviourFit:
        """Say how good the propensities of a model are.

        Args:
            name: Name of the model.
            data: The episodes with these propensities.
            losses: Log loss of every model that was tried.
        """
        probs = _probs(data)
        loggers = []
        for g, logger in enumerate(self.names):
            mine = self.logger == g
            rows = np.flatnonzero(mine[self.data.episode_ids])
            episode, chosen = self.data.episode_ids[rows], self.chosen[rows]
            # Shares without a fold are low where those of the fold are high, so the slope of even
            # ones is below 1 whatever the logger did.
            none = name == "shares"
            slope = (np.nan, np.nan) if none else calibration_slope(probs[rows], chosen, episode)
            loss = -float(data.log_probs[rows].mean())
            marginal = marginal_loss(chosen, self.fold[episode], self.size)
            count = int(np.count_nonzero(mine))
            loggers.append(LoggerFit(logger, count, rows.size, loss, marginal, *slope))
        whole = {n: self.fit(LEARNERS[name], g, ALL) for g, n in enumerate(self.names)}
        return BehaviourFit(data, whole, name, losses, tuple(loggers))


def _chosen(data: Trajectories, actions: int | None) -> tuple[IntArray, int]:
    """Return the number (S,) of each action and how many there are, or raise."""
    plain = not isinstance(data.actions, dict | tuple)
    numbers = np.asarray(data.actions) if plain else np.empty((data.n_steps, 0))
    if numbers.dtype.kind not in "iub" or numbers.size != data.n_steps:
        raise ValueError(
            f"actions have type {numbers.dtype} and shape {numbers.shape}: fit_behaviour estimates "
            "probabilities of whole numbers 0, 1, ..., one a step; make classes of continuous "
            "actions first, or use DM and MDR"
        )
    chosen: IntArray = numbers.reshape(-1).astype(np.int64)
    space = getattr(data.action_space, "n", None)
    size = int(actions if actions is not None else space if space is not None else chosen.max() + 1)
    if chosen.min() < 0 or chosen.max() >= size:
        raise ValueError(
            f"actions go from {chosen.min()} to {chosen.max()}, but there are {size}: give actions "
            "as 0, 1, ..., and their number as actions="
        )
    return chosen, size


def _loggers(data: Trajectories, by: str | ArrayLike | None) -> tuple[tuple[str, ...], IntArray]:
    """Return the names of the loggers and the logger (n,) of each episode."""
    if by is None:
        return ("all",), np.zeros(len(data), dtype=np.int64)
    if isinstance(by, str):
        if by != "policy":
            raise refusal("by", by, "give 'policy', None, or a name for each episode")
        first = data.policy_ids[data.offsets[:-1]]
        if (data.schedule_ids >= 0).any() or np.any(data.policy_ids != first[data.episode_ids]):
            raise ValueError(
                "by is 'policy', but the policy changes during episodes: give by=None for one "
                "logger, or a name for each episode"
            )
        labels: NDArray[Any] = first
        distinct, ids = np.unique(labels, return_inverse=True)
        return tuple(f"policy {k}" for k in distinct), ids.astype(np.int64)
    labels = np.asarray(by)
    if labels.shape != (len(data),):
        known = f"give 'policy', None, or a name for each of {len(data)} episodes"
        raise refusal("by", by, known)
    distinct, ids = np.unique(labels.astype(str), return_inverse=True)
    return tuple(str(name) for name in distinct), ids.astype(np.int64)


def _folds(names: Sequence[str], logger: IntArray, folds: int) -> IntArray:
    """Return the fold (n,) of each episode; every logger has episodes in at least two."""
    counts = np.bincount(logger)
    if counts.min() < 2:
        few = int(np.argmin(counts))
        raise ValueError(
            f"logger {names[few]!r} has {counts[few]} episode: propensities are learned from the "
            "other episodes of a logger; give by= larger groups, or None"
        )
    return folds_within(logger, min(folds, logger.size))


def _probs(data: Trajectories) -> FloatArray:
    """Return (S, A) the probabilities of all actions by the policy that acted."""
    given = {}
    for k in np.unique(data.policy_ids):
        rows = np.flatnonzero(data.policy_ids == k)
        policy: Any = data.policies[k]
        given[k] = rows, policy.probs(batches.take(data.observations, rows))
    probs = np.empty((data.n_steps, next(iter(given.values()))[1].shape[1]))
    for rows, some in given.values():
        probs[rows] = some
    return probs


def marginal_loss(chosen: IntArray, fold: IntArray, actions: int) -> float:
    """Return the mean of -ln of the share that an action has in the other folds.

    Args:
        chosen: (S,).
        fold: (S,).
        actions: how many there are; those that never occur do not count.
    """
    counts = np.zeros((int(fold.max()) + 1, actions))
    np.add.at(counts, (fold, chosen), 1.0)
    others = counts.sum(axis=0) - counts + 0.5 * (counts.sum(axis=0) > 0)
    shares = others / others.sum(axis=1, keepdims=True)
    return -float(np.log(shares[fold, chosen]).mean())


def calibration_slope(
    probs: FloatArray, chosen: IntArray, episode: IntArray
) -> tuple[float, float]:
    """Fit the exponent b of p_a^b / sum_c p_c^b to the chosen actions, with its standard error.

    The log-likelihood is concave in b: its score is sum [l_a - E_b l], l = ln p, its curvature
    - sum Var_b l, and Newton's method finds the root. The error is the sandwich by episodes, since
    what a model gets wrong it gets wrong all through an episode.

    Args:
        probs: (S, A) estimated, of left-out steps.
        chosen: (S,).
        episode: (S,).
    """
    with np.errstate(divide="ignore"):
        logs = np.log(probs)
    used = np.isfinite(logs)
    logs = np.where(used, logs, 0.0)
    taken = logs[np.arange(chosen.size), chosen]
    slope = 1.0
    for _ in range(50):
        parts = np.where(used, np.exp(slope * logs), 0.0)
        parts /= parts.sum(axis=1, keepdims=True)
        mean = np.einsum("na,na->n", parts, logs)
        score = taken - mean
        curvature = float(np.einsum("na,na->", parts, (logs - mean[:, None]) ** 2))
        if not curvature > 1e-12 * chosen.size:
            return 1.0, np.nan  # all actions are equally probable: there is no slope
        move = float(score.sum()) / curvature
        slope += float(np.clip(move, -0.5, 0.5))
        if abs(move) < 1e-10:
            break
    clusters = np.bincount(episode, weights=score)
    return slope, float(np.sqrt(clusters @ clusters)) / curvature
