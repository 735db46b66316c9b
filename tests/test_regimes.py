"""What the learner saw of the data: told from tags and policies, and shown wherever results are."""

import json

import numpy as np
import pytest

from ope_gym import Schedule, Trajectories, evaluate, evaluate_log_probs
from ope_gym.data.roster import Roster
from ope_gym.policies import Uniform
from tests.builders import Table, recorded


def episodes(policy_ids: list[int], held_out: list[bool], policies: list[Table]) -> Trajectories:
    """One-step episodes of one state, 30 of each entry."""
    rng = np.random.default_rng(0)
    ids, kept = np.repeat(policy_ids, 30), np.repeat(held_out, 30)
    states = np.zeros(ids.size, dtype=np.int64)
    actions = rng.integers(2, size=ids.size)
    logs = np.stack([policy.log_prob(states, actions) for policy in policies])
    return Trajectories.from_arrays(
        states,
        actions,
        rng.random(ids.size),
        logs[ids, np.arange(ids.size)],
        offsets=np.arange(ids.size + 1),
        policies=policies,
        policy_ids=ids,
        terminated=True,
        held_out=kept,
        horizon=1,
    )


ZERO, ONE, TWO = (Table(np.array([[p, 1 - p]])) for p in (0.5, 0.4, 0.3))
ALIEN = Table(np.array([[0.35, 0.65]]))


@pytest.mark.parametrize(
    ("ids", "held_out", "target", "origin", "want"),
    [
        ([0, 1, 2], [True, True, True], TWO, None, "held-out"),
        ([0, 1, 2], [True, True, True], ALIEN, "learned", "held-out"),
        ([0, 1, 2], [False, False, False], TWO, None, "in-sample"),  # 2 learned from 0 and 1
        ([0, 1, 2], [False, True, True], TWO, None, "in-sample"),
        ([0, 1, 2], [True, True, False], TWO, None, "adaptive"),  # 2 did not learn from its own
        ([2, 2, 2], [False, False, False], TWO, None, "fresh"),
        ([0, 1, 2], [False, False, False], ZERO, None, "adaptive"),  # fixed before all of them
        ([0, 1, 2], [False, False, False], ALIEN, None, "in-sample"),  # nothing says otherwise
        ([0, 1, 2], [False, False, False], ALIEN, "fixed", "adaptive"),
        ([1, 1, 1], [False, False, False], ALIEN, "fixed", "fresh"),
        ([1, 1, 1], [False, False, False], ALIEN, None, "in-sample"),
        ([0, 1, 2], [False, False, False], ZERO, "learned", "in-sample"),
    ],
)
def test_the_regime(
    ids: list[int], held_out: list[bool], target: Table, origin: str | None, want: str
) -> None:
    data = episodes(ids, held_out, [ZERO, ONE, TWO])
    assert Roster.of(data).regime(target, origin) == want
    found = evaluate(data, target, ["paper", "DM"], origin=origin, held_out=False)
    assert found.sample.regime == want
    shown = "in-sample, optimistic" if want == "in-sample" else want
    assert f"data: {shown}" in str(found)
    told = json.loads(found.to_json())
    assert told["regime"] == shown
    assert {e["regime"] for e in told["estimates"].values()} == {shown}
    assert set(found.to_frame()["regime"]) == {shown}
    for name, estimate in found.items():
        if want == "in-sample":
            assert estimate.verdict.colour != "green"
            assert "optimistic, because the policy learned" in str(estimate.verdict)
        elif want == "adaptive":
            caution = "adaptive" in str(estimate.verdict)
            assert caution == (name not in ("BIS", "BCIS", "NBIS", "NBCIS")), name
        else:
            assert "adaptive" not in str(estimate.verdict)
    if want in ("held-out", "fresh"):
        assert found["FIS"].verdict.colour == "green"


def test_only_the_held_out_episodes_on_request() -> None:
    data = episodes([0, 1, 2, 0], [False, True, True, False], [ZERO, ONE, TWO])
    got = evaluate(data, TWO, estimators=["FIS", "NFIS"], held_out=True)
    want = evaluate(data.select(held_out=True), TWO, estimators=["FIS", "NFIS"])
    assert got.sample.regime == "held-out"
    assert got.sample.trajectories == 60
    assert got["NFIS"].value == want["NFIS"].value
    by_default = evaluate(data, TWO, estimators="NFIS")
    assert by_default.sample.trajectories == 60
    everything = evaluate(data, TWO, estimators="NFIS", held_out=False)
    assert everything.sample.trajectories == 120
    assert everything.sample.regime == "in-sample"


def test_errors_say_what_to_choose() -> None:
    data = episodes([0, 1], [False, False], [ZERO, ONE])
    with pytest.raises(ValueError, match="none of the 60 episodes is held out"):
        evaluate(data, ONE, held_out=True)
    with pytest.raises(ValueError, match="held_out is 'all'; give True, False, or None"):
        evaluate(data, ONE, held_out="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="origin is 'random'; choose one of learned, fixed"):
        evaluate(data, ONE, origin="random")
    with pytest.raises(ValueError, match="regime is 'good'"):
        evaluate_log_probs(*recorded(0).arrays, regime="good")


def test_arrays_tell_nothing_unless_they_are_said_to() -> None:
    arrays = recorded(0, (40, 40, 40)).arrays
    assert evaluate_log_probs(*arrays).sample.regime == "unstated"
    assert "optimistic" in str(evaluate_log_probs(*arrays, regime="in-sample"))


def test_a_policy_that_compares_like_an_array_is_not_mistaken() -> None:
    class Odd(Uniform):
        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

        __hash__ = Uniform.__hash__

    data = episodes([0, 1], [False, False], [ZERO, ONE])
    assert Roster.of(data).regime(Odd(2)) == "in-sample"


def test_policies_that_changed_during_episodes_count_as_far_as_they_acted() -> None:
    """An episode that met two policies was recorded by both, one that ended before by one."""
    schedule = Schedule(np.array([0, 4, 9]), np.arange(3, dtype=np.int32))
    ids = np.array([0, 0, 0, 0, 1, 1])  # steps 0 to 5 of the loop, in episodes of 3, 2 and 1
    data = Trajectories.from_arrays(
        np.zeros(6, dtype=np.int64),
        np.zeros(6, dtype=np.int64),
        np.ones(6),
        np.log([0.5, 0.5, 0.5, 0.5, 0.4, 0.4]),
        offsets=[0, 3, 5, 6],
        policies=[ZERO, ONE, TWO],
        policy_ids=ids,
        terminated=True,
        held_out=[False, False, True],
        start_clock=[0, 3, 5],
        schedule_ids=[0, 0, 0],
        schedules=[schedule],
    )
    acted = Roster.of(data).acted
    np.testing.assert_array_equal(acted, [[True, True, False], [False, True, False]])
