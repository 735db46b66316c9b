"""Measure how often the intervals of train.py cover the value from fresh rollouts.

    python benchmarks/train_coverage.py --env CartPole-v1 --seeds 50

Prints, for each estimator, the share of seeds whose interval covers the mean return of fresh
rollouts (with their own error added to the width), the mean distance in standard errors, and the
coverage by the colour of the verdict. Undefined intervals are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

import train
from agents.small import SmallRun
from ope_gym import Evaluation
from ope_gym.report.training import Fresh, fresh_value


def one(env_id: str, seed: int, more: list[str]) -> tuple[Evaluation, Fresh]:
    """Run train.py, and drop its files; return the evaluation and the mean of fresh rollouts."""
    args = train.parse(["--env", env_id, "--seed", str(seed), "--quiet", *more])
    with tempfile.TemporaryDirectory() as folder:
        run = train.make_run(args, Path(folder))
        if not isinstance(run, SmallRun):
            raise ValueError(f"{env_id} has no small agent")
        for _ in range(run.plan.updates):
            run.iterate()
        evaluation = run.evaluate()
        truth = fresh_value(run.fresh_returns(args.truth_episodes or run.fresh_episodes))
        run.close()
    assert truth is not None
    return evaluation, truth


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
    found: dict[str, list[tuple[str, bool | None, float]]] = {}
    for seed in tqdm(range(args.first_seed, args.first_seed + args.seeds), unit="run"):
        evaluation, (truth, error, _) = one(args.env, seed, more)
        for name, estimate in evaluation.items():
            low, high, se = estimate.interval.low, estimate.interval.high, estimate.standard_error
            width = np.hypot(1.0, error / se) if se > 0 else 1.0  # the fresh mean has its own error
            middle, half = (low + high) / 2, (high - low) / 2 * width
            inside = None if np.isnan(half) else bool(abs(truth - middle) <= half)
            off = (estimate.value - truth) / np.hypot(se, error)
            found.setdefault(name, []).append((estimate.verdict.colour, inside, float(off)))
    print(f"{args.env}, {args.seeds} seeds from {args.first_seed}, {' '.join(more) or 'defaults'}")
    print("| estimator | coverage | mean distance, se | green: seeds, covered | amber | red |")
    print("|---|---|---|---|---|---|")
    rows = {}
    for name, entries in found.items():
        share, spread = _share([inside for _, inside, _ in entries])
        off = float(np.nanmean([distance for *_, distance in entries]))
        cells = []
        for colour in ("green", "amber", "red"):
            mine = [inside for c, inside, _ in entries if c == colour]
            cells.append(f"{len(mine)}, {_share(mine)[0]:.2f}" if mine else "0")
        print(f"| {name} | {share:.2f} ± {spread:.2f} | {off:+.1f} | {' | '.join(cells)} |")
        rows[name] = {"coverage": share, "standard_error": spread, "mean_off": off}
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def _share(inside: list[bool | None]) -> tuple[float, float]:
    """Return the share of the defined intervals that cover the truth, and its standard error."""
    known = [hit for hit in inside if hit is not None]
    share = float(np.mean(known)) if known else np.nan
    return share, float(np.sqrt(share * (1 - share) / max(len(known), 1)))


if __name__ == "__main__":
    main()
