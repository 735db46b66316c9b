"""Tune PPO by values that cost no episode; the added lines are marked.

Each evaluation of a trial tells the pruner what the policy is worth, and the trial's result is the
value of its best policy, corrected for having been chosen. Every step of the environment is one of
training.

    pip install -e ".[sb3,optuna]" -c constraints.txt
    python examples/optuna_ppo.py --trials 20
"""

import argparse

import optuna
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from wrappers.sb3 import OPECallback  # added

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("--trials", type=int, default=20)
parser.add_argument("--timesteps", type=int, default=20_480, help="of a trial")
parser.add_argument("--eval-freq", type=int, default=4096, help="timesteps")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)  # networks this small gain nothing from more


class Report(BaseCallback):
    """Tells a trial the latest value, and ends the training if the trial is to be pruned."""

    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__()
        self.trial = trial

    def _on_step(self) -> bool:
        latest = self.parent.evaluations[-1]  # added: its error is latest.standard_error
        self.trial.report(latest.value, latest.timesteps)
        return not self.trial.should_prune()


def objective(trial: optuna.Trial) -> float:
    """Train with the settings of a trial; return the value of its best policy."""
    model = PPO(
        "MlpPolicy",
        make_vec_env(args.env, 8, seed=args.seed),
        n_steps=trial.suggest_categorical("n_steps", [64, 128, 256]),
        learning_rate=trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
        gamma=trial.suggest_categorical("gamma", [0.9, 0.98, 0.99, 0.999]),
        ent_coef=trial.suggest_float("ent_coef", 1e-6, 0.1, log=True),
        batch_size=256,
        seed=args.seed,
        device="cpu",
    )
    ope = OPECallback(  # added: no environment, no episode
        eval_freq=args.eval_freq, callback_after_eval=Report(trial), verbose=0
    )
    model.learn(args.timesteps, callback=ope)
    if trial.should_prune():
        raise optuna.TrialPruned
    trial.set_user_attr("standard_error", ope.best.estimate.standard_error)  # added
    return ope.best.value  # added


study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=args.seed),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
)
optuna.logging.set_verbosity(optuna.logging.WARNING)
study.optimize(objective, args.trials)
pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
best = study.best_trial
error = best.user_attrs["standard_error"]
print(
    f"{len(study.trials)} trials, {pruned} pruned; the best is worth {best.value:.1f} ± {error:.1f}"
)
print(best.params)
