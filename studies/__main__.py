"""Run an experiment of the paper and say which claims hold: `python -m studies NAME`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ope_gym.arrays import cores
from ope_gym.scale.ray import WorkerError, connect
from studies import STUDIES
from studies.harness.kept import folder_of, read_runs, spans_of
from studies.harness.registry import chosen_studies, listed_studies
from studies.harness.report import write_report
from studies.harness.runner import conduct, label
from studies.harness.study import Study


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 1 on failure, 2 for wrong arguments, 130 if stopped."""
    parser = _parser()
    args = parser.parse_args(arguments)
    page = args.report or args.out / "reproduction.md"
    try:
        if args.study in ("report", "list"):
            if args.set:
                raise ValueError(f"--set: {args.study} runs no study, so it has no settings")
            if args.study == "report":
                print(f"{page}: {', '.join(write_report(args.out, page))}")
            else:
                print("\n".join(listed_studies()))
            return 0
        studies = chosen_studies(args.study, args.set)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; give a folder that can be written")
    try:
        if args.ray:
            connect(args.ray)
    except (OSError, ImportError) as error:
        parser.error(str(error))
    return _run_all(studies, args, page)


def _run_all(studies: Sequence[Study], args: argparse.Namespace, page: Path) -> int:
    """Run the studies one after the other until one fails; return the exit code."""
    for study in studies:
        try:
            _run(study, args, page)
        except KeyboardInterrupt:
            print(f"\n{_stopped(study, args)}", file=sys.stderr)
            return 130  # as shells have it for Ctrl-C
        except (OSError, WorkerError) as error:
            print(f"{label(study)}: {error}", file=sys.stderr)
            return 1
    return 0


def _stopped(study: Study, args: argparse.Namespace) -> str:
    """Say how many runs a stopped study has kept."""
    count = study.plan.runs if args.runs is None else args.runs
    folder = folder_of(study, args.out, args.seed)
    kept = [span for span in spans_of(study, count) if read_runs(folder, span)]
    runs = sum(stop - start for start, stop in kept)
    return (
        f"stopped; {runs} of {count} runs of {label(study)} are kept in {args.out}; give the same "
        "command to go on"
    )


def _run(study: Study, args: argparse.Namespace, page: Path) -> None:
    """Run one study, update the page of all results, and print the table and the verdicts."""
    began = time.monotonic()
    workers = args.workers or cores()
    result = conduct(study, args.out, runs=args.runs, seed=args.seed, workers=workers, ray=args.ray)
    write_report(args.out, page)
    print(f"{result['table']}\n")
    for claim in result["claims"]:
        reason = f" ({claim['reason']})" if claim["reason"] else ""
        print(f"{claim['verdict']}{reason}: {claim['words']} ({claim['source']})")
    took = time.monotonic() - began
    files = [f"{result['label']}.json", f"{result['label']}.md", result["picture"]]
    print(f"\n{took:.1f} s; {', '.join(filter(None, files))} in {args.out}; all results: {page}")


class _Parser(argparse.ArgumentParser):
    """A parser whose help lists the studies; they are imported only then."""

    def format_help(self) -> str:
        head = "studies, their runs and rough durations with two workers, and their fields:"
        self.epilog = "\n".join([head, *listed_studies()])
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="python -m studies",
        description="Run the paper's experiments. A command that was stopped goes on where it was.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "study",
        choices=[*STUDIES, "all", "report", "list"],
        metavar="STUDY",
        help="a study, all of them, report for the page of all results, or list",
    )
    whole, count = _at_least(0), _at_least(1)
    runs_help = "number of runs (default: the study's own)"
    parser.add_argument("--runs", type=count, metavar="N", help=runs_help)
    parser.add_argument("--seed", type=whole, metavar="N", default=0, help="seed (default: 0)")
    where = parser.add_mutually_exclusive_group()
    workers_help = "number of processes (default: one per core)"
    where.add_argument("--workers", type=count, metavar="N", help=workers_help)
    where.add_argument(
        "--ray",
        nargs="?",
        const=True,
        default=False,
        metavar="ADDRESS",
        help="compute on a Ray cluster: auto, local (a new one here), HOST:PORT or "
        "ray://HOST:PORT; alone, the one of RAY_ADDRESS, else one on this machine, else a new one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/studies"),
        metavar="DIR",
        help="folder of the results, with finished runs in DIR/chunks (default: %(default)s)",
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
        help="change a field, e.g. --set sizes=[50]; the results get their own file names",
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

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
