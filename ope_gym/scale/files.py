"""Prepare episodes in files, which are read in passes a block at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ope_gym.arrays import FloatArray
from ope_gym.estimators.run import Reduce
from ope_gym.models import default_linear
from ope_gym.models.base import Baseline, QModel
from ope_gym.options import Options
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import asked
from ope_gym.scale.fitting import fit_chunks
from ope_gym.scale.passes import Job, fit_for_threads, reduce_in_passes
from ope_gym.scale.survey import Survey
from ope_gym.scale.weighing import Weighing
from ope_gym.scale.workers import Workers

_STEPS = 1 << 26  # steps times targets of one pass
_IN_BLOCKS = (
    "these are read from files in blocks: load them with Trajectories.load, or raise "
    "Compute(block_steps=...)"
)


class Files:
    """Episodes in files, to be evaluated.

    Args:
        survey: Who recorded them.
        options: Those of the evaluation.
    """

    capacity = _STEPS

    def __init__(self, survey: Survey, options: Options) -> None:
        self._survey, self._options = survey, options
        compute = options.compute
        self._workers = Workers(compute.workers, compute.ray)

    def policy(self, policy: Policy) -> Policy:
        """Return a policy as it can be asked; its steps are not at hand yet."""
        return policy

    def lacks(self, target: Policy) -> dict[str, str]:
        """Return why needs of estimators are not met, in words."""
        return {**self._survey.lacks, "rounds": _IN_BLOCKS, "one step": _IN_BLOCKS}

    def check_model(self, model: QModel | Baseline | None, target: Policy) -> QModel | None:
        """Return a q model that can be fitted to files in blocks, or raise."""
        if isinstance(model, Baseline) or (model is not None and model.survey(target) is None):
            raise TypeError(
                f"q_model is {_short(model)}, but episodes that are read from files in blocks take "
                "a LinearQ, 'default' or None: load them with Trajectories.load, or raise "
                "Compute(block_steps=...)"
            )
        return model

    def default_model(self, target: Policy) -> QModel | None:
        """Return the default q model, which needs a finite target."""
        source = self._survey.source
        _, chunk = next(source.chunks(source.tasks[0]))
        if not isinstance(asked(target, chunk.observations, chunk.actions), FinitePolicy):
            return None
        return default_linear(chunk, target)

    def model_name(self, model: Any) -> str | None:
        """Return the name of a q model that is wanted, or why there is none."""
        if model is not None:
            return type(model).__name__
        return None if self._options.q_model is None else "none that can be fitted in blocks"

    def reward_model(self, model: Any, used: bool) -> str | tuple[FloatArray, FloatArray]:
        """Return the reward model, or raise."""
        if not (isinstance(model, str) and model == "deterministic"):
            raise ValueError(
                f"reward_model is {_short(model)}, which needs all episodes in memory, but "
                f"{_IN_BLOCKS}"
            )
        return "deterministic"

    def deterministic(self, target: Policy) -> bool:
        """Tell whether a policy takes one action for certain, which nobody looks for here."""
        return False

    def prepare(
        self, weighing: Weighing, targets: Sequence[Policy], model: Any
    ) -> tuple[Reduce, None]:
        """Return what answers requests, in passes; errors of propensities need the memory."""
        survey, source = self._survey, self._survey.source
        job = Job(
            source,
            tuple(targets),
            weighing,
            threads=fit_for_threads(source, targets, model),
            done=self._options.compute.progress,
        )
        ids, fold = survey.behaviours.ids, None
        if model is not None:
            values, fold = fit_chunks(job, model, ids, survey.roster.longest, self._workers)
            job = dataclasses.replace(job, q=values)
        return reduce_in_passes(job, self._workers, ids, fold), None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
