"""The table of estimators: the parts each is made of, and the data it needs.

    plain          J = 1/n sum_i sum_t gamma^t w_i,t r_i,t
    normalised     J = sum_t gamma^t (sum_i w_i,t r_i,t) / (sum_i w_i,t)
    capped         w <- min(w, c) on the cumulative weight, before normalising
    doubly robust  J = 1/n sum_i v_i,0 + either of the above with r_t - q_t + gamma v_t+1 for r_t

After an episode ends its reward is 0 and its weight stays: the denominator at step t runs over all
n trajectories, never over the survivors only. A new estimator is a row here and, if none of the
methods in `ope_gym.estimators.run` computes it, a function there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ope_gym.arguments import instance


@dataclass(frozen=True)
class Composition:
    """A row of the table: the parts of an estimator, and the data it needs.

    Args:
        scheme: weighting scheme, a name in `ope_gym.weights.formula.SCHEMES`; empty if none.
        capped: weights are clipped at the cap.
        normalised: each step's sum is divided by the sum of the weights instead of n.
        baseline: needs a q model; as a weighted sum it is doubly robust.
        method: how it is computed, a name in `ope_gym.estimators.run.METHODS`.
        whole: what it needs of all episodes at once, so that they must fit into memory: "rounds"
            or "one step"; empty if it is made of sums.
        use: when to use it, in a line.
    """

    scheme: str
    capped: bool = False
    normalised: bool = False
    baseline: bool = False
    method: str = "weighted"
    whole: str = ""
    use: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of `NEEDS` that it needs."""
        conditions = {
            "propensities": bool(self.scheme),
            "policies": self.scheme not in ("", "basic"),
            "q model": self.baseline,
            "visits": self.method == "marginal",
            "standard error": not self.scheme,
            self.whole: bool(self.whole),
        }
        return tuple(need for need, wanted in conditions.items() if wanted)

    @property
    def uses_q(self) -> bool:
        """Whether a q model changes the estimate."""
        return self.baseline or self.method == "auto"

    @property
    def uses_visits(self) -> bool:
        """Whether it asks how often the target visits the recorded steps."""
        return self.method in ("direct", "marginal", "auto")


ESTIMATORS: dict[str, Composition] = {
    "BIS": Composition(
        "basic", use="needs only the logged propensities; unbiased even on adaptive data; noisy"
    ),
    "BCIS": Composition(
        "basic", capped=True, use="a lower bound in mean when rewards are positive"
    ),
    "NBIS": Composition("basic", normalised=True, use="only logged propensities at hand"),
    "NBCIS": Composition("basic", True, True, use="NBIS when a few weights dominate"),
    # FIS is never noisier than BIS for one step or rewards of one sign, but not in general
    "FIS": Composition("fused", use="unbiased for policies fixed in advance"),
    "FCIS": Composition("fused", capped=True, use="FIS when a few weights dominate"),
    "NFIS": Composition("fused", normalised=True, use="the first choice without a q model"),
    "NFCIS": Composition("fused", True, True, use="NFIS when a few weights dominate"),
    "OUIS": Composition("optimal", use="to compare with the paper; not always better than FIS"),
    "NOUIS": Composition("optimal", normalised=True, use="to compare with the paper"),
    "DM": Composition(
        "",
        baseline=True,
        method="direct",
        use="the q model alone: steady, but as wrong as the model, which no interval shows",
    ),
    "MDR": Composition(
        "",
        baseline=True,
        method="marginal",
        use="long episodes with a Markov state: the q model, corrected without products of ratios",
    ),
    "DR": Composition(
        "basic",
        baseline=True,
        use="unbiased with a q fitted elsewhere; as noisy as BIS where the model is poor",
    ),
    "WDR": Composition(
        "basic",
        normalised=True,
        baseline=True,
        use="doubly robust with only logged propensities at hand",
    ),
    "FDR": Composition("fused", baseline=True, use="DR against the mixture: FIS with a q model"),
    "FWDR": Composition(
        "fused",
        normalised=True,
        baseline=True,
        use="NFIS with a q model that is known to be good; a poor one can cost",
    ),
    "MAGIC": Composition(
        "fused",
        normalised=True,
        baseline=True,
        method="magic",
        use="to compare: a blend of DM and FWDR, better only where the q model is good",
    ),
    "ADR": Composition(
        "basic",
        baseline=True,
        method="adaptive",
        whole="rounds",
        use="policies learned from the data, target fixed in advance, nothing held out",
    ),
    "EA": Composition(
        "",
        method="average",
        whole="one step",
        use="one-step data with a finite action set only",
    ),
    "auto": Composition(
        "fused",
        normalised=True,
        method="auto",
        use="the first choice: near the q model where the data confirm it, else near NFIS",
    ),
}
WEIGHTED = {name: c for name, c in ESTIMATORS.items() if c.method == "weighted" and not c.baseline}

NEEDS = {  # of data and options, in words
    "propensities": "the probabilities of all actions",
    "policies": "the policies that acted",
    "q model": "a q model",
    "visits": "observations, to count visits",
    "standard error": "an interval by standard errors",
    "rounds": "all episodes in memory, and their probabilities under all behaviours",
    "one step": "all episodes in memory, each a step with one of finitely many actions",
}
RECOMMENDED = ("auto", "NFIS")
PAPER = ("BIS", "BCIS", "NBIS", "NBCIS", "FIS", "FCIS", "NFIS", "NFCIS", "OUIS", "NOUIS", "EA")
# A group gives those of its members that the data allow. "default" gives the first of its lines
# that has any: without the policies that acted only basic weights are left, without propensities
# only models.
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "default": (("auto", "NFIS"), ("BIS", "NBIS"), ("DM", "MDR")),
    "paper": (("auto", *PAPER),),
    "all": (tuple(ESTIMATORS),),
}
ALIASES = {  # names that others use; per decision, as all estimators here are
    "IS": "BIS",
    "PDIS": "BIS",
    "WIS": "NBIS",
    "WPDIS": "NBIS",
    "SNPDIS": "NBIS",
    "FQE": "DM",
    "DRL": "MDR",
}


def by_recommendation(names: Iterable[str]) -> list[str]:
    """Return names of estimators in the order of recommendation.

    auto and NFIS; then weights against the mixture of all behaviours, against one behaviour, and
    none at all; of those without a cap before with one, and normalised before plain.

    >>> by_recommendation(["DM", "BIS", "NBIS", "NFCIS", "FIS", "FWDR", "NFIS"])
    ['NFIS', 'FWDR', 'FIS', 'NFCIS', 'NBIS', 'BIS', 'DM']
    """
    schemes = ("fused", "optimal", "basic", "")
    known = list(ESTIMATORS)

    def place(name: str) -> tuple[int, ...]:
        if name in RECOMMENDED:
            return (0, RECOMMENDED.index(name))
        if name not in ESTIMATORS:
            return (2,)
        c = ESTIMATORS[name]
        return (1, schemes.index(c.scheme), c.capped, not c.normalised, known.index(name))

    return sorted(names, key=place)


def estimator_names(estimators: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names of estimators and groups, the names of others as ours; raise for unknown ones.

    >>> estimator_names(["auto", "WIS"]), estimator_names("paper"), estimator_names(None)
    (('auto', 'NBIS'), ('paper',), ('default',))
    """
    if estimators is None:
        return ("default",)
    known = "give names, such as ['auto', 'NFIS'], or None"
    named = instance("estimators", estimators, Iterable, known)
    given = (named,) if isinstance(named, str) else tuple(named)
    if not given:
        raise ValueError(f"estimators is empty; known are {', '.join(ESTIMATORS)}")
    return tuple(dict.fromkeys(_known_name(name) for name in given))


def _known_name(name: str) -> str:
    ours = ALIASES.get(name, name)
    if ours in ESTIMATORS or ours in GROUPS:
        return ours
    known = [*ESTIMATORS, *ALIASES, *GROUPS]
    spelt = {word.lower(): word for word in known}  # close matches whatever the case
    close = difflib.get_close_matches(str(name).lower(), spelt, 1)
    hint = f"did you mean {spelt[close[0]]!r}? " if close else ""
    raise ValueError(
        f"estimators has {name!r}; {hint}Known are {', '.join(ESTIMATORS)} and the groups "
        f"{', '.join(GROUPS)}"
    )


def one_estimator(name: object, example: str = "auto") -> str:
    """Return the name of a single estimator, that of others as ours; raise if it is none."""
    if not isinstance(name, str) or name in GROUPS:
        raise ValueError(f"estimator is {name!r}; give the name of one, such as {example!r}")
    return estimator_names(name)[0]


def candidates(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of estimators, with each group replaced by its members."""
    members = (m for name in names for line in GROUPS.get(name, ((name,),)) for m in line)
    return tuple(dict.fromkeys(members))


def choose(names: Iterable[str], lacks: Mapping[str, str]) -> tuple[str, ...]:
    """Return the estimators of names and groups; of groups those that can be had.

    Args:
        names: Names of estimators and groups.
        lacks: Why a need of `NEEDS` is not met, in words.
    """
    chosen: list[str] = []
    for name in names:
        if name in GROUPS:
            lines = (
                [member for member in line if not lacks.keys() & ESTIMATORS[member].needs]
                for line in GROUPS[name]
            )
            chosen += next(filter(None, lines), [])
            continue
        for need in ESTIMATORS[name].needs:
            if need in lacks:
                raise ValueError(
                    f"estimators has {name!r}, which needs {NEEDS[need]}, but {lacks[need]}"
                )
        chosen.append(name)
    if not chosen:
        raise ValueError(
            "episodes have no log_probs, so there are no weights, and without a q model "
            "there is no estimate: give q_model a model of ope_gym.models"
        )
    return tuple(dict.fromkeys(chosen))
