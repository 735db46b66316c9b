"""The paper's experiments as commands: `python -m studies bandit`.

To add a study: write `studies/NAME.py` with a `studies.frame.Study`, and name its class here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from studies.frame import Study

STUDIES: dict[str, str] = {  # name: module and class, in the order of the report
    "bandit": "studies.bandit:Bandit",
    "lemmas": "studies.lemmas:Lemmas",
    "adaptive": "studies.adaptive:Adaptive",
    "cartpole": "studies.cartpole:CartPole",
    "blackjack": "studies.blackjack:Blackjack",
}


def is_present(name: str) -> bool:
    """Whether the module of a study is in this checkout."""
    return importlib.util.find_spec(STUDIES[name].partition(":")[0]) is not None


def load_study(name: str, **settings: Any) -> Study:
    """The study of that name; `settings` replace the defaults of its fields."""
    module, _, kind = STUDIES[name].partition(":")
    study: Study = getattr(importlib.import_module(module), kind)(**settings)
    return study
