"""Evaluate, compare or describe recorded policies without the environment.

Examples:
  python -m ope_gym info episodes.ope                          what is in the file
  python -m ope_gym evaluate episodes.ope                      the value of the last policy
  python -m ope_gym evaluate episodes.ope --target 3 --data all --interval bca
  python -m ope_gym evaluate episodes.ope --estimators NFIS FIS --json result.json
  python -m ope_gym evaluate run_*.ope --workers 8             files that do not fit into memory
  python -m ope_gym rank episodes.ope --policies 5-9 last      which of them is best
  python -m ope_gym plan episodes.ope --standard-error 2       what to collect, and how much
  python -m ope_gym check episodes.ope                         can such estimates be trusted
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ope_gym import commands
from ope_gym.analysis.planning import MOST_EPISODES
from ope_gym.analysis.ranking import DRAWS
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import ESTIMATORS, SHARD_ESTIMATORS
from ope_gym.inference.intervals import METHODS
from ope_gym.inference.regimes import ORIGINS
from ope_gym.scale.ray import RAY_HELP, ray_address

_Command: TypeAlias = Callable[[Trajectories, argparse.Namespace], commands.Said]
_COMMANDS: dict[str, _Command] = {
    "evaluate": commands.evaluate_command,
    "rank": commands.rank_command,
    "plan": commands.plan_command,
    "check": commands.check_command,
}
_EVALUATE = f"""The value of a policy, from recorded episodes.

Several files, or one of --shards, --workers, --ray and --scratch, are evaluated in shards: memory
grows by about 150 bytes an episode, not with the steps, and the result depends neither on the
number of workers nor on who they are. Policies are numbered over all files, equal ones once.
Without --estimators: {", ".join(SHARD_ESTIMATORS)}.
"""
_RANK = f"""Which of several policies is best.

Every policy is evaluated on the same episodes, so their common luck cancels in the differences.
"to the best" is the paired difference and its standard error. P(best) is the share of
{DRAWS:,} joint draws of all values, from their estimated errors, in which a policy comes first; few
effective episodes (ESS) leave much open. Trust the order as far as the verdicts are green.
"""
_PLAN = """What to collect for a smaller error.

First, what the episodes of each past policy bring to the estimate of the target: their share of
the weight, how many episodes they are worth (ESS), their share of the variance, and the standard
error without them. Then, how many more episodes of each policy, or of the target itself, would
bring the standard error down to the one you want; predicted from the recorded episodes alone.
"""
_CHECK = """Can estimates from this file be trusted?

Each recorded policy is estimated from the episodes of the others only, and compared with the mean
return of its own. z is the difference in standard errors of both. If all is well, about 95 % agree;
red verdicts may disagree, green ones should not. Without held-out episodes (--data all) estimates
of later policies are optimistic, because they learned from what they are judged by.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        commands.check_places(args)
        found = _result(args)
        _say(found.text)
        _write(found, args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130  # as shells have it for Ctrl-C
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    """To a reader that may have gone, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _result(args: argparse.Namespace) -> commands.Said:
    """What the command finds; several files, or who is to read them, make shards of them."""
    if args.command == "info":
        return commands.info_command(args)
    if args.command == "evaluate":
        asked = args.shards or args.ray or args.scratch or args.workers is not None
        if asked or len(args.files) > 1:
            return commands.evaluate_files_command(args)
        args.buffer = args.files[0]
    run: _Command = _COMMANDS[args.command]
    return run(Trajectories.load(args.buffer), args)


def _write(found: commands.Said, args: argparse.Namespace) -> None:
    """To the files that were asked for."""
    if found.to_json is not None and args.json:
        found.to_json(args.json)
    if found.draw is not None and args.figure:
        found.draw(args.figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ope_gym",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_subparsers(dest="command", required=True).add_parser

    def command(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        made = add(
            name,
            help=text,
            description=more or text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in ("info", "evaluate"):
            several = "numbered together" if name == "info" else "evaluated as one, in shards"
            made.add_argument(
                "files",
                type=Path,
                metavar="FILE",
                nargs="+",
                help=f"of recorded episodes; several are {several}",
            )
        else:
            made.add_argument("buffer", type=Path, metavar="FILE", help="of recorded episodes")
        return made

    command("info", "describe files of recorded episodes")
    value = command("evaluate", "the value of a policy, from recorded episodes", more=_EVALUATE)
    _target(value)
    value.add_argument("--estimators", nargs="+", metavar="NAME", help=", ".join(ESTIMATORS))
    _data(value)
    _origin(value)
    _options(value)
    _betting(value)
    _shards(value)
    _mixture(value)

    ranked = command("rank", "which of several policies is best", more=_RANK)
    ranked.add_argument(
        "--policies",
        nargs="+",
        default=["all"],
        metavar="K",
        help="numbers, ranges such as 5-8, last, or all (default)",
    )
    _estimator(ranked)
    _data(ranked)
    _origin(ranked)
    _options(ranked)
    _betting(ranked)
    _mixture(ranked)
    ranked.add_argument(
        "--differences", action="store_true", help="also the differences of every two policies"
    )
    ranked.add_argument("--figure", type=Path, metavar="FILE", help="also draw it (.png, .svg)")

    plan = command("plan", "what to collect for a smaller error", more=_PLAN)
    _target(plan)
    plan.add_argument(
        "--standard-error", type=float, metavar="X", help="to reach (default: half of the present)"
    )
    plan.add_argument(
        "--policy", metavar="K", help="number of the one policy to collect with, or target"
    )
    plan.add_argument("--estimator", default="NFIS", choices=("NFIS", "FIS"))
    _data(plan)
    plan.add_argument("--gamma", type=float, default=1.0, help="discount (default 1)")
    plan.add_argument(
        "--limit",
        type=int,
        default=MOST_EPISODES,
        help=f"most episodes to consider (default {MOST_EPISODES:,})",
    )
    _json(plan)

    check = command("check", "can such estimates be trusted", more=_CHECK)
    check.add_argument(
        "--policies", nargs="+", metavar="K", help="numbers, ranges such as 5-8, last, or all"
    )
    check.add_argument(
        "--limit", type=int, default=24, help="of more policies, as many evenly spread (default 24)"
    )
    _estimator(check)
    _data(check)
    _options(check, [method for method in METHODS if method != "betting"])
    return parser


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="last", help="number of the policy to evaluate, or last (default)"
    )


def _estimator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--estimator",
        default="auto",
        choices=ESTIMATORS,
        metavar="NAME",
        help=f"{', '.join(ESTIMATORS)} (default auto)",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        choices=("auto", "held-out", "all"),
        default="auto",
        help="which episodes: held-out ones if there are any (auto, the default), or all",
    )


def _origin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--origin",
        choices=ORIGINS,
        help="whether the policy learned from episodes that are not held out, or was fixed apart "
        "from them; by default told from the recorded policies",
    )


def _options(parser: argparse.ArgumentParser, methods: list[str] | None = None) -> None:
    parser.add_argument(
        "--no-q-model", action="store_true", help="do without a model of the values"
    )
    parser.add_argument("--gamma", type=float, default=1.0, help="discount (default 1)")
    parser.add_argument("--cap", type=float, default=10.0, help="of capped weights (default 10)")
    parser.add_argument(
        "--interval", default="ess-t", choices=methods or METHODS, help="kind (default ess-t)"
    )
    parser.add_argument("--level", type=float, default=0.95, help="of confidence (default 0.95)")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap intervals")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    _json(parser)


def _betting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reward-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="that every reward obeys, for betting",
    )
    parser.add_argument("--horizon", type=int, help="longest possible episode, for betting")


def _shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shards", action="store_true", help="bounded memory for one file, too; see above"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--workers", type=int, metavar="N", help="processes (default: cores)")
    who.add_argument(
        "--ray",
        nargs="?",
        const=True,
        default=False,
        type=ray_address,
        metavar="ADDRESS",
        help=RAY_HELP,
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="folder for the weights, 16 bytes a step and more, which are else computed twice",
    )


def _mixture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mixture",
        default="auto",
        metavar="N",
        help="most behaviours that weights are against, or all; auto (default): all up to 256",
    )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as the commands print it: no line of the source."""
    return f"warning: {message}\n"


if __name__ == "__main__":
    warnings.formatwarning = _plain
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
    sys.exit(code)
