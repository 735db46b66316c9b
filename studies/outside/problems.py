"""Make graphs, hidden-state problems, rings and problems with awkward rewards.

Each function draws a process and a target from a generator, and returns them with loggers.
"""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np

from ope_gym.arrays import FloatArray
from studies.outside.finite import Noise, Process, Setup, soft_history, softmax


def graph(
    rng: np.random.Generator,
    loggers: int,
    *,
    layers: int,
    slip: float,
    noise: Noise,
    sparse: bool,
    hidden: int = 0,
    crossing: bool = False,
) -> Setup:
    """Return a graph with two states a layer: an action goes up or down, and may slip.

    A transition pays about +1 into the upper state and -1 into the lower one, or (sparse) only the
    last one pays. State 0 is the start; layer t has states 2t - 1 (upper) and 2t.

    Args:
        rng: draws rewards and policies.
        loggers: their number.
        layers: number of steps.
        slip: probability to reach the other state than the one chosen.
        noise: of the rewards.
        sparse: only the last transition pays.
        hidden: if above 0, an observation is the number of the layer divided by this.
        crossing: actions stay in the row or cross to the other one, instead of up and down; then
            the hidden row matters.
    """
    states = 2 * layers - 1
    layer = (np.arange(states) + 1) // 2
    upper = np.minimum(2 * layer + 1, states - 1)[:, None, None]  # any state will do at the end
    lower = np.minimum(2 * layer + 2, states - 1)[:, None, None]
    shape = (states, 2, 2)
    moves = np.broadcast_to(np.concatenate([upper, lower], axis=2), shape)
    chances = np.tile([[1.0 - slip, slip], [slip, 1.0 - slip]], (states, 1, 1))
    if crossing:
        chances[2::2] = chances[2::2, ::-1]  # in the lower row
    last = layer == layers - 1
    size = rng.uniform(0.5, 1.5, states)
    if sparse:
        size = np.where(last, 2.0 * size, 0.0)
    rewards = size[:, None, None] * np.broadcast_to([1.0, -1.0], shape)
    ends = np.broadcast_to(last[:, None, None], shape)
    seen = layer // hidden if hidden else np.arange(states)
    process = Process(_first(states), chances, moves, rewards, ends, seen, layers, noise)
    tilt = np.array([1.0, 0.0]) * rng.uniform(1.0, 1.8)
    target = tilt + 0.4 * rng.normal(size=(seen.max() + 1, 2))
    return Setup(process, soft_history(target, loggers, rng, 0.3, least=0.2), softmax(target))


def model_fail(rng: np.random.Generator, loggers: int, *, loops: int) -> Setup:
    """Return a process whose states all look alike: an action decides the reward of the next step.

    Each loop has two steps: the first action leads to a good or a bad state, which then pays
    whatever is done there.
    """
    slip, pay = rng.uniform(0.0, 0.1), rng.uniform(0.7, 1.3, 2)
    moves = np.zeros((3, 2, 2), dtype=np.int64)
    moves[0] = [1, 2]
    chances = np.tile([1.0, 0.0], (3, 2, 1))
    chances[0] = [[1.0 - slip, slip], [slip, 1.0 - slip]]
    rewards = np.zeros((3, 2, 2))
    rewards[1], rewards[2] = pay[0], -pay[1]
    ends = np.zeros((3, 2, 2), dtype=np.bool_)
    process = Process(_first(3), chances, moves, rewards, ends, np.zeros(3, int), 2 * loops)
    target = np.array([[rng.uniform(1.0, 2.5), 0.0]])
    distance, least = 0.6 / np.sqrt(loops), 1.0 - 1.5 / np.sqrt(loops)
    return Setup(process, soft_history(target, loggers, rng, distance, least), softmax(target))


def model_win(rng: np.random.Generator, loggers: int, *, horizon: int) -> Setup:
    """Return a Markov process in which weights multiply where actions mean nothing.

    From state 0 an action leads to 1 or 2 a little more often; these pay +1 and -1 on the way back,
    whatever is done there.
    """
    likely = rng.uniform(0.55, 0.7)
    moves = np.zeros((3, 2, 2), dtype=np.int64)
    moves[0] = [1, 2]
    chances = np.tile([1.0, 0.0], (3, 2, 1))
    chances[0] = [[likely, 1.0 - likely], [1.0 - likely, likely]]
    rewards = np.zeros((3, 2, 2))
    rewards[1], rewards[2] = 1.0, -1.0
    ends = np.zeros((3, 2, 2), dtype=np.bool_)
    process = Process(_first(3), chances, moves, rewards, ends, np.arange(3), horizon)
    target = np.array([1.0, 0.0]) * rng.uniform(0.8, 1.5) * rng.choice([-1.0, 1.0], (3, 1))
    return Setup(process, soft_history(target, loggers, rng, 0.2, least=-0.5), softmax(target))


def delayed(rng: np.random.Generator, loggers: int, *, lag: int, horizon: int) -> Setup:
    """Return a process that pays for the action of `lag` steps ago; only a cue is observed.

    One of three cues comes up at random; it says how much the old action is worth now. States are
    the cue and the last actions, the oldest first; before the start all are 0.
    """
    pasts = list(itertools.product(range(2), repeat=lag))
    states = 3 * len(pasts)
    worth = rng.uniform(0.4, 1.6, (3, 2)) * [-1.0, 1.0] * rng.choice([-1.0, 1.0])
    moves = np.zeros((states, 2, 3), dtype=np.int64)
    rewards = np.zeros((states, 2, 3))
    for state, (cue, past) in enumerate(itertools.product(range(3), pasts)):
        rewards[state] = worth[cue, past[0]]
        for action in range(2):
            after = pasts.index((*past[1:], action))
            moves[state, action] = np.arange(3) * len(pasts) + after
    chances = np.broadcast_to(rng.dirichlet([5.0] * 3), (states, 2, 3))
    start = np.zeros(states)
    start[:: len(pasts)] = chances[0, 0]
    ends = np.zeros(moves.shape, dtype=np.bool_)
    seen = np.repeat(np.arange(3), len(pasts))
    process = Process(start, chances, moves, rewards, ends, seen, horizon)
    target = rng.normal(0.0, 0.9, (3, 2))
    return Setup(process, soft_history(target, loggers, rng, 0.25), softmax(target))


def hidden_chain(rng: np.random.Generator, loggers: int, *, horizon: int) -> Setup:
    """Return a process with a hidden mood, good or bad, that actions change and a sign betrays.

    A state is the mood and the sign, which shows the mood with probability 0.7; only the sign is
    observed. Action 0 tends to keep a good mood, action 1 pays at once but spoils it.
    """
    stay = np.array([[0.95, rng.uniform(0.6, 0.8)], [0.9, 0.97]])  # (mood, action)
    honest, at_once = 0.7, rng.uniform(0.3, 0.6)
    moves = np.broadcast_to(np.arange(4), (4, 2, 4))
    chances, rewards = np.zeros((4, 2, 4)), np.zeros((4, 2, 4))
    for mood, sign, action in itertools.product(range(2), range(2), range(2)):
        rewards[2 * mood + sign, action] = (1.0 if mood == 0 else -0.5) + at_once * action
        for later, shown in itertools.product(range(2), range(2)):
            move = stay[mood, action] if later == mood else 1.0 - stay[mood, action]
            sees = honest if shown == later else 1.0 - honest
            chances[2 * mood + sign, action, 2 * later + shown] = move * sees
    start = np.array([honest, 1.0 - honest, 0.0, 0.0])
    ends = np.zeros((4, 2, 4), dtype=np.bool_)
    process = Process(start, chances, moves, rewards, ends, np.array([0, 1, 0, 1]), horizon)
    target = np.array([0.5, 0.0]) + 0.9 * rng.normal(size=(2, 2))
    return Setup(process, soft_history(target, loggers, rng, 0.25), softmax(target))


def ring(rng: np.random.Generator, loggers: int, *, states: int, horizon: int) -> Setup:
    """Return a ring: two actions drift left or right, rewards depend on state and action."""
    here = np.arange(states)[:, None, None]
    steps = np.array([[-1, 0, 1, 2], [1, 0, -1, -2]])[None]
    moves = (here + steps) % states
    likely = rng.uniform(0.5, 0.8, (states, 2, 1))
    other = np.array([0.5, 0.3, 0.2]) * (1.0 - likely)
    chances = np.concatenate([likely, other], axis=2)
    hill = np.sin(2 * np.pi * (np.arange(states) / states + rng.random()))
    rewards = 0.5 * hill[:, None] + 0.3 * rng.normal(size=(states, 2))
    shape = (states, 2, 4)
    process = Process(
        np.full(states, 1.0 / states),
        chances,
        moves,
        np.broadcast_to(rewards[..., None], shape),
        np.zeros(shape, dtype=np.bool_),
        np.arange(states),
        horizon,
    )
    target = rng.normal(0.0, 0.7, (states, 2))
    return Setup(process, soft_history(target, loggers, rng, 0.3), softmax(target))


def small_mdp(rng: np.random.Generator, loggers: int, *, horizon: int, noise: Noise = "") -> Setup:
    """Return a random process with 6 states and 3 actions whose policies have clear preferences."""
    shape = (6, 3, 6)
    process = Process(
        rng.dirichlet(np.ones(6)),
        rng.dirichlet(np.full(6, 0.4), (6, 3)),
        np.broadcast_to(np.arange(6), shape),
        np.broadcast_to(rng.uniform(0.0, 1.0, (6, 3, 1)), shape),
        np.zeros(shape, dtype=np.bool_),
        np.arange(6),
        horizon,
        noise,
    )
    target = 1.2 * rng.normal(size=(6, 3))
    return Setup(process, soft_history(target, loggers, rng, 0.3, least=0.6), softmax(target))


def on_policy(
    rng: np.random.Generator, loggers: int, *, horizon: int, noise: Literal["t", "pareto"]
) -> Setup:
    """Return a random process with heavy-tailed rewards that the target itself recorded.

    Several loggers are all but equal to the target.
    """
    made = small_mdp(rng, 1, horizon=horizon, noise=noise)
    near = softmax(np.log(made.target) + 0.02 * rng.normal(size=(loggers, *made.target.shape)))
    return Setup(made.process, made.target[None] if loggers == 1 else near, made.target)


def rare_reward(rng: np.random.Generator, loggers: int, *, horizon: int = 10) -> Setup:
    """Return a process in which about one episode in 80 wins 100, and the others nothing."""
    chance = rng.uniform(0.8, 1.2) / 80 / horizon
    states = 2
    moves = np.zeros((states, 2, 2), dtype=np.int64)
    moves[..., 0] = rng.integers(states, size=(states, 2))
    win = chance * np.array([[0.5, 1.5], [1.5, 0.5]])
    chances = np.stack([1.0 - win, win], axis=2)
    rewards = np.broadcast_to([0.0, 100.0], (states, 2, 2))
    ends = rewards > 0
    process = Process(_first(states), chances, moves, rewards, ends, np.arange(states), horizon)
    target = rng.normal(0.0, 0.7, (states, 2))
    return Setup(process, soft_history(target, loggers, rng, 0.1, least=0.7), softmax(target))


def saturated(rng: np.random.Generator, loggers: int, *, horizon: int = 500) -> Setup:
    """Return a process whose episodes nearly all reach the time limit with the largest return.

    Seldom there is danger, and then the wrong action may end the episode: about one in 500 does.
    """
    danger = rng.uniform(0.5, 1.5) / horizon  # on average once an episode
    calm, alarm = [1.0 - danger, danger, 0.0], [0.8, 0.0, 0.2]
    chances = np.array([[calm, calm], [[1.0, 0.0, 0.0], alarm]])
    moves = np.broadcast_to([0, 1, 0], (2, 2, 3))
    ends = np.broadcast_to([False, False, True], (2, 2, 3))
    rewards = np.ones((2, 2, 3))
    process = Process(_first(2), chances, moves, rewards, ends, np.arange(2), horizon)
    wrong = 1.0 / 100
    target = np.log([[0.5, 0.5], [1.0 - wrong, wrong]])
    noise: FloatArray = rng.normal(0.0, 0.3, (loggers, 2, 2)) * [[[0.1], [1.0]]]
    return Setup(process, softmax(target + noise), softmax(target))


def _first(states: int) -> FloatArray:
    """Return the distribution that always starts in state 0."""
    start = np.zeros(states)
    start[0] = 1.0
    return start
