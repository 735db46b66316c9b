"""Value the policy of a Stable-Baselines3 model while it trains; the added lines are marked.

python examples/sb3_ppo.py --logdir runs
tensorboard --logdir runs
"""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from wrappers.sb3 import OPECallback  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("--timesteps", type=int, default=60_000)
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--n-steps", type=int, default=256, help="of a rollout, in each env")
parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps")
parser.add_argument("--logdir", default=None, help="for TensorBoard")
args = parser.parse_args()

torch.set_num_threads(1)  # networks this small gain nothing from more, and lose much
model = PPO(
    "MlpPolicy",
    make_vec_env(args.env, args.num_envs, seed=0),
    n_steps=args.n_steps,
    batch_size=min(256, args.n_steps * args.num_envs),
    tensorboard_log=args.logdir,
    seed=0,
    device="cpu",
)
ope = OPECallback(eval_freq=args.eval_freq)  # added: no environment, no extra step
model.learn(args.timesteps, callback=ope)  # added: callback; prints a line for each evaluation

for estimate in ope.settled:  # added: what is known of earlier policies by now
    print(f"settled {estimate.timesteps:7,}: {estimate.value:7.1f}")
