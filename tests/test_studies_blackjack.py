"""Table 3 in miniature, and compiled games and learning that are Gymnasium's and the agent's."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from agents import MonteCarloControl
from agents import blackjack as rules
from ope_gym import Trajectories, evaluate_log_probs
from ope_gym.policies import EpsilonGreedyTable
from studies import STUDIES
from studies.blackjack import simulation
from studies.blackjack import study as blackjack
from studies.harness.claims import FAILS, HOLDS, UNDECIDED
from studies.harness.runner import collect, conduct
from studies.harness.seeds import seeds_of, streams
from studies.harness.study import Summary
from wrappers import RecordTrajectories
from wrappers import collect as play

SMALL = blackjack.Blackjack()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> tuple[RecordTrajectories, np.random.Generator]:
    """Gymnasium's env whose cards come from the generator that also draws the actions."""
    rng = np.random.default_rng(7)
    monkeypatch.setattr(
        "gymnasium.envs.toy_text.blackjack.draw_card",
        lambda np_random: min(int(rng.random() * 13) + 1, 10),
    )
    return RecordTrajectories(gym.make("Blackjack-v1")), rng


def a_policy(seed: int, epsilon: float) -> EpsilonGreedyTable:
    greedy = np.random.default_rng(seed).integers(2, size=rules.SHAPE)
    return EpsilonGreedyTable(greedy, epsilon, 2)


# --- simulation -------------------------------------------------------------------------------


def test_rollouts_are_those_recorded_from_gymnasium(
    table: tuple[RecordTrajectories, np.random.Generator],
) -> None:
    env, rng = table
    always_hit = EpsilonGreedyTable(np.ones(rules.SHAPE, dtype=np.int64), 0.0, 2)
    policies = [a_policy(0, 1.0), a_policy(1, 0.2), always_hit, rules.optimal().policy]
    for policy in policies:
        play(env, policy, 400, rng)
    theirs = env.buffer.view()
    ours = simulation.rollouts(policies, 400, np.random.default_rng(7))
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    for mine, their in zip(ours.observations, theirs.observations, strict=True):
        np.testing.assert_array_equal(mine, their)
    np.testing.assert_array_equal(ours.actions, theirs.actions)
    np.testing.assert_array_equal(ours.rewards, theirs.rewards)
    np.testing.assert_array_equal(ours.policy_ids, theirs.policy_ids)
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, rtol=1e-12, atol=1e-15)
    # naturals of both kinds occur: the rule of sab=True is not tested in vain
    total, _, ace = ours.observations
    start = ours.offsets[:-1]
    natural = (total[start] == 21) & (ace[start] == 1) & (ours.actions[start] == 0)
    assert set(ours.returns()[natural]) == {0.0, 1.0}


def test_control_is_the_agents(table: tuple[RecordTrajectories, np.random.Generator]) -> None:
    env, rng = table
    for schedule in range(2):
        epsilon = blackjack.schedule_of(schedule, 400)
        agent = MonteCarloControl(rules.SHAPE, 2, epsilon=epsilon)
        before = rng.bit_generator.state
        snapshots = []
        for t in range(1, 401):
            env.buffer.clear()
            play(env, agent.policy, 1, rng)
            agent.learn(env.buffer.view())
            if t % 100 == 0:
                snapshots.append(agent.policy)
        again = np.random.default_rng()
        again.bit_generator.state = before
        assert blackjack.Blackjack(episodes=400, every=100).train(schedule, again) == snapshots
        again.bit_generator.state = before
        found = simulation.control(blackjack.played(schedule, 400), 100, again)
        q = found.totals / np.maximum(found.visits, 1)
        np.testing.assert_array_equal(q.reshape(agent.q.shape), agent.q)
        assert again.bit_generator.state == rng.bit_generator.state


@pytest.mark.parametrize("epsilon", [0.0, 0.19, 1.0])
def test_rollouts_agree_with_the_exact_value(epsilon: float) -> None:
    policy = a_policy(3, epsilon)
    found = simulation.returns(policy, 200_000, np.random.default_rng(2))
    assert abs(found.mean() - rules.value(policy)) < 4 * found.std() / np.sqrt(found.size)


# --- study ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Summary:
    return SMALL.summarise(SMALL.run(seeds_of(0, (0, 80))))


def test_runs_depend_on_their_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = seeds_of(5, (0, 4), "blackjack")
    whole, again = SMALL.run(seeds), SMALL.run(seeds)
    monkeypatch.setitem(STUDIES, "blackjack", STUDIES["blackjack"]._replace(chunk=3))
    kept = collect(SMALL, tmp_path, runs=4, seed=5, progress=False)
    for name in whole:
        np.testing.assert_array_equal(whole[name], again[name])
        np.testing.assert_array_equal(whole[name], kept[name])


def test_values_are_those_of_the_door_for_arrays() -> None:
    seed = seeds_of(2, (0, 1))[0]
    run, generators = SMALL.run([seed]), streams(seed, 6)
    for schedule in range(2):
        policies = SMALL.train(schedule, generators[3 * schedule])
        data = simulation.rollouts(policies, 100, generators[3 * schedule + 1])
        values = _by_arrays(data, policies, policies[-1])
        np.testing.assert_allclose(run["values"][0, schedule], values, rtol=1e-9)
        assert run["truth"][0, schedule] == rules.value(policies[-1])


def _by_arrays(
    data: Trajectories, policies: list[EpsilonGreedyTable], target: EpsilonGreedyTable
) -> list[float]:
    found = evaluate_log_probs(
        target.log_prob(data.observations, data.actions),
        EpsilonGreedyTable.log_prob_stack(policies, data.observations, data.actions),
        data.policy_ids[data.offsets[:-1]],
        data.rewards,
        data.offsets,
        estimators=blackjack.NAMES,
    )
    return [estimate.value for estimate in found.values()]


def test_snapshots_have_the_epsilon_of_the_next_episode() -> None:
    for schedule, last in ((0, 2 / (2 + np.log(5001))), (1, 0.05)):
        policies = SMALL.train(schedule, np.random.default_rng(0))
        assert len(policies) == 10
        assert policies[-1].epsilon == pytest.approx(last)
        assert [p.epsilon for p in policies] == sorted((p.epsilon for p in policies), reverse=True)


def test_greedy_target() -> None:
    study = blackjack.Blackjack(greedy_target=True, truth_rollouts=2)
    truth = study.run(seeds_of(0, (0, 2)))["truth"]
    assert (truth > blackjack.Blackjack(truth_rollouts=2).run(seeds_of(0, (0, 2)))["truth"]).all()


def test_steady_claims_of_table_3(small: Summary) -> None:
    verdicts = {claim.words: claim.verdict for claim in SMALL.claims(small)}
    assert verdicts["the MSEs are 0.04 to 0.13"] == FAILS
    assert verdicts["with ε² OUIS has a lower MSE than FIS, as expected"] == FAILS
    assert verdicts["FIS has a smaller MSE than BIS"] != FAILS
    assert verdicts["BIS, FIS and OUIS are unbiased (on fresh rollouts)"] != FAILS
    assert verdicts["rollouts of the target agree with its exact value"] == HOLDS


def test_one_run_leaves_comparisons_undecided(tmp_path: Path) -> None:
    result = conduct(SMALL, tmp_path, runs=1, progress=False)
    assert {claim["verdict"] for claim in result["claims"]} == {UNDECIDED}
    assert "| BIS | 125.1 | 125.5 | 126.1 |" in result["table"]
    assert (tmp_path / "blackjack.png").stat().st_size > 10_000
