"""NetworkQ: fitted Q evaluation with a small neural network; torch is loaded when it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import Problem, of_chosen
from ope_gym.models.features import columns_of
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.encoding import Columns
from ope_gym.policies.numerics import choices

_WIDEST = 4096  # inputs; images must be made smaller first
_ROWS = 1 << 14  # steps evaluated at once
_RIPE = 5.0  # time constants of the slow network before the error may stop the training
_DRAWS = 4  # of the target's continuous actions at each next state


@dataclass(frozen=True)
class NetworkQ:
    """Fitted Q evaluation with a multilayer perceptron and a slow target network.

        minimise the mean of (r_t + gamma sum_a' pi(a'|s_{t+1}) q'(s_{t+1}, a') - q(s_t, a_t))²

    with q' = 0 after an end, q' a running average of q, and values in units of the largest return
    that the rewards allow, between whose bounds the targets are kept. The inputs are the
    standardised observations (categories as 0/1 columns), the share of the horizon that is left
    and, if continuous, the actions. A tenth of the episodes is kept aside: training stops when
    their error has not fallen for `patience` checks, and the best network is kept.

    Cost: steps × `epochs` at most; some seconds for CartPole, times the folds. One seed gives one
    result on one machine. Use it where LinearQ is too stiff. Weaknesses: slower, the errors of
    targets that are themselves estimates can add up, and images must be made features first.

    Args:
        hidden: widths of the hidden layers.
        epochs: most passes over the steps.
        batch: steps in a gradient step.
        learning_rate: of Adam.
        tau: share of q that enters q' with each gradient step.
        patience: checks, one an epoch, without improvement before training stops.
        progress: called after each epoch with (epoch, error on the episodes kept aside).
    """

    hidden: tuple[int, ...] = (64, 64)
    epochs: int = 30
    batch: int = 512
    learning_rate: float = 2e-3
    tau: float = 0.01
    patience: int = 5
    progress: Callable[[int, float], object] | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden is {self.hidden}: every layer needs at least one unit")
        if not (self.learning_rate > 0 and 0 < self.tau <= 1):
            raise ValueError(
                f"learning_rate={self.learning_rate}, tau={self.tau}: the first must be above 0, "
                "the second within (0, 1]"
            )

    def fit(self, data: Trajectories, problem: Problem) -> NetworkValues:
        """Return the values learned from all episodes; the rng decides start, order and draws."""
        import torch

        target, horizon, rng = problem.target, problem.horizon, problem.rng
        finite = isinstance(target, FinitePolicy)
        inputs = Inputs.of(data, finite, horizon)
        now, chosen = _steps(data, target, inputs)
        following = np.minimum(np.arange(data.n_steps) + 1, data.n_steps - 1)
        probs, draws = _ahead(data, target, inputs, rng)
        on = np.ones(data.n_steps)
        on[data.offsets[1:] - 1] = 0.0
        ones = annuity(problem.gamma, horizon)
        unit = max(float(np.abs(data.rewards).max()) * float(ones[-1]), 1e-12)
        left = ones[np.maximum(horizon - data.steps, 1)] / unit
        outputs = probs.shape[1] if probs is not None else 1
        kept = _kept_aside(len(data), rng)[data.episode_ids]
        table = {
            "x": _float32(now),
            "reward": _float32(data.rewards / unit),
            "on": _float32(problem.gamma * on),
            "low": _float32(min(float(data.rewards.min()), 0.0) * left),
            "high": _float32(max(float(data.rewards.max()), 0.0) * left),
            "action": torch.as_tensor(chosen),
            "next": torch.as_tensor(following),
        }
        if probs is not None:
            table["probs"] = _float32(probs)
        if draws is not None:
            table["draws"] = _float32(draws)
        learner = _Learner(self, table, inputs.width, outputs, int(rng.integers(2**62)))
        net = learner.train(np.flatnonzero(~kept), np.flatnonzero(kept), rng)
        return NetworkValues(net, inputs, outputs if finite else 0, unit)


@dataclass(frozen=True)
class Inputs:
    """Turn batches into the inputs of the network."""

    columns: Columns
    finite: bool
    horizon: int

    @classmethod
    def of(cls, data: Trajectories, finite: bool, horizon: int) -> Inputs:
        """Return the inputs in the scale of the data; raise if there are too many numbers."""
        batch = data.observations if finite else (data.observations, data.actions)
        size = sum(leaf[0].size for leaf in batches.leaves(batch) if leaf.dtype != object)
        if size > _WIDEST:
            raise ValueError(
                f"observations have {size} numbers a step: NetworkQ takes at most {_WIDEST}; give "
                "it features of the images, or use Critic with the learner's network"
            )
        return cls(columns_of(batch), finite, horizon)

    @property
    def width(self) -> int:
        """Return the number of inputs."""
        return self.columns.width + 1

    def __call__(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return the inputs (n, width)."""
        found = self.columns(observations if self.finite else (observations, actions))
        left = np.maximum(self.horizon - np.asarray(steps), 0) / self.horizon
        return np.hstack([found, left[:, None]]).astype(np.float32)


class NetworkValues:
    """The fitted q of NetworkQ; `actions` is 0 where they are continuous."""

    def __init__(self, net: Any, inputs: Inputs, actions: int, unit: float) -> None:
        self._net, self._inputs, self._actions, self._unit = net, inputs, actions, unit
        if actions:
            self.q_all = self._all

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        found = self._ask(observations, actions, steps)
        if not self._actions:
            return found[:, 0]
        return of_chosen(found, actions)

    def _all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """Return q (n, A) of every action."""
        return self._ask(observations, None, steps)

    def _ask(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        import torch

        found = []
        for begin in range(0, len(steps), _ROWS):
            rows = slice(begin, begin + _ROWS)
            chosen = None if actions is None else batches.take(actions, rows)
            x = self._inputs(batches.take(observations, rows), chosen, steps[rows])
            with torch.no_grad():
                found.append(self._net(torch.from_numpy(x)).numpy().astype(np.float64))
        return np.concatenate([*found]) * self._unit


class _Learner:
    """Take gradient steps on the squared one-step error."""

    def __init__(
        self, model: NetworkQ, table: dict[str, Any], width: int, outputs: int, seed: int
    ) -> None:
        import torch

        self.model, self.table = model, table
        with torch.random.fork_rng(devices=[]):  # torch's own random state stays as it was
            torch.manual_seed(seed)
            self.net, self.slow = (_perceptron(width, model.hidden, outputs) for _ in range(2))
        self.slow.load_state_dict(self.net.state_dict())
        self.slow.requires_grad_(False)

    def train(self, learn: IntArray, kept: IntArray, rng: np.random.Generator) -> Any:
        """Return the network with the least error on the steps kept aside."""
        import torch

        model = self.model
        adam = torch.optim.Adam(self.net.parameters(), lr=model.learning_rate)
        best, least, waited = self._state(), np.inf, 0
        for epoch in range(model.epochs):
            order = rng.permutation(learn)
            for begin in range(0, order.size, model.batch):
                adam.zero_grad()
                loss = self._loss(torch.from_numpy(order[begin : begin + model.batch]))
                loss.backward()
                adam.step()
                with torch.no_grad():
                    for slow, own in zip(
                        self.slow.parameters(), self.net.parameters(), strict=True
                    ):
                        slow.lerp_(own, model.tau)
            error = self._error(kept)
            if model.progress is not None:
                model.progress(epoch, error)
            if not np.isfinite(error):
                raise ValueError(
                    f"NetworkQ diverged in epoch {epoch}: use a smaller learning_rate than "
                    f"{model.learning_rate}, or LinearQ"
                )
            # at first the slow network is about 0 and so is the error: too early to stop
            ripe = (epoch + 1) * (learn.size / model.batch) * model.tau > _RIPE
            waited += 1
            if error < least or not ripe:
                best, least, waited = self._state(), error if ripe else np.inf, 0
            if waited >= model.patience:
                break
        self.net.load_state_dict(best)
        return self.net.requires_grad_(False)

    def _state(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def _loss(self, rows: Any) -> Any:
        goal = self._goal(rows)
        found = self.net(self.table["x"][rows])
        own = found.gather(1, self.table["action"][rows][:, None])[:, 0]
        return ((own - goal) ** 2).mean()

    def _goal(self, rows: Any) -> Any:
        """Return reward + gamma · the slow network's value of the next step, within the bounds."""
        import torch

        table = self.table
        with torch.no_grad():
            after = table["next"][rows]
            if "draws" in table:  # (m, draws, width)
                ahead = self.slow(table["draws"][after])[..., 0].mean(dim=1)
            else:
                ahead = (self.slow(table["x"][after]) * table["probs"][after]).sum(dim=1)
            goal = table["reward"][rows] + table["on"][rows] * ahead
            return torch.minimum(torch.maximum(goal, table["low"][rows]), table["high"][rows])

    def _error(self, kept: IntArray) -> float:
        """Return the root mean squared one-step error on the episodes kept aside."""
        import torch

        total = 0.0
        with torch.no_grad():
            for begin in range(0, kept.size, _ROWS):
                rows = torch.from_numpy(kept[begin : begin + _ROWS])
                total += float(self._loss(rows)) * len(rows)
        return float(np.sqrt(total / kept.size))


def _perceptron(width: int, hidden: tuple[int, ...], outputs: int) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _float32(values: FloatArray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _steps(data: Trajectories, target: Policy, inputs: Inputs) -> tuple[FloatArray, IntArray]:
    """Return the inputs of all recorded steps, and which output belongs to the action."""
    now = inputs(data.observations, data.actions, data.steps)
    if not isinstance(target, FinitePolicy):
        return now, np.zeros(data.n_steps, dtype=np.int64)
    actions = target.probs(batches.take(data.observations, slice(0, 1))).shape[1]
    return now, choices(data.actions, data.n_steps, actions).astype(np.int64)


def _ahead(
    data: Trajectories, target: Policy, inputs: Inputs, rng: np.random.Generator
) -> tuple[FloatArray | None, FloatArray | None]:
    """Return the target's probabilities (S, A), or inputs (S, draws, width) of drawn actions."""
    if isinstance(target, FinitePolicy):
        return np.asarray(target.probs(data.observations)), None
    drawn = [
        inputs(data.observations, target.sample(data.observations, rng), data.steps)
        for _ in range(_DRAWS)
    ]
    return None, np.stack(drawn, axis=1)


def _kept_aside(episodes: int, rng: np.random.Generator) -> Any:
    """Choose a tenth (n,) of the episodes, at least one, at most all but one."""
    if episodes < 2:
        raise ValueError(
            "NetworkQ needs at least 2 episodes: it stops by the error on some of them"
        )
    kept = np.zeros(episodes, dtype=np.bool_)
    kept[rng.permutation(episodes)[: max(1, episodes // 10)]] = True
    return kept
