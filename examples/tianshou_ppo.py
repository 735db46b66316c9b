"""Evaluate Tianshou's PPO from the episodes of its tests; the parts of ope_gym are marked.

Tianshou tests the policy after every epoch and never trains on these episodes, so they are held
out. Before each test the current policy is evaluated from all earlier tests, and the test then
shows whether the estimate was right.

    pip install tianshou
    python examples/tianshou_ppo.py
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch.utils.tensorboard import SummaryWriter

from ope_gym import TrajectoryBuffer, evaluate
from ope_gym.policies.torch import TorchPolicy
from ope_gym.report.tensorboard import EvaluationWriter

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--env-id", default="CartPole-v1")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--steps", type=int, default=1000, help="of an epoch")
parser.add_argument("--test-episodes", type=int, default=40, help="after each epoch")
parser.add_argument("--logdir", default="runs/tianshou")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

np.random.seed(args.seed)  # noqa: NPY002  # Tianshou draws from it
torch.manual_seed(args.seed)
torch.set_num_threads(1)
env = gym.make(args.env_id)
shape, choices = env.observation_space.shape, int(env.action_space.n)
net = Net(state_shape=shape, hidden_sizes=[64, 64])
actor = DiscreteActor(preprocess_net=net, action_shape=choices, softmax_output=False)
critic = DiscreteCritic(preprocess_net=Net(state_shape=shape, hidden_sizes=[64, 64]))
policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space)  # also samples in tests
algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-4))
train_envs, test_envs = (DummyVectorEnv([lambda: gym.make(args.env_id)] * 8) for _ in range(2))
train_envs.seed(args.seed)
test_envs.seed(args.seed + 1000)

# ope_gym: the episodes of the tests, and where evaluations are written
buffer = TrajectoryBuffer(
    env.observation_space, env.action_space, horizon=env.spec.max_episode_steps
)
writer = EvaluationWriter(SummaryWriter(args.logdir))


def before_test(epoch: int, env_step: int | None) -> None:
    """Evaluate the current policy from earlier tests (ope_gym); from now on it acts."""
    current = TorchPolicy(actor, forward=lambda module, obs: module(obs)[0])
    if len(buffer):
        evaluation = evaluate(buffer, current, estimators=["FIS", "NFIS", "NBIS"])
        writer.add_evaluation(evaluation, step=env_step or 0)
        print(evaluation)
    buffer.add_policy(current)


def after_episode(episode: Any) -> None:
    """Keep an episode of the test, with the probabilities of its actions (ope_gym)."""
    k = len(buffer.policies) - 1
    log_probs = buffer.policies[k].log_prob(episode.obs, episode.act)
    buffer.append(
        episode.obs,
        episode.act,
        episode.rew,
        log_probs,
        k,
        terminated=episode.terminated[-1],
        truncated=episode.truncated[-1],
        held_out=True,
    )


result = algorithm.run_training(
    OnPolicyTrainerParams(
        training_collector=Collector(policy, train_envs, VectorReplayBuffer(20_000, 8)),
        test_collector=Collector(policy, test_envs, on_episode_done_hook=after_episode),
        test_fn=before_test,
        max_epochs=args.epochs,
        epoch_num_steps=args.steps,
        collection_step_num_env_steps=args.steps,
        test_step_num_episodes=args.test_episodes,
        update_step_num_repetitions=4,
        show_progress=False,
        verbose=False,
    )
)
print(f"{len(buffer.policies)} policies were tested; the best returned {result.best_reward:.1f}")
for k in range(len(buffer.policies)):
    print(f"policy {k}: {buffer.select(policies=k).returns().mean():.1f}")
writer.close()
