"""A torch module as a frozen policy. Importing this module imports torch; `ope_gym` does not."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias, TypeGuard

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

Output: TypeAlias = torch.Tensor | Distribution
Forward: TypeAlias = Callable[[Any, Any], Output]

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
        outputs = self._outputs(observations) if n else ()
        blocks = [_log_prob(output, given[rows], rows) for rows, output in outputs]
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
        blocks = [_log_softmax(output) for _, output in self._outputs(observations)]
        known = [np.exp(block) for block in blocks if block is not None]
        if len(known) < len(blocks):
            raise TypeError(
                f"probs of {self!r}: only a module that returns logits (n, A) or a Categorical "
                "with one row per observation has a table of probabilities"
            )
        return np.concatenate(known)

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Draw one action a row, decided by `rng`; torch's own random state stays as it was."""
        return np.concatenate([_sample(output, rng) for _, output in self._outputs(observations)])

    def log_prob_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray] | None:
        """Return mean and variance of the log-probability of its own actions; None if unknown."""
        blocks = [_moments(output) for _, output in self._outputs(observations)]
        known = [block for block in blocks if block is not None]
        if len(known) < len(blocks):
            return None
        means, variances = zip(*known, strict=True)
        return np.concatenate(means), np.concatenate(variances)

    def action_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray] | None:
        """Return mean and variance (n, m) of the actions if they are normal, else None."""
        blocks = [_normal(output) for _, output in self._outputs(observations)]
        known = [block for block in blocks if block is not None]
        if len(known) < len(blocks):
            return None
        mean, scale = (np.concatenate(part) for part in zip(*known, strict=True))
        rows = len(mean)
        return mean.reshape(rows, -1), scale.reshape(rows, -1) ** 2

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

    def _outputs(self, observations: Tree) -> Iterator[tuple[slice, Output]]:
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
            output = _checked(output, rows.stop - rows.start)
            self._finite = isinstance(output, torch.Tensor) or _is_table(output)
            yield rows, output

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


def _checked(output: object, n: int) -> Output:
    if isinstance(output, Distribution):
        shape: tuple[int, ...] = tuple(output.batch_shape)
    elif isinstance(output, torch.Tensor):
        if output.ndim != 2 or output.shape[1] == 0:
            raise ValueError(f"the module returned logits of shape {tuple(output.shape)}: (n, A)")
        shape = tuple(output.shape)
        if _are_probabilities(output):
            raise ValueError(
                "the module returned numbers of 0 or more that sum to 1 in each row: these are "
                "probabilities, and logits are expected; give forward=lambda net, x: "
                "torch.log(net(x)), or return a Categorical(probs=...)"
            )
    else:
        raise TypeError(
            f"the module returned a {type(output).__name__}: it must return logits (n, A) or a "
            "torch distribution; pick one with forward=lambda net, x: ..."
        )
    if shape[:1] != (n,):
        raise ValueError(
            f"the module returned {shape} for {n} observations: the first axis must be the rows"
        )
    return output


def _are_probabilities(output: torch.Tensor) -> bool:
    """Tell whether all rows sum to 1, which logits of several actions do not."""
    if output.shape[0] == 0 or output.shape[1] < 2 or bool((output < 0).any()):
        return False
    return bool(torch.allclose(output.sum(dim=1), torch.ones(len(output), dtype=output.dtype)))


def _log_softmax(output: Output) -> FloatArray | None:
    """Return normalised log-probabilities (n, A) in float64 if the actions are one finite set."""
    if isinstance(output, torch.Tensor):
        return _to_numpy(torch.log_softmax(output.double(), dim=1))
    if not _is_table(output):
        return None
    made_of = vars(output)
    if made_of.get("_param") is made_of.get("probs", ...):
        # Made from probabilities: torch's own logits of a probability 0 are about -16, not -inf.
        table = torch.as_tensor(output.probs).double()
        return _to_numpy(torch.log(table / table.sum(dim=1, keepdim=True)))
    return _to_numpy(torch.log_softmax(torch.as_tensor(output.logits).double(), dim=1))


def _is_table(output: Output) -> TypeGuard[Categorical]:
    return isinstance(output, Categorical) and len(output.batch_shape) == 1


def _normal(output: Output) -> tuple[FloatArray, FloatArray] | None:
    """Return location and scale (n, …) in float64 if the parts of the action are normal."""
    while isinstance(output, Independent):
        output = output.base_dist
    if type(output) is not Normal:
        return None
    return _to_numpy(output.loc.double()), _to_numpy(output.scale.double())


def _log_prob(output: Output, actions: NDArray[Any], rows: slice) -> FloatArray:
    logs = _log_softmax(output)
    if logs is not None:
        if actions.ndim > 1 or actions.dtype.kind not in "iub":
            known = "a tensor, the logits" if isinstance(output, torch.Tensor) else "a Categorical"
            raise ValueError(
                f"the module returned {known} of {logs.shape[1]} actions, but the actions have "
                f"dtype {actions.dtype} and shape {actions.shape}: for real numbers return a "
                "distribution, such as Independent(Normal(mean, std), 1)"
            )
        if logs.shape[1] == 1 and actions.any():
            raise ValueError(
                "the module returned one logit a row, which means that 0 is the only action, but "
                f"actions[{rows.start + int(np.flatnonzero(actions)[0])}] is another: for two "
                "actions (a Bernoulli) return two logits, 0 and z: forward=lambda net, x: "
                "torch.nn.functional.pad(net(x), (1, 0))"
            )
        return logs[np.arange(len(logs)), choices(actions, len(logs), logs.shape[1])]
    assert isinstance(output, Distribution)
    shape = output.batch_shape + output.event_shape
    if actions.size != shape.numel():
        raise ValueError(f"actions have shape {actions.shape}: {output} needs {tuple(shape)}")
    actions = actions.reshape(shape)  # (n,) and (n, 1) would otherwise broadcast to (n, n)
    normal = _normal(output)
    if normal is not None:
        loc, scale = normal
        return _row_sums(-0.5 * ((actions - loc) / scale) ** 2 - np.log(scale) - HALF_LOG_2PI)
    logs = _row_sums(_to_numpy(output.log_prob(torch.tensor(np.ascontiguousarray(actions)))))
    if np.isnan(logs).any():
        row = rows.start + int(np.flatnonzero(np.isnan(logs))[0])
        raise ValueError(
            f"log_prob of actions[{row}] is nan under {output}: an action on the edge of a "
            "squashed distribution has no density; record the action before it is clipped"
        )
    return logs


def _sample(output: Output, rng: np.random.Generator) -> NDArray[Any]:
    logs = _log_softmax(output)
    if logs is not None:
        return sample_rows(np.exp(logs), rng)
    normal = _normal(output)
    if normal is not None:
        loc, scale = normal
        return loc + scale * rng.standard_normal(loc.shape)
    assert isinstance(output, Distribution)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        return _to_numpy(output.sample())


def _moments(output: Output) -> tuple[FloatArray, FloatArray] | None:
    logs = _log_softmax(output)
    if logs is not None:
        return moments_of(np.exp(logs))
    normal = _normal(output)
    if normal is None:
        return None
    _, scale = normal
    return _row_sums(-0.5 - np.log(scale) - HALF_LOG_2PI), _row_sums(np.full(scale.shape, 0.5))


def _row_sums(values: NDArray[Any]) -> FloatArray:
    return np.asarray(values.reshape(len(values), -1).sum(axis=1, dtype=np.float64))


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        tensor = tensor.float()
    return np.array(tensor.numpy())
