"""Show the values of `ope_gym.online`: in words, as numbers by tag, in TensorBoard.

Tags are `ope/provisional/value|low|high`, `ope/settled/...`, `ope/fresh/...`, `ope/fresh_episodes`
(about how many would make you as sure) and `ope/verdict` (0 red, 1 amber, 2 green).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ope_gym.report import events, text
from ope_gym.report.documents import PLUGIN, encode, free_document
from ope_gym.report.scalars import VERDICTS
from ope_gym.verdict import Reason

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from ope_gym.online import FreeEstimate

__all__ = ["FreeWriter", "band_in_words", "free_headline", "free_scalars", "in_words"]

_KINDS = ("provisional", "settled", "fresh")


def free_scalars(estimate: FreeEstimate, kind: str | None = None) -> dict[str, float]:
    """Return the numbers of an estimate by tag; a band that is not finite is left out as a whole.

    Args:
        estimate: Value to show.
        kind: "provisional", "settled" or "fresh"; by default one of the first two.
    """
    kind = _checked(kind, estimate)
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    if not all(map(math.isfinite, ends.values())):
        return {}
    numbers = {f"ope/{kind}/{end}": float(number) for end, number in ends.items()}
    if kind == "provisional":
        if math.isfinite(estimate.claim):
            numbers["ope/fresh_episodes"] = float(estimate.claim)
        numbers["ope/verdict"] = float(VERDICTS.index(estimate.verdict.colour))
    return numbers


def free_headline(
    estimate: FreeEstimate, level: float = 0.95, *, subject: str = "The policy"
) -> str:
    """Say in a sentence or two what the policy is worth, how sure that is, and whether to use it.

    Args:
        estimate: Value to show.
        level: Confidence level of its interval.
        subject: Who is worth that.
    """
    doubtful = estimate.known and estimate.verdict.colour == "red"
    verb = "" if doubtful else "is "  # or "may be worth"
    return f"{subject} after {estimate.timesteps:,} timesteps {verb}{in_words(estimate, level)}"


def in_words(estimate: FreeEstimate, level: float = 0.95) -> str:
    """Say what a policy is worth, how sure that is, and whether to use it.

    As in "worth 412 (95 %: 380 to 444), as sure as about 23 fresh episodes would make you." A value
    that is red "may be worth" that. Red and amber are named, with the reason.
    """
    verdict = estimate.verdict
    worth = f"worth {band_in_words(estimate.value, estimate.low, estimate.high, level)}"
    why = "; ".join(map(str, verdict.against))
    if not estimate.known:
        return f"{why}."
    if verdict.colour == "red":
        return f"may be {worth}, but do not use this number (red): {why}."
    if estimate.steady:
        worth += "; its episodes all return about the same"
    elif estimate.played:
        worth += f", from {estimate.episodes} fresh episodes"
    elif math.isfinite(estimate.claim):
        worth += f", {Reason('sure', fresh=estimate.claim)}"
    return f"{worth}." + (f" Use with care (amber): {why}." if why else "")


def band_in_words(value: float, low: float, high: float, level: float = 0.95) -> str:
    """Return a value and its interval, if it has ends, with as many digits as these bear out.

    >>> band_in_words(412.345, 380.1, 444.6), band_in_words(-0.51234, -0.54, -0.49, 0.9)
    ('412 (95 %: 380 to 445)', '-0.512 (90 %: -0.540 to -0.490)')
    """
    if not math.isfinite(high - low):  # the reason is in the verdict
        return text.rounded(value, None)
    digits = text.places((high - low) / 4)  # about a standard error
    numbers = [text.rounded(x, digits) for x in (value, low, high)]
    return f"{numbers[0]} ({text.level(level)}: {numbers[1]} to {numbers[2]})"


class FreeWriter(events.Closing):
    """Write values of `ope_gym.online` to a TensorBoard run.

    A provisional value goes to the step at which it was given, a settled one to the step of the
    policy that it belongs to. The OPE tab shows both, with what they rest on; *Custom Scalars* has
    their bands.

    Args:
        destination: `SummaryWriter` of the training loop, which is left open; or a folder.
        level: confidence level of the intervals, for the headline.
    """

    def __init__(self, destination: events.Destination, *, level: float = 0.95) -> None:
        self._log = events.EventLog(destination)
        self._level, self._laid_out = level, False
        self._details = {
            kind: events.Documents(self._log, f"ope/{kind}/details", PLUGIN) for kind in _KINDS
        }

    def add(self, estimate: FreeEstimate, kind: str | None = None) -> None:
        """Write the numbers of an estimate, and its details for the OPE tab.

        Args:
            estimate: what to write; left out if its value or an end of its band is not finite.
            kind: "provisional", "settled" or "fresh"; by default one of the first two.
        """
        kind = _checked(kind, estimate)
        numbers = free_scalars(estimate, kind)
        if not numbers:
            return
        if not self._laid_out:
            self._log.add(_layout(kind), 0)
            self._laid_out = True
        self._log.add(events.scalars(numbers), estimate.timesteps)
        document = free_document(
            estimate,
            kind,
            headline=free_headline(estimate, self._level),
            level=self._level,
        )
        self._details[kind].add(encode(document), estimate.timesteps)

    def close(self) -> None:
        """Write what is left; flush, and do not close, a `SummaryWriter` that was handed in."""
        self._log.close()


def _checked(kind: str | None, estimate: FreeEstimate) -> str:
    kind = kind or ("settled" if estimate.settled else "provisional")
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(map(repr, _KINDS))}")
    return kind


def _layout(first: str) -> Summary:
    """Return the charts of the Custom Scalars page.

    Args:
        first: Kind of the first value; of a run that begins with a fresh one, there are no others.
    """
    alone = first == "fresh"
    bands = ("fresh",) if alone else ("settled", "provisional")
    values = [f"ope/{kind}/value$" for kind in _KINDS]
    returns = ["rollout/(return|ep_rew_mean)$", "eval/mean_reward$"]
    lines = {"all values, return of rollouts": [*values, *returns]}
    if not alone:
        lines["as sure as this many fresh episodes"] = ["ope/fresh_episodes$"]
    return events.layout({f"{kind}, with its interval": f"ope/{kind}" for kind in bands}, lines)
