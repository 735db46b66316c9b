"""The last lines of a run: what its policy is worth, and which checkpoint is best."""

from __future__ import annotations

from ope_gym.online import FreeEstimate
from ope_gym.report import text
from ope_gym.report.free_values import band_in_words, free_headline
from wrappers.sb3.checkpoints import BestCheckpoint

__all__ = ["closing_lines", "no_value"]

_UNSURE = "It is uncertain which policy is the best; the best guess"
_MOSTLY = 0.5  # weight, or probability, of more than all else together


def closing_lines(
    estimate: FreeEstimate,
    best: BestCheckpoint | None,
    *,
    level: float,
    regime: str,
    deterministic: bool,
    saved: str | None,
) -> list[str]:
    """Return the answer first, then the best checkpoint, then what both rest on.

    Args:
        estimate: of the last policy.
        best: the best policy of the run.
        level: of the intervals.
        regime: of the steps, as everywhere; "" if fresh episodes are all there is.
        deterministic: whether the fresh episodes were played without drawing actions.
        saved: file of the best model, None if it is not kept.
    """
    subject = "The deterministic policy" if deterministic else "The policy"
    lines = [free_headline(estimate, level, subject=subject)]
    if best is not None:
        lines.append(_best_line(best, estimate, level, saved))
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


def no_value(timesteps: int) -> str:
    """Return the only line of a run in which no episode has ended."""
    return (
        f"No episode has ended in {timesteps:,} timesteps, so nothing can be said about the "
        "value: train longer, give the training environments a time limit (max_episode_steps), or "
        "play fresh episodes with OPECallback(eval_env)."
    )


def _best_line(best: BestCheckpoint, last: FreeEstimate, level: float, saved: str | None) -> str:
    where = "" if saved is None else f" It is in {saved}."
    e = best.estimate
    off = best.value - e.value
    # the upper end may have been cut at a bound, which does not move with the value
    ends = e.possible(e.low + off), max(e.possible(e.high + off), e.possible(e.value))
    band = band_in_words(best.value, *ends, level)
    chance = f"of {best.policies:,} it is the best with probability {text.chance(best.probability)}"
    if best.policies == 1:
        return f"No other policy was evaluated.{where}"
    doubtful = best.probability < _MOSTLY
    if e.timesteps == last.timesteps:
        known = f"{_UNSURE} is this one" if doubtful else ""
        return f"{known or 'It is also the one to keep'}: {chance}.{where}"
    known = _UNSURE if doubtful else "The one to keep"
    return (
        f"{known} is the policy after {e.timesteps:,} timesteps, worth {band} now that it "
        f"has been chosen: {chance}.{where}"
    )
