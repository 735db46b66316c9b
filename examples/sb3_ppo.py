"""Evaluate a Stable-Baselines3 model while it trains; the added lines are marked."""

import argparse

import gymnasium as gym
import torch
from stable_baselines3 import PPO

from wrappers.sb3 import OPECallback  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("--timesteps", type=int, default=30_000)
parser.add_argument("--n-steps", type=int, default=1024, help="of a rollout")
parser.add_argument("--logdir", default=None, help="for TensorBoard")
args = parser.parse_args()

torch.set_num_threads(1)  # networks this small gain nothing from more, and lose much
model = PPO(
    "MlpPolicy",
    gym.make(args.env),
    n_steps=args.n_steps,
    tensorboard_log=args.logdir,
    seed=0,
    device="cpu",
)
ope = OPECallback(gym.make(args.env), n_eval_episodes=10, eval_every=2)  # added: held-out episodes
model.learn(args.timesteps, callback=ope)  # added: callback; prints a table at the end

for timesteps, evaluation in ope.evaluations:  # added: the value while it trained
    nfis = evaluation["NFIS"]
    print(f"{timesteps:7,}: {nfis.value:7.1f}  [{nfis.interval.low:.1f}, {nfis.interval.high:.1f}]")
