"""Facts beside the columns of our own tables, and of Minari datasets, as JSON without pickle.

They are the spaces, the time limit, policies and schedules.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ope_gym import batches
from ope_gym.data import space_json
from ope_gym.data.checks import check_horizon
from ope_gym.data.encoding import from_npy, to_npy
from ope_gym.data.schedules import Schedule, check_schedules
from ope_gym.data.schema import Columns
from ope_gym.data.spaces import Space
from ope_gym.data.store import describe_policy
from ope_gym.files import MALFORMED
from ope_gym.policies import Policy, policy_from_arrays

KEY = "ope_gym"
VERSION = 1


class Header(NamedTuple):
    """Facts beside the columns; by default those of a table that is not ours.

    Args:
        version: Version of the header, None for a table that is not ours.
        observation: Columns of the observations; None in a Minari dataset.
        action: Columns of the actions; None in a Minari dataset.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: Time limit, None if there is none.
        policies: Policies by number.
        schedules: Which policy acts when, where policies change inside episodes.
        finite: Whether all observations and log-probabilities are finite.
    """

    version: int | None = None
    observation: Any = None
    action: Any = None
    observation_space: Space | None = None
    action_space: Space | None = None
    horizon: int | None = None
    policies: tuple[Policy, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    finite: bool = True


def header_to_json(data: Columns, place: str) -> dict[str, Any]:
    """Describe the spaces, the time limit, policies and schedules.

    Args:
        data: The trajectories.
        place: Where they will be stored, for the warning of policies that cannot be.
    """
    described = [describe_policy(policy, place) for policy in data.policies]
    numbers = [x for x in batches.leaves(data.observations) if x.dtype.kind == "f"]
    return {
        "version": VERSION,
        **space_json.env_to_json(data.observation_space, data.action_space, data.horizon),
        "policies": [
            {"kind": kind, "arrays": {name: _encoded(to_npy(x)) for name, x in arrays.items()}}
            for kind, arrays in described
        ],
        "schedules": [
            {"clocks": s.clocks.tolist(), "policies": s.policies.tolist()} for s in data.schedules
        ],
        "finite": all(bool(np.isfinite(x).all()) for x in [*numbers, data.log_probs]),
    }


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts with a checksum of their text, whatever the order of the names."""
    plain = {name: fact for name, fact in facts.items() if name != "crc"}
    text = json.dumps(plain, sort_keys=True, allow_nan=False)
    return plain | {"crc": zlib.crc32(text.encode())}


def header_from_json(data: str | bytes | Mapping[str, Any], name: str) -> Header:
    """Return what `header_to_json` described, the columns of observations and actions included.

    Args:
        data: JSON.
        name: Name of the table or dataset, for messages.
    """
    try:
        facts = json.loads(data) if isinstance(data, str | bytes) else data
        if facts["version"] != VERSION:
            raise ValueError(f"version {facts['version']} is not known; update ope_gym")
        if sealed(dict(facts)) != facts:
            raise ValueError("it does not match its checksum")
        policies = tuple(
            policy_from_arrays(
                policy["kind"],
                {k: from_npy(base64.b64decode(x)) for k, x in policy["arrays"].items()},
            )
            for policy in facts["policies"]
        )
        schedules = tuple(Schedule(s["clocks"], s["policies"]) for s in facts["schedules"])
        check_schedules(schedules, len(policies))
        return Header(
            VERSION,
            _spec(facts.get("observation")),
            _spec(facts.get("action")),
            space_json.space_from_json(facts["observation_space"]),
            space_json.space_from_json(facts["action_space"]),
            check_horizon(facts["horizon"]),
            policies,
            schedules,
            bool(facts["finite"]),
        )
    except MALFORMED as error:
        raise ValueError(
            f"{name}: what ope_gym wrote beside its columns cannot be read: {error}; remove the "
            f"metadata {KEY!r} to read it like any other"
        ) from error


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _spec(data: Any) -> Any:
    """Return the columns of a batch: in JSON, a tuple is a list."""
    if isinstance(data, list):
        return tuple(map(_spec, data))
    if isinstance(data, dict):
        return {key: _spec(part) for key, part in data.items()}
    if data is None or isinstance(data, str):
        return data
    raise ValueError(f"{data!r} is no name of a column")
