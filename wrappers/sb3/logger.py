"""Values in the outputs of a Stable-Baselines3 logger, beside SB3's own entries.

`Logger.dump` is not used: it would also write what SB3 has collected so far, at other steps than
without the callback. Each output gets rows of its own instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.logger import DISABLED, KVWriter, Logger, TensorBoardOutputFormat

from ope_gym.analysis.overlap import overlap
from ope_gym.report.free_values import FreeWriter, free_scalars
from ope_gym.report.tensorboard import EvaluationWriter
from wrappers.sb3.snapshots import known_policy

if TYPE_CHECKING:
    from ope_gym.data.trajectories import Trajectories
    from ope_gym.online import FreeEstimate
    from ope_gym.results import Evaluation
    from wrappers.sb3.saved import Patience

__all__ = ["EvaluationLog"]


class EvaluationLog:
    """Writes values, bands and a report to TensorBoard, and the values to all other outputs.

    Args:
        level: of the intervals.
        patience: with a disk that is full.
    """

    def __init__(self, level: float, patience: Patience) -> None:
        self._level, self._patience = level, patience
        self._writers: dict[Any, FreeWriter] = {}  # one for each summary writer

    def add(self, logger: Logger, estimates: Mapping[str, FreeEstimate]) -> None:
        """Write estimates of one policy.

        Args:
            logger: of the model.
            estimates: by their kind, "provisional", "settled" or "fresh".
        """
        if logger.level == DISABLED or not estimates:
            return
        step = next(iter(estimates.values())).timesteps
        values = {"ope/timesteps": float(step)}
        for kind, estimate in estimates.items():
            values |= free_scalars(estimate, kind)
        for output in logger.output_formats:
            if isinstance(output, TensorBoardOutputFormat):
                with self._writing(output):
                    for kind, estimate in estimates.items():
                        self._writer(output.writer).add(estimate, kind)
                    output.writer.flush()
            elif isinstance(output, KVWriter):
                with self._patience.writing(type(output).__name__):
                    output.write(values, dict.fromkeys(values, ()), step)

    def report(
        self, model: Any, evaluation: Evaluation, data: Trajectories, *, gamma: float
    ) -> None:
        """Write the closing report of a model to TensorBoard, if that is one of the outputs."""
        settings = {"algorithm": type(model).__name__, "gamma": gamma}
        for output in model.logger.output_formats:
            if isinstance(output, TensorBoardOutputFormat):
                with self._writing(output):
                    both = overlap(data, known_policy(model))
                    writer = EvaluationWriter(output.writer, layout=False)
                    writer.add_report(evaluation, model.num_timesteps, settings, overlap=both)

    @contextlib.contextmanager
    def _writing(self, output: TensorBoardOutputFormat) -> Iterator[None]:
        """Have patience with TensorBoard: a writer that failed once fails for ever."""
        writer: Any = output.writer
        with self._patience.writing("TensorBoard's file"):
            try:
                yield
            except OSError:
                writer.file_writer = writer.all_writers = None  # the next event opens another file
                raise

    def _writer(self, summary_writer: Any) -> FreeWriter:
        if summary_writer not in self._writers:
            self._writers[summary_writer] = FreeWriter(summary_writer, level=self._level)
        return self._writers[summary_writer]
