"""`python -m studies NAME`: run an experiment of the paper and say which claims hold."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies import STUDIES, is_present, load_study
from studies.frame import conduct
from studies.report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well."""
    args = _parser().parse_args(arguments)
    if args.study == "report":
        path = args.report or Path("docs/reproduction.md")
        print(f"{path}: {', '.join(write_report(args.out, path))}")
        return 0
    names = [args.study] if args.study != "all" else list(STUDIES)
    absent = [name for name in names if not is_present(name)]
    for name in absent:
        print(f"{name}: {STUDIES[name].partition(':')[0]} is not in this checkout", file=sys.stderr)
    for name in names:
        if name not in absent:
            _run(name, args)
    return 1 if absent else 0


def _run(name: str, args: argparse.Namespace) -> None:
    study = load_study(name, **_settings(name, args.set))
    began = time.monotonic()
    result = conduct(study, args.out, runs=args.runs, seed=args.seed, workers=args.workers)
    write_report(args.out, args.report or args.out / "reproduction.md")
    print(f"{result['table']}\n")
    for claim in result["claims"]:
        print(f"{claim['verdict']}: {claim['words']} ({claim['source']})")
    took = time.monotonic() - began
    files = [f"{name}.json", f"{name}.md", result["picture"]]
    print(f"\n{took:.1f} s; {', '.join(filter(None, files))} in {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description="The paper's experiments. A command that was stopped goes on where it was.",
    )
    parser.add_argument("study", choices=[*STUDIES, "all", "report"])
    parser.add_argument("--runs", type=int, help="replications (default: the study's own number)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=_cores(), help="processes (default: cores)")
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
        help="page of all studies in DIR (default: DIR/reproduction.md; for the command `report` "
        "docs/reproduction.md)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another value for a field of the study, e.g. --set sizes=[50]",
    )
    return parser


def _settings(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE pairs as arguments of the study; values are JSON, or else words."""
    known = {field.name for field in dataclasses.fields(load_study(name))}
    settings: dict[str, Any] = {}
    for pair in pairs:
        field, _, text = pair.partition("=")
        if field not in known:
            raise SystemExit(f"--set {pair}: {name} has the fields {', '.join(sorted(known))}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        settings[field] = tuple(value) if isinstance(value, list) else value
    return settings


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
