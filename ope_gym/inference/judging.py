"""The rules behind the colours: from numbers to reasons.

A colour is a promise, the same for every estimator. Green: the interval holds what it says. Amber:
it may as well, but rests on something that the data cannot check, which is named. Red: do not use
the number. What an interval can allow for is in it, and does not change its colour: a small
effective sample size makes it wide. All limits stand here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ope_gym.inference.diagnostics import Diagnostics
from ope_gym.inference.estimate import Sample
from ope_gym.verdict import Reason, Verdict

# Effective episodes behind an interval: from 20 on its error is known to 1 / sqrt(2 20) = 16 %, and
# Student's t takes the rest; with fewer than 4 to 41 %, and the quantiles of t explode.
GREEN_ESS, AMBER_ESS = 20.0, 4.0
# Fresh episodes of a policy in training, whose interval takes little room for what it cannot see.
GREEN_FRESH, AMBER_FRESH = 10.0, 4.0
# Share of one episode in the squared error. The largest of n normal values has about 2 ln n / n:
# twice that is a heavy tail. Below a tenth no episode changes the width by more than 1 / 20.
INFLUENCE, HEAVY = 0.1, 2.0
# Share of the target's episodes that leave the support: intervals have room for a small one.
NOTED_LOSS, RED_LOSS = 0.005, 0.02
# Mean weight. Below .8, by chance or not, the episodes lack a fifth of what the target does, which
# plain estimates miss outright; below .6 by so many standard errors it is not by chance. Above 1 by
# as many, propensities look wrong, but closer to 1 is rounding in recording.
LOW_MEAN, LOST_MEAN, NOTED_MEAN, ERRORS = 0.8, 0.6, 1.01, 3.0
# Effective episodes that one of another policy must add, to be worth collecting.
USEFUL = 0.5

_WRONG_PROPENSITIES = {
    "propensities_wrong",
    "propensities_wrong_together",
    "propensities_wrong_squared",
    "propensity_contradicted",
    "ratios_high",
    "ratios_low",
    "bets_all_lost",
}


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts that the rules look at.

    Args:
        value: The estimate; NaN if the weights do not support one.
        error: Its standard error; NaN if undefined.
        diagnostics: Diagnostics of its weights.
        sample: The data it rests on.
        reasons: What others have found out about the data or the estimator.
        fresh_episodes: How many of the target would tell as much; NaN if unknown.
        model_ess: Effective number of episodes where the estimate rests on a model more than on the
            weights; None where it rests on the weights.
        deterministic: Whether the target is deterministic, and the estimate has weights.
        guess: Standard error of a value drawn evenly from those that the recorded rewards allow.
        unsupported: Whether the target takes actions that no recorded policy takes.
        error_wanted: Whether an error was asked for.
    """

    value: float
    error: float
    diagnostics: Diagnostics
    sample: Sample
    reasons: tuple[Reason, ...] = ()
    fresh_episodes: float = np.nan
    model_ess: float | None = None
    deterministic: bool = False
    guess: float = np.inf
    unsupported: bool = False
    error_wanted: bool = True

    @property
    def ess(self) -> float:
        """Effective number of episodes behind the interval."""
        return self.diagnostics.ess if self.model_ess is None else self.model_ess

    @property
    def influence_limit(self) -> float:
        """Largest share of one episode in the squared error that is no sign of a heavy tail."""
        n = max(self.ess, 2.0)
        return max(INFLUENCE, HEAVY * 2.0 * float(np.log(n)) / n)


def judge(facts: Facts) -> Verdict:
    """Judge an estimate by what is wrong or missing, and by how much the episodes tell."""
    d, n = facts.diagnostics, facts.sample.trajectories
    reasons = [*facts.reasons, *_doubts(facts), *_scarcity(facts)]
    reasons.append(Reason("precise", ess=d.ess, trajectories=n, fresh=facts.fresh_episodes))
    if not facts.error_wanted:
        reasons.append(Reason("weights_alone"))
    verdict = Verdict.of(reasons)
    if verdict.colour == "green":
        return verdict
    return Verdict.of([*reasons, *_advice(facts, verdict)])


def judge_free(
    fresh_episodes: float,
    *,
    episodes: int,
    ended: int | None,
    played: bool,
    steady: bool,
) -> Verdict:
    """Judge a value of a policy in training by about how many fresh episodes tell as much.

    Where episodes all return about the same, the count means little, because one fresh
    episode would tell as much: that is amber rather than red, unless fewer than 4 have ended.

    Args:
        fresh_episodes: That count; NaN if unknown.
        episodes: How many the value rests on.
        ended: How many of them must be counted as ended; None if that does not matter.
        played: Whether nothing but fresh episodes counts.
        steady: Whether episodes all return about the same.
    """
    fresh = round(fresh_episodes, 6)  # ten played ones are ten, whatever is rounded
    if fresh >= GREEN_FRESH:
        return Verdict.of([Reason("sure", fresh=fresh)] if np.isfinite(fresh) else [])
    counted = ended is None or ended >= AMBER_FRESH
    if fresh >= AMBER_FRESH or (steady and counted):
        if ended is not None and ended < GREEN_FRESH:
            reason = Reason("ended_few", episodes=ended)
        elif steady:
            reason = Reason("returns_alike")
        else:
            reason = Reason("played_few" if played else "fresh_few", enough=GREEN_FRESH)
    elif ended is not None and fresh == ended < GREEN_FRESH:
        reason = Reason("ended_too_few", episodes=ended)
    elif np.isnan(fresh):
        reason = Reason("error_unknown")
    elif played:
        reason = Reason("played_too_few", episodes=episodes, enough=GREEN_FRESH)
    else:
        reason = Reason("unsure", enough=AMBER_FRESH)
    return Verdict.of([reason])


def unseen_by_greedy(share: float, length: float) -> Reason:
    """Say that a greedy policy goes where nobody was, and what it would cost to know its value.

    Args:
        share: Share of its steps that lie outside of what was recorded.
        length: Steps of an episode.
    """
    episodes, steps = GREEN_FRESH, GREEN_FRESH * length
    if share >= 1.0:
        return Reason("greedy_unplayed", episodes=episodes, steps=steps)
    return Reason("greedy_unknown", share=share, episodes=episodes, steps=steps)


def _doubts(facts: Facts) -> Iterator[Reason]:
    """Say what the weights tell of wrong propensities, missing mass and a model alone."""
    d = facts.diagnostics
    if facts.model_ess is None:
        mean, capped = d.mean_weight, d.capped_share > 0
        if capped:  # clipped weights look better than they are
            much = mean < LOST_MEAN
            yield Reason(
                "weights_capped_much" if much else "weights_capped", share=d.capped_share, mean=mean
            )
        elif mean > NOTED_MEAN and mean - 1.0 > ERRORS * d.mean_weight_error:
            yield Reason("mean_weight_high", mean=mean)
        elif np.isfinite(facts.value) and mean < LOW_MEAN:
            alarm = mean < min(LOST_MEAN, 1.0 - ERRORS * d.mean_weight_error)
            yield Reason("mean_weight_very_low" if alarm else "mean_weight_low", mean=mean)
    elif d.ess < AMBER_ESS:
        yield Reason("by_model", ess=d.ess)
    lost = d.missing_mass or 0.0
    if lost > NOTED_LOSS:
        yield Reason("support_lost" if lost > RED_LOSS else "support_thin", share=lost)
    elif d.support_violations:
        yield Reason("support_rarely_left", steps=d.support_violations)


def _scarcity(facts: Facts) -> list[Reason]:
    """Say what there is too little of: for any use, or for a calibrated interval."""
    n, ess, error = facts.sample.trajectories, facts.ess, facts.error
    reasons = [*_too_few(facts)]
    if ess >= AMBER_ESS and facts.fresh_episodes < AMBER_ESS and error > 0.0:
        reasons.append(Reason("fresh_too_few", fresh=facts.fresh_episodes))
    if error >= facts.guess and not _any_red(reasons):
        reasons.append(Reason("guess"))
    if np.isinf(error):
        reasons.append(Reason("squares_overflow"))
    elif np.isnan(error) and np.isfinite(facts.value) and n > 1 and facts.error_wanted:
        reasons.append(Reason("one_trajectory_each"))
    return reasons if _any_red(reasons) else [*reasons, *_concentration(facts)]


def _any_red(reasons: Iterable[Reason]) -> bool:
    return any(reason.effect == "red" for reason in reasons)


def _too_few(facts: Facts) -> Iterator[Reason]:
    """Say how many episodes are left in effect, if they are too few."""
    d, n, ess = facts.diagnostics, facts.sample.trajectories, facts.ess
    whole = ess > 0.9 * n and n < GREEN_ESS  # no weights to blame
    if np.isnan(facts.value) and d.ess == 0:
        yield Reason("no_support", step=d.ess_step)
    elif not np.isfinite(facts.value):
        yield Reason("weights_overflow")
    elif ess == 0:
        yield Reason("weights_vanish", step=d.ess_step)
    elif n == 1:
        yield Reason("one_trajectory")
    elif ess < AMBER_ESS and whole:
        yield Reason("episodes_too_few", trajectories=n)
    elif ess < AMBER_ESS:
        yield Reason("ess_too_low", ess=ess, trajectories=n, step=d.ess_step)
    elif ess < GREEN_ESS and whole:
        yield Reason("episodes_few", trajectories=n, enough=GREEN_ESS)
    elif ess < GREEN_ESS:
        yield Reason("ess_low", ess=ess, trajectories=n, step=d.ess_step, enough=GREEN_ESS)


def _concentration(facts: Facts) -> Iterator[Reason]:
    """Say where a few episodes decide, or none differs."""
    share = facts.diagnostics.influence_share
    if facts.error == 0:
        yield Reason("no_spread")
    elif share > facts.influence_limit:
        yield Reason("influence", share=share)


def _advice(facts: Facts, verdict: Verdict) -> Iterator[Reason]:
    """Say how many episodes to collect, and with which policy; nothing if more would not help."""
    d, codes = facts.diagnostics, {reason.code for reason in verdict.reasons}
    have = min(d.ess, facts.fresh_episodes) if np.isfinite(facts.fresh_episodes) else d.ess
    if "estimated_propensities_misfit" in codes:
        yield Reason("refit_propensities")
    elif codes & _WRONG_PROPENSITIES:
        yield Reason("check_log_prob")
    elif "in_sample" in codes:
        yield Reason("hold_out", episodes=GREEN_ESS)
    elif facts.deterministic and have < GREEN_ESS:
        yield Reason("explore")
    elif facts.unsupported or have < GREEN_ESS:  # of what nobody did, no episode tells
        yield _collect(facts, GREEN_ESS - (0.0 if facts.unsupported else have))
    elif d.influence_share > facts.influence_limit:
        missing = have * (d.influence_share / facts.influence_limit - 1.0)
        yield Reason("collect_from_target", episodes=int(np.ceil(missing)))


def _collect(facts: Facts, missing: float) -> Reason:
    """Say whose episodes add so many effective ones: those of the best recorded policy, if any."""
    d, counts = facts.diagnostics, facts.sample.counts
    gain = d.behaviour_ess / np.maximum(counts, 1)  # effective episodes that each one adds
    best = int(np.argmax(gain * d.behaviour_shares))
    collector = facts.sample.behaviours[best].collector
    enough = gain[best] >= USEFUL and not facts.unsupported and counts.sum() > 1
    if enough and collector:
        more = int(np.ceil(missing / gain[best]))
        return Reason("collect_from", episodes=more, behaviour=collector)
    return Reason("collect_from_target", episodes=int(np.ceil(missing)))
