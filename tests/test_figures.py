"""Test figures and the overlap they draw: exact cases, and pictures that are not empty."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Evaluation, evaluate
from ope_gym.analysis.overlap import overlap
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import UnavailablePolicy, Uniform
from ope_gym.report import figures
from ope_gym.report.text import episodes
from tests import builders

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Floats = NDArray[np.float64]


def bandit(tables: list[list[float]], actions: list[list[int]]) -> Trajectories:
    """Record one-step episodes in one state, from the actions that each policy took."""
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
    with pytest.raises(ValueError, match="is empty"):
        overlap(TrajectoryBuffer(), Uniform(2))


@pytest.mark.parametrize("columns", [1, 10, 24])
def test_overlap_figure_shows_the_matrix(columns: int) -> None:
    pytest.importorskip("matplotlib")
    names = tuple(f"policy {k}" for k in range(columns))
    gap = np.abs(np.arange(columns + 1)[:, None] - np.arange(columns))
    matrix: Floats = np.exp(-0.2 * gap)
    matrix[0, 0] = np.nan
    figure = figures.overlap_figure(matrix, (*names, "target"), names)
    axes = figure.axes[0]
    shown: np.ma.MaskedArray[Any, Any] = np.ma.asarray(axes.images[0].get_array())
    np.testing.assert_array_equal(shown.filled(np.nan), matrix)
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "target"
    assert_picture(render(figure))


def test_figures_leave_pyplot_alone() -> None:
    pytest.importorskip("matplotlib")
    made = builders.recorded(1, (3, 3))
    before = sys.modules.pop("matplotlib.pyplot", None)
    try:
        evaluation = evaluate(made.trajectories, made.target)
        render(overlap(made.trajectories, made.target).plot())
        render(evaluation.plot(truth=0.5))
        assert "matplotlib.pyplot" not in sys.modules
    finally:
        if before is not None:
            sys.modules["matplotlib.pyplot"] = before


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = builders.recorded(1, (3, 3))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    remedy = r'pip install -e "\.\[plots\]" -c constraints.txt'
    with pytest.raises(ImportError, match=remedy):
        overlap(made.trajectories, made.target).plot()
    with pytest.raises(ImportError, match=remedy):
        evaluate(made.trajectories, made.target, estimators="FIS").plot()


@pytest.fixture(scope="module")
def held_out() -> Evaluation:
    made = builders.recorded(1, (30, 30, 0, 30), held_out=True)
    return evaluate(made.trajectories, made.target, estimators=["NFIS", "FIS", "BIS"])


def shaped(base: Evaluation, spans: dict[str, tuple[float, float, float]]) -> Evaluation:
    """Return estimates with these (low, value, high)."""
    first = base["NFIS"]
    return Evaluation(
        {
            name: replace(first, value=v, interval=replace(first.interval, low=low, high=high))
            for name, (low, v, high) in spans.items()
        }
    )


def xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(y) for y in np.asarray(line.get_ydata())]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def arrows(axes: Axes) -> list[tuple[str, float]]:
    """Return side and row of each arrow."""
    sides: dict[Any, str] = {4: "left", 5: "right"}
    return [
        (sides[line.get_marker()], ys(line)[0]) for line in axes.lines if line.get_marker() in sides
    ]


def markers(axes: Axes) -> dict[float, tuple[float, str]]:
    """Return value and marker in each row."""
    return {
        ys(line)[0]: (xs(line)[0], str(line.get_marker()))
        for line in axes.lines
        if line.get_marker() in ("o", "D", "X") and len(xs(line))
    }


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_forest_tells_values_verdicts_sizes_and_the_truth(held_out: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    figure = held_out.plot(truth=0.75, truth_error=0.02)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["NFIS", "FIS", "BIS"]
    assert axes.get_title(loc="left") == "Data: held-out"
    steps = held_out.sample.steps
    told = texts(axes)
    assert f"90 episodes, {steps:,} steps, 3 behaviours; 95 % intervals (ess-t)" in told
    assert ["ESS", *(episodes(e.diagnostics.ess) for e in held_out.values())] == told[:4]
    shape = {"green": "o", "amber": "D", "red": "X"}
    assert markers(axes) == {
        y: (e.value, shape[e.verdict.colour]) for y, e in enumerate(held_out.values())
    }
    low, high = axes.get_xlim()
    for estimate in held_out.values():
        assert low < estimate.interval.low < estimate.interval.high < high
    assert not arrows(axes)
    assert legend(figure) == [
        "truth 0.75 ± 0.04 (two standard errors)",
        "green: nothing visible speaks against it",
        "amber: with care",
        "red: not to be trusted",
    ]
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith("truth"))
    assert set(xs(line)) == {0.75}
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (band.x0, band.x1) == pytest.approx((0.71, 0.79))
    assert_picture(render(figure))


def test_forest_warns_of_data_that_the_target_was_trained_on(held_out: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    made = builders.recorded(1, (30, 30))
    seen = evaluate(made.trajectories, made.target, estimators="FIS", origin="learned")
    figure = figures.forest_figure(held_out, seen)
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim()
    assert left.get_ylim() == right.get_ylim()
    assert right.get_title(loc="left") == "Data: in-sample, optimistic"
    assert right._left_title.get_bbox_patch() is not None  # type: ignore[attr-defined]
    assert left._left_title.get_bbox_patch() is None  # type: ignore[attr-defined]
    assert_picture(render(figure))


def test_forest_cuts_what_would_blow_up_the_axis(held_out: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    spans = {
        "a": (9.0, 10.0, 11.0),
        "b": (9.5, 10.5, 11.5),
        "c": (-5000.0, 10.2, 5000.0),
        "d": (8.0, 11.0, np.inf),
        "e": (-1e308, 1e300, 1e308),
    }
    figure = shaped(held_out, spans).plot(truth=12.0)
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert 7 < low < 9
    assert 12 < high < 13
    assert arrows(axes) == [("left", 2), ("right", 2), ("right", 3), ("left", 4), ("right", 4)]
    assert set(markers(axes)) == {0, 1, 2, 3}  # the value of e is off the axis, not moved onto it
    assert_picture(render(figure))


@pytest.mark.parametrize("truth", [None, 3.0])
def test_forest_lists_what_is_undefined(held_out: Evaluation, truth: float | None) -> None:
    pytest.importorskip("matplotlib")
    nan = np.nan
    spans = {"a": (1.0, 2.0, 3.0), "b": (nan, nan, nan), "c": (nan, 2.5, nan)}
    (axes,) = shaped(held_out, spans).plot(truth).axes
    assert "undefined" in texts(axes)
    assert set(markers(axes)) == {0, 2}
    nothing = shaped(held_out, {"b": (nan, nan, nan)}).plot(truth)
    assert np.isfinite(nothing.axes[0].get_xlim()).all()
    assert_picture(render(nothing))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truth": np.nan}, "truth is nan"),
        ({"truth": 1.0, "truth_error": -1.0}, r"truth_error is -1\.0"),
        ({"truth": 1.0, "truth_error": np.nan}, "truth_error is nan"),
    ],
)
def test_forest_refuses_a_truth_that_is_none(
    held_out: Evaluation, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        held_out.plot(**options)
    with pytest.raises(ValueError, match="evaluations is empty"):
        figures.forest_figure()


def test_command_writes_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = Path(__file__).parents[1] / "docs" / "pictures.py"
    spec = importlib.util.spec_from_file_location("docs_pictures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_pictures", module)  # its dataclass looks there
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    for name, value in (("POLICIES", 3), ("EPISODES", 8), ("RUNS", 3)):
        monkeypatch.setattr(module, name, value)
    assert module.main(["--out", str(tmp_path)]) == 0
    names = {"forest.png", "overlap.png", "in_sample.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    printed = capsys.readouterr().out
    assert all(f"wrote {tmp_path / name}" in printed for name in names)
    with pytest.raises(SystemExit):
        module.main(["--out", str(tmp_path / "nowhere")])


def render(figure: Figure) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.array(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]


def assert_picture(pixels: NDArray[np.uint8]) -> None:
    """Check that a picture has a reasonable size and many colours."""
    height, width, channels = pixels.shape
    assert channels == 3
    assert pixels.dtype == np.uint8
    assert 300 < height < 2000
    assert 300 < width < 2000
    assert len(np.unique(pixels @ np.array([1, 256, 65536]))) > 20
