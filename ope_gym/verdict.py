"""Whether a number can be trusted, as data: reasons are codes with their numbers.

Whoever finds something out says so as a `Reason`; nobody passes sentences on, and nothing decides
by reading one. The tables below give each code its effect and its words:

    >>> reason = Reason("mean_weight_very_low", mean=0.364)
    >>> reason.effect, reason["mean"]
    ('red', 0.364)
    >>> print(reason)
    the mean weight is 0.36 instead of 1: the data miss much of what the target does
    >>> print(Verdict.of([reason, Reason("explore")]).colour)
    red
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Fact = float | str | tuple[int, ...] | tuple[str, ...]
Words = str | Callable[[Mapping[str, Any]], str]

COLOURS = ("green", "amber", "red")


def _policies(facts: Mapping[str, Any]) -> str:
    """Name the policies whose propensities look wrong, the first few of many."""
    policies, z, shown = facts["policies"], facts["z"], 5
    if len(policies) == 1:
        return f"the propensities of policy {policies[0]} look wrongly recorded (Z = {z:.1f})"
    named = ", ".join(map(str, policies[:shown]))
    more = f" and {len(policies) - shown} more" if len(policies) > shown else ""
    return f"the propensities of policies {named}{more} look wrongly recorded (Z up to {z:.1f})"


def _precise(facts: Mapping[str, Any]) -> str:
    """Say how much the episodes tell."""
    size = _FORMAT.format("effective sample size {ess:.0f} of {trajectories:,} episodes", **facts)
    if not math.isfinite(facts["fresh"]):
        return size
    return f"as sure as about {facts['fresh']:,.0f} fresh episodes of the target ({size})"


def _ess_low(facts: Mapping[str, Any]) -> str:
    """Say how few episodes count; an ESS just below the limit does not look like it."""
    ess, enough = facts["ess"], facts["enough"]
    size = f"{ess:.0f}" if round(ess) < enough else f"{math.floor(10 * ess) / 10:.1f}"
    return (
        f"the effective sample size falls to {size} of {facts['trajectories']:,} episodes at step "
        f"{facts['step']}; {enough:g} would be enough"
    )


def _estimated(facts: Mapping[str, Any]) -> str:
    """Say how propensities were estimated, and whose intervals include their error."""
    words = f"estimated by {facts['model']}"
    drawn, fixed = facts["drawn"], facts["fixed"]
    if fixed:
        where = f" in {', '.join(fixed)}" if drawn else ""
        return f"{words} (intervals take them as known{where})"
    return f"{words} (their error is in the intervals)" if drawn else words


def _p_value(facts: Mapping[str, Any]) -> str:
    """Word the probability of such residuals by chance."""
    return "p < 0.001" if facts["p"] < 0.001 else f"p = {facts['p']:.2g}"


# These are red or amber, by how much of it there is.
_UNSUPPORTED = (
    "in {share:.1%} of its episodes the target takes an action that no usable behaviour policy "
    "ever takes"
)
_MISSING = "the mean weight is {mean:.2f} instead of 1: the data miss much of what the target does"
_CAPPED = (
    "{share:.1%} of the weights were clipped at the cap, leaving a mean weight of {mean:.2f}: a "
    "bias that no interval shows"
)


_RED: dict[str, Words] = {
    # what was recorded is wrong
    "propensities_wrong": _policies,
    "propensities_wrong_together": (
        "the propensities of the policies look wrongly recorded, by their actions taken together "
        "(Z = {z:.1f}): look for a temperature, a mask or a clip that acted but is not in the "
        "recorded policy"
    ),
    "propensities_wrong_squared": (
        "the propensities of the policies look wrongly recorded, by their actions taken together "
        "(Z² of a policy is {square:.1f} on average, not about 1): look for a temperature, a mask "
        "or a clip that acted but is not in the recorded policy"
    ),
    "propensity_contradicted": (
        "logged propensities contradict the policy: episode {episode}, step {step} has "
        "{logged:.6g} but policy {policy} gives {given:.6g}"
    ),
    "ratios_high": (
        "the ratios of the target's probabilities to the recorded ones average {mean:.4g} instead "
        "of 1: the propensities look wrongly recorded"
    ),
    "ratios_low": (
        "the ratios of the target's probabilities to the recorded ones average {mean:.4g} instead "
        "of 1: the propensities look wrongly recorded, or the recorded policies hardly ever do "
        "some of what the target does"
    ),
    "estimated_propensities_misfit": (
        "the estimated propensities do not fit the actions of episodes that were left out (Z = "
        "{z:.1f})"
    ),
    "bets_all_lost": "no value agrees with the data: reward_range or a propensity is wrong",
    "value_impossible": (
        "the value {value:.4g} lies outside of what the recorded rewards allow, [{low:.4g}, "
        "{high:.4g}]"
    ),
    # the data miss what the target does
    "support_lost": _UNSUPPORTED,
    "actions_never_sampled": (
        "{share:.1%} of the target's actions were never sampled and count as 0"
    ),
    "mean_weight_very_low": _MISSING,
    "weights_capped_much": _CAPPED,
    "visits_unknown": (
        "the q model cannot tell how often the target visits a state: take another q model"
    ),
    "model_refuted": lambda facts: (
        f"past steps predict the residuals of the q model ({_p_value(facts)}): it is wrong, and "
        "without weights nothing tells by how much"
    ),
    # there is too little to say anything
    "rewards_all_zero": (
        "every recorded reward is 0: how large a reward can be, and so how far off the value is, "
        "cannot be told"
    ),
    "draws_without_weight": "{lost} of {draws} bootstrap replicates have no weight left",
    "no_support": "no episode supports the target from step {step} on: all weights are 0",
    "weights_overflow": "the weights overflow: use a normalised or capped estimator",
    "weights_vanish": "from step {step} on all weights are 0: later rewards do not count",
    "one_trajectory": "there is only one trajectory: its error cannot be estimated",
    "one_trajectory_each": "one trajectory per behaviour: their spread cannot be estimated",
    "ess_too_low": (
        "the effective sample size falls to {ess:.1f} of {trajectories:,} episodes at step {step}: "
        "too few to use"
    ),
    "episodes_too_few": "there are only {trajectories:#episode}: too few to use",
    "fresh_too_few": lambda facts: (
        "less accurate than a single fresh episode: too little to use"
        if facts["fresh"] < 1.0
        else f"no more accurate than {facts['fresh']:.1f} fresh episodes: too few to use"
    ),
    "guess": (
        "no more accurate than a guess between the worst and the best return that the recorded "
        "rewards allow"
    ),
    # a gate
    "gate_failed": "fail: the new policy is worse",
    "gate_failed_beyond": (
        "fail: the new policy is worse by more than the {allowed:g} that is allowed"
    ),
    # too little is known of a policy in training
    "ended_too_few": "only {episodes:#episode} ended so far",
    "error_unknown": "its error is unknown",
    "played_too_few": (
        "it rests on {episodes:#fresh episode}; {enough:g} would be enough "
        "(n_eval_episodes={enough:g})"
    ),
    "unsure": "it tells less than {enough:g} fresh episodes would",
    "greedy_unplayed": (
        "not known: no environment could be learned in which to play the greedy policy. "
        "{episodes:g} fresh episodes, about {steps:,.0f} steps, would tell"
    ),
    "greedy_unknown": (
        "not known yet: in {share:.0%} of its steps the greedy policy is where nothing was "
        "recorded. {episodes:g} fresh episodes, about {steps:,.0f} steps, would tell"
    ),
    "squares_overflow": "the squares of the rewards overflow: divide all rewards by one number",
}

_AMBER: dict[str, Words] = {
    "in_sample": (
        "optimistic, because the policy learned, or may have learned, from these episodes "
        "(in-sample)"
    ),
    "in_sample_though_held_out": (
        "optimistic, because the policy learned, or may have learned, from these episodes "
        "(in-sample); evaluate it on the held-out ones alone"
    ),
    "adaptive": (
        "adaptive: which episodes there are depends on earlier rewards, which biases mixtures and "
        "averages; BIS and ADR stay right"
    ),
    "bets_adaptive": (
        "betting with weights against a mixture assumes held-out episodes or fixed policies"
    ),
    "episodes_repeated": (
        "at least {repeated:,} of {trajectories:,} episodes repeat earlier ones exactly, as if a "
        "seeded script had been run again with the same file: errors and intervals are too small"
    ),
    "propensities_estimated": (
        "the propensities are estimated, not recorded: right only if the loggers decided by what "
        "the observations hold, which no data can show"
    ),
    "propensities_unknown": (
        "nobody recorded how likely the actions were: right only if whoever acted decided by what "
        "the observations hold, which no data can show"
    ),
    "support_thin": _UNSUPPORTED,
    "support_unknown": (
        "at {steps} visited steps the target may take an action that no recorded policy takes; "
        "only weights can say how often, so ask for NFIS, too"
    ),
    "mean_weight_high": (
        "the mean weight is {mean:.2f} instead of 1: a propensity or a behaviour may be wrong"
    ),
    "mean_weight_low": (
        "the mean weight is {mean:.2f} instead of 1: the episodes lack some of what the target "
        "does, by chance or not"
    ),
    "weights_capped": _CAPPED,
    # the estimate rests on a model
    "by_model": (
        "rests on the q model: with an effective sample size of {ess:.1f}, the weights can hardly "
        "confirm it"
    ),
    "mostly_direct": (
        "{share:.0%} of the estimate is the q model alone, whose error no interval shows"
    ),
    "visits_guessed": (
        "the q model cannot tell how often the target visits a state: the interval covers the "
        "spread of the starts, not the error of q"
    ),
    "markov_failed": lambda facts: (
        f"past steps predict the residuals of the q model ({_p_value(facts)}): the observation "
        "hides part of the state, or the q model has the wrong shape"
    ),
    "markov_untested": (
        "rests on the q model, and too few steps tell whether the observation hides part of the "
        "state"
    ),
    "shape_untested": (
        "rests on the q model, and episodes of one step cannot show whether it has the right shape"
    ),
    "actions_unknown": (
        "{share:.0%} of the target's visits fall on actions that no episode shows there: "
        "what they are worth is a guess"
    ),
    "actions_sampled_once": (
        "{share:.0%} of the weight is on actions sampled only once: the error is too small"
    ),
    # there is too little for a calibrated interval
    "ess_low": _ess_low,
    "episodes_few": "there are only {trajectories:#episode}; {enough:g} would be enough",
    "no_spread": ("all episodes agree, so the error is unknown: a rare outcome may be missing"),
    "influence": (
        "one episode makes up {share:.0%} of the squared error: a few extreme returns decide the "
        "value, and others may be missing"
    ),
    # a duel, a gate and a ranking
    "duel_open": "open",
    "duel_undecided": "limit of {pairs:#pair} reached, nothing decided",
    "gate_undecided": "undecided: the limit of {pairs:#pair} is reached",
    "best_doubtful": "others may be better: P(best) {chance:?}",
    "best_unknown": "how sure it is that this policy is the best cannot be known",
    # the same of a policy in training
    "ended_few": "only {episodes:#episode} ended so far",
    "played_few": "{enough:g} would be enough (n_eval_episodes={enough:g})",
    "fresh_few": "{enough:g} would be enough",
    "returns_alike": "how often other returns occur is unknown",
}

# These say that nothing but the model itself speaks for it.
MODEL_DOUBTS = frozenset(
    {"by_model", "markov_failed", "markov_untested", "shape_untested", "actions_unknown"}
)

_GREEN: dict[str, Words] = {
    "precise": _precise,
    # a duel, and a gate
    "a_better": "a is better",
    "b_better": "b is better",
    "too_close": "too close, at most {margin:g} apart",
    "gate_passed": "pass: the new policy is better",
    "gate_passed_within": (
        "pass: the new policy is at most {worse:.5g} worse, and {allowed:g} is allowed"
    ),
    "sure": "as sure as about {fresh:~} fresh episodes would make you",
}

_BASIS: dict[str, Words] = {
    "no_past": "rests on the q model; there are no past steps that a state could hide",
    "markov_passed": lambda facts: (
        "assumes a Markov state; the test whether past steps predict the residuals passed "
        f"({_p_value(facts)})"
    ),
    "propensities_from": _estimated,
}

_NOTES: dict[str, Words] = {
    "weights_alone": "judged by the weights alone, as no error was asked for",
    "data_unknown": "the q model cannot tell how much of what the target does it has data of",
    "support_rarely_left": (
        "at {steps} visited steps the target may take an action that no usable behaviour policy "
        "takes, but it rarely does"
    ),
    # what the values of a policy in training rest on
    "free_returns": (
        "values rest on the returns of the last episodes and on those that are still open, because "
        "observations or policies are of a kind that cannot be modelled"
    ),
    "free_steps": (
        "values rest on the steps of the training; no environment is learned from them, because no "
        "time limit is known"
    ),
    "free_environment": (
        "values rest on the steps of the training, and on an environment learned from them"
    ),
    "policies_follow": (
        "the policy changed during episodes: where one follows the other, its start depends on how "
        "long the last one lived, and weights against a mixture are not exactly unbiased"
    ),
}

_RANKING: dict[str, Words] = {
    "safest": ("cautious choice: {policy}, whose interval has the highest lower end, {low:.4g}"),
    "chances_rough": "P(best) is rough where verdicts are red",
    "chances_partial": lambda facts: (
        f"P(best) leaves out {', '.join(facts['unknown'])}: the error is not known"
    ),
}

_SKIPPED: dict[str, Words] = {  # policies that cannot be compared with their own episodes
    "unavailable": "the policy cannot be asked for probabilities: {remedy}",
    "few_own": "fewer than 2 episodes of its own",
    "no_others": "there are no episodes of others",
}

_ADVICE: dict[str, Words] = {
    "check_log_prob": (
        "check that log_prob is the natural logarithm of the probability that the policy that "
        "acted gave to the action when it acted"
    ),
    "refit_propensities": (
        "fit the propensities with another model, or with more of what the loggers saw"
    ),
    "hold_out": (
        "collect about {episodes:g} fresh episodes with the target policy itself, or hold some out"
    ),
    "explore": (
        "the policy is deterministic, so an episode counts only up to the first action that the "
        "policy would not take: evaluate the policy that explores, ask for DM and MDR, or play "
        "fresh episodes"
    ),
    "collect_from": "collect about {episodes:#more episode} of {behaviour}",
    "collect_from_target": "collect about {episodes:#episode} with the target policy itself",
}

_EFFECTS = {  # what a reason does, the worst first
    "red": _RED,
    "amber": _AMBER,
    "green": _GREEN,
    "basis": _BASIS,
    "note": _NOTES | _RANKING | _SKIPPED,
    "advice": _ADVICE,
}
EFFECT = {code: effect for effect, group in _EFFECTS.items() for code in group}
WORDS = {code: words for group in _EFFECTS.values() for code, words in group.items()}


def chance(value: float) -> str:
    """Word a probability that was estimated from draws, never as 0 or 1."""
    if math.isnan(value):
        return "undefined"
    return "<0.1 %" if value < 0.001 else ">99.9 %" if value > 0.999 else f"{100 * value:.1f} %"


class _Format(string.Formatter):
    """Format facts as prose: 12.5 % with a space, `{n:#episode}` as 1 episode or 2 episodes.

    `{n:~}` is an estimated number of episodes, with a decimal below ten; `{p:?}` a probability from
    draws, never 0 or 1.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "?":
            return chance(value)
        if format_spec == "~":
            return f"{value:,.{1 if value < 9.95 else 0}f}"
        if format_spec.startswith("#"):
            return f"{value:,} {format_spec[1:]}{'' if value == 1 else 's'}"
        words = str(super().format_field(value, format_spec))
        return words.replace("%", " %") if format_spec.endswith("%") else words


_FORMAT = _Format()


@dataclass(frozen=True, init=False)
class Reason:
    """Something to say about a number: a code with its facts.

    Args:
        code: Key of the tables of this module.
        facts: Numbers and names that its words need.
    """

    code: str
    facts: tuple[tuple[str, Fact], ...]

    def __init__(self, code: str, /, **facts: Fact) -> None:
        if code not in EFFECT:
            raise ValueError(f"code {code!r} is not in the tables of ope_gym.verdict")
        object.__setattr__(self, "code", code)
        plain = (fact.item() if isinstance(fact, np.generic) else fact for fact in facts.values())
        object.__setattr__(self, "facts", tuple(zip(facts, plain, strict=True)))

    def __getitem__(self, fact: str) -> Any:
        return dict(self.facts)[fact]

    @property
    def effect(self) -> str:
        """Its effect: "red", "amber", "green", "basis", "note" or "advice"."""
        return EFFECT[self.code]

    def __str__(self) -> str:
        words, facts = WORDS[self.code], dict(self.facts)
        return words(facts) if callable(words) else _FORMAT.format(words, **facts)

    def __repr__(self) -> str:
        return f"Reason({', '.join([repr(self.code), *(f'{k}={v!r}' for k, v in self.facts)])})"

    def to_dict(self) -> dict[str, Any]:
        """Return code, facts and words; numbers that are not finite are None."""
        facts = {
            key: None if isinstance(fact, float) and not math.isfinite(fact) else fact
            for key, fact in self.facts
        }
        return {"code": self.code, **facts, "text": str(self)}


@dataclass(frozen=True)
class Verdict:
    """Whether to trust a number.

    Args:
        reasons: Why it has its colour, the worst first.
        advice: What would help.
        notes: What else to know: what the number rests on, and what leaves the colour alone.
    """

    reasons: tuple[Reason, ...]
    advice: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()

    @classmethod
    def of(cls, said: Iterable[Reason]) -> Verdict:
        """Sort reasons by their effects; what is good goes without saying beside what is not."""
        by_effect: dict[str, list[Reason]] = {effect: [] for effect in _EFFECTS}
        for reason in dict.fromkeys(said):
            by_effect[reason.effect].append(reason)
        against = by_effect["red"] + by_effect["amber"]
        return cls(
            tuple(against or by_effect["green"]),
            tuple(by_effect["advice"]),
            tuple(by_effect["basis"] + by_effect["note"]),
        )

    @property
    def colour(self) -> str:
        """The worst effect of the reasons: "green", "amber" or "red"."""
        return max((r.effect for r in self.reasons), key=COLOURS.index, default="green")

    @property
    def against(self) -> tuple[Reason, ...]:
        """The reasons that keep it from being green."""
        return () if self.colour == "green" else self.reasons

    @property
    def basis(self) -> tuple[Reason, ...]:
        """The notes that say what the number rests on."""
        return tuple(note for note in self.notes if note.effect == "basis")

    def __str__(self) -> str:
        return f"{self.colour}: {'; '.join(map(str, self.reasons + self.advice))}"

    def to_dict(self) -> dict[str, Any]:
        """Return the colour, and codes, facts and words of the rest."""
        return {
            "colour": self.colour,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "advice": [reason.to_dict() for reason in self.advice],
            "notes": [reason.to_dict() for reason in self.notes],
        }
