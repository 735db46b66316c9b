"""Speed and memory of the estimators, as ratios inside one run.

    python benchmarks/estimators.py                         all sizes; needs about 12 GB of memory
    python benchmarks/estimators.py --quick                 the two small sizes
    python benchmarks/estimators.py --peer scope-rl=peer-scope/bin/python --peer rllib=...

What is compared is timed in turn, repetition by repetition, so that a busy moment of the machine
meets all of them; ratios are of the clock and, in brackets, of the processor, which counts both of
our threads but no waiting for others. "read" is one pass of numpy over the (K, S) matrix, "mixture"
the kernel that makes fused weights from it. benchmarks/peers/README.md says how to make the
environments of the other libraries; our times include the standard error, interval, diagnostics and
verdict that they do not compute, except for those of the value alone (interval=None).
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
from ope_gym.weights.formula import log_weights

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

    def evaluate(self, estimators: list[str], interval: str | None = "ess-t") -> ope_gym.Evaluation:
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

    def mixture(self) -> object:
        """The fused weights alone."""
        return log_weights(
            self.target_log_probs,
            self.behaviour_log_probs,
            self.behaviour_ids,
            self.offsets,
            ["fused"],
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


def interleaved(
    calls: dict[str, Callable[[], object]], repetitions: int
) -> dict[str, NDArray[np.float64]]:
    """Seconds (2, repetitions) of the clock and of the processor of each call, taken in turn."""
    for call in calls.values():
        call()  # compile, touch the memory
    seconds = {name: np.empty((2, repetitions)) for name in calls}
    for i in range(repetitions):
        for name, call in calls.items():
            begin = np.array([time.perf_counter(), time.process_time()])
            call()
            seconds[name][:, i] = time.perf_counter(), time.process_time()
            seconds[name][:, i] -= begin
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
        "mixture": data.mixture,
        "FIS+NFIS": lambda: data.evaluate(["FIS", "NFIS"]),
        "all ten": lambda: data.evaluate(list(WEIGHTED)),
    }
    seconds = interleaved(calls, repetitions)
    memory = extra_memory(calls["FIS+NFIS"])
    row: dict[str, object] = {"size": name, "K": k, "n": n, "T": length}
    row["extra_bytes_per_step"] = memory / steps
    row["matrix_mb"] = data.behaviour_log_probs.nbytes / 1e6
    for call in list(calls)[1:]:
        clock, cpu = np.median(seconds[call] / seconds["read"], axis=1).tolist()
        took = float(np.median(seconds[call][0]))
        row[call] = {
            "seconds": took,
            "steps_per_second": steps / took,
            "ratio_to_read": clock,
            "cpu_ratio_to_read": cpu,
        }
        print(
            f"{name:8}K={k:<4}n={n:<7,}T={length:<4} {call:9} {took * 1e3:9.1f} ms "
            f"{steps / took / 1e6:8.1f} M steps/s   {clock:6.2f} ({cpu:.2f}) x read"
            f"   {memory / steps:6.0f} B/step extra",
            flush=True,
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
    ours = seconds["ours"][1] - seconds["none"][1]
    ratio = float(np.median(seconds["loop"][1] / ours))
    print(
        f"bootstrap of NFIS, {replicates} replicates at K={k}, n={n}, T={length}: "
        f"{np.median(ours) * 1e3:.1f} ms, loop {np.median(seconds['loop'][1]) * 1e3:.0f} ms of the "
        f"processor: {ratio:.1f} x"
    )
    return {
        "ours": float(np.median(ours)),
        "loop": float(np.median(seconds["loop"][1])),
        "ratio": ratio,
    }


def peer(name: str, python: str, repetitions: int) -> dict[str, object]:
    runner, estimators, size, episodes = PEERS[name]
    data = make(*size)
    if episodes is not None:
        data = make(size[0], episodes, size[2])
    path = Path(__file__).parent / "peers" / runner
    theirs: list[list[float]] = []
    ours: dict[str, list[list[float]]] = {"with error and verdict": [], "value alone": []}
    calls = {
        "with error and verdict": lambda: data.evaluate(estimators),
        "value alone": lambda: data.evaluate(estimators, None),
    }
    with tempfile.TemporaryDirectory() as folder:
        for field, array in vars(data).items():
            np.save(Path(folder) / f"{field}.npy", array)
        for _ in range(repetitions):
            command = [python, str(path), folder, "--repetitions", "5"]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            report = json.loads(output.strip().splitlines()[-1])
            took = np.array([report["seconds"], report["cpu_seconds"]])
            if name == "obp":  # its input is the mixture that our call computes
                took += np.array([report["input_seconds"], report["input_cpu_seconds"]])
            theirs.append(np.median(took, axis=1).tolist())
            for what, seconds in interleaved(calls, 5).items():
                ours[what].append(np.median(seconds, axis=1).tolist())
    n, t = data.behaviour_ids.size, size[2]
    found: dict[str, object] = {"library": report["library"], "version": report["version"]}
    for what, taken in ours.items():
        clock, cpu = np.median(np.array(theirs) / np.array(taken), axis=0).tolist()
        a, b = np.median(theirs, axis=0)[0] * 1e3, np.median(taken, axis=0)[0] * 1e3
        print(
            f"{report['library']} {report['version']} {'+'.join(report['estimators'])} at n={n:,}, "
            f"T={t}: {a:.1f} ms, ours ({'+'.join(estimators)}, {what}) {b:.1f} ms: "
            f"{clock:.1f} ({cpu:.1f}) x",
            flush=True,
        )
        found[what] = {"ratio": clock, "cpu_ratio": cpu, "theirs": a / 1e3, "ours": b / 1e3}
    return found


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
