"""Facts beside the columns of our own tables, and of Minari datasets, as JSON.

They are the spaces, the time limit, policies and schedules. There is no pickle in it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data import space_json
from ope_gym.data.paths import MALFORMED
from ope_gym.data.schedules import Schedule
from ope_gym.data.schema import Columns
from ope_gym.data.spaces import NUMERIC_DTYPES, Space
from ope_gym.data.store import describe_policy
from ope_gym.policies import Policy, policy_from_arrays

KEY = "ope_gym"
VERSION = 1


class Header(NamedTuple):
    """Facts that our own table has beside its columns.

    Args:
        observation: The columns of the observations.
        action: The columns of the actions.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: The time limit, None if there is none.
        policies: By number.
        schedules: Which policy acts when, where policies change inside episodes.
        finite: Whether all observations and log-probabilities are finite.
    """

    observation: Any
    action: Any
    observation_space: Space | None
    action_space: Space | None
    horizon: int | None
    policies: tuple[Policy, ...]
    schedules: tuple[Schedule, ...]
    finite: bool


def header_to_json(data: Columns, observation: Any, action: Any) -> str:
    """Describe trajectories whose batches are in these columns."""
    numbers = [x for x in batches.leaves(data.observations) if x.dtype.kind == "f"]
    finite = all(np.isfinite(x).all() for x in [*numbers, data.log_probs])
    described = {
        "version": VERSION,
        **beside_columns(data, "the table"),
        "observation": _spec_to_json(observation),
        "action": _spec_to_json(action),
        "finite": bool(finite),
    }
    return json.dumps(described, allow_nan=False)


def header_from_json(text: str | bytes, name: str) -> Header:
    """Return what `header_to_json` described; `name` is that of the table, for messages."""
    try:
        data = json.loads(text)
        check_version(data)
        return Header(
            _spec_from_json(data["observation"]),
            _spec_from_json(data["action"]),
            space_json.space_from_json(data["observation_space"]),
            space_json.space_from_json(data["action_space"]),
            data["horizon"],
            policies_from_json(data),
            schedules_from_json(data),
            bool(data["finite"]),
        )
    except MALFORMED as error:
        raise ValueError(
            f"{name}: what ope_gym wrote beside its columns cannot be read: {error}; remove the "
            f"metadata {KEY!r} to read it like any other table"
        ) from error


# Parts that Minari datasets have, too --------------------------------------------------------


def beside_columns(data: Columns, place: str) -> dict[str, Any]:
    """Describe the spaces, the time limit, policies and schedules.

    Args:
        data: The trajectories.
        place: Where they will be stored, for the warning of policies that cannot be.
    """
    return {
        **space_json.env_to_json(data.observation_space, data.action_space, data.horizon),
        "policies": [_policy_to_json(policy, place) for policy in data.policies],
        "schedules": [
            {"clocks": s.clocks.tolist(), "policies": s.policies.tolist()} for s in data.schedules
        ],
    }


def check_version(data: Mapping[str, Any]) -> None:
    """Raise if a later version wrote it."""
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']} is not known; update ope_gym")


def policies_from_json(data: Mapping[str, Any]) -> tuple[Policy, ...]:
    """Return the policies."""
    return tuple(
        policy_from_arrays(
            policy["kind"], {k: _array_from_json(x) for k, x in policy["arrays"].items()}
        )
        for policy in data["policies"]
    )


def schedules_from_json(data: Mapping[str, Any]) -> tuple[Schedule, ...]:
    """Return the schedules."""
    return tuple(Schedule(s["clocks"], s["policies"]) for s in data["schedules"])


def _policy_to_json(policy: Policy, place: str) -> dict[str, Any]:
    kind, arrays = describe_policy(policy, place)
    return {"kind": kind, "arrays": {name: _array_to_json(x) for name, x in arrays.items()}}


def _array_to_json(values: NDArray[Any]) -> dict[str, Any]:
    array = np.asarray(values, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in NUMERIC_DTYPES:
        raise TypeError(f"an array of a policy has dtype {array.dtype}, which cannot be stored")
    text = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": text}


def _array_from_json(data: Mapping[str, Any]) -> NDArray[Any]:
    if data["dtype"] not in NUMERIC_DTYPES:
        raise ValueError(f"an array of a policy has the unknown dtype {data['dtype']!r}")
    dtype = np.dtype(data["dtype"])
    flat = np.frombuffer(base64.b64decode(data["base64"], validate=True), dtype=dtype)
    return flat.reshape(data["shape"]).astype(dtype.newbyteorder("="))


def _spec_to_json(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return {"tuple": [_spec_to_json(part) for part in spec]}
    if isinstance(spec, dict):
        return {"dict": [[key, _spec_to_json(part)] for key, part in spec.items()]}
    return spec


def _spec_from_json(data: Any) -> Any:
    if isinstance(data, str):
        return data
    ((kind, content),) = data.items()
    if kind == "tuple":
        return tuple(_spec_from_json(part) for part in content)
    if kind == "dict":
        return {str(key): _spec_from_json(part) for key, part in content}
    raise ValueError(f"unknown layout {kind!r} of a column")
