"""Write evaluations to TensorBoard: values with bands, diagnostics, figures, the table as text.

Nothing is computed here; the writer only lays out what it is given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from ope_gym.inference.estimate import Estimate
from ope_gym.inference.regimes import label
from ope_gym.report import text
from ope_gym.report.canvas import render
from ope_gym.report.scalars import band, scalars, undefined_ends
from ope_gym.report.weight_figures import ess_figure, weights_figure
from ope_gym.results import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ope_gym.analysis.overlap import Overlap
    from ope_gym.analysis.ranking_table import Ranking

_EXPLAINED = {
    "held-out": "The learner never trained on these episodes: training makes none optimistic.",
    "fresh": "One policy recorded these episodes, and the target was fixed before them.",
    "adaptive": (
        "The target was fixed before these episodes, but policies that recorded them learned from "
        "earlier ones: basic weights stay unbiased, weights against a mixture do not quite."
    ),
    "in-sample": (
        "The target was trained on these very episodes, or nothing says that it was not: its value "
        "is overestimated and its interval is too narrow; hold out a share of the episodes."
    ),
    "unstated": "It is not known whether the learner trained on these episodes.",
}


_RETURN = "rollout/(return|ep_rew_mean)$"  # of `add_return`, and of Stable-Baselines3


class EvaluationWriter:
    """Write evaluations to a TensorBoard run.

    Tags are `ope/<estimator>/value|low|high`, `diagnostics/<estimator>/…`, `rollout/return` and
    `ope/truth`; the Custom Scalars page shows values with their bands.

        with EvaluationWriter("runs/cartpole") as writer:
            writer.add_evaluation(evaluation, step=3)
            writer.add_return(41.2, step=3)

    Args:
        logdir: folder of the run; or a `SummaryWriter` of the training loop, which is then written
            to and left open.
        layout: whether to lay out the Custom Scalars page; a run has one layout, the last.
    """

    def __init__(self, logdir: str | Path | SummaryWriter, *, layout: bool = True) -> None:
        self._owned = not isinstance(logdir, SummaryWriter)
        self._writer = (
            logdir
            if isinstance(logdir, SummaryWriter)
            else SummaryWriter(str(logdir), flush_secs=10)  # seen while training goes on
        )
        self._laid_out = not layout
        self._last_step: dict[str, int] = {}  # of each estimator
        self._undefined: set[str] = set()  # estimators that ever were

    def add_evaluation(
        self, evaluation: Evaluation, step: int, *, truth: float | None = None
    ) -> None:
        """Write the scalars of every estimate, and on the first call the layout of the charts.

        Where the value or an end of the interval is not finite, all three are left out and
        `diagnostics/<estimator>/undefined` is 1: a band is drawn only if its three series have the
        same steps.

        Args:
            evaluation: to write; the layout shows the estimators of the first one.
            step: of the training loop, usually the number of the policy.
            truth: the value of the same policy from fresh rollouts, if known.
        """
        if not self._laid_out:
            self._writer.add_custom_scalars(_layout(list(evaluation)))
            self._laid_out = True
        numbers = scalars(evaluation)
        for name, estimate in evaluation.items():
            self._last_step[name] = step
            missing = undefined_ends(estimate)
            if missing:
                self._undefined.add(name)
                for end in band(estimate):
                    numbers.pop(f"ope/{name}/{end}", None)
            if name in self._undefined:  # a mark that also comes back to 0
                numbers[f"diagnostics/{name}/undefined"] = float(bool(missing))
        if truth is not None:
            numbers["ope/truth"] = truth
        for tag, number in numbers.items():
            self._scalar(tag, number, step)

    def add_return(self, mean_return: float, step: int) -> None:
        """Write the mean return of the rollouts of this step, as `rollout/return`."""
        self._scalar("rollout/return", mean_return, step)

    def add_report(
        self,
        evaluation: Evaluation,
        step: int,
        hparams: Mapping[str, Any],
        *,
        overlap: Overlap | None = None,
        truth: float | None = None,
    ) -> None:
        """Write the closing report: table, verdicts, figures, histograms, hyper-parameters.

        TensorBoard keeps ten texts and images of a tag, so this is for the end of a run, or now and
        then. The scalars of the evaluation are written too where `add_evaluation` has not.

        Args:
            evaluation: to report.
            step: of the training loop.
            hparams: of the run; numbers, strings and booleans as they are, the rest as text.
            overlap: of the recorded policies and the target, from
                `ope_gym.analysis.overlap.overlap(trajectories, target)`, if it is to be drawn.
            truth: the value from fresh rollouts, if known.
        """
        rest = {name: e for name, e in evaluation.items() if self._last_step.get(name) != step}
        if rest:
            self.add_evaluation(Evaluation(rest), step)
        notes = []
        try:
            known = truth if truth is not None and math.isfinite(truth) else None
            self._figure("ope/forest", evaluation.plot(known), step)
            self._figure("ope/ess_over_time", ess_figure(evaluation), step)
            self._figure("ope/weights", weights_figure(evaluation), step)
            if overlap is not None:
                self._figure("ope/policy_overlap", overlap.plot(), step)
        except ImportError as error:
            notes.append(f"No figures: {error}.")
        for name, estimate in evaluation.items():
            note = self._weights(name, estimate, step)
            if note:
                notes.append(note)
        if truth is not None:
            self._scalar("ope/truth", truth, step)
        self._writer.add_text(
            "ope/report", evaluation_markdown(evaluation, truth=truth, notes=notes), step
        )
        self._hparams(evaluation, hparams, step)
        self._writer.flush()

    def add_ranking(self, ranking: Ranking, step: int) -> None:
        """Write a ranking: its table as text, its figure, and the numbers of each policy.

        Tags are `ranking/report`, `ranking/figure` and `ranking/<policy>/value|low|high|
        probability_best`; in names of policies all but letters, digits, "." and "-" become "_".

        Args:
            ranking: to write.
            step: of the training loop.
        """
        for name, ranked in ranking.items():
            folder = f"ranking/{re.sub(r'[^-.A-Za-z0-9]', '_', name)}"
            if not undefined_ends(ranked.estimate):
                for end, value in band(ranked.estimate).items():
                    self._scalar(f"{folder}/{end}", value, step)
            self._scalar(f"{folder}/probability_best", ranked.probability_best, step)
        told = {ranked.estimate.sample.regime for ranked in ranking.values()}
        lines = [ranking.markdown(), ""]
        lines += [f"**Data: {label(r)}.** {_EXPLAINED[r]}" for r in _EXPLAINED if r in told]
        try:
            self._figure("ranking/figure", ranking.plot(), step)
        except ImportError as error:
            lines += ["", f"No figure: {error}."]
        self._writer.add_text("ranking/report", "\n".join(lines), step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left; flush, and do not close, a `SummaryWriter` that was handed in."""
        if self._owned:
            self._writer.close()
        else:
            self._writer.flush()

    def __enter__(self) -> EvaluationWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(tag, float(value), step)

    def _figure(self, tag: str, figure: Figure, step: int) -> None:
        self._writer.add_image(tag, render(figure), step, dataformats="HWC")
        figure.clear()

    def _weights(self, name: str, estimate: Estimate, step: int) -> str:
        """Write a histogram of log10 of the last weights; return in words what it cannot show."""
        logs = estimate.diagnostics.log_last / math.log(10)
        finite = logs[np.isfinite(logs)]
        if finite.size:
            self._writer.add_histogram(f"log10_weight/{name}", finite, step, bins=30)
        zero = logs.size - finite.size
        return f"{name}: {zero:,} of {logs.size:,} episodes have weight 0." if zero else ""

    def _hparams(self, evaluation: Evaluation, hparams: Mapping[str, Any], step: int) -> None:
        # not SummaryWriter.add_hparams: it opens a second run folder for them
        metrics = {
            tag: 0.0  # the page shows the last value of the scalar of this tag
            for name, estimate in evaluation.items()
            for tag in (f"ope/{name}/value", f"diagnostics/{name}/ess")
            if not (undefined_ends(estimate) and tag.startswith("ope/"))
        }
        plain = {key: _plain(value) for key, value in hparams.items()}
        file_writer: Any = self._writer.file_writer
        for summary in hparams_summaries(plain, metrics):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary, step)


def evaluation_markdown(
    evaluation: Evaluation, *, truth: float | None = None, notes: list[str]
) -> str:
    """Return the evaluation as Markdown: data, regime, table, verdicts with reasons, notes."""
    sample, first = evaluation.sample, next(iter(evaluation.values())).interval
    ends = f"{first.level:.0%} interval ({first.method})"
    head = ["estimator", "value", "std. error", ends, "ESS", "largest share", "mean weight"]
    rows = [[*head, "verdict"]]
    for name, e in evaluation.items():
        d = e.diagnostics
        rows.append(
            [
                name,
                text.number(e.value),
                text.number(e.standard_error),
                text.interval(e.interval.low, e.interval.high),
                f"{d.ess:.1f}",
                f"{d.max_share:.1%}",
                text.number(d.mean_weight),
                f"**{e.verdict.colour}**",
            ]
        )
    reasons = text.grouped({name: str(e.verdict) for name, e in evaluation.items()})
    bases = text.reasons({name: e.basis for name, e in evaluation.items() if e.basis})
    missing = {name: undefined_ends(e) for name, e in evaluation.items()}
    marked = [f"{name} ({', '.join(ends)})" for name, ends in missing.items() if ends]
    paragraphs = [
        f"{text.size(sample)}, gamma {sample.gamma:g}.",
        f"**Data: {label(sample.regime)}.** {_EXPLAINED[sample.regime]}",
        *([f"Weights: {sample.mixture}."] if sample.mixture else []),
        "\n".join(text.markdown(rows, left=(0, 7))),
        *([] if truth is None else [f"Truth, from fresh rollouts: {text.number(truth)}."]),
        "\n".join(f"- **{', '.join(names)}** {why}" for why, names in reasons.items()),
        *(f"{basis}." for basis in bases),
        *([f"Undefined, so not drawn: {'; '.join(marked)}."] if marked else []),
        *notes,
    ]
    return "\n\n".join(paragraphs)


def _layout(names: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the Custom Scalars page; TensorBoard wants a band's tags in order."""
    values = [f"ope/{re.escape(name)}/value$" for name in names]
    ess = [f"diagnostics/{re.escape(name)}/ess$" for name in names]
    bands = {
        name: ["Margin", [f"ope/{name}/{end}" for end in ("value", "low", "high")]]
        for name in reversed(names)  # TensorBoard shows bands in reverse, after the lines
    }
    lines = ["Multiline", [_RETURN, "ope/truth$", *values]]
    return {
        "Value of the policy": {"estimates and mean return": lines, **bands},
        "Diagnostics": {"effective sample size": ["Multiline", ess]},
    }


def _plain(value: Any) -> bool | int | float | str:
    """Return a value that the hyper-parameter page can hold."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
