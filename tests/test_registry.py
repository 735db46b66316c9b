"""What every name of the registry must do, whatever it is made of."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ope_gym import ESTIMATORS, Betting, Bootstrap, Compute, Evaluation, Trajectories, evaluate
from ope_gym.estimators.methods import METHODS
from ope_gym.models import Baseline, LinearQ
from tests.builders import Recorded, recorded

every = pytest.mark.parametrize("name", ESTIMATORS)
INTERVALS: dict[str, Any] = {
    "ess-t": "ess-t",
    "percentile": Bootstrap(50),
    "bca": Bootstrap(50, "bca"),
    "betting": Betting((-1.0, 2.0)),
}


def data_for(name: str, seed: int = 0, counts: tuple[int, ...] = (20, 25, 30)) -> Recorded:
    """EA is for one step."""
    return recorded(seed, counts, horizon=1 if name == "EA" else 5, held_out=True)


def ask(name: str, data: Recorded, episodes: Any = None, **options: Any) -> Any:
    chosen = data.trajectories if episodes is None else episodes
    return evaluate(chosen, data.target, estimators=name, **options)[name]


@every
def test_the_table_says_how_and_when(name: str) -> None:
    c = ESTIMATORS[name]
    assert c.use
    assert c.method in METHODS


@every
@pytest.mark.parametrize("interval", INTERVALS)
def test_value_interval_verdict_and_files(name: str, interval: str) -> None:
    data = data_for(name)
    if interval == "betting" and not ESTIMATORS[name].scheme:
        with pytest.raises(ValueError, match=f"{name!r}.* interval='betting' bounds"):
            ask(name, data, interval=INTERVALS[interval])
        return
    got = ask(name, data, interval=INTERVALS[interval])
    assert math.isfinite(got.value)
    assert got.standard_error > 0
    assert got.interval.low < got.interval.high
    if interval == "ess-t":
        assert got.value in got.interval
    assert got.verdict.colour in ("green", "amber", "red")
    assert got.influence.shape == (75,)
    told = json.loads(Evaluation({name: got}).to_json())["estimates"][name]
    assert told["value"] == got.value
    assert told["regime"] == "held-out"
    assert f"\n{name} " in str(Evaluation({name: got}))


@every
def test_files_whole_and_in_blocks(name: str, tmp_path: Path) -> None:
    """To the bit if read whole; in blocks the same, or an error that names the estimator."""
    data, paths = data_for(name), [tmp_path / "a.ope", tmp_path / "b.ope"]
    halves = [data.trajectories.select(episodes=some) for some in (slice(0, 31), slice(31, 75))]
    for half, path in zip(halves, paths, strict=True):
        half.save(path)
    memory = ask(name, data, q_model=LinearQ())
    whole = ask(name, data, paths, q_model=LinearQ())
    assert whole.value == memory.value
    assert whole.interval == memory.interval
    np.testing.assert_array_equal(whole.influence, memory.influence)
    compute = Compute(block_steps=20)
    if ESTIMATORS[name].whole:
        with pytest.raises(ValueError, match=f"{name!r}, which needs all episodes in memory"):
            ask(name, data, paths, q_model=LinearQ(), compute=compute)
        return
    blocks = ask(name, data, paths, q_model=LinearQ(), compute=compute)
    assert blocks.value == pytest.approx(memory.value, rel=1e-9)
    assert blocks.standard_error == pytest.approx(memory.standard_error, rel=1e-9)
    assert blocks.verdict.colour == memory.verdict.colour


@every
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    data = data_for(name)
    one, two = (ask(name, data, interval=Bootstrap(20), seed=5) for _ in range(2))
    assert one.value == two.value
    assert one.interval == two.interval
    np.testing.assert_array_equal(one.influence, two.influence)


def test_errors_are_of_about_the_right_size() -> None:
    """Over 60 data sets of one problem the mean SE is about the spread of the values.

    Both are known to about 10 % of each other (relative error of a standard deviation from 60
    values: 1 / sqrt(120) = 9 %); the bound is a factor of 1.6, five of these, either way.
    """
    names = [name for name in ESTIMATORS if name != "EA"]
    first = data_for("NFIS", 2)
    found = [
        evaluate(_again(first, seed).trajectories, first.target, estimators=names)
        for seed in range(60)
    ]
    for name in names:
        errors = np.array([evaluation[name].standard_error for evaluation in found])
        spread = np.std([evaluation[name].value for evaluation in found], ddof=1)
        ratio = float(np.sqrt(np.mean(errors**2)) / spread)
        # DM is blind to the error of its model, MAGIC supposes that of FWDR: both say so
        assert ratio < 1.6 or name == "MAGIC", (name, ratio)
        assert ratio > 1 / 1.6 or name == "DM", (name, ratio)


def _again(data: Recorded, seed: int) -> Recorded:
    """New episodes of the same policies in the same MDP."""
    from tests.builders import buffer_of, draw

    rng = np.random.default_rng(1000 + seed)
    ids = np.repeat(np.arange(3), (20, 25, 30))
    episodes = [draw(rng, data.mdp, data.policies[k]) for k in ids]
    buffer = buffer_of(
        episodes, ids.tolist(), data.policies, horizon=data.mdp.horizon, held_out=True
    )
    return Recorded(data.mdp, data.policies, data.target, buffer.view())


@every
def test_one_episode_or_none_is_told(name: str) -> None:
    data = data_for(name)
    one = data.trajectories.select(episodes=[3])
    if ESTIMATORS[name].baseline:
        with pytest.raises(ValueError, match=r"needs a q model|at least 2 episodes"):
            ask(name, data, one)
        return
    got = ask(name, data, one)
    assert got.verdict.colour == "red"
    assert math.isnan(got.interval.low)
    with pytest.raises(ValueError, match="episodes is empty"):
        ask(name, data, one.select(episodes=[]))


WHOLE = ("EA", "DM", "MDR", "auto")


@pytest.mark.parametrize("gamma", [0.0, 1e-200])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in WHOLE])
def test_a_discount_that_forgets_leaves_the_first_step(name: str, gamma: float) -> None:
    """As if the first step of each episode were all that was recorded.

    But for ADR, whose rounds are weighed by whole trajectories; and for MDR and what takes its
    error from it: they count recorded visits at all steps.
    """
    data = data_for(name, 3)
    old = data.trajectories
    first = old.offsets[:-1]
    short = Trajectories.from_arrays(
        np.asarray(old.observations)[first],
        np.asarray(old.actions)[first],
        old.rewards[first],
        old.log_probs[first],
        offsets=np.arange(len(old) + 1),
        policies=old.policies,
        policy_ids=old.policy_ids[first],
        terminated=True,
        held_out=True,
        observation_space=old.observation_space,
        action_space=old.action_space,
        horizon=1,
    )
    q, v = np.random.default_rng(0).normal(size=(2, old.n_steps))
    whole = ask(name, data, gamma=gamma, q_model=Baseline(q, v))
    part = ask(name, data, short, q_model=Baseline(q[first], v[first]))
    if name == "ADR":
        assert whole.value == pytest.approx(part.value, abs=0.2 * part.standard_error)
    elif name != "MAGIC" or gamma == 0.0:  # two steps are left of the other, and their ESS
        assert whole.value == pytest.approx(part.value, rel=1e-10)
        assert whole.standard_error == pytest.approx(part.standard_error, rel=1e-10)


@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_rounds_of_an_adaptive_experiment_are_drawn_together(interval: str) -> None:
    """40 rounds of two episodes: replicates spread like the error, 1,000 of them to 2 %."""
    data = recorded(4, (2,) * 40, horizon=3, held_out=True)
    got = ask("ADR", data, interval=interval)
    assert got.replicates.std() == pytest.approx(got.standard_error, rel=0.1)
