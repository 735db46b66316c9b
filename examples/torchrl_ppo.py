"""Value the policy of TorchRL's PPO while it trains; the added lines are marked.

python examples/torchrl_ppo.py --logdir runs
tensorboard --logdir runs
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from ope_gym.policies.torch import TorchPolicy  # added, with the next two
from wrappers.loops import FreeValues
from wrappers.loops.torchrl import steps_of

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--timesteps", type=int, default=50_000)
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--num-steps", type=int, default=128, help="of a rollout, in each env")
parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--logdir", default=None, help="for TensorBoard")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # networks this small gain nothing from more
make_env = lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)  # noqa: E731
env = TransformedEnv(SerialEnv(args.num_envs, make_env), RewardSum())
env.set_seed(args.seed)
network, state_value = (
    MLP(in_features=4, out_features=n, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    for n in (2, 1)
)
actor = ProbabilisticActor(
    TensorDictModule(network, ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=Categorical,
    return_log_prob=True,
)
critic = ValueOperator(state_value, ["observation"])
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
optimizer = torch.optim.Adam(loss.parameters(), lr=2.5e-4)
batch_size = args.num_envs * args.num_steps
collector = Collector(env, actor, frames_per_batch=batch_size, total_frames=args.timesteps)

values = FreeValues(  # added: no environment, no extra step; prints a line for each value
    lambda: TorchPolicy(network),
    args.num_envs,
    horizon=500,
    eval_freq=args.eval_freq,
    log=args.logdir,
)
for batch in collector:
    values.add(**steps_of(batch))  # added, before the policy changes
    for _ in range(4):
        with torch.no_grad():
            advantage(batch)
        rows = batch.reshape(-1)
        for chosen in torch.randperm(len(rows)).split(256):
            losses = loss(rows[chosen])
            optimizer.zero_grad()
            sum(x for name, x in losses.items() if name.startswith("loss_")).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
collector.shutdown()
