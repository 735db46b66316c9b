"""Train PPO on CartPole and Acrobot and keep its policies: `python -m studies.outside.train_ppo`.

Writes studies/data/ppo.npz: the weights of small networks after each update, for four trainings of
each environment, and the mean returns of the targets with their standard errors. Takes a few
minutes.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym.policies import SoftmaxMlp
from studies.outside.control import PPO_FILE, TARGETS, TRAININGS, network, play

ROLLOUTS = 20_000  # for the value of a target
WIDTH = 16  # units of each of the two hidden layers


class Training(NamedTuple):
    """Settings of PPO for one environment."""

    updates: int
    envs: int
    steps: int  # of each environment between two updates
    options: dict[str, Any]


TRAINED = {
    "CartPole-v1": Training(
        16, 8, 128, {"learning_rate": 3e-3, "n_epochs": 6, "gamma": 0.98, "gae_lambda": 0.9}
    ),
    "Acrobot-v1": Training(
        16, 16, 256, {"learning_rate": 1e-3, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94}
    ),
}


def trained_weights(env: str, seed: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Train PPO and yield the layers of its policy after each update."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    how = TRAINED[env]
    model = PPO(
        "MlpPolicy",
        make_vec_env(env, how.envs, seed=seed),
        n_steps=how.steps,
        batch_size=256,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": {"pi": [WIDTH, WIDTH], "vf": [64, 64]}},
        **how.options,
    )
    for _ in range(how.updates):
        model.learn(how.envs * how.steps, reset_num_timesteps=False)
        policy: Any = model.policy
        hidden = policy.mlp_extractor.policy_net
        layers = (hidden[0], hidden[2], policy.action_net)
        yield {
            name: part.detach().numpy().copy()
            for i, layer in enumerate(layers)
            for name, part in ((f"weights_{i}", layer.weight), (f"bias_{i}", layer.bias))
        }


def main() -> None:
    """Train everything, measure the values of the targets, and write the file."""
    kept: dict[str, Any] = {}
    for env, training in itertools.product(TRAINED, range(TRAININGS)):
        snapshots = list(trained_weights(env, training))
        for name in snapshots[0]:
            kept[f"{env}/{training}/{name}"] = np.stack([one[name] for one in snapshots])
        print(f"{env}: training {training} done", file=sys.stderr)
    rng = np.random.default_rng(0)
    for env, training in itertools.product(TRAINED, range(TRAININGS)):
        targets = [network(env, training, update, kept) for update in TARGETS[env]]
        kept[f"{env}/{training}/truth"] = np.array([mean_return(env, p, rng) for p in targets])
    PPO_FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(PPO_FILE, **kept)
    print(f"CHECKSUM = {zlib.crc32(PPO_FILE.read_bytes())} in studies/outside/control.py")


def mean_return(env: str, policy: SoftmaxMlp, rng: np.random.Generator) -> tuple[float, float]:
    """Return the mean return of a policy and its standard error."""
    part = 1000
    returns = np.concatenate(
        [
            play(env, (policy,), np.zeros(part, dtype=np.int64), rng)[2].sum(axis=1)
            for _ in range(ROLLOUTS // part)
        ]
    )
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(returns.size))


if __name__ == "__main__":
    main()
