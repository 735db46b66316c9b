"""Value the policy of PPO while it trains, in the style of CleanRL; our lines are marked.

The value comes from the steps that PPO takes anyway: no episode is played for it. It is provisional
at first. A few rollouts later the value of the same policy is settled, and shown at its own step.

    python examples/ppo_cartpole.py
    tensorboard --logdir runs
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from ope_gym.policies.torch import TorchPolicy  # added, with the next two
from wrappers.free import VectorSteps
from wrappers.loops import FreeValues


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logdir", default="runs")
    parser.add_argument("--total-timesteps", type=int, default=50_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128, help="of a rollout, in each env")
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--eval-freq", type=int, default=10_000, help="timesteps")  # added
    return parser.parse_args()


def layer_init(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    """Set orthogonal weights and a bias of 0."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def network(inputs: int, outputs: int, std: float) -> nn.Sequential:
    """Make a network with two hidden layers."""
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), std),
    )


args = parse_args()
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # networks this small gain nothing from more
rng = np.random.default_rng(args.seed)
writer = SummaryWriter(f"{args.logdir}/{args.env_id}__ppo__{args.seed}__{int(time.time())}")

same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
envs = gym.make_vec(args.env_id, args.num_envs, "sync", vector_kwargs=same_step)
steps = VectorSteps(envs)  # added: the steps that values rest on
size = int(np.prod(envs.single_observation_space.shape))
actor = network(size, int(envs.single_action_space.n), 0.01)  # logits
critic = network(size, 1, 1.0)
free_values = FreeValues(  # added: prints a line for each value
    lambda: TorchPolicy(actor),
    args.num_envs,
    horizon=envs.spec.max_episode_steps,
    eval_freq=args.eval_freq,
    log=writer,  # charts with bands, in the same run
)
parameters = [*actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)

shape = (args.num_steps, args.num_envs)
obs = torch.zeros((*shape, size))
actions = torch.zeros(shape, dtype=torch.long)
logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))

global_step = 0
episodic_return, finished = np.zeros(args.num_envs), []
observation, _ = envs.reset(seed=args.seed)
steps.restart(observation)  # added
next_obs = torch.as_tensor(observation)
next_done = torch.zeros(args.num_envs)
num_updates = args.total_timesteps // (args.num_steps * args.num_envs)

for update in range(num_updates):
    optimizer.param_groups[0]["lr"] = (1.0 - update / num_updates) * args.learning_rate

    for step in range(args.num_steps):
        global_step += args.num_envs
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            distribution = Categorical(logits=actor(next_obs))
            action = distribution.sample()
            values[step] = critic(next_obs).flatten()
        actions[step], logprobs[step] = action, distribution.log_prob(action)
        observation, reward, terminations, truncations, infos = envs.step(action.numpy())
        steps.step(action.numpy(), observation, reward, terminations, truncations, infos)  # added
        done = terminations | truncations
        rewards[step] = torch.as_tensor(reward)
        next_obs, next_done = torch.as_tensor(observation), torch.as_tensor(done).float()
        episodic_return += reward
        finished += episodic_return[done].tolist()
        episodic_return[done] = 0.0

    # advantages: generalised advantage estimation
    with torch.no_grad():
        next_value = critic(next_obs).flatten()
        advantages, last = torch.zeros(shape), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            final = t == args.num_steps - 1
            alive = 1.0 - (next_done if final else dones[t + 1])
            following = next_value if final else values[t + 1]
            delta = rewards[t] + args.gamma * following * alive - values[t]
            last = advantages[t] = delta + args.gamma * args.gae_lambda * alive * last
        returns = advantages + values

    free_values.add(**steps.take())  # added, before the policy changes

    b_inds = np.arange(args.num_steps * args.num_envs)
    b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
    b_advantages, b_returns = advantages.flatten(), returns.flatten()
    for _ in range(args.update_epochs):
        rng.shuffle(b_inds)
        for mb_inds in np.array_split(b_inds, args.num_minibatches):
            distribution = Categorical(logits=actor(b_obs[mb_inds]))
            ratio = (distribution.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]).exp()
            mb_advantages = b_advantages[mb_inds]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped).mean()
            v_loss = 0.5 * ((critic(b_obs[mb_inds]).flatten() - b_returns[mb_inds]) ** 2).mean()
            entropy = distribution.entropy().mean()
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()

    writer.add_scalar("losses/value", v_loss.item(), global_step)
    writer.add_scalar("losses/policy", pg_loss.item(), global_step)
    if finished:
        writer.add_scalar("rollout/return", np.mean(finished), global_step)
    finished = []

envs.close()
writer.close()
