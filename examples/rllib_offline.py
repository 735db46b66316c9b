"""Evaluate an RLlib policy from the episodes that its offline writer left; see docs/loops.md.

RLlib writes an episode a row by default, packed by msgpack, and with `output_write_episodes=False`
a step a row. Both are read here. The policies that acted are not in these files, but the
log-probabilities of their actions are, and the number of the weights: that is enough for the
estimators with basic weights.

    pip install "ray[rllib]" pyarrow
    python examples/rllib_offline.py
"""

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from ope_gym import Trajectories, TrajectoryBuffer, evaluate
from ope_gym.policies import UnknownPolicy
from ope_gym.policies.torch import TorchPolicy

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--write", choices=("episodes", "steps"), default="episodes")
parser.add_argument("--iterations", type=int, default=4)
parser.add_argument("--batch", type=int, default=1000, help="steps of an iteration")
parser.add_argument("--output", type=Path, default=Path("rllib_episodes"))
args = parser.parse_args()
env = gym.make("CartPole-v1")


def train() -> Any:
    """Train PPO, and let RLlib write what it plays; return the trained module."""
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, batch_mode="complete_episodes")
        .training(train_batch_size=args.batch, num_epochs=2, minibatch_size=128)
        .offline_data(
            output=str(args.output.resolve()),
            output_write_episodes=args.write == "episodes",
            output_compress_columns=[],  # plain numbers
            output_max_rows_per_file=10 if args.write == "episodes" else 100,  # or rows repeat
            output_write_remaining_data=True,
        )
    )
    algorithm = config.build_algo()
    for _ in range(args.iterations):
        algorithm.train()
    module = algorithm.get_module()
    algorithm.stop()
    return module


def read_steps(folder: Path) -> Trajectories:
    """Read a table with a step a row."""
    return Trajectories.from_frame(
        folder,
        episode="eps_id",
        step=None,  # RLlib does not count them; its files are in order
        observation="obs",
        action="actions",
        reward="rewards",
        log_prob="action_logp",
        policy="weights_seq_no",
        terminated="terminateds",
        truncated="truncateds",
        observation_space=env.observation_space,
        action_space=env.action_space,
        horizon=500,
    )


def read_episodes(folder: Path) -> Trajectories:
    """Read packed episodes."""
    import msgpack
    import msgpack_numpy
    import pyarrow.parquet as pq
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    buffer = TrajectoryBuffer(env.observation_space, env.action_space, horizon=500)
    numbers: dict[int, int] = {}
    for file in sorted(folder.rglob("*.parquet")):
        for packed in pq.read_table(file)["item"].to_pylist():
            state = msgpack.unpackb(packed, object_hook=msgpack_numpy.decode, strict_map_key=False)
            episode = SingleAgentEpisode.from_state(state)
            weights = int(episode.get_extra_model_outputs("weights_seq_no")[0])
            if weights not in numbers:
                numbers[weights] = buffer.add_policy(UnknownPolicy())
            buffer.append(
                np.array(episode.get_observations(slice(0, len(episode)))),
                np.array(episode.get_actions()),
                np.array(episode.get_rewards()),
                np.array(episode.get_extra_model_outputs("action_logp")),
                numbers[weights],
                terminated=episode.is_terminated,
                truncated=episode.is_truncated,
            )
    return buffer.view()


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
module = train()
ray.shutdown()
data = (read_episodes if args.write == "episodes" else read_steps)(args.output)
print(data)
target = TorchPolicy(
    module, forward=lambda net, obs: net.forward_inference({"obs": obs})["action_dist_inputs"]
)
print(evaluate(data, target))
