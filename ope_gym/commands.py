"""What the commands of `python -m ope_gym` do with a file of recorded episodes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ope_gym.analysis.contributions import contributions
from ope_gym.analysis.leave_one_out import leave_one_policy_out
from ope_gym.analysis.planning import episodes_needed
from ope_gym.analysis.ranking import rank
from ope_gym.arrays import cores
from ope_gym.data.schedules import PolicyTable
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import SHARD_ESTIMATORS
from ope_gym.evaluation import evaluate
from ope_gym.options import check_options
from ope_gym.policies import Policy, UnavailablePolicy
from ope_gym.report.canvas import new_figure

if TYPE_CHECKING:
    from ope_gym.scale.sources import Survey


class Said(NamedTuple):
    """What a command found.

    Args:
        text: to be printed.
        to_json: writes it to a file.
        draw: the same, as a picture.
    """

    text: str
    to_json: Callable[[Path], object] | None = None
    draw: Callable[[Path], object] | None = None


def check_places(args: argparse.Namespace) -> None:
    """Refuse files and folders that cannot be written, before the work is done."""
    for name in ("json", "figure"):
        path: Path | None = getattr(args, name, None)
        if path is not None:
            if str(path) == "-":
                raise ValueError(f"--{name} -: give the name of a file")
            place = path if path.exists() else path.parent
            if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
                raise ValueError(
                    f"--{name} {path}: cannot be written; give a file in a folder that exists and "
                    "can be written"
                )
    if getattr(args, "figure", None) is not None:
        new_figure(1.0, 1.0)  # or it says what is missing
    scratch: Path | None = getattr(args, "scratch", None)
    if scratch is not None and not (scratch.is_dir() and os.access(scratch, os.W_OK)):
        raise ValueError(f"--scratch {scratch}: give a folder that exists and can be written")


def info_command(args: argparse.Namespace) -> Said:
    """The files in words: size, and a line for each policy, numbered as `evaluate` does."""
    table = PolicyTable()
    said: list[str] = []
    for path in args.files:
        data = Trajectories.load(path)
        said += [str(path)] if len(args.files) > 1 else []
        numbers = [table.add(policy) for policy in data.policies]
        alone = len(args.files) == 1  # numbered as the file does
        said += _described(data, range(len(numbers)) if alone else numbers)
    return Said("\n".join(said))


def _described(data: Trajectories, numbers: Sequence[int]) -> Iterator[str]:
    """Lines about a file whose policies have these numbers."""
    yield repr(data)
    if data.observation_space is not None:
        yield f"observations {data.observation_space}, actions {data.action_space}"
    if data.horizon is not None:
        yield f"time limit {data.horizon}"
    start = data.policy_ids[data.offsets[:-1]]
    returns = data.returns()
    for k, (number, policy) in enumerate(zip(numbers, data.policies, strict=True)):
        mine = start == k
        count = int(np.count_nonzero(mine))
        mean = f"mean return {returns[mine].mean():.5g}, " if count else ""
        yield f"policy {number}: {count} episodes, {mean}{policy!r}"


def evaluate_command(data: Trajectories, args: argparse.Namespace) -> Said:
    """The value of one policy."""
    data = _chosen(data, args)
    number = _target(data.policies, args)
    evaluation = evaluate(
        data,
        data.policies[number],
        estimators=args.estimators,
        origin=args.origin,
        q_model=None if args.no_q_model else "default",
        gamma=args.gamma,
        cap=args.cap,
        interval=args.interval,
        level=args.level,
        rng=args.seed,
        resamples=args.resamples,
        reward_range=tuple(args.reward_range) if args.reward_range else None,
        horizon=args.horizon,
        mixture=_mixture(args.mixture),
    )
    return Said(f"value of policy {number}\n{evaluation}", evaluation.to_json)


def evaluate_files_command(args: argparse.Namespace) -> Said:
    """The value of one policy, from files that need not fit into memory together."""
    # These take a while to import, and other commands need none of them.
    from ope_gym.scale.sharded import BLOCK_STEPS, evaluate_survey, model_of, passes, refuse
    from ope_gym.scale.sources import survey
    from ope_gym.scale.spool import scratch_folder
    from ope_gym.scale.workers import start_workers

    options = check_options(
        args.estimators or SHARD_ESTIMATORS,
        args.gamma,
        args.cap,
        args.interval,
        args.level,
        args.seed,
        args.resamples,
        tuple(args.reward_range) if args.reward_range else None,
        args.horizon,
    )
    asked = None if args.no_q_model else "default"
    refuse(options, asked)
    workers = 1 if args.ray else cores() if args.workers is None else args.workers
    with scratch_folder(args.scratch) as folder, start_workers(workers, args.ray) as crew:
        found = survey(args.files, args.data, BLOCK_STEPS, crew)
        if (args.workers or 1) > 1 and len(args.files) == len(found.tasks) == 1:
            print(
                f"note: --workers {workers}: no worker is needed, {args.files[0]} is a single task "
                f"(of about {BLOCK_STEPS:,} steps, or one block: `save` writes but one)",
                file=sys.stderr,
            )
        number, whose = _target_of_files(found, args)
        target = found.mixture.policies[number]
        q_model = model_of(asked, found, target, options, crew)
        with _bar(passes(options, q_model) * found.mixture.steps, "steps") as bar:
            evaluation = evaluate_survey(
                found,
                target,
                options,
                crew,
                origin=args.origin,
                q_model=q_model,
                folder=folder,
                mixture=_mixture(args.mixture),
                progress=bar.update,
            )
    return Said(f"value of policy {number}{whose}\n{evaluation}", evaluation.to_json)


def rank_command(data: Trajectories, args: argparse.Namespace) -> Said:
    """Several policies from best to worst."""
    data = _chosen(data, args)
    numbers = _numbers(args.policies, data)
    with _bar(len(numbers)) as bar:
        ranking = rank(
            data,
            numbers,
            estimator=args.estimator,
            origin=args.origin,
            q_model=None if args.no_q_model else "default",
            gamma=args.gamma,
            cap=args.cap,
            interval=args.interval,
            level=args.level,
            rng=args.seed,
            resamples=args.resamples,
            reward_range=tuple(args.reward_range) if args.reward_range else None,
            horizon=args.horizon,
            mixture=_mixture(args.mixture),
            progress=bar.update,
        )
    text = f"{ranking}\n\n{ranking.differences()}" if args.differences else str(ranking)
    return Said(text, ranking.to_json, lambda path: ranking.plot().savefig(path))


def plan_command(data: Trajectories, args: argparse.Namespace) -> Said:
    """Who carries an estimate, and what to collect for a smaller error."""
    data = _chosen(data, args)
    number = _target(data.policies, args)
    target = data.policies[number]
    shares = contributions(data, target, estimator=args.estimator, gamma=args.gamma)
    wanted = args.standard_error
    if wanted is None:
        wanted = shares.standard_error / 2
        if not wanted > 0:
            raise ValueError(
                f"the present standard error is {shares.standard_error:g}, which cannot be halved: "
                "collect some episodes of the target first, or give --standard-error"
            )
    plan = episodes_needed(
        data,
        target,
        wanted,
        policy=_candidate(args.policy),
        estimator=args.estimator,
        gamma=args.gamma,
        limit=args.limit,
    )

    def to_json(path: Path) -> None:
        both = {"contributions": shares.to_dict(), "plan": plan.to_dict()}
        path.write_text(json.dumps(both, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    return Said(f"value of policy {number}: {shares}\n\n{plan}", to_json)


def check_command(data: Trajectories, args: argparse.Namespace) -> Said:
    """Each policy estimated from the others' episodes, beside its own mean return."""
    with _bar(None) as bar:
        calibration = leave_one_policy_out(
            data,
            estimator=args.estimator,
            data=None if args.data == "auto" else args.data,
            policies=_numbers(args.policies, data) if args.policies else None,
            limit=args.limit,
            q_model=None if args.no_q_model else "default",
            gamma=args.gamma,
            cap=args.cap,
            interval=args.interval,
            level=args.level,
            rng=args.seed,
            resamples=args.resamples,
            progress=bar.update,
        )
    return Said(str(calibration), calibration.to_json)


def _bar(total: int | None, unit: str = "policies") -> Any:
    """How much is done, on a terminal only; gone when all is."""
    from tqdm import tqdm

    large = unit == "steps"
    return tqdm(total=total, unit=f" {unit}", unit_scale=large, disable=None, leave=False)


def _chosen(data: Trajectories, args: argparse.Namespace) -> Trajectories:
    """The episodes that --data asks for."""
    if args.data == "held-out" or (args.data == "auto" and data.held_out.any()):
        data = data.select(held_out=True)
        if not len(data):
            raise ValueError(f"--data held-out: {args.buffer} holds no held-out episode")
    if not data.policies:
        raise ValueError(f"{args.buffer} holds no policy to evaluate")
    return data


def _target(policies: Sequence[Policy], args: argparse.Namespace) -> int:
    """The number of the policy to evaluate."""
    if args.target == "last":
        return len(policies) - 1
    try:
        number = int(args.target)
    except ValueError:
        raise ValueError(f"--target {args.target}: give the number of a policy, or last") from None
    if not 0 <= number < len(policies):
        raise ValueError(f"--target {number}: there are policies 0 to {len(policies) - 1}")
    return number


def _target_of_files(found: Survey, args: argparse.Namespace) -> tuple[int, str]:
    """The number of the policy to evaluate, and of several files the first that has it."""
    names = [os.fspath(path) for path in args.files]
    if args.target != "last":
        number = _target(found.mixture.policies, args)
        name = next(name for name in names if number in found.policies_of(name))
    else:
        name = names[-1]
        if not (own := found.policies_of(name)):
            raise ValueError(
                f"--target last: {name}, the last file, holds no policy; give the number of one, "
                "see `python -m ope_gym info` with all files"
            )
        number = own[-1]
    return number, f", of {name}" if len(names) > 1 else ""


def _mixture(text: str) -> str | int:
    """The option --mixture: a word, or a number; anything else is refused by whoever uses it."""
    return int(text) if text.lstrip("-").isdigit() else text


def _candidate(text: str | None) -> int | str | None:
    if text is None or text == "target":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--policy {text}: give the number of a policy, or target") from None


def _numbers(words: Sequence[str], data: Trajectories) -> list[int]:
    """Policies from words: 3, 5-8, last, all (that can be asked for probabilities)."""
    size = len(data.policies)
    numbers: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if word == "all":
            numbers += [
                k for k, p in enumerate(data.policies) if not isinstance(p, UnavailablePolicy)
            ]
        elif word == "last":
            numbers.append(size - 1)
        elif first.isdigit() and (last.isdigit() if dash else True):
            numbers += range(int(first), int(last if dash else first) + 1)
        else:
            raise ValueError(f"--policies {word}: give numbers, ranges such as 5-8, last, or all")
    outside = [k for k in numbers if not 0 <= k < size]
    if outside:
        raise ValueError(f"--policies {outside[0]}: the file has policies 0 to {size - 1}")
    return list(dict.fromkeys(numbers))
