"""Compare the compiled simulations of two studies with loops over Gymnasium environments.

    python benchmarks/study_speed.py [--runs 3] [--repetitions 3]

Both sides play and learn as much as a run of the study: PoWER's 300 rollouts and 300 fresh ones on
CartPole-v1; 5,000 episodes of Monte-Carlo control and 1,000 fresh ones on Blackjack-v1, for both
schedules. Both pass their data to `evaluate`. The loop steps one environment at a time and keeps
its data in lists. It computes no true values; the last line of each study is the whole study with
true values, scaled from a few runs to all of them.

Times are processor times, medians over repetitions that alternate between the two.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium as gym
import numpy as np

from agents import Power
from agents.blackjack import SHAPE
from ope_gym import Trajectories, evaluate
from ope_gym.policies import EpsilonGreedyTable, LinearSigmoid
from studies.blackjack import simulation as blackjack_simulation
from studies.blackjack import study as blackjack
from studies.cartpole import simulation as cartpole_simulation
from studies.cartpole import study as cartpole
from studies.harness.registry import load_study
from studies.harness.seeds import seeds_of
from studies.harness.study import Study

Run = Callable[[int], object]  # takes a seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs in the slice")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    for name, naive, ours in (
        ("cartpole", naive_cartpole, compiled_cartpole),
        ("blackjack", naive_blackjack, compiled_blackjack),
    ):
        compare(load_study(name), naive, ours, args.runs, args.repetitions)


def compare(study: Study, naive: Run, ours: Run, runs: int, repetitions: int) -> None:
    slow, fast, whole = [], [], []
    seeds = seeds_of(0, (0, runs))
    study.run(seeds[:1])  # compiles
    ours(0)
    for _ in range(repetitions):
        slow.append(seconds(lambda: [naive(seed) for seed in range(runs)]))
        fast.append(seconds(lambda: [ours(seed) for seed in range(runs)]))
        whole.append(seconds(lambda: study.run(seeds)))
    ratio = float(np.median(np.array(slow) / np.array(fast)))
    naive_run, our_run, full = (float(np.median(times)) / runs for times in (slow, fast, whole))
    total = study.plan.runs
    print(f"{study.name}: processor seconds a run, slices of {runs} runs, {repetitions} times")
    print(f"  Gymnasium loop       {naive_run:8.3f}")
    print(f"  compiled             {our_run:8.3f}    {ratio:.0f} times as fast")
    print(
        f"  whole study          {full:8.3f}    {total:,} runs: {full * total:.0f} s on "
        f"one core; the loop {naive_run * total / 60:.0f} minutes, without a truth"
    )


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# --- CartPole ---------------------------------------------------------------------------------


def cartpole_run(play: Callable[[LinearSigmoid], Trajectories]) -> None:
    agent = Power(4)
    policies, trained = [], []
    for _ in range(10):
        policies.append(agent.policy)
        trained.append(play(agent.policy))
        agent.learn(trained[-1])
    fresh = [play(policy) for policy in policies]
    for batches in (trained, fresh):
        evaluate(batches[0].merge(*batches[1:]), agent.policy, estimators=cartpole.NAMES)


def compiled_cartpole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cartpole_run(lambda policy: cartpole_simulation.rollouts(policy, 30, 500, rng))


def naive_cartpole(seed: int) -> None:
    env, rng = gym.make("CartPole-v1"), np.random.default_rng(seed)
    env.reset(seed=seed)

    def play(policy: LinearSigmoid) -> Trajectories:
        seen: list[Any] = []
        actions: list[int] = []
        offsets, terminated, truncated = [0], [], []
        for _ in range(30):
            observation, _ = env.reset()
            over = False
            while not over:
                p = 1.0 / (1.0 + math.exp(-float(observation @ policy.theta)))
                action = int(rng.random() < p)
                seen.append(observation)
                actions.append(action)
                observation, _, fallen, late, _ = env.step(action)
                over = fallen or late
            offsets.append(len(actions))
            terminated.append(fallen)
            truncated.append(late)
        x, chosen = np.array(seen), np.array(actions)
        return Trajectories.from_arrays(
            x,
            chosen,
            np.ones(len(x)),
            policy.log_prob(x, chosen),
            offsets=offsets,
            policies=[policy],
            terminated=terminated,
            truncated=truncated,
            horizon=500,
        )

    cartpole_run(play)


# --- Blackjack --------------------------------------------------------------------------------


def compiled_blackjack(seed: int) -> None:
    rng, study = np.random.default_rng(seed), blackjack.Blackjack()
    for schedule in range(2):
        policies = study.train(schedule, rng)
        data = blackjack_simulation.rollouts(policies, study.rollouts, rng)
        evaluate(data, policies[-1], estimators=blackjack.NAMES)


def naive_blackjack(seed: int) -> None:
    env, rng, study = gym.make("Blackjack-v1"), np.random.default_rng(seed), blackjack.Blackjack()
    env.reset(seed=seed)
    for schedule in range(2):
        epsilon = blackjack.schedule_of(schedule, study.episodes)
        totals, visits = np.zeros((*SHAPE, 2)), np.zeros((*SHAPE, 2))
        policies = []
        for t in range(1, study.episodes + 1):
            steps, reward = blackjack_episode(env, totals, visits, epsilon(t), rng)
            for cell in steps:
                totals[cell] += reward
                visits[cell] += 1
            if t % study.every == 0:
                q = totals / np.maximum(visits, 1)
                policies.append(EpsilonGreedyTable.from_q(q, epsilon(t + 1)))
        cells, rewards, offsets, ids = [], [], [0], []
        for k, policy in enumerate(policies):
            greedy = np.stack([policy.greedy == 0, policy.greedy == 1], axis=-1).astype(np.float64)
            ones = np.ones_like(greedy)
            for _ in range(study.rollouts):
                steps, reward = blackjack_episode(env, greedy, ones, policy.epsilon, rng)
                cells += steps
                rewards += [0.0] * (len(steps) - 1) + [reward]
                ids += [k] * len(steps)
                offsets.append(len(cells))
        *seen, actions = np.array(cells).T
        observations, step_ids = tuple(seen), np.array(ids)
        stack = EpsilonGreedyTable.log_prob_stack(policies, observations, actions)
        data = Trajectories.from_arrays(
            observations,
            actions,
            rewards,
            stack[step_ids, np.arange(len(step_ids))],
            offsets=offsets,
            policies=policies,
            policy_ids=step_ids,
            terminated=True,
        )
        evaluate(data, policies[-1], estimators=blackjack.NAMES)


def blackjack_episode(
    env: gym.Env[Any, Any], totals: Any, visits: Any, epsilon: float, rng: np.random.Generator
) -> tuple[list[tuple[int, ...]], float]:
    """Return the visited (sum, card, ace, action) and the last reward."""
    steps: list[tuple[int, ...]] = []
    observation, _ = env.reset()
    while True:
        if rng.random() < epsilon:
            action = int(rng.integers(2))
        else:
            total, count = totals[observation], visits[observation]
            action = int(total[1] / max(count[1], 1) > total[0] / max(count[0], 1))
        steps.append((*observation, action))
        observation, reward, over, _, _ = env.step(action)
        if over:
            return steps, float(reward)


if __name__ == "__main__":
    main()
