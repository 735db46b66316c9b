"""The study `beyond` in miniature."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from ope_gym import Trajectories, evaluate, models
from ope_gym.models import ActionValues, Problem, QModel
from ope_gym.policies import Uniform
from studies.beyond.cases import GRID_Q, Mistaken, cases, grid_q
from studies.beyond.study import NAMES, Beyond
from studies.cartpole.study import CartPole
from studies.harness import small_grid
from studies.harness.registry import load_study
from studies.harness.runner import plain
from studies.harness.seeds import seeds_of


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Beyond:
    """Two regimes of the grid, few rollouts, and a linear model in the place of the slow one."""
    regimes = [r for r in small_grid.grid() if r.horizon == 3][:2]
    monkeypatch.setattr("studies.beyond.cases.grid", lambda seed: regimes)
    monkeypatch.setattr("studies.beyond.study.CartPole", partial(CartPole, rollouts=6))
    monkeypatch.setattr(models, "DynamicsQ", models.LinearQ)
    return Beyond(truth_rollouts=200, every=2)


def test_runs_summary_claims_table_and_picture(small: Beyond) -> None:
    runs = small.run(seeds_of(0, (0, 3), small.name))
    count = len(cases())
    assert runs["values"].shape == (3, count, len(NAMES)) == (3, 9 + 2 * 4, len(NAMES))
    assert np.all(np.isfinite(runs["values"][::2]))
    assert np.all((runs["c"][::2] >= 0) & (runs["c"][::2] <= 1))
    assert np.all(np.isfinite(runs["values"][1, :4]))  # the linear q in every run
    assert np.all(np.isnan(runs["values"][1, 4:]))  # the rest in every second one
    again = small.run(seeds_of(0, (1, 2), small.name))
    np.testing.assert_array_equal(again["values"][0], runs["values"][1])
    summary = plain(small.summarise(runs), missing=float("nan"))
    nfis, auto = NAMES.index("NFIS"), NAMES.index("auto")
    ratio = np.array(summary["ratio"])
    np.testing.assert_allclose(ratio[:, nfis], 1.0)
    errors = runs["values"] - runs["truth"][..., None]
    by_hand = (errors[::2, 9, auto] ** 2).mean() / (errors[::2, 9, nfis] ** 2).mean()
    assert ratio[9, auto] == pytest.approx(np.sqrt(by_hand))
    squares = errors[:, 0] ** 2 - runs["noise"][:, 0, None]
    assert summary["rmse"][0][nfis] == pytest.approx(np.sqrt(squares.mean(axis=0)[nfis]))
    assert summary["runs"] == [3] * 4 + [2] * (count - 4)
    claims = small.claims(summary)
    assert all(claim.source == "beyond the paper" for claim in claims)
    assert {claim.with_runs(3).verdict for claim in claims} == {"undecided"}
    table = small.table(summary)
    assert "| CartPole-v1, return | linear q |" in table
    assert "exact q" in table
    assert len(small.picture(summary).axes) == 2
    many = {name: np.tile(part, (20, *[1] * (part.ndim - 1))) for name, part in runs.items()}
    assert not any(e.open for c in small.claims(small.summarise(many)) for e in c.evidence)
    fewer = {name: part[:40] for name, part in many.items()}  # 40 runs, 27 of them with all
    why = {e.where: e.open for c in small.claims(small.summarise(fewer)) for e in c.evidence}
    assert not why["CartPole-v1, return, linear q"]
    assert "fewer than 30" in why["CartPole-v1, return, dynamics q"]


def test_the_exact_q_is_the_truth_and_the_wrong_one_is_not() -> None:
    regime = next(r for r in small_grid.grid() if r.horizon == 8)
    data, target, truth = regime.simulate(np.random.default_rng(1))
    found = {
        q: evaluate(data, target, estimators=["DM"], q_model=grid_q(q, regime, data))["DM"]
        for q in GRID_Q
    }
    exact = found["exact q"]
    assert exact.value == pytest.approx(truth, abs=4 * exact.standard_error)
    assert abs(found["wrong q"].value - truth) > 10 * exact.standard_error


def test_a_mistaken_model_takes_left_for_right() -> None:
    class Seen(QModel, ActionValues):
        actions: Any = None

        def fit(self, data: Trajectories, problem: Problem) -> ActionValues:
            self.actions = np.asarray(data.actions)
            return self

        def q(self, observations: Any, actions: Any, steps: Any) -> Any:
            return np.zeros(len(steps))

    data = Trajectories.from_arrays(
        np.zeros((3, 1)),
        [0, 1, 1],
        [1.0, 1.0, 1.0],
        np.log([0.5, 0.5, 0.5]),
        offsets=[0, 1, 3],
        policies=[Uniform(2)],
        terminated=True,
    )
    seen = Seen()
    Mistaken(seen).fit(data, Problem(Uniform(2), 1.0, 2, np.random.default_rng(0)))
    assert seen.actions.tolist() == [1, 0, 0]


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="every=0"):
        Beyond(every=0)


def test_it_is_registered() -> None:
    assert isinstance(load_study("beyond"), Beyond)
