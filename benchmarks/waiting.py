"""Measure what a person waits for, side by side with another checkout.

    python benchmarks/waiting.py [--against CHECKOUT] [--cases evaluate first rank ...]

The episodes are those of `train.py --env CartPole-v1`: 10 policies, 300 held-out episodes, about
39,000 steps. Each checkout records them itself, in its own format of files. Each case runs in
fresh processes that alternate between the two checkouts, with one BLAS thread; a time is the least
processor time over all of them, and a ratio divides two such times of one run. Without --against
there is one column, and no ratio.

    evaluate  the default evaluate, once compiled code is there
    values    the same without errors and intervals
    first     the first evaluate ever, with nothing compiled: the time beyond the second one
    rank      50 checkpoints by auto
    share     the same as a share of 50 calls of evaluate of the same checkout
    screen    50 checkpoints by NFIS, as a share of these calls, which are by auto
    train     train.py --env CartPole-v1, once compiled code is there
    fresh     the same with nothing compiled
    memory    peak of the heap beyond the data at 600,000 steps with auto, in MB
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
CASES = ("evaluate", "values", "first", "rank", "share", "screen", "train", "fresh", "memory")
_CHECKPOINTS = 50
_STEPS = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(WORK[args.work[0]](args.work[1])))
        return
    checkouts = [HERE] if args.against is None else [HERE, args.against.resolve()]
    with tempfile.TemporaryDirectory() as folder:
        recorded = {checkout: f"{folder}/{i}.ope" for i, checkout in enumerate(checkouts)}
        steps = {in_process("record", path, checkout) for checkout, path in recorded.items()}
        if len(steps) > 1:
            print(f"the checkouts recorded different episodes: {steps} steps")
        for case in args.cases:
            compare(case, recorded, 1 if case == "memory" else args.processes)


def compare(case: str, recorded: dict[Path, str], processes: int) -> None:
    """Time a case in each checkout, with the episodes that it recorded."""
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in recorded}
    for _ in range(processes):
        for checkout, path in recorded.items():
            seconds[checkout].append(in_process(case, path, checkout))
    best = [min(times) for times in seconds.values()]
    shares = dict.fromkeys(("share", "screen"), "of as many evaluates")
    unit = {**shares, "memory": "MB"}.get(case, "s")
    beside = f", {best[0] / best[1]:.2f} times {best[1]:.3f}" if len(best) > 1 else ""
    print(f"{case:10s} {best[0]:8.3f} {unit}{beside}", flush=True)


def in_process(case: str, path: str, checkout: Path) -> float:
    """Run a case in a fresh process of a checkout, and return what it printed."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        if case in ("first", "fresh"):
            environment["NUMBA_CACHE_DIR"] = cache
        command = [sys.executable, __file__, "--work", case, path]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


# What a fresh process does -------------------------------------------------------------------


def record(path: str) -> float:
    """Record the episodes of train.py, held-out ones among them; return the number of steps."""
    import gymnasium as gym
    import numpy as np

    from agents import make_agent
    from wrappers import collect
    from wrappers.vector import RecordTrajectories

    agent = make_agent(gym.make("CartPole-v1"), gamma=1.0, seed=0)
    envs = gym.make_vec("CartPole-v1", 60, vectorization_mode="vector_entry_point")
    env, rng = RecordTrajectories(envs, held_out=0.5), np.random.default_rng(0)
    for _ in range(10):
        first = len(env.buffer)
        collect(env, agent.policy, 60, rng, seed=int(rng.integers(1 << 31)))
        fresh = env.buffer.view().select(episodes=np.arange(first, len(env.buffer)))
        agent.learn(fresh.select(held_out=False))
    env.follow(agent.policy)
    env.buffer.save(path)
    return env.buffer.view().n_steps


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def evaluate_case(path: str, **options: Any) -> float:
    from ope_gym import Trajectories, evaluate

    data = Trajectories.load(path).select(held_out=True)
    options["held_out"] = False
    times = [seconds(lambda: evaluate(data, data.policies[-1], **options)) for _ in range(8)]
    return min(times[1:])


def values_case(path: str) -> float:
    return evaluate_case(path, interval=None)


def first_case(path: str) -> float:
    from ope_gym import Trajectories, evaluate

    data = Trajectories.load(path).select(held_out=True)
    times = [seconds(lambda: evaluate(data, data.policies[-1], held_out=False)) for _ in range(3)]
    return times[0] - min(times[1:])


def rank_case(path: str, estimator: str = "auto") -> float:
    from ope_gym.analysis.ranking import rank

    data, near = checkpoints(path)
    return min(seconds(lambda: rank(data, near, estimator, held_out=False)) for _ in range(2))


def share_case(path: str, estimator: str = "auto") -> float:
    from ope_gym import evaluate

    data, near = checkpoints(path)
    evaluate(data, near[0], "auto", held_out=False)
    single = min(seconds(lambda: evaluate(data, near[0], "auto", held_out=False)) for _ in range(8))
    return rank_case(path, estimator) / (_CHECKPOINTS * single)


def checkpoints(path: str) -> tuple[Any, list[Any]]:
    """Return the episodes, and policies around the last one."""
    import numpy as np

    from ope_gym import Trajectories
    from ope_gym.policies import LinearSigmoid

    data, rng = Trajectories.load(path).select(held_out=True), np.random.default_rng(0)
    last = data.policies[-1]
    noise = 1 + 0.05 * rng.standard_normal((_CHECKPOINTS, last.theta.size))
    return data, [LinearSigmoid(last.theta * factors, last.bias) for factors in noise]


def train_case(path: str) -> float:
    """Return the processor time of a run of train.py of the checkout; `path` is not used."""
    import resource

    import ope_gym

    script = Path(ope_gym.__file__).resolve().parent.parent / "train.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--env", "CartPole-v1", "--logdir", folder]
        subprocess.run([*command, "--quiet"], check=True, capture_output=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_case(path: str) -> float:
    import tracemalloc

    import numpy as np

    from ope_gym import Trajectories, evaluate

    data = Trajectories.load(path).select(held_out=True)
    evaluate(data, data.policies[-1], "auto", held_out=False)
    times = -(-_STEPS // data.n_steps)
    data = data.select(episodes=np.tile(np.arange(len(data)), times))
    tracemalloc.start()
    evaluate(data, data.policies[-1], "auto", held_out=False)
    return tracemalloc.get_traced_memory()[1] / 1e6


WORK = {
    "record": record,
    "evaluate": evaluate_case,
    "values": values_case,
    "first": first_case,
    "rank": rank_case,
    "share": share_case,
    "screen": partial(share_case, estimator="NFIS"),
    "train": train_case,
    "fresh": train_case,
    "memory": memory_case,
}

if __name__ == "__main__":
    main()
