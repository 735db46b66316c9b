"""The last lines of a run: what its policy is worth, and which checkpoint is best."""

from __future__ import annotations

from ope_gym.online import FreeEstimate
from ope_gym.report import text
from ope_gym.report.free_values import band_in_words, free_headline
from wrappers.checkpoints import BestCheckpoint

__all__ = ["WEIGHTED", "closing_lines", "no_value"]

WEIGHTED = (
    "From recorded episodes, with importance weights (whole episodes of several policies, each "
    "counted by how likely this one makes it; usually far less sure than the value above):"
)
_MOSTLY = 0.5  # weight, or probability, of more than all else together


def closing_lines(
    estimate: FreeEstimate, best: BestCheckpoint | None, *, level: float, saved: str
) -> list[str]:
    """Return the answer first, then the best checkpoint, then what both rest on.

    Args:
        estimate: Value of the last policy.
        best: The best policy of the run.
        level: Confidence level of the intervals.
        saved: Where the best model is, in a sentence; "" if it is not kept.
    """
    subject = "The deterministic policy" if estimate.deterministic else "The policy"
    lines = [free_headline(estimate, level, subject=subject)]
    if best is not None:
        lines.append(f"{_best_line(best, estimate, level)} {saved}".rstrip())
    lines.append(_data_line(estimate))
    return lines


def no_value(timesteps: int) -> str:
    """Return the only line of a run in which no episode has ended."""
    return (
        f"No episode has ended in {timesteps:,} timesteps, so nothing can be said about the "
        "value: train longer, give the training environments a time limit (max_episode_steps), or "
        "play fresh episodes with OPECallback(eval_env)."
    )


def _data_line(estimate: FreeEstimate) -> str:
    if estimate.played:
        return f"Data: {estimate.episodes} fresh episodes of that policy."
    fresh, learned = (estimate.shares.get(x, 0.0) for x in ("fresh", "simulation"))
    more = f", and fresh ones, which have {100 * fresh:.0f} % of the weight."
    episodes = "episode" if estimate.episodes == 1 else f"{estimate.episodes:,} episodes"
    line = f"Data: in-sample, the latest {episodes} of the training"
    line += more if fresh else "; none was played for this."
    if learned > _MOSTLY:
        line += (
            f" A model of the environment, learned from its steps, has {100 * learned:.0f} % of "
            "the weight."
        )
    return line


def _best_line(best: BestCheckpoint, last: FreeEstimate, level: float) -> str:
    """Say which policy was chosen, and how surely it is the best."""
    if best.policies == 1:
        return "No other policy was evaluated."
    e, this = best.estimate, best.timesteps == last.timesteps
    if e.verdict.colour == "red":
        which = "this one" if this else f"the one after {e.timesteps:,} timesteps"
        return (
            f"No policy can be called the best: {which} has the highest value, noise apart, but it "
            "is red."
        )
    name = "this one"
    if not this:
        off = best.value - e.value
        # the upper end may have been cut at a bound, which does not move with the value
        ends = e.possible(e.low + off), max(e.possible(e.high + off), e.possible(e.value))
        band = band_in_words(best.value, *ends, level)
        name = f"the policy after {e.timesteps:,} timesteps, worth {band} beside its neighbours"
    chance = f"of {best.policies:,} it is the best with probability {text.chance(best.probability)}"
    if best.probability < _MOSTLY:
        return f"The best guess is {name}: another may be better, {chance}."
    return f"{'It is also the one to keep' if this else f'The one to keep is {name}'}: {chance}."
