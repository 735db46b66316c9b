"""The commands before and after recording: propensities nobody recorded, and what to collect."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import ope_gym
from ope_gym.commands.inputs import (
    CommandResult,
    File,
    Output,
    Policy,
    Recorded,
    episodes_of,
    target_named,
)
from ope_gym.commands.signature import takes
from ope_gym.files import write_file


@takes(lambda: ope_gym.fit_behaviour, "model", "by", "actions", "folds", "seed")
def fit_behaviour(
    files: list[File],
    *,
    column: dict[str, str] | None = None,
    save: Output | None = None,
    json: Output | None = None,
    **options: Any,
) -> CommandResult:
    """Estimate the probabilities of recorded actions, if nobody recorded them.

    The column "policy" of a table says who acted; with --by none, it was one logger. A model of
    each logger learns which action follows which observation, and the probability of an action
    comes from a model that did not see its episode. The table says how well the actions of left-out
    episodes are predicted. "slope" is 1 if the probabilities are right, below 1 if they are too
    sure, above 1 if they are too cautious. The other commands take the file that --save writes, and
    say in every result that the propensities were estimated.

    Args:
        save: File for the episodes with estimated propensities.
        by: Loggers: policy for the recorded policy numbers, none for one logger of all episodes.
        actions: Number of actions (default: what the action space says, or the largest seen).
    """
    fit = ope_gym.fit_behaviour(episodes_of(files, column), **options)
    lines = [str(fit)]
    if save is not None:
        fit.trajectories.save(save)
        lines.append(f"episodes with estimated propensities: {save}")
    return CommandResult("\n".join(lines), [(json, fit.to_json)])


@takes(lambda: ope_gym.episodes_needed, "limit")
def plan(
    recorded: Recorded,
    *,
    target: Policy = "last",
    standard_error: float | None = None,
    collect: Policy | None = None,
    estimator: Annotated[str, ("NFIS", "FIS")] = "NFIS",
    gamma: float = 1.0,
    json: Output | None = None,
    **options: Any,
) -> CommandResult:
    """Plan what to collect for a smaller error.

    First, what the episodes of each past policy contribute to the estimate of the target: their
    share of the weight, their effective sample size (ESS), their share of the variance, and the
    standard error without them. Then, how many more episodes of each policy, or of the target
    itself, would bring the standard error down to the one you want, as predicted from the recorded
    episodes.

    Args:
        standard_error: Standard error to reach (default: half of the present one).
        collect: Only policy whose episodes to consider, or target for the target itself (default:
            every policy).
        estimator: Estimator whose standard error to plan for.
    """
    source = recorded.load()
    policy, candidate = target_named(target, source), collect
    if candidate not in (None, "target"):
        candidate = target_named(candidate, source, "collect")
    shares = ope_gym.contributions(source, policy, estimator=estimator, gamma=gamma)
    present = shares.estimate.standard_error
    wanted = present / 2 if standard_error is None else standard_error
    if standard_error is None and not wanted > 0:
        raise ValueError(
            f"the present standard error is {present:g}, which cannot be halved: collect some "
            "episodes of the target first, or give --standard-error"
        )
    needs = ope_gym.episodes_needed(
        source,
        policy,
        wanted,
        policy=candidate,
        estimator=estimator,
        gamma=gamma,
        **options,
    )

    def to_json(path: Path) -> None:
        both = {"contributions": shares.to_dict(), "plan": needs.to_dict()}
        words = json_format.dumps(both, indent=2, allow_nan=False)
        write_file(path, f"{words}\n")

    return CommandResult(
        f"value of {source.name_of(policy)}: {shares}\n\n{needs}", [(json, to_json)]
    )
