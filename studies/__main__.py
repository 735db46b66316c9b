"""`python -m studies NAME`: run an experiment of the paper and say which claims hold."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ope_gym.arrays import cores
from ope_gym.scale.ray import RAY_HELP, connected, ray_address
from ope_gym.scale.workers import WorkerError, ignoring_interrupts
from studies import STUDIES, study_class
from studies.chunks import read_chunks
from studies.frame import Study, conduct, folder_of, label
from studies.report import write_report
from studies.settings import chosen_studies, described, fields


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 for wrong arguments, 130 if it was stopped."""
    parser = _parser()
    args = parser.parse_args(arguments)
    path = args.report or args.out / "reproduction.md"
    try:
        if args.study == "report":
            if args.set:
                raise ValueError("--set: the report shows what was run; it has no settings")
            print(f"{path}: {', '.join(write_report(args.out, path))}")
            return 0
        studies = chosen_studies(args.study, args.set)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; give a folder that can be written")
    with ExitStack() as stack:
        try:
            if args.ray:
                stack.enter_context(connected(args.ray))  # once for all studies
        except (OSError, ImportError) as error:
            parser.error(str(error))
        return _run_all(studies, args, path)


def _run_all(studies: Sequence[Study], args: argparse.Namespace, path: Path) -> int:
    for study in studies:
        try:
            _run(study, args, path)
        except KeyboardInterrupt:
            with ignoring_interrupts():
                print(f"\n{_stopped(study, args)}", file=sys.stderr)
            return 130  # as shells have it for Ctrl-C
        except (OSError, WorkerError) as error:
            print(f"{label(study)}: {error}", file=sys.stderr)
            return 1
    return 0


def _stopped(study: Study, args: argparse.Namespace) -> str:
    count = study.runs if args.runs is None else args.runs
    kept, _ = read_chunks(folder_of(study, args.out, args.seed), count)
    runs = sum(stop - start for start, stop in kept)
    return (
        f"stopped; {runs} of {count} runs of {label(study)} are kept in {args.out}, the same "
        "command goes on"
    )


def _run(study: Study, args: argparse.Namespace, path: Path) -> None:
    began = time.monotonic()
    workers = args.workers or cores()
    result = conduct(study, args.out, runs=args.runs, seed=args.seed, workers=workers, ray=args.ray)
    write_report(args.out, path)
    print(f"{result['table']}\n")
    for claim in result["claims"]:
        reason = f" ({claim['reason']})" if claim["reason"] else ""
        print(f"{claim['verdict']}{reason}: {claim['words']} ({claim['source']})")
    took = time.monotonic() - began
    files = [f"{result['label']}.json", f"{result['label']}.md", result["picture"]]
    print(f"\n{took:.1f} s; {', '.join(filter(None, files))} in {args.out}; all results: {path}")


class _Parser(argparse.ArgumentParser):
    """Help that lists the studies, which are imported only for it."""

    def format_help(self) -> str:
        lines = ["studies, their runs and rough durations with two workers, and their fields:"]
        for name in STUDIES:
            kind = study_class(name)
            lines.append(f"  {name}: {kind.runs} runs{kind.takes and f', {kind.takes}'}")
            for field, (hint, default) in fields(kind).items():
                usual = json.dumps(default, ensure_ascii=False).strip('"')
                lines.append(f"    {field}={usual}  ({described(hint)})")
        self.epilog = "\n".join(lines)
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m studies",
        description="The paper's experiments. A command that was stopped goes on where it was.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=[*STUDIES, "all", "report"])
    parser.add_argument(
        "--runs", type=_at_least(1), help="replications (default: the study's own number)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0)
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--workers", type=_at_least(1), help="processes (default: cores)")
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
        "--out",
        type=Path,
        default=Path("results/studies"),
        metavar="DIR",
        help="where results go, with finished runs in DIR/chunks (default: %(default)s)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="page of all results in DIR (default: DIR/reproduction.md)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another value for a field, e.g. --set sizes=[50]; results get a name of their own",
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} on")
        return value

    return whole


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
    sys.exit(code)
