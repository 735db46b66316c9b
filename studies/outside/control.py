"""Simulate CartPole and Acrobot with the policies of PPO runs, all episodes at once.

The networks are in studies/data/ppo.npz, see `studies.outside.train_ppo`; the dynamics are those of
Gymnasium, in float64 and rounded to float32 for the policy.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.policies import SoftmaxMlp
from ope_gym.policies.mlp import Network
from studies.outside.finite import WRONG_TEMPERATURE, shared_out

PPO_FILE = Path(__file__).parents[1] / "data" / "ppo.npz"
CHECKSUM = 3235365226
HORIZON = 500
TRAININGS = 4
TARGETS = {"CartPole-v1": (6, 12), "Acrobot-v1": (7, 15)}  # updates before the target: midway, late
_GRAVITY, _MASS_POLE, _LENGTH, _FORCE, _TAU = 9.8, 0.1, 0.5, 10.0, 0.02
_MASS = _MASS_POLE + 1.0


@dataclass(frozen=True, eq=False)
class Control:
    """An environment with its loggers and the target.

    Args:
        env: name of the environment.
        loggers: networks that act.
        policy: the network to evaluate.
        truth: its mean return.
        truth_variance: squared standard error of the truth.
        wrong: whether the recorder keeps propensities at the wrong temperature.
    """

    env: str
    loggers: tuple[SoftmaxMlp, ...]
    policy: SoftmaxMlp
    truth: float
    truth_variance: float
    wrong: bool = False

    def simulate(self, n: int, rng: np.random.Generator) -> Trajectories:
        """Return n episodes, shared out evenly among the loggers."""
        ids = shared_out(n, len(self.loggers))
        seen, actions, rewards, alive, running = play(self.env, self.loggers, ids, rng)
        lengths = alive.sum(axis=1)
        steps = np.repeat(ids, lengths)
        seen, actions = seen[alive], actions[alive]
        known = [_at_wrong_temperature(one) if self.wrong else one for one in self.loggers]
        log_probs = np.concatenate(
            [one.log_prob(seen[steps == k], actions[steps == k]) for k, one in enumerate(known)]
        )  # ids ascend
        return Trajectories.from_arrays(
            seen,
            actions,
            rewards[alive],
            log_probs,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            policies=known,
            policy_ids=steps,
            terminated=~running,
            truncated=running,
            held_out=True,
            horizon=HORIZON,
        )

    def misrecorded(self) -> Control:
        """Return the setup with propensities recorded at the wrong temperature."""
        return replace(self, wrong=True)


def ppo(rng: np.random.Generator, loggers: int, *, env: str, late: bool, training: int) -> Control:
    """Return an environment with the policies of a PPO run; nothing is drawn.

    Loggers are the policies before the last updates, one each; the target is the next one.
    """
    at = TARGETS[env][int(late)]
    before = range(at - loggers, at)
    truth, error = _stored()[f"{env}/{training}/truth"][int(late)]
    return Control(
        env,
        tuple(network(env, training, k) for k in before),
        network(env, training, at),
        float(truth),
        float(error) ** 2,
    )


def play(
    env: str, policies: tuple[SoftmaxMlp, ...], ids: IntArray, rng: np.random.Generator
) -> tuple[NDArray[np.float32], IntArray, FloatArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """Play one episode for each entry of ids (n,), all at once.

    Returns:
        Observations (n, T, d), actions, rewards and whether the step was played (n, T), and whether
        the time limit ended the episode (n,).
    """
    n, cart = len(ids), env == "CartPole-v1"
    state = rng.uniform(-0.05, 0.05, (n, 4)) if cart else rng.uniform(-0.1, 0.1, (n, 4))
    step = _cart_step if cart else _acrobot_step
    layers = [
        tuple(np.stack([one.network.layers[i][part] for one in policies]) for part in (0, 1))
        for i in range(3)
    ]
    seen = np.zeros((HORIZON, n, 4 if cart else 6), dtype=np.float32)
    actions, rewards = np.zeros((HORIZON, n), dtype=np.int64), np.zeros((HORIZON, n))
    alive = np.zeros((HORIZON, n), dtype=np.bool_)
    rows = np.arange(n)  # of the episodes that go on
    for t in range(HORIZON):
        u = rng.random(n)
        seen[t, rows] = state if cart else _angles(state)
        scores = _forward(layers, seen[t, rows], ids[rows])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True)).cumsum(axis=1)
        chosen = (u[rows, None] * weights[:, -1:] >= weights[:, :-1]).sum(axis=1)
        state, over = step(state, chosen)
        actions[t, rows], alive[t, rows] = chosen, True
        rewards[t, rows] = 1.0 if cart else np.where(over, 0.0, -1.0)
        rows, state = rows[~over], state[~over]
        if not rows.size:
            break
    running = np.zeros(n, dtype=np.bool_)
    running[rows] = True
    return seen.swapaxes(0, 1), actions.T, rewards.T, alive.T, running


def network(
    env: str, training: int, update: int, stored: dict[str, NDArray[Any]] | None = None
) -> SoftmaxMlp:
    """Return the policy of a PPO run after an update, from the file unless arrays are given."""
    stored = _stored() if stored is None else stored
    return SoftmaxMlp(
        Network(
            tuple(
                (
                    stored[f"{env}/{training}/weights_{i}"][update],
                    stored[f"{env}/{training}/bias_{i}"][update],
                )
                for i in range(3)
            )
        )
    )


def _forward(layers: list[Any], seen: NDArray[np.float32], ids: IntArray) -> FloatArray:
    """Return the scores (n, A) of the policies with numbers ids (n,), which ascend."""
    out = np.empty((len(ids), layers[-1][1].shape[1]))
    cuts = np.searchsorted(ids, np.arange(len(layers[0][0]) + 1))
    for k in range(len(layers[0][0])):
        x: Any = seen[cuts[k] : cuts[k + 1]]
        for depth, (weights, bias) in enumerate(layers):
            x = x @ weights[k].T + bias[k]
            x = np.tanh(x) if depth < len(layers) - 1 else x
        out[cuts[k] : cuts[k + 1]] = x
    return out


def _cart_step(state: FloatArray, action: IntArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return the next states of CartPole and whether the episodes are over."""
    x, v, angle, spin = state.T
    force = np.where(action == 1, _FORCE, -_FORCE)
    cos, sin = np.cos(angle), np.sin(angle)
    moment = _MASS_POLE * _LENGTH
    push = (force + moment * spin**2 * sin) / _MASS
    turn = (_GRAVITY * sin - cos * push) / (_LENGTH * (4.0 / 3.0 - _MASS_POLE * cos**2 / _MASS))
    pull = push - moment * turn * cos / _MASS
    after = np.stack(
        [x + _TAU * v, v + _TAU * pull, angle + _TAU * spin, spin + _TAU * turn], axis=1
    )
    over = (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 12 * 2 * math.pi / 360)
    return after, over


def _acrobot_step(state: FloatArray, action: IntArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return the next states of Acrobot (Runge-Kutta of fourth order) and whether it is over."""
    torque, dt = action.astype(np.float64) - 1.0, 0.2
    k1 = _acrobot_slope(state, torque)
    k2 = _acrobot_slope(state + dt / 2 * k1, torque)
    k3 = _acrobot_slope(state + dt / 2 * k2, torque)
    k4 = _acrobot_slope(state + dt * k3, torque)
    after = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    after[:, :2] = (after[:, :2] + math.pi) % (2 * math.pi) - math.pi
    np.clip(after[:, 2], -4 * math.pi, 4 * math.pi, out=after[:, 2])
    np.clip(after[:, 3], -9 * math.pi, 9 * math.pi, out=after[:, 3])
    return after, -np.cos(after[:, 0]) - np.cos(after[:, 0] + after[:, 1]) > 1.0


def _acrobot_slope(state: FloatArray, torque: FloatArray) -> FloatArray:
    """Return the derivative of the state with Gymnasium's masses, lengths and moments."""
    first, second, spin1, spin2 = state.T
    cos2, sin2, gravity = np.cos(second), np.sin(second), 9.8
    d1 = 0.25 + (1.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * gravity * np.cos(first + second - math.pi / 2)
    phi1 = -0.5 * spin2**2 * sin2 - spin2 * spin1 * sin2
    phi1 = phi1 + 1.5 * gravity * np.cos(first - math.pi / 2) + phi2
    turn2 = (torque + d2 / d1 * phi1 - 0.5 * spin1**2 * sin2 - phi2) / (1.25 - d2**2 / d1)
    turn1 = -(d2 * turn2 + phi1) / d1
    return np.stack([spin1, spin2, turn1, turn2], axis=1)


def _angles(state: FloatArray) -> FloatArray:
    """Return the observations of Acrobot."""
    first, second = state[:, 0], state[:, 1]
    parts = (np.cos(first), np.sin(first), np.cos(second), np.sin(second), state[:, 2], state[:, 3])
    return np.stack(parts, axis=1)


def _at_wrong_temperature(policy: SoftmaxMlp) -> SoftmaxMlp:
    """Return the policy with its last layer divided by the wrong temperature."""
    *first, (weights, bias) = policy.network.layers
    last = weights / WRONG_TEMPERATURE, bias / WRONG_TEMPERATURE
    return SoftmaxMlp(Network((*first, last)))


@cache
def _stored() -> dict[str, NDArray[Any]]:
    """Return the arrays of the file.

    Its checksum is part of the code, so that finished runs with other networks are not reused.
    """
    found = zlib.crc32(PPO_FILE.read_bytes())
    if found != CHECKSUM:
        raise ValueError(f"{PPO_FILE.name} has changed: write CHECKSUM = {found} in {__name__}")
    with np.load(PPO_FILE) as file:
        return dict(file)
