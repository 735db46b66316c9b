"""Measure what NetworkQ costs and gains beside LinearQ, and what images cost.

    python benchmarks/network_q.py [--seeds 8] [--write docs/q_models.md]

300 episodes of CartPole with a limit of 200 steps, by three policies; the target is less sure of
its actions than they are. Root mean square errors are over the seeds, against the mean of 100,000
fresh episodes. The processor time is that of `evaluate` with the model, less that without one, all
five folds together, on one core. The last line is random images of 84 × 84 × 4 bytes: the time of
one fold.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from ope_gym import Trajectories, evaluate
from ope_gym.models import LinearQ, NetworkQ
from ope_gym.models.base import Problem
from ope_gym.policies import LinearSigmoid, Uniform
from studies.cartpole.simulation import mean_return, rollouts
from studies.harness.markdown import table

EPISODES, HORIZON = 300, 200
DIRECTION = np.array([0.1, 0.5, 2.0, 2.0])
SCALES, TARGET = (2.5, 3.0, 3.5), LinearSigmoid(2.0 * DIRECTION)
MODELS: dict[str, Any] = {
    "none": None,
    "LinearQ()": LinearQ(),
    "NetworkQ()": NetworkQ(),
    "NetworkQ(batch=512, learning_rate=2e-3, tau=0.01, patience=5)": NetworkQ(
        batch=512, learning_rate=2e-3, tau=0.01, patience=5
    ),
}
NAMES = ("DM", "FWDR", "auto")
_PART = re.compile(r"(<!-- by benchmarks/network_q.py -->\n).*?(<!-- end -->)", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--write", type=Path, help="page whose marked part is to be replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join([*cartpole(args.seeds), "", images()])
    print(text)
    if args.write:
        page = args.write.read_text()
        args.write.write_text(_PART.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page))


def cartpole(seeds: int) -> list[str]:
    """Return the lines of the table."""
    truth, _ = mean_return(TARGET, 100_000, HORIZON, np.random.default_rng(10**6))
    seconds = {name: np.empty(seeds) for name in MODELS}
    off = {name: np.full((seeds, len(NAMES)), np.nan) for name in MODELS}
    error = {name: np.full((seeds, len(NAMES)), np.nan) for name in MODELS}
    steps = np.empty(seeds)
    for seed in range(-1, seeds):  # the first one compiles and loads
        data = recorded(np.random.default_rng(seed + 1))
        for name, model in MODELS.items():
            names = NAMES if model is not None else ("auto",)
            taken, found = timed(lambda m=model, n=names, d=data: evaluate(d, TARGET, n, q_model=m))
            if seed < 0:
                continue
            steps[seed], seconds[name][seed] = data.n_steps, taken
            for e in names:
                off[name][seed, NAMES.index(e)] = found[e].value - truth
                error[name][seed, NAMES.index(e)] = found[e].standard_error
    rows = []
    for name in MODELS:
        rmse = np.sqrt(np.mean(off[name] ** 2, axis=0))
        more = float(np.median(seconds[name] - seconds["none"]))
        cells = [f"{x:.2f}" if np.isfinite(x) else "" for x in rmse]
        errors = [f"{x:.2f}" if np.isfinite(x) else "" for x in error[name].mean(axis=0)[1:]]
        rows.append([f"`{name}`", "" if name == "none" else f"{more:.1f}", *cells, *errors])
    heads = ["q model", "seconds of CPU", *(f"RMSE {name}" for name in NAMES)]
    heads += [f"mean standard error {name}" for name in NAMES[1:]]
    said = (
        f"`python benchmarks/network_q.py --seeds {seeds}`: CartPole with a limit of {HORIZON} "
        f"steps, {EPISODES} episodes of three policies, {steps.mean():,.0f} steps on average; the "
        f"target is worth {truth:.1f}."
    )
    return [said, "", *table(heads, rows)]


def images() -> str:
    """Say how long a fit to images takes."""
    rng, episodes, steps, epochs = np.random.default_rng(0), 20, 100, 5
    data = Trajectories.from_arrays(
        rng.integers(0, 256, (episodes * steps, 84, 84, 4), dtype=np.uint8),
        rng.integers(0, 4, episodes * steps),
        rng.standard_normal(episodes * steps),
        np.full(episodes * steps, np.log(0.25)),
        offsets=np.arange(episodes + 1) * steps,
        policies=[Uniform(4)],
        terminated=True,
    )
    model = NetworkQ(epochs=epochs, patience=epochs, batch=256)
    problem = Problem(Uniform(4), 1.0, steps, rng)
    taken, _ = timed(lambda: model.fit(data, problem))
    return (
        f"{episodes * steps:,} images of 84 × 84 × 4, {epochs} passes: {taken:.0f} seconds of CPU "
        "for one fold."
    )


def recorded(rng: np.random.Generator) -> Trajectories:
    """Record a hundred episodes of each of three policies."""
    share = EPISODES // len(SCALES)
    first, *rest = (
        rollouts(LinearSigmoid(s * DIRECTION), share, HORIZON, rng, held_out=True) for s in SCALES
    )
    return first.merge(*rest)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


if __name__ == "__main__":
    main()
