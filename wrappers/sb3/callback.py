"""Free evaluation inside Stable-Baselines3: `model.learn(..., callback=OPECallback())`."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from ope_gym.arguments import whole
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.files import PathLike
from ope_gym.online import FreeEstimate
from ope_gym.online.fresh import fresh_value
from ope_gym.options import Options
from ope_gym.policies.acting import ActingPolicy
from ope_gym.report.free_values import in_words
from ope_gym.results import Evaluation
from wrappers.checkpoints import BestCheckpoint, Checkpoints
from wrappers.sb3.closing import WEIGHTED, closing_lines, no_value
from wrappers.sb3.environments import rescales_rewards
from wrappers.sb3.episodes import FreshEpisodes, Played, Record, Recording
from wrappers.sb3.logger import EvaluationLog
from wrappers.sb3.saved import Patience, SavedModels, make_folder, save_evaluations
from wrappers.sb3.schedule import Schedule
from wrappers.sb3.snapshots import snapshot, why_no_snapshot
from wrappers.sb3.steps import FreeSteps

__all__ = ["OPECallback"]

_SHORT = 256  # timesteps of a rollout whose policy is looked at only when it is evaluated


class OPECallback(EventCallback):
    """Evaluates the policy of a model while it trains, from the steps that it trains on anyway.

        model.learn(100_000, callback=OPECallback())

    At the end of a rollout, the policy that collected it gets a provisional value, from its steps
    and those before; it is in `evaluations`. When more is known, the same policy gets a settled
    value; it is in `settled`, at the timesteps of the policy. Both go to the logger of the model.
    No step of an environment is taken for them; what they rest on, the first line says. With
    `eval_env` the policy also plays fresh episodes there, which are pooled with the rest.

    Args:
        eval_env: A Gymnasium environment or a VecEnv, not the one of the training.
        callback_on_new_best: Called when there is a new best policy.
        callback_after_eval: Called after each evaluation.
        n_eval_episodes: Fresh episodes at each evaluation, on `eval_env`.
        eval_freq: Timesteps between evaluations, at least; they happen at the ends of rollouts, and
            at the end of the training. By default 10,000, or a fiftieth of the training if that is
            more, or as many as keep the callback at about 3 % of its CPU time, as measured.
        log_path: Folder for `evaluations.npz`, in the layout of EvalCallback.
        best_model_save_path: Folder for `best_model.zip`, and for the statistics of a VecNormalize.
        deterministic: Whether to value the policy that always takes the most probable action, or
            the mean, in place of the one that trains.
        stop_after: Evaluations without an improvement of more than the error after which the
            training stops; None for never.
        gamma: Discount of the value; 1 gives the return that SB3 reports.
        level: Confidence level of the intervals.
        path: File to which episodes are appended as they end. A killed process loses only the open
            ones; while the disk is full, they wait in memory.
        recording: What else is recorded, and weighed at the end.
        seed: Seed of the fresh episodes; None for that of the model, if it has one.
        verbose: 0 prints nothing, 1 a line for each evaluation and the result at the end.
    """

    def __init__(
        self,
        eval_env: Any = None,
        *,
        callback_on_new_best: BaseCallback | None = None,
        callback_after_eval: BaseCallback | None = None,
        n_eval_episodes: int = 10,
        eval_freq: int | None = None,
        log_path: PathLike | None = None,
        best_model_save_path: PathLike | None = None,
        deterministic: bool = False,
        stop_after: int | None = None,
        gamma: float = 1.0,
        level: float = 0.95,
        path: PathLike | None = None,
        recording: Recording | None = None,
        seed: int | None = None,
        verbose: int = 1,
        **unknown: NoReturn,
    ) -> None:
        super().__init__(callback_after_eval, verbose)
        _check_names(unknown)
        counts = {"n_eval_episodes": n_eval_episodes, "eval_freq": eval_freq}
        for name, count in (counts | {"stop_after": stop_after}).items():
            if count is not None:
                whole(name, count)
        if isinstance(eval_env, str):
            raise TypeError(f"eval_env is {eval_env!r}: give the environment, gym.make(...)")
        if not isinstance(recording, Recording | None):
            raise TypeError(f"recording is {recording!r}: give Recording(...)")
        self.evaluations: list[FreeEstimate] = []  # provisional, one for each evaluation
        self.settled: list[FreeEstimate] = []
        self.fresh: list[FreeEstimate] = []  # from fresh episodes alone
        self.report: Evaluation | None = None
        self.callback_on_new_best = callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self._eval_env, self._n_eval_episodes = eval_env, n_eval_episodes
        self._schedule = Schedule(eval_freq)
        self._deterministic, self._stop_after, self._seed = deterministic, stop_after, seed
        options = Options(gamma=gamma, level=level)
        self._gamma, self._level = options.gamma, options.level
        self._checkpoints = Checkpoints()
        self._reference: FreeEstimate | None = None  # the latest that was an improvement
        self._idle = 0  # evaluations since
        self._record = Record(path, recording or Recording())
        self._log_path = None if log_path is None else os.fspath(log_path)
        self._patience = Patience()
        self._models = SavedModels(best_model_save_path, self._patience)
        self._log = EvaluationLog(self._level, self._patience)
        self._steps: FreeSteps | None = None
        self._player: FreshEpisodes | None = None
        self._known_model: Any = None
        self._about = ""  # what tells the value, and what it costs
        self._played: list[Played] = []
        self._acting = False  # whether the policy followed is the current one
        self._stop, self._running = False, False
        self._ended: list[BaseCallback] = []  # those that ended the training

    # The record --------------------------------------------------------------------------

    @property
    def held_out(self) -> TrajectoryBuffer:
        """The fresh episodes played on `eval_env`, where their probabilities are known."""
        return self._record.fresh

    @property
    def training(self) -> TrajectoryBuffer:
        """The episodes that the model trained on, if they are recorded."""
        return self._record.training

    @property
    def policy(self) -> ActingPolicy:
        """A snapshot of the policy as it is now."""
        if self._known_model is None:
            raise RuntimeError("there is no policy before learn: call model.learn first")
        return snapshot(self._known_model)

    def trajectories(self) -> Trajectories:
        """Return all recorded episodes; `select(held_out=True)` gives those the learner never saw.

        After `learn` the last of their policies is the current one.
        """
        return self.training.view().merge(self.held_out)

    @property
    def best(self) -> BestCheckpoint | None:
        """The best policy so far."""
        return self._checkpoints.best()

    @property
    def best_mean_reward(self) -> float:
        """The value of the best policy, under EvalCallback's name."""
        return self._checkpoints.estimate.value if len(self._checkpoints) else -np.inf

    @property
    def last_mean_reward(self) -> float:
        """The latest value, under EvalCallback's name."""
        return self.evaluations[-1].value if self.evaluations else -np.inf

    # Called by SB3 -----------------------------------------------------------------------

    def _init_callback(self) -> None:
        """Check model and environments before training begins."""
        model = self.model
        if self._known_model is not None:
            if self._known_model is not model:
                raise ValueError("this OPECallback belongs to another model: make a new one")
            return
        rescaled = rescales_rewards(self.training_env)
        if not rescaled:
            self._steps = self._new_steps()
        self._about = self._evidence(rescaled)
        if self._eval_env is not None:
            self._player = FreshEpisodes(
                self._eval_env,
                model,
                seed=self._seed,
                deterministic=self._deterministic,
                gamma=self._gamma,
            )
        self._record.open(model, self._player, deterministic=self._deterministic)
        make_folder(self._log_path, self._patience)
        make_folder(self._models.folder, self._patience)
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(model)
        self._known_model = model

    def _new_steps(self) -> FreeSteps:
        return FreeSteps(
            self.model,
            gamma=self._gamma,
            level=self._level,
            seed=self._seed or 0,
            deterministic=self._deterministic,
        )

    def _evidence(self, rescaled: str) -> str:
        """Return what tells the value, and what it costs; raise if nothing can."""
        name, unknown = type(self.model).__name__, self._steps.unknown if self._steps else rescaled
        fresh = f"{self._n_eval_episodes} fresh episodes at each evaluation, which cost steps"
        if self._steps is None or (self._deterministic and unknown):
            self._steps = None
            if self._eval_env is None:
                raise ValueError(
                    f"OPECallback() with {name}: {unknown}. So only fresh episodes can tell this "
                    "value: give an eval_env, as in OPECallback(eval_env)"
                )
            return f"Values of {name} come from {fresh}: {unknown}."
        source = f"returns of the training ({unknown})" if unknown else "steps of the training"
        more = "" if self._eval_env is None else f", and from {fresh}"
        return f"Values of {name} come from the {source}, at no extra step{more}."

    def _on_training_start(self) -> None:
        self._stop, self._ended, self._running = False, [], True
        if self.num_timesteps == 0:  # also a second `learn` that counts from the beginning
            self._models.begin_again(self._checkpoints.leader)
            self._checkpoints.begin_again()
            self._reference, self._idle = None, 0
            if self._steps is not None and self.evaluations:
                self._steps = self._new_steps()
        if self._steps is not None:
            self._steps.begin()
        self._record.begin()
        self._schedule.begin(self.model)
        if self.verbose:
            every = self._schedule.every
            print(f"{self._about} Evaluations: at least {every:,} timesteps apart (eval_freq).")

    def _on_rollout_start(self) -> None:
        self._acting = False
        self._record.begin_rollout()
        model: Any = self.model
        if self._steps is not None and isinstance(model, OnPolicyAlgorithm):
            size = model.n_steps * model.n_envs
            first = self.n_calls == 0  # a snapshot that does not fit is an error at once
            if first or size >= _SHORT or self._schedule.due(self.num_timesteps + size):
                self._follow()

    def _on_step(self) -> bool:
        self._record.step(self.locals)
        if self._steps is not None:
            self._steps.step(self.locals)
        return not self._stop

    def _on_rollout_end(self) -> None:
        last = self.num_timesteps >= self.model._total_timesteps  # the final policy comes later
        if not last and self._schedule.due(self.num_timesteps):
            self._evaluate()
        self._settle()
        self._acting = False  # SB3 trains now

    def _on_training_end(self) -> None:
        if not self._running:  # rl-baselines3-zoo ends its first callback once more
            return
        self._running = False
        try:
            self._evaluate(closing=True)
            self._settle()
            self._close()
        finally:
            self._record.close()

    # Evaluation --------------------------------------------------------------------------

    def _follow(self) -> None:
        """Tell the free evaluation which policy acts now."""
        assert self._steps is not None
        self._steps.follow()
        self._acting = True

    def _evaluate(self, *, closing: bool = False) -> None:
        """Value the current policy, and say so everywhere; nothing while there is no episode."""
        step, played = self.num_timesteps, self._play()
        shown = {}
        if played is not None:
            self._played.append(played)
            seen = np.concatenate([p.returns for p in self._played])
            shown["fresh"] = fresh_value(played.returns, step, self._level, seen)
            self.fresh.append(shown["fresh"])
        with self._schedule.evaluating(step):
            estimate = self._value(step, played)
        if estimate is not None:
            shown = {"provisional": estimate, **shown}
        elif played is not None:
            estimate = shown["fresh"]
        else:
            return
        self.evaluations.append(estimate)
        self._log.add(self.logger, shown)
        self._choose(estimate, closing=closing)
        if self._log_path is not None:
            with self._patience.writing(os.path.join(self._log_path, "evaluations.npz")):
                save_evaluations(self._log_path, self.evaluations, self.settled, self._played)
        self._call(self.callback)

    def _play(self) -> Played | None:
        """Play fresh episodes of the policy that is asked for."""
        if self._player is None:
            return None
        known = not why_no_snapshot(self.model)
        policy = snapshot(self.model, deterministic=self._deterministic) if known else None
        return self._player.play(self._n_eval_episodes, policy)

    def _value(self, step: int, played: Played | None) -> FreeEstimate | None:
        """Return the provisional value; fresh episodes count where they are of the same policy."""
        if self._steps is None:
            return None
        if not self._acting:
            self._follow()
        noisy = getattr(self.model, "action_noise", None) is not None  # `predict` leaves it out
        same = played is not None and not (self._steps.unknown and noisy)
        self._steps.hand_over()
        return self._steps.free.evaluate(
            step,
            played.returns if played is not None and same else None,
            deterministic=self._deterministic,
        )

    def _settle(self) -> None:
        """Take in the settled values of earlier policies."""
        if self._steps is None:
            return
        with self._schedule.spending():
            values = self._steps.free.settle()
        for settled in (e for e in values if e.deterministic == self._deterministic):
            self.settled.append(settled)
            self._log.add(self.logger, {"settled": settled})
            if self._checkpoints.revise(settled):
                self._keep_best(settled.timesteps)

    def _choose(self, estimate: FreeEstimate, *, closing: bool) -> None:
        """Compare a new policy with the best so far, and with those that the run began from."""
        changed = self._checkpoints.add(estimate)
        self._models.keep(self.model, estimate.timesteps)
        best = self._checkpoints.leader == estimate.timesteps
        if self.verbose and not closing:
            first, red = len(self._checkpoints) == 1, estimate.verdict.colour == "red"
            new = "" if first or red or not best else " The best so far."
            print(f"{estimate.timesteps:,} timesteps: {in_words(estimate, self._level)}{new}")
        if changed:
            self._keep_best(estimate.timesteps)
        self._models.write(self._checkpoints.held)
        self._stop_without_progress(estimate)

    def _stop_without_progress(self, estimate: FreeEstimate) -> None:
        """End the training after `stop_after` evaluations with no improvement beyond the error."""
        error, before = estimate.standard_error, self._reference
        if self._stop_after is None or not np.isfinite(error):  # nothing can be said
            return
        if before is None or estimate.value - before.value > np.hypot(error, before.standard_error):
            self._reference, self._idle = estimate, 0
            return
        self._idle += 1
        if self._idle >= self._stop_after and not self._stop:
            self._stop = True
            if self.verbose:
                print(
                    f"No improvement beyond the error in {self._idle} evaluations "
                    f"(stop_after={self._stop_after}): the training stops"
                )

    def _keep_best(self, now: int) -> None:
        """Save the model that is the best, now that the value of one at `now` is known."""
        leader = self._checkpoints.estimate
        self._models.promote(self._checkpoints.leader)
        self._models.write(self._checkpoints.held)
        if self.verbose and leader.timesteps != now and leader.verdict.colour != "red":
            after = f"the policy after {leader.timesteps:,} timesteps"
            print(f"Now that more is known, {after} is the one to keep")
        self._call(self.callback_on_new_best)

    def _call(self, callback: BaseCallback | None) -> None:
        """Call a callback, unless it has ended this training already."""
        if callback is not None and callback not in self._ended and not callback.on_step():
            self._ended.append(callback)
            self._stop = True

    # The end -----------------------------------------------------------------------------

    def _close(self) -> None:
        """Say what the run came to; with `estimators` also evaluate the recorded episodes."""
        self._models.write(self._checkpoints.held)
        weighed = self._record.conclude(self.model, self._gamma)
        if weighed is not None:
            self.report, data = weighed
            self._log.report(self.model, self.report, data, gamma=self._gamma)
        if self.verbose:
            print(self.result())

    def result(self) -> str:
        """Return what the run came to, as the training prints it at its end."""
        if not self.evaluations:
            return no_value(self.num_timesteps)
        last, where = self.evaluations[-1], self._models.where
        lines = closing_lines(last, self.best, level=self._level, saved=where)
        return "\n".join([*lines, *([f"{WEIGHTED}\n{self.report}"] if self.report else [])])


def _check_names(names: Iterable[str]) -> None:
    """Raise a TypeError for arguments that do not exist, with what may have been meant."""
    known = [*inspect.signature(OPECallback).parameters][:-1]
    inside = [field.name for field in fields(Recording)]
    for name in names:
        hint = f"there are {', '.join(known)}"
        if name in ("render", "warn"):
            hint = "that of EvalCallback has no counterpart, leave it out"
        elif name in inside:
            hint = f"it belongs to OPECallback(recording=Recording({name}=...))"
        elif close := difflib.get_close_matches(name, known + inside, 1):
            hint = f"did you mean {close[0]}?"
        raise TypeError(f"OPECallback() got an unexpected keyword argument {name!r}: {hint}")
