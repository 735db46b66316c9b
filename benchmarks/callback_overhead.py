"""Measure what OPECallback() costs: process CPU of a training with it, against one without it.

    python benchmarks/callback_overhead.py [--timesteps 50000] [--repetitions 3]

Runs with and without the callback alternate in one process, so that a busy machine slows both down.
PPO on CartPole with 8 environments and the defaults of both, unless said otherwise. The time inside
the callback is also shown by itself, apart for collecting steps and for evaluating: it is less
noisy than the difference of two runs. Reading the clock takes as long as a hook of a step does, so
it is read twice before each, and the time between the two is subtracted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env

from wrappers.sb3 import OPECallback

ALGORITHMS = {"ppo": PPO, "a2c": A2C}


class Timed(OPECallback):
    """Counts the CPU seconds of its hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(verbose=0, **options)
        self.seconds = {"steps": 0.0, "snapshots": 0.0, "evaluations": 0.0}

    def _time(self, name: str, hook: Callable[[], Any]) -> Any:
        before, start = time.process_time(), time.process_time()
        result = hook()
        self.seconds[name] += time.process_time() - start - (start - before)
        return result

    def _on_step(self) -> bool:
        return bool(self._time("steps", super()._on_step))

    def _on_rollout_start(self) -> None:
        self._time("snapshots", super()._on_rollout_start)

    def _on_rollout_end(self) -> None:
        self._time("evaluations", super()._on_rollout_end)

    def _on_training_end(self) -> None:
        self._time("evaluations", super()._on_training_end)


def train(args: argparse.Namespace, seed: int, callback: Timed | None) -> float:
    """Return the CPU seconds of a run."""
    env = make_vec_env(args.env, args.num_envs, seed=seed)
    model = ALGORITHMS[args.algorithm]("MlpPolicy", env, seed=seed, device="cpu")
    start = time.process_time()
    model.learn(args.timesteps, callback=callback)
    return time.process_time() - start


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="ppo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--timesteps", type=int, default=50_000)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs, inside = [], []
    for seed in range(args.repetitions):
        callback = Timed()
        first, second = (callback, None) if seed % 2 else (None, callback)
        times = {x is not None: train(args, seed, x) for x in (first, second)}
        pairs.append((times[True], times[False]))
        inside.append([callback.seconds[name] / times[False] for name in callback.seconds])
    with_it, without = np.array(pairs).T
    shares = np.median(inside, axis=0)
    print(f"{args.algorithm} on {args.env}, {args.num_envs} envs, {args.timesteps:,} timesteps")
    print(f"without: {np.median(without):.2f} s of CPU, with: {np.median(with_it):.2f} s")
    print(f"difference: {np.median(with_it / without) - 1:+.1%} of the training")
    names = zip(callback.seconds, shares, strict=True)
    print(f"inside the callback: {shares.sum():.1%}", *(f"{n} {x:.1%}" for n, x in names), sep=", ")


if __name__ == "__main__":
    main()
