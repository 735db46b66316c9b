"""The command for continuous integration: may a new checkpoint replace the old one."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import ope_gym
from ope_gym.analysis.duel_rules import Rules
from ope_gym.commands.inputs import CommandResult, Output, Policy, Recorded, target_named
from ope_gym.commands.signature import takes
from ope_gym.commands.values import progress_bar
from ope_gym.report import text

if TYPE_CHECKING:
    from ope_gym import Duel
    from ope_gym.policies import Target
    from ope_gym.scale.sources import Source


class Outcome(IntEnum):
    """The exit codes of the gate."""

    PASS = 0
    FAIL = 1
    UNDECIDED = 2
    UNABLE = 3


@takes(
    lambda: Rules,
    *("bounds", "reward_range", "deviation", "symmetric", "margin", "limit"),
    *("level", "horizon", "gamma", "seed"),
)
def gate(
    recorded: Recorded,
    *,
    env: Annotated[str, "ID"],
    new: Policy = "last",
    old: Policy = "previous",
    state: Output | None = None,
    json: Output | None = None,
    **options: Any,
) -> CommandResult:
    """Decide with few fresh episodes whether a new checkpoint may replace the old one.

    Both policies play the environment, in pairs or one policy drawn by lot, until it is certain
    whether the new one is better; recorded episodes only speed this up. You may look after every
    episode: the total probability of a wrong pass or fail is at most 1 - level. This rests on one
    of --bounds, --reward-range, --deviation and --symmetric, which must be true.

    With --margin M the new one passes if it is certain to be at most M worse than the old one, and
    fails if it is certain to be more than M worse.

    exit code, for CI:
      0  pass: better than the old one, or at most the margin worse
      1  fail: worse than the old one, by more than the margin
      2  undecided: neither is certain after --limit pairs of episodes; raise it,
         or give a --margin, with a new file for --state: a file keeps its rules
      3  the command could not be run

    With --state, a stopped gate goes on where it left off.

    Args:
        env: Environment to play.
        new: The new policy: its number, as `info` lists them, or last; a saved model of
            Stable-Baselines3 (.zip), which can run code of whoever wrote it; or
            package.module:function that returns a policy.
        old: The old policy, named in the same way (default: the last but one).
        state: File in which the gate is kept, to go on with it; the other arguments must be those
            that it was begun with.
        level: Probability with which a pass or fail is right, whenever you look.
        seed: Seed of the fresh episodes.
    """
    import gymnasium as gym

    source = recorded.load()
    policy = target_named(new, source, "new")
    rival = previous_policy(source) if old == "previous" else target_named(old, source, "old")
    duel = ope_gym.duel(policy, rival, data=source, state=state, **options)
    limit = 2 * duel.rules.limit
    try:
        made = gym.make(env)
    except (gym.error.Error, ImportError, ValueError) as error:
        raise ValueError(f"--env {env}: {error}") from None
    with progress_bar("episodes", limit) as bar:
        bar.update(duel.episodes)
        while duel.not_worse() is None and duel.episodes < limit:
            duel.play(made, 1, gate=True)
            bar.update(duel.episodes - bar.n)
            if state is not None:
                duel.save(state)
    made.close()
    outcome = {True: Outcome.PASS, False: Outcome.FAIL, None: Outcome.UNDECIDED}[duel.not_worse()]
    names = _name(source, policy, new), _name(source, rival, old)
    return CommandResult(_worded(duel, *names), [(json, duel.to_json)], outcome)


def previous_policy(source: Source) -> int:
    """Return the number of the last policy but one, those of the last file counting as the last."""
    latest = source.owners[-1][1] if source.owners else ()
    order = [k for k in range(len(source.policies)) if k not in latest] + list(latest)
    if len(order) < 2:
        raise ValueError(
            f"the files hold {text.count(len(order), 'policy', 'policies')}: give --old, the "
            "number of one, a saved model (.zip), or package.module:function"
        )
    return order[-2]


def _worded(duel: Duel, new: str, old: str) -> str:
    """Return the answer: the outcome, how sure it is, and the difference."""
    low, high = duel.interval.low, duel.interval.high
    return (
        f"{duel.gate_verdict.reasons[0]} ({duel.rules})\n"
        f"{new} (new) - {old} (old): {duel.difference:.5g}, within [{low:.5g}, {high:.5g}], after "
        f"{text.count(duel.episodes, 'fresh episode')}"
    )


def _name(source: Source, policy: Target, word: str) -> str:
    """Return the name of a policy: its number, or what was typed."""
    number = source.number(policy)
    return word if number is None else f"policy {number}"
