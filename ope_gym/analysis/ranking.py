"""Which of several policies is best: all of them evaluated on the same trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.analysis.best import DRAWS
from ope_gym.analysis.ranked import Pairwise, Ranked, Ranking
from ope_gym.evaluation import Evaluator
from ope_gym.policies.closed_form import UnavailablePolicy

if TYPE_CHECKING:
    from ope_gym.data.buffer import TrajectoryBuffer
    from ope_gym.data.trajectories import Trajectories
    from ope_gym.models.base import Baseline, QModel
    from ope_gym.policies.closed_form import Policy

__all__ = ["Pairwise", "Ranked", "Ranking", "rank"]


def rank(
    trajectories: Trajectories | TrajectoryBuffer,
    targets: Mapping[str, Policy | int] | Sequence[Policy | int],
    *,
    estimator: str = "auto",
    data: str = "all",
    origin: str | Mapping[str, str] | None = None,
    q_model: QModel | Baseline | str | None = "default",
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | np.random.Generator | None = None,
    resamples: int = 1000,
    reward_range: tuple[float, float] | None = None,
    horizon: int | None = None,
    reward_model: str | tuple[ArrayLike, ArrayLike] = "deterministic",
    mixture: str | int = "auto",
    draws: int = DRAWS,
    progress: Callable[[int], object] | None = None,
) -> Ranking:
    """Several policies from best to worst, each evaluated once on the same trajectories.

    Differences are paired: the luck of the same episodes cancels as far as two policies share it.
    The largest of several estimates tends to exceed the value behind it, the more so the noisier
    they are: the probability of being best and the cautious choice know of that, its rank does not.

    Args:
        trajectories: recorded episodes with the policies that acted.
        targets: policies by name; or a list, whose policies are named "target 0", "target 1", ...
            A number stands for a policy recorded in the trajectories, "policy 7".
        estimator: a name of `ope_gym.ESTIMATORS`.
        data: "all" episodes, or only the "held-out" ones.
        origin: "learned" or "fixed", for all targets or by name; as in `ope_gym.evaluate`.
        q_model: as in `ope_gym.evaluate`, and so are the options up to `mixture`.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile", "bca" or "betting".
        level: confidence level, also of the differences.
        rng: seed or generator of all draws; a fixed seed by default.
        resamples: bootstrap replicates.
        reward_range: lowest and highest possible reward, for "betting".
        horizon: longest possible episode, for "betting".
        reward_model: for OUIS.
        mixture: "all", "auto" or the largest number of behaviours in a mixture.
        draws: joint draws behind the probability of being best, where there is no bootstrap.
        progress: called with 1 after each policy.

    Returns:
        A mapping from name to `Ranked`, the best first; print it for a table.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; give at least 1, better {DRAWS:,}")
    if not isinstance(estimator, str):
        raise ValueError(f"estimator is {estimator!r}; a ranking takes one name, such as 'auto'")
    seed = int(rng.integers(1 << 62)) if isinstance(rng, np.random.Generator) else rng
    evaluator = Evaluator(
        trajectories,
        estimators=estimator,
        data=data,
        q_model=q_model,
        gamma=gamma,
        cap=cap,
        interval=interval,
        level=level,
        rng=seed,
        resamples=resamples,
        reward_range=reward_range,
        horizon=horizon,
        reward_model=reward_model,
        mixture=mixture,
    )
    named = named_targets(targets, evaluator.data.policies)
    origins = origin if isinstance(origin, Mapping) else dict.fromkeys(named, origin)
    unknown = [name for name in origins if name not in named]
    if unknown:
        raise ValueError(f"origin names {unknown[0]!r}; the targets are {', '.join(named)}")
    estimates = {}
    for name, policy in named.items():
        estimates[name] = evaluator.evaluate(policy, origin=origins.get(name))[estimator]
        if progress is not None:
            progress(1)
    return Ranking.of(estimates, draws=draws, seed=int(seed or 0))


def named_targets(
    targets: Mapping[str, Policy | int] | Sequence[Policy | int], policies: Sequence[Policy]
) -> dict[str, Policy]:
    """The targets by name, numbers replaced by the recorded policies they stand for."""
    if not isinstance(targets, Mapping | list | tuple | range | np.ndarray):
        raise TypeError(f"targets is {targets!r}; give policies by name, or a list of them")
    pairs: list[tuple[str, Policy | int]] = (
        list(targets.items())
        if isinstance(targets, Mapping)
        else [(f"policy {t}" if _is_number(t) else f"target {i}", t) for i, t in enumerate(targets)]
    )
    if not pairs:
        raise ValueError("targets is empty: give at least one policy, better two")
    named: dict[str, Policy] = {}
    for name, target in pairs:
        if name in named:
            raise ValueError(f"targets has {name} twice")
        named[name] = _recorded(int(target), policies) if _is_number(target) else target  # type: ignore[arg-type,assignment]
    return named


def _is_number(target: object) -> bool:
    return isinstance(target, int | np.integer) and not isinstance(target, bool)


def _recorded(number: int, policies: Sequence[Policy]) -> Policy:
    if not 0 <= number < len(policies):
        raise ValueError(f"targets has {number}: the data have policies 0 to {len(policies) - 1}")
    policy = policies[number]
    if isinstance(policy, UnavailablePolicy):
        raise ValueError(f"targets has {number}, but that policy cannot be asked: {policy!r}")
    return policy
