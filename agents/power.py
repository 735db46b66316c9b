"""PoWER (Kober & Peters 2009) for two actions: θ follows the rollouts that went well.

    θ_{k+1} = argmax_θ Σ_i Σ_t W_i,t log π_θ(a_i,t | s_i,t),    π_θ(1 | x) = σ(x·θ),    θ_0 = 0

over the best rollouts of the last batch (keeping the best of all batches was not clearly
different). Rewards act as improper probabilities, so returns must not be negative.

Mean return on CartPole-v1 after 300 rollouts, over 20 seeds ± the standard deviation between seeds
(`python -m tests.test_agents`); θ_0 has 22:

    weighting="return"           198 ± 142   ten batches of 30; between 55 and 477
    weighting="reward-to-go"     392 ± 112   ten batches of 30; between 214 and 497
    exploration="parameters"     461 ± 98    300 batches of one; between 62 and 500

`noise` was chosen among eight settings on six of these seeds, so the last line is optimistic.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agents.contract import refuse_held_out, rewards_to_go
from ope_gym.arrays import FloatArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import LinearSigmoid

Weighting = Literal["return", "reward-to-go"]
Exploration = Literal["action", "parameters"]


class Power:
    """Takes reward-weighted likelihood steps of a linear-sigmoid policy without intercept.

    With exploration="action" the sigmoid explores by itself, and each batch is used once: the
    `best` of its rollouts, weighted by their return or, step by step, by the reward to go.

    With exploration="parameters" the policy that acts is θ + noise·N(0, I), drawn anew by every
    `learn`; so call it after each episode, or take `perturbed()` for each episode of a batch. Then
    θ_{k+1} = Σ_j R_j θ_j / Σ_j R_j over the `best` perturbed θ_j of all batches, R_j the mean
    return of the rollouts of θ_j. The learned policy is `LinearSigmoid(agent.theta)`.

    Args:
        n_features: d, the width of an observation.
        best: Number of best rollouts to learn from.
        weighting: W_i,t with action exploration: the "return" or the "reward-to-go".
        exploration: Whether to vary the "action" or the "parameters".
        noise: Standard deviation of the perturbation of each parameter.
        ridge: Factor of the penalty ridge·‖θ‖²/2, with W scaled to mean 1. It keeps θ finite where
            a line separates the actions without error.
        gamma: Discount of the returns.
        seed: Seed of the perturbations.
    """

    def __init__(
        self,
        n_features: int,
        *,
        best: int = 10,
        weighting: Weighting = "return",
        exploration: Exploration = "action",
        noise: float = 3.0,
        ridge: float = 1e-2,
        gamma: float = 1.0,
        seed: int = 0,
    ) -> None:
        if weighting not in ("return", "reward-to-go"):
            raise ValueError(f"weighting={weighting!r} must be 'return' or 'reward-to-go'")
        if exploration not in ("action", "parameters"):
            raise ValueError(f"exploration={exploration!r} must be 'action' or 'parameters'")
        if exploration == "parameters" and weighting != "return":
            raise ValueError(
                f"weighting={weighting!r}: a perturbation of the parameters lasts a whole episode, "
                "so it is weighted by the return; use exploration='action'"
            )
        if best < 1 or ridge <= 0 or noise < 0:
            raise ValueError(f"best={best} must be >= 1, ridge={ridge} > 0 and noise={noise} >= 0")
        self.best = best
        self.weighting = weighting
        self.exploration = exploration
        self.noise = noise
        self.ridge = ridge
        self.gamma = gamma
        self._rng = np.random.default_rng(seed)
        self._kept: list[tuple[float, FloatArray]] = []  # the best (R_j, θ_j) so far
        self._move_to(np.zeros(n_features))

    @property
    def theta(self) -> FloatArray:
        """θ, without perturbation."""
        return self._mean.theta

    @property
    def policy(self) -> LinearSigmoid:
        """Frozen snapshot that acts now."""
        return self._policy

    def perturbed(self) -> LinearSigmoid:
        """Return θ with fresh noise, for loops that play several episodes between updates."""
        return LinearSigmoid(self.theta + self.noise * self._rng.standard_normal(len(self.theta)))

    def learn(self, episodes: Trajectories) -> None:
        """Update θ once."""
        refuse_held_out(episodes)
        returns = episodes.returns(self.gamma)
        if len(returns) == 0:
            return
        if returns.min() < 0:
            raise ValueError(
                f"episode {int(returns.argmin())} has the return {returns.min():g}: PoWER weights "
                "by the return, which must not be negative; add a constant to the rewards, or use "
                "SoftmaxLinearAgent"
            )
        if self.exploration == "action":
            self._move_to(self._likelihood_step(episodes, returns))
        else:
            self._move_to(self._parameter_step(episodes, returns))

    def _likelihood_step(self, episodes: Trajectories, returns: FloatArray) -> FloatArray:
        chosen = np.argsort(-returns, kind="stable")[: self.best]
        data = episodes.select(episodes=chosen)
        if self.weighting == "return":
            weights = np.repeat(returns[chosen], data.lengths)
        else:
            # a reward to go can be negative where the return is not
            weights = np.maximum(rewards_to_go(data, self.gamma), 0.0)
        if weights.sum() == 0:  # no rollout earned anything
            return self.theta
        x = np.asarray(data.observations, dtype=np.float64)
        return fit_sigmoid(x, data.actions, weights, self.theta, self.ridge)

    def _parameter_step(self, episodes: Trajectories, returns: FloatArray) -> FloatArray:
        acting = episodes.policy_ids[episodes.offsets[:-1]]  # (n,)
        changed = np.flatnonzero(np.repeat(acting, episodes.lengths) != episodes.policy_ids)
        if len(changed):
            row = int(changed[0])
            raise ValueError(
                f"episode {episodes.episode_ids[row]}, step {episodes.steps[row]}: the policy "
                "changes, but exploration='parameters' needs one policy an episode"
            )
        played = []
        for k in np.unique(acting):
            policy = episodes.policies[k]
            if not isinstance(policy, LinearSigmoid):
                raise ValueError(f"policy {k} is {policy!r}, not a perturbed LinearSigmoid")
            played.append((float(returns[acting == k].mean()), policy.theta))
        ranked = sorted([*self._kept, *played], key=lambda kept: -kept[0])
        self._kept = ranked[: self.best]
        weights = np.array([value for value, _ in self._kept])
        if weights.sum() == 0:
            return self.theta
        return np.asarray(weights @ np.stack([theta for _, theta in self._kept]) / weights.sum())

    def _move_to(self, theta: FloatArray) -> None:
        self._mean = LinearSigmoid(theta)
        self._policy = self._mean if self.exploration == "action" else self.perturbed()


def fit_sigmoid(
    x: FloatArray,
    actions: NDArray[np.int64],
    weights: FloatArray,
    start: FloatArray,
    ridge: float,
    *,
    iterations: int = 25,
) -> FloatArray:
    """Return argmax_θ of Σ w log π_θ(a|x) - ridge·‖θ‖²/2, with w scaled to mean 1.

    Newton's method: the objective is concave, strictly so thanks to the ridge, and a step that does
    not raise it is halved. On CartPole-v1 three or four iterations suffice.

    Args:
        x: (S, d) observations.
        actions: (S,) 0 or 1.
        weights: (S,) not negative.
        start: (d,) θ to begin with.
        ridge: Above 0.
        iterations: Maximum number of Newton steps.
    """
    weights = weights / weights.mean()
    signed = np.where(np.asarray(actions)[:, None] == 1, x, -x)  # P(a|x) = σ(signed·θ)

    def objective(theta: FloatArray) -> float:
        fit = weights @ np.logaddexp(0.0, -(signed @ theta))
        return float(-fit - 0.5 * ridge * theta @ theta)

    theta, height = np.array(start, dtype=np.float64), objective(start)
    for _ in range(iterations):
        miss = 0.5 * (1.0 - np.tanh(0.5 * (signed @ theta)))  # 1 - P(a|x), without overflow
        gradient = signed.T @ (weights * miss) - ridge * theta
        curvature = (signed.T * (weights * miss * (1.0 - miss))) @ signed
        step = np.linalg.solve(curvature + ridge * np.eye(len(theta)), gradient)
        while (higher := objective(theta + step)) < height - 1e-12 * abs(height):  # rounding
            step *= 0.5
        theta, height = theta + step, higher
        if gradient @ step < 1e-16 * len(x):  # about twice what is left to gain
            break
    return theta
