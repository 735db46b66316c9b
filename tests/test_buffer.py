"""Tests of buffers and trajectories: what they keep, refuse and give back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as S
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data import spaces
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schedules import Schedule
from ope_gym.data.trajectories import PropensityMismatch, Trajectories
from ope_gym.policies import DiagonalGaussian, LinearSigmoid, Uniform
from tests.test_spaces import ALL_SPACES, same

BOX, TWO = S.Box(-1, 1, (2,)), S.Discrete(2)
HALF = np.log(0.5)


def sigmoid(*theta: float) -> LinearSigmoid:
    return LinearSigmoid(np.array(theta))


def episode(n: int = 3, **changes: Any) -> dict[str, Any]:
    """Return arguments of a valid `append`."""
    return {
        "observations": np.zeros((n, 2), dtype=np.float32),
        "actions": np.arange(n) % 2,
        "rewards": np.ones(n),
        "log_probs": np.full(n, HALF),
        "policy_ids": 0,
        "terminated": True,
    } | changes


def small_buffer(n_policies: int = 1, horizon: int | None = None) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(BOX, TWO, horizon=horizon)
    for k in range(n_policies):
        assert buffer.add_policy(sigmoid(k, 0)) == k
    return buffer


def filled() -> TrajectoryBuffer:
    """Return six episodes of policies 0 0 2 2 3 3 of five, every second one held out."""
    buffer = small_buffer(5)
    for i, k in enumerate([0, 0, 2, 2, 3, 3]):
        buffer.append(
            **episode(i + 1, policy_ids=k, held_out=i % 2 == 1, rewards=np.full(i + 1, i))
        )
    return buffer


def fingerprint(data: Trajectories) -> Any:
    """Return everything in a buffer, for comparison with `same`."""
    return tuple(getattr(data, field.name) for field in dataclasses.fields(data))


# Appending -----------------------------------------------------------------------------------


def test_columns_of_two_episodes() -> None:
    buffer = small_buffer(2, horizon=10)
    first = buffer.append(
        [[0.1, 0.2], [0.3, 0.4]], [0, 1], [1, 2], [-0.1, -0.2], 0, terminated=True
    )
    second = buffer.append(
        np.array([[0.5, 0.6]]),
        np.array([1]),
        np.array([3.0]),
        np.array([-0.3]),
        np.array([1]),
        terminated=False,
        truncated=True,
        held_out=True,
        start_clock=9,
    )
    assert (first, second, len(buffer)) == (0, 1, 2)
    data = buffer.view()
    assert data.observations.tolist() == [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    assert data.actions.tolist() == [0, 1, 1]
    assert data.rewards.tolist() == [1, 2, 3]
    assert data.log_probs.tolist() == [-0.1, -0.2, -0.3]
    assert data.policy_ids.tolist() == [0, 0, 1]
    assert data.offsets.tolist() == [0, 2, 3]
    assert data.terminated.tolist() == [True, False]
    assert data.truncated.tolist() == [False, True]
    assert data.held_out.tolist() == [False, True]
    assert data.start_clock.tolist() == [-1, 9]
    assert data.schedule_ids.tolist() == [-1, -1]
    assert data.policies == (sigmoid(0, 0), sigmoid(1, 0))
    assert (data.observation_space, data.action_space, data.horizon) == (BOX, TWO, 10)
    assert (data.n_steps, len(data)) == (3, 2)
    assert data.lengths.tolist() == [2, 1]
    assert data.steps.tolist() == [0, 1, 0]
    assert data.episode_ids.tolist() == [0, 0, 1]
    assert data.discrete is True
    dtypes = {"rewards": "f8", "log_probs": "f8", "policy_ids": "i4", "offsets": "i8"}
    dtypes |= {"terminated": "?", "held_out": "?", "start_clock": "i8", "schedule_ids": "i4"}
    assert all(getattr(data, name).dtype == dtype for name, dtype in dtypes.items())


def test_what_is_stored_cannot_be_changed_from_outside() -> None:
    buffer = small_buffer()
    given = episode()
    buffer.append(**given)
    for name in ("observations", "actions", "rewards", "log_probs"):
        given[name][:] = 1
    data = buffer.view()
    assert data.observations.sum() == 0
    assert data.log_probs.tolist() == [HALF] * 3
    for column in fingerprint(data)[:11]:
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 0
    for column in (data.lengths, data.steps, data.episode_ids):
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.rewards = np.zeros(3)  # type: ignore[misc]


NAN_AT_1 = np.array([1.0, np.nan, 1.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": NAN_AT_1}, "episode 1, step 1: rewards is nan"),
        ({"rewards": [1, 2, np.inf]}, "episode 1, step 2: rewards is inf"),
        ({"rewards": np.ones(2)}, "episode 1: 2 rewards but 3 log_probs"),
        ({"rewards": np.ones((3, 1))}, r"episode 1: rewards has shape \(3, 1\)"),
        ({"rewards": 1.0}, r"episode 1: rewards has shape \(\)"),
        ({"rewards": ["a", "b", "c"]}, "episode 1: rewards are not numbers"),
        ({"rewards": [[1], [1, 2], [3]]}, "episode 1: rewards are not numbers"),
        ({"log_probs": NAN_AT_1 - 2}, "episode 1, step 1: log_probs is nan"),
        ({"log_probs": [-1, -np.inf, -1]}, "step 1: log_probs is -inf.*probability zero"),
        ({"log_probs": [-1, -1, np.inf]}, "step 2: log_probs is inf"),
        ({"log_probs": [0.5, 0.5, 0.5]}, "step 0: log_probs is 0.5, above 0.*natural logarithms"),
        ({"log_probs": [-1, -1, 1e-8]}, "step 2: log_probs is 1e-08"),
        ({"log_probs": [-1, -1]}, "3 rewards but 2 log_probs"),
        ({"actions": [0, 1, 2]}, r"episode 1, step 2: actions is 2, which is not in Discrete\(2\)"),
        ({"actions": [0.0, 1.0, 0.0]}, "episode 1: actions has dtype float64"),
        ({"actions": [[0], [1], [0]]}, r"actions has shape \(3, 1\), expected \(3,\)"),
        ({"observations": np.zeros((3, 4))}, r"observations has shape \(3, 4\), expected \(3, 2\)"),
        ({"observations": np.zeros((4, 2))}, r"observations has shape \(4, 2\), expected \(3, 2\)"),
        ({"policy_ids": 2}, "episode 1, step 0: policy_ids is 2.*numbered 0 to 1.*add_policy"),
        ({"policy_ids": -1}, "policy_ids is -1"),
        ({"policy_ids": [0, 0, 2]}, "episode 1, step 2: policy_ids is 2"),
        ({"policy_ids": [0, 0]}, r"policy_ids has dtype int64 and shape \(2,\)"),
        ({"policy_ids": 0.0}, "policy_ids has dtype float64"),
        ({"policy_ids": True}, "policy_ids has dtype bool"),
        ({"policy_ids": [0, 1, 1]}, "step 1: policy_ids is 1 after 0.*needs its start_clock"),
        ({"terminated": False}, "episode 1: .*both false: an unfinished episode"),
        ({"start_clock": -1}, "episode 1: start_clock=-1"),
        ({"start_clock": 1.5}, "episode 1: start_clock=1.5"),
        (episode(6), "episode 1 has 6 steps, horizon=5"),
        (episode(0), "episode 1 has no steps"),
    ],
)
def test_an_invalid_append_is_named_and_changes_nothing(
    changes: dict[str, Any], message: str
) -> None:
    buffer = small_buffer(2, horizon=5)
    buffer.append(**episode())
    before = buffer.view()
    with pytest.raises(ValueError, match=message):
        buffer.append(**episode(**changes))
    assert len(buffer) == 1
    assert buffer.view() is before
    assert buffer.append(**episode()) == 1
    assert same(fingerprint(buffer.view().select(episodes=[0]))[:11], fingerprint(before)[:11])


def test_certainty_may_round_a_little_above_one() -> None:
    buffer = small_buffer()
    buffer.append(**episode(log_probs=[0.0, 1e-10, -1.0]))


def test_densities_may_exceed_one() -> None:
    buffer = TrajectoryBuffer(BOX, S.Box(-1, 1, (1,)))
    gaussian = DiagonalGaussian(np.zeros((1, 2)), np.zeros(1), np.full(1, -3.0))
    buffer.add_policy(gaussian)
    actions = np.array([[0.0], [0.01], [7.0]])  # the last one is outside: the env clips, not we
    log_probs = gaussian.log_prob(np.zeros((3, 2)), actions)
    assert log_probs[0] > 0
    buffer.append(**episode(actions=actions, log_probs=log_probs))
    buffer.audit()
    assert buffer.view().discrete is False
    with pytest.raises(ValueError, match=r"step 1: actions is \[nan\], it must be finite"):
        buffer.append(**episode(actions=np.array([[0.0], [np.nan], [0.0]])))


def test_without_spaces_the_first_episode_decides() -> None:
    buffer = TrajectoryBuffer()
    buffer.add_policy(Uniform(2))
    buffer.append(**episode(observations=(np.zeros(3), {"a": np.zeros((3, 2))})))
    for observations in (np.zeros(3), (np.zeros(3), {"a": np.zeros((3, 3))}), (np.zeros(3),)):
        with pytest.raises(ValueError, match="episode 1: observations and actions are"):
            buffer.append(**episode(observations=observations))
    with pytest.raises(ValueError, match="episode 1: observations and actions are"):
        buffer.append(
            **episode(
                observations=(np.zeros(3), {"a": np.zeros((3, 2))}), actions=np.array([0.0, 1, 0])
            )
        )
    with pytest.raises(ValueError, match="above 0"):  # whole numbers have no densities
        buffer.append(**episode(log_probs=[0.5] * 3))
    assert len(buffer) == 1
    assert buffer.view().discrete is None
    buffer.clear()
    buffer.append(**episode(observations=np.zeros(3)))


def test_both_ends_may_be_true() -> None:
    buffer = small_buffer()
    buffer.append(**episode(terminated=np.True_, truncated=True))
    assert buffer.view().terminated[0]
    assert buffer.view().truncated[0]


def test_the_view_is_kept_until_something_changes() -> None:
    buffer = small_buffer()
    assert len(buffer.view()) == 0
    buffer.append(**episode())
    view = buffer.view()
    assert buffer.view() is view
    buffer.append(**episode())
    assert (len(view), len(buffer.view())) == (1, 2)
    buffer.add_policy(Uniform(2))
    assert len(buffer.view().policies) == 2
    assert len(view.policies) == 1


def test_a_buffer_answers_what_its_trajectories_answer() -> None:
    buffer = TrajectoryBuffer()
    k = buffer.add_policy(Uniform(2))
    for n in (1, 3):
        steps = np.zeros((n, 2)), np.zeros(n, dtype=int), np.ones(n), np.full(n, -0.7)
        buffer.append(*steps, k, terminated=True, held_out=n == 3)
    assert buffer.returns().tolist() == [1, 3]
    assert buffer.returns(gamma=0.5).tolist() == [1, 1.75]
    assert buffer.lengths.tolist() == [1, 3]
    assert buffer.held_out.tolist() == [False, True]
    assert (len(buffer), buffer.n_steps, buffer.has_propensities) == (2, 4, True)
    assert buffer.select(held_out=True).returns().tolist() == [3]
    assert len(buffer.merge(buffer)) == 4


def test_clear_keeps_policies() -> None:
    buffer = filled()
    buffer.clear()
    assert (len(buffer), len(buffer.view()), buffer.policies[3]) == (0, 0, sigmoid(3, 0))
    buffer.append(**episode(policy_ids=3))
    assert buffer.view().policy_ids.tolist() == [3, 3, 3]


# Appending many -------------------------------------------------------------------------------


def together(episodes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return arguments of `append_many` for arguments of several `append`."""
    lengths = [len(one["rewards"]) for one in episodes]
    joined = {
        name: batches.concatenate([one[name] for one in episodes])
        for name in ("observations", "actions", "rewards", "log_probs")
    }
    ids = [np.full(n, one["policy_ids"]) for n, one in zip(lengths, episodes, strict=True)]
    return {
        **joined,
        "policy_ids": np.concatenate(ids),
        "lengths": lengths,
        "terminated": [one["terminated"] for one in episodes],
        "truncated": [one.get("truncated", False) for one in episodes],
        "held_out": [one.get("held_out", False) for one in episodes],
        "start_clock": [one.get("start_clock", -1) for one in episodes],
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": NAN_AT_1}, "episode 2, step 1: rewards is nan"),
        ({"log_probs": [-1, -np.inf, -1]}, "episode 2, step 1: log_probs is -inf"),
        ({"actions": [0, 1, 2]}, "episode 2, step 2: actions is 2"),
        ({"policy_ids": 3}, "episode 2, step 0: policy_ids is 3.*numbered 0 to 2.*add_policy"),
        ({"policy_ids": [0, 1, 1]}, "episode 2, step 1: policy_ids is 1 after 0.*start_clock"),
        ({"policy_ids": 0, "start_clock": 3}, "episode 2, step 2: policy_ids is 0 at clock 5"),
        ({"policy_ids": 1, "start_clock": 7}, "episode 2, step 2: .* clock 9.*policy 2 acts"),
        ({"policy_ids": 0, "start_clock": 1}, "episode 2, step 0: .* clock 1.*no policy acts"),
        ({"terminated": False}, "episode 2: .*both false: an unfinished episode"),
        ({"start_clock": -2}, "episode 2: start_clock=-2"),
        (episode(6), "episode 2 has 6 steps, horizon=5"),
    ],
)
def test_one_invalid_episode_of_many_is_named_and_changes_nothing(
    changes: dict[str, Any], message: str
) -> None:
    buffer = small_buffer(3, horizon=5)
    for k, clock in enumerate([2, 5, 9]):
        buffer.change_policy(k, clock, mid_episode=clock > 2)
    buffer.append(**episode())
    before = buffer.view()
    good = episode(2, policy_ids=2, start_clock=20)
    bad = episode(**changes)
    bad |= {"actions": np.asarray(bad["actions"]), "rewards": np.asarray(bad["rewards"])}
    with pytest.raises(ValueError, match=message):
        buffer.append_many(**together([good, bad, good]))
    assert buffer.view() is before
    for last in (good, episode(policy_ids=0)):
        with pytest.raises(ValueError, match=r"episode 2, step 1: policy_ids is 0 at clock 21"):
            buffer.append_many(**together([good, good | {"policy_ids": [2, 0]}, last]))
    assert buffer.view() is before
    buffer.change_policy(0, 9, mid_episode=False)  # no episode has been at clock 20
    buffer.append_many(**together([good | {"policy_ids": 0}]))
    assert len(buffer) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [3, 2]}, "lengths add up to 5, but there are 6 rewards"),
        ({"lengths": []}, "lengths add up to 0, but there are 6 rewards"),
        ({"lengths": [3, 0, 3]}, r"lengths\[1\] is 0"),
        ({"lengths": [7, -1]}, r"lengths\[1\] is -1"),
        ({"lengths": 6}, r"lengths has shape \(\)"),
        ({"lengths": [6.0]}, "lengths has dtype float64"),
        ({"rewards": np.ones((6, 1))}, r"append_many: rewards has shape \(6, 1\)"),
        ({"log_probs": [-1.0]}, "episodes 0 to 1: 6 rewards but 1 log_probs"),
        ({"policy_ids": [0, 0]}, "episodes 0 to 1: policy_ids has dtype"),
        ({"terminated": [True] * 3}, "terminated has dtype bool and shape"),
        ({"truncated": 0.5}, "truncated has dtype float64"),
        ({"held_out": [0, 2]}, "held_out has dtype int64, expected truth values"),
        ({"start_clock": [0.5, 1]}, "start_clock has dtype float64"),
    ],
)
def test_many_at_once_must_fit_together(changes: dict[str, Any], message: str) -> None:
    buffer = small_buffer()
    before = buffer.view()
    with pytest.raises(ValueError, match=message):
        buffer.append_many(**together([episode(), episode()], **changes))
    assert buffer.view() is before


def test_none_of_many() -> None:
    buffer = small_buffer()
    before = buffer.view()
    seen, chosen = np.empty((0, 2)), np.empty(0, dtype=int)
    steps = buffer.append_many(seen, chosen, [], [], 0, lengths=[], terminated=True)
    assert len(steps.rewards) == 0
    assert buffer.view() is before


def test_many_are_copied_unless_told_otherwise() -> None:
    buffer = small_buffer()
    given = together([episode(), episode(2)])
    kept = buffer.append_many(**given)
    given["observations"][:] = given["rewards"][:] = 1
    shared = buffer.append_many(**given, copy=False)
    assert shared.observations is given["observations"]
    for steps, value in ((kept, 0), (shared, 1)):
        assert (steps.observations == value).all()
        with pytest.raises(ValueError, match="read-only"):
            steps.rewards[:] = 0
    assert buffer.view().observations.sum() == 10


# Policies and clocks -------------------------------------------------------------------------


class Unhashable:
    """A policy that is equal by content, like a plain dataclass."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> Any:
        return self.value == other.value if isinstance(other, Unhashable) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def log_prob(self, observations: Any, actions: Any) -> NDArray[np.float64]:
        return np.zeros(len(actions))

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return np.zeros(len(observations), dtype=int)


def test_equal_policies_share_a_number() -> None:
    buffer = TrajectoryBuffer()
    assert buffer.add_policy(sigmoid(0, 1)) == 0
    assert buffer.add_policy(sigmoid(0, 2)) == 1
    assert buffer.add_policy(sigmoid(0, 1)) == 0
    assert buffer.add_policy(Unhashable(3)) == 2
    assert buffer.add_policy(Unhashable(3)) == 2
    assert buffer.add_policy(Unhashable(4)) == 3
    arrays = Unhashable(np.zeros(2)), Unhashable(np.zeros(2))  # their == gives an array
    assert [buffer.add_policy(policy) for policy in (*arrays, arrays[0])] == [4, 5, 4]
    assert len(buffer.policies) == 6


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="no log_prob and sample"):
        TrajectoryBuffer().add_policy(lambda x: x)  # type: ignore[arg-type]


def clocked_buffer() -> TrajectoryBuffer:
    """Return a buffer where policy 0 acts at clocks 0-4, policy 1 at 5-9, policy 2 from 10 on."""
    buffer = small_buffer(3)
    buffer.change_policy(0, 0, mid_episode=False)
    buffer.append(**episode(3, start_clock=0))
    buffer.change_policy(1, 5, mid_episode=True)
    buffer.append(**episode(4, start_clock=3, policy_ids=[0, 0, 1, 1]))
    buffer.change_policy(2, 10, mid_episode=False)
    buffer.append(**episode(3, start_clock=7, policy_ids=1))
    buffer.append(**episode(3, start_clock=10, policy_ids=2))
    return buffer


def test_a_change_inside_an_episode_gives_all_the_schedule() -> None:
    buffer = clocked_buffer()
    buffer.append(**episode(2, policy_ids=1))  # of another loop, it has no clock
    data = buffer.view()
    assert data.schedules == (Schedule(np.array([0, 5, 10]), np.array([0, 1, 2])),)
    assert data.schedule_ids.tolist() == [0, 0, 0, 0, -1]
    assert data.start_clock.tolist() == [0, 3, 7, 10, -1]
    assert data.policy_ids.tolist() == [0] * 5 + [1] * 5 + [2] * 3 + [1] * 2


def test_the_schedule_reaches_back_to_episodes_before_the_first_such_change() -> None:
    buffer = small_buffer(2)
    buffer.change_policy(0, 0, mid_episode=False)
    buffer.append(**episode(3, start_clock=0))
    assert buffer.view().schedule_ids.tolist() == [-1]
    assert buffer.view().schedules == ()
    buffer.change_policy(1, 3, mid_episode=True)
    assert buffer.view().schedule_ids.tolist() == [0]


def test_changes_between_episodes_need_no_schedule() -> None:
    buffer = small_buffer(2)
    buffer.change_policy(0, 0, mid_episode=False)
    buffer.append(**episode(3, start_clock=0))
    buffer.change_policy(1, 3, mid_episode=False)
    buffer.append(**episode(3, start_clock=3, policy_ids=1))
    assert buffer.view().schedule_ids.tolist() == [-1, -1]
    assert buffer.view().start_clock.tolist() == [0, 3]


def test_episodes_before_the_first_change_follow_no_schedule() -> None:
    buffer = small_buffer(2)
    buffer.append(**episode(3, start_clock=0))
    buffer.change_policy(0, 3, mid_episode=False)
    buffer.change_policy(1, 5, mid_episode=True)
    buffer.append(**episode(3, start_clock=3, policy_ids=[0, 0, 1]))
    assert buffer.view().schedule_ids.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_clock": 3, "policy_ids": 0}, "step 2: policy_ids is 0 at clock 5.*policy 1 acts"),
        ({"start_clock": 5, "policy_ids": 0}, "step 0: policy_ids is 0 at clock 5.*policy 1 acts"),
        ({"start_clock": 3, "policy_ids": [0, 0, 0]}, "step 2: policy_ids is 0 at clock 5"),
        ({"start_clock": 3, "policy_ids": [0, 1, 1]}, "step 1: policy_ids is 1 at clock 4"),
        ({"start_clock": 1, "policy_ids": 0}, "step 0: policy_ids is 0 at clock 1.*no policy acts"),
        ({"policy_ids": [0, 0, 1]}, "step 2: policy_ids is 1 after 0.*needs its start_clock"),
    ],
)
def test_policies_that_disagree_with_the_changes(changes: dict[str, Any], message: str) -> None:
    buffer = small_buffer(2)
    buffer.change_policy(0, 2, mid_episode=False)
    buffer.change_policy(1, 5, mid_episode=True)
    with pytest.raises(ValueError, match=message):
        buffer.append(**episode(3, **changes))
    assert len(buffer) == 0


def test_changes_come_in_order_and_before_their_episodes() -> None:
    buffer = small_buffer(3)
    with pytest.raises(ValueError, match=r"the policy that acted before is unknown.*change_policy"):
        buffer.change_policy(0, 3, mid_episode=True)
    with pytest.raises(ValueError, match="policy_ids is 3"):
        buffer.change_policy(3, 0, mid_episode=False)
    with pytest.raises(ValueError, match="clock=-1"):
        buffer.change_policy(0, -1, mid_episode=False)
    buffer.change_policy(0, 2, mid_episode=False)
    with pytest.raises(ValueError, match="clock=1 is before the last change of policy, at clock 2"):
        buffer.change_policy(1, 1, mid_episode=False)
    buffer.append(**episode(3, start_clock=2))
    with pytest.raises(ValueError, match="already has an episode with steps up to clock 4"):
        buffer.change_policy(1, 4, mid_episode=True)
    assert buffer.view().schedules == ()
    buffer.change_policy(0, 5, mid_episode=True)  # no change: the loop stays as it is
    buffer.change_policy(1, 5, mid_episode=False)
    buffer.change_policy(2, 5, mid_episode=True)  # policy 1 never acted
    assert buffer.view().schedules == (Schedule(np.array([2, 5]), np.array([0, 2])),)


def test_a_schedule_is_checked() -> None:
    for clocks, policies in (
        ([], []),
        ([0, 0], [0, 1]),
        ([2, 1], [0, 1]),
        ([-1], [0]),
        ([0], [-1]),
    ):
        with pytest.raises(ValueError, match="schedule"):
            Schedule(np.array(clocks, int), np.array(policies, int))
    with pytest.raises(ValueError, match="as many clocks as policies"):
        Schedule(np.array([0, 1]), np.array([0]))
    with pytest.raises(ValueError, match="expected integers"):
        Schedule(np.array([0.5]), np.array([0]))
    schedule = Schedule(np.array([2, 5]), np.array([0, 1]))
    assert schedule.policy_at([0, 2, 4, 5, 99]).tolist() == [-1, 0, 0, 1, 1]
    assert schedule == Schedule(np.array([2, 5]), np.array([0, 1]))
    assert hash(schedule) == hash(Schedule(np.array([2, 5]), np.array([0, 1])))
    assert schedule != Schedule(np.array([2, 6]), np.array([0, 1]))


# Reading -------------------------------------------------------------------------------------


def test_returns() -> None:
    buffer = small_buffer()
    buffer.append(**episode(3, rewards=[1, 2, 4]))
    buffer.append(**episode(1, rewards=[8]))
    data = buffer.view()
    assert data.returns().tolist() == [7, 8]
    assert data.returns(0.5).tolist() == [3, 8]
    assert data.returns(0).tolist() == [1, 8]
    assert small_buffer().view().returns().tolist() == []


def test_repr() -> None:
    assert repr(filled()) == (
        "TrajectoryBuffer(6 episodes, 21 steps, 5 policies, 3 held out, mean return 11.67, "
        "lengths 1-6)"
    )
    assert repr(filled().select(episodes=[0])) == (
        "Trajectories(1 episode, 1 step, 5 policies, 0 held out, mean return 0, length 1)"
    )
    assert repr(TrajectoryBuffer()) == "TrajectoryBuffer(0 episodes, 0 policies)"


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"policies": 2}, [2, 3]),
        ({"policies": [0, 3]}, [0, 1, 4, 5]),
        ({"policies": []}, []),
        ({"policies": [4]}, []),
        ({"held_out": True}, [1, 3, 5]),
        ({"held_out": False}, [0, 2, 4]),
        ({"last": 1}, [4, 5]),
        ({"last": 2}, [2, 3, 4, 5]),
        ({"last": 99}, [0, 1, 2, 3, 4, 5]),
        ({"last": 2, "held_out": True}, [3, 5]),
        ({"episodes": [4, 0]}, [4, 0]),
        ({"episodes": 3}, [3]),
        ({"episodes": -1}, [5]),
        ({"episodes": []}, []),
        ({"episodes": [1, 1]}, [1, 1]),
        ({"episodes": slice(1, 4)}, [1, 2, 3]),
        ({"episodes": np.arange(6) > 3}, [4, 5]),
        ({"episodes": [5, 4, 1], "held_out": True, "policies": [3]}, [5]),
    ],
)
def test_select(conditions: dict[str, Any], expected: list[int]) -> None:
    buffer = filled()
    found = buffer.select(**conditions)
    assert found.lengths.tolist() == [i + 1 for i in expected]
    assert found.rewards.tolist() == [i for i in expected for _ in range(i + 1)]
    assert found.returns().tolist() == [i * (i + 1) for i in expected]
    assert found.held_out.tolist() == [i % 2 == 1 for i in expected]
    assert found.policies == buffer.policies
    assert found.policy_ids.tolist() == [
        [0, 0, 2, 2, 3, 3][i] for i in expected for _ in range(i + 1)
    ]
    assert not found.rewards.flags.writeable


def test_select_says_what_does_not_exist() -> None:
    data = filled().view()
    with pytest.raises(ValueError, match=r"policies=\[0, 5\]: number 5 is unknown"):
        data.select(policies=[0, 5])
    with pytest.raises(ValueError, match="last is 0"):
        data.select(last=0)
    with pytest.raises(IndexError, match=r"episodes=\[6\] does not fit 6 episodes"):
        data.select(episodes=[6])
    with pytest.raises(IndexError, match="does not fit 6 episodes"):
        data.select(episodes=[True, False])
    with pytest.raises(IndexError, match="does not fit 6 episodes"):
        data.select(episodes=[0.5])


def test_select_goes_by_the_first_step_and_keeps_the_schedule() -> None:
    data = clocked_buffer().view()
    assert data.select(policies=0).start_clock.tolist() == [0, 3]
    found = data.select(last=1)
    assert found.start_clock.tolist() == [10]
    assert found.schedules == data.schedules
    assert found.schedule_ids.tolist() == [0]


def test_audit() -> None:
    rng = np.random.default_rng(0)
    buffer = TrajectoryBuffer(BOX, TWO)
    policies = [sigmoid(0.5, -1), sigmoid(2, 1)]
    for policy in policies:
        k = buffer.add_policy(policy)
        seen = rng.normal(size=(5, 2)).astype(np.float32)
        chosen = policy.sample(seen, rng)
        buffer.append(seen, chosen, np.ones(5), policy.log_prob(seen, chosen), k, terminated=True)
    buffer.audit()
    buffer.audit(0.0)
    data = buffer.view()
    log_probs = data.log_probs.copy()
    log_probs[7] -= 0.01
    log_probs[9] -= 0.01
    wrong = dataclasses.replace(data, log_probs=log_probs)
    wrong.audit(tolerance=0.02)
    with pytest.raises(
        PropensityMismatch, match=r"episode 1, step 2: .* policy 1.*2 of 10"
    ) as caught:
        wrong.audit()
    assert (caught.value.episode, caught.value.step) == (1, 2)
    assert f"{log_probs[7]:.6g}" in str(caught.value)
    assert f"{data.log_probs[7]:.6g}" in str(caught.value)
    swapped = dataclasses.replace(data, policies=data.policies[::-1])
    with pytest.raises(PropensityMismatch, match="episode 0, step 0"):
        swapped.audit()


# Merging -------------------------------------------------------------------------------------


def test_merge_shares_equal_policies() -> None:
    left, right = small_buffer(2), TrajectoryBuffer(BOX, TWO)
    left.append(**episode(1, policy_ids=1))
    assert [right.add_policy(sigmoid(k, 0)) for k in (7, 1)] == [0, 1]
    right.append(**episode(2, policy_ids=0))
    right.append(**episode(3, policy_ids=1, held_out=True))
    merged = left.merge(right, left.view())
    assert merged.policies == (sigmoid(0, 0), sigmoid(1, 0), sigmoid(7, 0))
    assert merged.lengths.tolist() == [1, 2, 3, 1]
    assert merged.policy_ids.tolist() == [1, 2, 2, 1, 1, 1, 1]
    assert merged.held_out.tolist() == [False, False, True, False]
    assert len(left) == 1


def test_merge_keeps_schedules_apart() -> None:
    clocked, other = clocked_buffer(), TrajectoryBuffer(BOX, TWO)
    for k in (2, 0):
        other.add_policy(sigmoid(k, 0))
    other.change_policy(0, 0, mid_episode=False)
    other.change_policy(1, 1, mid_episode=True)
    other.append(**episode(2, policy_ids=[0, 1], start_clock=0))
    merged = filled().view().merge(clocked, other)
    assert merged.schedule_ids.tolist() == [-1] * 6 + [0] * 4 + [1]
    assert merged.schedules == (
        Schedule(np.array([0, 5, 10]), np.array([0, 1, 2])),
        Schedule(np.array([0, 1]), np.array([2, 0])),
    )
    assert merged.policy_ids[-2:].tolist() == [2, 0]
    assert clocked.merge(filled()).schedule_ids.tolist() == [0] * 4 + [-1] * 6
    clocked.extend(filled())
    assert clocked.view().schedule_ids.tolist() == [0] * 4 + [-1] * 6


def test_extending_gives_what_merging_gives() -> None:
    parts: list[Trajectories | TrajectoryBuffer] = [filled(), clocked_buffer()]
    parts.append(filled().select(last=1))
    buffer = TrajectoryBuffer()
    for part in parts:
        buffer.extend(part)
    merged = parts[0].view().merge(*parts[1:])
    assert same(fingerprint(buffer.view()), fingerprint(merged))
    assert (buffer.observation_space, buffer.action_space) == (BOX, TWO)


def test_extending_a_loop_with_a_clock_of_its_own() -> None:
    buffer = clocked_buffer()
    own = buffer.view().schedules[0]
    buffer.extend(clocked_buffer())
    buffer.append(**episode(2, start_clock=13, policy_ids=2))
    assert buffer.view().schedules == (own, own)
    assert buffer.view().schedule_ids.tolist() == [0] * 4 + [1] * 4 + [0]
    plain = small_buffer(3)
    plain.change_policy(0, 0, mid_episode=False)
    plain.append(**episode(2, start_clock=0))
    plain.extend(clocked_buffer())
    assert plain.view().schedule_ids.tolist() == [-1] + [0] * 4
    plain.change_policy(1, 2, mid_episode=True)
    assert plain.view().schedule_ids.tolist() == [0] + [1] * 4


def test_a_buffer_can_be_extended_with_itself() -> None:
    buffer = filled()
    buffer.extend(buffer)
    assert len(buffer) == 12
    assert len(buffer.policies) == 5


def test_only_one_environment_is_merged() -> None:
    data = filled().view()
    other = TrajectoryBuffer(S.Box(-1, 1, (3,)), TWO)
    with pytest.raises(
        ValueError, match=r"observation_space differs: .* and Box\(\(3,\), float32\); .*environment"
    ):
        data.merge(other)
    shape = data.observation_space.shape  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"and Box\(.*float32\) with other bounds; only"):
        data.merge(TrajectoryBuffer(S.Box(-7, 7, shape), TWO))
    with pytest.raises(ValueError, match="horizon differs: None and 7"):
        data.merge(small_buffer(horizon=7))
    unknown = TrajectoryBuffer()
    assert len(data.merge(unknown)) == len(unknown.merge(data)) == 6
    assert unknown.merge(data).action_space == TWO
    unknown.add_policy(Uniform(2))
    unknown.append(**episode())
    with pytest.raises(ValueError, match=r"observation_space differs: None and Box"):
        unknown.extend(data)
    assert (len(unknown), len(unknown.policies)) == (1, 1)
    flat = TrajectoryBuffer()
    flat.add_policy(Uniform(2))
    flat.append(**episode(observations=np.zeros(3)))
    with pytest.raises(ValueError, match="observations differ in structure"):
        unknown.merge(flat)
    with pytest.raises(ValueError, match="observations and actions are"):
        unknown.extend(flat)
    assert len(unknown) == 1


def test_merging_nothing() -> None:
    data = filled().view()
    assert same(fingerprint(data.merge()), fingerprint(data))
    nothing = small_buffer().view()
    assert len(nothing.merge(nothing)) == 0
    assert nothing.merge(nothing).observations.shape == (0, 2)


# Arrays --------------------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    """Return arguments of a valid `from_arrays`: episodes of 2, 1 and 3 steps."""
    return {
        "observations": np.zeros((6, 2)),
        "actions": [0, 1, 0, 1, 0, 1],
        "rewards": np.arange(6.0),
        "log_probs": np.full(6, HALF),
        "offsets": [0, 2, 3, 6],
        "policies": [sigmoid(0, 0), sigmoid(1, 0)],
        "policy_ids": [0, 0, 1, 0, 0, 0],
        "terminated": True,
        "action_space": TWO,
    } | changes


def test_from_arrays() -> None:
    given = arrays(held_out=[True, False, True], horizon=3)
    data = Trajectories.from_arrays(**given)
    given["observations"][:] = 9
    assert data.observations.sum() == 0
    assert data.lengths.tolist() == [2, 1, 3]
    assert data.terminated.tolist() == [True] * 3
    assert data.truncated.tolist() == [False] * 3
    assert data.held_out.tolist() == [True, False, True]
    assert not data.actions.flags.writeable
    one = Trajectories.from_arrays(**arrays(policy_ids=1))
    assert one.policy_ids.tolist() == [1] * 6
    assert data.view() is data


def test_from_arrays_with_a_schedule() -> None:
    schedule = Schedule(np.array([0, 11]), np.array([1, 0]))
    data = Trajectories.from_arrays(
        **arrays(
            policy_ids=[1, 0, 0, 0, 0, 0],
            start_clock=[10, -1, -1],
            schedules=[schedule],
            schedule_ids=[0, -1, -1],
        )
    )
    assert data.schedules == (schedule,)


SCHEDULE = Schedule(np.array([5]), np.array([0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [0, 2, 3]}, "offsets goes from 0 to 3, .* number of rewards, 6"),
        ({"offsets": [1, 6]}, "offsets goes from 1 to 6"),
        ({"offsets": [0, 2, 2, 6]}, r"episode 1: offsets\[1\]=2 and offsets\[2\]=2"),
        ({"offsets": [0, 4, 2, 6]}, r"episode 1: offsets\[1\]=4 and offsets\[2\]=2"),
        ({"offsets": []}, "offsets has shape"),
        ({"offsets": [[0, 6]]}, "offsets has shape"),
        ({"offsets": [0.0, 6.0]}, "offsets has dtype float64"),
        ({"rewards": [0, 0, 0, 0, np.nan, 0]}, "episode 2, step 1: rewards is nan"),
        ({"rewards": np.zeros((6, 1))}, r"rewards has shape \(6, 1\)"),
        ({"log_probs": [-1] * 5 + [-np.inf]}, "episode 2, step 2: log_probs is -inf"),
        ({"log_probs": [-1] * 5}, "6 rewards but 5 log_probs"),
        ({"actions": [0, 0, 2, 0, 0, 0]}, "episode 1, step 0: actions is 2"),
        ({"observations": np.zeros((5, 2))}, r"observations has shape \(5, 2\)"),
        ({"policy_ids": [0, 0, 0, 2, 2, 2]}, "episode 2, step 0: policy_ids is 2"),
        ({"policy_ids": [0, 0, 0, 0, 1, 0]}, "episode 2, step 1: policy_ids is 1.*start_clock"),
        ({"policies": []}, "episode 0, step 0: policy_ids is 0, but no policy is known"),
        ({"terminated": [True, False, True]}, "episode 1: terminated and truncated are both false"),
        ({"terminated": [True, True]}, r"terminated has dtype bool and shape \(2,\)"),
        ({"terminated": [0.5, 1, 1]}, "terminated has dtype float64"),
        ({"held_out": [0, 1, 2]}, "held_out has dtype int64, expected truth values"),
        ({"start_clock": [0.5, 1, 1]}, "start_clock has dtype float64"),
        ({"start_clock": -2}, "start_clock and schedule_ids must be at least 0"),
        ({"horizon": 2}, "episode 2 has 3 steps, horizon=2"),
        ({"horizon": 0}, "horizon is 0"),
        ({"schedule_ids": [-1, 0, -1]}, "episode 1: schedule_ids is 0, but there are 0 schedules"),
        ({"schedules": [SCHEDULE], "schedule_ids": 0}, "episode 0 follows a schedule.*start_clock"),
        (
            {"schedules": [SCHEDULE], "schedule_ids": [0, -1, 0], "start_clock": [5, -1, 4]},
            "episode 2, step 0: policy_ids is 0, but policy -1 should act there",
        ),
        (
            {"schedules": [SCHEDULE], "schedule_ids": [-1, 0, -1], "start_clock": 9},
            "episode 1, step 0: policy_ids is 1, but policy 0 should act there.*schedule",
        ),
        (
            {"schedules": [Schedule(np.array([0]), np.array([2]))]},
            r"schedules\[0\] names policy 2, but there are 2 policies",
        ),
    ],
)
def test_from_arrays_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trajectories.from_arrays(**arrays(**changes))


def test_from_arrays_wants_policies() -> None:
    with pytest.raises(TypeError, match=r"policies\[1\] is 'x'"):
        Trajectories.from_arrays(**arrays(policies=[sigmoid(0, 0), "x"]))


# Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ALL_SPACES, ids=repr)
def test_every_space_survives_a_file(space: gym.Space[Any], tmp_path: Path) -> None:
    space.seed(5)
    buffer = TrajectoryBuffer(space, space)
    buffer.add_policy(Uniform(2))
    for n in (3, 1, 2):
        seen, chosen = (spaces.stack(space, [space.sample() for _ in range(n)]) for _ in "ab")
        buffer.append(seen, chosen, np.ones(n), np.full(n, -1.0), 0, terminated=True)
    buffer.save(tmp_path / "file")
    data = Trajectories.load(tmp_path / "file")
    assert same(fingerprint(data)[:11], fingerprint(buffer.view())[:11])
    assert data.observation_space == data.action_space == space
    assert data.discrete is buffer.view().discrete
    data.save(tmp_path / "again")
    assert same(fingerprint(Trajectories.load(tmp_path / "again")), fingerprint(data))
    merged = data.merge(buffer)
    assert batches.length(merged.observations) == 12


def test_nested_batches_without_spaces_survive_a_file(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer()
    buffer.add_policy(Uniform(2))
    seen = {"a.b": np.arange(3), "a": {"b": (np.ones((3, 2)), np.zeros(3, bool))}}
    buffer.append(**episode(observations=seen))
    buffer.save(tmp_path / "file")
    assert same(Trajectories.load(tmp_path / "file").observations, seen)
    buffer = TrajectoryBuffer()
    buffer.add_policy(Uniform(2))
    buffer.append(**episode(observations={1: np.arange(3)}))
    with pytest.raises(TypeError, match=r"string keys to be saved, got \[1\]"):
        buffer.save(tmp_path / "file")
    assert same(Trajectories.load(tmp_path / "file").observations, seen)


def test_an_empty_buffer_survives_a_file(tmp_path: Path) -> None:
    buffer = small_buffer(2, horizon=9)
    buffer.save(tmp_path / "file")
    again = TrajectoryBuffer.load(tmp_path / "file")
    assert (len(again), again.policies, again.horizon) == (0, buffer.policies, 9)
    assert (again.observation_space, again.action_space) == (BOX, TWO)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_history_reads_back_as_appended(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Compare appends, views, extensions and a file, in any order, with a list of episodes."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    buffer, expected = small_buffer(3), list[tuple[Any, ...]]()
    path = tmp_path_factory.mktemp("history") / "file"
    for action in data.draw(st.lists(st.sampled_from("aaaavfe"), max_size=15)):
        if action == "a":
            n, k, held = int(rng.integers(1, 5)), int(rng.integers(3)), bool(rng.integers(2))
            seen, rewards = rng.normal(size=(n, 2)), rng.normal(size=n)
            chosen, logs = rng.integers(0, 2, n), -rng.random(n)
            buffer.append(seen, chosen, rewards, logs, k, terminated=True, held_out=held)
            expected.append((seen, chosen, rewards, logs, k, held))
        elif action == "v":
            buffer.view()
        elif action == "e":
            chosen_ones = [i for i in range(len(expected)) if rng.random() < 0.3]
            buffer.extend(buffer.select(episodes=chosen_ones))
            expected += [expected[i] for i in chosen_ones]
        else:
            buffer.save(path)
            buffer = TrajectoryBuffer.load(path)
    found = buffer.view()
    assert len(found) == len(buffer) == len(expected)
    for i, (seen, chosen, rewards, logs, k, held) in enumerate(expected):
        rows = slice(found.offsets[i], found.offsets[i + 1])
        assert np.array_equal(found.observations[rows], seen)
        assert np.array_equal(found.actions[rows], chosen)
        assert np.array_equal(found.rewards[rows], rewards)
        assert np.array_equal(found.log_probs[rows], logs)
        assert (found.policy_ids[rows] == k).all()
        assert found.held_out[i] == held


def test_schedules_of_old_views_stay() -> None:
    """A change inside episodes gives later views schedules; a view before it has none."""
    buffer = small_buffer(2)
    buffer.change_policy(0, 0, mid_episode=False)
    buffer.append(**episode(2, start_clock=0))
    before = buffer.view()
    buffer.change_policy(1, 3, mid_episode=True)
    buffer.append(**episode(3, policy_ids=[0, 1, 1], start_clock=2))
    between = buffer.view()
    buffer.append(**episode(1, policy_ids=1, start_clock=5))
    after = buffer.view()
    assert before.schedule_ids.tolist() == [-1]
    assert between.schedule_ids.tolist() == [0, 0]
    assert after.schedule_ids.tolist() == [0, 0, 0]
    buffer.clear()
    buffer.append(**episode(1, policy_ids=1, start_clock=7))
    assert buffer.view().schedule_ids.tolist() == [0]
    assert after.schedule_ids.tolist() == [0, 0, 0]
