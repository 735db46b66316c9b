"""Run estimators over weighted episodes, and conclude: the one way through every evaluation.

Recorded episodes, files and arrays of log-probabilities are prepared differently and meet here:
all that is left of them is `reduce`, which answers requests for sums over all episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ope_gym.arrays import IntArray
from ope_gym.estimators.reductions import Steps, together
from ope_gym.estimators.run import Reduce, aim, estimator, run
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.bootstrap import make_draws
from ope_gym.inference.computed import Computed
from ope_gym.inference.conclude import Known, conclude, value_alone, with_deviation
from ope_gym.inference.estimate import Sample
from ope_gym.inference.intervals import Betting
from ope_gym.options import Options
from ope_gym.results import Evaluation


class Facts(NamedTuple):
    """Facts about the data, which do not depend on the estimators.

    Args:
        sample: The trajectories.
        known: Makes the facts that verdicts need.
    """

    sample: Sample
    known: Callable[[], Known]


@dataclass(frozen=True, eq=False)
class Question:
    """A question about one or more targets.

    Args:
        names: The estimators.
        options: Those of the evaluation.
        setting: The facts that the estimators share.
        betting: The interval, if it is one by betting.
    """

    names: tuple[str, ...]
    options: Options
    setting: Setting
    betting: Betting | None = None

    @classmethod
    def about(
        cls,
        names: tuple[str, ...],
        options: Options,
        *,
        ids: IntArray,
        counts: IntArray,
        strata: IntArray,
        groups: IntArray,
        has_q: bool,
        horizon: int | None = None,
    ) -> Question:
        """Return the question about n trajectories of K behaviours.

        Args:
            names: The estimators.
            options: Those of the evaluation.
            ids: (n,) behaviours.
            counts: (K,) trajectories of each.
            strata: (n,) groups inside which the bootstrap draws.
            groups: (n,) groups inside which influence values are centred.
            has_q: Whether there is a q model.
            horizon: Time limit of the environment; None if it is unknown.
        """
        setting = Setting(
            ids.size,
            groups,
            ids,
            counts,
            options.gamma,
            options.weighting.cap,
            has_q,
            make_draws(strata, options.resamples, options.seed),
            not options.value_alone,
        )
        return cls(names, options, setting, options.betting(horizon))

    def answer(
        self,
        reduce: Reduce,
        facts: Sequence[Steps[Facts]],
        scatter: Callable[[int, list[Computed]], list[Computed]] | None = None,
    ) -> list[Evaluation]:
        """Return the estimates of each target.

        Args:
            reduce: Answers requests that are aimed at one of the targets.
            facts: What is known, collected beside the estimators in the same passes.
            scatter: Adds the error of estimated propensities to what the estimators computed.
        """
        generators = [
            aim(i, together(some, *(estimator(n, self.setting, self.betting) for n in self.names)))
            for i, some in enumerate(facts)
        ]
        evaluations = []
        for i, (about, *computed) in enumerate(run(generators, reduce)):
            adjusted = computed if scatter is None else scatter(i, computed)
            evaluations.append(self._conclude(about, dict(zip(self.names, adjusted, strict=True))))
        return evaluations

    def _conclude(self, about: Facts, computed: dict[str, Computed]) -> Evaluation:
        """Add errors, intervals and verdicts to the numbers of the estimators."""
        options, sample = self.options, about.sample
        level, seed = options.level, options.seed
        if options.value_alone:
            finish = partial(value_alone, sample=sample, known=about.known, level=level)
        else:
            known = with_deviation(about.known(), computed)
            kind = self.betting or options.kind
            finish = partial(conclude, known=known, kind=kind, level=level, seed=seed)
        return Evaluation({n: finish(n, ESTIMATORS[n], c) for n, c in computed.items()})
