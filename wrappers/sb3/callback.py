"""Off-policy evaluation inside Stable-Baselines3: `model.learn(..., callback=OPECallback(...))`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

from ope_gym.data.blocks import PathLike
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.evaluation import evaluate
from ope_gym.options import Options, estimator_names
from ope_gym.policies import Policy
from ope_gym.results import Evaluation
from wrappers.recording.file import EpisodeFile
from wrappers.sb3.environments import check_not_normalised, horizon_of
from wrappers.sb3.episodes import (
    HeldOutEpisodes,
    TrainingEpisodes,
    check_snapshot,
    raw_observations,
)
from wrappers.sb3.logger import EvaluationLog
from wrappers.sb3.snapshots import check_model, snapshot, why_not_fixed

__all__ = ["OPECallback"]

_TIMESTEPS = 10_000  # between evaluations by default
_LARGE = 2**30  # bytes of a record that the user should be warned of


class OPECallback(BaseCallback):
    """Evaluates the policy of a model while it trains: PPO, A2C and DQN.

    With `eval_env`, each evaluation plays a few episodes of the current policy there, which the
    learner never sees. Episodes of earlier evaluations are used again, with importance weights.
    Without it, the episodes that the model trains on are evaluated; such values are optimistic, and
    are labelled so. They leave out the episodes begun less than a time limit ago, of which only
    the short ones have ended.

    The training of PPO and A2C is recorded in full, with a snapshot for each rollout, also where
    episodes last several rollouts. DQN changes its policy every few steps and its ε at every step,
    and a VecNormalize that is still learning changes what the policy sees at every step. With
    these only the held-out episodes are recorded, each played by one frozen policy.

    Args:
        eval_env: A Gymnasium environment or a VecEnv, not the one of the training.
        n_eval_episodes: Episodes played there at each evaluation.
        eval_every: Rollouts between evaluations. A rollout is n_steps of every sub-env with PPO
            and A2C (by default 2,048 and 5), and train_freq steps with DQN (by default 4). None
            for about 10,000 timesteps.
        window: Number of latest policies whose episodes are evaluated; the cost of an evaluation
            grows with its square.
        estimators: Names from `ope_gym.ESTIMATORS`.
        gamma: Discount of the value; 1 gives the return that SB3 reports.
        record_training: Whether to keep the episodes of PPO and A2C in training, with a snapshot
            for each rollout; by default only if they are evaluated or saved to a file.
        epsilon: Exploration rate of the evaluated DQN policies; by default that of the training.
        path: A new file to which finished episodes are appended as they end. A process that is
            killed loses only the open episodes. A full disk is a warning: the episodes stay in
            memory, and go to the file as soon as there is room.
        seed: Seed of the held-out episodes; None for that of the model, if it has one.
        max_steps: Length above which a held-out episode is an error, if no time limit is known.
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
        record_training: bool | None = None,
        epsilon: float | None = None,
        path: PathLike | None = None,
        seed: int | None = None,
        max_steps: int = 100_000,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose)
        for name, value in (
            ("n_eval_episodes", n_eval_episodes),
            ("eval_every", eval_every),
            ("window", window),
            ("max_steps", max_steps),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if record_training is None:
            record_training = eval_env is None or path is not None
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
        self._estimators = estimator_names(estimators)
        self._gamma = Options(gamma=gamma).gamma
        self._record_training = record_training
        self._epsilon = epsilon
        self._file = None if path is None else _new_file(path)
        self._seed = seed
        self._max_steps = max_steps
        self._held_out: HeldOutEpisodes | None = None
        self._training: TrainingEpisodes | None = None
        self._policy: Policy | None = None  # the current one
        self._untried: Any = None  # the observations on which a new snapshot first acts
        self._evaluated_at: int | None = None  # number of rollouts, or of timesteps
        self._rollouts = 0
        self._warned = False
        self._log = EvaluationLog()

    # The record --------------------------------------------------------------------------

    @property
    def held_out(self) -> TrajectoryBuffer:
        """The episodes played on `eval_env`."""
        return self._held_out.session.buffer if self._held_out else TrajectoryBuffer()

    @property
    def training(self) -> TrajectoryBuffer:
        """The episodes that the model trained on, if they are recorded."""
        return self._training.session.buffer if self._training else TrajectoryBuffer()

    @property
    def policy(self) -> Policy:
        """The snapshot of the current policy."""
        if self._policy is None:
            raise RuntimeError("there is no policy before learn: call model.learn first")
        return self._policy

    def trajectories(self) -> Trajectories:
        """Return all recorded episodes; `select(held_out=True)` gives those the learner never saw.

        After `learn` the last of their policies is the current one.
        """
        return self.training.view().merge(self.held_out)

    # Called by SB3 -----------------------------------------------------------------------

    def _init_callback(self) -> None:
        """Check model and environments before training begins."""
        model = self.model
        check_model(model)
        known = self._held_out or self._training
        if known is not None:
            if known.model is not model:
                raise ValueError("this OPECallback belongs to another model: make a new one")
            return
        changing = why_not_fixed(model)
        if changing and self._eval_env is None:
            raise ValueError(
                f"OPECallback without eval_env: {changing}, so that the episodes of the training "
                "cannot be recorded with one snapshot a rollout. Give an eval_env, on which "
                "episodes of frozen policies are played"
            )
        recorded = self._record_training and not changing
        if recorded:
            check_not_normalised(self.training_env, "the training env", rewards=True)
        if self._eval_env is not None:
            self._held_out = HeldOutEpisodes(
                self._eval_env, model, self._seed, self._max_steps, self._file
            )
        if recorded:
            fresh = self._held_out
            horizon = horizon_of(self.training_env) if fresh is None else fresh.horizon
            if fresh is None:
                _warn_of_in_sample(horizon)
            self._training = TrainingEpisodes(model, horizon, self._file)

    def _on_training_start(self) -> None:
        if self.num_timesteps == 0:  # a second `learn` counts from the beginning
            self._evaluated_at = None
        if self._training is not None:
            self._training.begin()
        if self._file is not None:
            self._file.update()

    def _on_rollout_start(self) -> None:
        due = self._is_due()
        self._rollouts += 1
        if self._training is not None:
            changing = why_not_fixed(self.model)
            if changing:
                raise ValueError(f"{changing}: use OPECallback(eval_env, record_training=False)")
            self._take_snapshot()
            self._training.follow(self.policy)
            self._warn_if_large()
        elif due:
            self._take_snapshot()
            if not isinstance(self.model, DQN):
                self._untried = raw_observations(self.model, self.model._last_obs)
        if due:
            self._evaluate()

    def _on_step(self) -> bool:
        if self._training is not None:
            self._training.step(self.locals)
        elif self._untried is not None:
            check_snapshot(self.policy, self._untried, self.locals)
            self._untried = None
        return True

    def _on_training_end(self) -> None:
        try:
            self._take_snapshot()
            if self._held_out is None:  # it plays no episode, but belongs to the record
                self.training.add_policy(self.policy)
            self._report()
        finally:
            if self._file is not None:
                self._file.finish()

    def _report(self) -> None:
        """Evaluate once more and report; a further `learn` counts from here."""
        self._evaluated_at = self._now()
        evaluation = self._evaluate()
        if evaluation is None:
            return
        settings = {
            "algorithm": type(self.model).__name__,
            "gamma": self._gamma,
            "n_eval_episodes": self._n_eval_episodes,
            "window": self._window,
        }
        self._log.report(
            self.logger, evaluation, self._data(), self.policy, self.num_timesteps, settings
        )
        if self.verbose:
            print(f"The policy after {self.num_timesteps:,} timesteps:\n{evaluation}")

    # Evaluation --------------------------------------------------------------------------

    def _is_due(self) -> bool:
        every, now = self._eval_every or _TIMESTEPS, self._now()
        due = self._evaluated_at is None or now - self._evaluated_at >= every
        if due:
            self._evaluated_at = now
        return due

    def _now(self) -> int:
        return self.num_timesteps if self._eval_every is None else self._rollouts

    def _take_snapshot(self) -> None:
        self._policy = snapshot(self.model, epsilon=self._epsilon)

    def _evaluate(self) -> Evaluation | None:
        """Evaluate and log the current policy; return None while there is no episode."""
        step = self.num_timesteps
        if self._held_out is not None:
            self._held_out.play(self.policy, self._n_eval_episodes)
        data = self._data()
        if not len(data):
            return None
        evaluation = evaluate(data, self.policy, self._estimators, gamma=self._gamma)
        self.evaluations.append((step, evaluation))
        self._log.add(self.logger, evaluation, step, held_out=self._held_out is not None)
        return evaluation

    def _data(self) -> Trajectories:
        """Return the episodes to evaluate with."""
        if self._held_out is not None:
            return self.held_out.select(last=self._window)
        assert self._training is not None  # _init_callback has raised otherwise
        return self._training.settled(last=self._window)

    def _warn_if_large(self) -> None:
        """Warn once: short rollouts leave many snapshots, and images are large."""
        assert self._training is not None
        if not self._warned and (size := self._training.n_bytes()) > _LARGE:
            self._warned = True
            policies, steps = len(self.training.policies), self._training.session.steps
            warnings.warn(
                f"{policies:,} snapshots, one for each rollout, and {steps:,} steps now take "
                f"{size / 2**30:.1f} GiB: make rollouts longer (n_steps), or give an eval_env and "
                "record_training=False",
                UserWarning,
                stacklevel=2,
            )


def _new_file(path: PathLike) -> EpisodeFile:
    """Return a new file; an error now, not after hours of training, if it cannot be written."""
    name = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"path={name!r}: its folder does not exist, make it first")
    if os.path.exists(name):
        raise FileExistsError(f"path={name!r} exists already: remove it, or choose another name")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"path={name!r}: its folder is not writable, choose another one")
    return EpisodeFile(path, patient=True)


def _warn_of_in_sample(horizon: int | None) -> None:
    unknown = (
        " The training env names no time limit: long episodes, which are still under way at an "
        "evaluation, are missing from it, and values are too low if long episodes are good ones."
    )
    warnings.warn(
        "OPECallback without eval_env evaluates the policy with the episodes it is trained on "
        "(in-sample): values are optimistic, and intervals too narrow."
        f"{unknown if horizon is None else ''} Give an eval_env",
        UserWarning,
        stacklevel=4,
    )
