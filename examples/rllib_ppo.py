"""Value the policy of RLlib's PPO while it trains; the added lines are marked.

pip install -e ".[ray,tables]" dm-tree lz4 ormsgpack
python examples/rllib_ppo.py
"""

import argparse

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from wrappers.loops.rllib import SampleHook  # added

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--iterations", type=int, default=25)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps")
args = parser.parse_args()

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=args.num_envs)
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
    .training(train_batch_size=args.batch, num_epochs=6, minibatch_size=128, lr=3e-4, gamma=0.99)
    .callbacks(on_sample_end=SampleHook(eval_freq=args.eval_freq))  # added: prints a line a value
    .debugging(seed=1)
)
algorithm = config.build_algo()
for _ in range(args.iterations):
    result = algorithm.train()
print("ope:", {k: round(float(v), 1) for k, v in result["env_runners"]["ope"].items()})  # added
algorithm.stop()
ray.shutdown()
