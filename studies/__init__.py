"""The paper's experiments as commands: `python -m studies bandit`.

To add a study: write `studies/NAME.py` with a `studies.frame.Study`, and name its class here.
"""

from __future__ import annotations

import importlib
from typing import Any

from studies.frame import Study

STUDIES: dict[str, str] = {  # name: module and class, in the order of the report
    "bandit": "studies.bandit:Bandit",
    "lemmas": "studies.lemmas:Lemmas",
    "adaptive": "studies.adaptive:Adaptive",
    "cartpole": "studies.cartpole:CartPole",
    "blackjack": "studies.blackjack:Blackjack",
    "coverage": "studies.coverage:Coverage",
    "beyond": "studies.beyond:Beyond",
}

BESIDE: dict[str, tuple[dict[str, Any], ...]] = {  # other settings that `all` runs, too
    "cartpole": ({"env": "CartPole-v0"}, {"weighting": "reward-to-go"}),
    "blackjack": ({"reward_model": "cross-fit"},),
}


def study_class(name: str) -> type[Study]:
    """The class of the study of that name."""
    module, _, kind = STUDIES[name].partition(":")
    found: type[Study] = getattr(importlib.import_module(module), kind)
    return found


def load_study(name: str, **settings: Any) -> Study:
    """The study of that name; `settings` replace the defaults of its fields."""
    return study_class(name)(**settings)
