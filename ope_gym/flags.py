"""Command-line flags of the options: declared here once, for `python -m ope_gym` and train.py."""

from __future__ import annotations

import argparse
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
        "help": "which episodes to use: the held-out ones if there are any (auto), only held-out "
        "ones, or all",
    },
    "q-model": {
        "default": "default",
        "choices": ("default", *NAMED, "none"),
        "help": "model of the action values for auto, DM and the doubly robust estimators: default "
        "(tabular or linear, depending on the observations), dynamics (learns a model of the "
        "environment; slow), network (needs torch) or none",
    },
    "gamma": {"type": float, "default": _DEFAULTS.gamma, "help": "discount factor"},
    "interval": {
        "default": _DEFAULTS.kind.name,
        "choices": (*KINDS, "none"),
        "help": "kind of confidence interval: ess-t is Student's t with the effective sample size "
        "in place of n, percentile and bca are bootstraps, none gives the values alone",
    },
    "level": {
        "type": float,
        "default": _DEFAULTS.level,
        "help": "confidence level of the intervals",
    },
    "resamples": {
        "type": int,
        "default": Bootstrap().resamples,
        "metavar": "N",
        "help": "number of bootstrap replicates, for --interval percentile and bca",
    },
    "reward-range": {
        "type": float,
        "nargs": 2,
        "metavar": ("LOW", "HIGH"),
        "help": "lowest and highest possible reward, needed by --interval betting",
    },
    "horizon": {
        "type": int,
        "metavar": "N",
        "help": "steps of the longest possible episode, for --interval betting (default: the "
        "recorded time limit)",
    },
    "cap": {
        "type": float,
        "default": _DEFAULTS.weighting.cap,
        "help": "upper bound of the weights, for the capped estimators",
    },
    "mixture": {
        "default": _DEFAULTS.weighting.mixture,
        "metavar": "N",
        "help": "weigh each episode against a mixture of at most N policies, or of all; auto takes "
        "all policies up to 256, and 64 if there are more",
    },
    "workers": {
        "type": int,
        "metavar": "N",
        "default": 1,
        "help": "number of threads for files that are read in blocks; of processes where policies "
        "are of your own classes, and for a q model of millions of steps",
    },
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
        "help": "read files in blocks of about N steps for each worker if they have more than that "
        "in all",
    },
    "seed": {
        "type": int,
        "default": _DEFAULTS.seed,
        "help": "seed of the bootstrap and of the q model",
    },
    "origin": {
        "choices": ORIGINS,
        "help": "whether the policy learned from episodes that are not held out, or was fixed "
        "independently of them (default: judged from the recorded policies)",
    },
}
COMMON = ("data", "q-model", "gamma", "interval", "level", "resamples", "cap", "mixture", "seed")
WITHOUT_BETTING = {
    "choices": tuple(kind for kind in KINDS if kind != "betting"),
    "help": FLAGS["interval"]["help"].removesuffix(", none gives the values alone"),
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
        for name in ("workers", "ray", "block_steps")
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


def _interval(given: dict[str, Any]) -> str | IntervalKind | None:
    name = given["interval"]
    for flag in ("reward_range", "horizon"):
        if name != "betting" and given.get(flag) is not None:
            spelt = flag.replace("_", "-")
            raise ValueError(f"--{spelt} has an effect only with --interval betting")
    if name == "betting":
        if not given.get("reward_range"):
            raise ValueError("--interval betting: give --reward-range LOW HIGH, too")
        return Betting(tuple(given["reward_range"]), given.get("horizon"))
    if name in ("percentile", "bca"):
        return Bootstrap(given.get("resamples", Bootstrap().resamples), name)
    return None if name == "none" else str(name)
