"""Off-policy evaluation inside Stable-Baselines3: `model.learn(..., callback=OPECallback(...))`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat

import ope_gym
from ope_gym import Evaluation
from ope_gym.buffer import TrajectoryBuffer
from ope_gym.policies import Policy, policy_to_arrays
from ope_gym.storage import PathLike
from ope_gym.tensorboard import EvaluationWriter, markdown
from ope_gym.trajectories import Trajectories
from wrappers.sb3_episodes import HeldOutEpisodes, TrainingEpisodes, time_limit
from wrappers.sb3_policies import normaliser, refuse, snapshot

__all__ = ["OPECallback"]

_TIMESTEPS = 10_000  # between evaluations, unless told otherwise
_LARGE = 2**30  # bytes of snapshots, of which the user should know


class OPECallback(BaseCallback):
    """Evaluates the policy of a model while it trains: PPO, A2C and DQN.

    With `eval_env`, each evaluation plays a few episodes of the current policy there. The learner
    never sees them, and those of earlier evaluations are used again with importance weights: the
    estimate rests on all of them. Without it, the episodes that the model trains on are evaluated;
    such values are optimistic, and are labelled so.

    What PPO and A2C do in training is recorded in full: a snapshot for each rollout, also for
    episodes that go on over several. DQN changes its policy every few steps and its ε at every
    one, and a VecNormalize that is still learning changes what the policy sees at every step. Of
    these only the held-out episodes are recorded, which are played by one frozen policy each.

    Args:
        eval_env: A Gymnasium environment or a VecEnv, apart from that of the training.
        n_eval_episodes: Episodes played there at each evaluation.
        eval_every: Rollouts between evaluations; by default about 10,000 timesteps.
        window: Evaluate with the episodes of so many latest policies; the cost of an evaluation
            grows with the square of it.
        estimators: Names from `ope_gym.ESTIMATORS`.
        gamma: Discount of the value; 1 for the return that SB3 reports.
        record_training: Whether to keep the episodes of PPO and A2C in training.
        epsilon: Of the policies of DQN that are evaluated; by default its exploration rate then.
        path: A file to which everything goes at the end of `learn`.
        seed: Of the held-out episodes; None for a random one.
        verbose: 0 prints no table at the end.
    """

    def __init__(
        self,
        eval_env: Any = None,
        *,
        n_eval_episodes: int = 5,
        eval_every: int | None = None,
        window: int = 20,
        estimators: str | Sequence[str] = ("NFIS", "FIS", "NBIS"),
        gamma: float = 1.0,
        record_training: bool = True,
        epsilon: float | None = None,
        path: PathLike | None = None,
        seed: int | None = 0,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose)
        for name, value in (
            ("n_eval_episodes", n_eval_episodes), ("eval_every", eval_every), ("window", window),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if eval_env is None and not record_training:
            raise ValueError(
                "record_training=False without eval_env leaves nothing to evaluate: give an "
                "eval_env, on which held-out episodes can be played"
            )
        self.evaluations: list[tuple[int, Evaluation]] = []
        self._eval_env = eval_env
        self._n_eval_episodes = n_eval_episodes
        self._eval_every = eval_every
        self._window = window
        self._options: dict[str, Any] = {"estimators": estimators, "gamma": gamma}
        self._record_training = record_training
        self._epsilon = epsilon
        self._path = path
        self._seed = seed
        self._held_out: HeldOutEpisodes | None = None
        self._training: TrainingEpisodes | None = None
        self._policy: Policy | None = None  # the current one
        self._evaluated_at: int | None = None  # rollouts so far, or timesteps
        self._rollouts = 0
        self._bytes = 0  # of a snapshot
        self._warned = False
        self._writers: dict[Any, EvaluationWriter] = {}

    # What was recorded -------------------------------------------------------------------

    @property
    def held_out(self) -> TrajectoryBuffer:
        """The episodes played on `eval_env`."""
        return self._held_out.recorder.buffer if self._held_out else TrajectoryBuffer()

    @property
    def training(self) -> TrajectoryBuffer:
        """The episodes that the model trained on, as far as they are recorded."""
        return self._training.recorder.buffer if self._training else TrajectoryBuffer()

    @property
    def policy(self) -> Policy:
        """The snapshot of the current policy."""
        if self._policy is None:
            raise RuntimeError("there is no policy before learn: call model.learn first")
        return self._policy

    def trajectories(self) -> Trajectories:
        """Everything recorded; `select(held_out=True)` gives what the learner never saw."""
        return self.held_out.view().merge(self.training)

    # What SB3 calls ----------------------------------------------------------------------

    def _init_callback(self) -> None:
        """Refuse what cannot be done right, before training begins."""
        model = self.model
        refuse(model)
        known = self._held_out or self._training
        if known is not None:
            if known.model is not model:
                raise ValueError("this OPECallback belongs to another model: make a new one")
            return
        obstacle = _obstacle(model)
        if obstacle and self._eval_env is None:
            raise ValueError(
                f"OPECallback without eval_env: {obstacle}, so that the episodes of the training "
                "cannot be recorded with one snapshot a rollout. Give an eval_env, on which "
                "episodes of frozen policies are played"
            )
        if self._eval_env is not None:
            self._held_out = HeldOutEpisodes(self._eval_env, model, self._seed)
        else:
            warnings.warn(
                "OPECallback without eval_env evaluates the policy with the episodes it is trained "
                "on (in-sample): values are optimistic, and intervals too narrow. Give an eval_env",
                UserWarning,
                stacklevel=2,
            )
        if self._record_training and not obstacle:
            fresh = self._held_out
            horizon = time_limit(self.training_env) if fresh is None else fresh.horizon
            self._training = TrainingEpisodes(model, horizon)

    def _on_training_start(self) -> None:
        if self.num_timesteps == 0:  # a second `learn` counts from the beginning
            self._evaluated_at = None
        if self._training is not None:
            self._training.begin()

    def _on_rollout_start(self) -> None:
        due = self._is_due()
        self._rollouts += 1
        if self._training is not None:
            obstacle = _obstacle(self.model)
            if obstacle:
                raise ValueError(f"{obstacle}: use OPECallback(eval_env, record_training=False)")
            self._take_snapshot()
            self._training.follow(self.policy)
            self._warn_if_large()
        elif due:
            self._take_snapshot()
        if due:
            self._evaluate()

    def _on_step(self) -> bool:
        if self._training is not None:
            self._training.step(self.locals)
        return True

    def _on_training_end(self) -> None:
        self._take_snapshot()
        evaluation = self._evaluate()
        if evaluation is not None:
            for writer in self._tensorboards():
                writer.add_text("ope/report", markdown(evaluation, notes=[]), self.num_timesteps)
            if self.verbose:
                print(f"The policy after {self.num_timesteps:,} timesteps:\n{evaluation}")
        if self._path is not None:
            self.trajectories().save(self._path)

    # Evaluating --------------------------------------------------------------------------

    def _is_due(self) -> bool:
        every = _TIMESTEPS if self._eval_every is None else self._eval_every
        now = self.num_timesteps if self._eval_every is None else self._rollouts
        due = self._evaluated_at is None or now - self._evaluated_at >= every
        if due:
            self._evaluated_at = now
        return due

    def _take_snapshot(self) -> None:
        self._policy = snapshot(self.model, epsilon=self._epsilon)

    def _evaluate(self) -> Evaluation | None:
        """The value of the current policy; None while there is no episode."""
        if self._held_out is not None:
            self._held_out.play(self.policy, self._n_eval_episodes)
        data = (self.training if self._held_out is None else self.held_out).select(
            last=self._window
        )
        if not len(data):
            return None
        evaluation = ope_gym.evaluate(data, self.policy, **self._options)
        self.evaluations.append((self.num_timesteps, evaluation))
        self._log(evaluation)
        return evaluation

    def _log(self, evaluation: Evaluation) -> None:
        """TensorBoard gets its bands with the values; the other outputs get the values."""
        for summary_writer in self._tensorboards():
            writer = self._writers.setdefault(summary_writer, EvaluationWriter(summary_writer))
            writer.add_evaluation(evaluation, self.num_timesteps)
        self.logger.record("ope/held_out", float(self._held_out is not None))
        for name, estimate in evaluation.items():
            for tag, value in (
                (f"ope/{name}/value", estimate.value),
                (f"ope/{name}/low", estimate.interval.low),
                (f"ope/{name}/high", estimate.interval.high),
                (f"diagnostics/{name}/ess", estimate.diagnostics.ess),
            ):
                if math.isfinite(value):
                    self.logger.record(tag, float(value), exclude="tensorboard")
        self.logger.dump(self.num_timesteps)

    def _tensorboards(self) -> list[Any]:
        formats = self.logger.output_formats
        return [x.writer for x in formats if isinstance(x, TensorBoardOutputFormat)]

    def _warn_if_large(self) -> None:
        """Once: short rollouts leave many snapshots."""
        policies = self.training.policies
        if self._bytes == 0:
            arrays = policy_to_arrays(policies[0])[1].values()
            self._bytes = sum(array.nbytes for array in arrays)
        if not self._warned and len(policies) * self._bytes > _LARGE:
            self._warned = True
            warnings.warn(
                f"{len(policies):,} snapshots, one for each rollout, now take "
                f"{len(policies) * self._bytes / 2**30:.1f} GiB: make rollouts longer (n_steps), "
                "or give an eval_env and record_training=False",
                UserWarning,
                stacklevel=2,
            )


def _obstacle(model: Any) -> str:
    """Why episodes of the training have no policy that is fixed during a rollout; "" if one is."""
    if isinstance(model, DQN):
        return "DQN changes its policy every few steps and its exploration rate at every one"
    env = normaliser(model)
    if env is not None and env.training:
        return (
            "VecNormalize updates its statistics at every step, and with them what the policy "
            "makes of an observation"
        )
    return ""
