"""Train an agent, keep what every policy recorded, and evaluate the final policy from it.

Examples:
  python train.py --env CartPole-v1
      PoWER, 10 policies; each plays 30 episodes for the learner and 30 that are
      held out, and the final policy is evaluated from those
  python train.py --env Blackjack-v1 --rollouts 500
      epsilon-greedy Monte-Carlo control
  python train.py --env Acrobot-v1 --iterations 40 --policies 10
      softmax-linear policy gradient; 40 updates, data of the last 10 policies
  python train.py --q-model dynamics --estimators auto NFIS DM
      with a learned model of the environment behind auto
  python train.py --interval bca --json result.json --save episodes.ope
      a bootstrap interval; the evaluation and all episodes as files
  tensorboard --logdir runs
      the OPE tab: estimates with their bands over the iterations, next to the
      mean return
"""

from __future__ import annotations

from ope_gym import stopping

if __name__ == "__main__":
    stopping.leave_at_once()

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import ope_gym
from agents import Agent, make_agent
from ope_gym import Evaluation, Trajectories
from ope_gym.analysis.overlap import overlap
from ope_gym.commands.inputs import Choices, Name, Output, folder
from ope_gym.commands.signature import Command, as_options, described
from ope_gym.estimators.table import estimator_names
from ope_gym.inference.intervals import KINDS
from ope_gym.options import Q_MODELS, Options
from ope_gym.policies import Policy
from wrappers import collect
from wrappers.vector import RecordTrajectories

SHOWN = ("auto", "NFIS")  # in the table, where no estimators are named
STORED = ("paper",)  # in the event file and in JSON: those of the paper, and auto
ASKED = "stopping after this policy; Ctrl-C again stops at once"


@dataclass(frozen=True)
class Args:
    """The command line.

    Args:
        env: Gymnasium id of the environment.
        policies: Number of policies, the last ones, whose data the evaluation uses.
        rollouts: Episodes of each policy that the learner sees.
        iterations: Updates of the agent (default: --policies).
        held_out: Share of the recorded episodes that the learner never sees; they come on top of
            --rollouts, and the evaluation uses them alone. With 0 it uses the episodes that the
            policy was trained on, and is optimistic.
        seed: Seed of everything random: the same seed gives the same numbers.
        estimators: Names that `ope-gym estimators` lists, or the groups paper and all (default:
            those of the paper and auto go to TensorBoard and --json, and the table shows auto and
            NFIS).
        truth_episodes: New episodes of the final policy to compare the estimates with.
        vector_envs: Environments stepped side by side (default: one per episode, at most 64).
        logdir: Folder of TensorBoard runs.
        save: File for all recorded episodes.
        json: File for the evaluation.
        quiet: Show no progress bars.
    """

    env: Annotated[str, "ID"] = "CartPole-v1"
    policies: int = 10
    rollouts: int = 30
    iterations: int | None = None
    held_out: float = 0.5
    seed: int = 0
    estimators: list[Name] | None = None
    gamma: float = 1.0
    q_model: Annotated[str, ("default", *Q_MODELS, "none")] | None = "default"
    interval: Annotated[str, [kind for kind in KINDS if kind != "betting"]] = "ess-t"
    level: float = 0.95
    truth_episodes: int = 1000
    vector_envs: int | None = None
    logdir: Annotated[Path, folder] = Path("runs")
    save: Output | None = None
    json: Output | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        """Raise for values that cannot be meant."""
        Options(gamma=self.gamma, level=self.level, seed=self.seed)
        estimator_names(self.estimators)
        least = {"policies": 1, "rollouts": 1, "iterations": 1, "truth_episodes": 0}
        for name, low in {**least, "vector_envs": 1}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}; give at least {low}")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"held_out is {self.held_out}; give a share within [0, 1)")

    @property
    def updates(self) -> int:
        """Updates of the agent."""
        return self.policies if self.iterations is None else self.iterations

    @property
    def recorded(self) -> int:
        """Episodes recorded with each policy."""
        return max(round(self.rollouts / (1.0 - self.held_out)), self.rollouts)


def parse(words: list[str] | None = None) -> Args:
    """Read the command line as `Args`; raise ValueError with a message for wrong values."""
    command = Command(Args, "python train.py", described(Options, Choices), __doc__)
    values = command.parse(sys.argv[1:] if words is None else words)
    try:
        return command.call(values)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(as_options(str(error), values)) from error


def make_env(args: Args, episodes: int, **recording: Any) -> RecordTrajectories:
    """Make a recorded vector env; the vectorised implementation where the env has one."""
    count = min(args.vector_envs or 64, episodes)
    spec = gym.spec(args.env)
    mode = "vector_entry_point" if spec.vector_entry_point else "sync"
    return RecordTrajectories(gym.make_vec(args.env, count, vectorization_mode=mode), **recording)


@dataclass
class Run:
    """One training run: the agent, its recorder, and the streams of its randomness."""

    args: Args
    agent: Agent
    env: RecordTrajectories
    logdir: Path
    rng: np.random.Generator
    done: int = 0  # finished iterations
    latest: tuple[int, Evaluation] | None = None  # with the iterations finished by then

    def data(self) -> Trajectories:
        """Return the episodes that the evaluation may use."""
        record = self.env.buffer.view()
        last = np.unique(record.first_policies)[-self.args.policies :].tolist()
        return record.select(policies=last, held_out=True if self.args.held_out > 0 else None)

    def seed(self) -> int:
        """Return the next seed for resets."""
        return int(self.rng.integers(1 << 31))

    def iterate(self) -> float:
        """Record with the current policy and learn from it; return the mean return."""
        first = len(self.env.buffer)
        collect(self.env, self.agent.policy, self.args.recorded, self.rng, seed=self.seed())
        fresh = self.env.buffer.view().select(episodes=np.arange(first, len(self.env.buffer)))
        self.agent.learn(fresh.select(held_out=False))
        self.done += 1
        return float(fresh.returns(self.args.gamma).mean())

    def evaluate(self) -> Evaluation:
        """Evaluate the current policy on the episodes recorded so far, once an iteration."""
        if self.latest is not None and self.latest[0] == self.done:
            return self.latest[1]
        args = self.args
        evaluation = ope_gym.evaluate(
            self.data(),
            self.agent.policy,
            args.estimators or STORED,
            held_out=False,  # `data` has chosen
            gamma=args.gamma,
            interval=args.interval,
            level=args.level,
            seed=args.seed,
            q_model=args.q_model,
        ).named(f"policy {self.env.follow(self.agent.policy)}")  # as files number it
        self.latest = self.done, evaluation
        return evaluation


def train(run: Run, writer: Any, stopping_asked: Callable[[], bool]) -> None:
    """Run all iterations until a stop is asked; evaluate each new policy from the data so far."""
    bar = tqdm(total=run.args.updates, desc="training", unit="policy", disable=_silent(run.args))
    with bar:
        for iteration in range(run.args.updates):
            if stopping_asked():
                break
            mean_return = run.iterate()
            writer.add_return(mean_return, iteration)
            if len(run.data()):
                writer.add_evaluation(run.evaluate(), iteration + 1)
            bar.set_postfix(mean_return=f"{mean_return:.4g}")
            bar.update()


def fresh_rollouts(run: Run, policy: Policy) -> tuple[float, float]:
    """Return the mean return of new episodes of the policy, and its standard error."""
    args = run.args
    env = make_env(args, args.truth_episodes)
    bar = tqdm(total=args.truth_episodes, desc="fresh rollouts", unit="ep", disable=_silent(args))
    with bar:
        collect(
            env,
            policy,
            args.truth_episodes,
            run.rng,
            seed=run.seed(),
            on_episode=lambda *_: bar.update(),
        )
    returns = env.buffer.view().returns(args.gamma)
    env.close()
    error = float(returns.std(ddof=1) / np.sqrt(returns.size)) if returns.size > 1 else np.nan
    return float(returns.mean()), error


def report(run: Run, evaluation: Evaluation, truth: tuple[float, float] | None) -> str:
    """Return the closing words: table, truth, data regime, where things are."""
    args = run.args
    shown = evaluation.select(SHOWN) if args.estimators is None else evaluation
    lines = ["", shown.table(*truth) if truth else shown.table()]
    if truth:
        lines.append(f"{args.truth_episodes:,} fresh rollouts: {truth[0]:.4g} ± {truth[1]:.2g}")
    lines.append(
        f"The learner never saw these episodes of {args.env}, so these numbers are not optimistic."
        if args.held_out > 0
        else f"The policy was trained on these episodes of {args.env}, so all of this is "
        "optimistic; --held-out 0.5 keeps episodes apart."
    )
    lines.append(f"evaluate again: ope-gym evaluate {run.logdir / 'episodes.ope'} --target last")
    lines.append(f"dashboard: tensorboard --logdir {args.logdir}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    try:
        args = parse(arguments)
        env_spec = gym.spec(args.env)
        probe = gym.make(args.env)
        agent = make_agent(probe, gamma=args.gamma, seed=args.seed)
        probe.close()
    except (ValueError, gym.error.Error) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    logdir = Path(args.logdir) / f"{env_spec.id}__train__{args.seed}__{int(time.time())}"
    logdir.mkdir(parents=True, exist_ok=True)
    env = make_env(args, args.recorded, held_out=args.held_out, path=logdir / "episodes.ope")
    run = Run(args, agent, env, logdir, np.random.default_rng(args.seed))
    try:
        return conduct(run)
    except KeyboardInterrupt:
        recorded = logdir / "episodes.ope"
        where = f"the episodes are in {recorded}" if recorded.exists() else "nothing was recorded"
        print(f"\nstopped; {where}", file=sys.stderr)
        return stopping.exit_code()
    finally:
        env.close()


def conduct(run: Run) -> int:
    """Train, evaluate and report; return the exit code.

    The first Ctrl-C ends the training, and what was recorded is evaluated. A second one ends the
    command, and so does SIGTERM.
    """
    from ope_gym.report.tensorboard import EvaluationWriter

    args, code = run.args, 0
    with EvaluationWriter(run.logdir) as writer:
        try:
            with stopping.interrupt_asks(ASKED) as asked:
                train(run, writer, asked)
        except KeyboardInterrupt:
            print(f"\nstopped after {run.done} of {args.updates} policies", file=sys.stderr)
            save(run)
            return stopping.exit_code()
        if asked():
            code = stopping.exit_code()
            print(f"stopped after {run.done} of {args.updates} policies", file=sys.stderr)
        save(run)
        if not len(run.data()):
            print("train.py: no episode was held out; give a larger --held-out", file=sys.stderr)
            return 2
        evaluation = run.evaluate()
        truth = None
        if args.truth_episodes and not code:
            try:
                truth = fresh_rollouts(run, run.agent.policy)
            except KeyboardInterrupt:
                code = stopping.exit_code()
                print("\nstopped during the fresh rollouts", file=sys.stderr)
        writer.add_report(
            evaluation,
            run.done,
            dataclasses.asdict(args),
            overlap=overlap(run.data(), run.agent.policy),
            truth=truth[0] if truth else None,
            truth_error=truth[1] if truth else math.nan,
        )
    if args.json:
        evaluation.to_json(args.json)
    print(report(run, evaluation, truth))
    return code


def save(run: Run) -> None:
    """Save what was recorded, with the policy that is evaluated."""
    run.env.follow(run.agent.policy)
    if run.args.save:
        run.env.buffer.save(run.args.save)


def _silent(args: Args) -> bool | None:
    """Return whether to hide progress bars; None: only where there is no terminal."""
    return True if args.quiet else None


if __name__ == "__main__":
    stopping.run(main)
