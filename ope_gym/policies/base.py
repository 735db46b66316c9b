"""Define policies, and how one is written to a file: a registered name and arrays.

A file never holds code: a class is found by its `kind` among those registered in this process,
and a kind nobody registered comes back as an `UnavailablePolicy` that keeps the arrays.

A new class of policies is one with `log_prob` and `sample`. To be stored in files it also needs a
`kind` and the decorator `register_policy`; a frozen dataclass that derives from `Snapshot` gets the
rest (storage, equality, repr) from its fields. `Finite` and `Gaussian` are the bases of policies
over finitely many actions and of normal ones: a class gives probabilities, or a mean and
deviations, and the rest follows.

Models of Stable-Baselines3, saved ones and torch modules become policies by `as_policy`. The
converter is found by the package that the class of the object, or a base of it, comes from, and is
imported when it is first needed: this module imports neither torch nor Stable-Baselines3.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree, freeze, take
from ope_gym.policies.numerics import HALF_LOG_2PI, choices, moments_of, parts, sample_rows

if TYPE_CHECKING:
    from typing import Self

UNREGISTERED = "unregistered:"

_ASK_ROWS = 4096  # for more rows at once a policy's arrays are fresh memory, slower than its work


@runtime_checkable
class Policy(Protocol):
    """A frozen snapshot of a policy, evaluated on batches of n rows.

    A class may also have `log_prob_stack(policies, observations, actions) -> (K, n)`, a
    classmethod that evaluates many of its policies at once, and
    `log_prob_moments(observations)`, see the function of that name.
    """

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the natural log of the probability (density) of each action, shape (n,)."""
        ...

    def sample(self, observations: Tree, rng: np.random.Generator) -> Tree:
        """Return one action per row, drawn with `rng` only."""
        ...


class _AskedForProbs(type(Protocol)):  # type: ignore[misc]
    """isinstance asks the object, not its class: a `TorchPolicy` has `probs`, or has not."""

    def __instancecheck__(cls, instance: object) -> bool:
        return all(hasattr(instance, name) for name in ("log_prob", "sample", "probs"))


@runtime_checkable
class FinitePolicy(Policy, Protocol, metaclass=_AskedForProbs):
    """A policy over finitely many actions."""

    def probs(self, observations: Tree) -> FloatArray:
        """Return the probability of every action, shape (n, A)."""
        ...


# a policy or what `as_policy` makes one of, or the number of a recorded policy, or "last"
Target: TypeAlias = Any


class StoredPolicy(Policy, Protocol):
    """A policy that a file can hold: what `register_policy` asks of a class."""

    kind: ClassVar[str]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything needed to build the policy again."""
        ...

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Policy:
        """Return the policy whose `arrays()` these are."""
        ...


def digest(kind: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a hash of what a file holds of a policy."""
    content = hashlib.blake2b(kind.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.hexdigest()


class Snapshot:
    """Base of frozen dataclasses whose fields say everything: stored and compared by content."""

    kind: ClassVar[str]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the fields, each as an array."""
        named = fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        return {field.name: np.asarray(getattr(self, field.name)) for field in named}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the policy whose `arrays()` these are."""
        named = fields(cls)  # type: ignore[arg-type]
        return cls(**{field.name: arrays[field.name][()] for field in named})

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        """A digest of all arrays: their bytes would double the memory of many policies."""
        return self.kind, digest(self.kind, self.arrays())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._content == other._content)

    def __hash__(self) -> int:
        return hash(self._content)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_arrays, (self.arrays(),)  # arrays lose read-only in a plain pickle

    def __repr__(self) -> str:
        parts = (f"{name}={_short(value)}" for name, value in self.arrays().items())
        return f"{type(self).__name__}({', '.join(parts)})"


class Finite(Snapshot):
    """Base of policies over actions 0 … A-1; a subclass gives `probs` or `log_table`."""

    def probs(self, observations: Tree) -> FloatArray:
        """Return the probability of every action, shape (n, A)."""
        return np.exp(self.log_table(observations))

    def log_table(self, observations: Tree) -> FloatArray:
        """Return the log-probability of every action, -inf where it is impossible; (n, A)."""
        with np.errstate(divide="ignore"):
            return np.log(self.probs(observations))

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log-probability of each action, shape (n,)."""
        log_probs = self.log_table(observations)
        return log_probs[np.arange(len(log_probs)), choices(actions, *log_probs.shape)]

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one action a row; one uniform number each decides."""
        return sample_rows(self.probs(observations), rng)


class Gaussian(Snapshot):
    """Base of policies over actions of m parts, a ~ N(mean(x), diag exp(log_std)²); a density."""

    log_std: NDArray[np.floating]  # (m,)

    def mean(self, observations: Tree) -> FloatArray:
        """Return the mean of each part of the action, shape (n, m)."""
        raise NotImplementedError

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log density of each action, shape (n,)."""
        given = np.asarray(actions)
        flat = given.reshape(len(given), math.prod(given.shape[1:]))
        chosen = parts(flat, batches.length(observations), self.log_std.size)
        standardised = (chosen - self.mean(observations)) / self._std
        return np.asarray(-0.5 * np.square(standardised).sum(axis=1) - self._log_scale)

    def sample(self, observations: Tree, rng: np.random.Generator) -> FloatArray:
        """Draw one normal number for each part of the action, shape (n, m)."""
        mean = self.mean(observations)
        return mean + self._std * rng.standard_normal(mean.shape)

    def action_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of each part of the action, (n, m) each."""
        mean = self.mean(observations)
        return mean, np.broadcast_to(np.square(self._std), mean.shape)

    def log_prob_moments(self, observations: Tree) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of the log density of the policy's own actions.

        The log density is a constant minus half a χ²_m: -m/2 on average, variance m/2.
        """
        n, m = batches.length(observations), self.log_std.size
        return np.full(n, -0.5 * m - self._log_scale), np.full(n, 0.5 * m)

    @property
    def _std(self) -> FloatArray:
        return np.exp(self.log_std.astype(np.float64))

    @property
    def _log_scale(self) -> float:
        return float(self.log_std.sum(dtype=np.float64)) + self.log_std.size * HALF_LOG_2PI


def is_ours(thing: object) -> bool:
    """Return whether the class of an object is one of this package, not of a user."""
    return type(thing).__module__.startswith("ope_gym.")


@dataclass(frozen=True, eq=False, repr=False)
class UnavailablePolicy(Snapshot):
    """A policy from a file whose class is not known here: it keeps the arrays and cannot act.

    Two of them are equal by content only where the arrays determine the policy; otherwise, as
    for torch modules, different policies could pass for one.
    """

    kind: str  # type: ignore[misc]  # one class stands for every unknown kind
    stored: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored", freeze(dict(self.stored)))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays as the file holds them."""
        return dict(self.stored)

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        partial = self.kind == "torch" or self.kind.startswith(UNREGISTERED)
        return (id(self),) if partial else super()._content

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.arrays())

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Raise, and say how to get the policy back."""
        raise RuntimeError(f"log_prob of {self!r}: {self.remedy}")

    def sample(self, observations: Tree, rng: np.random.Generator) -> Tree:
        """Raise, and say how to get the policy back."""
        raise RuntimeError(f"sample of {self!r}: {self.remedy}")

    @property
    def remedy(self) -> str:
        """Why it cannot act, and how to get it back."""
        if self.kind == "torch":
            return (
                "a file holds a torch module's numbers, not its code. After load(path) call "
                "ope_gym.policies.torch.TorchPolicy.restore(this, module) with a module of the "
                "same architecture, and put the result in place: "
                "dataclasses.replace(trajectories, policies=...); on the command line give "
                "--policy PACKAGE:FACTORY, a function that returns such a module"
            )
        if self.kind.startswith(UNREGISTERED):
            return (
                f"its class {self.kind.removeprefix(UNREGISTERED)} was not registered when the "
                "file was written, so its parameters are not in the file. Decorate the class with "
                "ope_gym.policies.register_policy and record again"
            )
        return (
            f"no class of that kind is registered (known: {', '.join(sorted(POLICY_KINDS))}). "
            "Import the module that defines it, or decorate the class with "
            "ope_gym.policies.register_policy, before load(path)"
        )

    def __repr__(self) -> str:
        names = ", ".join(f"{name}{value.shape}" for name, value in self.stored.items())
        return f"UnavailablePolicy({self.kind!r}: {names or 'no arrays'})"


POLICY_KINDS: dict[str, type[StoredPolicy]] = {}

StoredClass = TypeVar("StoredClass", bound=type[StoredPolicy])


def register_policy(cls: StoredClass) -> StoredClass:
    """Let files hold policies of a class, under its `kind`. Use as a decorator."""
    kind = cls.__dict__.get("kind")
    if not isinstance(kind, str) or not kind or kind.startswith(UNREGISTERED):
        raise ValueError(
            f"{cls.__qualname__}.kind is {kind!r}: give the class itself a `kind: ClassVar[str]`, "
            f"a name of its own that does not begin with {UNREGISTERED!r}"
        )
    holder = POLICY_KINDS.get(kind, cls)
    if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"kind {kind!r} of {cls.__qualname__} belongs to {holder.__module__}."
            f"{holder.__qualname__}: choose another name"
        )
    POLICY_KINDS[kind] = cls
    return cls


@register_policy
class UnknownPolicy(UnavailablePolicy):
    """A policy of which nothing is known.

    Where it acted, and only there, trajectories may have NaN for the log-probability: "not
    recorded". Two of them are never equal, since nothing says that they are one policy.

    Args:
        label: Its name in a table, to be shown; empty if it has none.
    """

    kind = "unknown"  # type: ignore[misc]  # of the class, for the registry

    def __init__(self, label: str = "") -> None:
        super().__init__(self.kind, {"label": to_bytes(label)} if label else {})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> UnknownPolicy:
        """Return an unknown policy with the label that is stored, if any is."""
        return cls(from_bytes(arrays.get("label")))

    @property
    def label(self) -> str:
        """Its name in a table; empty if it has none."""
        return from_bytes(self.stored.get("label"))

    @property
    def remedy(self) -> str:
        """Why it cannot act, and what to do."""
        return (
            "nothing recorded how it acts; estimate it with ope_gym.fit_behaviour (ope-gym "
            "fit-behaviour), or use DM, which has no weights, or BIS and NBIS, which need only the "
            "probabilities of the actions (trajectories.has_propensities)"
        )

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return (id(self),)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.label,)

    def __repr__(self) -> str:
        return f"UnknownPolicy({self.label!r})" if self.label else "UnknownPolicy()"


def to_bytes(text: str) -> NDArray[np.uint8]:
    """Return text as an array for a file."""
    return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)


def from_bytes(array: ArrayLike | None) -> str:
    """Return the text that `to_bytes` made an array of; empty without an array."""
    return "" if array is None else bytes(np.asarray(array, np.uint8)).decode(errors="replace")


def acts_unknown(policies: tuple[Policy, ...], policy_ids: ArrayLike) -> NDArray[np.bool_] | None:
    """Return the mask (S,) of steps where an unknown policy acted; None if there are none."""
    unknown = np.array([isinstance(policy, UnknownPolicy) for policy in policies], dtype=bool)
    return np.asarray(unknown[np.asarray(policy_ids)]) if unknown.any() else None


def acting_log_probs(
    policies: Sequence[Policy], policy_ids: NDArray[np.int32], observations: Tree, actions: Tree
) -> FloatArray:
    """Return (S,) the log-probability of each action by the policy that chose it.

    Args:
        policies: K policies.
        policy_ids: (S,) which of them acted.
        observations: Batch of S rows.
        actions: Batch of S rows.
    """
    log_probs = np.empty(len(policy_ids))
    for k in np.unique(policy_ids):
        acted = np.flatnonzero(policy_ids == k)
        for start in range(0, len(acted), _ASK_ROWS):
            rows = acted[start : start + _ASK_ROWS]
            answer = policies[k].log_prob(take(observations, rows), take(actions, rows))
            if np.shape(answer) != rows.shape:
                raise ValueError(
                    f"policy {k}: log_prob gave shape {np.shape(answer)} instead of {rows.shape}, "
                    "one number for each step"
                )
            log_probs[rows] = answer
    return log_probs


# What people have as policies

Converter = Callable[[Any], Any]

# By package: a function that makes a policy of an object, or the place of one, "module:name".
_CONVERTERS: dict[str, Converter | str] = {
    "stable_baselines3": "wrappers.sb3.convert:policy_of",
    "sb3_contrib": "wrappers.sb3.convert:policy_of",
    "torch": "ope_gym.policies.torch:TorchPolicy",
}
_READERS = {".zip": "wrappers.sb3.convert:load_policy"}  # by ending of a file


def register_converter(package: str, convert: Converter) -> None:
    """Let objects of a package stand wherever a policy is expected.

    Args:
        package: Name of the package that their class, or a base of it, comes from.
        convert: Function that returns a policy for such an object.
    """
    _CONVERTERS[package] = convert


def is_saved(target: object) -> bool:
    """Return whether a target is the path of a saved model, such as "ppo_cartpole.zip"."""
    if not isinstance(target, str | os.PathLike):
        return False
    return os.path.splitext(os.fspath(target))[1] in _READERS


def as_policy(target: Any, name: str = "target") -> Any:
    """Return the policy of a model, a saved model or a torch module; other objects as they are.

    Args:
        target: A policy, a model of Stable-Baselines3, the path of a saved one (.zip), or a torch
            module that returns logits or a distribution.
        name: Name of the argument, for messages.
    """
    if hasattr(target, "log_prob") and hasattr(target, "sample"):
        return target
    if is_saved(target):
        path = os.fspath(target)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{name} is {path!r}, and there is no such file")
        return _imported(_READERS[os.path.splitext(path)[1]], name)(path)
    for base in type(target).__mro__:
        convert = _CONVERTERS.get(base.__module__.partition(".")[0])
        if convert is not None:
            return (_imported(convert, name) if isinstance(convert, str) else convert)(target)
    return target


def _imported(place: str, name: str) -> Any:
    module, _, function = place.partition(":")
    try:
        return getattr(import_module(module), function)
    except ImportError as error:
        raise ImportError(
            f"{name} is a model of Stable-Baselines3, which is not installed: pip install "
            f'"ope-gym[sb3]" ({error})'
        ) from error


def check_target(target: object, name: str = "target") -> Policy:
    """Return the target as a policy, or raise if it is none and none can be made of it."""
    policy = as_policy(target, name)
    if hasattr(policy, "log_prob") and hasattr(policy, "sample"):
        return policy  # type: ignore[no-any-return]
    if callable(target) and not isinstance(target, type):
        raise TypeError(
            f"{name} is the function {getattr(target, '__qualname__', target)!r}: actions alone do "
            "not say how probable they were. Give a Stable-Baselines3 model, a torch module that "
            "returns logits, or an object with log_prob(observations, actions) and "
            "sample(observations, rng)"
        )
    raise TypeError(
        f"{name} is {target!r}, which has no log_prob and sample: give a policy of "
        "ope_gym.policies, a Stable-Baselines3 model or its .zip file, a torch module that returns "
        "logits or a distribution, the number of a recorded policy, or 'last'"
    )


def policy_number(policies: Sequence[Policy], target: object, name: str = "target") -> int | None:
    """Return the number of the recorded policy that a target names, None if it names none.

    Args:
        policies: Recorded policies.
        target: A policy, the number of a recorded one, or "last".
        name: Name of the argument, for messages.
    """
    known = (
        f"a policy, the number of a recorded one (0 to {len(policies) - 1}), 'last' or a .zip file"
        if policies
        else "a policy: none is recorded"
    )
    if isinstance(target, str) and not is_saved(target):
        if target != "last":
            raise ValueError(f"{name} is {target!r}; give {known}")
        target = len(policies) - 1
    if isinstance(target, bool) or not isinstance(target, int | np.integer):
        return None
    if not 0 <= target < len(policies):
        raise ValueError(f"{name} is {target}; give {known}")
    return int(target)


def resolve_policy(policies: Sequence[Policy], target: Target, name: str = "target") -> Policy:
    """Return the policy that a target stands for.

    Args:
        policies: Recorded policies, `trajectories.policies`.
        target: A policy, or what `as_policy` makes one of; the number of a recorded one, or "last"
            for the last of them.
        name: Name of the argument, for messages.
    """
    number = policy_number(policies, target, name)
    if number is None:
        return check_target(target, name)
    policy = policies[number]
    if isinstance(policy, UnavailablePolicy):
        raise ValueError(
            f"{name} is {target!r}, but policy {number} cannot be asked for probabilities "
            f"({policy!r}): {policy.remedy}. Or give the policy itself (on the command line "
            "--target package.module:function, which returns it)"
        )
    return policy


def ask_once(policy: Policy, observations: Tree, actions: Tree) -> Policy:
    """Return the policy, after a question about the first row if its `probs` may turn out missing.

    A `TorchPolicy` does not know before whether its actions are finitely many.
    """
    late = isinstance(getattr(type(policy), "probs", None), property)
    if late and batches.length(observations):
        first = slice(0, 1)
        policy.log_prob(take(observations, first), take(actions, first))
    return policy


def log_prob_moments(policy: Policy, observations: Tree) -> tuple[FloatArray, FloatArray] | None:
    """Return mean and variance of ln π(a|s) when π itself draws a: (-entropy, Var), each (n,).

    Uses the policy's own method, else its `probs`; None where it has neither.
    """
    if hasattr(policy, "log_prob_moments"):
        return policy.log_prob_moments(observations)  # type: ignore[no-any-return]
    return moments_of(policy.probs(observations)) if isinstance(policy, FinitePolicy) else None


def policy_to_arrays(policy: Policy) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return the name and arrays that stand for a policy in a file; no arrays if unregistered."""
    if isinstance(policy, UnavailablePolicy):
        return policy.kind, policy.arrays()
    cls = type(policy)
    kind = cls.__dict__.get("kind")
    if isinstance(kind, str) and POLICY_KINDS.get(kind) is cls:
        return kind, policy.arrays()  # type: ignore[attr-defined]
    return f"{UNREGISTERED}{cls.__qualname__}", {}


def policy_from_arrays(kind: str, arrays: Mapping[str, NDArray[Any]]) -> Policy:
    """Return the policy that `policy_to_arrays` described, or an `UnavailablePolicy`."""
    cls = POLICY_KINDS.get(kind)
    if cls is None:
        return UnavailablePolicy(kind, arrays)
    try:
        return cls.from_arrays(arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the arrays {sorted(arrays)} do not make a policy of kind {kind!r}: {error!r}"
        ) from error


def _short(values: NDArray[Any]) -> str:
    text = np.array2string(values, precision=4, separator=", ", threshold=24, edgeitems=2)
    return " ".join(text.split())
