"""Bad input at both doors: the message names the argument, the value, the place and the remedy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import wrappers
import wrappers.vector
from ope_gym import (
    Betting,
    Bootstrap,
    Compute,
    FreeEvaluation,
    Options,
    Weighting,
    contributions,
    distribution,
    duel,
    episodes_needed,
    evaluate,
    evaluate_log_probs,
    fit_behaviour,
    leave_one_policy_out,
    overlap,
    rank,
)
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.files import DamagedFileError
from ope_gym.models import DynamicsQ, LinearQ, NetworkQ
from ope_gym.models.features import Polynomial
from ope_gym.policies import EpsilonGreedyTable, Uniform, policy_from_arrays
from tests.builders import LogProbOnly, Table, plain_options, recorded
from tests.reference import Data

Door = Callable[..., Any]


def arrays() -> Data:
    """Three episodes of 2, 1 and 3 steps, two behaviours."""
    rows = np.log(np.linspace(0.2, 0.8, 12)).reshape(2, 6)
    return Data(
        np.log(np.full(6, 0.4)), rows, np.array([0, 1, 1]), np.arange(6.0), np.array([0, 2, 3, 6])
    )


def changed(column: str, row: Any, value: float) -> Data:
    data = arrays()
    new = getattr(data, column).copy()
    new[row] = value
    return data._replace(**{column: new})


def first_door(**options: Any) -> Any:
    data = recorded(0)
    return evaluate(data.trajectories, data.target, **plain_options(**options))


def second_door(**options: Any) -> Any:
    return evaluate_log_probs(*arrays(), **plain_options(**options))


both = pytest.mark.parametrize("door", [first_door, second_door])
BETS: dict[str, Any] = {"interval": "betting", "reward_range": (-9, 9)}


# --- options, at both doors -------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimators": "QIS"}, r"estimators has 'QIS'; did you mean .*Known are BIS, .*EA, auto"),
        ({"estimators": ["FIS", "fis"]}, r"estimators has 'fis'"),
        ({"estimators": []}, r"estimators is empty; known are BIS"),
        ({"gamma": 1.01}, r"gamma is 1\.01; a discount lies within \[0, 1\]"),
        ({"gamma": -0.1}, r"gamma is -0\.1"),
        ({"mixture": "most"}, r"mixture is 'most'; give 'all', 'auto' or the largest number"),
        ({"mixture": 0}, r"mixture is 0; give"),
        ({"cap": 0.0}, r"cap is 0\.0; .* above 0"),
        ({"cap": -3}, r"cap is -3"),
        ({"level": 0.0}, r"level is 0\.0; .* within \(0, 1\)"),
        ({"level": 1.0}, r"level is 1\.0"),
        ({"level": 95}, r"level is 95"),
        ({"return_range": (1, 0)}, r"return_range is \(1, 0\); give the lowest and the highest"),
        ({"return_range": (0, math.inf)}, r"return_range is \(0, inf\)"),
        ({"return_range": 5.0}, r"return_range is 5\.0"),
        ({"return_range": (-9, -8)}, r"return_range is \(-9\.0, -8\.0\), but an episode returned"),
        ({"interval": "normal"}, r"interval is 'normal'; choose one of ess-t, percentile, bca"),
        ({"interval": "bca", "resamples": 1}, r"resamples is 1; .* at least 2"),
        ({"seed": -1}, r"seed is -1; give a whole number of 0 or more"),
        (BETS | {"horizon": 0}, r"horizon is 0; .* at least 1"),
        ({"interval": "betting"}, r"needs the range that every reward obeys: .*reward_range="),
        ({"interval": "betting", "reward_range": (1, 0)}, r"reward_range is \(1, 0\); give finite"),
        (
            {"interval": "betting", "reward_range": (-9, 0.25), "horizon": 9},
            r"reward_range is \(-9\.0, 0\.25\), but the reward is .* at episode \d, step \d: widen",
        ),
        (
            {"interval": "betting", "reward_range": (-9, 9), "horizon": 1},
            r"horizon is 1, but episode \d+ has \d steps",
        ),
        ({"reward_model": "linear"}, r"reward_model is 'linear'; give 'deterministic'"),
        ({"reward_model": (1.0, 2.0, 3.0)}, r"reward_model is \(1\.0, 2\.0, 3\.0\)"),
        ({"reward_model": None}, r"reward_model is None"),
        (
            {"reward_model": (np.ones(2), np.ones(2))},
            r"reward_model mean has shape \(2,\); expected",
        ),
    ],
)
def test_options(door: Door, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        door(**options)


@both
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, math.nan, r"reward_model mean is nan at episode 1, step 0"),
        (1, math.inf, r"reward_model variance is inf at episode 1, step 0"),
        (1, -1.0, r"reward_model variance is -1\.0 at episode 1, step 0: a variance is not neg"),
    ],
)
def test_reward_models(door: Door, part: int, value: float, message: str) -> None:
    offsets = recorded(0).trajectories.offsets if door is first_door else arrays().offsets
    model = [np.ones(offsets[-1]), np.ones(offsets[-1])]
    model[part][offsets[1]] = value
    with pytest.raises(ValueError, match=message):
        door(reward_model=tuple(model))


def test_betting_at_the_door_of_arrays_needs_the_horizon() -> None:
    with pytest.raises(ValueError, match="interval='betting' needs horizon, the longest possible"):
        second_door(interval="betting", reward_range=(0, 9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimators": ["FIS", "EA"]}, r"estimators has 'EA', .*use evaluate\(episodes"),
        ({"reward_model": "cross-fit"}, r"reward_model='cross-fit' needs observations and actions"),
        ({"mixture": 2}, r"mixture is 2, but arrays are weighed against the mixture of all"),
    ],
)
def test_what_only_trajectories_can_give(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        second_door(**options)


# --- odd arguments ----------------------------------------------------------------------------

NO_NUMBERS: tuple[Any, ...] = ("0.9", None, [0.9], 1j, True, {}, np.ones(2), object())
NO_COUNTS = (*NO_NUMBERS, 2.5, -1, math.nan)


def coins(**terms: Any) -> Any:
    return duel(Uniform(2), Uniform(2), **terms)


def cartpole(**options: Any) -> Any:
    return wrappers.RecordTrajectories(gym.make("CartPole-v1"), **options)


DATA = recorded(0, (8, 8, 8))
_T, _TARGET = DATA.trajectories, DATA.target
ODD: list[tuple[Callable[..., Any], str, tuple[Any, ...]]] = [
    *[(door, "gamma", NO_NUMBERS) for door in (first_door, second_door, coins, FreeEvaluation)],
    *[(door, "level", NO_NUMBERS) for door in (first_door, second_door)],
    *[
        (door, "seed", NO_COUNTS)
        for door in (first_door, second_door, partial(coins, bounds=(0, 1)))
    ],
    (partial(rank, _T, [0, 1]), "draws", (*NO_COUNTS, 0)),
    (partial(rank, _T, [0, 1]), "weighting", (10.0, {}, None, "x")),
    (partial(rank, _T, [0, 1]), "compute", (4, {}, None)),
    (partial(leave_one_policy_out, _T), "limit", (*NO_COUNTS, 0)),
    (partial(leave_one_policy_out, _T), "policies", (3, {0})),
    (partial(overlap, _T, _TARGET), "limit", (*NO_COUNTS, 1)),
    (partial(episodes_needed, _T, _TARGET, 0.5), "limit", (*NO_COUNTS, 0)),
    (partial(episodes_needed, _T, _TARGET), "standard_error", (*NO_NUMBERS, 0, math.inf)),
    (partial(contributions, _T, _TARGET), "gamma", NO_NUMBERS),
    (partial(distribution, _T, _TARGET), "resamples", (*NO_COUNTS, 1)),
    (partial(distribution, _T, _TARGET), "weights", ("x", 3, None, [])),
    (distribution(_T, _TARGET).cvar, "tail", (*NO_NUMBERS, 0, 2)),
    (distribution(_T, _TARGET).below, "x", (*NO_NUMBERS, math.inf)),
    (partial(fit_behaviour, _T), "model", ("x", 3, None)),
    (partial(fit_behaviour, _T), "folds", (*NO_COUNTS, 1)),
    (partial(fit_behaviour, _T), "by", ("x", 3, {}, [1])),
    (partial(evaluate, _T, _TARGET), "q_model", ([1], 3, {}, np.ones(3))),
    (partial(evaluate, _T, _TARGET), "estimators", (3, object())),
    (partial(evaluate, _T, _TARGET), "held_out", ("yes", 2, [1])),
    (partial(second_door), "baseline", ([1], "foo", 3, {}, np.zeros(3))),
    (Weighting, "cap", NO_NUMBERS),
    (Weighting, "mixture", (None, 2.5, "64", [1], True, 0)),
    (Compute, "block_steps", (*NO_COUNTS, 0)),
    (Compute, "progress", (3, "x")),
    (lambda workers: first_door(compute=Compute(workers)), "workers", (*NO_COUNTS, 0)),
    (Bootstrap, "resamples", (*NO_COUNTS, 1)),
    (Bootstrap, "method", ("x", None, 3)),
    (Betting, "reward_range", ("ab", 3, (1,), (1, 0), ("0", "1"), (0, math.inf), {})),
    (partial(Betting, (0, 1)), "horizon", ("9", 0, 2.5, True)),
    (coins, "bounds", ("ab", 3, (1,), (1, 1), ("a", "b"), (0, math.nan))),
    (partial(coins, bounds=(0, 1)), "margin", (*NO_NUMBERS, -1)),
    (partial(coins, bounds=(0, 1)), "limit", (*NO_COUNTS, 0)),
    (partial(coins, bounds=(0, 1)), "symmetric", ("yes", 3)),
    (partial(coins, bounds=(0, 1)), "state", (3, {}, "")),
    (coins, "deviation", ("x", 0, [1], True)),
    (partial(coins(bounds=(0, 1)).add, "a"), "episode", NO_NUMBERS),
    (coins(bounds=(0, 1)).play, "env", (None, 3)),
    (_T.returns, "gamma", NO_NUMBERS),
    (_T.audit, "tolerance", (*NO_NUMBERS, -1)),
    (_T.select, "held_out", ("x", 3, [])),
    (lambda others: _T.merge(others), "others", ("x", 3, None)),
    (_T.save, "path", (3, None, [], "")),
    (Trajectories.load, "path", (3, None, [], "")),
    (evaluate(_T, _TARGET).to_json, "path", (3, [], "")),
    (evaluate(_T, _TARGET).select, "names", ("auto", 3, None)),
    (evaluate(_T, _TARGET).difference, "other", ("x", 3, None)),
    (partial(evaluate(_T, _TARGET).table, 1.0), "truth_error", ("x", [1])),
    (evaluate(_T, _TARGET).table, "truth", ("x", [1], math.nan)),
    (cartpole, "path", (3, [], "")),
    (wrappers.RecordTrajectories, "env", (None, 3)),
    (partial(wrappers.collect, cartpole(), Uniform(2), rng=0), "episodes", (*NO_COUNTS, 0)),
    (partial(wrappers.collect, cartpole(), Uniform(2), 2), "rng", ("x", 2.5, None)),
    (TrajectoryBuffer, "observation_space", (3, "x", spaces)),
    (TrajectoryBuffer, "horizon", ("x", 0, 2.5, True)),
    (LinearQ, "ridge", (*NO_NUMBERS, -1)),
    (LinearQ, "nearness", (*NO_NUMBERS, 2)),
    (Polynomial, "degree", (*NO_COUNTS, 0)),
    (NetworkQ, "epochs", (*NO_COUNTS, 0)),
    (NetworkQ, "hidden", ("x", 0, None, (0,), (2.5,))),
    (DynamicsQ, "rows", (*NO_COUNTS, 0)),
    (Uniform, "n_actions", (*NO_COUNTS, 0)),
    (partial(EpsilonGreedyTable, np.zeros(3, int), n_actions=2), "epsilon", (*NO_NUMBERS, 2)),
    (FreeEvaluation, "num_envs", (*NO_COUNTS, 0)),
    (FreeEvaluation, "level", (*NO_NUMBERS, 1)),
    (FreeEvaluation, "horizon", ("x", 0, 2.5)),
]


@pytest.mark.parametrize(("function", "name", "values"), ODD, ids=[name for _, name, _ in ODD])
def test_an_odd_argument_is_named(
    function: Callable[..., Any], name: str, values: tuple[Any, ...]
) -> None:
    """With what came and what is expected, in one form."""
    for value in values:
        required = {"num_envs": 2} if function is FreeEvaluation and name != "num_envs" else {}
        with pytest.raises(ValueError, match=rf"^{name} is .+; [a-z]") as raised:
            function(**{name: value}, **required)
        came = repr(value[0] if name == "hidden" and isinstance(value, tuple) else value)
        assert came in str(raised.value) or f"a {type(value).__name__}" in str(raised.value)


def test_numbers_of_numpy_are_numbers() -> None:
    options = {"gamma": np.float32(0.5), "level": np.array(0.9), "seed": np.int8(3)}
    assert Options(**options) == Options(gamma=0.5, level=0.9, seed=3)  # type: ignore[arg-type]


# --- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("target_log_probs", np.zeros(5), r"target_log_probs has shape \(5,\); expected \(6,\)"),
        ("target_log_probs", np.zeros((2, 3)), r"target_log_probs has shape \(2, 3\)"),
        ("target_log_probs", [[0], [0, 1]], r"target_log_probs .*numbers"),
        ("target_log_probs", ["a"] * 6, r"target_log_probs .*numbers"),
        ("rewards", np.zeros((6, 1)), r"rewards has shape \(6, 1\); expected \(S,\)"),
        ("rewards", ["one"] * 6, r"rewards .*numbers"),
        ("rewards", [1j] * 6, r"rewards .*numbers"),
        ("rewards", np.zeros(5), r"offsets runs from 0 to 6; it must run from 0 to the 5 steps"),
        ("behaviour_log_probs", np.zeros(6), r"behaviour_log_probs has shape \(6,\).*\(K, 6\)"),
        ("behaviour_log_probs", np.zeros((2, 5)), r"behaviour_log_probs has shape \(2, 5\)"),
        ("behaviour_log_probs", np.zeros((0, 6)), r"behaviour_log_probs has shape \(0, 6\)"),
        ("behaviour_log_probs", [[0.0] * 6, [0.0]], r"behaviour_log_probs .*numbers"),
        ("behaviour_ids", [0, 1], r"behaviour_ids has shape \(2,\).*expected \(3,\) integers"),
        ("behaviour_ids", [0.0, 1.0, 1.0], r"behaviour_ids has .* type float64"),
        ("behaviour_ids", [0, 1, 2], r"behaviour_ids is 2 at episode 2; .* 2 rows.* 0 to 1"),
        ("behaviour_ids", [0, -1, 1], r"behaviour_ids is -1 at episode 1"),
        ("offsets", [0, 3, 2, 6], r"offsets goes from 3 to 2 at episode 1; it must increase"),
        ("offsets", [0, 2, 2, 6], r"offsets goes from 2 to 2 at episode 1.*at least one step"),
        ("offsets", [1, 2, 3, 6], r"offsets runs from 1 to 6; it must run from 0 to the 6 steps"),
        ("offsets", [0, 2, 3, 5], r"offsets runs from 0 to 5"),
        ("offsets", [0, 2, 3, 7], r"offsets runs from 0 to 7"),
        ("offsets", [0.0, 2.0, 3.0, 6.0], r"offsets has .* type float64; .*integers"),
        ("offsets", [[0, 6]], r"offsets has shape \(1, 2\)"),
        ("offsets", np.array([], dtype=int), r"offsets has no trajectory: record at least one"),
        ("offsets", [0], r"offsets has no trajectory"),
        ("offsets", [], r"offsets has no trajectory"),
    ],
)
def test_shapes_and_types(column: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_log_probs(*arrays()._replace(**{column: value}))


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("rewards", 4, math.nan, r"rewards is nan at episode 2, step 1: drop or repair"),
        ("rewards", 2, -math.inf, r"rewards is -inf at episode 1, step 0"),
        ("rewards", 0, math.inf, r"rewards is inf at episode 0, step 0"),
        ("target_log_probs", 5, math.nan, r"target_log_probs is nan at episode 2, step 2: check"),
        ("target_log_probs", 1, 0.1, r"target_log_probs is 0\.1 at episode 0, step 1: .*density"),
        ("target_log_probs", 1, math.inf, r"target_log_probs is inf at episode 0, step 1"),
        (
            "behaviour_log_probs",
            (1, 1),
            math.nan,
            r"behaviour_log_probs is nan of behaviour=1 at ep"
            r"isode 0, step 1: check the policy",
        ),
        (
            "behaviour_log_probs",
            (0, 3),
            0.5,
            r"behaviour_log_probs is 0\.5 of behaviour=0 at ep"
            r"isode 2, step 0: the log of a probability is at most 0; .*density=True",
        ),
        (
            "behaviour_log_probs",
            (1, 4),
            -math.inf,
            r"behaviour_log_probs is -inf of behaviour=1 at "
            r"episode 2, step 1: the action was executed",
        ),
    ],
)
def test_values(column: str, row: Any, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_log_probs(*changed(column, row, value))


@pytest.mark.parametrize("estimators", ["BIS", "FIS", "OUIS"])
def test_values_of_the_own_behaviour_are_checked_for_every_scheme(estimators: str) -> None:
    for value, words in ((-math.inf, "executed"), (math.nan, "check"), (0.5, "at most 0")):
        with pytest.raises(ValueError, match=rf"behaviour=1 at episode 1, step 0.*{words}"):
            evaluate_log_probs(
                *changed("behaviour_log_probs", (1, 2), value), estimators=estimators
            )


@pytest.mark.parametrize("bad", [(0, 0), (1, 39), (0, 20)])
def test_the_first_bad_value_is_named_whatever_thread_finds_it(
    bad: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ope_gym.weights.formula._BLOCK", 8)
    monkeypatch.setattr("ope_gym.weights.formula._THREADS", 0)
    monkeypatch.setattr("ope_gym.arrays.cores", lambda: 4)
    rows = np.full((2, 40), -1.0)
    rows[bad] = math.nan
    rows[0, 38:] = math.nan
    where = f"behaviour={bad[0]} at episode {bad[1] // 2}, step {bad[1] % 2}"
    if bad == (1, 39):
        where = "behaviour=0 at episode 19, step 0"
    with pytest.raises(ValueError, match=f"is nan of {where}"):
        evaluate_log_probs(np.full(40, -1.0), rows, [0, 1] * 10, np.ones(40), np.arange(0, 41, 2))


def test_what_is_allowed() -> None:
    """Zero probability elsewhere, rounding above 0, densities, big caps: no error."""
    evaluate_log_probs(*changed("target_log_probs", 0, -math.inf))
    evaluate_log_probs(*changed("behaviour_log_probs", (0, 3), -math.inf))
    evaluate_log_probs(*changed("behaviour_log_probs", (0, 0), 5e-10))
    evaluate_log_probs(*changed("behaviour_log_probs", (0, 0), 3.0), density=True)
    evaluate_log_probs(*changed("target_log_probs", 0, 3.0), density=True)
    evaluate_log_probs(*arrays(), gamma=0, level=0.5, weighting=Weighting(cap=math.inf))
    with pytest.raises(ValueError, match="target_log_probs is inf at episode 0, step 0"):
        evaluate_log_probs(*changed("target_log_probs", 0, math.inf), density=True)
    with pytest.raises(ValueError, match="behaviour_log_probs is inf of behaviour=0"):
        evaluate_log_probs(*changed("behaviour_log_probs", (0, 0), math.inf), density=True)


# --- trajectories -----------------------------------------------------------------------------


def test_no_trajectories() -> None:
    empty = TrajectoryBuffer(spaces.Discrete(2), spaces.Discrete(2))
    for data in (empty, empty.view(), recorded(0).trajectories.select(episodes=[])):
        with pytest.raises(ValueError, match="episodes is empty: record at least one episode"):
            evaluate(data, Uniform(2))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("rewards", math.nan, r"rewards is nan at episode 1, step 0"),
        ("rewards", math.inf, r"rewards is inf at episode 1, step 0"),
        ("log_probs", math.nan, r"log_probs is nan .*at episode 1, step 0"),
        ("log_probs", 0.5, r"log_probs is 0\.5 .*at episode 1, step 0.*at most 0"),
        ("log_probs", -math.inf, r"log_probs is -inf .*at episode 1, step 0.*executed"),
    ],
)
@pytest.mark.parametrize("estimators", ["BIS", "FIS"])
def test_columns_that_were_replaced_are_checked_again(
    column: str, value: float, message: str, estimators: str
) -> None:
    """`dataclasses.replace` checks nothing, so the door does."""
    data = recorded(1)
    new = getattr(data.trajectories, column).copy()
    new[data.trajectories.offsets[1]] = value
    wrong = dataclasses.replace(data.trajectories, **{column: new})
    with pytest.raises(ValueError, match=message):
        evaluate(wrong, data.target, estimators=estimators)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0, math.nan]}, r"episode 1, step 1: rewards is nan"),
        ({"rewards": [1.0]}, r"episode 1: 1 rewards but 2 log_probs"),
        ({"log_probs": [-1.0, math.nan]}, r"episode 1, step 1: log_probs is nan"),
        ({"log_probs": [0.2, -1.0]}, r"episode 1, step 0: log_probs is 0\.2, above 0"),
        ({"log_probs": [-1.0, -math.inf]}, r"episode 1, step 1: log_probs is -inf.*executed"),
        ({"observations": [0, 1, 1]}, r"episode 1.*observations"),
        ({"actions": [0, 5]}, r"episode 1.*actions"),
        ({"policy_ids": 3}, r"episode 1, step 0: policy_ids is 3"),
        ({"terminated": False}, r"episode 1: terminated and truncated are both false"),
    ],
)
def test_episodes_are_checked_when_appended_and_nothing_is_lost(
    changes: dict[str, Any], message: str
) -> None:
    buffer = TrajectoryBuffer(spaces.Discrete(2), spaces.Discrete(2))
    good: dict[str, Any] = {
        "observations": [0, 1],
        "actions": [0, 1],
        "rewards": [1.0, 2.0],
        "log_probs": np.log([0.5, 0.5]),
        "policy_ids": buffer.add_policy(Uniform(2)),
        "terminated": True,
    }
    buffer.append(**good)
    before = evaluate(buffer, Uniform(2))["NFIS"].value
    with pytest.raises(ValueError, match=message):
        buffer.append(**(good | changes))
    assert len(buffer) == 1
    assert evaluate(buffer, Uniform(2))["NFIS"].value == before
    buffer.append(**good)
    assert len(buffer) == 2


# --- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (1,), (), (2, 2)])
def test_a_target_that_returns_the_wrong_length(shape: tuple[int, ...]) -> None:
    data = recorded(2)
    target = LogProbOnly(lambda observations, actions: np.zeros(shape))
    steps = data.trajectories.n_steps
    text = rf"target gave log-probabilities of shape \({', '.join(map(str, shape))},?\) for {steps}"
    with pytest.raises(ValueError, match=text):
        evaluate(data.trajectories, target)


@pytest.mark.parametrize("estimators", ["FIS", "OUIS"])
def test_a_behaviour_that_returns_the_wrong_length(estimators: str) -> None:
    data = recorded(3)
    liar = LogProbOnly(lambda observations, actions: np.zeros(2))
    policies = (*data.trajectories.policies[:2], liar)
    wrong = dataclasses.replace(data.trajectories, policies=policies)
    with pytest.raises(ValueError, match=r"policy 2 gave log-probabilities of shape \(2,\) for"):
        evaluate(wrong, data.target, estimators=estimators)


def test_a_stack_of_the_wrong_shape() -> None:
    class Stacked(Table):
        @classmethod
        def log_prob_stack(cls, policies: Any, observations: Any, actions: Any) -> Any:
            return np.zeros((len(policies), 1))

    data = recorded(4)
    policies = tuple(Stacked(table) for table in data.policies)
    wrong = dataclasses.replace(data.trajectories, policies=policies)
    with pytest.raises(ValueError, match=r"Stacked\.log_prob_stack gave shape \(3, 1\) for 3 pol"):
        evaluate(wrong, data.target)


@pytest.mark.parametrize("model", ["deterministic", "cross-fit"])
@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_a_behaviour_that_gives_no_probability_is_named_with_episode_and_step(
    model: str, value: float
) -> None:
    data = recorded(5, (4, 4))
    t = data.trajectories
    other = int(np.flatnonzero(t.policy_ids[t.offsets[:-1]] == 0)[-1])  # an episode of policy 0
    row = int(t.offsets[other])

    def broken(observations: Any, actions: Any) -> Any:
        logs = t.policies[1].log_prob(observations, actions)
        logs[row] = value
        return logs

    wrong = dataclasses.replace(t, policies=(t.policies[0], LogProbOnly(broken)))
    with pytest.raises(ValueError, match=rf"is {value} of behaviour=1 at episode {other}, step 0"):
        evaluate(wrong, data.target, estimators="OUIS", weighting=Weighting(reward_model=model))


@pytest.mark.parametrize("value", [math.nan, 0.25, math.inf])
def test_a_target_that_gives_no_probability_is_named_with_episode_and_step(value: float) -> None:
    data = recorded(6)
    row = int(data.trajectories.offsets[2])

    def broken(observations: Any, actions: Any) -> Any:
        logs = data.target.log_prob(observations, actions)
        logs[row] = value
        return logs

    with pytest.raises(ValueError, match=rf"target_log_probs is {value} at episode 2, step 0"):
        evaluate(data.trajectories, LogProbOnly(broken), estimators="BIS")


def test_a_target_of_another_environment() -> None:
    data = recorded(6)
    with pytest.raises(ValueError, match="target has 5 actions, but policy 0 has 3"):
        evaluate(data.trajectories, Uniform(5))


# --- files and merging ------------------------------------------------------------------------


def test_horizons_must_agree_on_merge() -> None:
    one, other = recorded(7, horizon=4).trajectories, recorded(7, horizon=5).trajectories
    with pytest.raises(ValueError, match=r"horizon differs: 4 and 5; .*one environment"):
        one.merge(other)
    assert (one.horizon, other.horizon) == (4, 5)


def test_foreign_and_damaged_files(tmp_path: Path) -> None:
    foreign, good = tmp_path / "foreign", tmp_path / "good"
    foreign.write_bytes(b"PK\x03\x04 not ours" * 10)
    with pytest.raises(DamagedFileError, match="not an ope_gym file"):
        Trajectories.load(foreign)
    data = recorded(8)
    data.trajectories.save(good)
    content = bytearray(good.read_bytes())
    content[content.index(data.trajectories.rewards[:2].tobytes())] ^= 0xFF
    (tmp_path / "damaged").write_bytes(bytes(content))
    with pytest.raises(DamagedFileError, match="row 0 of chunks does not match its checksum"):
        Trajectories.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError):
        Trajectories.load(tmp_path / "nowhere")
    assert len(Trajectories.load(good)) == len(data.trajectories)


def test_policies_that_cannot_be_asked_say_how_to_get_them_back() -> None:
    data = recorded(9)
    lost = policy_from_arrays("somebody-elses", {"theta": np.ones(2)})
    gone = dataclasses.replace(data.trajectories, policies=(lost,) * 3)
    with pytest.raises(ValueError, match=r"'somebody-elses'.*register_policy"):
        evaluate(gone, data.target, estimators="NFIS")
