"""The last lines of a run: what its policy is worth, and which checkpoint is best."""

from __future__ import annotations

from ope_gym.online import FreeEstimate
from ope_gym.report import text
from ope_gym.report.free_values import band_in_words, free_headline
from wrappers.sb3.checkpoints import BestCheckpoint

__all__ = ["closing_lines", "leading", "no_value", "weighted_line"]

_SAFEST = "its interval has the highest lower end"
_MOSTLY = 0.5  # weight, or probability, of more than all else together


def closing_lines(
    estimate: FreeEstimate,
    best: BestCheckpoint | None,
    *,
    level: float,
    regime: str,
    deterministic: bool,
    saved: str,
    select: str = "lower",
) -> list[str]:
    """Return the answer first, then the best checkpoint, then what both rest on.

    Args:
        estimate: Value of the last policy.
        best: The best policy of the run.
        level: Confidence level of the intervals.
        regime: Regime of the steps; "" if fresh episodes are all there is.
        deterministic: whether the fresh episodes were played without drawing actions.
        saved: Where the best model is, in a sentence; "" if it is not kept.
        select: what the best policy was chosen by, "lower" or "value".
    """
    subject = "The deterministic policy" if deterministic else "The policy"
    lines = [free_headline(estimate, level, subject=subject)]
    if best is not None:
        lines.append(_best_line(best, estimate, level, saved, select))
    fresh = f"{estimate.episodes} fresh episodes"
    if deterministic or not regime:
        lines.append(f"Data: {fresh} of that policy.")
    elif "fresh" in estimate.shares:
        lines.append(
            f"Data: {regime}, the latest episodes of the training, and fresh ones, which have "
            f"{100 * estimate.shares['fresh']:.0f} % of the weight."
        )
    else:
        lines.append(
            f"Data: {regime}, the latest {estimate.episodes:,} episodes of the training; none was "
            "played for this."
        )
    learned = estimate.shares.get("simulation", 0.0)
    if learned > _MOSTLY:
        lines[-1] += (
            f" A model of the environment, learned from its steps, has {100 * learned:.0f} % of "
            "the weight."
        )
    return lines


def leading(estimate: FreeEstimate, highest: float) -> str:
    """Return what to add to the line of a policy that has become the choice; nothing if it is red.

    Args:
        estimate: Value of the policy.
        highest: value of any policy.
    """
    if estimate.verdict.colour == "red":
        return ""
    best = estimate.value >= highest
    return " The best so far." if best else f" The safest choice so far: {_SAFEST}."


def weighted_line(free: bool) -> str:
    """Return the line above the closing report: what it is, and why it says something else.

    Args:
        free: whether the value above it rests on the steps of the training.
    """
    why = "whole episodes of several policies, each counted by how likely this one makes it"
    if free:
        why += "; usually far less sure than the value above, which learns from every step"
    return f"From recorded episodes, with importance weights ({why}):"


def no_value(timesteps: int) -> str:
    """Return the only line of a run in which no episode has ended."""
    return (
        f"No episode has ended in {timesteps:,} timesteps, so nothing can be said about the "
        "value: train longer, give the training environments a time limit (max_episode_steps), or "
        "play fresh episodes with OPECallback(eval_env)."
    )


def _best_line(
    best: BestCheckpoint, last: FreeEstimate, level: float, saved: str, select: str
) -> str:
    """Say which policy was chosen; the most probable one is praised, another is explained."""
    where = f" {saved}" if saved else ""
    if best.policies == 1:
        return f"No other policy was evaluated.{where}"
    e, this = best.estimate, best.timesteps == last.timesteps
    reason = _SAFEST if select == "lower" else "it has the highest value"
    if e.verdict.colour == "red":
        which = "this one" if this else f"the one after {e.timesteps:,} timesteps"
        return f"No policy can be called the best: {which} has a red value, but {reason}.{where}"
    name = "this one"
    if not this:
        off = best.value - e.value
        # the upper end may have been cut at a bound, which does not move with the value
        ends = e.possible(e.low + off), max(e.possible(e.high + off), e.possible(e.value))
        band = band_in_words(best.value, *ends, level)
        name = (
            f"the policy after {e.timesteps:,} timesteps, worth {band} now that it has been chosen"
        )
    chance = f"of {best.policies:,} it is the best with probability {text.chance(best.probability)}"
    if best.probability < _MOSTLY:
        choice = "The safest choice" if select == "lower" else "The best guess"
        return f"{choice} is {name}: {reason}. Another may be better: {chance}.{where}"
    keep = "It is also the one to keep" if this else f"The one to keep is {name}"
    return f"{keep}: {chance}.{where}"
