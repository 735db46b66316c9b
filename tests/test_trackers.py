"""Test that other trackers take the scalars of an evaluation, each offline and where installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ope_gym import Evaluation, evaluate
from ope_gym.report.scalars import scalars
from ope_gym.report.tensorboard import EvaluationWriter
from tests import builders

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages warn of themselves


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    made = builders.recorded(1, (30, 30, 30))
    return evaluate(made.trajectories, made.target, estimators=["NFIS", "BIS"])


def offline_run(folder: Path, **more: Any) -> Any:
    wandb = pytest.importorskip("wandb")
    return wandb.init(project="ope", mode="offline", dir=folder, **more)


def test_weights_and_biases(
    tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = offline_run(tmp_path)
    run.log(scalars(evaluation), step=3, commit=True)
    expected = scalars(evaluation)
    assert {tag: run.summary[tag] for tag in expected} == pytest.approx(expected)
    run.finish()


def test_weights_and_biases_follows_tensorboard(
    tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts a writer of its own in the place of TensorBoard's, which says what to follow."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = offline_run(tmp_path, sync_tensorboard=True)
    followed: list[str] = []
    monkeypatch.setattr(
        type(run), "_tensorboard_callback", lambda _, logdir, **__: followed.append(str(logdir))
    )
    with EvaluationWriter(tmp_path / "runs" / "toy") as writer:
        writer.add_evaluation(evaluation, 0)
    run.finish()
    assert [os.path.abspath(path) for path in followed] == [str(tmp_path / "runs" / "toy")]


def test_mlflow(tmp_path: Path, evaluation: Evaluation) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with mlflow.start_run() as run:
        mlflow.log_metrics(scalars(evaluation), step=3)
    stored = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert stored == pytest.approx(scalars(evaluation))


def test_trackio(tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="ope", name="toy", embed=False)
    trackio.log(scalars(evaluation), step=3)
    trackio.finish()
    assert run.name == "toy"
    assert list(tmp_path.rglob("ope*.db"))
