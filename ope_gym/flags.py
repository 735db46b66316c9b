"""Command-line flags of the options: declared here once, for `python -m ope_gym` and train.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ope_gym.data.roster import ORIGINS
from ope_gym.inference.intervals import KINDS, Betting, Bootstrap, IntervalKind
from ope_gym.models import NAMED
from ope_gym.options import BLOCK_STEPS, Compute, Options, OptionValues, Weighting
from ope_gym.scale.ray import RAY_HELP, ray_address

_DEFAULTS = Options()
FLAGS: dict[str, dict[str, Any]] = {
    "data": {
        "default": "auto",
        "choices": ("auto", "held-out", "all"),
        "help": "which episodes: held-out ones if there are any (auto), or all",
    },
    "q-model": {
        "default": "default",
        "choices": ("default", *NAMED, "none"),
        "help": "what auto and the doubly robust estimators learn action values with: default "
        "(tabular or linear, by the observations), dynamics (a learned model of the environment; "
        "slow), network or none",
    },
    "gamma": {"type": float, "default": _DEFAULTS.gamma, "help": "discount"},
    "interval": {
        "default": _DEFAULTS.kind.name,
        "choices": tuple(KINDS),
        "help": f"kind of interval: {', '.join(KINDS)}",
    },
    "level": {"type": float, "default": _DEFAULTS.level, "help": "confidence level"},
    "resamples": {
        "type": int,
        "default": Bootstrap().resamples,
        "help": "replicates of the bootstrap intervals",
    },
    "reward-range": {
        "type": float,
        "nargs": 2,
        "metavar": ("LOW", "HIGH"),
        "help": "range that every reward obeys, for betting",
    },
    "horizon": {"type": int, "help": "longest possible episode, for betting"},
    "cap": {
        "type": float,
        "default": _DEFAULTS.weighting.cap,
        "help": "upper bound of the weights of capped estimators",
    },
    "mixture": {
        "default": _DEFAULTS.weighting.mixture,
        "metavar": "N",
        "help": "most behaviours that weights are against, or all; auto: all up to 256",
    },
    "workers": {"type": int, "metavar": "N", "default": 1, "help": "processes that read files"},
    "ray": {
        "nargs": "?",
        "const": True,
        "default": False,
        "type": ray_address,
        "metavar": "ADDRESS",
        "help": RAY_HELP,
    },
    "block-steps": {
        "type": int,
        "metavar": "N",
        "default": BLOCK_STEPS,
        "help": "steps of files held in memory at once; files with fewer are read whole",
    },
    "scratch": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder for the weights of files, 16 bytes a step and more, which are else "
        "computed anew in every pass",
    },
    "seed": {"type": int, "default": _DEFAULTS.seed, "help": "of all draws"},
    "origin": {
        "choices": ORIGINS,
        "help": "whether the policy learned from episodes that are not held out, or was fixed "
        "apart from them; by default told from the recorded policies",
    },
}
HELD_OUT = {"auto": None, "held-out": True, "all": False}


def add_flags(parser: argparse.ArgumentParser, *names: str, **changes: dict[str, Any]) -> None:
    """Add flags to a parser; `changes` replace parts of a flag's declaration."""
    for name in names:
        flag = {**FLAGS[name], **changes.get(name.replace("-", "_"), {})}
        if flag.get("default") is not None and flag["default"] is not False:
            flag["help"] += " (default: %(default)s)"
        parser.add_argument(f"--{name}", **flag)


def options_from(args: argparse.Namespace, **more: Any) -> OptionValues:
    """Return the options that the flags of a command say; `more` go to `Compute`."""
    given = vars(args)
    compute = {
        name: given[name]
        for name in ("workers", "ray", "block_steps", "scratch")
        if given.get(name) is not None
    }
    found = OptionValues(
        held_out=HELD_OUT[given.get("data", "auto")],
        q_model=None if given.get("q_model") == "none" else given.get("q_model", "default"),
        gamma=args.gamma,
        weighting=_weighting(given),
        compute=Compute(**{**compute, **more}),
    )
    if "level" in given:
        found["level"] = args.level
    if "seed" in given:
        found["seed"] = args.seed
    if "interval" in given:
        found["interval"] = _interval(given)
    return found


def _weighting(given: dict[str, Any]) -> Weighting:
    mixture = given.get("mixture", _DEFAULTS.weighting.mixture)
    if isinstance(mixture, str) and mixture.lstrip("-").isdigit():
        mixture = int(mixture)
    return Weighting(given.get("cap", _DEFAULTS.weighting.cap), mixture)


def _interval(given: dict[str, Any]) -> str | IntervalKind:
    name = given["interval"]
    if name == "betting":
        if not given.get("reward_range"):
            raise ValueError("--interval betting: give --reward-range LOW HIGH, too")
        return Betting(tuple(given["reward_range"]), given.get("horizon"))
    if name in ("percentile", "bca"):
        return Bootstrap(given.get("resamples", Bootstrap().resamples), name)
    return str(name)
