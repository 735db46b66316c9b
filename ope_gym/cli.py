"""Evaluate, compare or describe recorded policies; only `gate` plays the environment.

Examples:
  ope-gym info episodes.ope                                  what is in the file
  ope-gym evaluate episodes.ope                              the value of the last policy
  ope-gym evaluate episodes.ope --target 3 --data all --interval bca
  ope-gym evaluate episodes.ope --estimators NFIS FIS --json result.json
  ope-gym evaluate run_*.ope --workers 8                     files that do not fit into memory
  ope-gym evaluate table.parquet folder                      tables with a row for each step
  ope-gym rank episodes.ope --policies 5-9 last              which of them is best
  ope-gym distribution episodes.ope --below 100              quantiles, tail, chance of failure
  ope-gym fit-behaviour log.parquet --save fitted.ope
                                                             propensities that nobody recorded
  ope-gym plan episodes.ope --standard-error 2               what to collect, and how much
  ope-gym check episodes.ope                                 can such estimates be trusted
  ope-gym report episodes.ope --html report.html             values, overlap, ranking on a page
  ope-gym gate episodes.ope --env CartPole-v1 --bounds 0 500
                                                             is the new checkpoint better

`ope-gym evaluate --help` explains the options and lists the estimators; `python -m ope_gym` is the
same as `ope-gym`. Files of episodes are written by train.py and by the recorders of the package
wrappers, Parquet files by `Trajectories.to_parquet`; Parquet files from elsewhere need the
documented column names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ope_gym import __version__
from ope_gym.analysis.behaviour import MODELS, fit_behaviour
from ope_gym.analysis.contributions import contributions
from ope_gym.analysis.distribution import QUANTILES, TAIL, distribution
from ope_gym.analysis.duel import LIMIT, duel
from ope_gym.analysis.leave_one_out import leave_one_policy_out
from ope_gym.analysis.overlap import overlap
from ope_gym.analysis.planning import MOST_EPISODES, episodes_needed
from ope_gym.analysis.ranking import DRAWS, rank
from ope_gym.compiling import compilation_shown
from ope_gym.data.roster import Roster, join_rosters
from ope_gym.data.spaces import brief
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import (
    ALIASES,
    ESTIMATORS,
    PAPER,
    RECOMMENDED,
    by_recommendation,
)
from ope_gym.evaluation import Evaluator
from ope_gym.flags import COMMON, HELD_OUT, WITHOUT_BETTING, add_flags, options_from
from ope_gym.models.base import FOLDS
from ope_gym.options import Compute
from ope_gym.policies import Target, UnavailablePolicy
from ope_gym.policies.convert import is_saved
from ope_gym.report import text
from ope_gym.report.page import report_page
from ope_gym.scale.sources import Source, load_source, open_source
from ope_gym.scale.workers import Workers
from ope_gym.stopping import exit_code, unmasked

_INFO = """Describe files of recorded episodes: their size, and a line for each policy.

The number of a policy is the one to give to the other commands. Policies are numbered across all
files, and equal ones share a number.
"""
_EVALUATE = """Estimate the value of a policy from recorded episodes.

The answer comes first: what the policy is worth, how sure that is, and whether to use it. The table
has a row for each estimator, the recommended one first: its value, standard error and interval, the
effective sample size (ESS), how many fresh episodes would be as accurate, and a verdict. The lines
below it say why a verdict is not green, and what would help.

Files with many steps are read in blocks, so they need not fit into memory. The result does not
depend on the number of workers.
"""
_RANK = f"""Rank policies: which of several is best.

Every policy is evaluated on the same episodes, so their common luck cancels in the differences.
"to the best" is the paired difference to the first one, with its standard error. P(best) is the
share of {DRAWS:,} joint draws of all values, from their estimated errors, in which a policy comes
first. Trust the order only as far as the verdicts are green.
"""
_DISTRIBUTION = """Estimate the distribution of a policy's returns, not only their mean.

The table has the mean, the standard deviation, quantiles, the mean of the worst share of the
episodes (CVaR) and, with --below, the probability of a return below a number. "rests on" is the
number of effective episodes that determine a line; a question mark stands for fewer than 10.
"""
_FIT = """Estimate the probabilities of recorded actions, if nobody recorded them.

The column "policy" of a table says who acted; with --by none, it was one logger. A model of each
logger learns which action follows which observation, and the probability of an action comes from a
model that did not see its episode. The table says how well the actions of left-out episodes are
predicted. "slope" is 1 if the probabilities are right, below 1 if they are too sure, above 1 if
they are too cautious. The other commands take the file that --save writes, and say in every
result that the propensities were estimated.
"""
_PLAN = """Plan what to collect for a smaller error.

First, what the episodes of each past policy contribute to the estimate of the target: their share
of the weight, their effective sample size (ESS), their share of the variance, and the standard
error without them. Then, how many more episodes of each policy, or of the target itself, would
bring the standard error down to the one you want, as predicted from the recorded episodes.
"""
_REPORT = """Write one page about a policy: the answer, the estimates, reasons for caution, the
effective sample size over the episode, the overlap of policies, and a ranking of the recorded ones.

The page is a single file that needs no network.
"""
_CHECK = """Check whether estimates from these files can be trusted.

Each recorded policy is estimated from the episodes of the others, and compared with the mean return
of its own episodes. z is the difference in units of its standard error. If all is well, about 95 %
agree. Red estimates may disagree, green ones should not. Without held-out episodes (--data all) the
estimates of later policies are optimistic, because these policies learned from the same episodes.
"""
_GATE = """Decide with few fresh episodes whether a new checkpoint may replace the old one.

Both policies play the environment, in pairs or one policy drawn by lot, until it is certain whether
the new one is better; recorded episodes only speed this up. You may look after every episode: the
total probability of a wrong pass or fail is at most 1 - level. This rests on one of --bounds,
--reward-range, --deviation and --symmetric, which must be true.

With --margin M the new one passes if it is certain to be at most M worse than the old one, and
fails if it is certain to be more than M worse.

exit code, for CI:
  0  pass: better than the old one, or at most the margin worse
  1  fail: worse than the old one, by more than the margin
  2  undecided: neither is certain after --limit pairs of episodes; raise it, or give a --margin,
     with a new file for --state, because a file keeps to its rules
  3  the command could not be run
With --state, a stopped gate goes on where it left off.
"""
_UNABLE = 3  # exit code of a gate that could not be run; 2 is that of one that is undecided


class Said(NamedTuple):
    """The answer of a command.

    Args:
        text: to be printed.
        to_json: writes it to a file.
        draw: draws it to a file.
        code: exit code.
    """

    text: str
    to_json: Callable[[Path], object] | None = None
    draw: Callable[[Path], object] | None = None
    code: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = make_parser()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _check_command(parser, words)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(args.parser, unknown)
    except SystemExit as stop:
        if stop.code == 2 and words[:1] == ["gate"]:
            raise SystemExit(_UNABLE) from None
        raise
    try:
        _check_places(args)
        with compilation_shown(), unmasked():
            said: Said = args.run(args)
        _print(said.text)
        if said.to_json is not None and args.json:
            said.to_json(args.json)
        if said.draw is not None and args.figure:
            said.draw(args.figure)
    except KeyboardInterrupt as stop:
        again = "; give the same command to go on" if getattr(args, "state", None) else ""
        print(f"\nstopped{again}", file=sys.stderr)
        return exit_code(stop)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _UNABLE if args.run is gate_command else 2
    return said.code


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with the command that a wrong one resembles."""
    (known,) = (list(a.choices or ()) for a in parser._actions if a.dest == "command")
    if not words:
        parser.exit(2, parser.format_help())
    word = words[0]
    if word[:1] != "-" and word not in known:
        near = ["gate"] if word == "duel" else get_close_matches(word, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        parser.error(f"there is no command {word!r}; {hint}")


def _refuse(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with the usage of the command, and the options that a wrong one resembles."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = [
        match for word in words if word[0] == "-" for match in get_close_matches(word, known, 1)
    ]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def _print(said: str) -> None:
    """Print to a reader that may have gone, as `head` does."""
    try:
        print(said, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_places(args: argparse.Namespace) -> None:
    """Raise if a file is missing or cannot be written, before the work is done."""
    for name in ("json", "figure", "html", "save"):
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
        from ope_gym.report.canvas import new_figure

        canvas = new_figure(1.0, 1.0).canvas  # or it says what is missing
        _check_ending("figure", args.figure, canvas.get_supported_filetypes())
    if getattr(args, "html", None) is not None:
        _check_ending("html", args.html, ("html", "htm"))
    for file in () if getattr(args, "ray", None) else args.files:  # other nodes may have it
        if not file.exists():
            raise ValueError(
                f"FILE {file}: there is no such file; give episodes that train.py or a recorder "
                "wrote, or a Parquet file"
            )


def _check_ending(name: str, path: Path, endings: Iterable[str]) -> None:
    """Raise if the name of a file says that it is of another kind."""
    if path.suffix.lower().removeprefix(".") not in endings:
        raise ValueError(f"--{name} {path}: its name must end in .{' or .'.join(endings)}")


# Commands --------------------------------------------------------------------------------------


def info_command(args: argparse.Namespace) -> Said:
    """Describe files: their size, and a line for each policy, numbered as `evaluate` does."""
    loaded = [(str(path), Trajectories.load(path)) for path in args.files]
    _, numbers = join_rosters([(name, Roster.of(data)) for name, data in loaded])
    said: list[str] = []
    for (name, data), own in zip(loaded, numbers, strict=True):
        alone = len(loaded) == 1  # numbered as the file does
        said += [] if alone else [name]
        said += _described(data, range(len(data.policies)) if alone else own.policies.tolist())
    return Said("\n".join(said))


def _described(data: Trajectories, numbers: Sequence[int]) -> Iterator[str]:
    """Yield lines about a file whose policies have these numbers."""
    yield repr(data)
    if data.observation_space is not None:
        seen = brief(data.observation_space, bounds=True)
        yield f"observations {seen}, actions {brief(data.action_space, bounds=True)}"
    if data.horizon is not None:
        yield f"time limit {data.horizon}"
    start = data.policy_ids[data.offsets[:-1]]
    returns = data.returns()
    for k, (number, policy) in enumerate(zip(numbers, data.policies, strict=True)):
        mine = start == k
        count = int(np.count_nonzero(mine))
        mean = f"mean return {returns[mine].mean():.5g}, " if count else ""
        yield f"policy {number}: {count} episodes, {mean}{policy!r}"


def evaluate_command(args: argparse.Namespace) -> Said:
    """Estimate the value of one policy."""
    with _bar("steps") as bar:
        options = options_from(args, progress=bar.update)
        target = _target(args.target)
        evaluator = Evaluator(_source(args, options["compute"]), args.estimators, **options)
        bar.reset(evaluator.steps * evaluator.passes(target))
        evaluation = evaluator.evaluate(target, origin=args.origin)
    return Said(evaluation.table(verbose=args.verbose), evaluation.to_json)


def rank_command(args: argparse.Namespace) -> Said:
    """Rank several policies from best to worst."""
    source = _source(args)
    numbers = _numbers(args.policies, source)
    if not numbers:  # no recorded policy can give probabilities, and this says why
        source.policy(0, "--policies")
    with _bar("policies", len(numbers)) as bar:
        options = options_from(args, progress=bar.update)
        ranking = rank(source, numbers, args.estimator, origin=args.origin, **options)
    said = ranking.table(verbose=args.verbose)
    if args.differences:
        said += f"\n\n{ranking.differences()}"
    return Said(said, ranking.to_json, lambda path: ranking.plot().savefig(path))


def distribution_command(args: argparse.Namespace) -> Said:
    """Estimate the distribution of one policy's returns."""
    source = _source(args)
    target = _target(args.target)
    found = distribution(
        source,
        target,
        origin=args.origin,
        q_model=None if args.q_model == "none" else args.q_model,
        gamma=args.gamma,
        interval=args.interval,
        level=args.level,
        resamples=args.resamples,
        seed=args.seed,
    )
    shown = {"quantiles": args.quantiles, "tail": args.tail, "below": args.below}
    return Said(
        f"{source.name_of(target)}: {found.table(**shown)}",
        lambda path: found.to_json(path, **shown),
        lambda path: found.plot(args.tail).savefig(path),
    )


def fit_command(args: argparse.Namespace) -> Said:
    """Estimate propensities, and write episodes that have them."""
    found = fit_behaviour(
        args.files,
        model=args.model,
        by=None if args.by == "none" else args.by,
        actions=args.actions,
        folds=args.folds,
        seed=args.seed,
    )
    said = str(found)
    if args.target is not None:
        said += f"\n{text.wrap(str(found.overlap(_target(args.target))))}"
    if args.save is not None:
        found.trajectories.save(args.save)
        said += f"\nepisodes with estimated propensities: {args.save}"
    return Said(said, found.to_json, lambda path: found.plot().savefig(path))


def gate_command(args: argparse.Namespace) -> Said:
    """Set a new checkpoint against the old one on fresh episodes."""
    import gymnasium as gym

    source = _source(args)
    new, rival = (_contender(getattr(args, flag), flag, source) for flag in ("new", "old"))
    found = duel(
        new,
        rival,
        data=source,
        bounds=None if args.bounds is None else tuple(args.bounds),
        reward_range=None if args.reward_range is None else tuple(args.reward_range),
        horizon=args.horizon,
        deviation=args.deviation,
        symmetric=args.symmetric,
        margin=args.margin,
        level=args.level,
        gamma=args.gamma,
        limit=args.limit,
        seed=args.seed,
        state=args.state,
    )
    try:
        env = gym.make(args.env)
    except gym.error.Error as error:
        raise ValueError(f"--env {args.env}: {error}") from None
    with _bar("episodes", 2 * args.limit) as bar:
        bar.update(found.episodes)
        while found.not_worse() is None and found.episodes < 2 * args.limit:
            found.play(env, 1, gate=True)
            bar.update(found.episodes - bar.n)
            if args.state is not None:
                found.save(args.state)
    env.close()
    passed = found.not_worse()
    ends = found.interval
    better = "better"
    if args.margin and ends.low < 0.0:
        better = f"at most {min(-ends.low, args.margin):.5g} worse, and {args.margin:g} is allowed"
    beyond = f" by more than the {args.margin:g} that is allowed" if args.margin else ""
    said = {
        True: f"pass: the new policy is {better}",
        False: f"fail: the new policy is worse{beyond}",
        None: f"undecided: the limit of {text.count(args.limit, 'pair')} is reached",
    }[passed]
    words = (
        f"{said} ({found.confidence()})\n"
        f"{_called(new, args.new)} (new) - {_called(rival, args.old)} (old): "
        f"{found.difference:.5g}, within "
        f"[{ends.low:.5g}, {ends.high:.5g}], after {text.count(found.episodes, 'fresh episode')}"
    )
    return Said(words, found.save, code={True: 0, False: 1, None: 2}[passed])


def _contender(word: str, flag: str, source: Source) -> Target:
    """Return the number of a recorded policy, the path of a saved model, or an imported policy."""
    if is_saved(word):
        return word
    if ":" in word:
        return imported(f"--{flag}", word)()
    size = len(source.policies)
    latest = list(source.owners[-1][1]) if source.owners else []
    order = [
        k for k in range(size) if k not in latest
    ] + latest  # those of the last file at the end
    named = {"last": order[-1:], "previous": order[-2:-1]}
    number = next(iter(named.get(word, [int(word)] if word.isdigit() else [])), -1)
    if not 0 <= number < size:
        raise ValueError(
            f"--{flag} {word}: the files hold {text.count(size, 'policy', 'policies')}; give the "
            "number of one, last, a saved model (.zip), or package.module:function that returns a "
            "policy"
        )
    return number


def _called(policy: Target, word: str) -> str:
    """Name a policy of a gate: by its number, or as it was given."""
    return f"policy {policy}" if isinstance(policy, int) else word


def plan_command(args: argparse.Namespace) -> Said:
    """Tell who carries an estimate, and what to collect for a smaller error."""
    source = _source(args)
    target = _target(args.target)
    shares = contributions(source, target, estimator=args.estimator, gamma=args.gamma)
    wanted = args.standard_error
    if wanted is None:
        wanted = shares.standard_error / 2
        if not wanted > 0:
            raise ValueError(
                f"the present standard error is {shares.standard_error:g}, which cannot be halved: "
                "collect some episodes of the target first, or give --standard-error"
            )
    plan = episodes_needed(
        source,
        target,
        wanted,
        policy=_candidate(args.collect),
        estimator=args.estimator,
        gamma=args.gamma,
        limit=args.limit,
    )

    def to_json(path: Path) -> None:
        both = {"contributions": shares.to_dict(), "plan": plan.to_dict()}
        path.write_text(json.dumps(both, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    return Said(f"value of {source.name_of(target)}: {shares}\n\n{plan}", to_json)


def report_command(args: argparse.Namespace) -> Said:
    """Write a page about one policy, beside a ranking of the recorded ones."""
    source = _source(args)
    target, options = _target(args.target), options_from(args)
    evaluation = Evaluator(source, args.estimators, **options).evaluate(target, origin=args.origin)
    numbers = _numbers(args.policies or ["all"], source)[-args.limit :]
    ranking = rank(source, numbers, **options) if len(numbers) > 1 else None
    shares = overlap(source, target, limit=args.limit) if source.roster.known else None
    title = f"{text.sentence(evaluation.target or 'the policy')} ({args.files[0].name})"
    page = report_page(evaluation, ranking=ranking, overlap=shares, title=title)
    args.html.write_text(page, encoding="utf-8")
    return Said(f"{evaluation.headline}\npage: {args.html}", evaluation.to_json)


def check_command(args: argparse.Namespace) -> Said:
    """Estimate each policy from the others' episodes, beside its own mean return."""
    source = _source(args)
    policies = _numbers(args.policies, source) if args.policies else None
    with _bar("policies") as bar:
        options = options_from(args, progress=bar.update)
        calibration = leave_one_policy_out(
            source, args.estimator, policies=policies, limit=args.limit, **options
        )
    return Said(str(calibration), calibration.to_json)


def _bar(unit: str, total: int | None = None) -> Any:
    """Return a progress bar, on a terminal only; it is gone when all is done."""
    from tqdm import tqdm

    large = unit == "steps"
    return tqdm(total=total, unit=f" {unit}", unit_scale=large, disable=None, leave=False)


def _source(args: argparse.Namespace, compute: Compute | None = None) -> Source:
    """Open the files, with stored torch policies made usable by --policy.

    Args:
        args: of the command.
        compute: how to read files that need not fit into memory; without it they are read whole.
    """
    held_out = HELD_OUT[args.data]
    if compute is None:
        source = load_source(args.files, held_out)
    else:
        workers = Workers(compute.workers, compute.ray)
        source = open_source(args.files, held_out, compute.block_steps, workers)
    stored = [isinstance(p, UnavailablePolicy) and p.kind == "torch" for p in source.policies]
    if args.policy is None:
        return source
    if not any(stored):
        raise ValueError(f"--policy {args.policy}: the files hold no torch policy to put into it")
    from ope_gym.policies.torch import TorchPolicy

    made = imported("--policy", args.policy)()
    module, forward = made if isinstance(made, tuple) else (made, None)
    policies = tuple(
        TorchPolicy.restore(policy, module, forward=forward)  # type: ignore[arg-type]
        if torch
        else policy
        for policy, torch in zip(source.policies, stored, strict=True)
    )
    return source.with_policies(policies)


def imported(flag: str, place: str) -> Any:
    """Return what "package.module:name" names; modules in the current folder are found too."""
    module, _, name = place.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{flag} {place}: give package.module:function, which can be imported here ({error})"
        ) from error


def _target(word: str) -> Target:
    """Return the number of a policy, "last", the path of a saved model, or an imported policy."""
    if word == "last" or is_saved(word):
        return word
    if ":" in word:
        return imported("--target", word)()
    try:
        return int(word)
    except ValueError:
        raise ValueError(
            f"--target {word}: give the number of a policy, or last, a saved model (.zip), or "
            "package.module:function that returns a policy"
        ) from None


def _candidate(text: str | None) -> int | str | None:
    if text in (None, "target", "last"):
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--collect {text}: give the number of a policy, last or target") from None


def _numbers(words: Sequence[str], source: Source) -> list[int | str]:
    """Return the policies that words name: 3, 5-8, last, x.zip, or all that give probabilities."""
    policies, size = source.policies, len(source.policies)
    numbers: list[int | str] = []
    for word in words:
        first, dash, last = word.partition("-")
        if word == "all":
            numbers += [k for k, p in enumerate(policies) if not isinstance(p, UnavailablePolicy)]
        elif word == "last":
            numbers.append(source.number(word) or 0)
        elif is_saved(word):
            numbers.append(word)
        elif first.isdigit() and (last.isdigit() if dash else True):
            if dash and int(last) < int(first):
                raise ValueError(f"--policies {word}: write {last}-{first}")
            numbers += range(int(first), int(last if dash else first) + 1)
        else:
            raise ValueError(
                f"--policies {word}: give numbers, ranges such as 5-8, last, all, or saved models "
                "(.zip)"
            )
    outside = [k for k in numbers if isinstance(k, int) and not 0 <= k < size]
    if outside:
        raise ValueError(f"--policies {outside[0]}: the file has policies 0 to {size - 1}")
    return list(dict.fromkeys(numbers))


# Flags -----------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="ope-gym" if Path(sys.argv[0]).stem == "ope-gym" else "python -m ope_gym",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ope-gym {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], Said], brief: str, more: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=brief,
            description=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run, parser=made)
        made.add_argument(
            "files",
            type=Path,
            metavar="FILE",
            nargs="+",
            help="a file of recorded episodes, a Parquet file with a row for each step, or a "
            "folder of Parquet files",
        )
        return made

    command("info", info_command, "describe files of recorded episodes", _INFO)
    value = command("evaluate", evaluate_command, "estimate the value of a policy", _EVALUATE)
    value.epilog = _list_estimators()
    _add_target(value)
    value.add_argument(
        "--estimators",
        nargs="+",
        metavar="NAME",
        help="names from the list below, or the groups paper and all (default: those marked *, as "
        "far as the data allow)",
    )
    add_flags(value, *COMMON, "reward-range", "horizon", "origin")
    who = value.add_mutually_exclusive_group()
    add_flags(who, "workers", "ray")  # type: ignore[arg-type]
    add_flags(value, "block-steps")
    _add_policy(value)
    _add_verbose(value)
    _add_json(value)

    ranked = command("rank", rank_command, "compare several policies and find the best", _RANK)
    _add_policies(ranked, default=["all"])
    _add_policy(ranked)
    _add_estimator(ranked)
    add_flags(ranked, *COMMON, "reward-range", "horizon", "origin")
    ranked.add_argument(
        "--differences",
        action="store_true",
        help="also print the difference of every two policies",
    )
    ranked.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="also draw the ranking to this file (.png, .svg)",
    )
    _add_verbose(ranked)
    _add_json(ranked)

    returns = command(
        "distribution",
        distribution_command,
        "estimate quantiles, tail and spread of the returns",
        _DISTRIBUTION,
    )
    _add_target(returns)
    _add_policy(returns)
    returns.add_argument(
        "--quantiles",
        type=float,
        nargs="*",
        metavar="Q",
        default=list(QUANTILES),
        help="levels of the quantiles, within (0, 1) (default: .05 .25 .5 .75 .95)",
    )
    returns.add_argument(
        "--tail",
        type=float,
        metavar="A",
        default=TAIL,
        help="CVaR is the mean of this worst share of the episodes (default: %(default)s)",
    )
    returns.add_argument(
        "--below",
        type=float,
        nargs="*",
        metavar="X",
        default=[],
        help="also show the probability of a return below X",
    )
    kinds = {
        "choices": ("ess-t", "percentile"),
        "help": "kind of confidence interval: ess-t rests on the effective sample size, percentile "
        "is a bootstrap",
    }
    add_flags(returns, "data", "gamma", "level", "resamples", "seed", "origin")
    add_flags(returns, "interval", interval=kinds)
    model = {
        "default": "none",
        "help": "correct the weights by auto with a model of the action values that also sees the "
        "return so far: default, one of the named, or none",
    }
    add_flags(returns, "q-model", q_model=model)
    returns.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="also draw the distribution function to this file (.png, .svg)",
    )
    _add_json(returns)

    fitted = command(
        "fit-behaviour", fit_command, "estimate propensities that nobody recorded", _FIT
    )
    _add_fit(fitted)

    plan = command("plan", plan_command, "find out what to collect for a smaller error", _PLAN)
    _add_target(plan)
    plan.add_argument(
        "--standard-error",
        type=float,
        metavar="X",
        help="the standard error to reach (default: half of the present one)",
    )
    plan.add_argument(
        "--collect",
        metavar="K",
        help="consider only episodes of this policy, or target for the target itself (default: "
        "every policy)",
    )
    plan.add_argument(
        "--estimator",
        default="NFIS",
        choices=("NFIS", "FIS"),
        help="whose standard error to plan for (default: %(default)s)",
    )
    _add_policy(plan)
    add_flags(plan, "data", "gamma")
    plan.add_argument(
        "--limit",
        type=int,
        metavar="N",
        default=MOST_EPISODES,
        help=f"plan for at most N more episodes (default: {MOST_EPISODES:,})",
    )
    _add_json(plan)

    page = command("report", report_command, "write one page about a policy", _REPORT)
    _add_target(page)
    page.add_argument(
        "--html", type=Path, required=True, metavar="FILE", help="the page to write, an .html file"
    )
    page.add_argument(
        "--estimators",
        nargs="+",
        metavar="NAME",
        help="as in `evaluate` (default: auto and NFIS, as far as the data allow)",
    )
    _add_policies(page)
    _add_policy(page)
    page.add_argument(
        "--limit",
        type=int,
        metavar="N",
        default=12,
        help="rank and compare at most N of the policies, the last ones (default: %(default)s)",
    )
    add_flags(page, *COMMON, "origin", interval=WITHOUT_BETTING)
    _add_json(page)

    check = command("check", check_command, "check whether such estimates can be trusted", _CHECK)
    _add_policies(check, saved="")
    _add_policy(check)
    check.add_argument(
        "--limit",
        type=int,
        metavar="N",
        default=24,
        help="check at most N policies, evenly spread over all (default: %(default)s)",
    )
    _add_estimator(check)
    add_flags(check, *COMMON, interval=WITHOUT_BETTING)
    _add_json(check)

    gate = command("gate", gate_command, "let a new checkpoint pass or fail, for CI", _GATE)
    _add_gate(gate)
    return parser


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="PACKAGE:FACTORY",
        help="for files recorded with torch policies: a function that returns a module of their "
        "architecture, or (module, forward); the stored numbers are put into it",
    )


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the fitted episodes to this file"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="auto",
        help="auto is the best of shares, counts, logit and logit2 on left-out steps (default: "
        "auto)",
    )
    parser.add_argument(
        "--by",
        choices=("policy", "none"),
        default="policy",
        help="a model for each recorded policy, or one for all episodes (default: policy)",
    )
    parser.add_argument(
        "--actions", type=int, metavar="N", help="number of actions (default: as recorded)"
    )
    parser.add_argument(
        "--folds",
        type=int,
        metavar="N",
        default=FOLDS,
        help="number of folds (default: %(default)s)",
    )
    parser.add_argument(
        "--target",
        metavar="K",
        help="also say how well the loggers cover what this policy does: a saved model (.zip), or "
        "package.module:function that returns a policy",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="also draw the reliability curve to this file (.png, .svg)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the network (default: 0)")
    _add_json(parser)


def _add_gate(gate: argparse.ArgumentParser) -> None:
    gate.add_argument("--env", required=True, metavar="ID", help="the environment to play")
    gate.add_argument(
        "--new",
        default="last",
        metavar="K",
        help="the new policy: its number, or last; a saved model of Stable-Baselines3 (.zip); or "
        "package.module:function that returns a policy (default: last)",
    )
    gate.add_argument(
        "--old",
        default="previous",
        metavar="K",
        help="the old policy, named in the same way (default: the last but one)",
    )
    ends = gate.add_mutually_exclusive_group(required=True)
    ends.add_argument(
        "--bounds",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="lowest and highest possible return of an episode",
    )
    ends.add_argument(
        "--reward-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="instead: lowest and highest possible reward, with the time limit",
    )
    ends.add_argument(
        "--deviation",
        type=float,
        metavar="S",
        help="instead: largest standard deviation of the difference of two returns with one seed",
    )
    ends.add_argument(
        "--symmetric",
        action="store_true",
        help="instead: the difference of two independent returns is symmetric around its mean; "
        "every episode has a seed of its own",
    )
    gate.add_argument(
        "--horizon", type=int, metavar="N", help="time limit (default: the recorded one)"
    )
    gate.add_argument(
        "--margin",
        type=float,
        default=0.0,
        metavar="M",
        help="by how much the new policy may be worse (default: %(default)s)",
    )
    gate.add_argument(
        "--limit",
        type=int,
        default=LIMIT,
        metavar="N",
        help="play at most N pairs of episodes (default: %(default)s)",
    )
    gate.add_argument("--state", type=Path, metavar="FILE", help="keep the rounds in this file")
    _add_policy(gate)
    add_flags(gate, "data", "gamma", "level", "seed", seed={"help": "seed of the fresh episodes"})
    _add_json(gate)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default="last",
        metavar="K",
        help="the policy to evaluate: its number, as `info` lists them, or last; a saved model of "
        "Stable-Baselines3 (.zip); or package.module:function that returns a policy (default: "
        "last)",
    )


def _add_policies(
    parser: argparse.ArgumentParser,
    default: list[str] | None = None,
    saved: str = ", or saved models (.zip)",
) -> None:
    parser.add_argument(
        "--policies",
        nargs="+",
        default=default,
        metavar="K",
        help="numbers as `info` lists them, ranges such as 5-8, last, or all"
        f"{saved} (default: all)",
    )


def _add_estimator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--estimator",
        default="auto",
        metavar="NAME",
        help="a name from the list of `evaluate --help` (default: %(default)s)",
    )


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also show notes, the advice for each row and internals of the estimators",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result to this file"
    )


def _list_estimators() -> str:
    """Return a line for each estimator, with its use."""
    lines = ["estimators (* by default, + with --estimators paper, all with --estimators all):"]
    for name in by_recommendation(ESTIMATORS):
        mark = "*" if name in RECOMMENDED else "+" if name in PAPER else " "
        lines.append(f"  {mark} {name:6} {ESTIMATORS[name].use}")
    aliases = text.grouped({alias: name for alias, name in ALIASES.items()})
    said = "; ".join(f"{', '.join(others)} for {name}" for name, others in aliases.items())
    return "\n".join([*lines, f"names that others use: {said}"])
