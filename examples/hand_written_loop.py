"""Record a hand-written loop and evaluate its last policy; the added lines are marked."""

import gymnasium as gym
import numpy as np

import ope_gym
from wrappers import RecordTrajectories

rng = np.random.default_rng(0)
env = RecordTrajectories(gym.make("CartPole-v1"), held_out=0.5)  # added: half is held out
theta = np.zeros(4)
for _ in range(6):
    policy = ope_gym.policies.LinearSigmoid(theta)
    env.follow(policy)  # added: this policy chooses the next actions
    best_score = 0.0
    for _ in range(60):
        observation, _ = env.reset(seed=int(rng.integers(2**31)))
        states, actions, done = [], [], False
        while not done:
            states.append(observation)
            actions.append(int(policy.sample(observation[None], rng)[0]))
            observation, _, terminated, truncated, _ = env.step(actions[-1])
            done = terminated or truncated
        if not env.held_out and len(actions) > best_score:  # added: never learn from held-out ones
            best_score, push = len(actions), np.array(states).T @ (np.array(actions) - 0.5)
    theta = theta + 2.0 * push / np.linalg.norm(push)  # learn: lean towards the best episode

target = ope_gym.policies.LinearSigmoid(theta)
print(ope_gym.evaluate(env, target))  # added: its value, from the held-out episodes
