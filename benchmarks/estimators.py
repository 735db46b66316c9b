"""Speed and memory of the estimators, as ratios inside one run.

    python benchmarks/estimators.py                         all sizes; needs about 12 GB of memory
    python benchmarks/estimators.py --quick                 the two small sizes
    python benchmarks/estimators.py --peer scope-rl=peer-scope/bin/python --peer rllib=...

What is compared is timed in turn, repetition by repetition, so that a busy moment of the machine
meets all of them. "read" is one pass of numpy over the (K, S) matrix. benchmarks/peers/README.md
says how to make the environments of the other libraries; our times include the standard error,
interval, diagnostics and verdict that they do not compute.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ope_gym
from ope_gym.estimators.table import WEIGHTED

SIZES = {"small": (10, 300, 200), "medium": (10, 10_000, 200), "large": (50, 20_000, 500)}
HUGE = (100, 20_000, 500)  # 10^7 steps
PEERS = {
    # name: runner, ours, sizes (K, n, T), episodes of the slice that is timed
    "scope-rl": ("scope_rl_runner.py", ["BIS", "NBIS"], (10, 10_000, 200), None),
    "rllib": ("rllib_runner.py", ["BIS", "NBIS"], (10, 10_000, 200), 500),
    "obp": ("obp_runner.py", ["FIS"], (10, 1_000_000, 1), None),
}


@dataclass(frozen=True)
class Arrays:
    """The arguments of `ope_gym.evaluate_log_probs`."""

    target_log_probs: NDArray[np.float64]
    behaviour_log_probs: NDArray[np.float64]
    behaviour_ids: NDArray[np.int64]
    rewards: NDArray[np.float64]
    offsets: NDArray[np.int64]

    def evaluate(self, estimators: list[str], interval: str = "ess-t") -> ope_gym.Evaluation:
        """Our call."""
        return ope_gym.evaluate_log_probs(
            self.target_log_probs,
            self.behaviour_log_probs,
            self.behaviour_ids,
            self.rewards,
            self.offsets,
            estimators=estimators,
            interval=interval,
        )


def make(behaviours: int, episodes: int, length: int, seed: int = 0) -> Arrays:
    """Two-action policies sigma(theta x) that drift, as a training loop leaves them."""
    rng = np.random.default_rng(seed)
    steps = episodes * length
    x = rng.standard_normal(steps)
    theta = np.linspace(0.0, 0.5, behaviours + 1)
    ids = np.arange(episodes) % behaviours
    own = np.repeat(theta[ids], length)
    sign = np.where(rng.random(steps) < 1 / (1 + np.exp(-own * x)), 1.0, -1.0) * x
    matrix = np.empty((behaviours, steps))
    for row, value in zip(matrix, theta[:-1], strict=True):
        np.multiply(sign, -value, out=row)
        np.exp(row, out=row)
        np.log1p(row, out=row)
        np.negative(row, out=row)
    target = -np.log1p(np.exp(-sign * theta[-1]))
    return Arrays(target, matrix, ids, rng.random(steps), np.arange(episodes + 1) * length)


def interleaved(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn."""
    for call in calls.values():
        call()  # compile, touch the memory
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def extra_memory(call: Callable[[], object]) -> float:
    """Peak bytes that the call allocates on top of its input."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def kernels(name: str, size: tuple[int, int, int], repetitions: int) -> dict[str, object]:
    data = make(*size)
    k, n, length = size
    steps = n * length
    calls: dict[str, Callable[[], object]] = {
        "read": data.behaviour_log_probs.sum,
        "FIS+NFIS": lambda: data.evaluate(["FIS", "NFIS"]),
        "all ten": lambda: data.evaluate(list(WEIGHTED)),
    }
    seconds = interleaved(calls, repetitions)
    memory = extra_memory(calls["FIS+NFIS"])
    row: dict[str, object] = {"size": name, "K": k, "n": n, "T": length}
    for call in ("FIS+NFIS", "all ten"):
        ratio = np.median(np.array(seconds[call]) / np.array(seconds["read"]))
        row[call] = {
            "seconds": float(np.median(seconds[call])),
            "steps_per_second": steps / float(np.median(seconds[call])),
            "ratio_to_read": float(ratio),
        }
    row["extra_bytes_per_step"] = memory / steps
    row["matrix_mb"] = data.behaviour_log_probs.nbytes / 1e6
    for call in ("FIS+NFIS", "all ten"):
        r = row[call]
        assert isinstance(r, dict)
        print(
            f"{name:8}K={k:<4}n={n:<7,}T={length:<4} {call:9} {r['seconds'] * 1e3:9.1f} ms "
            f"{r['steps_per_second'] / 1e6:8.1f} M steps/s   {r['ratio_to_read']:6.2f} x read"
            f"   {memory / steps:6.0f} B/step extra"
        )
    return row


def bootstrap(repetitions: int, replicates: int = 1000) -> dict[str, float]:
    """1,000 replicates of NFIS against a loop that resamples and re-estimates."""
    k, n, length = SIZES["small"]
    data = make(k, n, length)
    weights = np.exp(
        np.cumsum(  # padded weights, given to the loop for nothing
            (data.target_log_probs - data.behaviour_log_probs.mean(axis=0)).reshape(n, length),
            axis=1,
        )
    )
    paid = weights * data.rewards.reshape(n, length)
    members = [np.flatnonzero(data.behaviour_ids == j) for j in range(k)]

    def loop() -> list[float]:
        rng = np.random.default_rng(0)
        values = []
        for _ in range(replicates):
            drawn = np.concatenate([rng.choice(m, m.size) for m in members])
            values.append(float((paid[drawn].sum(axis=0) / weights[drawn].sum(axis=0)).sum()))
        return values

    seconds = interleaved(
        {
            "loop": loop,
            "ours": lambda: data.evaluate(["NFIS"], interval="percentile"),
            "none": lambda: data.evaluate(["NFIS"]),
        },
        repetitions,
    )
    ours = np.array(seconds["ours"]) - np.array(seconds["none"])
    ratio = float(np.median(np.array(seconds["loop"]) / ours))
    print(
        f"bootstrap of NFIS, {replicates} replicates at K={k}, n={n}, T={length}: "
        f"{np.median(ours) * 1e3:.1f} ms, loop {np.median(seconds['loop']) * 1e3:.0f} ms: "
        f"{ratio:.1f} x"
    )
    return {
        "ours": float(np.median(ours)),
        "loop": float(np.median(seconds["loop"])),
        "ratio": ratio,
    }


def peer(name: str, python: str, repetitions: int) -> dict[str, object]:
    runner, estimators, size, episodes = PEERS[name]
    data = make(*size)
    if episodes is not None:
        data = make(size[0], episodes, size[2])
    path = Path(__file__).parent / "peers" / runner
    theirs, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for field, array in vars(data).items():
            np.save(Path(folder) / f"{field}.npy", array)
        data.evaluate(estimators)
        for _ in range(repetitions):
            command = [python, str(path), folder, "--repetitions", "3"]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            report = json.loads(output.strip().splitlines()[-1])
            calls = np.array(report["seconds"])
            if name == "obp":  # its input is the mixture that our call computes
                calls = calls + np.array(report["input_seconds"])
            theirs.append(float(np.median(calls)))
            seconds = interleaved({"ours": lambda: data.evaluate(estimators)}, 3)
            ours.append(float(np.median(seconds["ours"])))
    ratio = float(np.median(np.array(theirs) / np.array(ours)))
    n, t = data.behaviour_ids.size, size[2]
    print(
        f"{report['library']} {report['version']} {'+'.join(report['estimators'])} at n={n:,}, "
        f"T={t}: {np.median(theirs) * 1e3:.1f} ms, ours ({'+'.join(estimators)}) "
        f"{np.median(ours) * 1e3:.1f} ms: {ratio:.1f} x"
    )
    return {
        "library": report["library"],
        "version": report["version"],
        "ratio": ratio,
        "theirs": float(np.median(theirs)),
        "ours": float(np.median(ours)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the two small sizes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(
        f"ope_gym on {platform.machine()}, {platform.python_implementation()} "
        f"{platform.python_version()}, numpy {np.__version__}"
    )
    sizes = {"small": SIZES["small"], "medium": SIZES["medium"]} if args.quick else SIZES
    report: dict[str, object] = {
        "kernels": [kernels(name, size, args.repetitions) for name, size in sizes.items()]
    }
    if not args.quick:
        report["huge"] = kernels("huge", HUGE, max(2, args.repetitions // 2))
    report["bootstrap"] = bootstrap(args.repetitions)
    peers = dict(entry.split("=", 1) for entry in args.peer)
    report["peers"] = [peer(name, python, args.repetitions) for name, python in peers.items()]
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
