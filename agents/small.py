"""Training of a small agent: record what every policy plays, and evaluate the next one from that.

An iteration plays episodes with the current policy, keeps the held-out ones back, and lets the
agent learn from the others. The new policy, which has not played yet, is then evaluated from the
held-out episodes in two ways: by importance weights, and step by step as `OPECallback` does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import ope_gym
from agents.contract import Agent
from ope_gym.analysis.overlap import overlap
from ope_gym.arrays import FloatArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.online import FreeEstimate, FreeEvaluation
from ope_gym.report.training import Fresh, surer_first, without_reward
from ope_gym.results import Evaluation
from wrappers import collect
from wrappers.free_recorder import FreeRecorder
from wrappers.vector import RecordTrajectories

_SHOWN = ("auto", "NFIS")  # in the table, where no estimators are named
_STORED = ("paper",)  # in the event file and in JSON: those of the paper, and auto
# New episodes of the final policy, and about how many steps they may take where environments are
# stepped one by one: 20 seconds of MuJoCo.
_FRESH, _FRESH_STEPS = 1000, 100_000


@dataclass(frozen=True)
class Plan:
    """How a small agent trains, and which episodes its policy is evaluated from.

    Args:
        updates: Updates of the agent.
        policies: Number of policies, the last ones, whose episodes the evaluation uses.
        recorded: Episodes recorded with each policy.
        held_out: Share of them that the learner never sees, and that the evaluation uses alone;
            with 0 it uses all.
        seed: Seed of actions and resets.
        quiet: Whether to hide the progress bars.
    """

    updates: int
    policies: int
    recorded: int
    held_out: float
    seed: int
    quiet: bool


class SmallRun:
    """One training run of a small agent.

    Args:
        agent: The learner.
        env: One environment, for its name, its time limit and the bounds of its actions.
        make_envs: Function that makes a vector environment for so many episodes.
        plan: How it trains.
        folder: Folder for the events of TensorBoard and the episodes.
        estimators: Names of estimators, if any are asked for.
        options: Further arguments of `ope_gym.evaluate`.
    """

    def __init__(
        self,
        agent: Agent,
        env: gym.Env[Any, Any],
        make_envs: Callable[[int], gym.vector.VectorEnv[Any, Any, Any]],
        plan: Plan,
        folder: Path,
        estimators: list[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.agent, self.plan, self.iterations = agent, plan, 0
        self._make_envs, self._folder = make_envs, folder
        self._estimators, self._options = estimators, options
        self._rng = np.random.default_rng(plan.seed)
        self._name, limit = (env.spec.id, env.spec.max_episode_steps) if env.spec else ("", None)
        box, envs = env.action_space, make_envs(plan.recorded)
        self._free = FreeEvaluation(
            envs.num_envs,
            horizon=limit,
            action_bounds=(box.low, box.high) if isinstance(box, gym.spaces.Box) else None,
            gamma=options["gamma"],
            level=options["level"],
            seed=plan.seed,
        )
        episodes = folder / "episodes.ope"
        self.env = FreeRecorder(envs, self._free, held_out=plan.held_out, path=episodes)
        self._evaluated: tuple[int, Evaluation] | None = None  # with the iterations until then
        self._step_by_step: FreeEstimate | None = None  # the value of the same policy
        self._writer: Any = None

    @property
    def progress(self) -> str:
        """How far the training has come."""
        return f"{self.iterations} of {self.plan.updates} policies"

    @property
    def fresh_episodes(self) -> int:
        """How many new episodes of the final policy to compare its values with."""
        if not isinstance(self.env.unwrapped, gym.vector.SyncVectorEnv):
            return _FRESH
        length = self.env.buffer.view().lengths[-self.plan.recorded :].mean()
        return min(_FRESH, max(1, int(_FRESH_STEPS / length)))

    def train(self, stop: Callable[[], bool]) -> None:
        """Run all iterations, evaluating each new policy; stop after one if that is asked."""
        from ope_gym.report.tensorboard import EvaluationWriter

        self._writer = EvaluationWriter(self._folder)
        with self._bar(self.plan.updates, "training", "policy") as bar:
            while self.iterations < self.plan.updates:
                mean_return = self.iterate()
                self._writer.add_return(mean_return, self.iterations - 1)
                if len(self.data()):
                    self._writer.add_evaluation(self.evaluate(), self.iterations)
                bar.set_postfix(mean_return=f"{mean_return:.4g}")
                bar.update()
                if stop():  # not before there is something to evaluate
                    break

    def iterate(self) -> float:
        """Record with the current policy and learn from it; return the mean return."""
        first = len(self.env.buffer)
        collect(self.env, self.agent.policy, self.plan.recorded, self._rng, seed=self._seed())
        fresh = self.env.buffer.view().select(episodes=np.arange(first, len(self.env.buffer)))
        self.agent.learn(fresh.select(held_out=False))
        self.iterations += 1
        return float(fresh.returns(self._options["gamma"]).mean())

    def data(self) -> Trajectories:
        """Return the episodes that the evaluation may use."""
        record = self.env.buffer.view()
        last = np.unique(record.first_policies)[-self.plan.policies :].tolist()
        return record.select(policies=last, held_out=True if self.plan.held_out > 0 else None)

    def evaluate(self) -> Evaluation:
        """Evaluate the current policy on the episodes recorded so far, once an iteration."""
        if self._evaluated is not None and self._evaluated[0] == self.iterations:
            return self._evaluated[1]
        if not len(self.data()):
            raise ValueError("no episode was held out; give a larger --held-out")
        evaluation = ope_gym.evaluate(
            self.data(),
            self.agent.policy,
            self._estimators or _STORED,
            held_out=False,  # `data` has chosen
            **self._options,
        ).named(f"policy {self.env.follow(self.agent.policy)}")  # as files number it
        self._evaluated = self.iterations, evaluation
        self._step_by_step = self._free.evaluate(self.iterations)  # of the policy that is followed
        # provisional values that were wrong make the next ones less sure
        self._free.settle()
        return evaluation

    def fresh_returns(self, episodes: int) -> FloatArray:
        """Return the returns of new episodes of the policy."""
        env = RecordTrajectories(self._make_envs(episodes))
        with self._bar(episodes, "fresh rollouts", "ep") as bar:
            collect(
                env,
                self.agent.policy,
                episodes,
                self._rng,
                seed=self._seed(),
                on_episode=lambda *_: bar.update(),
            )
        returns = env.buffer.view().returns(self._options["gamma"])
        env.close()
        return returns

    def report(self, truth: Fresh | None, settings: Mapping[str, Any]) -> str:
        """Write the closing report to TensorBoard, and return the values in words.

        Args:
            truth: Value from fresh rollouts, if known.
            settings: Settings of the run, for TensorBoard.
        """
        evaluation = self.evaluate()
        with self._writer as writer:
            writer.add_report(
                evaluation,
                self.iterations,
                settings,
                overlap=overlap(self.data(), self.agent.policy),
                truth=truth.value if truth else None,
                truth_error=truth.standard_error if truth else math.nan,
            )
        self._writer = None
        shown = evaluation if self._estimators else evaluation.select(_SHOWN)
        warning = without_reward(self.env.buffer.returns(), self._name)
        free = None if warning else self._step_by_step
        values = surer_first(shown, free, self._options["level"], truth)
        basis = (
            f"The learner never saw these episodes of {self._name}, so these numbers are not "
            "optimistic."
            if self.plan.held_out > 0
            else f"The policy was trained on these episodes of {self._name}, so all of this is "
            "optimistic; --held-out 0.5 keeps episodes apart."
        )
        lines = [warning, values, str(truth or ""), basis]
        return "\n".join(["", *filter(None, lines), ""])

    def save(self, path: Path | None) -> None:
        """Record the policy that is evaluated, and copy all episodes to a file if one is named."""
        self.env.follow(self.agent.policy)
        if path:
            self.env.buffer.save(path)

    def close(self) -> None:
        """Close the recorder and the events."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self.env.close()

    def _seed(self) -> int:
        """Return the next seed for resets."""
        return int(self._rng.integers(1 << 31))

    def _bar(self, total: int, what: str, unit: str) -> tqdm[Any]:
        """Return a progress bar, which shows only on a terminal."""
        return tqdm(total=total, desc=what, unit=unit, disable=True if self.plan.quiet else None)
