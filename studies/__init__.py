"""Reproduce the paper's experiments: `python -m studies bandit`.

Each study is a folder. Its `study.py` has one subclass of `studies.harness.study.Study`, which
makes the runs, the summary and the tables; `claims.py` and `picture.py` turn the summary into
verdicts and a figure; `simulation.py` or the like does the work of a run.

To add a study, write such a folder, give its class the `name` of the folder, and add that name to
`STUDIES`. The commands, the help and the report then find it.
"""

# in the order of the report
STUDIES = ("bandit", "lemmas", "adaptive", "cartpole", "blackjack", "coverage", "beyond")
