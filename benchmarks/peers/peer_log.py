"""What the runners of estimators share: read logged arrays, time the calls, print a JSON line.

Needs only numpy, because each runner is executed by the environment of the library it times.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Calls = dict[str, Callable[[], float]]
"""Estimator name to a call that needs no argument and gives the estimate."""


@dataclass(frozen=True)
class PeerLog:
    """The logged arrays: S steps of n episodes, K behaviour policies.

    Attributes:
        target_log_probs: ln π_e(a|s) of every step, (S,).
        behaviour_log_probs: ln π_k(a|s) of every policy at every step, (K, S).
        behaviour_ids: the policy that recorded each episode, (n,).
        rewards: reward of every step, (S,).
        offsets: episode i is the rows offsets[i]:offsets[i + 1], (n + 1,).
    """

    target_log_probs: NDArray[np.float64]
    behaviour_log_probs: NDArray[np.float64]
    behaviour_ids: NDArray[np.int64]
    rewards: NDArray[np.float64]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        n_policies, n_steps = self.behaviour_log_probs.shape
        lengths, ids = self.lengths, self.behaviour_ids
        if self.target_log_probs.shape != (n_steps,) or self.rewards.shape != (n_steps,):
            raise ValueError(
                f"target_log_probs {self.target_log_probs.shape} and rewards {self.rewards.shape} "
                f"must both be ({n_steps},), one value a step of behaviour_log_probs."
            )
        if lengths.min() < 1 or self.offsets[0] != 0 or self.offsets[-1] != n_steps:
            raise ValueError(f"offsets must rise from 0 to {n_steps}; no episode may be empty.")
        if ids.shape != lengths.shape or ids.min() < 0 or ids.max() >= n_policies:
            raise ValueError(
                f"behaviour_ids {ids.shape} must hold a policy below {n_policies} for each of the "
                f"{len(lengths)} episodes."
            )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Steps of each episode, (n,)."""
        return np.diff(self.offsets)

    @property
    def own_log_probs(self) -> NDArray[np.float64]:
        """Log-probability under the policy that recorded the step, (S,)."""
        rows = np.repeat(self.behaviour_ids, self.lengths)
        return self.behaviour_log_probs[rows, np.arange(len(rows))]

    @property
    def shares(self) -> NDArray[np.float64]:
        """ρ_k, the share of the episodes that policy k recorded, (K,)."""
        counts = np.bincount(self.behaviour_ids, minlength=len(self.behaviour_log_probs))
        return counts / len(self.behaviour_ids)

    def common_length(self, library: str) -> int:
        """The length of all episodes, for a library that takes only equal ones."""
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        if shortest != longest:
            raise ValueError(
                f"{library} needs episodes of equal length, these have {shortest} to {longest} "
                "steps: write data with one length."
            )
        return longest

    def slice(self, n_episodes: int) -> "PeerLog":
        """Evenly spaced episodes, so that every policy keeps about its share."""
        if not 1 <= n_episodes <= len(self.behaviour_ids):
            raise ValueError(f"--episodes {n_episodes} must be in 1..{len(self.behaviour_ids)}.")
        kept = np.zeros(len(self.behaviour_ids), dtype=bool)
        kept[np.linspace(0, len(kept) - 1, n_episodes).astype(np.int64)] = True
        rows = np.repeat(kept, self.lengths)
        return PeerLog(
            target_log_probs=self.target_log_probs[rows],
            behaviour_log_probs=self.behaviour_log_probs[:, rows],
            behaviour_ids=self.behaviour_ids[kept],
            rewards=self.rewards[rows],
            offsets=np.concatenate([[0], np.cumsum(self.lengths[kept])]),
        )


def read_log(folder: Path, n_episodes: int | None = None) -> PeerLog:
    """Read the five .npy files of `folder`; with `n_episodes` only that many episodes."""
    log = PeerLog(**{name: np.load(folder / f"{name}.npy") for name in PeerLog.__annotations__})
    return log if n_episodes is None else log.slice(n_episodes)


def run_peer(library: str, version: str, prepare: Callable[[PeerLog], Calls]) -> None:
    """Time `library` on the folder of the command line and print the JSON line.

    Args:
        library: name to print.
        version: installed version to print.
        prepare: builds the library's own input form and returns the calls to time.
    """
    parser = argparse.ArgumentParser(description=f"Time {library} on logged arrays.")
    parser.add_argument("folder", type=Path, help="folder with the five .npy files")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--episodes", type=int, help="use only that many, evenly spaced")
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error(f"--repetitions {args.repetitions} must be at least 1.")

    log = read_log(args.folder, args.episodes)
    size = {"episodes": len(log.behaviour_ids), "steps": len(log.rewards)}
    input_seconds, input_cpu = [], []
    for _ in range(args.repetitions):
        calls: Calls = {}  # frees the last form first, so that two never exist at once
        begin, cpu = time.perf_counter(), time.process_time()
        calls = prepare(log)
        input_seconds.append(time.perf_counter() - begin)
        input_cpu.append(time.process_time() - cpu)
    del log  # a library that needs no (K, S) matrix is not charged for its memory

    before_mb = _reset_peak()
    seconds, cpu_seconds = [], []
    for _ in range(args.repetitions):
        begin, cpu = time.perf_counter(), time.process_time()
        estimates = {name: call() for name, call in calls.items()}
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu)
    peak_mb = _memory_mb("VmHWM")

    report = {
        "library": library,
        "version": version,
        "estimators": {name: float(value) for name, value in estimates.items()},
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": peak_mb,
        "call_mb": None if peak_mb is None or before_mb is None else peak_mb - before_mb,
        "input_seconds": input_seconds,
        "input_cpu_seconds": input_cpu,
        **size,
    }
    print(json.dumps(report))


def _reset_peak() -> float | None:
    """Forget the memory peak of loading and importing; return the resident memory now.

    The kernel's own mark is used because ru_maxrss cannot be reset and is inherited from the
    process that started this one, and because it sees every allocator. Freed blocks that the
    allocator keeps are given back first: the calls would reuse them and seem to need no memory.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory_mb("VmRSS")


def _memory_mb(field: str) -> float | None:
    """A memory field of this process in MB (10⁶ bytes); None where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return None
