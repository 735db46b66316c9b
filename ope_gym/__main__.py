"""Evaluate or describe recorded episodes without the environment.

Examples:
  python -m ope_gym info episodes.ope
  python -m ope_gym evaluate episodes.ope                      the last recorded policy
  python -m ope_gym evaluate episodes.ope --target 3 --data all --interval bca
  python -m ope_gym evaluate episodes.ope --estimators NFIS FIS --json result.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from ope_gym.estimators import ESTIMATORS
from ope_gym.evaluation import evaluate
from ope_gym.intervals import METHODS
from ope_gym.trajectories import Trajectories


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ope_gym",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="describe a file of recorded episodes")
    info.add_argument("buffer", type=Path)
    value = commands.add_parser("evaluate", help="the value of a policy, from recorded episodes")
    value.add_argument("buffer", type=Path)
    value.add_argument(
        "--target", default="last", help="number of the policy to evaluate, or last (default)"
    )
    value.add_argument("--estimators", nargs="+", metavar="NAME", help=", ".join(ESTIMATORS))
    value.add_argument(
        "--data",
        choices=("auto", "held-out", "all"),
        default="auto",
        help="which episodes: held-out ones if there are any (auto, the default), or all",
    )
    value.add_argument("--gamma", type=float, default=1.0)
    value.add_argument("--cap", type=float, default=10.0)
    value.add_argument("--interval", default="ess-t", choices=METHODS)
    value.add_argument("--level", type=float, default=0.95)
    value.add_argument("--resamples", type=int, default=1000)
    value.add_argument("--seed", type=int, default=0)
    value.add_argument("--reward-range", type=float, nargs=2, metavar=("LOW", "HIGH"))
    value.add_argument("--horizon", type=int, help="longest possible episode, for betting")
    value.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    args = parser.parse_args(arguments)
    try:
        data = Trajectories.load(args.buffer)
        print(describe(data) if args.command == "info" else _evaluate(data, args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _evaluate(data: Trajectories, args: argparse.Namespace) -> str:
    if args.data == "held-out" or (args.data == "auto" and data.held_out.any()):
        data = data.select(held_out=True)
        if not len(data):
            raise ValueError(f"--data held-out: {args.buffer} holds no held-out episode")
    if not data.policies:
        raise ValueError(f"{args.buffer} holds no policy to evaluate")
    number = len(data.policies) - 1 if args.target == "last" else _number(args.target)
    if not 0 <= number < len(data.policies):
        raise ValueError(f"--target {number}: the file has policies 0 to {len(data.policies) - 1}")
    evaluation = evaluate(
        data, data.policies[number], estimators=args.estimators, gamma=args.gamma, cap=args.cap,
        interval=args.interval, level=args.level, rng=args.seed, resamples=args.resamples,
        reward_range=tuple(args.reward_range) if args.reward_range else None,
        horizon=args.horizon,
    )  # fmt: skip
    if args.json:
        evaluation.to_json(args.json)
    return f"value of policy {number}\n{evaluation}"


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--target {text}: give the number of a policy, or last") from None


def describe(data: Trajectories) -> str:
    """The file in words: its size, and a line for each policy."""
    lines = [repr(data)]
    if data.observation_space is not None:
        lines.append(f"observations {data.observation_space}, actions {data.action_space}")
    if data.horizon is not None:
        lines.append(f"time limit {data.horizon}")
    start = data.policy_ids[data.offsets[:-1]]
    returns = data.returns()
    for number, policy in enumerate(data.policies):
        mine = start == number
        count = int(np.count_nonzero(mine))
        mean = f"mean return {returns[mine].mean():.5g}, " if count else ""
        lines.append(f"policy {number}: {count} episodes, {mean}{policy!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
