"""Check over an hour's worth of steps that memory grows only by the recorded columns.

    python benchmarks/soak.py [--steps 10000000] [--envs 256]
    nice python benchmarks/soak.py --cases "file, cleared, TensorBoard" --envs 8 --seconds 1200

Each case is a process of its own that records CartPole with `wrappers.vector.RecordTrajectories`,
or with `wrappers.RecordTrajectories` where it says single, with random actions, and follows another
policy after every hundredth of the run. Shown are the resident memory on top of
that after the first hundredth, the bytes that the columns of the recorded episodes have (those of
the cleared buffers: since the last `clear`, which comes ten times in a run), the rest, and the size
of the file. The rest may not exceed an allowance that does not depend on the number of steps, plus
a share of the columns. A slow leak fits into any allowance: where buffers are cleared, and columns
stay few, the rest may also not grow from the first half of the run to the second. Otherwise the
exit code is 1. With TensorBoard, the latest policy is also evaluated after each hundredth of the
run, and the first fifth, which loads what that needs, does not count. File descriptors may not grow
at all. With --seconds a case ends after so long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import wrappers
import wrappers.vector
from ope_gym import batches, evaluate
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schema import BY_EPISODE, BY_STEP
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid
from ope_gym.report.tensorboard import EvaluationWriter

CASES = (
    "memory",
    "memory, cleared",
    "file",
    "file, cleared",
    "file, cleared, TensorBoard",
    "single, memory",
    "single, memory, cleared",
    "single, file",
    "single, file, cleared",
)
ROWS = 10  # lines of the table for each case
ALLOWANCE, SHARE = 48e6, 0.10  # bytes for arenas of the allocator, and for its rounding
# Bytes by which the rest may grow from one half of a run to the other: arenas that come and go, and
# for each step. A leak of 48 MB in 10^7 steps, 4.8 bytes a step, is 24 MB there.
WOBBLE, A_STEP = 8e6, 1.05


def resident() -> int:
    """Return the bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def widths() -> tuple[int, int]:
    """Return the bytes of all columns for a step, and for an episode."""
    env = wrappers.vector.RecordTrajectories(make(1))
    env.follow(LinearSigmoid(np.zeros(4)))
    env.reset(seed=0)
    while not env.finished_episodes:
        env.step(np.zeros(1, dtype=np.int64))
    data = env.buffer.view()
    by_step = sum(leaf.nbytes for name in BY_STEP for leaf in batches.leaves(getattr(data, name)))
    by_episode = sum(getattr(data, name).nbytes for name in BY_EPISODE) + data.offsets.itemsize
    return by_step // data.n_steps, by_episode


def make(num_envs: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


class Single:
    """Give a single env the calls of a vector env: a step after which an episode ends resets it."""

    def __init__(self, path: Path | None) -> None:
        self._env = wrappers.RecordTrajectories(gym.make("CartPole-v1"), path=path)
        self.finished_episodes = 0
        self.reset, self.follow, self.close = self._env.reset, self._env.follow, self._env.close

    @property
    def buffer(self) -> TrajectoryBuffer:
        """The buffer of the recorder."""
        return self._env.buffer

    def step(self, action: int) -> None:
        """Take one step, and begin the next episode if it was the last."""
        *_, terminated, truncated, _ = self._env.step(action)
        if terminated or truncated:
            self.finished_episodes += 1
            self._env.reset()


def record(
    case: str, steps: int, num_envs: int, path: Path | None, seconds: float, out: Connection
) -> None:
    """Record in the process of one case; send a line of figures after each tenth of the run."""
    warnings.simplefilter("ignore")  # the run ends in the middle of episodes
    step_width, episode_width = widths()
    single = case.startswith("single")
    num_envs = 1 if single else num_envs
    env: Any = (
        Single(path) if single else wrappers.vector.RecordTrajectories(make(num_envs), path=path)
    )
    rng = np.random.default_rng(0)
    drawn = rng.integers(2, size=(2**20 // num_envs, num_envs))
    actions: list[Any] = drawn[:, 0].tolist() if single else list(drawn)
    calls = max(steps // num_envs, 100)
    writer = EvaluationWriter(path.parent) if path and "TensorBoard" in case else None
    first = calls // 100 if writer is None else calls // 5
    env.reset(seed=0)
    base, cleared_at, start = 0, (0, 0), time.perf_counter()
    for i in range(calls):
        if i % (calls // 100) == 0:
            policy = LinearSigmoid(np.full(4, 1e-3 * (i // (calls // 100))))
            env.follow(policy)
            if writer is not None and len(env.buffer) > 1000:
                latest = env.buffer.view().select(episodes=slice(-1000, None))
                writer.add_evaluation(evaluate(latest, policy, "NFIS"), i * num_envs)
        if i == first:
            base = resident()
        env.step(actions[i % len(actions)])
        if i >= first and (i + 1) % (calls // ROWS) == 0:
            # in a vector env, a call after the end of an episode only resets, and makes no row
            rows = (i + 1) * num_envs - (0 if single else env.finished_episodes)
            columns = (rows - cleared_at[0]) * step_width
            columns += (env.finished_episodes - cleared_at[1]) * episode_width
            out.send(
                {
                    "steps": (i + 1) * num_envs,
                    "grown": resident() - base,
                    "columns": columns,
                    "file": path.stat().st_size if path else 0,
                    "seconds": time.perf_counter() - start,
                    "descriptors": len(os.listdir("/proc/self/fd")),
                }
            )
            if "cleared" in case:
                env.buffer.clear()
                cleared_at = (rows, env.finished_episodes)
            if time.perf_counter() - start > seconds:
                break
    finished = env.finished_episodes
    if writer is not None:
        writer.close()
    env.close()
    if path is not None:
        found = Trajectories.load(path)
        assert len(found) == finished, f"{len(found)} of {finished} episodes are in the file"
        if "cleared" not in case:
            assert found.rewards.tobytes() == env.buffer.view().rewards.tobytes()
    elif "cleared" not in case:
        assert len(env.buffer) == finished
    out.close()


def soak(case: str, steps: int, num_envs: int, seconds: float, folder: Path) -> bool:
    """Run one case, print its lines, and return whether memory stayed within its bounds."""
    path = folder / "episodes" if "file" in case else None
    if path is not None:
        path.unlink(missing_ok=True)
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=record, args=(case, steps, num_envs, path, seconds, send)
    )
    process.start()
    send.close()
    lines: list[dict[str, float]] = []
    good = True
    print(f"\n{case}\n{'steps':>12}{'grown MB':>10}{'columns':>9}{'rest':>8}{'file':>8}{'s':>7}")
    while True:
        try:
            line = receive.recv()
        except EOFError:
            break
        rest = line["grown"] - line["columns"]
        within = rest <= ALLOWANCE + SHARE * line["columns"]
        good &= within
        lines.append(line)
        megabytes = [line[name] / 1e6 for name in ("grown", "columns")]
        print(
            f"{line['steps']:>12,}{megabytes[0]:>10.1f}{megabytes[1]:>9.1f}{rest / 1e6:>8.1f}"
            f"{line['file'] / 1e6:>8.1f}{line['seconds']:>7.1f}{'' if within else '  too much'}",
            flush=True,
        )
    process.join()
    if lines and lines[-1]["descriptors"] > lines[0]["descriptors"]:
        print("  descriptors stay open")
        good = False
    if "cleared" in case and leaks(lines):
        print("  the rest grows all the time")
        good = False
    return good and process.exitcode == 0


def leaks(lines: list[dict[str, float]]) -> bool:
    """Return whether memory beside the columns grew in the second half of a run.

    Least of each half: arenas that come and go make single lines too high, never too low.

    >>> flat = [{"steps": 1e6 * i, "grown": 1e8, "columns": 1e8} for i in range(1, 11)]
    >>> leaks(flat)
    False
    >>> leaks([{**line, "grown": line["grown"] + 4.8 * line["steps"]} for line in flat])
    True
    """
    half = len(lines) // 2
    if half == 0:
        return False
    first, second = (
        min(x["grown"] - x["columns"] for x in part) for part in (lines[:half], lines[half:])
    )
    between = lines[half]["steps"] - lines[0]["steps"]
    return second - first > WOBBLE + A_STEP * between


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10**7)
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            case: soak(case, arguments.steps, arguments.envs, arguments.seconds, Path(folder))
            for case in arguments.cases
        }
    print("\n" + json.dumps(results))
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
