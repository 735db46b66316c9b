"""The cases of the golden results: fixed data and what is asked of them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.policies import log_prob_moments
from tests import golden_data
from tests import golden_library as library
from tests.golden_data import Floats, Grid, Recording, epsilon_greedy
from tests.golden_library import (
    DiagonalGaussian,
    EpsilonGreedyTable,
    LinearQ,
    LinearSigmoid,
    Results,
    checksum,
    make_data,
    put_evaluation,
    run_evaluate,
    run_files,
)

ALL = tuple(name for name in library.ESTIMATORS if name != "EA")
SHARDED = (
    "BIS",
    "BCIS",
    "NBIS",
    "NBCIS",
    "FIS",
    "FCIS",
    "NFIS",
    "NFCIS",
    "OUIS",
    "NOUIS",
    "DM",
    "DR",
    "WDR",
    "FDR",
    "FWDR",
    "auto",
)
NAMED = ("BIS", "BCIS", "NBIS", "NBCIS", "FIS", "FCIS", "NFIS", "NFCIS", "OUIS", "NOUIS")
MANY = (*NAMED, "DM", "MDR", "FWDR", "auto")
SOME = ("NBIS", "FCIS", "NFIS", "FWDR", "auto")
BOOTSTRAP = {"seed": 3, "resamples": 100}
THETAS = np.array([[0.0, 0.2, 0.8, 0.3], [0.1, 0.4, 1.6, 0.9], [0.2, 0.6, 3.0, 1.6]])
TARGET = LinearSigmoid(np.array([0.15, 0.55, 2.6, 1.4]))
OTHER = LinearSigmoid(np.array([0.1, 0.3, 2.0, 1.0]), 0.05)


def sigmoids(thetas: Floats) -> list[Any]:
    return [LinearSigmoid(theta) for theta in thetas]


def recorded_cartpole() -> Recording:
    return golden_data.cartpole(7, THETAS, (20, 16, 24), 50, held_out_every=3)


def cartpole_case() -> Results:
    """All estimators and intervals, discounts, caps and held-out episodes."""
    out: Results = {}
    data = make_data(recorded_cartpole(), sigmoids(THETAS), action_space=spaces.Discrete(2))
    out["cartpole/returns"] = checksum(data.returns(0.9))
    put = _putting(out, "cartpole", data, TARGET)
    put("all", ALL, q_model="linear")
    put("held-out", MANY, held_out=True)
    put("fixed", ("BIS", "NFIS", "ADR"), origin="fixed", gamma=0.9, level=0.9)
    put("discounted", ALL, gamma=0.95)
    put("first-reward", SOME, gamma=0.0)
    put("cap", ("BCIS", "NBCIS", "FCIS", "NFCIS"), cap=1.5)
    put("no-model", ("NFIS", "auto"), q_model=None)
    put("betting", ("BIS", "BCIS", "FIS", "NFIS"), interval="betting", reward_range=(0.0, 1.0))
    put("percentile", ALL, interval="percentile", **BOOTSTRAP)
    put("bca", ALL, interval="bca", gamma=0.95, **BOOTSTRAP)
    one, two = library.run_several(data, [TARGET, OTHER], ("NFIS", "FWDR", "auto"))
    for name in one:
        out[f"cartpole/difference/{name}"] = library.difference(one[name], two[name])
    put_evaluation(out, "cartpole/other-target", two)
    one, two = library.run_several(
        data, [TARGET, OTHER], "NFIS", interval="percentile", **BOOTSTRAP
    )
    out["bootstrap/cartpole/difference"] = library.difference(one["NFIS"], two["NFIS"])
    out["text/cartpole/table"] = str(run_evaluate(data, TARGET, held_out=True))
    return out


def _putting(out: Results, data_set: str, data: Any, target: Any) -> Any:
    def put(case: str, estimators: Any = None, **options: Any) -> None:
        found = run_evaluate(data, target, estimators, **options)
        put_evaluation(out, f"{data_set}/{case}", found)

    return put


def model_case() -> Results:
    """The q models of observations that are numbers."""
    out: Results = {}
    data = make_data(recorded_cartpole(), sigmoids(THETAS), action_space=spaces.Discrete(2))
    put = _putting(out, "models", data, TARGET)
    names = ("DM", "FWDR", "auto")
    put("polynomial", names, q_model=LinearQ(library.Polynomial(1), time=1, nearness=0.0))
    put("critic-v", names, q_model=library.Critic(v=lambda x: 30.0 - 50.0 * np.abs(x[:, 2])))
    every = library.Critic(q=lambda x: 25.0 + x[:, 2:] * [-20.0, 20.0], all_actions=True)
    put("critic-q", names, q_model=every)
    values = library.Baseline(np.linspace(20, 30, data.n_steps), np.linspace(21, 29, data.n_steps))
    put("baseline", (*names, "MAGIC", "ADR"), q_model=values)
    put = _putting(out, "float32/models", data, TARGET)
    put(
        "dynamics",
        ("DM",),
        q_model=library.DynamicsQ(cosines=20, episodes=40, rows=2000),
    )
    put("network", ("DM",), q_model=library.NetworkQ(hidden=(8,), epochs=2, batch=256))
    return out


GREEDY = ((0, 1, 2, 0, 1), (1, 1, 0, 2, 1), (2, 0, 0, 2, 1))
EPSILONS = (0.9, 0.6, 0.5)


def grid_policies() -> tuple[list[Floats], list[Any]]:
    """Return tables of probabilities, and the same as policies."""
    pairs = list(zip(GREEDY, EPSILONS, strict=True))
    tables = [epsilon_greedy(greedy, epsilon, 3) for greedy, epsilon in pairs]
    return tables, [EpsilonGreedyTable(np.array(g), epsilon, 3) for g, epsilon in pairs]


GRID_SPACES = {"observation_space": spaces.Discrete(5), "action_space": spaces.Discrete(3)}
GRID_TARGET = EpsilonGreedyTable(np.array([2, 1, 0, 2, 0]), 0.2, 3)


def grid_case() -> Results:
    """Discrete observations, reward models, certain targets; and the same as arrays."""
    out: Results = {}
    tables, policies = grid_policies()
    recording = Grid(1, 5, 3, 8).record(2, tables, (40, 30, 30))
    data = make_data(recording, policies, **GRID_SPACES)
    put = _putting(out, "grid", data, GRID_TARGET)
    put("all", ALL)
    put("fixed-point", ("DM", "auto"), q_model=library.TabularQ(time=False), gamma=0.9)
    put("cross-fit", ("OUIS", "NOUIS"), reward_model="cross-fit")
    model = (0.5 + 0.1 * data.actions, 1.0 + 0.2 * data.observations)
    put("reward-model", ("OUIS", "NOUIS"), reward_model=model)
    put("bca", ("BIS", "NFIS", "FWDR", "auto"), interval="bca", **BOOTSTRAP)
    put = _putting(out, "grid-certain", data, EpsilonGreedyTable(GRID_TARGET.greedy, 0.0, 3))
    put("default", MANY)
    put("betting", ("BIS", "FIS"), interval="betting", reward_range=(-1.0, 2.0))
    ids = recording.policy_ids[recording.offsets[:-1]]
    arrays = {
        "target_log_probs": GRID_TARGET.log_prob(data.observations, data.actions),
        "behaviour_log_probs": np.stack(
            [policy.log_prob(data.observations, data.actions) for policy in policies]
        ),
        "behaviour_ids": ids,
        "rewards": data.rewards,
        "offsets": data.offsets,
    }
    put_evaluation(out, "arrays/default", library.run_arrays(arrays, (*NAMED, "auto")))
    q, v = 1.0 + 0.1 * data.observations, 1.2 - 0.05 * data.observations
    names = tuple(name for name in ALL if name not in ("ADR", "MDR"))
    put_evaluation(
        out,
        "arrays/all",
        library.run_arrays(
            arrays, names, baseline=(q, v), reward_model=model, gamma=0.9, regime="held-out"
        ),
    )
    for interval in ("percentile", "bca"):
        found = library.run_arrays(arrays, ("FIS", "NFIS"), interval=interval, **BOOTSTRAP)
        put_evaluation(out, f"arrays/{interval}", found)
    betting = {"interval": "betting", "reward_range": (-1.0, 2.0), "horizon": 8}
    put_evaluation(out, "arrays/betting", library.run_arrays(arrays, ("FIS", "NFIS"), **betting))
    return out


def bandit_case() -> Results:
    """One-step episodes, with the empirical average."""
    out: Results = {}
    tables, policies = grid_policies()
    recording = Grid(3, 5, 3, 1).record(4, tables, (30, 30, 40), held_out_every=2)
    data = make_data(recording, policies, **GRID_SPACES)
    put = _putting(out, "bandit", data, GRID_TARGET)
    put("default", (*MANY[:-1], "EA", "auto"))
    put("held-out", ("EA", "NFIS"), held_out=True)
    put("percentile", ("EA", "NFIS"), interval="percentile", **BOOTSTRAP)
    put("bca", ("EA", "NFIS"), interval="bca", **BOOTSTRAP)
    held_out = Grid(3, 5, 3, 1).record(11, tables, (30, 30, 40), held_out_every=1)
    data = make_data(held_out, policies, **GRID_SPACES)
    near = EpsilonGreedyTable(np.array(GREEDY[2]), 0.45, 3)  # near enough for green verdicts
    put_evaluation(out, "bandit/near", run_evaluate(data, near, ("BIS", "NFIS", "EA", "auto")))
    return out


def gaussian_case() -> Results:
    """Continuous actions."""
    out: Results = {}
    gains, stds = (-0.2, -0.5, -0.8), (0.6, 0.5, 0.4)
    policies = [_gaussian(gain, std) for gain, std in zip(gains, stds, strict=True)]
    recording = golden_data.driven(5, gains, stds, (12, 12, 16), 6)
    data = make_data(recording, policies, action_space=spaces.Box(-np.inf, np.inf, (2,)))
    put = _putting(out, "gaussian", data, _gaussian(-0.7, 0.45))
    put("all", ALL)
    put("discounted", ("NFIS", "DM"), gamma=0.9)
    return out


def _gaussian(gain: float, std: float) -> Any:
    return DiagonalGaussian(gain * np.eye(2), np.zeros(2), np.full(2, math.log(std)))


def schedule_case() -> Results:
    """A policy that changes during episodes."""
    out: Results = {}
    tables, policies = grid_policies()
    recording = Grid(1, 5, 3, 8).record_clocked(6, tables, 80, 70)
    data = make_data(recording, policies, **GRID_SPACES)
    put = _putting(out, "schedule", data, GRID_TARGET)
    put("all", ALL)
    put("discounted", ("BIS", "NFIS"), gamma=0.9)
    return out


def recorded_many() -> tuple[Recording, list[Any]]:
    """Record 30 policies of a training run, 1 to 3 episodes each."""
    share = np.linspace(0.0, 1.0, 30)[:, None]
    thetas = (1 - share) * THETAS[0] + share * THETAS[2]
    return golden_data.cartpole(8, thetas, [1 + k % 3 for k in range(30)], 40), sigmoids(thetas)


def many_case() -> Results:
    """Many policies, with full and partial mixtures."""
    out: Results = {}
    recording, policies = recorded_many()
    data = make_data(recording, policies, action_space=spaces.Discrete(2))
    put = _putting(out, "many", data, TARGET)
    put("all", ("BIS", "NFIS", "auto"), mixture="all")
    names = ("NBIS", "FIS", "NFIS", "NFCIS", "OUIS", "NOUIS", "FWDR", "auto")
    put("mixture-8", names, mixture=8, q_model="linear")
    put("singles", ("BIS", "NFIS", "auto"), mixture=1)
    put("bca", ("NFIS", "auto"), interval="bca", mixture=8, **BOOTSTRAP)
    return out


def unknown_case() -> Results:
    """Episodes of an unknown policy, with and without the probabilities of its actions."""
    out: Results = {}
    tables, policies = grid_policies()
    recording = Grid(1, 5, 3, 8).record(9, tables[:1], (40,))
    logs = policies[0].log_prob(recording.observations, recording.actions)
    models, basic = ("DM", "MDR"), NAMED[:4]
    for name, given, asked in (
        ("unknown", np.full(logs.size, np.nan), models),
        ("logged", logs, (*basic, *models)),
    ):
        data = library.make_unknown(recording, given, **GRID_SPACES)
        put_evaluation(out, f"unknown/{name}", run_evaluate(data, GRID_TARGET, asked))
    return out


def analysis_case() -> Results:
    """Ranking, leave-one-policy-out, contributions, episodes needed and overlap."""
    out: Results = {}
    data = make_data(recorded_cartpole(), sigmoids(THETAS), action_space=spaces.Discrete(2))
    near = LinearSigmoid(np.array([0.12, 0.5, 2.8, 1.4]))
    targets = {"target": TARGET, "near": near, "other": OTHER, "last": 2}
    library.put_ranking(out, "rank/auto", library.run_rank(data, targets))
    options = {"estimator": "NFIS", "held_out": True, "gamma": 0.9, "seed": 5}
    library.put_ranking(out, "rank/held-out", library.run_rank(data, [TARGET, near, 1], **options))
    found = library.run_rank(data, targets, estimator="NFIS", interval="percentile", **BOOTSTRAP)
    library.put_ranking(out, "rank/percentile", found)
    tables, acted = grid_policies()
    grid = make_data(Grid(1, 5, 3, 8).record(2, tables, (40, 30, 30)), acted, **GRID_SPACES)
    library.put_ranking(out, "rank/grid", library.run_rank(grid, [GRID_TARGET, 0, 1, 2]))
    library.put_leave_one_out(out, "leave-one-out/auto", library.run_leave_one_out(data))
    found = library.run_leave_one_out(
        data, estimator="FIS", held_out=False, gamma=0.9, q_model=None
    )
    library.put_leave_one_out(out, "leave-one-out/all", found)
    for estimator, gamma, wanted in (("NFIS", 1.0, 0.9), ("FIS", 0.9, 0.2)):
        found = library.run_contributions(data, TARGET, estimator=estimator, gamma=gamma)
        library.put_rows(out, f"contributions/{estimator}", found, found)
        plan = library.run_needed(
            data, TARGET, wanted, estimator=estimator, gamma=gamma, limit=10_000
        )
        library.put_rows(out, f"needed/{estimator}", plan, plan.needs)
    found = library.run_overlap(data, TARGET)
    out["overlap/cartpole"] = found.matrix.ravel().tolist()
    recording, policies = recorded_many()
    many = make_data(recording, policies, action_space=spaces.Discrete(2))
    out["overlap/many"] = checksum(library.run_overlap(many, TARGET).matrix)
    return out


def file_case(*, ray: bool = False) -> Results:
    """Files: loaded, in one chunk, in many, by two workers, by Ray."""
    out: Results = {}
    recording, policies = recorded_cartpole(), sigmoids(THETAS)
    many, more = recorded_many()
    given = {"action_space": spaces.Discrete(2)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        whole = library.save(make_data(recording, policies, **given), path / "whole.ope")
        cuts = (0, 11, 40, len(recording.offsets) - 1)
        parts = [
            library.save(make_data(recording.part(a, b), policies, **given), path / f"part{a}.ope")
            for a, b in pairwise(cuts)
        ]
        other = library.save(make_data(many, more, **given), path / "many.ope")
        found = run_evaluate(library.load(whole), TARGET, ALL, q_model="linear")
        put_evaluation(out, "loaded/cartpole/all", found, words=False)
        for kind, files, how in _ways(whole, parts, ray=ray):
            _put_files(out, kind, files, how)
            if kind in ("files", "chunks", "ray"):
                _put_many(out, kind, other, how)
        for command in (
            ("info",),
            ("evaluate", "--target", "1", "--data", "held-out"),
            ("rank", "--policies", "0-2", "--estimator", "NFIS"),
            ("plan", "--standard-error", "0.9"),
            ("check", "--estimator", "NFIS"),
        ):
            said = library.run_command(command[0], str(whole), *command[1:])
            out[f"text/command/{command[0]}"] = said.replace(folder, "FOLDER")
        said = library.run_command("evaluate", *map(str, parts), "--workers", "1")
        out["text/command/shards"] = said.replace(folder, "FOLDER")
    return out


def _ways(
    whole: Path, parts: list[Path], *, ray: bool
) -> Iterator[tuple[str, list[Path], dict[str, Any]]]:
    """Yield how the episodes are read and who reads them."""
    yield "files", [whole], {}
    yield "chunks", parts, {"chunk_steps": 150}
    yield "workers", parts, {"chunk_steps": 150, "workers": 2}
    if ray:
        yield "ray", parts, {"chunk_steps": 150, "ray": True}


def _put_files(out: Results, kind: str, files: list[Path], how: dict[str, Any]) -> None:
    def put(case: str, estimators: Any, **options: Any) -> None:
        found = run_files(files, TARGET, estimators, **options, **how)
        put_evaluation(out, f"{kind}/cartpole/{case}", found, words=False)

    put("all", SHARDED, q_model=LinearQ())
    if kind in ("files", "chunks"):
        put("discounted", SHARDED, gamma=0.95)
        put("first-reward", SOME, gamma=0.0)
        put("cap", ("BCIS", "NBCIS", "FCIS", "NFCIS"), cap=1.5)
        put("held-out", ("BIS", "NFIS", "FWDR", "auto"), held_out=True)
    if kind != "workers":  # processes take seconds to start
        put("bca", ("FIS", "NFIS", "FWDR", "auto"), interval="bca", **BOOTSTRAP)


def _put_many(out: Results, kind: str, path: Path, how: dict[str, Any]) -> None:
    names = ("NBIS", "FIS", "NFIS", "OUIS", "FWDR", "auto")
    found = run_files([path], TARGET, names, mixture=8, q_model=LinearQ(), **how)
    put_evaluation(out, f"{kind}/many/mixture-8", found, words=False)


def policy_case() -> Results:
    """Probabilities, draws and moments of every kind of policy; the exact moments of a bandit."""
    out: Results = {}
    x = np.round(np.random.default_rng(0).random((40, 3)) * 4.0 - 2.0, 6)
    states, few, pairs = np.arange(40) % 5, np.arange(40) % 3, np.round(x[:, :2] * 0.7, 6)
    f = x.astype(np.float32)
    first, last = (0.3 * f[:6], 0.1 * f[:6, 0]), (0.5 * f[6:12].T, 0.1 * f[12])
    net = library.Network((first, last), "Tanh")
    two = library.Network((first, (last[0][:2], last[1][:2])), "SiLU")
    made: dict[str, tuple[Any, NDArray[Any], NDArray[Any]]] = {
        "sigmoid": (LinearSigmoid(np.array([0.5, -1.0, 2.0]), 0.1), x, few % 2),
        "softmax": (library.SoftmaxLinear(x[:3], np.array([0.0, 0.2, -0.1])), x, few),
        "greedy-table": (GRID_TARGET, states, few),
        "uniform": (library.Uniform(3), x, few),
        "gaussian": (
            DiagonalGaussian(x[:2], np.array([0.1, 0.2]), np.array([-0.5, 0.0])),
            x,
            pairs,
        ),
        "float32/softmax-mlp": (library.SoftmaxMlp(net), x, few),
        "float32/greedy-mlp": (library.EpsilonGreedyMlp(net, 0.2), x, few),
        "float32/gaussian-mlp": (
            library.GaussianMlp(two, np.array([-0.5, 0.0], np.float32)),
            x,
            pairs,
        ),
    }
    for name, (policy, seen, actions) in made.items():
        key = f"float32/policies/{name[8:]}" if name.startswith("float32/") else f"policies/{name}"
        out[f"{key}/log_prob"] = checksum(policy.log_prob(seen, actions))
        drawn = policy.sample(seen, np.random.default_rng(1))
        out[f"{key}/sample"] = checksum(drawn)
        if hasattr(policy, "probs"):
            out[f"{key}/probs"] = checksum(policy.probs(seen))
        if name.endswith(("mlp", "gaussian")):
            moments = log_prob_moments(policy, seen)
            assert moments is not None
            out[f"{key}/moments"] = [y for m in moments for y in checksum(m)]
        out[f"text/policies/{name}"] = repr(policy)
    library.put_oracle(out)
    return out


def compute(*, ray: bool = False) -> Results:
    """Return all results by name."""
    out: Results = {}
    for case in CASES:
        out |= case()
    return out | file_case(ray=ray)


CASES = (
    cartpole_case,
    model_case,
    grid_case,
    bandit_case,
    gaussian_case,
    schedule_case,
    many_case,
    unknown_case,
    analysis_case,
    policy_case,
)
