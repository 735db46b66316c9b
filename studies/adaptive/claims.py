"""Judge what section 3.3 says about dependent policies, and add targets that are learned."""

from __future__ import annotations

from studies.harness.claims import HOLDS, ROUNDING, Claim, Evidence
from studies.harness.markdown import number
from studies.harness.study import Summary

_SOURCE = "section 3.3"


def adaptive_claims(summary: Summary) -> list[Claim]:
    """Return the claims of section 3.3, and of targets learned from the data."""
    return [*_stopped(summary), *_unbiased(summary), *_learned(summary)]


def _stopped(summary: Summary) -> list[Claim]:
    """Return claims about an action that is drawn until its first 0."""
    stop = summary["stopped"]
    mean, error = stop["simulated"][0]
    bis, bis_error = stop["simulated"][1]
    exact, bias = stop["exact"], stop["exact"] - 0.5

    def sequences(mean: float, error: float, right: float) -> Evidence:
        where = f"{stop['sequences']} sequences"
        return Evidence.same(where, mean - right, error, right)

    return [
        Claim(
            _SOURCE,
            "an action that is drawn until its first 0: E[EA] = 1 − log 2",
            "E[EA] − (1 − ln 2)",
            (
                Evidence("series", stop["series"][0] - exact, equal=True, tolerance=ROUNDING),
                sequences(mean, error, exact),
            ),
            "EA averages over more draws when they went well.",
        ),
        Claim(
            _SOURCE,
            "its bias equals log 2 − 1/2",
            "bias − (ln 2 − 1/2)",
            (
                Evidence("exact", 2 * bias, equal=True, tolerance=ROUNDING),
                sequences(mean - 0.5, error, -bias),
            ),
            f"The sign: E[EA] is below 1/2, so the bias is 1/2 − ln 2 = {number(bias)}; the "
            "appendix says so in words.",
        ),
        Claim(
            "our extension",
            "section 3.3 goes on that importance sampling is unbiased; in its example, too",
            "E[BIS] − 1/2",
            (
                Evidence("series", stop["series"][1] - 0.5, equal=True, tolerance=ROUNDING),
                sequences(bis, bis_error, 0.5),
            ),
            "Not in this example: the only action has probability 1 whenever it is drawn, so all "
            "weights are 1, and BIS is EA. A policy that stops for good leaves the support of the "
            "target, and a number of draws that depends on the rewards cannot serve as N. If the "
            "policy acts rarely instead of never, for a fixed number of rounds, BIS is unbiased "
            "(next claim).",
        ),
    ]


def _unbiased(summary: Summary) -> list[Claim]:
    """Return claims about policies that depend on earlier rewards."""
    two, soft = summary["two_rounds"], summary["soft_stop"]
    last = soft["rounds"][-1]

    def rows(names: tuple[str, ...]) -> tuple[Evidence, ...]:
        found = []
        for name in names:
            i = two["names"].index(name)
            note = f"with policies fixed in advance {two['fixed'][i]:+.6f}"
            found += [
                Evidence(
                    f"{name}, two rounds",
                    two["adaptive"][i],
                    equal=True,
                    tolerance=ROUNDING,
                    note=note,
                ),
                Evidence(
                    f"{name}, less after a zero, {last} rounds",
                    soft["bias"][name][-1],
                    equal=True,
                    tolerance=ROUNDING,
                ),
            ]
        return tuple(found)

    return [
        Claim(
            _SOURCE,
            "importance sampling stays unbiased when policies depend on earlier rewards: BIS",
            "exact bias",
            rows(("BIS",)),
            "Given the past, each term has mean J, whatever policy the past has led to.",
        ),
        Claim(
            _SOURCE,
            "importance sampling stays unbiased when policies depend on earlier rewards: FIS, OUIS",
            "exact bias",
            rows(("FIS", "OUIS")),
            "The weight of a first-round draw has the second policy in its denominator, and that "
            "policy depends on the very reward that is weighted: a 1 makes the same action "
            "likelier later, and so its own weight smaller. With policies fixed in advance FIS "
            "and OUIS are unbiased. (Normalised estimators are biased anyway; see the table.)",
        ),
        Claim(
            _SOURCE,
            "the empirical average can be biased when policies depend on earlier rewards",
            "|exact bias| when learned − |exact bias| when fixed, two rounds; |exact bias| of the "
            "other",
            (
                Evidence("two rounds", abs(two["adaptive"][-1]) - abs(two["fixed"][-1])),
                Evidence(f"less after a zero, {last} rounds", abs(soft["bias"]["EA"][-1])),
            ),
            "With few draws an action that was never drawn biases EA anyway.",
        ),
    ]


def _learned(summary: Summary) -> list[Claim]:
    """Return claims about targets learned from the data."""
    learned = summary["learned"]
    names, plain = learned["names"], ("BIS", "FIS", "OUIS")
    covers = ", ".join(
        f"{name} in {learned['coverage'][0][i]:.1%} of the runs and {learned['coverage'][1][i]:.1%}"
        for name, i in ((name, names.index(name)) for name in ("NFIS", "FIS"))
    )
    return [
        Claim(
            "beyond the paper",
            "a target learned from the data is valued too high by every estimator on these data",
            "bias in-sample − bias held out, paired by target",
            tuple(
                Evidence(
                    name,
                    learned["difference"][0][i],
                    learned["difference"][1][i],
                    note=f"95 % intervals cover {learned['coverage'][0][i]:.1%}, "
                    f"held out {learned['coverage'][1][i]:.1%}",
                )
                for i, name in enumerate(names)
            ),
            {
                HOLDS: "The learner picks what was lucky, and the same luck is in the estimate. No "
                "weighting corrects it; estimators with clipped weights only look better, because "
                "their downward bias offsets the optimism. Intervals may hide it: in-sample and "
                f"held out they contain the true value, for {covers}. Those of the plain "
                "estimators are so much wider than this bias that their coverage does not show it."
            },
        ),
        Claim(
            "beyond the paper",
            "on held-out data the plain estimators are unbiased",
            "bias, held out",
            tuple(
                Evidence.same(
                    name, learned["held_out"][0][i], learned["held_out"][1][i], learned["value"]
                )
                for i, name in enumerate(names)
                if name in plain
            ),
            {HOLDS: "The target does not depend on the data that it is evaluated on."},
        ),
    ]
