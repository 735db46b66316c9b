"""Measure what free evaluation is worth in real training runs of Stable-Baselines3.

`record` trains once and keeps in a file every step, the policy that acts and the greedy one at each
evaluation, and the truth: fresh episodes that both play elsewhere. `score` replays the files
through `ope_gym.online.FreeEvaluation` and prints

    W = (sd of a return / RMSE)², the number of fresh episodes that would be as accurate,

over all evaluations (the noise of the truth subtracted) and over the fifth where the true value
changes most, how often the 95 % bands cover, and what the values claim over what was measured:
the median squared error in claimed standard errors, over that of a right claim. What it costs is
measured by callback_overhead.py.

    python benchmarks/free_evaluation.py record --case ppo-cartpole --seeds 400-402 --out free_runs
    python benchmarks/free_evaluation.py score free_runs --write docs/when_it_pays.md

Seeds 0 and 1 were used to design the method; figures in the documents are of seeds from 400 on.
Runs of MuJoCo need `pip install "mujoco<4" imageio`.
"""

from __future__ import annotations

import argparse
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize
from tqdm import tqdm

import ope_gym
from ope_gym.online import FreeEstimate, FreeEvaluation
from wrappers.sb3.snapshots import snapshot

TRUTH = 60  # fresh episodes of each policy at each evaluation
COLUMNS = ("observations", "actions", "rewards", "terminated", "truncated", "following")
WHO = ("acting", "greedy")


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        algorithm: of Stable-Baselines3.
        env: id of the environment.
        timesteps: of the training.
        every: timesteps between evaluations.
        envs: environments side by side.
        normalise: whether VecNormalize is around them.
        noise: standard deviation of the noise of TD3.
        options: of the algorithm.
    """

    algorithm: Any
    env: str
    timesteps: int
    every: int
    envs: int = 8
    normalise: bool = False
    noise: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


ZOO_DQN = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
PENDULUM = {"n_steps": 256, "gamma": 0.9, "learning_rate": 1e-3}
CASES = {
    "ppo-cartpole": Case(PPO, "CartPole-v1", 50_000, 4096, options={"n_steps": 256}),
    "a2c-cartpole": Case(A2C, "CartPole-v1", 80_000, 8000, options={"n_steps": 5}),
    "dqn-cartpole": Case(DQN, "CartPole-v1", 50_000, 2560, 1, options=ZOO_DQN),
    "ppo-acrobot": Case(PPO, "Acrobot-v1", 120_000, 10_240, options={"n_steps": 256}),
    "ppo-pendulum": Case(PPO, "Pendulum-v1", 80_000, 8192, normalise=True, options=PENDULUM),
    "sac-pendulum": Case(SAC, "Pendulum-v1", 8000, 500, 1, options={"learning_rate": 1e-3}),
    "td3-pendulum": Case(
        TD3, "Pendulum-v1", 8000, 500, 1, noise=0.1, options={"learning_rate": 1e-3}
    ),
    "ppo-hopper": Case(PPO, "Hopper-v5", 100_000, 8192, 1, True, options={"n_steps": 2048}),
    "ppo-swimmer": Case(PPO, "Swimmer-v5", 100_000, 12_288, 1, True, options={"n_steps": 2048}),
}


# The record -------------------------------------------------------------------------------


@dataclass(eq=False)
class Point:
    """An evaluation: the policies, and what they are worth.

    Args:
        timesteps: of the training.
        clock: vector steps before it.
        began: vector steps before the policy acted.
        policies: snapshots, by `WHO`.
        truth: returns of fresh episodes, by `WHO`.
        logged: mean of the training's last 100 and last 5 returns, as SB3 logs the first.
    """

    timesteps: int
    clock: int
    began: int
    policies: dict[str, Any]
    truth: dict[str, np.ndarray]
    logged: dict[str, float]


class Recorder(BaseCallback):
    """Keeps every step before VecNormalize, and at evaluations the policies and their truth."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self.case, self.seed = case, seed
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.points: list[Point] = []
        self.seconds = 0.0  # spent here, which are not the training's
        self._began, self._policies = 0, None

    def _on_training_start(self) -> None:
        self._norm = self.model.get_vec_normalize_env()
        self._raw = self._unnormalised(self.model._last_obs)
        self._on_policy = hasattr(self.model, "rollout_buffer")
        self._rollout = self.model.n_envs * self.model.n_steps if self._on_policy else 0
        self._due = self.case.every + self._rollout

    def _unnormalised(self, observations: Any) -> np.ndarray:
        return np.array(observations if self._norm is None else self._norm.get_original_obs())

    def _snapshots(self) -> dict[str, Any]:
        model = self.model
        return {"acting": snapshot(model), "greedy": snapshot(model, deterministic=True)}

    def _on_rollout_start(self) -> None:
        if self._on_policy and self.num_timesteps + self._rollout >= self._due:
            self._began, self._policies = len(self.columns["rewards"]), self._snapshots()

    def _on_step(self) -> bool:
        local, norm, done = self.locals, self._norm, self.locals["dones"]
        cut = np.array([i.get("TimeLimit.truncated", False) for i in local["infos"]]) & done
        seen, self._raw = self._raw, self._unnormalised(local["new_obs"])
        following = self._raw.copy()
        for i in np.flatnonzero(done):
            last = local["infos"][i]["terminal_observation"]
            following[i] = last if norm is None else norm.unnormalize_obs(last)
        rewards = local["rewards"] if norm is None else norm.get_original_reward()
        row = seen, local["actions"], rewards, done & ~cut, cut, following
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(np.array(value))
        if not self._on_policy and self.num_timesteps >= self._due:
            self._began, self._policies = len(self.columns["rewards"]), self._snapshots()
            self._point()
        return True

    def _on_rollout_end(self) -> None:
        if self._on_policy and self.num_timesteps >= self._due:
            self._point()

    def _point(self) -> None:
        start = time.process_time()
        self._due += self.case.every
        recent = [episode["r"] for episode in self.model.ep_info_buffer or []]
        logged = {
            "rew": float(np.mean(recent)) if recent else np.nan,
            "last": float(np.mean(recent[-5:])) if recent else np.nan,
        }
        assert self._policies is not None
        seed = 10**6 * (self.seed + 1) + self.num_timesteps
        truth = {who: play(self.case.env, p, seed) for who, p in self._policies.items()}
        clock = len(self.columns["rewards"])
        point = Point(self.num_timesteps, clock, self._began, self._policies, truth, logged)
        self.points.append(point)
        self.seconds += time.process_time() - start


def play(env_id: str, policy: Any, seed: int) -> np.ndarray:
    """Return the returns of fresh episodes, one in each environment."""
    mode = "vector_entry_point" if env_id.startswith("CartPole") else "sync"
    envs = gym.make_vec(env_id, TRUTH, vectorization_mode=mode)
    rng = np.random.default_rng(seed)
    observations, _ = envs.reset(seed=seed)
    paid, alive = np.zeros(TRUTH), np.ones(TRUTH, dtype=bool)
    space = envs.single_action_space
    while alive.any():
        actions: Any = policy.sample(observations, rng)
        if isinstance(space, gym.spaces.Box):
            actions = np.clip(actions.reshape(TRUTH, -1), space.low, space.high).astype(np.float32)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        paid += np.where(alive, rewards, 0.0)
        alive &= ~(terminated | truncated)
    envs.close()
    return paid


def record(name: str, seed: int, out: Path) -> None:
    """Train once and save what happened."""
    case, path = CASES[name], out / f"{name}_{seed}.pkl"
    if path.exists():
        return
    torch.set_num_threads(1)
    start = time.process_time()
    envs: Any = make_vec_env(case.env, case.envs, seed=seed)
    envs = VecNormalize(envs) if case.normalise else envs
    options = dict(case.options)
    if case.noise:
        shape = envs.action_space.shape
        options["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, case.noise))
    model = case.algorithm("MlpPolicy", envs, seed=seed, device="cpu", **options)
    recorder = Recorder(case, seed)
    model.learn(case.timesteps, callback=recorder)
    cpu = time.process_time() - start - recorder.seconds
    columns = {name: np.array(column) for name, column in recorder.columns.items()}
    path.write_bytes(pickle.dumps({"columns": columns, "points": recorder.points, "cpu": cpu}))


# The score --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What one rule says at one evaluation, and what is true.

    Args:
        run: name of the file.
        truth: returns of fresh episodes.
        change: of the true value since the evaluation before.
        value: what is said.
        estimate: with its band, where there is one.
    """

    run: str
    truth: np.ndarray
    change: float
    value: float
    estimate: FreeEstimate | None = None

    @property
    def error(self) -> float:
        """Difference from the mean of the fresh episodes."""
        return float(self.value - self.truth.mean())

    @property
    def noise(self) -> float:
        """Squared error of that mean."""
        return float(self.truth.var(ddof=1) / self.truth.size)


def replay(path: Path) -> tuple[dict[tuple[str, str], list[Said]], float]:
    """Feed a run to a free evaluation; return what is said by rule and policy, and CPU shares."""
    case, run = CASES[path.stem.rsplit("_", 1)[0]], pickle.loads(path.read_bytes())
    space, horizon = gym.spec(case.env).make().action_space, gym.spec(case.env).max_episode_steps
    bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None
    free, at, seconds = FreeEvaluation(case.envs, horizon=horizon, action_bounds=bounds), 0, 0.0
    said: dict[tuple[str, int, str], FreeEstimate] = {}

    def add(stop: int) -> None:
        nonlocal at
        if stop > at:
            free.add(*(run["columns"][name][at:stop] for name in COLUMNS))
            at = stop
        said.update((("settled", e.timesteps, WHO[e.deterministic]), e) for e in free.settle())

    for point in run["points"]:
        add(point.began)
        free.follow(*(point.policies[who] for who in WHO))
        add(point.clock)
        start = time.process_time()
        for who in WHO:
            estimate = free.evaluate(point.timesteps, deterministic=who == "greedy")
            if estimate is not None:
                said["at once", point.timesteps, who] = estimate
        seconds += time.process_time() - start
    add(len(run["columns"]["rewards"]))
    found: dict[tuple[str, str], list[Said]] = {}
    for who in WHO:
        values = np.array([point.truth[who].mean() for point in run["points"]])
        changes = np.abs(np.diff(values, prepend=values[:1]))
        for point, change in zip(run["points"], changes.tolist(), strict=True):
            about = path.stem, point.truth[who], change
            for rule in ("rew", "last"):
                found.setdefault((rule, who), []).append(Said(*about, point.logged[rule]))
            for rule in ("at once", "settled"):
                estimate = said.get((rule, point.timesteps, who))
                if estimate is not None:
                    some = found.setdefault((rule, who), [])
                    some.append(Said(*about, estimate.value, estimate))
    return found, seconds / run["cpu"]


def worth(said: list[Said]) -> float:
    """Return W; at most 1000, where the noise of the truth is all there is."""
    spread = sum(s.truth.var(ddof=1) for s in said)
    square = sum(s.error**2 - s.noise for s in said)
    return float(spread / max(square, 1e-3 * spread, 1e-300))


def steepest(said: list[Said]) -> list[Said]:
    """Return the fifth where the true value changes most."""
    limit = np.quantile([s.change for s in said], 0.8)
    return [s for s in said if s.change >= limit]


def claimed(said: list[Said]) -> tuple[float, float, int]:
    """Return the share of bands that cover, claimed over measured, and values not known yet.

    A band is compared with the mean of fresh episodes, whose error counts as well.
    """
    known = [s for s in said if s.estimate is not None and not withheld(s)]
    z2, covered = [], []
    for s in known:
        assert s.estimate is not None
        low, high = s.estimate.low - 1.96 * s.noise**0.5, s.estimate.high + 1.96 * s.noise**0.5
        covered.append(low <= s.truth.mean() <= high)
        z2.append(s.error**2 / (s.estimate.standard_error**2 + s.noise))
    return float(np.mean(covered)), float(np.median(z2)) / 0.455, len(said) - len(known)


def withheld(said: Said) -> bool:
    """Return whether the estimate says that the value is not known yet."""
    return said.estimate is not None and not said.estimate.known


def _count(episodes: float) -> str:
    """Return a number of fresh episodes as the tables show it."""
    return f"{episodes:.0f}" if episodes >= 10 else f"{episodes:.2g}"


def rows(runs: dict[str, list[Path]]) -> Iterator[str]:
    """Yield the lines of the table."""
    bands = "at once | covers | claims | settled | covers | claims"
    yield f"| loop, runs / evaluations | policy | `ep_rew_mean` | last 5 | {bands} |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, paths in runs.items():
        found: dict[tuple[str, str], list[Said]] = {}
        shares = []
        for path in tqdm(paths, desc=name):
            some, share = replay(path)
            shares.append(share)
            for key, said in some.items():
                found.setdefault(key, []).extend(said)
        for who in WHO:
            count = len(found["rew", who])
            cells = [f"{name}, {len(paths)} / {count}", who]
            for rule in ("rew", "last", "at once", "settled"):
                said = [s for s in found.get((rule, who), []) if np.isfinite(s.value)]
                known = [s for s in said if not withheld(s)]
                if len(known) < 3:
                    cells += [""] if rule in ("rew", "last") else [""] * 3
                    continue
                cells.append(f"{_count(worth(known))} / {_count(worth(steepest(known)))}")
                if rule in ("at once", "settled"):
                    covers, claims, missing = claimed(said)
                    left = f", {missing} not known" if missing else ""
                    cells += [
                        f"{100 * covers:.0f} %{left}",
                        f"{claims:.2g}" if claims >= 0.01 else "< 0.01",
                    ]
            yield f"| {' | '.join(cells)} |"


def write(path: Path, lines: list[str]) -> None:
    """Replace what stands between the two marks of a page."""
    text = path.read_text(encoding="utf-8")
    marks = "<!-- free_evaluation: begin -->", "<!-- free_evaluation: end -->"
    body = "\n".join([marks[0], "", *lines, "", marks[1]])
    text, count = re.subn(rf"{marks[0]}.*?{marks[1]}", lambda _: body, text, flags=re.DOTALL)
    if not count:
        raise SystemExit(f"{path} has no marks {marks[0]} and {marks[1]}")
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("record", help="train and save runs")
    trained.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    trained.add_argument("--seeds", default="400-402", help="first and last, such as 400-402")
    trained.add_argument("--out", type=Path, default=Path("free_runs"))
    table = commands.add_parser("score", help="replay saved runs and print the table")
    table.add_argument("folder", type=Path)
    table.add_argument("--write", type=Path, help="a page with marks, to hold the table")
    args = parser.parse_args()
    if args.command == "record":
        args.out.mkdir(parents=True, exist_ok=True)
        first, last = map(int, args.seeds.split("-"))
        for seed in tqdm(range(first, last + 1), desc="seeds"):
            for name in args.case:
                record(name, seed, args.out)
        return
    runs = {name: sorted(args.folder.glob(f"{name}_*.pkl")) for name in CASES}
    runs = {name: paths for name, paths in runs.items() if paths}
    seeds = [f"{name} {', '.join(p.stem.rsplit('_', 1)[1] for p in runs[name])}" for name in runs]
    versions = (
        f"ope_gym {ope_gym.__version__}, Stable-Baselines3 {stable_baselines3.__version__}, "
        f"Gymnasium {gym.__version__}"
    )
    lines = [*rows(runs), "", f"Seeds: {'; '.join(seeds)}. {versions}, {TRUTH} fresh episodes."]
    print("\n".join(lines))
    if args.write:
        write(args.write, lines)


if __name__ == "__main__":
    main()
