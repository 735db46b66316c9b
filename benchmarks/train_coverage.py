"""How often the intervals of train.py hold the value from fresh rollouts, over many seeds.

    python benchmarks/train_coverage.py --env CartPole-v1 --seeds 50

Prints, for each estimator, the share of seeds whose interval holds the fresh mean (its own error
added to the width), the mean distance in standard errors, and the colours of the verdicts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import train
from agents import make_agent
from ope_gym import Evaluation


def one(env_id: str, seed: int, more: list[str]) -> tuple[Evaluation, tuple[float, float]]:
    """One run of train.py without its files; the evaluation and the fresh mean."""
    args = train.parse(["--env", env_id, "--seed", str(seed), "--quiet", *more])
    probe = gym.make(env_id)
    env = train.make_env(args, args.recorded, held_out=args.held_out)
    agent = make_agent(probe, seed=seed)
    run = train.Run(args, agent, env, Path(tempfile.gettempdir()), np.random.default_rng(seed))
    for _ in range(args.updates):
        run.iterate()
    result = train.final_evaluation(run), train.fresh_rollouts(run, agent.policy)
    env.close()
    probe.close()
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    hits: dict[str, list[bool]] = {}
    distances: dict[str, list[float]] = {}
    colours: dict[str, Counter[str]] = {}
    for seed in tqdm(range(args.first_seed, args.first_seed + args.seeds), unit="run"):
        evaluation, (truth, error) = one(args.env, seed, more)
        for name, estimate in evaluation.items():
            interval, se = estimate.interval, estimate.standard_error
            slack = (interval.high - interval.low) / 2 * (np.hypot(1.0, error / se) - 1.0)
            inside = interval.low - slack <= truth <= interval.high + slack
            hits.setdefault(name, []).append(bool(inside))
            distances.setdefault(name, []).append((estimate.value - truth) / np.hypot(se, error))
            colours.setdefault(name, Counter())[estimate.verdict.colour] += 1
    print(f"{args.env}, {args.seeds} seeds from {args.first_seed}, {' '.join(more) or 'defaults'}")
    print(f"{'estimator':10}{'coverage':>9}{'±':>6}{'mean off':>10}  green amber red")
    rows = {}
    for name, inside in hits.items():
        share = float(np.mean(inside))
        spread = float(np.sqrt(share * (1 - share) / len(inside)))
        off = float(np.mean(distances[name]))
        count = colours[name]
        print(
            f"{name:10}{share:9.2f}{spread:6.2f}{off:+10.2f}  "
            f"{count['green']:5}{count['amber']:6}{count['red']:4}"
        )
        rows[name] = {"coverage": share, "standard_error": spread, "mean_off": off, **count}
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
