"""Off-policy evaluation inside Stable-Baselines3: `model.learn(..., callback=OPECallback(...))`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

import ope_gym
from ope_gym import Evaluation
from ope_gym.data.blocks import PathLike
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.options import check_options
from ope_gym.policies.closed_form import Policy, policy_to_arrays
from wrappers.sb3.environments import horizon_of, refuse_normalised
from wrappers.sb3.episodes import HeldOutEpisodes, TrainingEpisodes, check, observed
from wrappers.sb3.file import RecordFile
from wrappers.sb3.logger import EvaluationLog
from wrappers.sb3.snapshots import normaliser, refuse, snapshot

__all__ = ["OPECallback"]

_TIMESTEPS = 10_000  # between evaluations, unless told otherwise
_LARGE = 2**30  # bytes of records, of which the user should know


class OPECallback(BaseCallback):
    """Evaluates the policy of a model while it trains: PPO, A2C and DQN.

    With `eval_env`, each evaluation plays a few episodes of the current policy there. The learner
    never sees them, and those of earlier evaluations are used again with importance weights: the
    estimate rests on all of them. Without it, the episodes that the model trains on are evaluated;
    such values are optimistic, and are labelled so. They leave out the episodes begun less than a
    time limit ago: of those only the short ones have ended.

    What PPO and A2C do in training is recorded in full: a snapshot for each rollout, also for
    episodes that go on over several. DQN changes its policy every few steps and its ε at every
    one, and a VecNormalize that is still learning changes what the policy sees at every step. Of
    these only the held-out episodes are recorded, which are played by one frozen policy each.

    Args:
        eval_env: A Gymnasium environment or a VecEnv, apart from that of the training.
        n_eval_episodes: Episodes played there at each evaluation.
        eval_every: Rollouts between evaluations. A rollout is n_steps of every sub-env with PPO
            and A2C (by default 2,048 and 5), and train_freq steps with DQN (by default 4). None
            for about 10,000 timesteps.
        window: Evaluate with the episodes of so many latest policies; the cost of an evaluation
            grows with the square of it.
        estimators: Names from `ope_gym.ESTIMATORS`.
        gamma: Discount of the value; 1 for the return that SB3 reports.
        record_training: Whether to keep the episodes of PPO and A2C in training, with a snapshot
            for each rollout; by default only if they are evaluated or go to a file.
        epsilon: Of the policies of DQN that are evaluated; by default its exploration rate then.
        path: A new file for everything: written now and then, at the end of `learn`, and when the
            process ends after an error or Ctrl-C.
        seed: Of the held-out episodes; None for that of the model, if it has one.
        max_steps: Of a held-out episode where no time limit is known; a longer one is an error.
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
        checked = check_options(estimators, gamma, 1.0, "ess-t", 0.95, 0, 2, None, None)
        self._options: dict[str, Any] = {"estimators": checked.estimators, "gamma": checked.gamma}
        self._record_training = record_training
        self._epsilon = epsilon
        self._file = None if path is None else RecordFile(path, self.trajectories)
        self._seed = seed
        self._max_steps = max_steps
        self._held_out: HeldOutEpisodes | None = None
        self._training: TrainingEpisodes | None = None
        self._policy: Policy | None = None  # the current one
        self._untried: Any = None  # what the model sees when a new snapshot first acts
        self._evaluated_at: int | None = None  # rollouts so far, or timesteps
        self._rollouts = 0
        self._bytes = 0  # of a snapshot
        self._warned = False
        self._log = EvaluationLog()

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
        """Everything recorded; `select(held_out=True)` gives what the learner never saw.

        After `learn` the last of its policies is the current one.
        """
        return self.training.view().merge(self.held_out)

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
        recorded = self._record_training and not obstacle
        if recorded:
            refuse_normalised(self.training_env, "the training env", rewards=True)
        if self._eval_env is not None:
            self._held_out = HeldOutEpisodes(self._eval_env, model, self._seed, self._max_steps)
        if recorded:
            fresh = self._held_out
            horizon = horizon_of(self.training_env) if fresh is None else fresh.horizon
            if fresh is None:
                _warn_of_in_sample(horizon)
            self._training = TrainingEpisodes(model, horizon)

    def _on_training_start(self) -> None:
        if self.num_timesteps == 0:  # a second `learn` counts from the beginning
            self._evaluated_at = None
        if self._training is not None:
            self._training.begin()
        if self._file is not None:
            self._file.open()

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
            if not isinstance(self.model, DQN):
                self._untried = observed(self.model, self.model._last_obs)
        if due:
            self._evaluate()

    def _on_step(self) -> bool:
        if self._training is not None:
            self._training.step(self.locals)
        elif self._untried is not None:
            check(self.policy, self._untried, self.locals)
            self._untried = None
        return True

    def _on_training_end(self) -> None:
        try:
            self._take_snapshot()
            if self._held_out is None:  # nobody plays it, but it is part of the record
                self.training.add_policy(self.policy)
            self._close()
        finally:
            if self._file is not None:
                self._file.close(self._steps())

    def _close(self) -> None:
        """The last evaluation, with a report; learning that goes on begins where this one ends."""
        self._evaluated_at = self._now()
        evaluation = self._evaluate()
        if evaluation is None:
            return
        settings = {
            "algorithm": type(self.model).__name__,
            "gamma": self._options["gamma"],
            "n_eval_episodes": self._n_eval_episodes,
            "window": self._window,
        }
        self._log.report(
            self.logger, evaluation, self._data(), self.policy, self.num_timesteps, settings
        )
        if self.verbose:
            print(f"The policy after {self.num_timesteps:,} timesteps:\n{evaluation}")

    # Evaluating --------------------------------------------------------------------------

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
        """The value of the current policy; None while there is no episode."""
        step = self.num_timesteps
        if self._held_out is not None:
            self._held_out.play(self.policy, self._n_eval_episodes)
        data = self._data()
        if not len(data):
            return None
        evaluation = ope_gym.evaluate(data, self.policy, **self._options)
        self.evaluations.append((step, evaluation))
        self._log.add(self.logger, evaluation, step, held_out=self._held_out is not None)
        if self._file is not None:
            self._file.grow(self._steps())
        return evaluation

    def _data(self) -> Trajectories:
        """What an evaluation rests on."""
        if self._held_out is not None:
            return self.held_out.select(last=self._window)
        assert self._training is not None  # else refused
        return self._training.settled(last=self._window)

    def _steps(self) -> int:
        parts = (self._held_out, self._training)
        return sum(part.recorder.steps for part in parts if part is not None)

    def _warn_if_large(self) -> None:
        """Once: short rollouts leave many snapshots, and images are large."""
        assert self._training is not None
        policies, steps = self.training.policies, self._training.recorder.steps
        if self._bytes == 0:
            arrays = policy_to_arrays(policies[0])[1].values()
            self._bytes = sum(array.nbytes for array in arrays)
        size = len(policies) * self._bytes + steps * _row_bytes(self.training_env)
        if not self._warned and size > _LARGE:
            self._warned = True
            warnings.warn(
                f"{len(policies):,} snapshots, one for each rollout, and {steps:,} steps now take "
                f"{size / 2**30:.1f} GiB: make rollouts longer (n_steps), or give an eval_env and "
                "record_training=False",
                UserWarning,
                stacklevel=2,
            )


def _row_bytes(env: Any) -> int:
    """Of a step: observation, action, and five numbers."""
    boxes = (env.observation_space, env.action_space)
    sizes = (math.prod(box.shape or ()) * np.dtype(box.dtype).itemsize for box in boxes)
    return int(40 + sum(sizes))


def _warn_of_in_sample(horizon: int | None) -> None:
    unknown = (
        " The training env names no time limit: long episodes, which are under way at an "
        "evaluation, are missing from it, and values are too low where they are the better ones."
    )
    warnings.warn(
        "OPECallback without eval_env evaluates the policy with the episodes it is trained on "
        "(in-sample): values are optimistic, and intervals too narrow."
        f"{unknown if horizon is None else ''} Give an eval_env",
        UserWarning,
        stacklevel=4,
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
