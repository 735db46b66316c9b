"""When a vector environment resets its sub-envs: one row of a table for each autoreset mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray


@dataclass(frozen=True)
class Autoreset:
    """How a vector env treats a sub-env whose episode has ended.

    Args:
        by_hand: Whether the loop has to reset it before the next step.
        skips_step: Whether the next step only resets it, so that its row is not a transition.
    """

    by_hand: bool = False
    skips_step: bool = False

    def restarted(
        self, ended_before: NDArray[np.bool_], ended_now: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | None:
        """Return (N,) which sub-envs the env reset in a step; None if it never does.

        Args:
            ended_before: (N,) which had ended when the step began.
            ended_now: (N,) which ended in the step.
        """
        if self.by_hand:
            return None
        return ended_before if self.skips_step else ended_now


SAME_STEP = Autoreset()
AUTORESETS = {
    AutoresetMode.NEXT_STEP: Autoreset(skips_step=True),
    AutoresetMode.SAME_STEP: SAME_STEP,
    AutoresetMode.DISABLED: Autoreset(by_hand=True),
}


def autoreset_of(env: VectorEnv[Any, Any, Any]) -> Autoreset:
    """Return how an env resets; raise if its metadata does not say."""
    try:
        return AUTORESETS[AutoresetMode(env.metadata["autoreset_mode"])]
    except (KeyError, ValueError):
        raise ValueError(
            f"env.metadata['autoreset_mode'] of {env} is "
            f"{env.metadata.get('autoreset_mode', 'missing')}: it decides which rows are "
            f"transitions; set it to one of {[str(mode) for mode in AUTORESETS]}"
        ) from None
