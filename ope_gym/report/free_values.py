"""Show the values of `ope_gym.online`: numbers by tag, bands in TensorBoard, a sentence.

Tags are `ope/provisional/value|low|high`, `ope/settled/...`, `ope/fresh/...`, `ope/worth` (about so
many fresh episodes would make you as sure) and `ope/verdict` (0 red, 1 amber, 2 green).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from ope_gym.online import FreeEstimate

__all__ = ["COLOURS", "FreeWriter", "band_in_words", "colour", "free_scalars", "in_words"]

COLOURS = ("red", "amber", "green")
_AMBER, _GREEN = 4.0, 10.0  # fresh episodes
_KINDS = ("provisional", "settled", "fresh")


def colour(worth: float) -> str:
    """Return red below 4 fresh episodes, amber below 10, else green.

    >>> colour(3.9), colour(4.0), colour(10.0), colour(float("nan"))
    ('red', 'amber', 'green', 'red')
    """
    if not worth >= _AMBER:
        return "red"
    return "amber" if worth < _GREEN else "green"


def free_scalars(estimate: FreeEstimate, kind: str | None = None) -> dict[str, float]:
    """Return the numbers of an estimate by tag; a band that is not finite is left out as a whole.

    Args:
        estimate: to show.
        kind: "provisional", "settled" or "fresh"; by default one of the first two.
    """
    kind = kind or ("settled" if estimate.settled else "provisional")
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(map(repr, _KINDS))}")
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    if not all(map(math.isfinite, ends.values())):
        return {}
    found = {f"ope/{kind}/{end}": float(number) for end, number in ends.items()}
    if kind == "provisional":
        if math.isfinite(estimate.worth) and not estimate.steady:
            found["ope/worth"] = float(estimate.worth)
        verdict = "green" if estimate.steady else colour(estimate.worth)
        found["ope/verdict"] = float(COLOURS.index(verdict))
    return found


def in_words(estimate: FreeEstimate, level: float = 0.95) -> str:
    """Return "412 (95 %: 380 to 444), as sure as about 23 fresh episodes would make you"."""
    worth = estimate.worth
    band = band_in_words(estimate.value, estimate.low, estimate.high, level)
    if estimate.steady:
        return f"{band}, as all recent episodes are"
    if not math.isfinite(worth):
        return band
    episodes = f"{worth:,.0f} fresh episode{'' if round(worth) == 1 else 's'}"
    return f"{band}, as sure as about {episodes} would make you"


def band_in_words(value: float, low: float, high: float, level: float = 0.95) -> str:
    """Return a value and its interval, with as many digits as the interval bears out.

    >>> band_in_words(412.345, 380.1, 444.6), band_in_words(-0.51234, -0.54, -0.49, 0.9)
    ('412 (95 %: 380 to 445)', '-0.512 (90 %: -0.540 to -0.490)')
    """
    half = 0.5 * (high - low)
    digits = 1
    if math.isfinite(half) and half > 0:
        digits = max(0, 1 - math.floor(math.log10(half)))
    numbers = [f"{x:,.{digits}f}" for x in (value, low, high)]
    return f"{numbers[0]} ({100 * level:g} %: {numbers[1]} to {numbers[2]})"


class FreeWriter:
    """Write values of `ope_gym.online` to a TensorBoard run.

    A provisional value goes to the step at which it was given, a settled one to the step of the
    policy that it belongs to. *Custom Scalars* shows both with their bands.

    Args:
        writer: of the training loop; it is left open.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer: Any = writer
        self._laid_out = False

    def add(self, estimate: FreeEstimate, kind: str | None = None) -> None:
        """Write an estimate; see `free_scalars`."""
        if not self._laid_out:
            self._writer.add_custom_scalars(free_layout())
            self._laid_out = True
        for tag, number in free_scalars(estimate, kind).items():
            self._writer.add_scalar(tag, number, estimate.timesteps)


def free_layout() -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the Custom Scalars page; TensorBoard wants a band's tags in order."""
    bands = {
        kind: ["Margin", [f"ope/{kind}/{end}" for end in ("value", "low", "high")]]
        for kind in reversed(_KINDS)  # TensorBoard shows bands in reverse, after the lines
    }
    lines = [f"ope/{kind}/value$" for kind in _KINDS]
    return {
        "Value of the policy": {
            "values and mean return": ["Multiline", ["rollout/(return|ep_rew_mean)$", *lines]],
            **bands,
        },
        "Fresh episodes that would make you as sure": {"worth": ["Multiline", ["ope/worth$"]]},
    }
