"""The values of a training run in words: the surer one first, then the other one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ope_gym.report import text
from ope_gym.report.free_values import in_words

if TYPE_CHECKING:
    from ope_gym.arrays import FloatArray
    from ope_gym.online import FreeEstimate
    from ope_gym.results import Evaluation

__all__ = ["Fresh", "fresh_value", "is_surer", "surer_first", "without_reward"]


class Fresh(NamedTuple):
    """Mean return of fresh rollouts of a policy, and its standard error."""

    value: float
    standard_error: float
    episodes: int

    def __str__(self) -> str:
        mean = f"{self.value:.4g} ± {self.standard_error:.2g}"
        return f"{self.episodes:,} fresh rollouts: {mean}"


def fresh_value(returns: FloatArray) -> Fresh | None:
    """Return the mean of the returns of fresh rollouts with its error; None if there are none."""
    n = returns.size
    if n == 0:
        return None
    error = float(returns.std(ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    return Fresh(float(returns.mean()), error, n)


def surer_first(
    evaluation: Evaluation,
    free: FreeEstimate | None,
    level: float,
    truth: Fresh | None = None,
) -> str:
    """Return the table of importance weights and the value from single steps, the surer one first.

    Args:
        evaluation: Evaluation by importance weights, with the estimators to show.
        free: Value of the same policy from single steps, if there is one.
        level: Confidence level of its interval.
        truth: Its value from fresh rollouts, if known.
    """
    table = evaluation.table(*truth[:2]) if truth else evaluation.table()
    if free is None:
        return table
    words = in_words(free, level)
    if not is_surer(free, evaluation):
        step_by_step = f"step by step, as OPECallback values a policy: {words}"
        return f"{table}\n{text.wrap(step_by_step)}"
    verb = "" if free.verdict.colour == "red" else "is "  # or "may be worth"
    headline = text.wrap(f"{text.sentence(evaluation.target)} {verb}{words}", "")
    return f"{headline}\n\nBy importance weights, which need whole episodes:\n{table}"


def is_surer(free: FreeEstimate, evaluation: Evaluation) -> bool:
    """Return whether the value from single steps comes first: if not red, by its error."""
    colours = free.verdict.colour, evaluation.best.verdict.colour
    if "red" in colours and colours[0] != colours[1]:
        return colours[1] == "red"
    return bool(free.fresh_episodes > np.nan_to_num(evaluation.best.fresh_episodes))


def without_reward(returns: FloatArray, env: str) -> str:
    """Return the words for a run in which all episodes returned the same; "" for others."""
    if np.ptp(returns) > 0:
        return ""
    return text.wrap(
        f"Nothing was learned: all {len(returns):,} episodes returned {returns[0]:g}, so whatever "
        f"{env} rewards was never reached, and nothing tells a good action from a bad one. More "
        "--rollouts may reach it by chance, or an --agent that explores in another way, such as "
        "dqn or sac.",
        "",
    )
