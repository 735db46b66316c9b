"""Measure the cost of recording: the CPU time of a run against that of the bare environment.

    python benchmarks/recording.py [--repetitions 20]
    python benchmarks/recording.py --peer minari=peer-minari/bin/python

Every repetition runs all contenders one after the other, so that a busy machine slows all of them
down. The medians over the repetitions are shown: the ratio to the bare environment of the same
repetition, and the time added to a step. Actions are uniformly random. The time of our recorders
includes the log-probabilities by the policy and putting all episodes into the buffer; with a file,
also bringing every finished episode to the operating system before the step returns.
`--peer` runs the recorder of another library with the python of an environment that has it, see
benchmarks/peers/README.md: the same environments, actions and number of steps, and its own bare
loop in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from peers.peer_loop import ENVS, Run, cpu_seconds, play, random_actions

import wrappers
import wrappers.vector
from ope_gym.policies import LinearSigmoid, Policy, Uniform

UNIFORM = Uniform(2)
SIGMOID = LinearSigmoid(np.zeros(4))  # the same, but computed from the observations
LOG_HALF = float(np.log(0.5))


def play_vector(env: Any, actions: list[Any], **given: Any) -> None:
    env.reset(seed=0)
    for action in actions:
        env.step(action, **given)


def recorded(
    env: Any, play: Callable[..., None], actions: list[Any], policy: Policy = UNIFORM, **given: Any
) -> Run:
    env.follow(policy)

    def run() -> None:
        env.abandon()
        play(env, actions, **given)
        env.buffer.clear()  # first fetches the episodes that wait

    return run


def single(make: Callable[[], gym.Env[Any, Any]], steps: int, folder: Path) -> dict[str, Run]:
    actions = random_actions(steps)
    bare, counted = make(), gym.wrappers.RecordEpisodeStatistics(make())
    record = wrappers.RecordTrajectories
    path = Path(tempfile.mkdtemp(dir=folder)) / "episodes"
    return {
        "bare": lambda: play(bare, actions),
        "RecordEpisodeStatistics": lambda: play(counted, actions),
        "RecordTrajectories": recorded(record(make()), play, actions),
        "  a linear-sigmoid policy": recorded(record(make()), play, actions, SIGMOID),
        "  log_prob given, audited": recorded(record(make()), play, actions, log_prob=LOG_HALF),
        "  each episode to a file": recorded(record(make(), path=path), play, actions),
    }


def vector(num_envs: int, steps: int, folder: Path) -> dict[str, Run]:
    def make() -> Any:
        return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")

    actions = list(np.random.default_rng(0).integers(2, size=(steps, num_envs)))
    bare, counted = make(), gym.wrappers.vector.RecordEpisodeStatistics(make())
    record, given = wrappers.vector.RecordTrajectories, np.full(num_envs, LOG_HALF)
    path = folder / f"{num_envs}"
    return {
        "bare": lambda: play_vector(bare, actions),
        "RecordEpisodeStatistics": lambda: play_vector(counted, actions),
        "RecordTrajectories": recorded(record(make()), play_vector, actions),
        "  a linear-sigmoid policy": recorded(record(make()), play_vector, actions, SIGMOID),
        "  log_prob given, audited": recorded(record(make()), play_vector, actions, log_prob=given),
        "  each episode to a file": recorded(record(make(), path=path), play_vector, actions),
    }


def by_peers(peers: dict[str, str], repetitions: int) -> dict[str, dict[str, Any]]:
    """Run the recorders of other libraries; return the seconds of each by title and name."""
    found: dict[str, dict[str, Any]] = {title: {} for title in ENVS}
    for name, python in peers.items():
        runner = Path(__file__).parent / "peers" / f"{name}_runner.py"
        command = [python, str(runner), "--repetitions", str(repetitions)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        report = json.loads(output.splitlines()[-1])
        for title, seconds in report["seconds"].items():
            found[title][f"{report['library']} {report['version']}"] = seconds
    return found


def compare(title: str, runs: dict[str, Run], steps: int, repetitions: int) -> None:
    show(title, cpu_seconds(runs, repetitions), steps)


def show(title: str, seconds: dict[str, list[float]], steps: int) -> None:
    bare = np.array(seconds["bare"])
    print(f"{title}: {np.median(bare) / steps * 1e6:.2f} µs a step")
    for name, values in seconds.items():
        taken = np.array(values)
        ratio, added = np.median(taken / bare), np.median(taken - bare) / steps * 1e6
        print(f"  {name:<28}{ratio:8.2f} ×{added:+9.2f} µs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    n = arguments.repetitions
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # runs end in the middle of episodes
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs = by_peers(dict(entry.split("=", 1) for entry in arguments.peer), n)
        for title, (make, steps) in ENVS.items():
            compare(title, single(make, steps, folder), steps, n)
            for library, seconds in theirs[title].items():
                show(f" by the python of {library}", seconds, steps)
        compare("1024 × CartPole-v1, a vector step", vector(1024, 200, folder), 200, n)
        compare("30 × CartPole-v1, a vector step", vector(30, 500, folder), 500, n)


if __name__ == "__main__":
    main()
