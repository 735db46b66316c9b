"""NetworkQ: fitted Q evaluation with a small neural network; torch is loaded when it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arguments import instance, real, whole
from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Problem, QModel, of_chosen
from ope_gym.models.features import Polynomial, columns_of
from ope_gym.models.images import Image, convolutions, scaled, split
from ope_gym.models.linear import default_linear, widest_fit
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.numerics import Columns, choices

_WIDEST = 4096  # inputs beside images
_ROWS = 1 << 14  # steps evaluated at once, and pixels of as many
_PIXELS = 1 << 20
_DRAWS = 4  # of the target's continuous actions at each next state


@dataclass(frozen=True)
class NetworkQ(QModel):
    """Fitted Q evaluation with a multilayer perceptron that starts from the values of LinearQ.

        minimise the mean of (r_t + gamma sum_a' pi(a'|s_{t+1}) q'(s_{t+1}, a') - q(s_t, a_t))²

    with q' = 0 after an end, q' a running average of q, and values in units of the largest return
    that the rewards allow, between whose bounds the targets are kept. q is that of LinearQ plus the
    network, which begins at 0. Each update of q' carries values back by one step only, so a network
    alone would be too slow for long episodes. The inputs are the standardised observations
    (categories as 0/1 columns), the share of the horizon that is left and, if continuous, the
    actions. Images (see `ope_gym.models.images`) go through a small convolutional net of their own;
    LinearQ then starts from averages of their blocks, and from the mean by time where there are too
    many numbers even for degree 1. A tenth of the episodes is kept aside: training stops when their
    error has not fallen for `patience` checks, and the best network is kept.

    Cost: steps × `epochs` at most; seconds for CartPole. One seed gives one result on one machine.
    Use it where LinearQ is too stiff, or for images. Weaknesses: it is slower, and because it
    learns from its own estimates, errors can add up.

    Args:
        hidden: widths of the hidden layers.
        epochs: largest number of passes over the steps.
        batch: number of recorded steps in a gradient step.
        learning_rate: learning rate of Adam.
        tau: share of q that enters q' with each gradient step.
        patience: number of checks, one per epoch, without improvement before training stops.
        progress: called after each epoch with (epoch, error on the episodes kept aside).
    """

    hidden: tuple[int, ...] = (64, 64)
    epochs: int = 30
    batch: int = 2048
    learning_rate: float = 4e-3
    tau: float = 0.04
    patience: int = 3
    progress: Callable[[int, float], object] | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "patience"):
            whole(name, getattr(self, name))
        for width in instance("hidden", self.hidden, tuple, "give a tuple of layer widths"):
            whole("hidden", width, expected="every layer needs at least one unit")
        real("learning_rate", self.learning_rate, "give a number above 0", lambda x: x > 0.0)
        real("tau", self.tau, "give a share within (0, 1]", lambda x: 0.0 < x <= 1.0)

    def fit(self, data: Trajectories, problem: Problem) -> NetworkValues:
        """Return the values learned from all episodes; the rng decides start, order and draws."""
        import torch

        target, horizon, rng = problem.target, problem.horizon, problem.rng
        finite = isinstance(target, FinitePolicy)
        inputs = Inputs.of(data, finite, horizon)
        start = _Start.of(data, problem, inputs)
        now, chosen = _steps(data, target, inputs)
        following = np.minimum(np.arange(data.n_steps) + 1, data.n_steps - 1)
        probs, draws, first = _ahead(data, target, inputs, rng, start)
        on = np.ones(data.n_steps)
        on[data.offsets[1:] - 1] = 0.0
        ones = annuity(problem.gamma, horizon)
        unit = max(float(np.abs(data.rewards).max()) * float(ones[-1]), 1e-12)
        left = ones[np.maximum(horizon - data.steps, 1)] / unit
        outputs = probs.shape[1] if probs is not None else 1
        kept = _kept_aside(len(data), rng)[data.episode_ids]
        # the network learns what the start leaves: r + gamma v(next) - q in the place of r
        own = start.q(data.observations, data.actions, data.steps)
        left_over = data.rewards + problem.gamma * on * first[following] - own
        table = {
            "x": _float32(now),
            "pixels": torch.from_numpy(inputs.pixels(data.observations)),
            "reward": _float32(left_over / unit),
            "on": _float32(problem.gamma * on),
            "low": _float32(min(float(data.rewards.min()), 0.0) * left - own / unit),
            "high": _float32(max(float(data.rewards.max()), 0.0) * left - own / unit),
            "action": torch.as_tensor(chosen),
            "next": torch.as_tensor(following),
        }
        if probs is not None:
            table["probs"] = _float32(probs)
        if draws is not None:
            table["draws"] = _float32(draws)
        learner = _Learner(self, table, inputs, outputs, int(rng.integers(2**62)))
        net = learner.train(np.flatnonzero(~kept), np.flatnonzero(kept), rng)
        return NetworkValues(net, inputs, outputs if finite else 0, unit, start)


@dataclass(frozen=True, eq=False)
class _Start:
    """The values of LinearQ from which a network starts, clipped to what the rewards allow.

    Args:
        values: Values of LinearQ.
        actions: how many; 0 where they are continuous.
        bounds: (2, horizon + 1) lowest and highest return of so many steps.
    """

    values: ActionValues
    actions: int
    bounds: FloatArray

    @classmethod
    def of(cls, data: Trajectories, problem: Problem, inputs: Inputs) -> _Start:
        """Fit LinearQ: to numbers, to averages of blocks of images, or else to the time alone."""
        if inputs.images:
            model = widest_fit(data, problem.target, [inputs.averages])
        else:
            model = default_linear(data, problem.target)
        if model is None:
            model = widest_fit(
                data, problem.target, [_constant if inputs.images else Polynomial(1), _constant]
            )
            assert model is not None
        target, actions = problem.target, 0
        if isinstance(target, FinitePolicy):
            actions = target.probs(batches.take(data.observations, slice(0, 1))).shape[1]
        ones = annuity(problem.gamma, problem.horizon)
        ends = min(float(data.rewards.min()), 0.0), max(float(data.rewards.max()), 0.0)
        return cls(model.fit(data, problem), actions, np.outer(ends, ones))

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        values = self.values.q(observations, actions, steps)
        return np.clip(values, *self._ends(steps))

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """Return q (n, A) of every action."""
        low, high = self._ends(steps)
        values = self.values.q_all(observations, steps, self.actions)
        return np.clip(values, low[:, None], high[:, None])

    def _ends(self, steps: IntArray) -> FloatArray:
        horizon = self.bounds.shape[1] - 1
        return np.asarray(self.bounds[:, np.clip(horizon - np.asarray(steps), 1, horizon)])


@dataclass(frozen=True)
class Inputs:
    """Turn batches into the inputs of the network: numbers, and pixels where there are images.

    Args:
        columns: Columns of all that is no image; None if everything is.
        images: the leaves that are images, in order.
        finite: whether actions are outputs, not inputs.
        horizon: longest possible episode.
    """

    columns: Columns | None
    images: tuple[Image, ...]
    finite: bool
    horizon: int

    @classmethod
    def of(cls, data: Trajectories, finite: bool, horizon: int) -> Inputs:
        """Return the inputs in the scale of the data; raise if there are too many numbers."""
        batch = data.observations if finite else (data.observations, data.actions)
        images, others = split(batch)
        size = sum(leaf[0].size for leaf in others if leaf.dtype != object)
        if size > _WIDEST:
            raise ValueError(
                f"observations have {size} numbers a step: NetworkQ takes at most {_WIDEST} beside "
                "images (3 dimensions a step, or 2 of type uint8); give it fewer features, or use "
                "Critic with the learner's network"
            )
        columns = columns_of(tuple(others)) if others else None
        return cls(columns, tuple(Image.of(leaf) for leaf in images), finite, horizon)

    @property
    def width(self) -> int:
        """Return the number of inputs beside images."""
        return (0 if self.columns is None else self.columns.width) + 1

    @property
    def rows(self) -> int:
        """Return how many steps to evaluate at once."""
        pixels = sum(int(np.prod(image.pooled)) for image in self.images)
        return min(_ROWS, max(1, _PIXELS // pixels)) if pixels else _ROWS

    def __call__(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return the inputs (n, width) beside images."""
        numbers = self._numbers(observations if self.finite else (observations, actions))
        left = np.maximum(self.horizon - np.asarray(steps), 0) / self.horizon
        return np.hstack([numbers, left[:, None]]).astype(np.float32)

    def pixels(self, observations: Tree) -> NDArray[Any]:
        """Return the pixels (n, p) of all images; p is 0 without any."""
        leaves = split(observations)[0]
        pixels = [image.pixels(leaf) for image, leaf in zip(self.images, leaves, strict=True)]
        if not pixels:
            return np.empty((batches.length(observations), 0), dtype=np.uint8)
        return pixels[0] if len(pixels) == 1 else np.hstack(pixels)

    def averages(self, batch: Tree) -> FloatArray:
        """Return features (n, d) for LinearQ: 1, the numbers, and averages of the images."""
        leaves = split(batch)[0]
        cells = [image.cells(leaf) for image, leaf in zip(self.images, leaves, strict=True)]
        return np.hstack([np.ones((batches.length(batch), 1)), self._numbers(batch), *cells])

    def _numbers(self, batch: Tree) -> FloatArray:
        if self.columns is None:
            return np.empty((batches.length(batch), 0))
        return self.columns(tuple(split(batch)[1]) if self.images else batch)


class NetworkValues(ActionValues):
    """The fitted q of NetworkQ; `actions` is 0 where they are continuous."""

    def __init__(self, net: Any, inputs: Inputs, actions: int, unit: float, start: _Start) -> None:
        self._net, self._inputs, self._actions, self._unit = net, inputs, actions, unit
        self._start = start

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        outputs = self._ask(observations, actions, steps)
        own = of_chosen(outputs, actions) if self._actions else outputs[:, 0]
        return own + self._start.q(observations, actions, steps)

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return q (n, A) of every action."""
        return self._ask(observations, None, steps) + self._start.q_all(observations, steps)

    def _ask(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        import torch

        outputs, inputs = [], self._inputs
        for begin in range(0, len(steps), inputs.rows):
            rows = slice(begin, begin + inputs.rows)
            seen = batches.take(observations, rows)
            chosen = None if actions is None else batches.take(actions, rows)
            x, pixels = inputs(seen, chosen, steps[rows]), inputs.pixels(seen)
            with torch.no_grad():
                values = self._net(torch.from_numpy(x), torch.from_numpy(pixels))
                outputs.append(values.numpy().astype(np.float64))
        return np.concatenate([*outputs]) * self._unit


class _Learner:
    """Take gradient steps on the squared one-step error."""

    def __init__(
        self, model: NetworkQ, table: dict[str, Any], inputs: Inputs, outputs: int, seed: int
    ) -> None:
        import torch

        self.model, self.table, self.rows = model, table, inputs.rows
        with torch.random.fork_rng(devices=[]):  # torch's own random state stays as it was
            torch.manual_seed(seed)
            self.net, self.slow = (_network(inputs, model.hidden, outputs) for _ in range(2))
        self.slow.load_state_dict(self.net.state_dict())
        self.slow.requires_grad_(False)

    def train(self, learn: IntArray, kept: IntArray, rng: np.random.Generator) -> Any:
        """Return the network with the least error on the steps kept aside; at first it is 0.

        Args:
            learn: (m,) rows to learn from.
            kept: (k,) rows kept aside.
            rng: source of the order.
        """
        import torch

        model = self.model
        for net in (self.net, self.slow):
            torch.nn.init.zeros_(net.head[-1].weight)
            torch.nn.init.zeros_(net.head[-1].bias)
        adam = torch.optim.Adam(self.net.parameters(), lr=model.learning_rate)
        best, least, waited = self._state(), self._error(kept), 0
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
            waited += 1
            if error < least:
                best, least, waited = self._state(), error, 0
            if waited >= model.patience:
                break
        self.net.load_state_dict(best)
        return self.net.requires_grad_(False)

    def _state(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def _loss(self, rows: Any) -> Any:
        goal = self._goal(rows)
        outputs = self.net(self.table["x"][rows], self.table["pixels"][rows])
        own = outputs.gather(1, self.table["action"][rows][:, None])[:, 0]
        return ((own - goal) ** 2).mean()

    def _goal(self, rows: Any) -> Any:
        """Return reward + gamma · the slow network's value of the next step, within the bounds."""
        import torch

        table = self.table
        with torch.no_grad():
            after = table["next"][rows]
            pixels = table["pixels"][after]
            if "draws" in table:  # (m, draws, width)
                ahead = self.slow(table["draws"][after], pixels)[..., 0].mean(dim=1)
            else:
                ahead = (self.slow(table["x"][after], pixels) * table["probs"][after]).sum(dim=1)
            goal = table["reward"][rows] + table["on"][rows] * ahead
            return torch.minimum(torch.maximum(goal, table["low"][rows]), table["high"][rows])

    def _error(self, kept: IntArray) -> float:
        """Return the root mean squared one-step error on the episodes kept aside."""
        import torch

        total = 0.0
        with torch.no_grad():
            for begin in range(0, kept.size, self.rows):
                rows = torch.from_numpy(kept[begin : begin + self.rows])
                total += float(self._loss(rows)) * len(rows)
        return float(np.sqrt(total / kept.size))


def _network(inputs: Inputs, hidden: tuple[int, ...], outputs: int) -> Any:
    """Return a torch module of numbers (n, width), or (n, draws, width), and pixels (n, p)."""
    import torch
    from torch import nn

    eyes = [convolutions(image) for image in inputs.images]
    sizes = [int(np.prod(image.pooled)) for image in inputs.images]
    width = inputs.width + sum(features for _, features in eyes)
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eyes = nn.ModuleList([eye for eye, _ in eyes])
            self.head = nn.Sequential(*layers, nn.Linear(width, outputs))

        def forward(self, numbers: Any, pixels: Any) -> Any:
            if not sizes:
                return self.head(numbers)
            parts = zip(self.eyes, inputs.images, pixels.split(sizes, dim=1), strict=True)
            seen = torch.cat([eye(scaled(some, image)) for eye, image, some in parts], dim=1)
            if numbers.ndim == 3:  # several actions at one image
                seen = seen[:, None].expand(-1, numbers.shape[1], -1)
            return self.head(torch.cat([numbers, seen], dim=-1))

    return Net()


def _constant(batch: Tree) -> FloatArray:
    return np.ones((batches.length(batch), 1))


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
    data: Trajectories,
    target: Policy,
    inputs: Inputs,
    rng: np.random.Generator,
    start: _Start,
) -> tuple[FloatArray | None, FloatArray | None, FloatArray]:
    """Return the target's probabilities (S, A), or inputs (S, draws, width) of drawn actions.

    And v (S,) of the start.
    """
    seen = data.observations
    if isinstance(target, FinitePolicy):
        probs = np.asarray(target.probs(seen))
        return probs, None, np.einsum("na,na->n", probs, start.q_all(seen, data.steps))
    drawn, v = [], np.zeros(data.n_steps)
    for _ in range(_DRAWS):
        actions = target.sample(seen, rng)
        drawn.append(inputs(seen, actions, data.steps))
        v += start.q(seen, actions, data.steps) / _DRAWS
    return None, np.stack(drawn, axis=1), v


def _kept_aside(episodes: int, rng: np.random.Generator) -> Any:
    """Choose a tenth (n,) of the episodes, at least one, at most all but one."""
    if episodes < 2:
        raise ValueError(
            "NetworkQ needs at least 2 episodes: it stops by the error on some of them"
        )
    kept = np.zeros(episodes, dtype=np.bool_)
    kept[rng.permutation(episodes)[: max(1, episodes // 10)]] = True
    return kept
