"""Measure what free evaluation is worth in real training runs of Stable-Baselines3.

`run` trains, keeps every step and the truth: at each evaluation point the policy plays 200 fresh
episodes elsewhere. `table` replays the runs through `ope_gym.FreeEvaluation` and prints

    W = (sd of a return / RMSE)^2, the number of fresh episodes that would be as accurate,

over all evaluation points (the noise of the truth subtracted), the bias, the coverage of the 95 %
bands, and the regret of the checkpoint that each rule chooses. What it costs is measured by
callback_overhead.py.

    python benchmarks/free_evaluation.py run --case ppo-cartpole --seeds 100-103 --out free_runs
    python benchmarks/free_evaluation.py table free_runs --write docs/when_it_pays.md

Seeds below 100 were used to design the method; figures in the documents are of seeds from 100 on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from tqdm import tqdm

import ope_gym
from ope_gym.online import FreeEstimate, FreeEvaluation
from ope_gym.policies import GaussianMlp, Policy, SoftmaxMlp
from ope_gym.policies.mlp import Network
from wrappers.sb3.snapshots import snapshot

TRUTH = 200  # fresh episodes at each evaluation point
ENVS = 8


@dataclass(frozen=True)
class Case:
    """A training: algorithm, environment, timesteps, rollouts between evaluation points."""

    algorithm: Any
    env: str
    timesteps: int
    every: int
    options: dict[str, Any]


CASES = {
    "ppo-cartpole": Case(PPO, "CartPole-v1", 50_000, 2, {"n_steps": 256}),
    "ppo-acrobot": Case(PPO, "Acrobot-v1", 120_000, 5, {"n_steps": 256}),
    "ppo-lunarlander": Case(
        PPO,
        "LunarLander-v3",
        300_000,
        2,
        {"n_steps": 1024, "gamma": 0.999, "gae_lambda": 0.98, "n_epochs": 4, "ent_coef": 0.01},
    ),
    "ppo-pendulum": Case(
        PPO, "Pendulum-v1", 120_000, 6, {"n_steps": 256, "gamma": 0.9, "learning_rate": 1e-3}
    ),
    "a2c-cartpole": Case(A2C, "CartPole-v1", 80_000, 200, {"n_steps": 5}),
}


class Recorder(BaseCallback):
    """Keeps every step, the actor at evaluation points, and what it is worth there."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self.case, self.seed, self.rollout = case, seed, -1
        names = ("observations", "actions", "rewards", "terminated", "truncated", "following")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.found: dict[str, Any] = {}

    def _on_rollout_start(self) -> None:
        self.rollout += 1

    def _on_step(self) -> bool:
        local = self.locals
        done = local["dones"]
        cut = np.array([i.get("TimeLimit.truncated", False) for i in local["infos"]]) & done
        following = np.array(local["new_obs"])
        for i in np.flatnonzero(done):
            following[i] = local["infos"][i]["terminal_observation"]
        row = (
            self.model._last_obs,
            local["actions"],
            local["rewards"],
            done & ~cut,
            cut,
            following,
        )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(np.array(value))
        return True

    def _on_rollout_end(self) -> None:
        k = self.rollout
        if not k or k % self.case.every:
            return
        policy: Any = snapshot(self.model)
        seed = 10**6 * (self.seed + 1) + k
        self.found[f"truth/{k}"] = play(self.case.env, policy, TRUTH, seed)
        for i, (weights, bias) in enumerate(policy.network.layers):
            self.found[f"actor/{k}/{i}/weights"] = weights
            self.found[f"actor/{k}/{i}/bias"] = bias
        if isinstance(policy, GaussianMlp):
            self.found[f"actor/{k}/log_std"] = policy.log_std
        recent = [episode["r"] for episode in self.model.ep_info_buffer or []]
        self.found[f"sb3/{k}"] = np.mean(recent) if recent else np.nan


def play(env_id: str, policy: Policy, episodes: int, seed: int) -> np.ndarray:
    """Return the returns of fresh episodes, one in each environment."""
    mode = "vector_entry_point" if env_id.startswith("CartPole") else "sync"
    envs = gym.make_vec(env_id, episodes, vectorization_mode=mode)
    rng = np.random.default_rng(seed)
    observations, _ = envs.reset(seed=seed)
    paid, alive = np.zeros(episodes), np.ones(episodes, dtype=bool)
    space = envs.single_action_space
    while alive.any():
        actions: Any = policy.sample(observations, rng)
        if isinstance(space, gym.spaces.Box):
            actions = np.clip(actions.reshape(episodes, -1), space.low, space.high)
            actions = actions.astype(np.float32)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        paid += np.where(alive, rewards, 0.0)
        alive &= ~(terminated | truncated)
    envs.close()
    return paid


def run(name: str, seed: int, out: Path) -> None:
    """Train once and save what happened."""
    case = CASES[name]
    path = out / f"{name}_{seed}.npz"
    if path.exists():
        return
    torch.set_num_threads(1)
    envs = make_vec_env(case.env, ENVS, seed=seed)
    model = case.algorithm("MlpPolicy", envs, seed=seed, device="cpu", **case.options)
    recorder = Recorder(case, seed)
    model.learn(case.timesteps, callback=recorder)
    columns = {name: np.array(column) for name, column in recorder.columns.items()}
    np.savez_compressed(path, **columns, **recorder.found)


# The replay -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """An evaluation point: what was said, and what is true."""

    run: str
    returns: np.ndarray
    sb3: float
    provisional: FreeEstimate
    settled: FreeEstimate | None


def actor(run: Any, k: int) -> Policy:
    """Return the policy of rollout k."""
    layers, i = [], 0
    while f"actor/{k}/{i}/weights" in run:
        layers.append((run[f"actor/{k}/{i}/weights"], run[f"actor/{k}/{i}/bias"]))
        i += 1
    network = Network(tuple(layers), "Tanh")
    if f"actor/{k}/log_std" in run:
        return GaussianMlp(network, run[f"actor/{k}/log_std"])
    return SoftmaxMlp(network)


def replay(path: Path) -> list[Point]:
    """Feed a run to a free evaluation; return its points."""
    name = path.stem.rsplit("_", 1)[0]
    case, saved = CASES[name], np.load(path)
    run = {key: saved[key] for key in saved.files}
    space, horizon = gym.spec(case.env).make().action_space, gym.spec(case.env).max_episode_steps
    bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None
    free = FreeEvaluation(ENVS, horizon=horizon, action_bounds=bounds)
    early: dict[int, FreeEstimate] = {}
    late: dict[int, FreeEstimate] = {}
    names = ("observations", "actions", "rewards", "terminated", "truncated", "following")
    n = case.options["n_steps"]
    for k in range(len(run["rewards"]) // n):
        if f"truth/{k}" in run:
            free.follow(actor(run, k))
        free.add(*(run[column][k * n : (k + 1) * n] for column in names))
        late.update((estimate.timesteps, estimate) for estimate in free.settle())
        if f"truth/{k}" in run:
            estimate = free.evaluate(k)
            if estimate is not None:
                early[k] = estimate
    return [
        Point(path.stem, run[f"truth/{k}"], float(run[f"sb3/{k}"]), early[k], late.get(k))
        for k in early
    ]


def equivalent(errors: np.ndarray, points: list[Point]) -> tuple[float, float]:
    """Return W and the standard error of its log, by leaving out runs, or tenths of few runs."""
    noise = np.array([p.returns.var(ddof=1) / p.returns.size for p in points])
    spread = np.array([p.returns.var(ddof=1) for p in points])
    square = errors**2 - noise

    def ratio(keep: np.ndarray) -> float:
        return float(np.log(spread[keep].sum() / max(square[keep].sum(), 1e-9 * spread.sum())))

    parts = np.unique([p.run for p in points], return_inverse=True)[1]
    if parts.max() < 3:
        parts = np.arange(len(points)) % min(10, len(points))
    left = np.array([ratio(parts != i) for i in range(parts.max() + 1)])
    g = left.size
    error = np.sqrt((g - 1) / g * np.sum((left - left.mean()) ** 2))
    return float(np.exp(ratio(np.ones(len(points), dtype=bool)))), float(error)


def regret(points: list[Point], score: Callable[[Point], float]) -> float:
    """Return how much worse than the best the chosen checkpoint is, in true value."""
    true = np.array([p.returns.mean() for p in points])
    return float(true.max() - true[int(np.argmax([score(p) for p in points]))])


def _count(episodes: float) -> str:
    """Return a number of fresh episodes as the tables show it."""
    return f"{episodes:.0f}" if episodes >= 10 else f"{episodes:.1f}"


def rows(runs: dict[str, list[Path]]) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield "| runs | what is free | fresh episodes | bias | covers |"
    yield "|---|---|--:|--:|--:|"
    regrets = {}
    rng = np.random.default_rng(0)
    for name, paths in runs.items():
        replayed = [replay(path) for path in tqdm(paths, desc=name)]
        points = [p for some in replayed for p in some]
        later = [p for p in points if p.settled is not None]
        true = {id(p): p.returns.mean() for p in points}
        ways: list[tuple[str, list[Point], Callable[[Point], float], Any]] = [
            ("SB3's ep_rew_mean", points, lambda p: p.sb3, None),
            ("ope_gym, at once", points, lambda p: p.provisional.value, lambda p: p.provisional),
            ("ope_gym, settled", later, lambda p: p.settled.value, lambda p: p.settled),  # type: ignore[union-attr]
        ]
        for way, some, value, band in ways:
            some = [p for p in some if np.isfinite(value(p))]
            errors = np.array([value(p) - true[id(p)] for p in some])
            w, error = equivalent(errors, some)
            held = [] if band is None else [_holds(band(p), p) for p in some]
            covers = f"{100 * np.mean(held):.0f} %" if held else ""
            case = f"{name}, {len(paths)} runs, {len(some)} points"
            low, high = w / np.exp(error), w * np.exp(error)
            found = f"{_count(w)} ({_count(low)} to {_count(high)}) | {errors.mean():+.1f}"
            yield f"| {case} | {way} | {found} | {covers} |"
        best = {
            "ope_gym, lower end": [
                regret(p, lambda x: (x.settled or x.provisional).low) for p in replayed
            ],
            "SB3's ep_rew_mean": [
                regret(p, lambda x: np.nan_to_num(x.sb3, nan=-1e9)) for p in replayed
            ],
        }
        for m in (5, 20):
            best[f"EvalCallback, {m} episodes"] = [
                float(
                    np.mean(
                        [
                            regret(p, lambda x, m=m: rng.choice(x.returns, m).mean())
                            for _ in range(50)
                        ]
                    )
                )
                for p in replayed
            ]
        regrets[name] = best
    yield ""
    yield "| regret of the chosen checkpoint | " + " | ".join(regrets) + " |"
    yield "|---|" + "--:|" * len(regrets)
    for way in next(iter(regrets.values())):
        cells = [
            f"{np.mean(best[way]):.1f} ± {np.std(best[way]) / np.sqrt(len(best[way])):.1f}"
            for best in regrets.values()
        ]
        yield f"| {way} | " + " | ".join(cells) + " |"


def _holds(estimate: FreeEstimate, point: Point) -> bool:
    return estimate.low <= point.returns.mean() <= estimate.high


def write(path: Path, lines: list[str]) -> None:
    """Replace what stands between the two marks of a page."""
    text = path.read_text(encoding="utf-8")
    marks = "<!-- free_evaluation: begin -->", "<!-- free_evaluation: end -->"
    body = "\n".join([marks[0], "", *lines, "", marks[1]])
    found = re.subn(rf"{marks[0]}.*?{marks[1]}", lambda _: body, text, flags=re.DOTALL)
    if not found[1]:
        raise SystemExit(f"{path} has no marks {marks[0]} and {marks[1]}")
    path.write_text(found[0], encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("run", help="train and save runs")
    trained.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    trained.add_argument("--seeds", default="100-102", help="first and last, such as 100-102")
    trained.add_argument("--out", type=Path, default=Path("free_runs"))
    table = commands.add_parser("table", help="replay saved runs and print the tables")
    table.add_argument("folder", type=Path)
    table.add_argument("--write", type=Path, help="a page with marks, to hold the tables")
    args = parser.parse_args()
    if args.command == "run":
        args.out.mkdir(parents=True, exist_ok=True)
        first, last = map(int, args.seeds.split("-"))
        for seed in tqdm(range(first, last + 1), desc="seeds"):
            for name in args.case:
                run(name, seed, args.out)
        return
    runs = {name: sorted(args.folder.glob(f"{name}_*.npz")) for name in CASES}
    lines = list(rows({name: paths for name, paths in runs.items() if paths}))
    seeds = [
        f"{name} {', '.join(path.stem.rsplit('_', 1)[1] for path in paths)}"
        for name, paths in runs.items()
        if paths
    ]
    version = f"ope_gym {ope_gym.__version__}"
    lines += ["", f"Seeds: {'; '.join(seeds)}. {version}, {TRUTH} fresh episodes a point."]
    print("\n".join(lines))
    if args.write:
        write(args.write, lines)


if __name__ == "__main__":
    main()
