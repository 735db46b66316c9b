"""What makes evaluations fast, and must not change what they say."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numba.core import event
from threadpoolctl import threadpool_info, threadpool_limits

from ope_gym import kernels
from ope_gym.arrays import one_blas_thread
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators import markov
from ope_gym.evaluation import Evaluator, evaluate
from ope_gym.models import equations, features
from ope_gym.models.linear import LinearQ
from ope_gym.policies import LinearSigmoid
from ope_gym.weights.answers import Answers, ask_together
from ope_gym.weights.behaviours import policy_log_probs, stack_log_probs
from tests.builders import LogProbOnly, recorded
from wrappers import RecordTrajectories, collect


@cache
def recorded_cartpole() -> Trajectories:
    """Record 24 episodes of two policies."""
    env, rng = RecordTrajectories(gym.make("CartPole-v1")), np.random.default_rng(0)
    for theta in ([0.0, 0.0, 0.0, 0.0], [0.0, 0.3, 0.3, 0.3]):
        collect(env, LinearSigmoid(np.array(theta)), 12, rng, seed=1)
    return env.buffer.view()


class Counting(LinearSigmoid):
    """Count the rows that the policy is asked for."""

    log_probs = 0
    probabilities = 0

    def log_prob(self, observations: Any, actions: Any) -> Any:
        Counting.log_probs += len(observations)
        return super().log_prob(observations, actions)

    def probs(self, observations: Any) -> Any:
        Counting.probabilities += len(observations)
        return super().probs(observations)


def test_the_target_is_asked_once_for_each_step() -> None:
    data = recorded_cartpole()
    target = Counting(np.array([0.1, 0.2, 0.3, 0.4]))
    Counting.log_probs = Counting.probabilities = 0
    evaluate(data, target, q_model=LinearQ())
    assert Counting.log_probs == data.n_steps
    # and 64 rows to see whether it is deterministic, and single ones for the number of actions
    assert data.n_steps <= Counting.probabilities < data.n_steps + 64 + 40


def test_answers_are_those_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded_cartpole()
    target = LinearSigmoid(np.array([0.1, 0.2, 0.3, 0.4]))
    rows = np.array([5, 2, 2, 11])
    expected = target.probs(np.asarray(data.observations)[rows])
    np.testing.assert_allclose(Answers(target, data).probs(rows), expected, rtol=1e-14)
    monkeypatch.setattr("ope_gym.weights.answers._KEPT", 1)  # too many to keep
    np.testing.assert_allclose(Answers(target, data).probs(rows), expected, rtol=1e-14)
    own = policy_log_probs(target, "target", data)
    np.testing.assert_array_equal(Answers(target, data).log_probs, own)


def test_targets_that_are_asked_together_answer_as_each_does() -> None:
    data = recorded_cartpole()
    targets = [LinearSigmoid(np.array([0.1, 0.2, 0.3, 0.1 * k])) for k in range(3)]
    answers = [Answers(target, data) for target in targets]
    ask_together(answers)
    for answer in answers:
        assert answer._log_probs is not None
        expected = policy_log_probs(answer.target, "target", data)
        np.testing.assert_allclose(answer._log_probs, expected, rtol=1e-13)


class Tempered(LinearSigmoid):
    """Act at another temperature than its parameters say."""

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return LinearSigmoid(self.theta / 2.0).log_prob(observations, actions)


def test_a_class_with_a_log_prob_of_its_own_is_asked_for_that() -> None:
    data = recorded_cartpole()
    targets = [Tempered(np.array([0.1, 0.2, 0.3, 0.1 * k])) for k in range(3)]
    answers = [Answers(target, data) for target in targets]
    ask_together(answers)
    for own, target in zip(answers, targets, strict=True):
        expected = LinearSigmoid(target.theta / 2.0).log_prob(data.observations, data.actions)
        np.testing.assert_allclose(own.log_probs, expected, rtol=1e-13)
    others = stack_log_probs(targets, data.observations, data.actions, range(3))
    np.testing.assert_allclose(others[-1], expected, rtol=1e-13)


def test_a_target_of_another_shape_says_itself_what_is_wrong() -> None:
    data = recorded_cartpole()
    answers = [Answers(LinearSigmoid(np.zeros(width)), data) for width in (4, 3)]
    ask_together(answers)
    assert answers[0].log_probs.shape == (data.n_steps,)
    with pytest.raises(ValueError, match="the policy needs"):
        _ = answers[1].log_probs


def test_blocks_of_the_q_model_and_of_the_markov_check_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = recorded_cartpole()
    target = LinearSigmoid(np.array([0.1, 0.2, 0.3, 0.4]))
    names = ("auto", "MDR", "DM", "FWDR")
    want = evaluate(data, target, names, q_model=LinearQ())
    monkeypatch.setattr(equations, "_SORTED", 1)  # blocks of 256 steps
    monkeypatch.setattr(equations, "_CACHED", 1)  # pieces of 64
    monkeypatch.setattr(features, "_CACHED", 7)
    monkeypatch.setattr(markov, "_BLOCK", 2)  # shorter than the lags
    got = evaluate(data, target, names, q_model=LinearQ())
    for name in names:
        np.testing.assert_allclose(got[name].value, want[name].value, rtol=1e-8)
        np.testing.assert_allclose(got[name].standard_error, want[name].standard_error, rtol=1e-8)
        assert [*map(str, got[name].verdict.basis)] == [*map(str, want[name].verdict.basis)]


def test_one_compilation_serves_arrays_that_may_and_may_not_be_written_to() -> None:
    values, offsets = np.array([1.0, 2.0, 4.0]), np.array([0, 2, 3])
    kernels.cumulate(values, offsets, np.empty(3))
    with event.install_recorder("numba:compile") as seen:
        for frozen in (values, offsets):
            frozen.flags.writeable = False
            out = np.empty(3)
            kernels.cumulate(values, offsets, out)
            np.testing.assert_array_equal(out, [1.0, 3.0, 4.0])
    assert not seen.buffer
    assert not values.flags.writeable
    kernels.cumulate(np.ones(3), offsets, out)
    np.testing.assert_array_equal(out, [1.0, 2.0, 1.0])


def blas_threads() -> list[int]:
    return [found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"]


def test_blas_has_its_threads_again_when_evaluations_have_ended() -> None:
    """Two overlap, and the one that began first ends first."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_blas_thread():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        with one_blas_thread():
            assert set(blas_threads()) == {1}
            thread.start()
            assert inside.wait(30)
        leave.set()
        thread.join()
        assert blas_threads() == before
        assert set(before) == {2}


def test_a_target_that_is_not_finite_after_one_that_is_gets_columns_of_its_own() -> None:
    """The check of Markov states sees the actions of the two in different ways."""
    made = recorded(3, (60, 60), horizon=10)

    class Opaque(LogProbOnly):
        def sample(self, observations: Any, rng: np.random.Generator) -> Any:
            return made.target.sample(observations, rng)

    evaluator = Evaluator(made.trajectories, "DM", q_model="linear", held_out=False)
    for target in (made.target, Opaque(made.target.log_prob)):
        alone = Evaluator(made.trajectories, "DM", q_model="linear", held_out=False)
        found, expected = (x.evaluate(target, origin="fixed") for x in (evaluator, alone))
        assert found["DM"].verdict.basis == expected["DM"].verdict.basis
