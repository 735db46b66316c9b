"""Measure time and memory of evaluation in blocks and in memory, and how they grow.

    python benchmarks/scale.py                     growth with steps, policies and length
    python benchmarks/scale.py --steps 100000000   one run of so many steps, made on the fly
    python benchmarks/scale.py --steps 10000000 --way files
    python benchmarks/scale.py --steps 1000000 --way files --interval percentile
    python benchmarks/scale.py --throughput 1000000       MB of files a second of the processor
    python benchmarks/scale.py --throughput 10000000 --workers 2

Each run is a process of its own, which reports its largest resident memory. Episodes are made from
a seed whenever they are read and never stored, except with `--way files`; the time of making them
is not part of the time of evaluating them. What is compiled is compiled before the clock starts.
The time of the processor says more than that of the clock on a busy machine; growth is the
exponent b of processor time = a + c x^b through three cases, which is 1 where each further step,
policy or step of an episode costs the same. (What does not depend on the number of policies is in
a.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import Evaluation, Trajectories, Weighting, evaluate
from ope_gym.options import Compute
from ope_gym.policies import LinearSigmoid

ESTIMATORS = ("BIS", "NBIS", "FIS", "NFIS")
PART = 250_000  # steps
TIMES = 3  # runs of which the growth takes the fastest
DRIFT = 0.3  # of the policies, from the first to the target


@dataclass(frozen=True)
class Case:
    """One run: where the episodes are, how many steps, policies and steps an episode."""

    way: str
    steps: int
    behaviours: int = 50
    length: int = 500
    interval: str = "ess-t"
    workers: int = 1
    auto: bool = False


def policies(behaviours: int) -> list[LinearSigmoid]:
    """Make linear policies that drift as in a training loop; the last is the target."""
    return [
        LinearSigmoid(np.array([1.0, -0.5, 0.25, 1.0]) * shift)
        for shift in np.linspace(0.0, DRIFT, behaviours + 1)
    ]


def make(case: Case, part: int) -> Trajectories:
    """Make the episodes of a part, the same whenever they are made."""
    rng = np.random.default_rng([1, part])
    episodes = max(1, min(PART, case.steps) // case.length)
    steps = episodes * case.length
    known = policies(case.behaviours)[:-1]
    ids = (np.arange(episodes) + part * episodes) % case.behaviours
    theta = np.stack([policy.theta for policy in known])
    x = rng.standard_normal((episodes, case.length, 4), dtype=np.float32)
    score = (x @ theta[ids][:, :, None]).reshape(steps)
    sign = np.where(rng.random(steps) < 1 / (1 + np.exp(-score)), 1.0, -1.0)
    return Trajectories.from_arrays(
        x.reshape(steps, 4),
        (sign > 0).astype(np.int64),
        rng.random(steps),
        -np.log1p(np.exp(-sign * score)),
        offsets=np.arange(episodes + 1) * case.length,
        policies=known,
        terminated=True,
        policy_ids=np.repeat(ids, case.length),
        held_out=True,
    )


def run(case: Case) -> dict[str, Any]:
    """Evaluate in this process; return seconds, memory and the estimates."""
    parts = max(1, case.steps // PART)
    target = policies(case.behaviours)[-1]
    options: dict[str, Any] = {
        "estimators": ESTIMATORS,
        "interval": case.interval,
        "weighting": Weighting(mixture="all"),  # or growth with policies would end at 256
    }
    if case.auto:
        del options["estimators"]
    making = np.zeros(2)  # seconds of the clock and of the processor

    def timed(part: int) -> Trajectories:
        start = _now()
        data = make(case, part)
        making[:] += _now() - start
        return data

    with tempfile.TemporaryDirectory() as folder:
        compute = Compute(workers=case.workers)
        read = 0.0
        small = Case("generated", 4 * case.length, case.behaviours, case.length)
        evaluate([partial(make, small, 0)], target, compute=compute, **options)  # compiles
        given: Any = [partial(timed, part) for part in range(parts)]
        call: Callable[[], Evaluation] = partial(
            evaluate, given, target, compute=compute, **options
        )
        if case.way == "memory":
            evaluate(make(small, 0), target, q_model=None, **options)
            held = [timed(part) for part in range(parts)]
            data = held[0].merge(*held[1:])
            held.clear()
            call = partial(evaluate, data, target, q_model=None, **options)
        elif case.way == "files":
            for part in range(parts):
                make(case, part).save(Path(folder) / f"{part}.ope")
            paths = sorted(Path(folder).glob("*.ope"))
            read = sum(path.stat().st_size for path in paths) / 1e6
            call = partial(evaluate, paths, target, compute=compute, **options)
        before, made, others = _resident(), making.copy(), _of_children()
        start = _now()
        found = call()
        seconds, cpu = (_now() - start - (making - made)).tolist()
        others = _of_children() - others
    return {
        "steps": found.sample.steps,
        "seconds": seconds,
        "cpu": cpu,
        "workers_cpu": others,
        "megabytes": read,
        "making": float(making[0]),
        "before": before,
        "peak": _resident(),
        "values": {name: estimate.value for name, estimate in found.items()},
        "verdicts": {name: estimate.verdict.colour for name, estimate in found.items()},
    }


def _now() -> NDArray[np.float64]:
    return np.array([time.perf_counter(), time.process_time()])


def _of_children() -> float:
    """Return the processor time of the workers that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident() -> float:
    """Return the largest resident memory of this process so far, MiB."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if sys.platform == "darwin" else 2**10)


def apart(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(case: Case, times: int = 1) -> dict[str, Any]:
    """Print the run with the least processor time of so many."""
    found = min((apart(case) for _ in range(times)), key=lambda run: float(run["cpu"]))
    per_element = 1e9 * found["cpu"] / (found["steps"] * case.behaviours)
    print(
        f"{case.way:>9}  {found['steps']:>11,}  {case.behaviours:>4}  {case.length:>5}  "
        f"{found['seconds']:>8.2f}  {found['cpu']:>8.2f}  {per_element:>11.1f}  "
        f"{found['making']:>8.2f}  "
        f"{found['before']:>8.0f}  {found['peak']:>6.0f}  {found['values']['NFIS']:.12g}",
        flush=True,
    )
    return found


def head() -> None:
    print(
        f"{'way':>9}  {'steps':>11}  {'K':>4}  {'T':>5}  {'seconds':>8}  {'CPU s':>8}  "
        f"{'ns/(step K)':>11}  {'making s':>8}  {'MiB idle':>8}  {'peak':>6}  NFIS"
    )


def growth() -> None:
    """Let steps, policies and length grow by factors; time should grow in proportion."""
    head()
    sizes = (500_000, 2_000_000, 8_000_000)
    for way in ("memory", "generated", "files"):
        grow("steps", {steps: Case(way, steps, 10) for steps in sizes})
    grow("policies", {k: Case("generated", 1_000_000, k) for k in (8, 64, 512)})
    grow(
        "length, at the same number of episodes",
        {t: Case("generated", 5_000 * t, 10, t) for t in (100, 400, 1600)},
    )
    print("length, at the same number of steps")
    for length in (50, 500, 5000):
        show(Case("generated", 2_000_000, 10, length), TIMES)


def throughput(steps: int, behaviours: int, length: int, workers: int) -> None:
    """Print MB of files a second of the processor, without a q model and with auto.

    With several workers, also by how much they are faster by the clock, and could be on a machine
    with nothing else to do if they never waited for each other: what one takes alone, over the time
    of all, divided by their number.
    """
    for auto in (False, True):
        case = Case("files", steps, behaviours, length, auto=auto)
        one = apart(case)
        what = "auto" if auto else "BIS, NBIS, FIS, NFIS"
        print(
            f"{what}: {one['megabytes']:.0f} MB of {steps:,} steps, K={behaviours}: "
            f"{one['cpu']:.2f} CPU s, {one['megabytes'] / one['cpu']:.1f} MB a CPU second",
            flush=True,
        )
        if workers > 1:
            several = apart(dataclasses.replace(case, workers=workers))
            used = several["cpu"] + several["workers_cpu"]
            print(
                f"  {workers} workers: {used:.2f} CPU s; at most "
                f"{workers * one['cpu'] / used:.2f} times as fast; "
                f"by the clock {one['seconds'] / several['seconds']:.2f} times, "
                f"{one['seconds']:.1f} s and {several['seconds']:.1f} s",
                flush=True,
            )


def grow(what: str, cases: dict[int, Case]) -> None:
    """Show three cases, each so many times the one before, and how their processor time grows."""
    print(what)
    first, second, third = (show(case, TIMES)["cpu"] for case in cases.values())
    one, two, _ = cases
    exponent = np.log((third - second) / (second - first)) / np.log(two / one)
    print(f"{'':>9}  CPU s = a + c x^{exponent:.2f} in {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="one run of so many steps")
    parser.add_argument("--behaviours", type=int, default=50)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--way", choices=("generated", "files", "memory"), default="generated")
    parser.add_argument("--interval", choices=("ess-t", "percentile"), default="ess-t")
    parser.add_argument("--throughput", type=int, metavar="STEPS", help="MB a CPU second")
    parser.add_argument("--workers", type=int, default=1, help="of --throughput, beside one")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run(Case(**json.loads(args.case)))))
    elif args.throughput:
        throughput(args.throughput, args.behaviours, args.length, args.workers)
    elif args.steps:
        head()
        show(Case(args.way, args.steps, args.behaviours, args.length, args.interval))
    else:
        growth()


if __name__ == "__main__":
    main()
