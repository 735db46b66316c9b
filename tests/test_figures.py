"""Figures and the overlap they draw: exact cases, and pictures that are not empty."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import evaluate, evaluate_log_probs, figures
from ope_gym.buffer import TrajectoryBuffer
from ope_gym.overlap import Overlap, overlap
from ope_gym.policies import UnavailablePolicy, Uniform
from ope_gym.trajectories import Trajectories
from tests import builders

Floats = NDArray[np.float64]


def bandit(tables: list[list[float]], actions: list[list[int]]) -> Trajectories:
    """One state, one step: the actions that each policy took."""
    buffer = TrajectoryBuffer()
    for table, taken in zip(tables, actions, strict=True):
        number = buffer.add_policy(builders.Table(np.array([table])))
        for action in taken:
            buffer.append([0], [action], [1.0], [np.log(table[action])], number, terminated=True)
    return buffer.view()


def affinity(p: list[float], q: list[float]) -> float:
    return float(np.sqrt(np.multiply(p, q)).sum() ** 2)


def test_overlap_is_the_squared_bhattacharyya_coefficient() -> None:
    # actions are taken exactly as often as their probabilities say, so the mean is the expectation
    first, second, target = [0.5, 0.5], [0.25, 0.75], [0.9, 0.1]
    data = bandit([first, second], [[0, 0, 1, 1], [0, 1, 1, 1]])
    result = overlap(data, builders.Table(np.array([target])))
    expected = [[affinity(p, q) for q in (first, second)] for p in (first, second, target)]
    np.testing.assert_allclose(result.matrix, expected, rtol=1e-12)
    assert result.evaluated == ("policy 0", "policy 1", "target")
    assert result.recorded == ("policy 0", "policy 1")
    assert result.counts.tolist() == [4, 4]


def test_overlap_is_zero_without_common_actions() -> None:
    data = bandit([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[0, 0], [1, 1]])
    result = overlap(data, builders.Table(np.array([[0.0, 0.5, 0.5]])))
    # half of what the target does was never recorded: not 1 with the policy that covers the rest
    np.testing.assert_allclose(result.matrix, np.array([[1, 0], [0, 1], [0, 0.5]]), atol=1e-12)


def test_overlap_from_own_episodes_where_a_policy_cannot_be_asked() -> None:
    first, second = [0.5, 0.5], [0.25, 0.75]
    data = bandit([first, second], [[0, 1], [0, 1, 1, 1]])
    lost = Trajectories(
        **{
            field: getattr(data, field)
            for field in data.__dataclass_fields__
            if field != "policies"
        },
        policies=(UnavailablePolicy("gone", {}), data.policies[1]),
    )
    result = overlap(lost, builders.Table(np.array([first])))
    expected: list[list[float]] = [
        [np.nan, np.nan],
        [affinity(second, first), 1],
        [1, affinity(first, second)],
    ]
    np.testing.assert_allclose(result.matrix, expected, rtol=1e-12)


def test_an_episode_is_worth_at_most_the_overlap() -> None:
    """ESS / n_j <= A_ij / mean(w) holds on every sample when A comes from the episodes of j."""
    made = builders.recorded(3, (40,))
    result = overlap(made.trajectories, made.target)
    estimate = evaluate(made.trajectories, made.target, estimators="BIS")["BIS"]
    w = np.exp(estimate.diagnostics.log_last)
    share = w.sum() ** 2 / np.square(w).sum() / w.size
    assert share <= np.mean(np.sqrt(w)) ** 2 / w.mean() + 1e-12
    # a mixture of one policy is that policy, so both ways to the overlap agree but for the scale
    own = np.mean(np.sqrt(w)) ** 2 / max(w.mean(), 1.0)
    assert result.matrix[1, 0] == pytest.approx(own, rel=1e-12)


def test_overlap_takes_policies_from_the_first_to_the_last() -> None:
    made = builders.recorded(0, (1,) * 9)
    result = overlap(made.trajectories, made.target, limit=3)
    assert result.recorded == ("policy 0", "policy 4", "policy 8")
    assert result.matrix.shape == (4, 3)
    assert np.diag(result.matrix) == pytest.approx([1, 1, 1])
    assert (result.matrix >= 0).all()
    assert (result.matrix <= 1).all()


def test_overlap_refuses_what_it_cannot_compare() -> None:
    made = builders.recorded(0, (2, 2))
    with pytest.raises(ValueError, match="limit is 1"):
        overlap(made.trajectories, made.target, limit=1)
    with pytest.raises(ValueError, match="no episode"):
        overlap(TrajectoryBuffer(), Uniform(2))


def test_ess_figure_has_a_line_for_each_kind_of_weights() -> None:
    pytest.importorskip("matplotlib")
    made = builders.recorded(1, (30, 30))
    evaluation = evaluate(made.trajectories, made.target, estimators=["BIS", "NBIS", "NFIS"])
    figure = figures.ess_figure(evaluation)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    drawn = {label: line for label, line in lines.items() if not str(label).startswith("_")}
    assert list(drawn) == ["BIS, NBIS", "NFIS"]
    curve = evaluation["NFIS"].diagnostics.ess_curve
    np.testing.assert_array_equal(drawn["NFIS"].get_ydata(), curve)
    assert_picture(figures.render(figure))


def test_ess_figure_of_one_step_without_weight() -> None:
    pytest.importorskip("matplotlib")
    evaluation = evaluate_log_probs(
        [-np.inf, -np.inf], [[0.0, 0.0]], [0, 0], [1.0, 1.0], [0, 1, 2], estimators="FIS"
    )
    figure = figures.ess_figure(evaluation)
    line = figure.axes[0].lines[0]
    assert line.get_marker() == "o"
    assert figure.axes[0].get_ylim()[0] == np.asarray(line.get_ydata())[0] > 0
    assert_picture(figures.render(figure))


@pytest.mark.parametrize("columns", [1, 10, 24])
def test_overlap_figure_shows_the_matrix(columns: int) -> None:
    pytest.importorskip("matplotlib")
    names = tuple(f"policy {k}" for k in range(columns))
    gap = np.abs(np.arange(columns + 1)[:, None] - np.arange(columns))
    matrix: Floats = np.exp(-0.2 * gap)
    matrix[0, 0] = np.nan
    figure = figures.overlap_figure(
        Overlap(matrix, (*names, "target"), names, np.ones(columns, dtype=np.int64))
    )
    axes = figure.axes[0]
    shown: np.ma.MaskedArray[Any, Any] = np.ma.asarray(axes.images[0].get_array())
    np.testing.assert_array_equal(shown.filled(np.nan), matrix)
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "target"
    assert_picture(figures.render(figure))


def test_figures_leave_pyplot_alone() -> None:
    pytest.importorskip("matplotlib")
    made = builders.recorded(1, (3, 3))
    before = sys.modules.pop("matplotlib.pyplot", None)
    try:
        figures.render(figures.overlap_figure(overlap(made.trajectories, made.target)))
        assert "matplotlib.pyplot" not in sys.modules
    finally:
        if before is not None:
            sys.modules["matplotlib.pyplot"] = before


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = builders.recorded(1, (3, 3))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"ope-gym\[plots\]"):
        figures.overlap_figure(overlap(made.trajectories, made.target))


def assert_picture(pixels: NDArray[np.uint8]) -> None:
    """A picture of reasonable size, mostly background, with many colours."""
    height, width, channels = pixels.shape
    assert channels == 3
    assert pixels.dtype == np.uint8
    assert 300 < height < 2000
    assert 300 < width < 2000
    assert len(np.unique(pixels @ np.array([1, 256, 65536]))) > 20
