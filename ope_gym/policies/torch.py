"""A torch module as a frozen policy. Importing this module imports torch; `ope_gym` does not."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from ope_gym import batches
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree
from ope_gym.policies.base import UnavailablePolicy, register_policy
from ope_gym.policies.numerics import HALF_LOG_2PI, choices, moments_of, sample_rows

__all__ = ["TorchPolicy"]

Forward: TypeAlias = Callable[[Any, Any], torch.Tensor | Distribution]
Moments: TypeAlias = tuple[FloatArray, FloatArray]  # means and variances

ROWS = 8_192  # rows a forward pass: the activations of a million rows would not fit in memory


@register_policy
class TorchPolicy:
    """A copy of a module, in eval mode on the CPU, that later training does not touch.

    The module, given observations (n, …) in the dtype of its first floating-point parameter,
    returns logits (n, A) or a distribution with n rows. Log-probabilities are worked out in
    float64. Parts of a factorised action (a Normal of shape (n, m)) are summed to one number a row.

    Two snapshots are equal only if they are the same object: a module's numbers do not say what
    its code does with them.

    Args:
        module: The policy network. Random layers are off (eval mode), as they should have been
            when it acted.
        forward: How to ask it, `forward(module, observations)`; `module(observations)` by
            default. It must use the module it is given, which is the copy. For a module with
            several heads: `forward=lambda net, x: net.actor(x)`; for one with an embedding:
            `forward=lambda net, x: net(x.long())`.
    """

    kind: ClassVar[str] = "torch"

    def __init__(self, module: nn.Module, *, forward: Forward | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: give a torch.nn.Module")
        if isinstance(forward, types.MethodType) and isinstance(forward.__self__, nn.Module):
            raise ValueError(
                f"forward is the bound method {forward.__qualname__}, which would follow the "
                f"training of its own module: give the function, forward={forward.__qualname__}"
            )
        self._module = copy.deepcopy(module).cpu().eval().requires_grad_(False)
        self._forward = forward
        self._finite: bool | None = None  # not known before the module is first called
        for name, value in self._module.state_dict().items():
            if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{name} of the module is not finite: take the snapshot before it diverged"
                )
        floating = (p.dtype for p in self._module.parameters() if p.is_floating_point())
        self._dtype = next(floating, torch.get_default_dtype())

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log-probability (density) of each action, shape (n,)."""
        given = np.asarray(actions)
        n = batches.length(observations)
        if given.shape[:1] != (n,):
            raise ValueError(f"actions have shape {given.shape}: {n} observations need ({n}, …)")
        answers = self._answers(observations) if n else ()
        blocks = [answer.log_prob(given[rows], rows.start) for rows, answer in answers]
        return np.concatenate([np.empty(0), *blocks])

    @property
    def probs(self) -> Callable[[Tree], FloatArray]:
        """Return the function `probs(observations) -> (n, A)`, for logits and Categorical only.

        What the module returns is known once it has been called. From then on a policy over other
        actions has no attribute `probs`, so that hasattr tells the two apart.
        """
        if self._finite is False:
            raise AttributeError(f"{self!r} has no probs: its actions are not one finite set")
        return self._probs

    def _probs(self, observations: Tree) -> FloatArray:
        return np.concatenate([answer.probs() for _, answer in self._answers(observations)])

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Draw one action a row, decided by `rng`; torch's own random state stays as it was."""
        return np.concatenate([answer.sample(rng) for _, answer in self._answers(observations)])

    def log_prob_moments(self, observations: Tree) -> Moments | None:
        """Return mean and variance of the log-probability of its own actions; None if unknown."""
        return _joined([answer.log_prob_moments() for _, answer in self._answers(observations)])

    def action_moments(self, observations: Tree) -> Moments | None:
        """Return mean and variance (n, m) of the actions if they are normal, else None."""
        return _joined([answer.action_moments() for _, answer in self._answers(observations)])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state_dict (parameters and buffers); the code is not stored."""
        state = self._module.state_dict()
        return {k: _to_numpy(v) for k, v in state.items() if isinstance(v, torch.Tensor)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> UnavailablePolicy:
        """Return the numbers, which `restore` puts back in a module."""
        return UnavailablePolicy(cls.kind, arrays)

    @classmethod
    def restore(
        cls, unavailable: UnavailablePolicy, module: nn.Module, *, forward: Forward | None = None
    ) -> TorchPolicy:
        """Return the policy of a loaded file: its numbers in a copy of a module of that kind."""
        if unavailable.kind != cls.kind:
            raise ValueError(
                f"unavailable is of kind {unavailable.kind!r}: only {cls.kind!r} holds a module"
            )
        filled = copy.deepcopy(module)
        state = {name: torch.tensor(value) for name, value in unavailable.arrays().items()}
        try:
            filled.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"module is not of the stored architecture: {error}") from error
        return cls(filled, forward=forward)

    def _answers(self, observations: Tree) -> Iterator[tuple[slice, _Answer]]:
        """Yield the module's answers, a block of rows at a time; one empty block for no rows."""
        n = batches.length(observations)
        for start in range(0, max(n, 1), ROWS):
            rows = slice(start, min(start + ROWS, n))
            batch = batches.map_leaves(self._to_tensor, batches.take(observations, rows))
            try:
                with torch.no_grad():
                    if self._forward is None:
                        output = self._module(batch)
                    else:
                        output = self._forward(self._module, batch)
            except RuntimeError as error:
                raise self._misfit(observations, error) from error
            answer = _answer(output, rows.stop - rows.start)
            self._finite = isinstance(answer, _Table)
            yield rows, answer

    def _misfit(self, observations: Tree, error: RuntimeError) -> Exception:
        """Return an error that compares the observations with the module's first layer."""
        linear = (m.in_features for m in self._module.modules() if isinstance(m, nn.Linear))
        wanted = next(linear, None)
        shapes = [leaf.shape[1:] for leaf in batches.leaves(observations)]
        if wanted is None or len(shapes) != 1 or shapes[0][-1:] in ((wanted,), ()):
            return error
        return ValueError(
            f"{self!r} takes {wanted} numbers, but the observations have shape {shapes[0]}: give "
            "the network that these episodes were recorded for, or forward=lambda net, x: ... to "
            f"prepare them ({error})"
        )

    def _to_tensor(self, leaf: NDArray[Any]) -> torch.Tensor:
        # A copy: torch warns of read-only arrays, and a module may work in place.
        return torch.tensor(np.ascontiguousarray(leaf), dtype=self._dtype)

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self._module.parameters())
        return f"TorchPolicy({type(self._module).__name__}, {count:,} parameters)"


def _answer(output: object, n: int) -> _Answer:
    """Return what a module said of n rows; raise if it is neither logits nor a distribution."""
    if isinstance(output, torch.Tensor):
        shape = tuple(output.shape)
        if output.ndim != 2 or output.shape[1] == 0:
            raise ValueError(f"the module returned logits of shape {shape}: (n, A)")
        if _are_probabilities(output):
            raise ValueError(
                "the module returned numbers of 0 or more that sum to 1 in each row: these are "
                "probabilities, and logits are expected; give forward=lambda net, x: "
                "torch.log(net(x)), or return a Categorical(probs=...)"
            )
    elif isinstance(output, Distribution):
        shape = tuple(output.batch_shape)
    else:
        raise TypeError(
            f"the module returned a {type(output).__name__}: it must return logits (n, A) or a "
            "torch distribution; pick one with forward=lambda net, x: ..."
        )
    if shape[:1] != (n,):
        raise ValueError(
            f"the module returned {shape} for {n} observations: the first axis must be the rows"
        )
    if isinstance(output, torch.Tensor):
        return _Table(_to_numpy(torch.log_softmax(output.double(), dim=1)), "a tensor, the logits")
    if isinstance(output, Categorical) and len(shape) == 1:
        return _Table(_log_table(output), "a Categorical")
    parts = output
    while isinstance(parts, Independent):
        parts = parts.base_dist
    if type(parts) is Normal:
        return _NormalParts(output, _to_numpy(parts.loc.double()), _to_numpy(parts.scale.double()))
    return _Answer(output)


def _are_probabilities(output: torch.Tensor) -> bool:
    """Tell whether all rows sum to 1, which logits of several actions do not."""
    if output.shape[0] == 0 or output.shape[1] < 2 or bool((output < 0).any()):
        return False
    return bool(torch.allclose(output.sum(dim=1), torch.ones(len(output), dtype=output.dtype)))


def _log_table(output: Categorical) -> FloatArray:
    """Return normalised log-probabilities (n, A) in float64."""
    made_of = vars(output)
    if made_of.get("_param") is made_of.get("probs", ...):
        # Made from probabilities: torch's own logits of a probability 0 are about -16, not -inf.
        table = torch.as_tensor(output.probs).double()
        return _to_numpy(torch.log(table / table.sum(dim=1, keepdim=True)))
    return _to_numpy(torch.log_softmax(torch.as_tensor(output.logits).double(), dim=1))


class _Answer:
    """Answer of a module for a block of rows: any distribution, with the methods of a policy."""

    def __init__(self, output: Distribution) -> None:
        self.output = output

    def log_prob(self, actions: NDArray[Any], start: int) -> FloatArray:
        """Return the log-probability of each action; `start` is the number of the first row."""
        given = torch.tensor(np.ascontiguousarray(self._shaped(actions)))
        logs = _row_sums(_to_numpy(self.output.log_prob(given)))
        if np.isnan(logs).any():
            row = start + int(np.flatnonzero(np.isnan(logs))[0])
            raise ValueError(
                f"log_prob of actions[{row}] is nan under {self.output}: an action on the edge of "
                "a squashed distribution has no density; record the action before it is clipped"
            )
        return logs

    def _shaped(self, actions: NDArray[Any]) -> NDArray[Any]:
        shape = self.output.batch_shape + self.output.event_shape
        if actions.size != shape.numel():
            raise ValueError(
                f"actions have shape {actions.shape}: {self.output} needs {tuple(shape)}"
            )
        return actions.reshape(shape)  # (n,) and (n, 1) would otherwise broadcast to (n, n)

    def probs(self) -> FloatArray:
        """Return the probability of every action, if they are finitely many."""
        raise TypeError(
            f"probs of {self.output}: only a module that returns logits (n, A) or a Categorical "
            "with one row per observation has a table of probabilities"
        )

    def sample(self, rng: np.random.Generator) -> NDArray[Any]:
        """Draw one action a row."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
            return _to_numpy(self.output.sample())

    def log_prob_moments(self) -> Moments | None:
        """Return mean and variance of the log-probability of its own actions; None if unknown."""
        return None

    def action_moments(self) -> Moments | None:
        """Return mean and variance (n, m) of the actions if they are normal, else None."""
        return None


class _Table(_Answer):
    """Finitely many actions with log-probabilities (n, A); `returned` names what they are from."""

    def __init__(self, logs: FloatArray, returned: str) -> None:
        self.logs, self.returned = logs, returned

    def log_prob(self, actions: NDArray[Any], start: int) -> FloatArray:
        n, n_actions = self.logs.shape
        if actions.ndim > 1 or actions.dtype.kind not in "iub":
            raise ValueError(
                f"the module returned {self.returned} of {n_actions} actions, but the actions have "
                f"dtype {actions.dtype} and shape {actions.shape}: for real numbers return a "
                "distribution, such as Independent(Normal(mean, std), 1)"
            )
        if n_actions == 1 and actions.any():
            raise ValueError(
                "the module returned one logit a row, which means that 0 is the only action, but "
                f"actions[{start + int(np.flatnonzero(actions)[0])}] is another: for two actions "
                "(a Bernoulli) return two logits, 0 and z: forward=lambda net, x: "
                "torch.nn.functional.pad(net(x), (1, 0))"
            )
        return self.logs[np.arange(n), choices(actions, n, n_actions)]

    def probs(self) -> FloatArray:
        return np.exp(self.logs)

    def sample(self, rng: np.random.Generator) -> NDArray[Any]:
        return sample_rows(self.probs(), rng)

    def log_prob_moments(self) -> Moments:
        return moments_of(self.probs())


class _NormalParts(_Answer):
    """Independent normal parts, in float64."""

    def __init__(self, output: Distribution, mean: FloatArray, std: FloatArray) -> None:
        super().__init__(output)
        self.mean, self.std = mean, std

    def log_prob(self, actions: NDArray[Any], start: int) -> FloatArray:
        standardised = (self._shaped(actions) - self.mean) / self.std
        return _row_sums(-0.5 * standardised**2 - np.log(self.std) - HALF_LOG_2PI)

    def sample(self, rng: np.random.Generator) -> FloatArray:
        return self.mean + self.std * rng.standard_normal(self.mean.shape)

    def log_prob_moments(self) -> Moments:
        means = _row_sums(-0.5 - np.log(self.std) - HALF_LOG_2PI)
        return means, _row_sums(np.full(self.std.shape, 0.5))

    def action_moments(self) -> Moments:
        flat = len(self.mean), math.prod(self.mean.shape[1:])
        return self.mean.reshape(flat), self.std.reshape(flat) ** 2


def _joined(blocks: list[Moments | None]) -> Moments | None:
    """Return the moments of all rows; None if those of a block are unknown."""
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks):
        return None
    means, variances = zip(*known, strict=True)
    return np.concatenate(means), np.concatenate(variances)


def _row_sums(values: NDArray[Any]) -> FloatArray:
    axes = tuple(range(1, values.ndim))
    return np.asarray(values.sum(axis=axes, dtype=np.float64))


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        tensor = tensor.float()
    return np.array(tensor.numpy())
