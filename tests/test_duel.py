"""Duels: exact martingales, plain loops, verdicts, states, the gate."""

from __future__ import annotations

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
from ope_gym.analysis.duel import play_episode
from ope_gym.analysis.duel_prior import Control, bounded_sums
from ope_gym.cli import main
from ope_gym.inference.sequences import CAP, PairedSequence, Prior, bet_sizes, expected_bets
from ope_gym.policies import Uniform
from tests import small_mdps
from tests.builders import Table, buffer_of

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


def played(sequence: PairedSequence, x: Floats, controls: Floats | None = None) -> None:
    for t, value in enumerate(x):
        luck = np.zeros(0) if controls is None else controls[t]
        sequence.add(np.array([value]), luck[None])


def test_without_controls_the_wealth_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    x, span, point = rng.uniform(-2, 3, size=30), 4.0, 0.5
    sequence = PairedSequence(span, np.zeros(0), np.array([point]), limit=50)
    played(sequence, x)
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
    assert np.exp(sequence._logs[:, 0, 0]) == pytest.approx(np.array(wealth), rel=1e-9)
    assert (sequence.above[0, 0], sequence.below[0, 0]) == (above, below)


@pytest.mark.parametrize("trust", [0.0, 0.8])
def test_the_expected_wealth_never_exceeds_what_was_staked(trust: float) -> None:
    """All outcomes of five rounds summed: under the claim the mean wealth is 1, and at most 1.

    Controls depend on the outcome, have mean 0, and their coefficients are learned on the way.
    """
    outcomes = [(-3.0, -1.0, 0.2), (0.0, 0.5, 0.4), (1.5, 0.0, 0.4)]  # difference, control, chance
    mean = sum(p * x for x, _, p in outcomes)
    assert mean == pytest.approx(0.0)
    assert sum(p * c for _, c, p in outcomes) == pytest.approx(0.0)
    prior = Prior(0.4, 0.5, 1.0, np.array([0.7]), np.array([0.3]), 3.0, trust)
    every = list(itertools.product(outcomes, repeat=5))
    chance = np.array([math.prod(p for *_, p in path) for path in every])
    points = np.array([0.0, 0.7, -0.7])
    sequence = PairedSequence(4.0, np.array([1.0]), points, limit=20, prior=prior, runs=len(every))
    for t in range(5):
        x, c = (np.array([path[t][i] for path in every]) for i in (0, 1))
        sequence.add(x, c[:, None])
    wealth = np.exp(sequence._logs) * np.exp(sequence._log_shares)[:, None, None]
    expected = np.einsum("r,srpj->sp", chance, wealth)
    stakes = np.exp(sequence._log_shares).sum(axis=1)
    assert stakes == pytest.approx([1.0, 1.0])
    assert expected[:, 0] == pytest.approx([1.0, 1.0], rel=1e-12)  # D = 0 is true: both are fair
    assert expected[0, 1] < 1.0  # D <= .7 is true
    assert expected[1, 2] < 1.0  # D >= -.7 is true
    assert expected[1, 1] > 1.0  # D >= .7 is false: wealth grows
    used = np.abs(np.array(sequence._history)[:, 1] - 4.0).max()
    assert used > 0.0  # controls took part


def test_bets_follow_what_is_expected_as_far_as_it_is_trusted() -> None:
    differences, shares, theta = expected_bets(Prior(2.0, 1.0, 1.0, trust=0.8))
    assert theta == pytest.approx(0.9)  # the chance of D > 0 is .977, trusted up to .9
    assert differences.mean() == pytest.approx(2.0)
    assert shares.sum(axis=1) == pytest.approx([0.8, 0.0])  # all nine quantiles are above 0
    _, shares, theta = expected_bets(Prior(-0.5, 1.0, 1.0, trust=0.8))
    assert theta == pytest.approx(0.308538, rel=1e-5)  # of a standard normal below -.5
    assert shares.sum(axis=1) == pytest.approx([0.8, 0.8])
    assert expected_bets(Prior())[2] == 0.5


def test_false_decisions_are_rare_under_continuous_peeking() -> None:
    """800 duels of equal policies, looked at after each of 100 rounds, with a misleading prior.

    At most 5 % plus 3 standard errors, 7.3 %; `python -m studies duel` has more of them.
    """
    rng = np.random.default_rng(1)
    prior = Prior(0.3, 0.05, 1.0, np.array([1.0]), np.array([0.5]), 5.0, 0.8)
    sequence = PairedSequence(3.0, np.array([1.5]), np.zeros(1), limit=100, prior=prior, runs=800)
    for _ in range(100):
        luck = np.clip(rng.normal(size=800), -1.5, 1.5)
        noise = rng.choice([-1.5, 0.5], p=[0.25, 0.75], size=800)  # skewed, mean 0
        sequence.add(luck + noise, luck[:, None])
    wrong = np.mean(sequence.above[:, 0] | sequence.below[:, 0])
    assert wrong <= 0.073, wrong
    assert wrong > 0.0


def test_the_interval_holds_what_no_bet_refutes_and_never_widens() -> None:
    rng = np.random.default_rng(3)
    sequence = PairedSequence(2.0, np.zeros(0), np.array([0.0]), limit=300)
    widths = [4.0]
    for t, value in enumerate(rng.uniform(-0.5, 1.3, size=120)):
        sequence.add(np.array([value]), np.zeros((1, 0)))
        if t % 15 != 14:
            continue
        ends = sequence.interval()
        assert ends.high - ends.low <= widths[-1] + 1e-9
        widths.append(ends.high - ends.low)
        assert bool(sequence.above[0, 0]) == (ends.low > 0.0)
    assert ends.low < 0.4 < ends.high
    assert widths[-1] < 0.5


def test_a_control_that_explains_much_makes_a_close_duel_short() -> None:
    """Same rounds, difference .1 and spread 1, of which the control explains 90 %."""
    rng = np.random.default_rng(4)
    luck = np.clip(rng.normal(size=(800, 20)), -1.5, 1.5)
    raw = 0.1 + luck + 0.3 * rng.uniform(-1, 1, size=(800, 20))
    known = Prior(0, np.inf, 0.5, np.array([1.0]), np.array([0.8]), 5.0)
    needed = []
    for limits, prior in ((np.zeros(0), None), (np.array([1.5]), known)):
        sequence = PairedSequence(3.0, limits, np.zeros(1), limit=800, prior=prior, runs=20)
        done = np.full(20, 800)
        for t in range(800):
            sequence.add(raw[t], luck[t][:, None] * np.ones((1, limits.size)))
            done = np.where(sequence.above[:, 0], np.minimum(done, t + 1), done)
        needed.append(done.mean())
    assert needed[1] < 0.6 * needed[0]


def test_the_luck_of_actions_has_mean_zero_whatever_the_q_model_says() -> None:
    """All paths of a small MDP summed, with a nonsense q and a limit that binds."""

    class Nonsense:
        def q(self, observations: Any, actions: Any, steps: Any) -> Floats:
            return np.asarray(np.sin(3.0 * observations + 5.0 * actions + steps))

    rng = np.random.default_rng(5)
    mdp = small_mdps.random_mdp(rng, horizon=3)
    table = small_mdps.random_policy(rng, mdp)
    paths = small_mdps.paths(mdp)
    data = buffer_of(paths, [0] * len(paths), [table]).view()
    chance = np.array([path.probability(table) for path in paths])
    bounds = np.array([[-9.0] * 4, [9.0] * 4])
    for limit in (0.3, 0.8, 50.0):
        control = Control(Table(table), Nonsense(), 0.9, bounds, limit, 1.0)
        luck = control.of(data, rng)
        assert chance @ luck == pytest.approx(0.0, abs=1e-12)
        assert np.abs(luck).max() <= limit + 1e-12
        assert np.abs(luck).max() > 0.1


def test_bounded_sums_stop_growing_at_the_limit() -> None:
    terms, largest = np.array([0.5, 0.5, 0.5, -1.0, 2.0]), np.array([0.5, 0.5, 0.5, 1.0, 4.0])
    found = bounded_sums(terms, largest, np.array([0, 3, 5]), 1.0, 1.2)
    # first: .5, 1, then 1 + .5 * (.2 / .5); second: -1, then -1 + 2 * (.2 / 4)
    assert found == pytest.approx([1.2, -0.9])


def test_a_duel_finds_the_better_policy_and_plays_by_its_seeds() -> None:
    good, poor = leaning(0.9), leaning(0.1)
    duel = ope_gym.duel(poor, good, bounds=(0, 2), limit=200)
    assert duel.next() == "a"
    assert duel.verdict is None
    assert duel.play(Coin()) == "b"
    assert duel.next() is None
    assert duel.interval.high < 0 < -duel.difference
    assert duel.episodes == 2 * duel.rounds < 200
    assert str(duel).startswith("b is better after")
    again = ope_gym.duel(poor, good, bounds=(0, 2), limit=200)
    assert again.play(Coin(), episodes=3) is None
    assert (again.episodes, again.next()) == (3, "b")
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


def test_recorded_episodes_say_what_to_expect() -> None:
    data = recorded_coins()
    duel = ope_gym.duel(leaning(0.7), leaning(0.5), data=data, reward_range=(0, 1), limit=500)
    assert duel.rules.bounds == (0.0, 2.0)  # two steps: the recorded time limit
    assert duel.prior.trust > 0.0
    assert duel.prior.difference == pytest.approx(0.2, abs=3 * duel.prior.error)
    assert duel._limits.size == 2
    duel.play(Coin(), episodes=20)
    assert all(luck != 0.0 for one in duel._rounds for _, luck in one.values())
    # Whoever is lucky is ahead: each control goes with the difference. Seeds of their own, because
    # luck that both share cancels in the difference.
    shares = {"a": 0.7, "b": 0.5}
    for i in range(300):
        one = {}
        for k, (name, share) in enumerate(shares.items()):
            rng = np.random.default_rng([k, i])
            one[name] = duel._outcome(name, play_episode(Coin(), leaning(share), 1000 * k + i, rng))
        duel._close(one)
    n, sums = duel.rounds, duel._sequence
    together = sums._cross[0] / n - sums._luck[0] * sums._total[0] / n**2
    assert np.all(together > 3 * np.sqrt(np.diag(sums._squares[0]) * sums._square[0]) / n**1.5)


def test_a_saved_duel_goes_on_where_it_was(tmp_path: Path) -> None:
    data, path = recorded_coins(), tmp_path / "duel.json"
    terms: dict[str, Any] = {"data": data, "bounds": (0, 2), "margin": 0.05, "limit": 300}
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
    with pytest.raises(ValueError, match="other recorded episodes or another q_model"):
        ope_gym.duel(0, "last", **terms, q_model=None, state=path)


def test_a_margin_ends_duels_of_equals() -> None:
    duel = ope_gym.duel(Uniform(2), Uniform(2), bounds=(0, 2), margin=0.4, limit=2000)
    assert duel.play(Coin()) == "too close"
    assert duel.rounds < 2000
    assert -0.4 <= duel.interval.low < 0 < duel.interval.high <= 0.4
    assert duel.not_worse() is True


def test_the_limit_ends_every_duel() -> None:
    duel = ope_gym.duel(leaning(0.5), leaning(0.51), bounds=(0, 2), limit=3)
    assert duel.play(Coin()) == "too close"
    assert duel.rounds == 3


def test_returns_alone_are_enough() -> None:
    duel = ope_gym.duel(Uniform(2), Uniform(2), bounds=(0, 1))
    while duel.verdict is None:
        name = duel.next()
        assert name is not None
        duel.add(name, 1.0 if name == "a" else 0.0)
    assert duel.verdict == "a"
    assert duel.rounds < 20


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({}, r"needs bounds, the lowest and highest possible return"),
        ({"reward_range": (0, 1)}, "reward_range needs horizon"),
        ({"bounds": (2, 1)}, r"bounds is \(2, 1\)"),
        ({"bounds": (0, 1), "margin": -1.0}, "margin is -1.0"),
        ({"bounds": (0, 1), "limit": 0}, "limit is 0"),
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
    with pytest.raises(ValueError, match="but there are no data"):
        ope_gym.duel(0, Uniform(2), bounds=(0, 1))
    with pytest.raises(TypeError, match="a vector environment"):
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
        ("0", ["--limit", "2"], 2, "undecided"),
        ("0", ["--bounds", "1", "0"], 3, "bounds is"),
        ("7", [], 3, "--new 7"),
        ("0", ["--env", "Coi-v0"], 3, "--env Coi-v0: "),
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
    with pytest.raises(SystemExit) as stop:
        main(["gate", "episodes.ope", "--limit", "many"])
    assert stop.value.code == 3
