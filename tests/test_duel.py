"""Duels: exact martingales, plain loops, verdicts, states, the gate."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

import ope_gym
from ope_gym.analysis.duel import Duel, play_episode
from ope_gym.cli import main
from ope_gym.commands.gate import previous_policy
from ope_gym.data.trajectories import Trajectories
from ope_gym.inference.rounds import SHARES, Rounds, fewest_episodes, weight_moments
from ope_gym.inference.sequences import CAP, Assumed, bet_sizes
from ope_gym.policies import Uniform
from ope_gym.scale.sources import open_source
from ope_gym.scale.workers import Workers
from ope_gym.verdict import Reason, Verdict
from tests import small_mdps
from tests.builders import Table

Floats = NDArray[np.float64]


class Coin(gym.Env[Any, Any]):
    """One or two steps in one state: action 1 pays 1 with probability .8, action 0 with .3."""

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 2
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        paid = float(self.np_random.random() < (0.3, 0.8)[int(action)])
        return 0, paid, self.left == 0, False, {}


def leaning(share: float) -> Table:
    return Table(np.array([[1 - share, share]]))


def pairs(span: float, points: Floats, **terms: Any) -> Rounds:
    return Rounds(Assumed((0.0, span)), points, pairs=True, **terms)


def add_pairs(rounds: Rounds, differences: Floats) -> None:
    """Add one pair to each duel, given its difference."""
    runs = differences.size
    returns = np.stack([differences, np.zeros(runs)], axis=1)
    rounds.add(rounds.plan(), np.zeros(runs, dtype=np.int64), returns, np.zeros((runs, 2)))


def mean_wealth(rounds: Rounds, chance: Floats) -> Floats:
    """Return (2, P) the expected wealth on both sides."""
    wealth = rounds.wealth
    return np.asarray(np.einsum("r,srpj->sp", chance, np.exp(wealth._logs)) / wealth._sizes.size)


def test_the_wealth_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    x, span, point = rng.uniform(-2, 3, size=30), 4.0, 0.5
    rounds = pairs(span, np.array([point]), limit=25)
    for value in x:
        add_pairs(rounds, np.array([value]))
    sizes = bet_sizes(50, 0.95)
    wealth = [[1.0] * sizes.size, [1.0] * sizes.size]
    above = below = False
    for t, value in enumerate(x):
        seen = x[:t]
        squares = math.fsum((v - seen.mean()) ** 2 for v in seen) if t else 0.0
        sigma = math.sqrt(((span / 4) ** 2 + squares) / (1 + max(t - 1, 0)))
        for j, size in enumerate(sizes):
            up = min(size / sigma, CAP / (span + point))
            down = min(size / sigma, CAP / (span - point))
            wealth[0][j] *= 1 + up * (value - point)
            wealth[1][j] *= 1 - down * (value - point)
        above |= sum(wealth[0]) / sizes.size >= 40
        below |= sum(wealth[1]) / sizes.size >= 40
    found = rounds.wealth
    assert np.exp(found._logs[:, 0, 0]) == pytest.approx(np.array(wealth), rel=1e-9)
    assert (found.above[0, 0], found.below[0, 0]) == (above, below)


def test_the_expected_wealth_never_exceeds_what_was_staked() -> None:
    """All outcomes of five rounds summed: under the claim the mean wealth is 1, and at most 1."""
    outcomes = [(-3.0, 0.2), (0.0, 0.4), (1.5, 0.4)]  # difference, chance
    assert sum(p * x for x, p in outcomes) == pytest.approx(0.0)
    every = list(itertools.product(outcomes, repeat=5))
    chance = np.array([math.prod(p for _, p in path) for path in every])
    rounds = pairs(4.0, np.array([0.0, 0.7, -0.7]), limit=20, runs=len(every))
    for t in range(5):
        add_pairs(rounds, np.array([path[t][0] for path in every]))
    expected = mean_wealth(rounds, chance)
    assert expected[:, 0] == pytest.approx([1.0, 1.0], rel=1e-12)  # D = 0 is true: both are fair
    assert expected[0, 1] < 1.0  # D <= .7 is true
    assert expected[1, 2] < 1.0  # D >= -.7 is true
    assert expected[1, 1] > 1.0  # D >= .7 is false: wealth grows


def test_whoever_plays_the_expected_wealth_never_exceeds_what_was_staked() -> None:
    """All lots and actions of three rounds, pairs and single episodes with lots that vary.

    One step, three actions: a and b differ, and are worth the same.
    """
    probs = np.array([[0.7, 0.1, 0.2], [0.2, 0.2, 0.6]])
    pays = np.array([0.4, 0.8, 0.3])
    assert probs[0] @ pays == pytest.approx(probs[1] @ pays)
    ratio = np.log(probs[0] / probs[1])
    every = np.array(list(itertools.product((0, 1), range(3), range(3))))  # lot, actions of a and b
    paths = np.array(list(itertools.product(range(len(every)), repeat=3)))
    chance, singles = np.ones(len(paths)), 0.0
    points = np.array([0.0, 0.3, -0.3])
    rounds = Rounds(Assumed((0.0, 1.0)), points, limit=20, runs=len(paths))
    for t in range(3):
        plan, (lot, *actions) = rounds.plan(), every[paths[:, t]].T
        if t == 2:  # as good as any other plan that depends on the past alone
            share, centre = SHARES[paths[:, 0] % 3], 0.1 * (paths[:, 1] % 4)
            reach = (0.5 + centre) / np.minimum(share, 1 - share)
            alone = {"single": paths[:, 1] % 5 > 0, "share": share, "centre": centre}
            reach = np.where(alone["single"], reach, plan.reach)
            plan = dataclasses.replace(plan, **alone, reach=reach)
        singles += plan.single.mean() / 3
        both = np.stack(actions, axis=1)
        chance *= np.where(lot == 0, plan.share, 1 - plan.share)
        chance *= probs[0, both[:, 0]] * probs[1, both[:, 1]]
        rounds.add(plan, lot, pays[both], ratio[both])
        x, reach, _ = rounds.wealth._history[-1]
        assert np.all(np.abs(x) <= reach + 1e-12)
    assert chance.sum() == pytest.approx(1.0)
    assert 0.2 < singles < 0.8
    expected = mean_wealth(rounds, chance)
    assert expected[:, 0] == pytest.approx([1.0, 1.0], rel=1e-12)
    assert expected[0, 1] < 1.0
    assert expected[1, 2] < 1.0


def test_a_single_episode_compares_both_policies_exactly() -> None:
    """All paths of a small MDP: means and second moments for every lot, learned from any other."""
    rng = np.random.default_rng(6)
    mdp = small_mdps.random_mdp(rng, horizon=3)
    tables = [small_mdps.random_policy(rng, mdp) for _ in range(2)]
    paths = small_mdps.paths(mdp)
    a, b = (np.array([path.probability(table) for path in paths]) for table in tables)
    returns = np.array([sum(path.rewards) for path in paths])
    t = np.tanh(np.log(a / b) / 2)
    for i, share in enumerate(SHARES):
        r = 2 * t / (1 + (2 * share - 1) * t)
        density = share * a + (1 - share) * b
        assert density @ r == pytest.approx(0.0, abs=1e-12)
        assert density @ (r * (returns - 0.7)) == pytest.approx((a - b) @ returns)
        assert np.abs(r).max() <= 1 / min(share, 1 - share)
        wanted = [density @ (r**2 * (returns - 0.7) ** k) for k in range(3)]
        for lot in (0.5, 0.25):
            terms = weight_moments(np.log(a / b), returns - 0.7, np.full(a.size, lot))
            found = np.einsum("n,nk->k", lot * a + (1 - lot) * b, terms[:, i])
            assert found == pytest.approx(np.array(wanted))


@pytest.mark.parametrize("deviation", [None, 1.5])
def test_without_bounds_the_expected_wealth_never_exceeds_what_was_staked(
    deviation: float | None,
) -> None:
    """All outcomes of five rounds: symmetric ones, and skewed ones of known deviation."""
    outcomes = [(-4.0, 0.1), (-0.5, 0.4), (0.5, 0.4), (4.0, 0.1)]
    if deviation is not None:
        outcomes = [(-4.0, 0.1), (0.0, 0.5), (1.0, 0.4)]
        assert math.sqrt(sum(p * x**2 for x, p in outcomes)) <= deviation
    every = list(itertools.product(outcomes, repeat=5))
    chance = np.array([math.prod(p for _, p in path) for path in every])
    points = np.array([0.0, 0.7, -0.7, 30.0])
    rounds = Rounds(Assumed(None, deviation), points, limit=20, runs=len(every))
    for t in range(5):
        add_pairs(rounds, np.array([path[t][0] for path in every]))
    expected = mean_wealth(rounds, chance)
    assert np.all(expected[0, [0, 1, 3]] <= 1 + 1e-12)
    assert np.all(expected[1, [0, 2]] <= 1 + 1e-12)
    if deviation is None:
        assert expected[:, 0] == pytest.approx([1.0, 1.0], rel=1e-12)
    assert expected[1, 3] > 1.0
    z = np.linspace(-5, 5, 101)
    factors = np.exp(Assumed().log_factors(np.ones(101), z))
    assert np.all(factors >= np.exp(z - z**2 / 2) - 1e-12)  # de la Peña's
    assert factors + factors[::-1] == pytest.approx(2.0)


def test_no_test_needs_fewer_episodes_than_the_floor() -> None:
    n, p = fewest_episodes(0.5, 8.0, 0.95), 0.5 / 8.5
    assert (1 - p) ** n == pytest.approx(0.05)
    assert (1 - p) * 0.5 - p * 8.0 == pytest.approx(0.0)


def test_close_policies_are_told_apart_by_single_episodes() -> None:
    """100 duels each on 10 steps of coins: half of the episodes of pairs, and few false decisions.

    Actions 0 and 1 pay p and q in each step; a and b differ little, or are worth the same (p = q):
    then at most 5 % plus 3 standard errors, 11.5 %, have a winner.
    """
    rng = np.random.default_rng(8)
    wins, steps, duels = np.array([0.55, 0.45]), 10, 100
    needed: dict[bool, float] = {}
    for pay, only_pairs in ((0.9, True), (0.9, False), (0.5, False)):
        rounds = Rounds(Assumed((0, 10)), np.zeros(1), limit=150, runs=duels, pairs=only_pairs)
        ended = np.full(duels, 300)
        for _ in range(300):
            chosen = rng.random((duels, 2, steps)) < wins[:, None]
            paid = rng.random(chosen.shape) < np.where(chosen, pay, 0.5)
            ratios = np.log(wins[0] / wins[1]) * (2 * chosen - 1.0).sum(axis=-1)
            plan = rounds.plan()
            who = (rng.random(duels) >= plan.share).astype(np.int64)
            rounds.add(plan, who, paid.sum(axis=-1), ratios)
            decided = rounds.wealth.above[:, 0] | rounds.wealth.below[:, 0]
            ended = np.where(decided, np.minimum(ended, rounds.episodes), ended)
            if np.all(decided | (rounds.episodes >= 300)):
                break
        if pay == 0.5:
            assert np.mean(decided) <= 0.115
        else:
            assert not rounds.wealth.below.any()
            needed[only_pairs] = ended.mean()
    assert needed[False] < 0.6 * needed[True]


def test_the_interval_holds_what_no_bet_refutes_and_never_widens() -> None:
    rng = np.random.default_rng(3)
    rounds = pairs(2.0, np.array([0.0]), limit=300)
    widths = [4.0]
    for t, value in enumerate(rng.uniform(-0.5, 1.3, size=120)):
        add_pairs(rounds, np.array([value]))
        if t % 15 != 14:
            continue
        ends = rounds.wealth.interval()
        assert ends.high - ends.low <= widths[-1] + 1e-9
        widths.append(ends.high - ends.low)
        assert bool(rounds.wealth.above[0, 0]) == (ends.low > 0.0)
    assert ends.low < 0.4 < ends.high
    assert widths[-1] < 0.5


def test_a_duel_finds_the_better_policy_and_plays_by_its_seeds() -> None:
    good, poor = leaning(0.9), leaning(0.1)
    duel = ope_gym.duel(poor, good, bounds=(0, 2), limit=200)
    assert duel.next() == "a"
    assert duel.decision is None
    assert duel.verdict.reasons == duel.gate_verdict.reasons == (Reason("duel_open"),)
    assert duel.play(Coin()) == "b"
    assert duel.verdict == Verdict((Reason("b_better"),))
    assert duel.gate_verdict == Verdict((Reason("gate_failed"),))
    assert duel.next() is None
    assert duel.interval.high < 0 < -duel.difference
    assert duel.rounds < duel.episodes < 200  # some pairs, some played alone
    assert str(duel).startswith(f"b is better after {duel.episodes} fresh episodes (95 % confid")
    assert "\nvalue of a minus value of b: -" in str(duel)
    again = ope_gym.duel(poor, good, bounds=(0, 2), limit=200)
    assert again.play(Coin(), episodes=3) is None
    assert again.episodes == 3
    again.play(Coin())
    assert str(again) == str(duel)


def recorded_coins(episodes: int = 60) -> ope_gym.TrajectoryBuffer:
    env, buffer = (
        Coin(),
        ope_gym.TrajectoryBuffer(spaces.Discrete(1), spaces.Discrete(2), horizon=2),
    )
    for k, share in enumerate((0.4, 0.6)):
        number = buffer.add_policy(leaning(share))
        for i in range(episodes):
            one = play_episode(env, leaning(share), 100 * k + i, np.random.default_rng([k, i]))
            buffer.append(
                one.observations,
                one.actions,
                one.rewards,
                one.log_probs,
                number,
                terminated=True,
                held_out=True,
            )
    return buffer


def test_recorded_episodes_say_how_long_an_episode_can_be() -> None:
    duel = ope_gym.duel(0, "last", data=recorded_coins(), reward_range=(0, 1), limit=500)
    assert duel.rules.bounds == (0.0, 2.0)  # two steps: the recorded time limit


def test_a_saved_duel_goes_on_where_it_was(tmp_path: Path) -> None:
    data, path = recorded_coins(), tmp_path / "duel.json"
    terms: dict[str, Any] = {"data": data, "bounds": (0, 2), "margin": 0.05, "limit": 300}
    terms["level"] = 0.9999
    whole = ope_gym.duel(0, "last", **terms)
    whole.play(Coin(), episodes=61)
    part = ope_gym.duel(0, "last", **terms, state=path)  # not there yet: begins
    part.play(Coin(), episodes=31)
    part.save(path)
    rest = ope_gym.duel(0, "last", **terms, state=path)
    assert rest.episodes == 31
    rest.play(Coin(), episodes=30)
    assert rest.to_dict() == whole.to_dict()
    with pytest.raises(ValueError, match=r"margin is 0.1, but .* was begun with 0.05"):
        ope_gym.duel(0, "last", **{**terms, "margin": 0.1}, state=path)
    for other in ((leaning(0.41), "last"), (0, leaning(0.61))):
        with pytest.raises(ValueError, match=r"policy '[ab]' is not the one that state was begun"):
            ope_gym.duel(*other, **terms, state=path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not the state of a duel"):
        ope_gym.duel(0, "last", **terms, state=path)


def test_a_margin_ends_duels_of_equals() -> None:
    duel = ope_gym.duel(Uniform(2), Uniform(2), bounds=(0, 2), margin=0.4, limit=2000)
    assert duel.play(Coin()) == "too close"
    assert duel.rounds < 2000
    assert str(duel).startswith("too close, at most 0.4 apart, after")
    assert -0.4 <= duel.interval.low < 0 < duel.interval.high <= 0.4
    assert duel.not_worse() is True
    assert (duel.verdict.colour, duel.gate_verdict.colour) == ("green", "green")
    passed = Reason("gate_passed_within", worse=-duel.interval.low, allowed=0.4)
    assert duel.gate_verdict.reasons == (passed,)


def test_a_gate_plays_on_after_the_verdict() -> None:
    """D is certain to be below 0 before it is certain to be within the margin."""
    duel = ope_gym.duel(leaning(0.35), leaning(0.65), bounds=(0, 2), margin=0.45, limit=3000)
    assert duel.play(Coin()) == "b"
    assert duel.not_worse() is None
    before = duel.episodes
    duel.play(Coin(), gate=True)
    assert duel.not_worse() is True
    assert duel.episodes > before


@pytest.mark.parametrize("terms", [{"symmetric": True}, {"deviation": 1.5}])
def test_a_duel_needs_no_bounds(terms: dict[str, Any], tmp_path: Path) -> None:
    good, poor = leaning(0.9), leaning(0.1)
    duel = ope_gym.duel(poor, good, data=recorded_coins(), limit=200, **terms)
    assert (duel.interval.low, duel.interval.high) == (-np.inf, np.inf)
    duel.play(Coin(), episodes=1)
    duel.save(tmp_path / "duel.json")
    assert json.loads(duel.to_json())["interval"] == [None, None]
    duel = ope_gym.duel(
        poor, good, data=recorded_coins(), limit=200, **terms, state=tmp_path / "duel.json"
    )
    assert duel.play(Coin()) == "b"
    assert duel.interval.low < -0.8 < duel.interval.high < 0
    assert ", if the " in str(duel)
    with pytest.raises(ValueError, match="episode is nan; give its return"):
        ope_gym.duel(poor, good, **terms).add("a", math.nan)


def test_symmetric_duels_play_independent_episodes() -> None:
    """Equal distributions, of which a common seed would make skewed differences.

    G_a = U and G_b = (U + .05) mod 1: with common seeds 4 of these 12 duels would have a winner.
    """
    winners = 0
    for seed in range(12):
        duel = ope_gym.duel(Uniform(2), Uniform(2), symmetric=True, seed=seed)
        for _ in range(20):
            a, draws = duel.seed, duel.rng().random()
            duel.add("a", np.random.default_rng(a).random())
            assert duel.seed != a
            assert duel.rng().random() != draws
            duel.add("b", (np.random.default_rng(duel.seed).random() + 0.05) % 1.0)
        winners += duel.decision is not None
    assert winners <= 2
    for terms in ({"bounds": (0, 1)}, {"deviation": 1.0}):
        duel = ope_gym.duel(Uniform(2), Uniform(2), **terms)
        before = duel.seed, duel.rng().random()
        duel.add("a", 0.5)
        assert (duel.seed, duel.rng().random()) == before


@pytest.mark.parametrize(("varies", "share"), [("a", 0.75), ("b", 0.25), ("", 0.5)])
def test_the_policy_whose_returns_vary_more_is_played_more_often(varies: str, share: float) -> None:
    """Standard deviation .3 against 0, difference .02 of a range of 1; or both constant."""
    duel = ope_gym.duel(Uniform(2), Uniform(2), bounds=(0, 1))
    rng = np.random.default_rng(0)
    names = []
    for _ in range(160):
        name = duel.next()
        assert name is not None
        noise = 0.3 * rng.choice([-1, 1]) if name == varies else 0.0
        duel.add(name, 0.5 + noise - (0.02 if name != "a" else 0.0))
        names.append(name)
    assert duel._plan.single[0]
    assert duel._plan.share[0] == share
    error = math.sqrt(share * (1 - share) / 80)
    assert np.mean(np.array(names[80:]) == "a") == pytest.approx(share, abs=4 * error)


def test_the_limit_ends_every_duel() -> None:
    duel = ope_gym.duel(leaning(0.5), leaning(0.51), bounds=(0, 2), limit=3)
    assert duel.play(Coin()) == "too close"
    assert 6 <= duel.episodes <= 7
    assert str(duel).startswith("limit of 3 pairs reached, nothing decided, after")


@pytest.mark.parametrize("first", ["trajectories", "returns"])
def test_a_duel_takes_one_kind_of_episode(first: str, tmp_path: Path) -> None:
    """x of a single round has the mean D only if what is told does not depend on the lot."""
    terms: dict[str, Any] = {"bounds": (0, 2), "state": tmp_path / "duel.json"}
    duel = ope_gym.duel(leaning(0.9), leaning(0.5), **terms)
    whole = play_episode(Coin(), leaning(0.9), duel.seed, duel.rng())
    total = float(whole.returns()[0])
    with pytest.raises(ValueError, match="outside of bounds"):
        duel.add("a", 3.0)  # an episode that is refused fixes nothing
    duel.add("a", whole if first == "trajectories" else total)
    with pytest.raises(ValueError, match=rf"begun with {first}: .* give all episodes as traject"):
        duel.add("b", total if first == "trajectories" else whole)
    duel.save(tmp_path / "duel.json")
    again = ope_gym.duel(leaning(0.9), leaning(0.5), **terms)
    with pytest.raises(ValueError, match=rf"begun with {first}"):
        again.add("b", total if first == "trajectories" else whole)
    again.add("b", whole if first == "trajectories" else total)
    assert again.rounds == 1


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({}, r"needs bounds, the lowest and highest possible return"),
        ({"reward_range": (0, 1)}, "reward_range needs horizon"),
        ({"bounds": (2, 1)}, r"bounds is \(2, 1\)"),
        ({"bounds": (0, 1), "symmetric": True}, "bounds and symmetric are given"),
        ({"deviation": 0.0}, "deviation is 0.0"),
        ({"bounds": (0, 1), "margin": -1.0}, "margin is -1.0"),
        ({"bounds": (0, 1), "limit": 0}, "limit is 0; give a whole number of pairs"),
        ({"bounds": (0, 1), "level": 2.0}, "level"),
    ],
)
def test_errors_name_the_argument(terms: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ope_gym.duel(Uniform(2), Uniform(2), **terms)


def test_wrong_episodes_are_refused() -> None:
    duel = ope_gym.duel(Uniform(2), Uniform(2), bounds=(0, 1))
    with pytest.raises(ValueError, match="policy is 'c'"):
        duel.add("c", 0.5)
    with pytest.raises(ValueError, match=r"the return 1.5 of policy 'a' is outside of bounds"):
        duel.add("a", 1.5)
    duel.add("a", 0.5)
    with pytest.raises(ValueError, match="'b' is next"):
        duel.add("a", 0.5)
    duel.add("b", 0.5)
    duel._plan = dataclasses.replace(duel._plan, single=np.array([True]))
    name = duel.next()
    other = "b" if name == "a" else "a"
    with pytest.raises(ValueError, match=rf"'{name}' was drawn to play this round alone"):
        duel.add(other, 0.5)
    foreign = play_episode(Coin(), leaning(0.5), 0, np.random.default_rng(0))
    sure = ope_gym.duel(leaning(0.0), leaning(0.0), bounds=(0, 2))
    with pytest.raises(ValueError, match=r"policy 'a' gives its action of step \d the log-prob"):
        sure.add("a", foreign)
    with pytest.raises(ValueError, match="but there are no data"):
        ope_gym.duel(0, Uniform(2), bounds=(0, 1))
    with pytest.raises(ValueError, match="give a single environment"):
        duel.play(gym.make_vec("CartPole-v1", num_envs=2))  # type: ignore[arg-type]


@pytest.fixture
def coin_env() -> Any:
    gym.register("Coin-v0", entry_point=lambda **_: Coin(), disable_env_checker=True)
    yield "Coin-v0"
    del gym.registry["Coin-v0"]


@pytest.mark.parametrize(
    ("new", "more", "code", "words"),
    [
        ("0", [], 0, "pass: the new policy is better"),
        ("1", [], 1, "fail: the new policy is worse"),
        ("0", ["--limit", "2"], 2, "undecided: the limit of 2 pairs is reached (95 % confidence"),
        ("1", ["--margin", "1.9"], 0, "worse, and 1.9 is allowed (95 % confidence, valid even if"),
        ("0", ["--bounds", "1", "0"], 3, "--bounds 1 0: give finite"),
        ("7", [], 3, "--new 7"),
        ("0", ["--env", "Coi-v0"], 3, "--env Coi-v0: "),
        ("0", ["--env", "no_such:Coin-v0"], 3, "--env no_such:Coin-v0: No module"),
        ("tests.test_duel:worse", [], 1, "tests.test_duel:worse (new) - policy 0 (old)"),
    ],
)
def test_gate_has_exit_codes(
    coin_env: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    new: str,
    more: list[str],
    code: int,
    words: str,
) -> None:
    path, told = tmp_path / "coins.ope", tmp_path / "gate.json"
    buffer = ope_gym.TrajectoryBuffer(spaces.Discrete(1), spaces.Discrete(2), horizon=2)
    for policy in (leaning(0.9), leaning(0.1)):
        number = buffer.add_policy(policy)
        for i in range(5):
            action = np.array([i % 2, 0])
            zeros = np.zeros(2, dtype=np.int64)
            log_probs = policy.log_prob(zeros, action)
            buffer.append(zeros, action, [1.0, 0.0], log_probs, number, terminated=True)
    buffer.save(path)
    old = str(1 - int(new) % 2) if new.isdigit() else "0"
    flags = ["--env", coin_env, "--bounds", "0", "2", "--new", new, "--old", old]
    found = main(["gate", str(path), *flags, *more, "--json", str(told)])
    printed = capsys.readouterr()
    assert found == code, printed
    assert words in printed.out + printed.err
    if code < 3:
        assert json.loads(told.read_text())["rules"]["bounds"] == [0.0, 2.0]


def test_the_last_policy_of_a_gate_is_that_of_the_last_file(tmp_path: Path) -> None:
    data = recorded_coins()
    for name, kept in (("first", slice(None)), ("second", slice(1))):
        few = data.select(policies=range(len(data.policies))[kept])
        dataclasses.replace(few, policies=data.policies[kept]).save(tmp_path / name)
    source = open_source([tmp_path / "first", tmp_path / "second"], None, 1 << 17, Workers())
    assert len(source.policies) == len(data.policies) >= 2
    assert source.number("last") == 0
    assert previous_policy(source) == len(data.policies) - 1
    alone = open_source(tmp_path / "first", None, 1 << 17, Workers())
    assert alone.number("last") == len(data.policies) - 1
    assert previous_policy(alone) == len(data.policies) - 2


def test_gate_of_one_policy_and_its_stop(
    coin_env: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, state = str(tmp_path / "coins.ope"), ["--state", str(tmp_path / "gate.json")]
    recorded_coins().select(policies=[0]).save(path)
    data = Trajectories.load(path)
    dataclasses.replace(data, policies=data.policies[:1]).save(path)
    words = ["gate", path, "--env", coin_env, "--bounds", "0", "2"]
    assert main(words) == 3
    assert "the files hold 1 policy: give --old" in capsys.readouterr().err

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Duel, "play", stop)
    for more, end in ((state, "stopped; give the same command to go on\n"), ([], "stopped\n")):
        assert main([*words, "--old", "0", *more]) == 130
        assert capsys.readouterr().err.endswith(end)


def worse() -> Any:
    """Return a checkpoint that no file holds, for the command line."""
    return leaning(0.1)


def test_gate_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["gate", "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for words in ("exit code", "0  pass", "1  fail", "2  undecided", "3  ", "--margin", "--state"):
        assert words in printed, words
    assert main(["gate", "episodes.ope", "--limit", "many"]) == 3


def test_bounds_that_recorded_episodes_contradict_are_refused() -> None:
    data = recorded_coins()
    high = float(data.returns().max())
    words = r"bounds are \(0, .*\), but the recorded episode \d+ returned .*; give wider ones"
    with pytest.raises(ValueError, match=words):
        ope_gym.duel(0, 1, data=data, bounds=(0.0, high - 0.5))
    ope_gym.duel(0, 1, data=data, bounds=(float(data.returns().min()), high))
