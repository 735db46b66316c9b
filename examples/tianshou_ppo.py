"""Value the policy of Tianshou's PPO while it trains; the added lines are marked.

pip install tianshou
python examples/tianshou_ppo.py --logdir runs
"""

import argparse

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

from ope_gym.policies.torch import TorchPolicy  # added, with the next two
from wrappers.loops import FreeValues
from wrappers.loops.tianshou import StepHook

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--env-id", default="CartPole-v1")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=10_240, help="of an epoch")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--logdir", default=None, help="for TensorBoard")
args = parser.parse_args()

np.random.seed(args.seed)  # noqa: NPY002  # Tianshou draws from it
torch.manual_seed(args.seed)
torch.set_num_threads(1)
env = gym.make(args.env_id)
shape, choices = env.observation_space.shape, int(env.action_space.n)
net, critic_net = (Net(state_shape=shape, hidden_sizes=[64, 64]) for _ in range(2))
actor = DiscreteActor(preprocess_net=net, action_shape=choices, softmax_output=False)
policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space)
critic = DiscreteCritic(preprocess_net=critic_net)
algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-4))
envs = DummyVectorEnv([lambda: gym.make(args.env_id)] * args.num_envs)
envs.seed(args.seed)

values = FreeValues(  # added: no environment, no extra step; prints a line for each value
    lambda: TorchPolicy(actor, forward=lambda module, obs: module(obs)[0]),
    args.num_envs,
    horizon=env.spec.max_episode_steps,
    eval_freq=args.eval_freq,
    log=args.logdir,
)
buffer = VectorReplayBuffer(20_000, args.num_envs)
algorithm.run_training(
    OnPolicyTrainerParams(
        training_collector=Collector(policy, envs, buffer, on_step_hook=StepHook(values)),  # added
        max_epochs=args.epochs,
        epoch_num_steps=args.steps,
        collection_step_num_env_steps=1024,
        update_step_num_repetitions=4,
        batch_size=256,
        show_progress=False,
        verbose=False,
    )
)
