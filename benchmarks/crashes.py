"""Kill recorders, and let each k-th system call on their files fail; count what is lost in silence.

    python benchmarks/crashes.py kills [--times 200]
    python benchmarks/crashes.py faults

`kills` sends SIGKILL at random moments to recorders of a single and of a vector environment and
to a training of Stable-Baselines3, each second time to one that continues the file of
the one before, and compares the episodes in the file with those that the recorder had announced.
`faults` fails the k-th write, sync, truncation, deletion or renaming of a short run, once or for
the rest of it, for each k, by a library between SQLite and the system that gcc compiles. An
episode is lost in silence if it is in no file of the folder and nothing was said.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import wrappers
import wrappers.vector
from ope_gym.data.trajectories import Trajectories
from ope_gym.files import DamagedFileError
from ope_gym.policies import LinearSigmoid

ROOT = Path(__file__).parents[1]
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>
static long left = -1, calls = 0; static int code = 0, lasting = 0;
void fail_at(long k, int error, int for_ever) {
    left = k; code = error; lasting = for_ever; calls = 0;
}
long counted(void) { return calls; }
static int due(const char *path) {
    if (!path || !strstr(path, ".ope")) return 0;
    calls++;
    if (left < 0) return 0;
    if (left > 0) { left--; return 0; }
    if (!lasting) left = -1;
    errno = code;
    return 1;
}
static int due_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return due(path);
}
#define WRAP(type, name, args, given, check) \
    type name args { static type (*real) args; if (!real) real = dlsym(RTLD_NEXT, #name); \
    return check ? -1 : real given; }
WRAP(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), due_fd(fd))
WRAP(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), due_fd(fd))
WRAP(ssize_t, pwrite64, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), due_fd(fd))
WRAP(int, fsync, (int fd), (fd), due_fd(fd))
WRAP(int, fdatasync, (int fd), (fd), due_fd(fd))
WRAP(int, ftruncate, (int fd, off_t n), (fd, n), due_fd(fd))
WRAP(int, ftruncate64, (int fd, off_t n), (fd, n), due_fd(fd))
WRAP(int, rename, (const char *a, const char *b), (a, b), due(b))
WRAP(int, unlink, (const char *a), (a), due(a))
"""


def recorder(kind: str, path: Path) -> Any:
    if kind == "single":
        env = gym.make("CartPole-v1")
        return wrappers.RecordTrajectories(env, path=path, append=True)
    return wrappers.vector.RecordTrajectories(
        gym.make_vec("CartPole-v1", 8), path=path, append=True
    )


def play(env: Any, kind: str, steps: int, *, announce: bool = False) -> int:
    """Play, and return how many episodes have ended."""
    rng, ended = np.random.default_rng(0), 0
    env.reset(seed=1)
    for i in range(steps):
        if i % 60 == 0:  # in the middle of episodes, too
            env.follow(LinearSigmoid(np.full(4, 0.01 * (i % 1000))))
        actions = rng.integers(2, size=8)
        *_, terminated, truncated, _ = env.step(int(actions[0]) if kind == "single" else actions)
        over = int(np.sum(np.logical_or(terminated, truncated)))
        ended += over
        if kind == "single" and over:
            env.reset()
        if announce:
            print(ended, flush=True)
    return ended


def train(path: Path) -> None:
    """Train for ever, and announce the episodes of the training that have ended."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback, CallbackList

    from wrappers.sb3 import OPECallback

    class Announce(BaseCallback):
        ended = 0

        def _on_step(self) -> bool:
            self.ended += int(self.locals["dones"].sum())
            print(self.ended, flush=True)
            return True

    torch.set_num_threads(1)
    ope = OPECallback(None, eval_freq=256, path=path, verbose=0)
    env = gym.make("CartPole-v1", max_episode_steps=40)
    model = PPO("MlpPolicy", env, n_steps=64, n_epochs=1, device="cpu")
    model.learn(10**9, callback=CallbackList([ope, Announce()]))


def kills(times: int) -> None:
    moments = random.Random(0)
    for kind in ("single", "vector", "sb3"):
        results = Counter[str]()
        with tempfile.TemporaryDirectory() as name:
            path, before = Path(name) / "run.ope", 0
            for i in range(times // 3):
                command = [sys.executable, __file__, "endless", "--kind", kind, "--path", str(path)]
                with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
                    assert process.stdout is not None
                    lines = [process.stdout.readline()]
                    time.sleep(moments.uniform(0, 0.3))
                    process.kill()
                    lines += process.stdout.read().splitlines(keepends=True)
                announced = int([x for x in lines if x.endswith(b"\n")][-1])
                data = Trajectories.load(path)
                data.audit(1e-4 if kind == "sb3" else 1e-12)  # single precision there
                results["episodes"] += len(data) - before
                results["lost"] += max(0, announced - (len(data) - before))
                results["more than were played"] += len(data) - before > announced + 8
                before = len(data)
                if i % 2:
                    path, before = Path(name) / f"run-{i}.ope", 0
        print(f"{times // 3} kills, {kind}: {dict(results)}", flush=True)


def faulty(kind: str, path: Path, k: int, code: int, lasting: bool, shim: Any) -> tuple[int, int]:
    """Record while a call fails; return how many episodes had ended and the number of calls."""
    shim.fail_at(k, code, lasting)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ended, errors = 0, 0
        try:
            env = recorder(kind, path)
            ended = play(env, kind, 150)
            env.close()
        except (OSError, ValueError):
            errors += 1
    calls = shim.counted()
    shim.fail_at(-1, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sum(episodes_in(x) for x in path.parent.glob("*.ope"))
    silent = any("buffer" in str(x.message) or "lost" in str(x.message) for x in told) or errors
    return (ended - found if not silent else -1 if ended - found else 0), calls


def episodes_in(path: Path) -> int:
    try:
        return len(Trajectories.load(path))
    except DamagedFileError:  # of a recorder that never had room for its tables
        return 0


def faults() -> None:
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for kind in ("single", "vector"):
        for name in ("ENOSPC", "EIO"):
            for lasting in (False, True):
                results, k, calls = Counter[str](), 0, 1
                while k < calls:
                    with tempfile.TemporaryDirectory() as folder:
                        path = Path(folder) / "run.ope"
                        code = getattr(errno, name)
                        lost, now = faulty(kind, path, k, code, lasting, shim)
                    calls = max(calls, now) if not lasting else max(calls, now, k + 1)
                    results["lost in silence" if lost > 0 else "told" if lost else "whole"] += 1
                    k += 1
                    if lasting and k >= now:
                        break
                print(f"{kind}, {name}, {'lasting' if lasting else 'once'}: {dict(results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "faults", "endless"))
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--kind", default="single")
    parser.add_argument("--path", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "endless":
        if arguments.kind == "sb3":
            train(arguments.path)
        env = recorder(arguments.kind, arguments.path)
        play(env, arguments.kind, 10**9, announce=True)
    elif arguments.what == "kills":
        kills(arguments.times)
    elif "LD_PRELOAD" in os.environ:
        faults()
    else:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "shim.c", Path(folder) / "shim.so"
            source.write_text(_SHIM, encoding="utf-8")
            gcc = ["gcc", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
            subprocess.run(gcc, check=True)
            environment = {**os.environ, "LD_PRELOAD": str(library)}
            command = [sys.executable, __file__, "faults"]
            subprocess.run(command, env=environment, check=True, cwd=ROOT)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
