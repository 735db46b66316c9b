"""The commands that tell what policies are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ope_gym
from ope_gym.commands.inputs import (
    Choices,
    CommandResult,
    File,
    Name,
    Origin,
    Output,
    Picture,
    Policy,
    Recorded,
    Writes,
    column_names,
    target_named,
    targets_named,
)
from ope_gym.commands.signature import takes
from ope_gym.estimators.table import ALIASES, ESTIMATORS, PAPER, RECOMMENDED, by_recommendation
from ope_gym.files import write_file
from ope_gym.options import Compute
from ope_gym.report import text

if TYPE_CHECKING:
    from ope_gym import Trajectories


def progress_bar(unit: str, total: int | None = None) -> Any:
    """Return a progress bar, on a terminal only; it is gone when all is done."""
    from tqdm import tqdm

    scaled = unit == "steps"
    return tqdm(total=total, unit=f" {unit}", unit_scale=scaled, disable=None, leave=False)


def info(files: list[File], *, column: dict[str, str] | None = None) -> CommandResult:
    """Describe files of recorded episodes: their size, and a line for each policy.

    The number of a policy is the one to give to the other commands. Policies are numbered across
    all files, and equal ones share a number. The exit code is 2 if there is no episode.
    """
    from ope_gym.data.roster import Roster, join_rosters

    names = column_names(column)
    read = ope_gym.Trajectories
    loaded = [
        (str(path), read.from_frame(path, **names) if names else read.load(path)) for path in files
    ]
    code = 0 if any(len(data) for _, data in loaded) else 2
    if len(loaded) == 1:  # numbered as the file does
        ((_, data),) = loaded
        return CommandResult("\n".join(_described(data, range(len(data.policies)))), code=code)
    _, rosters = join_rosters([(name, Roster.of(data)) for name, data in loaded])
    lines: list[str] = []
    for (name, data), roster in zip(loaded, rosters, strict=True):
        lines += [name, *_described(data, roster.policies.tolist())]
    return CommandResult("\n".join(lines), code=code)


def _described(data: Trajectories, numbers: Sequence[int]) -> Iterator[str]:
    """Yield lines about a file whose policies have these numbers."""
    from ope_gym.data.spaces import brief

    yield repr(data)
    if data.observation_space is not None:
        spaces = (brief(s, bounds=True) for s in (data.observation_space, data.action_space))
        yield "observations {}, actions {}".format(*spaces)
    if data.horizon is not None:
        yield f"time limit {data.horizon}"
    first_policies, returns = data.policy_ids[data.offsets[:-1]], data.returns()
    for k, (number, policy) in enumerate(zip(numbers, data.policies, strict=True)):
        played = returns[first_policies == k]
        mean = f"mean return {played.mean():.5g}, " if played.size else ""
        yield f"policy {number}: {played.size} episodes, {mean}{policy!r}"


def estimators() -> CommandResult:
    """List the estimators, the recommended ones first.

    Those with * are taken by default, those with + with --estimators paper, and all of them with
    --estimators all, as far as the data allow.
    """
    lines = []
    for name in by_recommendation(ESTIMATORS):
        mark = "*" if name in RECOMMENDED else "+" if name in PAPER else " "
        lines.append(f"{mark} {name:6} {ESTIMATORS[name].use}")
    aliases = ", ".join(f"{alias} for {name}" for alias, name in ALIASES.items())
    return CommandResult("\n".join([*lines, text.wrap(f"names that others use: {aliases}")]))


def evaluate(
    recorded: Recorded,
    choices: Choices,
    compute: Compute,
    *,
    target: Policy = "last",
    estimators: list[Name] | None = None,
    origin: Origin | None = None,
    verbose: bool = False,
    json: Output | None = None,
) -> CommandResult:
    """Estimate the value of a policy from recorded episodes.

    The answer comes first: what the policy is worth, how sure that is, and whether to use it. The
    table has a row for each estimator, the recommended one first: its value, standard error and
    interval, the effective sample size (ESS), how many fresh episodes would be as accurate, and a
    verdict. The lines below it say why a verdict is not green, and what would help.

    Files with many steps are read in blocks, so they need not fit into memory. The result does not
    depend on the number of workers.
    """
    with progress_bar("steps") as bar:
        compute = dataclasses.replace(compute, progress=bar.update)
        options, policy = choices.options(recorded, compute), target_named(target)
        evaluator = ope_gym.Evaluator(recorded.open(compute), estimators, **options)
        bar.reset(evaluator.steps * evaluator.passes(policy))
        evaluation = evaluator.evaluate(policy, origin=origin)
    return CommandResult(evaluation.table(verbose=verbose), [(json, evaluation.to_json)])


def rank(
    recorded: Recorded,
    choices: Choices,
    *,
    policies: list[Policy] = ["all"],  # noqa: B006, not changed
    estimator: Name = "auto",
    origin: Origin | None = None,
    verbose: bool = False,
    json: Output | None = None,
    figure: Picture | None = None,
) -> CommandResult:
    """Rank policies: which of several is best.

    Every policy is evaluated on the same episodes, so their common luck cancels in the differences.
    "to the best" is the paired difference to the first one, with its standard error. P(best) is the
    share of 20,000 joint draws of all values, from their estimated errors, in which a policy comes
    first. Trust the order only as far as the verdicts are green.
    """
    source = recorded.load()
    targets = targets_named(policies, source)
    if not targets:
        source.policy(0, "policies")  # raises and says why it cannot be evaluated
    with progress_bar("policies", len(targets)) as bar:
        options = choices.options(recorded, Compute(progress=bar.update))
        ranking = ope_gym.rank(source, targets, estimator, origin=origin, **options)
    writes: Writes = [(json, ranking.to_json), (figure, lambda path: ranking.plot().savefig(path))]
    return CommandResult(ranking.table(verbose=verbose), writes)


@takes(
    lambda: ope_gym.distribution,
    *("gamma", "level", "resamples", "seed"),
)
def distribution(
    recorded: Recorded,
    *,
    target: Policy = "last",
    quantiles: list[float] = [0.05, 0.25, 0.5, 0.75, 0.95],  # noqa: B006, not changed
    tail: float = 0.1,
    below: list[float] = [],  # noqa: B006, not changed
    origin: Origin | None = None,
    json: Output | None = None,
    figure: Picture | None = None,
    **options: Any,
) -> CommandResult:
    """Estimate the distribution of a policy's returns, not only their mean.

    The table has the mean, the standard deviation, quantiles, the mean of the worst share of the
    episodes (CVaR) and, with --below, the probability of a return below a number. "rests on" is the
    number of effective episodes that determine a line; a question mark stands for fewer than 10.

    Args:
        quantiles: Levels of the quantiles, within (0, 1).
        tail: Worst share of the episodes, whose mean is the CVaR.
        below: Numbers; the probability of a return below each is shown.
        level: Confidence level of the intervals.
    """
    source, policy = recorded.load(), target_named(target)
    returns = ope_gym.distribution(source, policy, origin=origin, **options)
    shown: dict[str, Any] = {"quantiles": quantiles, "tail": tail, "below": below}
    return CommandResult(
        f"{source.name_of(policy)}: {returns.table(**shown)}",
        [
            (json, lambda path: returns.to_json(path, **shown)),
            (figure, lambda path: returns.plot(tail).savefig(path)),
        ],
    )


def report(
    recorded: Recorded,
    choices: Choices,
    *,
    html: Output,
    target: Policy = "last",
    estimators: list[Name] | None = None,
    policies: list[Policy] = ["all"],  # noqa: B006, not changed
    limit: int = 12,
    origin: Origin | None = None,
    json: Output | None = None,
) -> CommandResult:
    """Write one page about a policy that needs no network.

    It shows the answer, the estimates, reasons for caution, the effective sample size over the
    episode, the overlap of policies, and a ranking of the recorded ones.

    Args:
        html: The page to write, an .html file.
        estimators: As in `evaluate` (default: auto and NFIS, as far as the data allow).
        limit: Rank and compare at most N of the policies, the last ones.
    """
    from ope_gym.report.page import report_page

    source, policy = recorded.load(), target_named(target)
    options = choices.options(recorded)
    evaluation = ope_gym.Evaluator(source, estimators, **options).evaluate(policy, origin=origin)
    rivals = targets_named(policies, source)[-limit:]
    overlaps = ope_gym.overlap(source, policy, limit=limit) if source.roster.known else None
    name = Path(recorded.files[0]).name  # a file is a path or a URI
    page = report_page(
        evaluation,
        ranking=ope_gym.rank(source, rivals, **options) if len(rivals) > 1 else None,
        overlap=overlaps,
        title=f"{text.sentence(evaluation.target or 'the policy')} ({name})",
    )
    write_file(html, page)
    return CommandResult(f"{evaluation.headline}\npage: {html}", [(json, evaluation.to_json)])


def check(
    recorded: Recorded,
    choices: Choices,
    *,
    policies: list[Policy] | None = None,
    limit: int = 24,
    estimator: Name = "auto",
    json: Output | None = None,
) -> CommandResult:
    """Check whether estimates from these files can be trusted.

    Each recorded policy is estimated from the episodes of the others, and compared with the mean
    return of its own episodes. z is the difference in units of its standard error. If all is well,
    about 95 % agree. Red estimates may disagree, green ones should not. Without held-out episodes
    (--data all) the estimates of later policies are optimistic, because these policies learned from
    the same episodes.

    The exit code is 2 if no policy could be checked.

    Args:
        policies: Numbers as `info` lists them, ranges such as 5-8, last, or all (default: all).
        limit: Check at most N policies, evenly spread over all.
    """
    source = recorded.load()
    numbers = None if policies is None else targets_named(policies, source)
    with progress_bar("policies") as bar:
        calibration = ope_gym.leave_one_policy_out(
            source,
            estimator,
            policies=numbers,
            limit=limit,
            **choices.options(recorded, Compute(progress=bar.update)),
        )
    code = 0 if len(calibration) else 2
    return CommandResult(str(calibration), [(json, calibration.to_json)], code)
