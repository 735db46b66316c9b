"""Free evaluation inside Stable-Baselines3: `model.learn(..., callback=OPECallback())`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback

from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import estimator_names
from ope_gym.evaluation import evaluate
from ope_gym.files import PathLike
from ope_gym.online import FreeEstimate
from ope_gym.online.fresh import fresh_value
from ope_gym.options import Options
from ope_gym.policies import Policy
from ope_gym.report.free_values import in_words
from ope_gym.results import Evaluation
from wrappers.recording.file import EpisodeFile, check_path
from wrappers.sb3.checkpoints import BestCheckpoint, Checkpoints, Progress
from wrappers.sb3.closing import closing_lines, leading, no_value, weighted_line
from wrappers.sb3.environments import check_not_normalised, horizon_of, rescales_rewards
from wrappers.sb3.episodes import HeldOutEpisodes, TrainingEpisodes
from wrappers.sb3.free import FreeSteps
from wrappers.sb3.fresh import Played, PredictedEpisodes
from wrappers.sb3.logger import EvaluationLog
from wrappers.sb3.saved import Patience, SavedModels, make_folder, save_evaluations
from wrappers.sb3.schedule import affordable_spacing
from wrappers.sb3.snapshots import snapshot, why_no_snapshot, why_not_fixed, why_only_fresh

__all__ = ["OPECallback"]

_LARGE = 2**30  # bytes of a record that the user should be warned of
_FEWEST = 2  # evaluations of a short training, whatever the budget: one alone shows no progress
_OFTEN, _POINTS = 10_000, 50  # timesteps between evaluations, and how many of these are enough
_SHORT = 256  # timesteps of a rollout whose policy is looked at only when it is evaluated


class OPECallback(EventCallback):
    """Evaluates the policy of a model while it trains, from the steps that it trains on anyway.

        model.learn(100_000, callback=OPECallback())

    At the end of a rollout, the policy that collected it gets a provisional value, from this
    rollout and those before it; it is in `evaluations`. A few rollouts later, when more is known,
    the same policy gets a settled value; it is in `settled`, at the timesteps of the policy. Both
    go to the logger of the model. No step of an environment is taken for them. This works for PPO,
    A2C and others with an `ActorCriticPolicy`, such as sb3-contrib's TRPO.

    With `eval_env` the policy also plays fresh episodes there, which are pooled with the free
    evidence. For all other algorithms (DQN, SAC, TD3, DDPG, ...) only these count.

    Args:
        eval_env: A Gymnasium environment or a VecEnv, not the one of the training.
        callback_on_new_best: Called when there is a new best policy.
        callback_after_eval: Called after each evaluation.
        n_eval_episodes: Fresh episodes at each evaluation, on `eval_env`; where nothing else
            counts, 10 are enough for a green value.
        eval_freq: Timesteps between evaluations, at least; they happen at the ends of rollouts. By
            default 10,000, or a fiftieth of the training if that is more, or what `budget` asks
            for. The last evaluation comes at the end of the training in any case.
        budget: About what share of the training's CPU time evaluations may take, if eval_freq is
            not given. It is counted in steps and updates, not timed: the same run is evaluated at
            the same timesteps on every machine.
        log_path: A folder for `evaluations.npz`, in the layout of EvalCallback.
        best_model_save_path: A folder for `best_model.zip`.
        deterministic: Whether fresh episodes take the most probable action, or the mean. That is
            another policy than the one that trains, so they are not pooled with the free evidence.
        select: What makes a policy the best: "lower", the lower end of its interval, or "value".
        stop_after: Evaluations without an improvement of more than the error after which the
            training stops; None for never.
        gamma: Discount of the value; 1 gives the return that SB3 reports.
        level: Confidence level of the intervals.
        estimators: Names from `ope_gym.ESTIMATORS`: at the end the recorded episodes are also
            evaluated with importance weights. The result is in `report`, and in TensorBoard.
        window: Number of latest policies whose episodes that report uses.
        record_training: Whether to keep the episodes of PPO and A2C in training, with a snapshot
            for each rollout; by default only if they are saved to a file, or are all that
            `estimators` have.
        epsilon: Exploration rate of DQN in fresh episodes; by default that of the training.
        path: A file to which finished episodes are appended as they end. A process that is killed
            loses only the open episodes. A full disk is a warning: the episodes stay in memory,
            and go to the file as soon as there is room.
        append: Whether to continue an existing file; see `RecordTrajectories`.
        seed: Seed of the fresh episodes; None for that of the model, if it has one.
        max_steps: Length above which a fresh episode is an error, if no time limit is known.
        verbose: 0 prints nothing, 1 a line for each evaluation and the result at the end.
    """

    def __init__(
        self,
        eval_env: Any = None,
        *,
        callback_on_new_best: BaseCallback | None = None,
        callback_after_eval: BaseCallback | None = None,
        n_eval_episodes: int = 5,
        eval_freq: int | None = None,
        budget: float = 0.03,
        log_path: PathLike | None = None,
        best_model_save_path: PathLike | None = None,
        deterministic: bool = False,
        select: str = "lower",
        stop_after: int | None = None,
        gamma: float = 1.0,
        level: float = 0.95,
        estimators: str | Sequence[str] | None = None,
        window: int = 20,
        record_training: bool | None = None,
        epsilon: float | None = None,
        path: PathLike | None = None,
        append: bool | None = None,
        seed: int | None = None,
        max_steps: int = 100_000,
        verbose: int = 1,
    ) -> None:
        super().__init__(callback_after_eval, verbose)
        _check_counts(
            n_eval_episodes=n_eval_episodes,
            eval_freq=eval_freq,
            stop_after=stop_after,
            window=window,
            max_steps=max_steps,
        )
        _check_budget(budget)
        if isinstance(eval_env, str):
            raise TypeError(f"eval_env is {eval_env!r}: give the environment, gym.make(...)")
        if deterministic and eval_env is None:
            raise ValueError(
                "deterministic=True without eval_env: the steps of the training tell the value of "
                "the policy that trains, which draws its actions. Give an eval_env, on which the "
                "deterministic one can be played"
            )
        names = None if estimators is None else estimator_names(estimators)
        if record_training is None:
            record_training = path is not None or (names is not None and eval_env is None)
        self.evaluations: list[FreeEstimate] = []  # provisional, one for each evaluation
        self.settled: list[FreeEstimate] = []
        self.fresh: list[FreeEstimate] = []  # from fresh episodes alone
        self.report: Evaluation | None = None
        self.callback_on_new_best = callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self._eval_env, self._n_eval_episodes = eval_env, n_eval_episodes
        self._eval_freq, self._budget = eval_freq, budget
        self._every = eval_freq or _OFTEN  # timesteps
        self._deterministic = deterministic
        self._select, self._stop_after = select, stop_after
        self._checkpoints, self._progress = Checkpoints(select), Progress(stop_after)
        self._estimators, self._window = names, window
        options = Options(gamma=gamma, level=level)
        self._gamma, self._level = options.gamma, options.level
        self._record_training, self._epsilon = record_training, epsilon
        self._file = None
        if path is not None:  # an error now, not after hours of training
            check_path(path, append, stacklevel=3)
            self._file = EpisodeFile(path, patient=True)
        self._log_path = None if log_path is None else os.fspath(log_path)
        self._patience = Patience()
        self._models = SavedModels(best_model_save_path, self._patience)
        self._seed, self._max_steps = seed, max_steps
        self._only_fresh = ""  # why, if so
        self._free: FreeSteps | None = None
        self._held_out: HeldOutEpisodes | None = None
        self._predicted: PredictedEpisodes | None = None
        self._training: TrainingEpisodes | None = None
        self._policy: Policy | None = None  # the current one
        self._played: list[Played] = []
        self._evaluated_at = 0  # timesteps
        self._acting = False  # the policy followed is the current one
        self._stop = False
        self._ended: list[BaseCallback] = []  # those that ended the training
        self._warned = False
        self._log = EvaluationLog(self._level, self._patience)

    # The record --------------------------------------------------------------------------

    @property
    def held_out(self) -> TrajectoryBuffer:
        """The fresh episodes played on `eval_env`, where their probabilities are known."""
        return self._held_out.session.buffer if self._held_out else TrajectoryBuffer()

    @property
    def training(self) -> TrajectoryBuffer:
        """The episodes that the model trained on, if they are recorded."""
        return self._training.session.buffer if self._training else TrajectoryBuffer()

    @property
    def policy(self) -> Policy:
        """The snapshot of the current policy."""
        if self._policy is None:
            raise RuntimeError(
                "there is no policy before learn: call model.learn first. For SAC, TD3 and "
                "others whose probabilities are not known there is none at all"
            )
        return self._policy

    def trajectories(self) -> Trajectories:
        """Return all recorded episodes; `select(held_out=True)` gives those the learner never saw.

        After `learn` the last of their policies is the current one.
        """
        return self.training.view().merge(self.held_out)

    @property
    def best(self) -> BestCheckpoint | None:
        """The best policy so far, its value corrected for having been chosen."""
        return self._checkpoints.best()

    @property
    def best_mean_reward(self) -> float:
        """The value of the best policy, under EvalCallback's name."""
        return self._checkpoints.estimate.value if len(self._checkpoints) else -np.inf

    @property
    def last_mean_reward(self) -> float:
        """The latest value, under EvalCallback's name."""
        return self._asked()[-1].value if self.evaluations else -np.inf

    def _asked(self) -> list[FreeEstimate]:
        """Return the values of the policy that was asked for."""
        return self.fresh if self._deterministic else self.evaluations

    # Called by SB3 -----------------------------------------------------------------------

    def _init_callback(self) -> None:
        """Check model and environments before training begins."""
        model = self.model
        known = self._free or self._held_out or self._predicted or self._training
        if known is not None:
            if known.model is not model:
                raise ValueError("this OPECallback belongs to another model: make a new one")
            return
        self._only_fresh = why_only_fresh(model) or rescales_rewards(self.training_env)
        if self._only_fresh and self._eval_env is None:
            raise ValueError(
                f"OPECallback() with {type(model).__name__}: {self._only_fresh}. So only fresh "
                "episodes can evaluate it: give an eval_env, as in OPECallback(eval_env)"
            )
        self._open_record()
        if not self._only_fresh:
            self._free = self._new_steps()
        make_folder(self._log_path, self._patience)
        make_folder(self._models.folder, self._patience)
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(model)
        if self._only_fresh and self.verbose:
            name = type(model).__name__
            print(f"Only the fresh episodes count with {name}: {self._only_fresh}.")

    def _open_record(self) -> None:
        """Prepare what plays fresh episodes, and what records those of the training."""
        model, missing = self.model, why_no_snapshot(self.model)
        changing = missing or why_not_fixed(model)
        recorded = self._record_training and not changing
        played = self._eval_env is not None and not missing and not self._deterministic
        if self._file is not None and not (recorded or played):
            instead = "" if missing else ", or leave deterministic=True out"
            if not missing and self._eval_env is None:
                instead = ", or give an eval_env"
            raise ValueError(
                "the file of path would stay empty: "
                f"{changing or 'record_training=False'}, so that no episode can be recorded with "
                f"the probabilities of its actions. Leave path out{instead}"
            )
        if recorded:
            check_not_normalised(self.training_env, "the training env", rewards=True)
        if played:
            self._held_out = HeldOutEpisodes(
                self._eval_env, model, self._seed, self._max_steps, self._file
            )
        elif self._eval_env is not None:
            self._predicted = PredictedEpisodes(
                self._eval_env,
                model,
                self._seed,
                self._max_steps,
                deterministic=self._deterministic,
                epsilon=self._epsilon,
                gamma=self._gamma,
            )
        if recorded:
            self._training = TrainingEpisodes(model, horizon_of(self.training_env), self._file)

    def _new_steps(self) -> FreeSteps:
        return FreeSteps(self.model, gamma=self._gamma, level=self._level, seed=self._seed or 0)

    def _on_training_start(self) -> None:
        self._stop, self._ended = False, []
        self._every = self._spacing()
        if self.num_timesteps == 0:  # also a second `learn` that counts from the beginning
            self._evaluated_at = 0
            self._checkpoints.begin_again()
            self._models.hold(set())
            self._progress = Progress(self._stop_after)
            if self._free is not None and self.evaluations:
                self._free = self._new_steps()
        if self._free is not None:
            self._free.begin()
        if self._training is not None:
            self._training.begin()
        if self._file is not None:
            self._file.write()

    def _on_rollout_start(self) -> None:
        model: Any = self.model
        self._acting = False
        if self._training is not None:
            changing = why_not_fixed(model)
            if changing:
                raise ValueError(f"{changing}: use OPECallback(record_training=False)")
            self._take_snapshot()
            self._training.follow(self.policy)
            self._warn_if_large()
        if self._free is not None:
            size = model.n_steps * model.n_envs
            first = self._policy is None  # a snapshot that does not fit is an error at once
            if first or size >= _SHORT or self._is_due(self.num_timesteps + size):
                self._follow(anew=self._training is None)

    def _on_step(self) -> bool:
        if self._training is not None:
            self._training.step(self.locals)
        if self._free is not None:
            self._free.step(self.locals)
        return not self._stop

    def _on_rollout_end(self) -> None:
        self._settle()
        last = self.num_timesteps >= self.model._total_timesteps  # the final policy comes later
        if not last and self._is_due(self.num_timesteps):
            self._evaluate()
        self._acting = False  # SB3 trains now

    def _on_training_end(self) -> None:
        try:
            self._evaluate()
            self._settle()
            if self._training is not None and self._held_out is None:
                self.training.add_policy(self.policy)  # it plays no episode, but belongs there
            self._close()
        finally:
            if self._file is not None:
                self._file.close()

    # Evaluation --------------------------------------------------------------------------

    def _is_due(self, timesteps: int) -> bool:
        return timesteps - self._evaluated_at >= self._every

    def _spacing(self) -> int:
        """Return the timesteps between evaluations, at least."""
        if self._eval_freq is not None:
            return self._eval_freq
        model: Any = self.model
        usual = max(_OFTEN, int(model._total_timesteps) // _POINTS)
        if self._free is None:
            return usual
        left = int(model._total_timesteps) - self.num_timesteps
        affordable = affordable_spacing(model, self._free.free.horizon, left, self._budget)
        spacing = min(affordable, -(-left // _FEWEST))
        share = f"{100 * self._budget:.0f} % of the CPU time"
        why = f"so that they take about {share}"
        if spacing < affordable:
            why = f"{_FEWEST} in all, which take more than {share}"
        spacing -= int(model.n_steps * model.n_envs) // 2  # the nearest rollout
        if spacing > usual and self.verbose:
            print(
                f"Evaluations come about every {spacing:,} timesteps, {why}: eval_freq sets the "
                "timesteps between them"
            )
        return max(usual, spacing)

    def _take_snapshot(self) -> None:
        self._policy = snapshot(self.model, epsilon=self._epsilon)

    def _follow(self, *, anew: bool = True) -> None:
        """Tell the free evaluation which policy acts now."""
        assert self._free is not None
        if anew:
            self._take_snapshot()
        self._free.follow(self.policy)
        self._acting = True

    def _evaluate(self) -> None:
        """Value the current policy, and say so everywhere; nothing while there is no episode."""
        step = self._evaluated_at = self.num_timesteps
        if self._free is not None:
            if not self._acting:
                self._follow()
        elif not why_no_snapshot(self.model):
            self._take_snapshot()
        played = self._play()
        shown = {}
        if played is not None:
            self._played.append(played)
            seen = np.concatenate([p.returns for p in self._played])
            shown["fresh"] = fresh_value(played.returns, step, self._level, seen)
            self.fresh.append(shown["fresh"])
        estimate = self._value(step, played) or shown.get("fresh")
        if estimate is None:
            return
        self.evaluations.append(estimate)
        self._log.add(
            self.logger, shown if self._only_fresh else {"provisional": estimate, **shown}
        )
        self._choose(shown["fresh"] if self._deterministic else estimate)
        if self._log_path is not None:
            with self._patience.writing(os.path.join(self._log_path, "evaluations.npz")):
                save_evaluations(self._log_path, self.evaluations, self.settled, self._played)
        self._call(self.callback)

    def _play(self) -> Played | None:
        if self._held_out is not None:
            return self._held_out.play(self.policy, self._n_eval_episodes, self._gamma)
        if self._predicted is not None:
            return self._predicted.play(self._n_eval_episodes)
        return None

    def _value(self, step: int, played: Played | None) -> FreeEstimate | None:
        """Return the provisional value."""
        if self._free is None:
            return None
        pooled = None if played is None or self._deterministic else played.returns
        return self._free.evaluate(step, pooled)

    def _settle(self) -> None:
        """Take in the settled values of earlier policies."""
        for settled in self._free.settle() if self._free is not None else ():
            self.settled.append(settled)
            self._log.add(self.logger, {"settled": settled})
            if self._deterministic:
                continue
            self._progress.revise(settled)
            if self._checkpoints.revise(settled):
                leader = self._checkpoints.estimate
                self._models.promote(leader.timesteps)
                if self.verbose and leader.verdict.colour != "red":
                    after = f"the policy after {leader.timesteps:,} timesteps"
                    print(f"Now that more is known, {after} is the one to keep")
                self._tell_of_best()
            self._models.hold(self._checkpoints.contenders())

    def _choose(self, estimate: FreeEstimate) -> None:
        """Compare a new policy with the best so far, and with those that the run began from."""
        best = self._checkpoints.add(estimate)
        self._models.keep(self.model, estimate.timesteps, best=best, pending=self._free is not None)
        self._models.hold(self._checkpoints.contenders())
        if self.verbose:
            first = len(self._checkpoints) == 1
            new = leading(estimate, self._checkpoints.highest) if best and not first else ""
            print(f"{estimate.timesteps:,} timesteps: {in_words(estimate, self._level)}{new}")
        if best:
            self._tell_of_best()
        if self._progress.is_over(estimate) and not self._stop:
            self._stop = True
            if self.verbose:
                print(
                    f"No improvement beyond the error in {self._progress.idle} evaluations "
                    f"(stop_after={self._stop_after}): the training stops"
                )

    def _tell_of_best(self) -> None:
        self._call(self.callback_on_new_best)

    def _call(self, callback: BaseCallback | None) -> None:
        """Call a callback, unless it has ended this training already."""
        if callback is not None and callback not in self._ended and not callback.on_step():
            self._ended.append(callback)
            self._stop = True

    # The end -----------------------------------------------------------------------------

    def _close(self) -> None:
        """Say what the run came to; with `estimators` also evaluate the recorded episodes."""
        data = self._data()
        if self._estimators is not None and data is not None and len(data):
            self.report = evaluate(data, self.policy, self._estimators, gamma=self._gamma)
            settings = {
                "algorithm": type(self.model).__name__,
                "gamma": self._gamma,
                "n_eval_episodes": self._n_eval_episodes,
                "window": self._window,
            }
            self._log.report(
                self.logger, self.report, data, self.policy, self.num_timesteps, settings
            )
        if not self.verbose:
            return
        if not self.evaluations:
            print(no_value(self.num_timesteps))
            return
        regime = "" if self._only_fresh else "in-sample"
        lines = closing_lines(
            self._asked()[-1],
            self.best,
            level=self._level,
            regime=regime,
            deterministic=self._deterministic,
            saved=self._models.where,
            select=self._select,
        )
        print("\n".join(lines))
        if self.report is not None:
            print(f"{weighted_line(self._free is not None)}\n{self.report}")

    def _data(self) -> Trajectories | None:
        """Return the episodes to weigh."""
        if self._held_out is not None:
            return self.held_out.select(last=self._window)
        return None if self._training is None else self._training.settled(last=self._window)

    def _warn_if_large(self) -> None:
        """Warn once: short rollouts leave many snapshots, and images are large."""
        assert self._training is not None
        if not self._warned and (size := self._training.n_bytes()) > _LARGE:
            self._warned = True
            policies, steps = len(self.training.policies), self._training.session.steps
            warnings.warn(
                f"{policies:,} snapshots, one for each rollout, and {steps:,} steps now take "
                f"{size / 2**30:.1f} GiB: make rollouts longer (n_steps), or leave out path and "
                "record_training",
                UserWarning,
                stacklevel=2,
            )


def _check_budget(budget: Any) -> None:
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise ValueError(f"budget={budget!r} must be a number above 0: 0.03 stands for 3 %")


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
