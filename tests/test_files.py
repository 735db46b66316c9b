"""Files read in blocks give what all episodes in memory give, however they are cut."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ope_gym import (
    Betting,
    Bootstrap,
    Compute,
    Estimate,
    Evaluation,
    Evaluator,
    Trajectories,
    Weighting,
    evaluate,
    rank,
)
from ope_gym.estimators.reductions import Bets, Clip, Column, Weighted
from ope_gym.estimators.table import ESTIMATORS, WEIGHTED
from ope_gym.estimators.weighted import StepSums
from ope_gym.models import default_model
from ope_gym.models.features import Polynomial
from ope_gym.models.linear import LinearQ
from ope_gym.policies import LinearSigmoid, Snapshot, Uniform, UnknownPolicy, register_policy
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.propensities import PropensitySums
from tests import small_mdps
from tests.builders import LogProbOnly, Table, assert_same, buffer_of, draw, recorded
from tests.file_builders import (
    clocked,
    functions,
    in_blocks,
    in_memory,
    made,
    merged,
    split,
)

SUMS = [name for name, c in ESTIMATORS.items() if not c.whole]  # made of sums over episodes
WITH_Q = [name for name in SUMS if ESTIMATORS[name].uses_q]
PLAIN = [*WEIGHTED, "auto"]
BOTH = ["FIS", "NFIS"]
INTERVALS = ["ess-t", Bootstrap(30), Bootstrap(30, "bca"), Betting(reward_range=(-1.0, 2.0))]
every_interval = pytest.mark.parametrize("interval", INTERVALS, ids=lambda kind: str(kind)[:9])


def words(estimate: Estimate) -> str:
    """Return the verdict; steps may have equal effective sample sizes but for the last bit."""
    return re.sub(r"(at|from) step \d+", "at a step", str(estimate.verdict))


def assert_equal(blocks: Evaluation, memory: Evaluation, *, rtol: float = 1e-9) -> None:
    """Compare every number, the sample, the verdicts and the diagnostics."""
    assert_same(blocks, memory, rtol=rtol)
    mine, theirs = blocks.sample, memory.sample
    assert (mine.trajectories, mine.steps, mine.regime, mine.q_model, mine.mixture) == (
        theirs.trajectories,
        theirs.steps,
        theirs.regime,
        theirs.q_model,
        theirs.mixture,
    )
    assert mine.fingerprint == theirs.fingerprint
    assert mine.behaviours == theirs.behaviours
    np.testing.assert_array_equal(mine.counts, theirs.counts)
    np.testing.assert_array_equal(mine.strata, theirs.strata)
    for name, one in blocks.items():
        other = memory[name]
        assert words(one) == words(other)
        a, b = one.diagnostics, other.diagnostics
        assert a.support_violations == b.support_violations
        np.testing.assert_allclose(a.log_last, b.log_last, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(a.capped_share, b.capped_share, rtol=1e-12)
        assert a.calibration is not None
        assert b.calibration is not None
        np.testing.assert_allclose(a.calibration, b.calibration, rtol=1e-9, atol=1e-9)
        assert one.report.keys() == other.report.keys()
        for key, number in other.report.items():
            assert one.report[key] == pytest.approx(number, rel=1e-6, abs=1e-9, nan_ok=True), key


@register_policy
@dataclasses.dataclass(frozen=True)
class Joined(Snapshot):
    """A narrow normal policy of observations {"a": (2,), "b": (1,)}."""

    kind: ClassVar[str] = "test-joined"
    gain: float

    def _mean(self, observations: Any) -> Any:
        return self.gain * (observations["a"].sum(axis=1, keepdims=True) + observations["b"])

    def log_prob(self, observations: Any, actions: Any) -> Any:
        z = (np.asarray(actions) - self._mean(observations))[:, 0] / 0.3
        return -0.5 * z**2 - np.log(0.3 * np.sqrt(2 * np.pi))

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        mean = self._mean(observations)
        return mean + 0.3 * rng.standard_normal(mean.shape)


# One chunk and many ---------------------------------------------------------------------------


def names_for(interval: Any, names: Sequence[str]) -> list[str]:
    """Leave out what betting cannot bound: an estimator without weights."""
    betting = isinstance(interval, Betting)
    return [name for name in names if ESTIMATORS[name].scheme or not betting]


@every_interval
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    cuts=st.integers(0, 40),
    gamma=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    cap=st.sampled_from([0.3, 1.5, 10.0]),
    block_steps=st.sampled_from([1, 7, 1000]),
)
def test_any_split_gives_what_memory_gives(
    interval: Any,
    seed: int,
    counts: list[int],
    cuts: int,
    gamma: float,
    cap: float,
    block_steps: int,
) -> None:
    """With hardly any degree of freedom, Student's t makes 1e-16 of rounding 1e-12 and more."""
    r = recorded(seed, counts)
    parts = split(r.trajectories, seed, cuts)
    options: dict[str, Any] = {"gamma": gamma, "weighting": Weighting(cap), "interval": interval}
    options |= {"q_model": None}
    together = in_memory(parts, r.target, PLAIN, **options)
    ess = np.array([estimate.diagnostics.ess for estimate in together.values()])
    left = float(np.min(ess[ess > 1.0] - 1.0, initial=1.0))
    assume(left > 1e-3)
    found = in_blocks(parts, r.target, PLAIN, block_steps=block_steps, **options)
    assert_equal(found, together, rtol=1e-12 if left > 0.1 else 1e-9)


@every_interval
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.integers(0, 20),
    gamma=st.sampled_from([1.0, 0.8, 0.0]),
    block_steps=st.sampled_from([1, 30, 1000]),
)
@example(seed=0, cuts=0, gamma=0.0, block_steps=1)  # MDR is unknown in some blocks only
def test_any_split_with_a_q_model_gives_what_memory_gives(
    interval: Any, seed: int, cuts: int, gamma: float, block_steps: int
) -> None:
    """MAGIC and auto included; cross-fitted over the folds of all episodes together.

    With few episodes the usual model's equations are nearly singular, and solving them makes 1e-16
    of rounding 1e-9: a firmer penalty, so that the sums are compared and not the solver.
    """
    r = recorded(seed, (9, 7, 8))
    parts, names = split(r.trajectories, seed, cuts), names_for(interval, WITH_Q)
    options: dict[str, Any] = {"gamma": gamma, "interval": interval}
    options |= {"q_model": LinearQ(ridge=1e-3)}
    found = in_blocks(parts, r.target, names, block_steps=block_steps, **options)
    assert_equal(found, in_memory(parts, r.target, names, **options))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.integers(0, 20),
    zeros=st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_weights_of_zero(seed: int, cuts: int, zeros: list[int]) -> None:
    """Blocks, steps or all episodes may have no weight at all."""
    r = recorded(seed, (2, 4, 3))
    table = r.target.table.copy()
    table[np.arange(3), zeros] = 0.0
    table[0] = [0.0, 0.0, 1.0]
    target = Table(table / table.sum(axis=1, keepdims=True))
    parts = split(r.trajectories, seed, cuts)
    found = in_blocks(parts, target, PLAIN, block_steps=7, q_model=None)
    assert_equal(found, in_memory(parts, target, PLAIN, q_model=None))


def test_no_weight_at_all_is_no_value() -> None:
    r = recorded(1, (4, 4), horizon=3)
    seen = r.trajectories
    first = seen.select(episodes=np.flatnonzero(seen.actions[seen.offsets[:-1]] != 0))
    assert len(first) > 1
    target = Table(np.eye(3)[[0, 0, 0]])  # only ever takes the action that no episode begins with
    parts = [first.select(episodes=[i]) for i in range(len(first))]
    found = in_blocks(parts, target, PLAIN, block_steps=1, q_model=None)
    assert_equal(found, in_memory(parts, target, PLAIN, q_model=None))
    assert all(np.isnan(e.value) and e.verdict.colour == "red" for e in found.values())


@pytest.mark.parametrize("scale", [150.0, 2000.0])
def test_weights_beyond_the_floats(scale: float) -> None:
    """Behaviours that hardly ever do what the target does: weights of e^±700 and more."""
    rng = np.random.default_rng(0)
    n, length = 12, 9
    x = rng.standard_normal((n * length, 1)) + 0.1
    policies = [LinearSigmoid(np.array([k * scale / 20])) for k in (-1.0, 0.3, 0.5)]
    ids = np.repeat(np.arange(n) % 3, length)
    actions = (rng.random(n * length) < 0.5).astype(np.int64)
    lp = np.stack([p.log_prob(x, actions) for p in policies])[ids, np.arange(n * length)]
    data = Trajectories.from_arrays(
        x,
        actions,
        rng.standard_normal(n * length),
        lp,
        offsets=np.arange(n + 1) * length,
        policies=policies,
        terminated=True,
        policy_ids=ids,
    )
    target = LinearSigmoid(np.array([scale / 3]))
    parts, names = split(data, 3, 5), [name for name in PLAIN if "O" not in name]
    found = in_blocks(parts, target, names, q_model=None)
    together = in_memory(parts, target, names, q_model=None)
    for name, estimate in found.items():
        np.testing.assert_allclose(estimate.value, together[name].value, rtol=1e-9)
        np.testing.assert_allclose(
            estimate.diagnostics.ess_curve, together[name].diagnostics.ess_curve, rtol=1e-9
        )
        assert words(estimate) == words(together[name])


@pytest.mark.parametrize("spaces", [True, False])
def test_continuous_actions_and_structured_observations(spaces: bool, tmp_path: Path) -> None:
    """Weights are ratios of densities, whose logs may be above 0."""
    from gymnasium.spaces import Box, Dict

    space = Dict({"a": Box(-9, 9, (2,)), "b": Box(-9, 9, (1,))})
    rng = np.random.default_rng(0)
    policies = [Joined(gain) for gain in (-0.5, 0.2)]
    files, parts = [], []
    for i in range(3):
        ids = rng.integers(2, size=8)
        lengths = rng.integers(1, 6, size=8)
        steps = int(lengths.sum())
        seen = {"a": rng.uniform(-1, 1, (steps, 2)), "b": rng.uniform(-1, 1, (steps, 1))}
        acted = np.repeat(ids, lengths)
        chosen = np.where(acted[:, None] == 0, *(policy.sample(seen, rng) for policy in policies))
        logs = np.stack([policy.log_prob(seen, chosen) for policy in policies])
        parts.append(
            Trajectories.from_arrays(
                seen,
                chosen,
                rng.random(steps),
                logs[acted, np.arange(steps)],
                offsets=np.append(0, np.cumsum(lengths)),
                policies=policies,
                terminated=True,
                policy_ids=acted,
                observation_space=space if spaces else None,
                action_space=Box(-9, 9, (1,)) if spaces else None,
            )
        )
        files.append(tmp_path / f"{i}.ope")
        parts[-1].save(files[-1])
    assert max(part.log_probs.max() for part in parts) > 0
    names = [name for name in PLAIN if "O" not in name]
    options: dict[str, Any] = {"q_model": None, "interval": Bootstrap(20)}
    together = in_memory(parts, Joined(0.0), names, **options)
    assert_equal(in_blocks(parts, Joined(0.0), names, **options), together)
    found = evaluate(files, Joined(0.0), names, compute=Compute(block_steps=20), **options)
    assert_equal(found, together)


# Policies that change during episodes ---------------------------------------------------------

TABLES = np.array(
    [
        [[0.5, 0.5], [0.3, 0.7], [0.6, 0.4]],
        [[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]],
        [[0.7, 0.3], [0.5, 0.5], [0.3, 0.7]],
    ]
)
STEADY = Table(np.array([[0.4, 0.6], [0.5, 0.5], [0.4, 0.6]]))


def loops(tmp_path: Path) -> tuple[list[Trajectories], list[Any]]:
    """Three loops with schedules and one without, as data and as files."""
    steady = clocked(3, TABLES[:1], 20).view()
    parts = [clocked(i, TABLES[[i, 1 - i, 2]], 25).view() for i in range(2)]
    parts = [parts[0], steady, parts[1], clocked(5, TABLES, 2).view()]
    files = [tmp_path / f"loop{i}.ope" for i in range(len(parts))]
    for part, path in zip(parts, files, strict=True):
        part.save(path)
    assert [bool((part.schedule_ids >= 0).any()) for part in parts] == [True, False, True, True]
    return parts, files


@every_interval
def test_policies_that_change_during_episodes(tmp_path: Path, interval: Any) -> None:
    parts, files = loops(tmp_path)
    names = names_for(interval, SUMS)
    options: dict[str, Any] = {"q_model": LinearQ(ridge=1e-3), "interval": interval}
    together = in_memory(parts, STEADY, names, **options)
    assert any(len(b.policies) > 1 for b in together.sample.behaviours)
    for block_steps in (1, 25, 150):
        assert_equal(in_blocks(parts, STEADY, names, block_steps=block_steps, **options), together)
        found = Evaluator(files, names, compute=Compute(block_steps=block_steps), **options)
        assert found.source.data is None
        assert_equal(found.evaluate(STEADY), together)
    assert_equal(evaluate(files, STEADY, names, **options), together)  # read whole


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.integers(1, 20), block_steps=st.integers(1, 60))
def test_schedules_however_they_are_cut(seed: int, cuts: int, block_steps: int) -> None:
    """Parts of one loop keep its schedule, of which each has a copy."""
    rng = np.random.default_rng(seed)
    data = clocked(seed, TABLES, 20).view()
    pieces = np.split(np.arange(20), np.sort(rng.integers(1, 20, size=cuts)))
    parts = [data.select(episodes=some) for some in pieces if some.size]
    found = in_blocks(parts, STEADY, PLAIN, block_steps=block_steps, q_model=None)
    assert_equal(found, in_memory(parts, STEADY, PLAIN, q_model=None))
    assert_equal(found, evaluate(data, STEADY, PLAIN, q_model=None))


def test_held_out_episodes_of_schedules(tmp_path: Path) -> None:
    parts, _ = loops(tmp_path)
    parts = [dataclasses.replace(p, held_out=np.arange(len(p)) % 3 == 0) for p in parts]
    found = in_blocks(parts, STEADY, BOTH, held_out=True)
    assert_equal(found, in_memory(parts, STEADY, BOTH, held_out=True))


# The q model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [Polynomial(3), lambda x: np.tanh(np.asarray(x))])
def test_linear_q_models_of_numbers(features: Any, tmp_path: Path) -> None:
    data, target = made(0, episodes=60, length=12), LinearSigmoid(np.full(3, 0.3))
    parts, model = split(data, 0, 5), LinearQ(features)
    options: dict[str, Any] = {"gamma": 0.95, "interval": Bootstrap(400)}
    found = in_blocks(parts, target, WITH_Q, block_steps=100, q_model=model, **options)
    assert_equal(found, in_memory(parts, target, WITH_Q, q_model=model, **options))
    for name, estimate in found.items():
        assert estimate.replicates is not None
        if name != "MAGIC":  # its error is that of FWDR
            # replicates vary, a bias of the model does not
            error = np.sqrt(estimate.standard_error**2 - estimate.bias**2)
            assert estimate.replicates.std() == pytest.approx(error, rel=0.2), name


@pytest.mark.parametrize("block_steps", [1, 30, 1000])
@pytest.mark.parametrize("case", ["greedy", "never", "unknown"])
def test_steps_of_no_weight_and_of_unknown_policies(case: str, block_steps: int) -> None:
    """How near steps are to the target is decided once for all of them, not by chunk."""
    r = recorded(3, (8, 6, 7), horizon=6)
    data, target = r.trajectories, r.target
    if case == "greedy":
        target = Table(np.eye(3)[[1, 0, 2]])
    if case == "never":  # the target does nothing that was done
        data = dataclasses.replace(data, actions=np.where(data.actions == 2, 0, data.actions))
        target = Table(np.eye(3)[[2, 2, 2]])
    parts = split(data, 0, 5)
    if case == "unknown":
        steps = parts[2].n_steps
        parts[2] = dataclasses.replace(
            parts[2],
            policies=(UnknownPolicy(),),
            policy_ids=np.zeros(steps, np.int32),
            log_probs=np.full(steps, np.nan),
        )
    names = ["DM"] if case == "unknown" else ["DM", "DR", "FWDR"]
    together = in_memory(parts, target, names, q_model=LinearQ())
    assert together["DM"].value != 0
    found = in_blocks(parts, target, names, block_steps=block_steps, q_model=LinearQ())
    for name, estimate in found.items():
        expected = together[name]
        np.testing.assert_allclose(estimate.value, expected.value, rtol=1e-9)
        np.testing.assert_allclose(estimate.standard_error, expected.standard_error, rtol=1e-9)


def test_by_default_a_model_is_fitted_where_one_is_used() -> None:
    r = recorded(1, (30, 30))
    parts = split(r.trajectories, 0, 4)
    given = in_blocks(parts, r.target, None, q_model=LinearQ())
    found = in_blocks(parts, r.target, None)
    assert list(found) == list(evaluate(r.trajectories, r.target))
    assert found["auto"].value == given["auto"].value != found["NFIS"].value
    assert "; q model: LinearQ\n" in str(found)
    without = in_blocks(parts, r.target, None, q_model=None)
    assert without["auto"].value == without["NFIS"].value
    assert "DM" not in without
    assert "q model" not in str(without)
    assert "q model" not in str(in_blocks(parts, r.target, "NFIS"))
    log_prob_only = LogProbOnly(r.target.log_prob)  # no finite action set, so no model
    told = str(in_blocks(parts, log_prob_only, None))
    assert "; q model: none that can be fitted in blocks\n" in told
    with pytest.raises(ValueError, match=r"'DM', which needs a q model"):
        in_blocks(parts, log_prob_only, "DM")


def test_where_the_default_model_would_be_too_wide_there_is_none() -> None:
    rng = np.random.default_rng(0)
    data = Trajectories.from_arrays(
        rng.standard_normal((60, 64)),
        rng.integers(16, size=60),
        rng.random(60),
        np.log(np.full(60, 1 / 16)),
        offsets=np.arange(21) * 3,
        policies=[Uniform(16)],
        terminated=True,
        held_out=True,
    )
    assert default_model(data, Uniform(16)) is None
    found = in_blocks([data], Uniform(16), ["NFIS", "auto"], block_steps=9)
    assert found.sample.q_model == "none that can be fitted in blocks"
    assert found["auto"].value == found["NFIS"].value
    with pytest.raises(ValueError, match=r"'FWDR', which needs a q model, but there is none"):
        in_blocks([data], Uniform(16), ["FWDR"], block_steps=9)


# Partial mixtures and propensities ------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.sampled_from([[1] * 20, [2, 1, 1, 3, 1, 2, 1, 1, 1], [1] * 5]),
    cuts=st.integers(0, 20),
    mixture=st.sampled_from([1, 3, 7, "all"]),
)
def test_partial_mixtures_of_any_split(
    seed: int, counts: list[int], cuts: int, mixture: int | str
) -> None:
    """Also where strata join behaviours of one episode each."""
    r = recorded(seed, counts)
    parts, names = split(r.trajectories, seed, cuts), [*PLAIN, "FWDR"]
    options: dict[str, Any] = {"weighting": Weighting(mixture=mixture)}
    options |= {"q_model": LinearQ(ridge=1e-3)}
    found = in_blocks(parts, r.target, names, **options)
    assert_equal(found, in_memory(parts, r.target, names, **options))


def test_basic_weights_need_no_mixture_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded(5, [1] * 20)
    parts, names = split(r.trajectories, 5, 3), ["BIS", "NBIS"]
    together = in_memory(parts, r.target, names, weighting=Weighting(mixture=4))

    def never(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("weights against one's own policy were taken against a group")

    monkeypatch.setattr("ope_gym.preparing.weighing.partial_log_weights", never)
    found = in_blocks(parts, r.target, names, weighting=Weighting(mixture=4))
    assert_equal(found, together)
    assert found.sample.mixture is None


def test_propensity_sums_are_merged_in_every_part() -> None:
    """A jump of the first keeps the alarm quiet, a policy without probs makes support unknown."""
    r = recorded(6, (5, 4))
    data, behaviours = r.trajectories, behaviours_of(r.trajectories)
    left, right, nothing_seen = (PropensitySums(r.target, 2) for _ in range(3))
    left.update(data, behaviours)
    expected = left.jump.copy()
    assert expected.min() > 0
    left.merge(nothing_seen)
    np.testing.assert_array_equal(left.jump, expected)
    right.merge(left)
    np.testing.assert_array_equal(right.jump, expected)
    assert right.finite
    assert right.finalise().support == left.finalise().support != {}
    right.merge(PropensitySums(r.target, 2, finite=False))
    assert right.finalise().support == {}


def test_wrong_propensities_are_found() -> None:
    r = recorded(3, (60, 40))
    data = dataclasses.replace(r.trajectories, log_probs=r.trajectories.log_probs - 0.5)
    parts = split(data, 0, 4)
    found, together = (way(parts, r.target, BOTH) for way in (in_blocks, in_memory))
    for name, estimate in found.items():
        assert estimate.verdict.colour == together[name].verdict.colour == "red"
        assert "contradict the policy" in str(estimate.verdict)
        assert "wrongly recorded" in str(estimate.verdict)


def test_missing_support_is_counted() -> None:
    """One behaviour never takes action 2, the other not in state 0: own and common gaps differ."""
    rng = np.random.default_rng(0)
    mdp = small_mdps.random_mdp(rng, states=3, actions=3, horizon=4)
    first = np.tile([0.5, 0.5, 0.0], (3, 1))
    second = np.array([[0.4, 0.6, 0.0], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]])
    ids = [0, 1] * 15
    episodes = [draw(rng, mdp, (first, second)[k]) for k in ids]
    data = buffer_of(episodes, ids, [first, second]).view()
    parts, target = split(data, 0, 6), Table(np.full((3, 3), 1 / 3))
    found = in_blocks(parts, target, ["BIS", "FIS"])
    assert_equal(found, in_memory(parts, target, ["BIS", "FIS"]))
    own, common = (found[name].diagnostics.support_violations for name in ("BIS", "FIS"))
    assert own is not None
    assert common is not None
    assert own > common > 0


@pytest.mark.parametrize("mixture", ["all", 1])
@pytest.mark.parametrize("block_steps", [1, 20, 100])
def test_episodes_are_counted_over_all_files(block_steps: int, mixture: Any) -> None:
    r = recorded(1, (20, 15), horizon=4, early=False)
    data = r.trajectories
    row = data.offsets[23] + 2
    log_probs = data.log_probs.copy()
    log_probs[row] -= 0.3
    wrong = dataclasses.replace(data, log_probs=log_probs)
    parts = [wrong.select(episodes=slice(0, 7)), wrong.select(episodes=slice(7, 35))]
    options: dict[str, Any] = {"block_steps": block_steps, "weighting": Weighting(mixture=mixture)}
    found = in_blocks(parts, r.target, "NFIS", **options)["NFIS"]
    assert "episode 23, step 2 has" in str(found.verdict)
    seen = data.observations.astype(np.int64)
    seen[row] = 3  # a state of its own, which the target cannot stand
    policies = tuple(Table(np.vstack([p.table, p.table[:1]])) for p in data.policies)  # type: ignore[attr-defined]
    marked = dataclasses.replace(data, observations=seen, policies=policies, observation_space=None)

    class Wrong(Table):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            return np.where(np.asarray(observations) == 3, 0.5, -0.5)

    parts = [marked.select(episodes=slice(0, 7)), marked.select(episodes=slice(7, 35))]
    words = r"episodes\[1\], .* over all files: target_log_probs is 0.5 at episode 23, step 2"
    with pytest.raises(ValueError, match=words if block_steps < 100 else r"at episode 23, step 2"):
        in_blocks(parts, Wrong(np.full((4, 3), 1 / 3)), "NFIS", **options)


# Passes and progress --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        StepSums(Column("fused"), 0.9),
        StepSums(Column("basic", cap=1.2), 0.9),
        StepSums(Column("fused", clip=Clip(np.full(6, 0.3))), 1.0),
        Bets(Column("fused"), 0.9, (-1.0, 2.0), 6),
    ],
    ids=["fused", "capped", "clipped", "bets"],
)
def test_parts_may_be_merged_in_any_grouping(wanted: Any) -> None:
    """Two workers that each saw some chunks are one that saw them all, whatever the longest."""
    rng = np.random.default_rng(0)
    chunks = []
    for lengths in ([2, 1], [6], [1, 1, 1], [4, 5]):
        offsets = np.append(0, np.cumsum(lengths))
        logs = {name: rng.standard_normal(offsets[-1]) for name in ("fused", "basic")}
        rewards = rng.uniform(-1, 2, size=offsets[-1])
        chunks.append(Weighted(offsets, rewards, logs))
    totals = []
    for groups in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]):
        parts = []
        for group in groups:
            part = wanted.part(chunks[group[0]])
            for i in group[1:]:
                part.merge(wanted.part(chunks[i]))
            parts.append(part)
        for part in parts[1:]:
            parts[0].merge(part)
        totals.append(wanted.total(parts[0]))
    together = Weighted(
        np.append(0, np.cumsum([2, 1, 6, 1, 1, 1, 4, 5])),
        np.concatenate([chunk.rewards for chunk in chunks]),
        {k: np.concatenate([c.log_weights[k] for c in chunks]) for k in ("fused", "basic")},
    )
    whole = wanted.total(wanted.part(together))
    for found in totals:
        if isinstance(wanted, Bets):
            np.testing.assert_array_equal(found, whole)
            continue
        np.testing.assert_allclose(found.columns.peak, whole.columns.peak, rtol=1e-14)
        np.testing.assert_allclose(found.columns.sums, whole.columns.sums, rtol=1e-13)
        np.testing.assert_allclose(found.psi, whole.psi, rtol=1e-13)
        np.testing.assert_array_equal(found.weights.log_last, whole.weights.log_last)
        assert found.weights.capped_share == whole.weights.capped_share
        assert found.clipped_share == whole.clipped_share


@pytest.mark.parametrize("interval", ["ess-t", Bootstrap(20), Betting(reward_range=(-1.0, 2.0))])
@pytest.mark.parametrize(
    ("names", "q_model", "passes"),
    [
        (["BIS"], None, 1),
        (["BIS"], LinearQ(), 1),
        (["BIS", "NFIS"], None, 2),
        (["auto"], None, 2),
        (["DR"], LinearQ(), 3),  # two for the q model: scale, normal equations
        (["DR"], LinearQ(lambda x: np.asarray(x, dtype=np.float64).reshape(-1, 1)), 3),
        (["FWDR"], "default", 4),
        (["MAGIC"], LinearQ(), 4),
        (["auto"], LinearQ(), 5),
        (None, LinearQ(), 5),
        (None, None, 2),
    ],
)
def test_progress_counts_steps_in_every_pass(
    names: Any, q_model: Any, passes: int, interval: Any
) -> None:
    r = recorded(6, (8, 7))
    steps = r.trajectories.n_steps
    seen: list[int] = []
    compute = Compute(block_steps=9, progress=seen.append)
    options: dict[str, Any] = {"q_model": q_model, "interval": interval, "compute": compute}
    evaluator = Evaluator(functions(split(r.trajectories, 0, 4)), names, **options)
    assert evaluator.steps == steps
    assert evaluator.passes(r.target) == passes
    evaluator.evaluate(r.target)
    assert sum(seen) == passes * steps
    seen.clear()
    options["compute"] = Compute(progress=seen.append)
    whole = Evaluator(r.trajectories, names, **options)
    whole.evaluate(r.target)
    assert sum(seen) == whole.passes(r.target) * steps == steps


@pytest.mark.parametrize("names", [["auto"], None])
def test_progress_where_no_default_model_can_be_fitted(names: Any) -> None:
    """Else a progress bar would stop in the midst."""
    r, seen = recorded(6, (8, 7)), list[int]()
    target = LogProbOnly(r.target.log_prob)
    compute = Compute(block_steps=9, progress=seen.append)
    evaluator = Evaluator(functions(split(r.trajectories, 0, 4)), names, compute=compute)
    evaluator.evaluate(target)
    assert sum(seen) == evaluator.passes(target) * r.trajectories.n_steps


# Held-out episodes ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*episodes used, as none is held out")
@pytest.mark.parametrize("held_out", [True, False, None])
@pytest.mark.parametrize("origin", [None, "fixed"])
def test_held_out_episodes_alone(held_out: bool | None, origin: str | None) -> None:
    r, rng = recorded(6, (30, 25, 1)), np.random.default_rng(0)
    data = dataclasses.replace(r.trajectories, held_out=rng.random(len(r.trajectories)) < 0.4)
    parts = [*split(data, 0, 4), data.select(held_out=False, episodes=[0, 1])]
    together = evaluate(merged(parts), r.target, BOTH, held_out=held_out, origin=origin)
    compute = Compute(block_steps=30)
    evaluator = Evaluator(functions(parts), BOTH, held_out=held_out, compute=compute)
    assert evaluator.held_out == (held_out is not False)
    assert_equal(evaluator.evaluate(r.target, origin=origin), together)


def test_held_out_episodes_that_are_not_there() -> None:
    r = recorded(6, (8, 7))
    for episodes in (r.trajectories, functions([r.trajectories])):
        with pytest.raises(ValueError, match="none of the 15 episodes is held out: record with"):
            evaluate(episodes, r.target, held_out=True)
        found = evaluate(episodes, r.target, BOTH)
        assert found.sample.trajectories == 15
        assert found.sample.regime != "held-out"


@pytest.mark.parametrize("block_steps", [30, 10**6])
def test_files_without_held_out_episodes_are_named(block_steps: int) -> None:
    data = recorded(6, (30, 25)).trajectories
    some = np.arange(len(data)) % 3 == 0
    mixed = dataclasses.replace(data, held_out=some)
    none = dataclasses.replace(data, held_out=np.zeros(len(data), dtype=bool))
    compute = Compute(block_steps=block_steps)
    words = r"^episodes\[0\]: 0 of 55 episodes used, as none is held out; held_out=False"
    with pytest.warns(UserWarning, match=words):
        found = Evaluator(functions([none, mixed]), BOTH, compute=compute)
    assert found.evaluate("last").sample.trajectories == some.sum()
    every = Evaluator(functions([none, mixed]), BOTH, compute=compute, held_out=False)
    assert every.evaluate("last").sample.trajectories == 2 * len(data)
    five = [none] * 5
    with pytest.warns(UserWarning, match=r"episodes\[2\]: 0 .* \(and 2 more files\), as none"):
        Evaluator(functions([*five, mixed]), BOTH, compute=compute)


# Ranking and differences ----------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["ess-t", Bootstrap(200)])
def test_ranking_over_files(tmp_path: Path, interval: Any) -> None:
    r = recorded(4, (40, 40, 30))
    parts = split(r.trajectories, 0, 5)
    paths = [tmp_path / f"{i}.ope" for i in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        part.save(path)
    targets = {"first": Table(r.policies[0]), "second": Table(r.policies[1]), "new": r.target}
    seen: list[int] = []
    options: dict[str, Any] = {"q_model": LinearQ(), "interval": interval}
    compute = Compute(block_steps=40, progress=seen.append)
    found = rank(paths, targets, "auto", compute=compute, **options)
    together = rank(merged(parts), targets, "auto", **options)
    assert seen == [1, 1, 1]
    assert list(found) == list(together)
    for name, row in found.items():
        other = together[name]
        assert row.estimate.value == pytest.approx(other.estimate.value, rel=1e-9)
        assert row.probability_best == pytest.approx(other.probability_best, abs=1e-3)
        assert (row.difference is None) == (other.difference is None)
        if row.difference is not None and other.difference is not None:
            assert row.difference.value == pytest.approx(other.difference.value, rel=1e-8)
    whole = rank(paths, targets, "auto", **options)  # read into memory
    assert [row.estimate.value for row in whole.values()] == [
        row.estimate.value for row in together.values()
    ]


def test_paired_differences_share_the_draws() -> None:
    r = recorded(4, (40, 40))
    parts = split(r.trajectories, 0, 5)
    other = Table(np.asarray(r.policies[0]))
    options: dict[str, Any] = {"interval": Bootstrap(200)}
    a, b = (in_blocks(parts, target, BOTH, **options) for target in (r.target, other))
    gap = a["FIS"].difference(b["FIS"])
    assert gap.interval.method == "percentile"
    assert gap.value == a["FIS"].value - b["FIS"].value
    memory = in_memory(parts, other, BOTH, **options)
    mixed = a["FIS"].difference(memory["FIS"])  # of the same episodes
    assert mixed.value == pytest.approx(gap.value, rel=1e-9)
    moved = in_blocks(parts[::-1], other, BOTH)
    with pytest.raises(ValueError, match="other trajectories"):
        a["FIS"].difference(moved["FIS"])  # influence values are in another order
