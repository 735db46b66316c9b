"""The distribution of returns: exact limits, plain loops, intervals, bands, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Trajectories, distribution, evaluate
from ope_gym.cli import main
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.weighted_returns import WeightedReturns, cvar_of, quantile_of, variance_of
from ope_gym.report import figures
from tests import reference, small_mdps
from tests.builders import Table, arrays_of, buffer_of, recorded
from tests.small_mdps import MDP
from tests.small_mdps import Path as Episode

Floats = NDArray[np.float64]


def quarters() -> tuple[MDP, Floats, tuple[Floats, Floats]]:
    """An MDP whose paths have whole multiplicities: all probabilities are quarters or halves."""
    moves = np.zeros((2, 2, 3))
    moves[0, 0], moves[0, 1] = (0.5, 0.5, 0.0), (0.0, 0.5, 0.5)
    moves[1, 0], moves[1, 1] = (0.5, 0.0, 0.5), (1.0, 0.0, 0.0)
    paid = np.zeros((2, 2, 3))
    paid[0, 0, 0] = paid[0, 1, 1] = paid[1, 0, 2] = paid[1, 1, 0] = 1.0
    mdp = MDP(np.array([0.5, 0.5]), moves, np.array([-1.0, 0.5, 2.0]), paid, horizon=2)
    target = np.array([[0.25, 0.75], [0.5, 0.5]])
    return (
        mdp,
        target,
        (
            np.array([[0.75, 0.25], [0.25, 0.75]]),
            np.array([[0.5, 0.5], [0.75, 0.25]]),
        ),
    )


def whole_population(
    episodes_of: tuple[int, int] = (256, 512),
) -> tuple[Trajectories, Table, Floats, Floats]:
    """Data in which every path occurs exactly as often as expected; the target's exact returns.

    Returns:
        The data, the target, and its possible returns, ascending, with their probabilities.
    """
    mdp, target, behaviours = quarters()
    paths = small_mdps.paths(mdp)
    episodes: list[Episode] = []
    ids: list[int] = []
    for k, (policy, n) in enumerate(zip(behaviours, episodes_of, strict=True)):
        for path in paths:
            times = n * path.probability(policy)
            assert times == round(times)
            episodes += [path] * round(times)
            ids += [k] * round(times)
    chance: dict[float, float] = {}
    for path in paths:
        total = math.fsum(path.rewards)
        chance[total] = chance.get(total, 0.0) + path.probability(target)
    returns = np.array(sorted(chance))
    data = buffer_of(episodes, ids, behaviours)
    return data.view(), Table(target), returns, np.array([chance[g] for g in returns])


def test_in_the_limit_the_distribution_is_that_of_the_target() -> None:
    """Episodes of two policies, of one and of two steps, in their exact proportions."""
    data, target, returns, chance = whole_population()
    assert set(np.diff(data.offsets)) == {1, 2}
    found = distribution(data, target)
    assert found.band.x == pytest.approx(returns)
    assert found.band.value == pytest.approx(np.cumsum(chance), abs=1e-12)
    mean = float(chance @ returns)
    assert found.mean().value == pytest.approx(mean, abs=1e-12)
    variance = float(chance @ (returns - mean) ** 2)
    correction = found.ess / (found.ess - 1)
    assert found.variance().value == pytest.approx(correction * variance, rel=1e-12)
    assert found.deviation().value == pytest.approx(math.sqrt(correction * variance), rel=1e-12)
    for x in (*returns, -5.0, 0.3, 9.0):
        assert found.below(x).value == pytest.approx(chance[returns < x].sum(), abs=1e-12)
    for level in (0.01, 0.2, 0.5, 0.77, 0.99):
        exact = returns[np.flatnonzero(np.cumsum(chance) >= level)[0]]
        assert found.quantile(level).value == exact
    for tail in (0.05, 0.3, 0.8, 1.0):
        exact = plain_cvar(list(returns), list(chance), tail)
        assert found.cvar(tail).value == pytest.approx(exact, abs=1e-12)


def test_every_number_agrees_with_its_own_interval() -> None:
    data, target, _, _ = whole_population((64, 128))
    found = distribution(data, target)
    for q in (*found.quantities(below=[0.0, 1.0]), found.variance()):
        assert q.interval.low <= q.value <= q.interval.high, q
        assert q.interval.level == 0.95
    assert np.all((found.band.low <= found.band.value) & (found.band.value <= found.band.high))


def plain_cvar(returns: list[float], shares: list[float], tail: float) -> float:
    """The mean of the lowest `tail`, an episode at a time."""
    left, total = tail, 0.0
    for g, p in sorted(zip(returns, shares, strict=True)):
        taken = min(p, left)
        total += taken * g
        left -= taken
    return total / tail


def test_numbers_agree_with_plain_loops() -> None:
    """Weights from the reference: P_e / sum rho P at the last step, normalised."""
    found = recorded(3, (7, 12, 9), horizon=4)
    data, target = found.trajectories, found.target
    arrays = arrays_of(data, target)
    logs = [row[-1] for row in reference.log_weights("fused", arrays)]
    total = math.fsum(math.exp(x) for x in logs)
    shares = [math.exp(x) / total for x in logs]
    rewards = reference.rows(data.rewards, data.offsets)
    gamma = 0.9
    returns = [math.fsum(gamma**t * r for t, r in enumerate(row)) for row in rewards]
    result = distribution(data, target, gamma=gamma)
    mean = math.fsum(p * g for p, g in zip(shares, returns, strict=True))
    assert result.mean().value == pytest.approx(mean, rel=1e-12)
    assert result.ess == pytest.approx(1 / math.fsum(p * p for p in shares), rel=1e-12)
    assert result.cvar(0.2).value == pytest.approx(plain_cvar(returns, shares, 0.2), rel=1e-11)
    below = math.fsum(p for p, g in zip(shares, returns, strict=True) if g < mean)
    assert result.below(mean).value == pytest.approx(below, rel=1e-12)
    spread = math.fsum(p * (g - mean) ** 2 for p, g in zip(shares, returns, strict=True))
    corrected = spread / (1 - math.fsum(p * p for p in shares))
    assert result.variance().value == pytest.approx(corrected, rel=1e-11)


def test_equal_weights_give_the_statistics_of_the_sample() -> None:
    rng = np.random.default_rng(0)
    g = np.sort(rng.normal(size=40))
    w = WeightedReturns.of(rng.permutation(g), np.full(40, -3.0), np.zeros(40, dtype=np.int64))
    assert w.ess == pytest.approx(40)
    assert w.returns.tolist() == g.tolist()
    assert variance_of(w.returns, w.shares) == pytest.approx(g.var(ddof=1), rel=1e-12)
    assert cvar_of(w.returns, w.shares, 0.1) == pytest.approx(g[:4].mean(), rel=1e-12)
    assert quantile_of(w.returns, w.shares, 0.5) == g[19]
    assert quantile_of(w.returns, w.shares, 0.501) == g[20]
    assert w.tail_ess(0.1) == pytest.approx(4.0)


def test_a_probability_that_was_never_seen_has_the_interval_of_zero_in_n() -> None:
    w = WeightedReturns.of(np.arange(50.0), np.zeros(50), np.zeros(50, dtype=np.int64))
    none = w.probability_interval(-1.0, 0.95)
    assert [none.low, none.high] == pytest.approx([0.0, 1 - 0.025 ** (1 / 50)], rel=1e-9)
    always = w.probability_interval(99.0, 0.95)
    assert [always.low, always.high] == pytest.approx([0.025 ** (1 / 50), 1.0], rel=1e-9)
    assert w.quantile_interval(0.01, 0.95).low == -np.inf
    assert w.quantile_interval(0.99, 0.95).high == np.inf


def test_the_interval_of_a_quantile_inverts_that_of_the_probability() -> None:
    rng = np.random.default_rng(2)
    strata = np.repeat([0, 1], 30)
    w = WeightedReturns.of(rng.normal(size=60), rng.normal(size=60), strata)
    ends = w.quantile_interval(0.4, 0.9)
    upper = [w.probability_interval(x, 0.9, strict=False).high >= 0.4 for x in w.returns]
    lower = [w.probability_interval(x, 0.9, strict=False).low >= 0.4 for x in w.returns]
    assert ends.low == w.returns[upper.index(True)]
    assert ends.high == w.returns[len(lower) - lower[::-1].index(False)]


def test_the_band_is_that_of_the_replicates() -> None:
    """Each replicate once more by plain loops over episodes."""
    found = recorded(5, (10, 15), horizon=3)
    result = distribution(found.trajectories, found.target, resamples=40)
    w = result.weighted
    factors = Resamples(result.sample.strata, 40, 0).factors(0, 25)
    gaps = []
    for row in factors[:, w.order]:
        shares = [f * p for f, p in zip(row, w.shares, strict=True)]
        total = math.fsum(shares)
        shares = [p / total for p in shares]
        gaps.append(
            max(
                abs(math.fsum(s for s, g in zip(shares, w.returns, strict=True) if g <= x) - f)
                for x, f in zip(result.band.x, result.band.value, strict=True)
            )
        )
    drawn = w.bootstrap_band(result.draws, 0.95)
    assert drawn == pytest.approx(np.quantile(gaps, 0.95), rel=1e-9)
    bound = math.sqrt(math.log(40) / (2 * result.ess))
    assert w.band(result.draws, 0.95) == pytest.approx(max(drawn, bound), rel=1e-12)
    edges = result.band.value + w.band(result.draws, 0.95)
    assert result.band.high == pytest.approx(np.minimum(edges, 1.0))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """At 95 %; 100 data sets; 3 standard errors below is .885."""
    _, target, returns, chance = whole_population()
    mdp, _, behaviours = quarters()
    paths = small_mdps.paths(mdp)
    rng = np.random.default_rng(8)
    exact = {
        "cvar": plain_cvar(list(returns), list(chance), 0.3),
        "below": chance[returns < 1].sum(),
    }
    held = {name: 0 for name in (*exact, "band")}
    for _ in range(100):
        ids = [0] * 30 + [1] * 30
        drawn = [
            paths[rng.choice(len(paths), p=[p.probability(behaviours[k]) for p in paths])]
            for k in ids
        ]
        data = buffer_of(drawn, ids, behaviours)
        found = distribution(data, target, resamples=50)
        held["cvar"] += exact["cvar"] in found.cvar(0.3).interval
        held["below"] += exact["below"] in found.below(1.0).interval
        true = [chance[returns <= x].sum() for x in found.band.x]
        held["band"] += bool(np.all((found.band.low <= true) & (true <= found.band.high)))
    assert min(held.values()) >= 0.885 * 100, held


def test_without_any_weight_all_is_undefined_and_red() -> None:
    data = buffer_of([Episode((0,), (0,), (1.0,), 1.0)] * 2, [0, 0], [np.array([[1.0, 0.0]])])
    result = distribution(data, Table(np.array([[0.0, 1.0]])))
    assert result.verdict.colour == "red"
    assert math.isnan(result.mean().value)
    assert all(math.isnan(q.value) for q in result.quantities(below=[0.0]))
    assert "undefined" in str(result)
    assert json.loads(result.to_json())["quantities"]["mean"]["value"] is None
    result.plot()


def test_files_in_blocks_give_the_same_numbers(tmp_path: Path) -> None:
    found = recorded(4, (9, 11), horizon=3)
    path = tmp_path / "episodes.ope"
    found.trajectories.save(path)
    here, there = (distribution(x, found.target) for x in (found.trajectories, path))
    assert [q.value for q in there.quantities()] == pytest.approx(
        [q.value for q in here.quantities()], rel=1e-12
    )


def test_basic_weights_are_against_the_recording_policy() -> None:
    found = recorded(6, (9, 11), horizon=3)
    arrays = arrays_of(found.trajectories, found.target)
    logs = [row[-1] for row in reference.log_weights("basic", arrays)]
    total = math.fsum(map(math.exp, logs))
    result = distribution(found.trajectories, found.target, weights="basic")
    assert sorted(result.weighted.shares) == pytest.approx(
        sorted(math.exp(x) / total for x in logs)
    )


def test_command_prints_the_table_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[str] = []

    def draw(curves: Any, level: float, marks: dict[str, float]) -> Any:
        marked.extend(marks)
        return original(curves, level, marks)

    original = figures.distribution_figure
    monkeypatch.setattr(figures, "distribution_figure", draw)
    data, *_ = whole_population((64, 64))
    path, told, drawn = (tmp_path / name for name in ("a.ope", "a.json", "a.png"))
    data.save(path)
    flags = ["--target", "1", "--below", "0", "--tail", ".3", "--quantiles", ".5"]
    files = ["--json", str(told), "--figure", str(drawn)]
    assert main(["distribution", str(path), *flags, *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("policy 1: returns of the target, from 128 episodes")
    shown = json.loads(told.read_text())["quantities"]
    names = ["mean", "std. deviation", "50 % quantile", "CVaR 30 %", "P(return < 0)"]
    assert list(shown) == names
    assert all(name in printed for name in names)
    assert "all lines use the weights of whole episodes; evaluate weighs each step" in printed
    assert shown["CVaR 30 %"]["value"] == distribution(data, 1).cvar(0.3).value
    assert drawn.stat().st_size > 5000
    assert marked == ["median", "CVaR 30 %"]


def test_a_tail_of_equal_returns_has_an_interval() -> None:
    """Returns of 0 and 1, 8 % of them 0: the mean of the lowest tenth is 0.2.

    In half of the samples all of the tail is 0, or all of it is seen in one episode: an error alone
    is 0 there. 3 standard errors of 300 samples below 95 %; and nothing changes without a majority.
    """
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        returns = (rng.random(60) >= 0.08).astype(np.float64)
        w = WeightedReturns.of(returns, np.zeros(60), np.zeros(60, dtype=np.int64))
        held += 0.2 in w.cvar_interval(0.1, 0.95, floor=0.0)
    assert held / 300 > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 300)
    w = WeightedReturns.of(np.ones(40), np.zeros(40), np.zeros(40, dtype=np.int64))
    found = w.cvar_interval(0.1, 0.95, floor=0.0)
    assert found.low == pytest.approx(1.0 + np.log(0.025) / 4.0)  # 4 episodes in the tail
    assert found.high == 1.0
    noise = np.ones(40)
    noise[::3] += 1e-15  # of sums in another order
    w = WeightedReturns.of(noise, np.zeros(40), np.zeros(40, dtype=np.int64))
    assert w.cvar_interval(0.1, 0.95, floor=0.0).low == pytest.approx(found.low)
    spread = WeightedReturns.of(rng.normal(size=80), np.zeros(80), np.zeros(80, dtype=np.int64))
    assert spread.cvar_interval(0.1, 0.95) == spread.cvar_interval(0.1, 0.95, floor=-99.0)


def test_a_share_of_everything_is_certain_whatever_its_sum_rounds_to() -> None:
    """Where no return reached x, its probability has the interval of n in n, not of nearly all."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        w = WeightedReturns.of(rng.random(60), rng.normal(size=60), np.zeros(60, dtype=np.int64))
        found = w.probability_interval(2.0, 0.95)
        assert found.low == pytest.approx(0.025 ** (1 / w.ess), rel=1e-9)
        assert found.high == 1.0
        assert w.quantile_interval(0.999, 0.95).high == np.inf


def test_the_mean_leaves_room_for_outcomes_that_were_not_seen() -> None:
    """As `evaluate` does, also for episodes that no recorded policy can play."""
    paid = [Episode((0,), (k % 2,), (1.0,), 1.0) for k in range(100)]
    data = buffer_of(paid, [0] * 100, [np.array([[0.5, 0.5]])])
    target = Table(np.array([[0.4, 0.6]]))
    found, nfis = distribution(data, target), evaluate(data, target, "NFIS")["NFIS"]
    ends = found.mean().interval
    assert (ends.low, ends.high) == pytest.approx((nfis.interval.low, nfis.interval.high))
    assert ends.low < 0.97
    assert found.cvar(1.0).interval == ends


def test_a_quantile_is_that_of_a_share() -> None:
    data, target, _, _ = whole_population((64, 64))
    for level in (0, 1.0, "0.5", None, math.nan):
        with pytest.raises(ValueError, match=f"quantile level is {level!r}; give a share within"):
            distribution(data, target).quantile(level)  # type: ignore[arg-type]
