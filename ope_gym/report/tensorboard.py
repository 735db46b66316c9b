"""Write evaluations to TensorBoard: the OPE tab, values with bands, the table as text.

Nothing is computed here; the writer only lays out what it is given.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.estimators.table import RECOMMENDED, by_recommendation
from ope_gym.report import events
from ope_gym.report.documents import (
    EXPLAINED,
    PLUGIN,
    encode,
    evaluation_document,
    ranking_document,
)
from ope_gym.report.scalars import band, scalars, undefined_ends
from ope_gym.results import Evaluation

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from ope_gym.analysis.overlap import Overlap
    from ope_gym.analysis.ranking_table import Ranking

# the mean return by `add_return`, by Stable-Baselines3, and by its EvalCallback
_RETURNS = ["rollout/(return|ep_rew_mean)$", "eval/mean_reward$"]
_CHARTED = 4  # estimators with scalars; of more only the recommended ones have them
_ANSWERS = ("ope/fresh_episodes", "ope/verdict")  # of the run's main series


class EvaluationWriter(events.Closing):
    """Write evaluations to a TensorBoard run.

    The OPE tab shows every estimator. The standard pages have a layout of Custom Scalars, and the
    scalars `ope/<estimator>/value|low|high`, `ope/fresh_episodes`, `ope/verdict`,
    `diagnostics/<estimator>/ess` and so on, `rollout/return` and `ope/fresh/value`. An evaluation
    with more than four estimators writes scalars for auto and NFIS only, so that the pages stay
    readable.

        with EvaluationWriter("runs/cartpole") as writer:
            writer.add_evaluation(evaluation, step=3)
            writer.add_return(41.2, step=3)

    In a folder of their own, the return of rollouts and fresh evaluations are sub-runs `rollouts`
    and `fresh`: TensorBoard gives each run a colour.

    Args:
        logdir: Folder of the run; or a torch `SummaryWriter` of the training loop, which is then
            written to and left open.
        layout: Whether to lay out the Custom Scalars page, and to write `ope/fresh_episodes` and
            `ope/verdict`; not where the free values of a training do.
    """

    def __init__(self, logdir: str | os.PathLike[str] | Any, *, layout: bool = True) -> None:
        self._logs = {"": events.EventLog(logdir)}  # by sub-run
        self._laid_out, self._answers = not layout, layout
        self._details = events.Documents(self._logs[""], "ope/details", PLUGIN)
        self._last_step: dict[str, int] = {}  # of each tag of an evaluation
        self._undefined: set[str] = set()  # estimators that ever were

    def add_evaluation(
        self,
        evaluation: Evaluation,
        step: int,
        *,
        truth: float | None = None,
    ) -> None:
        """Write the scalars of every estimate and its document for the OPE tab.

        The first call also lays out the Custom Scalars page. Where the value or an end of the
        interval is not finite, all three are left out and `diagnostics/<estimator>/undefined` is 1:
        a band is drawn only if its three series have the same steps.

        Args:
            evaluation: Evaluation to write; the layout shows the estimators of the first one. The
                headline has the name that `evaluation.named("policy 3")` gives the policy.
            step: Step of the training loop, usually the number of the policy.
            truth: Value of the same policy from fresh rollouts, if known.
        """
        self._add_scalars(evaluation, step)
        known = None if truth is None else (truth, math.nan)
        if known is not None:
            self._add_fresh(known, evaluation, step)
        document = evaluation_document(evaluation, truth=known)
        self._add_details(document, step)

    def add_return(self, mean_return: float, step: int) -> None:
        """Write the mean return of the rollouts of this step, as `rollout/return`."""
        self._scalars({"rollout/return": mean_return}, step, "rollouts")

    def add_report(
        self,
        evaluation: Evaluation,
        step: int,
        hparams: Mapping[str, Any],
        *,
        overlap: Overlap | None = None,
        truth: float | None = None,
        truth_error: float = math.nan,
    ) -> None:
        """Write the closing report: table with verdicts and reasons, hyper-parameters, overlap.

        TensorBoard keeps ten texts of a tag, so this is for the end of a run, or now and then. The
        scalars of the evaluation are written too where `add_evaluation` has not.

        Args:
            evaluation: Evaluation to report.
            step: Step of the training loop.
            hparams: Settings of the run; numbers, strings and booleans as they are, the rest as
                text.
            overlap: Overlap of the recorded policies and the target, from
                `ope_gym.overlap(trajectories, target)`, if it is to be drawn.
            truth: Value from fresh rollouts, if known.
            truth_error: Its standard error, if known.
        """
        self._add_scalars(evaluation, step, again=False)
        fresh = None
        if truth is not None and math.isfinite(truth):
            fresh = truth, truth_error
            self._add_fresh(fresh, evaluation, step)
        document = evaluation_document(evaluation, overlap=overlap, truth=fresh)
        self._add_details(document, step)
        error = 0.0 if math.isnan(truth_error) else truth_error
        table = evaluation.table(fresh and fresh[0], error, verbose=True)
        self._add_text("ope/report", table, step, EXPLAINED[evaluation.sample.regime])
        self._hparams(evaluation, hparams, step)
        self._flush()

    def add_ranking(self, ranking: Ranking, step: int) -> None:
        """Write a ranking, which the OPE tab shows beside the evaluation of the same step."""
        document = encode(ranking_document(ranking))
        self._logs[""].add(events.document("ope/ranking", document, PLUGIN), step)
        self._flush()

    def close(self) -> None:
        """Write what is left; flush, and do not close, a `SummaryWriter` that was handed in."""
        for log in self._logs.values():
            log.close()

    def _add_scalars(self, evaluation: Evaluation, step: int, *, again: bool = True) -> None:
        """Write the numbers of an evaluation, and on the first call the layout of the charts.

        Args:
            evaluation: Evaluation to write.
            step: Step of the training loop.
            again: Whether to write also those that have been written at this step.
        """
        evaluation = _charted(evaluation)
        if not self._laid_out:
            self._logs[""].add(_layout(evaluation), 0)
            self._laid_out = True
        numbers = scalars(evaluation)
        if not self._answers:
            numbers = {tag: x for tag, x in numbers.items() if tag not in _ANSWERS}
        for name, estimate in evaluation.items():
            missing = undefined_ends(estimate)
            if missing:
                self._undefined.add(name)
                for end in band(estimate):
                    numbers.pop(f"ope/{name}/{end}", None)
            if name in self._undefined:  # a mark that also comes back to 0
                numbers[f"diagnostics/{name}/undefined"] = float(bool(missing))
        if not again:
            numbers = {tag: x for tag, x in numbers.items() if self._last_step.get(tag) != step}
        self._last_step |= dict.fromkeys(numbers, step)
        self._scalars(numbers, step)

    def _add_details(self, document: Mapping[str, Any], step: int) -> None:
        """Write the document of an evaluation; its tag names the estimators that it holds."""
        names = [row["name"] for row in document["estimates"]]
        self._details.add(encode(document), step, about=json.dumps(names).encode())

    def _add_fresh(self, fresh: tuple[float, float], evaluation: Evaluation, step: int) -> None:
        """Write the value from fresh rollouts, with an interval where its error is known."""
        from scipy.special import ndtri

        value, error = fresh
        level = evaluation.best.interval.level
        reach = float(ndtri((1.0 + level) / 2.0)) * error
        numbers = {"value": value, "low": value - reach, "high": value + reach}
        self._scalars({f"ope/fresh/{end}": n for end, n in numbers.items()}, step, "fresh")

    def _scalars(self, numbers: Mapping[str, float], step: int, part: str = "") -> None:
        finite = {tag: number for tag, number in numbers.items() if math.isfinite(number)}
        if finite:
            self._log(part).add(events.scalars(finite), step)

    def _log(self, part: str) -> events.EventLog:
        """Return the log of a sub-run; one for all where the writer was handed in."""
        folder = self._logs[""].folder
        if folder is None:
            return self._logs[""]
        if part not in self._logs:
            self._logs[part] = events.EventLog(os.path.join(folder, part))
        return self._logs[part]

    def _flush(self) -> None:
        for log in self._logs.values():
            log.flush()

    def _add_text(self, tag: str, table: str, step: int, *notes: str) -> None:
        """Write a table with the spaces that it has, and notes below."""
        preformatted = "\n".join(f"    {line}" for line in table.splitlines())
        self._logs[""].add(events.text(tag, "\n\n".join([preformatted, *notes])), step)

    def _hparams(self, evaluation: Evaluation, hparams: Mapping[str, Any], step: int) -> None:
        """Write the settings, and the scalars whose last values stand beside them."""
        shown = _charted(evaluation)
        values = [f"ope/{name}/value" for name, e in shown.items() if not undefined_ends(e)]
        plain = {key: _plain(value) for key, value in hparams.items()}
        for summary in events.hparams(plain, [*values, "ope/fresh_episodes", "ope/verdict"]):
            self._logs[""].add(summary, step)


def _charted(evaluation: Evaluation) -> Evaluation:
    """Return the estimates that have scalars; the documents of the OPE tab hold all of them."""
    if len(evaluation) <= _CHARTED:
        return evaluation
    return evaluation.select({*RECOMMENDED, by_recommendation(evaluation)[0]})


def _layout(evaluation: Evaluation) -> Summary:
    """Return the charts of the Custom Scalars page, the recommended estimate first."""
    best = by_recommendation(evaluation)[0]
    estimate = f"ope/({re.escape(best)}|settled|provisional|fresh)/value$"
    lines = {f"{best}, return of rollouts, fresh evaluations": [estimate, *_RETURNS]}
    if len(evaluation) > 1:
        lines["all estimators"] = [f"ope/{re.escape(name)}/value$" for name in evaluation]
    lines["as sure as this many fresh episodes"] = ["ope/fresh_episodes$"]
    return events.layout({f"{best} with its interval": f"ope/{best}"}, lines)


def _plain(value: Any) -> bool | int | float | str:
    """Return a value that the hyper-parameter page can hold."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
