"""Surveys cut shards into tasks, and a scratch folder keeps the weights between passes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ope_gym.scale.shard_tasks import Setting, weight_pass
from ope_gym.scale.sharded import evaluate_shards, evaluate_survey

from ope_gym import Compute, LinearSigmoid
from ope_gym.options import check_options
from ope_gym.scale.sources import survey
from ope_gym.scale.spool import Spool, scratch_folder
from ope_gym.scale.workers import Workers
from tests.builders import assert_same, recorded
from tests.test_sharded import mixed_files, split

TARGET = LinearSigmoid(np.full(3, 0.3))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


def _plain() -> Any:
    return check_options(["FIS", "NFIS"], 1.0, 10.0, "ess-t", 0.95, 0, 10, None, None)


def test_tasks_know_what_comes_before_them() -> None:
    r = recorded(3, (9, 7, 5))
    parts = split(r.trajectories, 0, 6)
    found = survey(parts, "all", 15, Workers())
    mixture = found.mixture
    before = np.zeros_like(mixture.counts)
    setting = Setting(mixture, r.target, _plain(), held_out=False, steps=15)
    for task in found.tasks:
        np.testing.assert_array_equal(task.before, before[task.behaviours])
        part = weight_pass(setting, task)
        counts = np.bincount(np.concatenate(part.ids), minlength=before.size)
        np.testing.assert_array_equal(task.behaviours, np.flatnonzero(counts))
        np.testing.assert_array_equal(task.counts, counts[task.behaviours])
        assert task.episodes == slice(before.sum(), before.sum() + counts.sum())
        before = before + counts
    np.testing.assert_array_equal(before, mixture.counts)
    assert sum(task.steps for task in found.tasks) == mixture.steps == r.trajectories.n_steps


def test_weights_that_are_not_in_the_folder_are_made_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that does not share it; one that was cut is an error."""
    found = survey(files, "all", 150, Workers())
    whole = evaluate_survey(found, TARGET, _plain(), Workers())

    class Forgetful(Workers):
        def in_order(self, function: Any, items: Any) -> Any:
            kept = sorted(tmp_path.glob("*/*"))
            for path in kept[::2]:
                path.unlink() if not cut else path.write_bytes(path.read_bytes()[:-5])
            yield from super().in_order(function, items)

    cut = False
    with scratch_folder(tmp_path) as folder:
        again = evaluate_survey(found, TARGET, _plain(), Forgetful(), folder=folder)
    assert_same(whole, again)
    cut = True
    with (
        pytest.raises(OSError, match="`scratch` was cut short"),
        scratch_folder(tmp_path) as folder,
    ):
        evaluate_survey(found, TARGET, _plain(), Forgetful(), folder=folder)
    assert not list(tmp_path.iterdir())


def test_held_out_episodes_if_there_are_any() -> None:
    data = recorded(6, (30, 25)).trajectories
    some = np.arange(len(data)) % 3 == 0
    mixed = dataclasses.replace(data, held_out=some)
    none = dataclasses.replace(data, held_out=np.zeros(len(data), dtype=bool))
    for shards, which, count in (
        ([none, mixed], "auto", some.sum()),
        ([none, mixed], "all", 2 * len(data)),
        ([none], "auto", len(data)),
    ):
        with contextlib.ExitStack() as stack:
            if count == some.sum():
                words = r"shard 0: 0 of 55 episodes used, .*data='all'"
                stack.enter_context(pytest.warns(UserWarning, match=words))
            found = survey(shards, which, 50, Workers())
        assert found.mixture.trajectories == count
        assert sum(int(task.counts.sum()) for task in found.tasks) == count


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is needed")
def test_a_full_scratch_disk_is_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool, "_partial", lambda _: Path("/dev/full"))
    with pytest.raises(OSError, match=rf"scratch is '{tmp_path}': the disk is full; give a folder"):
        evaluate_shards(files, TARGET, estimators="NFIS", compute=Compute(scratch=tmp_path))
