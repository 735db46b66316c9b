"""Measure what partial mixtures cost and lose where every episode has a policy of its own.

    python -m benchmarks.many_policies             cost, then loss, as Markdown tables
    python -m benchmarks.many_policies cost --largest 3000
    python -m benchmarks.many_policies loss --policies 2000 --seed 1

Cost: K policies drift, each records one episode of 100 steps; time and memory of one evaluation, in
a process of its own, compiled before the clock starts. Loss: effective sample sizes against those
of the mixture of all policies, of interleaved groups (the library) and of contiguous blocks of
training history (not in the library), on drifting policies and on CartPole (200 steps) with
learners that update after every episode.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agents.power import Power
from agents.softmax_linear import SoftmaxLinearAgent
from ope_gym import Trajectories, Weighting, evaluate, kernels
from ope_gym.arrays import FloatArray, IntArray, offsets_of
from ope_gym.estimators.run import sum_arrays
from ope_gym.policies import LinearSigmoid, SoftmaxLinear
from ope_gym.report import text
from ope_gym.weights.behaviours import (
    SIZE,
    behaviours_of,
    interleaved,
    partial_log_weights,
    policy_log_probs,
)
from studies.cartpole.simulation import rollouts

ESTIMATORS = ("BIS", "NBIS", "FIS", "NFIS")
SIZES = (8, 16, 32, 64, 128)
HORIZON = 200  # of CartPole
Made = tuple[Trajectories, LinearSigmoid]


def drifting(policies: int, seed: int, drift: float = 1.0, length: int = 100) -> Made:
    """Return episodes of linear policies that drift as in a training loop, and the target."""
    rng = np.random.default_rng(seed)
    direction = np.array([1.0, -0.5, 0.25, 1.0])
    known = [LinearSigmoid(direction * x) for x in np.linspace(0.0, drift, policies + 1)]
    theta = np.stack([policy.theta for policy in known[:-1]])
    steps = policies * length
    x = rng.standard_normal((policies, length, 4), dtype=np.float32)
    score = (x @ theta[:, :, None]).reshape(steps)
    sign = np.where(rng.random(steps) < 1 / (1 + np.exp(-score)), 1.0, -1.0)
    data = Trajectories.from_arrays(
        x.reshape(steps, 4),
        (sign > 0).astype(np.int64),
        rng.random(steps),
        -np.log1p(np.exp(-sign * score)),
        offsets=np.arange(policies + 1) * length,
        policies=known[:-1],
        terminated=True,
        policy_ids=np.repeat(np.arange(policies), length),
        held_out=True,
    )
    return data, known[-1]


def gradient(policies: int, seed: int, kl: float) -> Made:
    """Train on CartPole by a natural gradient step after every episode, from the last four."""
    agent, batch = SoftmaxLinearAgent(4, 2, kl=kl), list[Trajectories]()

    def learn(episode: Trajectories) -> LinearSigmoid:
        batch.append(episode)
        if len(batch) > 3:
            agent.learn(batch[0].merge(*batch[1:]))
            del batch[0]
        return _as_sigmoid(agent.policy)

    return _trained(policies, seed, _as_sigmoid(agent.policy), learn)


def perturbed(policies: int, seed: int, noise: float) -> Made:
    """Train on CartPole by PoWER with parameter noise anew in every episode; target without."""
    agent = Power(4, exploration="parameters", noise=noise, seed=seed)

    def learn(episode: Trajectories) -> LinearSigmoid:
        agent.learn(episode)
        return agent.policy

    data, _ = _trained(policies, seed, agent.policy, learn)
    return data, LinearSigmoid(agent.theta)


def _trained(
    policies: int, seed: int, first: LinearSigmoid, learn: Callable[[Trajectories], LinearSigmoid]
) -> Made:
    """Return held-out episodes, one of each policy, and the policy learned from other episodes."""
    rng, policy = np.random.default_rng(seed), first
    known, parts = [], []
    for _ in range(policies):
        known.append(policy)
        parts.append(rollouts(policy, 1, HORIZON, rng, held_out=True))
        policy = learn(rollouts(policy, 1, HORIZON, rng))
    lengths = [part.n_steps for part in parts]
    data = Trajectories.from_arrays(
        np.concatenate([part.observations for part in parts]),
        np.concatenate([part.actions for part in parts]),
        np.ones(sum(lengths)),
        np.concatenate([part.log_probs for part in parts]),
        offsets=offsets_of(lengths),
        policies=known,
        terminated=True,
        policy_ids=np.repeat(np.arange(policies), lengths),
        held_out=True,
        horizon=HORIZON,
    )
    return data, policy


def _as_sigmoid(policy: SoftmaxLinear) -> LinearSigmoid:
    bias = np.broadcast_to(np.asarray(policy.bias), 2)
    return LinearSigmoid(policy.weights[1] - policy.weights[0], float(bias[1] - bias[0]))


def run(policies: int, mixture: str | int, seed: int) -> dict[str, Any]:
    """Evaluate once in this process; return seconds, memory and the value."""
    small, target = drifting(300, seed)
    evaluate(small, target, estimators=ESTIMATORS, weighting=Weighting(mixture=mixture))  # compiles
    data, target = drifting(policies, seed)
    before, start = _resident(), time.perf_counter()
    found = evaluate(data, target, estimators=ESTIMATORS, weighting=Weighting(mixture=mixture))
    seconds = time.perf_counter() - start
    nfis = found["NFIS"]
    return {
        "seconds": seconds,
        "extra": _resident() - before,
        "data": before,
        "value": f"{nfis.value:.3f} ± {nfis.standard_error:.3f}",
    }


def _resident() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if sys.platform == "darwin" else 2**10)


def cost(seed: int, largest: int) -> None:
    """Print time and memory by K, with the mixture of all policies and with groups."""
    rows = [["policies", "steps", "mixture", "seconds", "µs a step", "MiB extra", "NFIS"]]
    for mixture in ("all", SIZE):
        for policies in (100, 300, 1000, 3000, 10_000):
            if mixture == "all" and policies > largest:
                continue
            case = ["--case", json.dumps([policies, mixture, seed])]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.many_policies", *case],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{policies} policies, mixture {mixture}:\n{done.stderr}")
            found = json.loads(done.stdout)
            rows.append(
                [
                    f"{policies:,}",
                    f"{100 * policies:,}",
                    str(mixture),
                    f"{found['seconds']:.2f}",
                    f"{1e4 * found['seconds'] / policies:.1f}",
                    f"{found['extra']:.0f}",
                    found["value"],
                ]
            )
    print("\n".join(text.markdown(rows, ())))


def effective(data: Trajectories, target: LinearSigmoid, groups: IntArray) -> FloatArray:
    """Return (T,) the effective sample size of fused weights against groups of the policies."""
    prefix = kernels.prefix_sums(policy_log_probs(target, "target", data), data.offsets)
    found = partial_log_weights(data, behaviours_of(data), groups, ["fused"])[0]["fused"]
    total, square, _ = sum_arrays(found + prefix, data.rewards, data.offsets, 1.0).columns.sums
    return np.asarray(total**2 / square)


def loss(policies: int, seed: int) -> None:
    """Print effective sample sizes as shares of that of the mixture of all."""
    cases: dict[str, Callable[[], Made]] = {
        "drift 0.3": lambda: drifting(policies, seed, 0.3),
        "drift 2": lambda: drifting(policies, seed, 2.0),
        "CartPole, gradient, kl 0.0002": lambda: gradient(policies, seed, 0.0002),
        "CartPole, gradient, kl 0.001": lambda: gradient(policies, seed, 0.001),
        "CartPole, PoWER, noise 0.3": lambda: perturbed(policies, seed, 0.3),
        "CartPole, PoWER, noise 1": lambda: perturbed(policies, seed, 1.0),
        "CartPole, PoWER, noise 3": lambda: perturbed(policies, seed, 3.0),
    }
    parted = [f"{size}" for size in SIZES]
    rows = [["data", "ESS of all", *parted, f"blocks of {SIZE}"]]
    for name, make in cases.items():
        data, target = make()
        counts = behaviours_of(data).counts
        whole = effective(data, target, np.zeros(counts.size, dtype=np.int64))
        shares = [
            effective(data, target, interleaved(counts, size)).min() / whole.min() for size in SIZES
        ]
        blocks = effective(data, target, np.arange(counts.size) // SIZE).min() / whole.min()
        rows.append(
            [
                name,
                f"{whole.min():.0f}",
                *(f"{share:.2f}" for share in shares),
                f"{blocks:.2f}",
            ]
        )
    print("\n".join(text.markdown(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("cost", "loss", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", type=int, default=1000, help="of the loss (default 1000)")
    parser.add_argument(
        "--largest", type=int, default=10_000, help="policies of one mixture of all, in the cost"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run(*json.loads(args.case))))
        return
    if args.what != "loss":
        cost(args.seed, args.largest)
    if args.what == "both":
        print()
    if args.what != "cost":
        loss(args.policies, args.seed)


if __name__ == "__main__":
    main()
