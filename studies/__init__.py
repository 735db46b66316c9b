"""Reproduce the paper's experiments: `python -m studies bandit`.

Each study is a folder. Its `study.py` has one subclass of `studies.harness.study.Study`, which
makes the runs, the summary and the tables; `claims.py` and `picture.py` turn the summary into
verdicts and a figure; `simulation.py` or the like does the work of a run.

To add a study, write such a folder and add a line to `STUDIES`. The commands, the help and the
report then find it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """How a study is announced and run; nothing of it changes the result of a single run."""

    title: str
    runs: int  # default of --runs
    chunk: int  # a worker does this many runs at once, and they share one file
    takes: str = ""  # rough duration with two workers
    variants: tuple[dict[str, Any], ...] = ()  # other settings that `all` runs as well
    also: tuple[str, ...] = ()  # studies that belong to it: its command runs them, too


# by the name of the folder, in the order of the report
STUDIES = {
    "bandit": Plan(
        "one behaviour, 20 actions (figure 1, table 1)",
        runs=10_000,
        chunk=500,
        takes="half a minute",
    ),
    "lemmas": Plan(
        "several behaviours, random problems (lemmas 1 and 2)",
        runs=1000,
        chunk=50,
        takes="half a minute",
    ),
    "adaptive": Plan(
        "policies that learn from the data (section 3.3)",
        runs=1000,
        chunk=50,
        takes="half a minute",
    ),
    "cartpole": Plan(
        "the last policy of PoWER from ten before it (table 2)",
        runs=400,
        chunk=10,
        takes="two minutes",
        variants=({"env": "CartPole-v0"}, {"weighting": "reward-to-go"}),
    ),
    "blackjack": Plan(
        "the last policy of Monte-Carlo control (table 3)",
        runs=2000,
        chunk=50,
        takes="half a minute",
        variants=({"reward_model": "cross-fit"},),
    ),
    "coverage": Plan(
        "how often intervals contain the value, and how wide they are",
        runs=100,
        chunk=1,
        takes="5 minutes",
        also=("outside",),
    ),
    "outside": Plan(
        "errors, coverage and alarms on problems like those of others",
        runs=100,
        chunk=1,
        takes="25 minutes",
    ),
    "duel": Plan(
        "false decisions under continuous peeking, and fresh episodes needed",
        runs=30,
        chunk=1,
        takes="3 minutes",
    ),
    "distribution": Plan(
        "coverage of quantiles, CVaR, spread, probabilities and of the band",
        runs=80,
        chunk=2,
        takes="2 minutes",
    ),
    "propensities": Plan(
        "coverage with propensities that were estimated, not recorded",
        runs=100,
        chunk=1,
        takes="4 minutes",
    ),
}
