"""Sources of episodes: what is accepted, how it is read a task at a time, and what is refused."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest

from ope_gym import (
    Betting,
    Bootstrap,
    Compute,
    Evaluation,
    Evaluator,
    Trajectories,
    Weighting,
    contributions,
    episodes_needed,
    evaluate,
    leave_one_policy_out,
    rank,
)
from ope_gym.analysis.overlap import overlap
from ope_gym.data import store
from ope_gym.data.trajectories import nothing
from ope_gym.estimators.table import ESTIMATORS, WEIGHTED
from ope_gym.files import DamagedFileError
from ope_gym.models import LinearQ, TabularQ
from ope_gym.policies import LinearSigmoid
from ope_gym.preparing.files import Items
from ope_gym.scale.sources import Source, open_source
from ope_gym.scale.workers import Workers
from tests.builders import LogProbOnly, Recorded, Table, assert_same, recorded
from tests.file_builders import (
    functions,
    in_blocks,
    in_memory,
    made,
    merged,
    mixed_files,
    record,
    split,
)
from tests.test_files import assert_equal
from wrappers import RecordTrajectories, collect

TARGET = LinearSigmoid(np.full(3, 0.3))
ALL = list(WEIGHTED)
BOTH = ["FIS", "NFIS"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mixed_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Recorded, list[Trajectories], list[Path]]:
    r = recorded(8, (15, 9, 12))
    parts = split(r.trajectories, 1, 4)
    paths = [tmp_path / f"{i}.ope" for i in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        part.save(path)
    return r, parts, paths


# What is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("block_steps", [60, 1 << 17])
def test_whatever_holds_the_episodes_gives_the_same_result(
    tmp_path: Path, block_steps: int
) -> None:
    """To the bit where they are read whole."""
    path, policies = (
        tmp_path / "run.ope",
        [LinearSigmoid(np.array([0, 0, k, 0.1])) for k in (0.2, 1.0)],
    )
    env = RecordTrajectories(gym.make("CartPole-v1", max_episode_steps=20), held_out=0.5, path=path)
    for k, policy in enumerate(policies):
        collect(env, policy, 12, k, seed=k)
    env.close()
    data = env.buffer.view()
    halves = [data.select(episodes=slice(0, 9)), data.select(episodes=slice(9, 24))]
    paths = [tmp_path / f"{i}.ope" for i in range(2)]
    for half, place in zip(halves, paths, strict=True):
        half.save(place)
    names = [name for name, c in ESTIMATORS.items() if not c.whole]
    options: dict[str, Any] = {"q_model": LinearQ(), "interval": Bootstrap(20)}
    memory = evaluate(data, "last", names, **options)
    assert memory.sample.regime == "held-out"
    every: list[Any] = [env, env.buffer, halves, tuple(halves), [data], [env.buffer], halves[:]]
    reading: list[Any] = [path, str(path), [path], paths, [str(p) for p in paths], np.array(paths)]
    reading += [functions(halves), functions([data])[0], [paths[0], halves[1]]]
    compute = Compute(block_steps=block_steps)
    for episodes in every:
        found = evaluate(episodes, "last", names, compute=compute, **options)
        assert_same(found, memory)
        assert str(found) == str(memory)
    for episodes in reading:
        found = evaluate(episodes, "last", names, compute=compute, **options)
        assert_equal(found, memory, rtol=0.0 if block_steps > 60 else 1e-9)


def test_files_may_come_as_an_array_and_seeds_of_any_size(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
) -> None:
    r, _, paths = saved
    options: dict[str, Any] = {"interval": Bootstrap(20), "seed": 2**64 + 7}
    evaluate(np.array(str(paths[0])), r.target, **options)
    names: Any = np.array([str(path) for path in paths])
    assert_same(evaluate(names, r.target, **options), evaluate(paths, r.target, **options))


def test_few_steps_are_read_whole_and_many_in_blocks(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
) -> None:
    """Whole, every q model and every estimator can be had."""
    r, parts, paths = saved
    steps = sum(part.n_steps for part in parts)
    for block_steps, whole in ((steps, True), (steps - 1, False)):
        source = open_source(paths, None, block_steps, Workers())
        assert (source.data is not None) == whole == (not source.tasks)
    names = [name for name in ESTIMATORS if name != "EA"]
    found = evaluate(paths, r.target, names, q_model=TabularQ())
    assert_same(found, in_memory(parts, r.target, names, q_model=TabularQ()))
    for which in ("last", 0):
        one, two = (
            Evaluator(paths, BOTH, compute=Compute(block_steps=size)) for size in (steps, 10)
        )
        assert one.name_of(which) == two.name_of(which)
        assert one.policies == two.policies
        assert_equal(two.evaluate(which), one.evaluate(which))


def test_the_target_may_be_the_number_of_a_policy(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
) -> None:
    _, parts, paths = saved
    evaluator = Evaluator(paths, BOTH, compute=Compute(block_steps=10))
    last = evaluator.policies.index(parts[-1].policies[-1])
    by_number = evaluator.evaluate(last)
    assert_same(evaluator.evaluate("last"), by_number)
    assert_same(evaluator.evaluate(parts[-1].policies[-1]), by_number)
    assert evaluator.name_of("last") == f"policy {last} of {paths[-1]}"
    assert evaluator.name_of(0) == f"policy 0 of {paths[0]}"
    assert evaluator.name_of(Table(np.full((3, 3), 1 / 3))) == "the target"
    assert Evaluator(merged(parts)).name_of(0) == "policy 0"


def test_every_analysis_takes_files(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
) -> None:
    r, parts, paths = saved
    together = merged(parts)
    for analyse in (
        partial(contributions, estimator="NFIS"),
        partial(episodes_needed, standard_error=0.05, limit=10**6),
        overlap,
    ):
        assert str(analyse(paths, r.target)) == str(analyse(together, r.target))
    found = leave_one_policy_out(paths, "NFIS", compute=Compute(block_steps=10))
    assert str(found) == str(leave_one_policy_out(together, "NFIS"))


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 22, 100])
@pytest.mark.parametrize("block_steps", [1, 10, 60])
def test_chunks_of_files_are_cut_and_joined(
    size: int, block_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_CHUNK_BYTES", size)
    r = recorded(3, (15, 9, 12))
    parts = split(r.trajectories, 1, 2)
    paths = [tmp_path / f"{i}.ope" for i in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        part.save(path)
    options: dict[str, Any] = {"q_model": None}
    found = evaluate(paths, r.target, ALL, compute=Compute(block_steps=block_steps), **options)
    assert_equal(found, in_memory(parts, r.target, ALL, **options))
    longest = max(int(part.lengths.max()) for part in parts)
    source = open_source(paths, None, block_steps, Workers())
    for piece in (piece for task in source.tasks for piece in task.pieces):
        for chunk in piece.chunks(source):
            assert chunk.n_steps <= max(block_steps, longest)


@pytest.mark.parametrize("block_steps", [1, 20])
def test_files_of_recorders_and_of_several_runs(tmp_path: Path, block_steps: int) -> None:
    r = recorded(9, (6, 5))
    path = tmp_path / "runs.ope"
    for part in split(r.trajectories, 2, 1):
        record(part, path)  # a second run appends a section
    together = Trajectories.load(path)
    compute = Compute(block_steps=block_steps)
    found = evaluate(path, r.target, ALL, q_model=None, compute=compute)
    assert_equal(found, evaluate(together, r.target, ALL, q_model=None))


@pytest.mark.parametrize("block_steps", [10, 1 << 17])
def test_damage_is_found(tmp_path: Path, block_steps: int) -> None:
    r, path = recorded(8, (15, 9, 12)), tmp_path / "run.ope"
    compute = Compute(block_steps=block_steps)
    record(r.trajectories, path)
    together = evaluate(Trajectories.load(path), r.target, BOTH)
    good = path.read_bytes()
    begin = good.index(b'{"observations"')
    for place in range(begin, len(good), 397):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            found = evaluate(path, r.target, BOTH, compute=compute)
        except DamagedFileError:
            continue
        assert not any(good[place : place + 1])  # of a page that nobody reads
        assert_equal(found, together)
    path.write_bytes(b"something else")
    with pytest.raises(DamagedFileError, match="not an ope_gym file"):
        evaluate(path, r.target, compute=compute)


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    r, path = recorded(1, (3, 3)), tmp_path / "run.ope"
    r.trajectories.save(path)
    link, hard, copy = (tmp_path / f"{name}.ope" for name in ("link", "hard", "copy"))
    link.symlink_to(path)
    hard.hardlink_to(path)
    copy.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"run\.ope twice: .* give each file once"):
        evaluate([path, str(path)], r.target)
    with pytest.raises(ValueError, match=r"link\.ope twice, which is .*run\.ope: its episodes"):
        evaluate([path, r.trajectories, link], r.target)
    with pytest.raises(ValueError, match=r"hard\.ope twice, which is .*run\.ope: its episodes"):
        evaluate([path, hard], r.target)
    with pytest.raises(ValueError, match=r"copy\.ope, a copy of .*run\.ope: its episodes"):
        evaluate([path, copy], r.target)


def test_workers_read_the_files_that_were_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are, and not others of the same name."""
    r, others = recorded(1, (30, 30)), tmp_path / "others"
    others.mkdir()
    monkeypatch.chdir(tmp_path)
    r.trajectories.save("run.ope")
    recorded(2, (30, 30)).trajectories.save(others / "run.ope")
    evaluator = Evaluator("run.ope", BOTH, compute=Compute(block_steps=50))
    expected = evaluator.evaluate(r.target)

    monkeypatch.chdir(others)
    assert_same(evaluator.evaluate(r.target), expected)
    (tmp_path / "run.ope").write_bytes((others / "run.ope").read_bytes())
    with pytest.raises(ValueError, match=rf"^run\.ope: on .* {tmp_path}/run\.ope is another file"):
        evaluator.evaluate(r.target)
    (tmp_path / "run.ope").unlink()
    with pytest.raises(FileNotFoundError, match=r"No such .* all nodes need .*: 'run\.ope'"):
        evaluator.evaluate(r.target)
    with pytest.raises(FileNotFoundError, match=r"episodes has 'none\.ope', and there is no such"):
        evaluate("none.ope", r.target)
    with pytest.raises(FileNotFoundError, match=r"an environment.*gym\.make\('CartPole-v1'"):
        evaluate("CartPole-v1", r.target)


def test_a_file_may_grow_while_it_is_read(tmp_path: Path) -> None:
    r, path = recorded(1, (30, 30)), tmp_path / "run.ope"
    record(r.trajectories, path)
    evaluator = Evaluator(path, BOTH, compute=Compute(block_steps=50))
    expected = evaluator.evaluate(r.target)
    record(r.trajectories, path)
    assert_same(evaluator.evaluate(r.target), expected)


@pytest.mark.parametrize("block_steps", [4, 1000])
def test_episodes_that_change_between_passes_are_refused(block_steps: int) -> None:
    r = recorded(1, (3, 3))
    compute = Compute(block_steps=block_steps)

    def given(sizes: list[int]) -> Callable[[], Trajectories]:
        left = iter(sizes)
        return lambda: r.trajectories.select(episodes=slice(next(left)))

    for sizes in ([6, 5], [6, 6, 5])[: 2 if block_steps == 4 else 1]:
        with pytest.raises(ValueError, match="6 episodes in the first pass and 5 in a later one"):
            evaluate(given(sizes), r.target, "NFIS", compute=compute)
    if block_steps == 4:
        turned = iter([slice(None), slice(None, None, -1)])
        with pytest.raises(ValueError, match="episodes of other policies: files must not change"):
            evaluate(
                lambda: r.trajectories.select(episodes=next(turned)), 0, "NFIS", compute=compute
            )


# Tasks ----------------------------------------------------------------------------------------


def _blocks(episodes: Any, block_steps: int) -> Source:
    source = open_source(episodes, None, block_steps, Workers())
    assert source.data is None
    return source


def test_tasks_know_how_many_episodes_come_before_them() -> None:
    r = recorded(3, (9, 7, 5))
    parts = split(r.trajectories, 0, 12)
    source, together = _blocks(functions(parts), 8), merged(parts)
    assert len(source.tasks) > 2
    before = 0
    for number, task in enumerate(source.tasks):
        chunks = [chunk for _, chunk in source.chunks(task)]
        lengths = np.concatenate([chunk.lengths for chunk in chunks])
        assert task.number == number
        assert task.episodes == slice(before, before + lengths.size)
        assert task.steps == lengths.sum()
        np.testing.assert_array_equal(lengths, together.lengths[task.episodes])
        rewards = np.concatenate([chunk.rewards for chunk in chunks])
        rows = slice(together.offsets[before], together.offsets[before + lengths.size])
        np.testing.assert_array_equal(rewards, together.rewards[rows])
        assert all(chunk.policies == source.policies for chunk in chunks)
        before += lengths.size
    assert before == len(source.roster) == len(r.trajectories)
    assert sum(task.steps for task in source.tasks) == source.roster.steps


def test_tasks_depend_on_the_files_alone(files: list[Path]) -> None:
    one, two = (_blocks(files, 150).tasks for _ in range(2))
    assert [(t.number, t.name, t.steps, t.episodes) for t in one] == [
        (t.number, t.name, t.steps, t.episodes) for t in two
    ]
    assert sum(task.name == str(files[1]) for task in one) > 2  # a large file is cut
    assert any(" to " in task.name for task in one)  # small ones are joined


def test_what_all_tasks_are_sent_grows_with_the_episodes() -> None:
    """Not with tasks times behaviours: each has its own episodes' numbers alone."""
    r = recorded(6, [1] * 30 + [3, 2])
    source = _blocks(functions(split(r.trajectories, 0, 12)), 10)
    assert len(source.tasks) > 5
    ids = np.arange(len(source.roster))
    items = Items(source.tasks, ids, ids % 5)
    assert sum(item.ids.size for item in items) == len(source.roster)
    for item in items:
        np.testing.assert_array_equal(item.ids, ids[item.task.episodes])
        assert item.fold is not None
        np.testing.assert_array_equal(item.fold, ids[item.task.episodes] % 5)


# Memory ---------------------------------------------------------------------------------------


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_parts() -> None:
    compute = Compute(block_steps=9_999)

    def run(parts: int) -> Evaluation:
        episodes = [partial(made, i) for i in range(parts)]
        return evaluate(episodes, TARGET, [*ALL, "auto"], compute=compute)

    run(1)  # compiles
    few, many = _peak(lambda: run(2)), _peak(lambda: run(12))
    assert many < 1.1 * few


def test_a_large_file_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CHUNK_BYTES", 1 << 18)
    path = tmp_path / "large.ope"
    data = made(0, episodes=800)
    data.save(path)
    together = evaluate(data, TARGET, BOTH)
    del data
    run = partial(evaluate, path, TARGET, BOTH, compute=Compute(block_steps=5000))
    assert_equal(run(), together)  # compiles
    assert _peak(run) < path.stat().st_size / 3


# What is refused ------------------------------------------------------------------------------


def test_what_needs_all_episodes_in_memory_is_refused_in_blocks() -> None:
    r = recorded(1, (3, 3))
    remedy = r"load them with Trajectories\.load, or raise Compute\(block_steps=\.\.\.\)"
    for name in (name for name, c in ESTIMATORS.items() if c.whole):
        with pytest.raises(
            ValueError, match=f"has {name!r}, which needs all episodes in.*{remedy}"
        ):
            in_blocks([r.trajectories], r.target, ["NFIS", name])
    with pytest.raises(ValueError, match=f"reward_model is 'cross-fit', which needs.*{remedy}"):
        in_blocks([r.trajectories], r.target, "OUIS", weighting=Weighting(reward_model="cross-fit"))
    for model in ("tabular", TabularQ(), "network"):
        with pytest.raises(TypeError, match=f"q_model is .*take a LinearQ, 'default'.*{remedy}"):
            in_blocks([r.trajectories], r.target, "DM", q_model=model)
    log_prob_only = LogProbOnly(r.target.log_prob)
    with pytest.raises(ValueError, match=r"has no probs.* or give q_model=None"):
        in_blocks([r.trajectories], log_prob_only, "DM", block_steps=4, q_model=LinearQ())
    longest = r.trajectories.select(episodes=[int(r.trajectories.lengths.argmax())])
    with pytest.raises(ValueError, match="at least 2 episodes"):
        in_blocks([longest], r.target, "DM", block_steps=1, q_model=LinearQ())


def test_what_is_no_source_of_episodes_is_refused(tmp_path: Path) -> None:
    r = recorded(1, (3, 3))
    data = r.trajectories
    episodes: Any
    frame = pd.DataFrame({"reward": [1.0]})
    for episodes in (None, 3, object(), {"reward": [1.0]}, frame):
        with pytest.raises(TypeError, match="give Trajectories, a TrajectoryBuffer, a recorder"):
            evaluate(episodes, r.target)
    for episodes in ([data, 7], [7], np.zeros(3)):
        with pytest.raises(TypeError, match=r"episodes\[\d\] is .*: give the path of a file, tra"):
            evaluate(episodes, r.target)
    for episodes in (iter([data]), (part for part in [data])):
        with pytest.raises(ValueError, match=r"can be read only once.*give a list of files"):
            evaluate(episodes, r.target)
    with pytest.raises(ValueError, match="is an empty list: give at least one file"):
        evaluate([], r.target)
    empty = tmp_path / "empty.ope"
    data.select(episodes=slice(0)).save(empty)
    for episodes in (nothing(), [nothing()], nothing, [nothing, nothing], empty, [empty]):
        with pytest.raises(ValueError, match="episodes is empty: record at least one episode"):
            evaluate(episodes, r.target)
    other = dataclasses.replace(data, horizon=99)
    with pytest.raises(ValueError, match=r"episodes\[1\]: horizon differs"):
        evaluate(functions([data, other]), r.target)
    with pytest.raises(ValueError, match="horizon differs"):
        evaluate([data, other], r.target)


def test_options_that_cannot_be_are_refused_with_a_remedy() -> None:
    r = recorded(1, (3, 3))
    data = r.trajectories
    some: Any = "some"
    with pytest.raises(ValueError, match="held_out is 'some'; give True, False, or None"):
        evaluate(data, r.target, held_out=some)
    for steps in (0, "x", None):
        with pytest.raises(ValueError, match=f"block_steps is {steps!r}"):
            Compute(block_steps=steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'FWDR', which needs a q model, but there is none"):
        in_blocks([data], r.target, ["NFIS", "FWDR"], q_model=None)
    with pytest.raises(ValueError, match="needs the range that every reward obeys"):
        in_blocks([data], r.target, "FIS", interval="betting")
    with pytest.raises(ValueError, match=r"reward_range is .* at episode 0, step 0: widen it"):
        in_blocks([data], r.target, "FIS", block_steps=4, interval=Betting((5.0, 6.0)))
    for target in (3, -4, 2.5, None):
        with pytest.raises((TypeError, ValueError), match=r"target is"):
            evaluate(functions([data]), target, compute=Compute(block_steps=4))


def test_a_bad_target_is_named_with_its_file() -> None:
    r = recorded(1, (3, 3))

    class Wrong(Table):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            return np.where(np.asarray(observations) == 1, 0.5, -0.5)

    with pytest.raises(ValueError, match=r"episodes\[\d\].*target_log_probs is 0.5"):
        in_blocks(split(r.trajectories, 0, 2), Wrong(r.target.table), "NFIS", block_steps=4)


def test_last_is_the_last_policy_of_the_last_file_everywhere(tmp_path: Path) -> None:
    r = recorded(3, (8, 8, 8))
    r.trajectories.save(tmp_path / "all.ope")
    first = r.trajectories.select(policies=[0])
    other = dataclasses.replace(first, rewards=first.rewards + 1.0, policies=first.policies[:1])
    other.save(tmp_path / "again.ope")  # a policy that the first file has, too
    paths = [tmp_path / "all.ope", tmp_path / "again.ope"]
    want = evaluate(paths, 0, "NFIS", held_out=False)["NFIS"].value
    assert evaluate(paths, "last", "NFIS", held_out=False)["NFIS"].value == want
    assert want != evaluate(paths, 2, "NFIS", held_out=False)["NFIS"].value
    ranking = rank(paths, ["last"], "NFIS", held_out=False)
    assert ranking["policy 0"].estimate.value == want
    assert contributions(paths, "last", held_out=False).estimate.value == pytest.approx(want)
    plan = episodes_needed(paths, 0, 0.5, policy="last", held_out=False)
    assert [need.policy for need in plan.needs] == [0]
    assert list(leave_one_policy_out(paths, "NFIS", policies=["last"], held_out=False)) == [0]
