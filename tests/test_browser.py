"""Test in a real browser that TensorBoard draws the charts of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ope_gym import evaluate
from ope_gym.report.tensorboard import EvaluationWriter
from tests import builders

COMMAND = Path(__file__).parents[1] / "docs" / "screenshot.py"

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None and shutil.which("chromium-browser") is None,
    reason="no chromium on this machine (Debian: apt-get install chromium)",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the pages of a run with five evaluations show, and their pictures."""
    folder = tmp_path_factory.mktemp("browser")
    with EvaluationWriter(folder / "runs" / "toy") as writer:
        for step in range(5):
            made = builders.recorded(1, (10 + 5 * step, 10))
            evaluation = evaluate(made.trajectories, made.target, estimators=["NFIS", "FIS"])
            writer.add_evaluation(evaluation, step)
            writer.add_return(float(made.trajectories.returns().mean()), step)
    done = subprocess.run(
        [sys.executable, COMMAND, folder / "runs", "--out", folder],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages: dict[str, Any] = json.loads(done.stdout)
    pages["folder"] = folder
    return pages


def test_scalars_are_drawn(shown: dict[str, Any]) -> None:
    cards = {card["title"]: card for card in shown["scalars"]}
    for tag in ["rollout/return", "ope/NFIS/value", "ope/NFIS/low", "ope/NFIS/high"]:
        assert cards[tag]["lines"] == 1, tag
    assert "ope/FIS/value" in cards


def test_bands_are_drawn_in_the_order_of_the_evaluation(shown: dict[str, Any]) -> None:
    assert [card["title"] for card in shown["custom_scalars"]] == [
        "estimates and mean return",
        "NFIS",
        "FIS",
        "effective sample size",
    ]
    together, *bands, ess = shown["custom_scalars"]
    assert (together["lines"], together["bands"]) == (3, 0)  # the return and two estimates
    for card in bands:
        assert (card["lines"], card["bands"]) == (1, 1), card["title"]
        assert card["points"] >= 5
    assert ess["lines"] == 2


@pytest.mark.parametrize("page", ["scalars", "custom_scalars"])
def test_pictures_show_something(shown: dict[str, Any], page: str) -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(shown["folder"] / f"{page}.png") as picture:
        assert picture.size == (1400, 900)
        pixels = np.asarray(picture.convert("RGB"))
    assert len(np.unique(pixels @ np.array([1, 256, 65536]))) > 100
