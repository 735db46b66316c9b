"""Train an agent, keep what every policy recorded, and evaluate the final policy from it.

The agent suits the environment. Small ones play 30 episodes with each of 10 policies, and 30 more
that the learner never sees; the final policy, which has not played yet, is evaluated from those in
two ways: by importance weights, which know whole episodes of policies near it, and step by step, as
loops do that have no episode to spare (OPECallback). The surer of the two comes first. The agents
of Stable-Baselines3 are valued while they train.

Examples:
  python train.py --env CartPole-v1
      PoWER
  python train.py --env Blackjack-v1 --rollouts 500
      epsilon-greedy Monte-Carlo control, for whatever is discrete
  python train.py --env Acrobot-v1 --iterations 40 --policies 10
      softmax-linear policy gradient; 40 updates, data of the last 10 policies
  python train.py --env Hopper-v5
      PoWER with a Gaussian policy, for continuous actions
  python train.py --env LunarLander-v3 --agent ppo --timesteps 100000
      PPO of Stable-Baselines3; it also takes images and dicts
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

import contextlib
import dataclasses
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import ope_gym
from agents import Agent, deep, make_agent
from ope_gym import Evaluation, Trajectories
from ope_gym.analysis.overlap import overlap
from ope_gym.cli import coloured
from ope_gym.commands.inputs import Choices, Name, Output, folder
from ope_gym.commands.signature import Command, as_options, described
from ope_gym.data.stored import read_stored
from ope_gym.data.tail import tails_of
from ope_gym.estimators.table import estimator_names
from ope_gym.inference.intervals import KINDS
from ope_gym.online import FreeEstimate, FreeEvaluation
from ope_gym.options import Q_MODELS, Options
from ope_gym.report import text
from ope_gym.report.free_values import in_words
from wrappers import collect
from wrappers.free import FreeRecorder
from wrappers.vector import RecordTrajectories

SHOWN = ("auto", "NFIS")  # in the table, where no estimators are named
STORED = ("paper",)  # in the event file and in JSON: those of the paper, and auto
LIMIT = 1000  # steps of an episode where nothing else ends it: the usual limit of Gymnasium's own
ENDS = ("Blackjack-v1",)  # by itself, after a few steps
TRUTH, DEEP_TRUTH = 1000, 100  # new episodes of the final policy; a network is slower
WEIGHTED = "By importance weights, which need whole episodes:"
ASKED = "stopping after this policy; Ctrl-C again stops at once"


@dataclass(frozen=True)
class Args:
    """The command line.

    Args:
        env: Gymnasium id of the environment.
        agent: Algorithm of Stable-Baselines3; by default a small agent, or ppo where none suits.
        timesteps: Steps that an agent of Stable-Baselines3 trains for (default: 50,000 for ppo and
            a2c, else 10,000); --policies, --rollouts, --iterations and --held-out are for the
            small agents.
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
        interval: Kind of confidence interval: ess-t is Student's t with the effective sample size
            in place of n, percentile and bca are bootstraps.
        truth_episodes: New episodes of the final policy to compare the estimates with (default:
            1,000; 100 of an agent of Stable-Baselines3).
        vector_envs: Environments stepped side by side (default: one per episode, at most 64; of
            Stable-Baselines3 8, or 1 for dqn, sac and td3).
        logdir: Folder of TensorBoard runs.
        save: File for all recorded episodes.
        json: File for the evaluation.
        quiet: Show no progress bars.
    """

    env: Annotated[str, "ID"] = "CartPole-v1"
    agent: Annotated[str, deep.NAMES] | None = None
    timesteps: int | None = None
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
    truth_episodes: int | None = None
    vector_envs: int | None = None
    logdir: Annotated[Path, folder, "DIR"] = Path("runs")
    save: Output | None = None
    json: Output | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        """Raise for values that cannot be meant."""
        Options(gamma=self.gamma, level=self.level, seed=self.seed)
        estimator_names(self.estimators)
        least = {"policies": 1, "rollouts": 1, "iterations": 1, "vector_envs": 1, "timesteps": 1}
        for name, low in {**least, "truth_episodes": 0}.items():
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

    def fresh(self, usual: int) -> int:
        """Return how many new episodes of the final policy to play."""
        return usual if self.truth_episodes is None else self.truth_episodes


def parse(words: list[str] | None = None) -> Args:
    """Read the command line as `Args`; raise ValueError with a message for wrong values."""
    command = Command(Args, "python train.py", described(Options, Choices), __doc__)
    values = command.parse(sys.argv[1:] if words is None else words)
    try:
        return command.call(values)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(as_options(str(error), values)) from error


def time_limit(name: str) -> dict[str, Any]:
    """Return the limit that an environment is made with; none if it has one of its own."""
    has = gym.spec(name).max_episode_steps is not None or name in ENDS
    return {} if has else {"max_episode_steps": LIMIT}


def make_envs(args: Args, episodes: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vector env; the vectorised implementation where the env has one."""
    count = min(args.vector_envs or 64, episodes)
    if gym.spec(args.env).vector_entry_point:
        return gym.make_vec(args.env, count, vectorization_mode="vector_entry_point")
    with gym.make(args.env) as probe:
        clipped = isinstance(probe.action_space, gym.spaces.Box)
    wrappers = [gym.wrappers.ClipAction] if clipped else []
    limit = time_limit(args.env)
    return gym.make_vec(args.env, count, vectorization_mode="sync", wrappers=wrappers, **limit)


@dataclass
class Run:
    """One training run of a small agent: its recorder, and the streams of its randomness."""

    args: Args
    agent: Agent
    env: RecordTrajectories
    free: FreeEvaluation
    logdir: Path
    rng: np.random.Generator
    done: int = 0  # finished iterations
    latest: tuple[int, Evaluation] | None = None  # with the iterations finished by then
    step_by_step: FreeEstimate | None = None  # the value of the same policy from single steps

    def data(self) -> Trajectories:
        """Return the episodes that the evaluation may use."""
        record = self.env.buffer.view()
        last = np.unique(record.first_policies)[-self.args.policies :].tolist()
        return record.select(policies=last, held_out=True if self.args.held_out > 0 else None)

    def close(self) -> None:
        """Close the recorder."""
        self.env.close()

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
        self.step_by_step = self.free.evaluate(self.done)  # of the policy that is followed
        self.free.settle()  # provisional values that were wrong make the next ones less sure
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


def fresh_rollouts(run: Run) -> tuple[float, float]:
    """Return the mean return of new episodes of the policy, and its standard error."""
    args, episodes = run.args, run.args.fresh(TRUTH)
    env = RecordTrajectories(make_envs(args, episodes))
    bar = tqdm(total=episodes, desc="fresh rollouts", unit="ep", disable=_silent(args))
    with bar:
        collect(
            env,
            run.agent.policy,
            episodes,
            run.rng,
            seed=run.seed(),
            on_episode=lambda *_: bar.update(),
        )
    returns = env.buffer.view().returns(args.gamma)
    env.close()
    return mean_and_error(returns)


def mean_and_error(returns: Any) -> tuple[float, float]:
    """Return the mean of returns and its standard error."""
    error = float(returns.std(ddof=1) / np.sqrt(returns.size)) if returns.size > 1 else np.nan
    return float(returns.mean()), error


def report(run: Run, evaluation: Evaluation, truth: tuple[float, float] | None) -> str:
    """Return the closing words: the surer value and the other one, truth, where things are."""
    args = run.args
    shown = evaluation.select(SHOWN) if args.estimators is None else evaluation
    table = shown.table(*truth) if truth else shown.table()
    lines = ["", unreached(run)] if unreached(run) else [""]
    free = run.step_by_step
    if free is None or lines[-1]:
        lines.append(table)
    elif is_surer(free, evaluation):
        verb = "" if free.verdict.colour == "red" else "is "
        headline = f"{text.sentence(evaluation.target)} {verb}{in_words(free, args.level)}"
        lines += [
            text.wrap(headline, ""),
            "",
            "By importance weights, which need whole episodes:",
            table,
        ]
    else:
        words = in_words(free, args.level)
        lines += [table, text.wrap(f"step by step, as OPECallback values a policy: {words}")]
    if truth:
        lines.append(fresh_line(args.fresh(TRUTH), truth))
    lines.append(
        f"The learner never saw these episodes of {args.env}, so these numbers are not optimistic."
        if args.held_out > 0
        else f"The policy was trained on these episodes of {args.env}, so all of this is "
        "optimistic; --held-out 0.5 keeps episodes apart."
    )
    return "\n".join([*lines, places(args, run.logdir)])


def is_surer(free: FreeEstimate, evaluation: Evaluation) -> bool:
    """Return whether the value from single steps comes first: if not red, by its error."""
    colours = free.verdict.colour, evaluation.best.verdict.colour
    if "red" in colours and colours[0] != colours[1]:
        return colours[1] == "red"
    return bool(free.fresh_episodes > np.nan_to_num(evaluation.best.fresh_episodes))


def unreached(run: Run) -> str:
    """Return the words for a run in which all episodes came to the same; "" for others."""
    returns = run.env.buffer.returns()
    if np.ptp(returns) > 0:
        return ""
    return text.wrap(
        f"Nothing was learned: all {len(returns):,} episodes returned {returns[0]:g}, so whatever "
        f"{run.args.env} rewards was never reached, and nothing tells a good action from a bad "
        "one. More --rollouts may reach it by chance, or an --agent that explores in another way, "
        "such as dqn or sac.",
        "",
    )


def fresh_line(episodes: int, truth: tuple[float, float]) -> str:
    """Say what the fresh episodes returned."""
    return f"{episodes:,} fresh rollouts: {truth[0]:.4g} ± {truth[1]:.2g}"


def places(args: Args, logdir: Path) -> str:
    """Say where things are."""
    episodes = logdir / "episodes.ope"
    again = f"evaluate again: ope-gym evaluate {episodes} --target last\n"
    return f"{again if episodes.exists() else ''}dashboard: tensorboard --logdir {args.logdir}"


def small_agent(env: gym.Env[Any, Any], args: Args) -> Agent | None:
    """Return the agent that suits an environment; None for one of Stable-Baselines3."""
    why = f"--agent {args.agent} is"
    if args.agent is None:
        try:
            return make_agent(env, gamma=args.gamma, seed=args.seed)
        except ValueError as error:
            why = f"{error}; PPO takes more, and is"
            print(f"no small agent suits {args.env}: PPO of Stable-Baselines3 is trained")
    if find_spec("stable_baselines3") is None:
        raise ValueError(f"{why} of Stable-Baselines3: {deep.INSTALL}")
    return None


def make_run(args: Args, logdir: Path) -> Run | deep.DeepAgent:
    """Make what trains: a small agent with its recorder, or an agent of Stable-Baselines3."""
    try:
        made = gym.make(args.env, **time_limit(args.env))
    except Exception as error:  # whatever an environment's own code raises
        raise ValueError(f"{args.env} cannot be made: {error}") from error
    with made as probe:
        limit = probe.spec.max_episode_steps if probe.spec else None
        agent = small_agent(probe, args)
        box = probe.action_space
        bounds = (box.low, box.high) if isinstance(box, gym.spaces.Box) else None
    logdir.mkdir(parents=True, exist_ok=True)
    if agent is None:
        return deep.DeepAgent(
            args.agent or "ppo",
            partial(gym.make, args.env, **time_limit(args.env)),
            folder=logdir,
            timesteps=args.timesteps,
            vector_envs=args.vector_envs,
            seed=args.seed,
            gamma=args.gamma,
            level=args.level,
            estimators=args.estimators or (SHOWN if args.json else None),
        )
    envs = make_envs(args, args.recorded)
    free = FreeEvaluation(
        envs.num_envs,
        horizon=limit,
        action_bounds=bounds,
        gamma=args.gamma,
        level=args.level,
        seed=args.seed,
    )
    env = FreeRecorder(envs, free, held_out=args.held_out, path=logdir / "episodes.ope")
    return Run(args, agent, env, free, logdir, np.random.default_rng(args.seed))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    args = None
    try:
        args = parse(arguments)
        name = f"{gym.spec(args.env).id}__train__{args.seed}__{int(time.time())}"
        logdir = Path(args.logdir) / name.replace("/", "_")
        run = make_run(args, logdir)
    except (ValueError, NotImplementedError, ImportError, OSError, gym.error.Error) as error:
        words = as_options(" ".join(str(error).split()), {"agent": args.agent} if args else {})
        print(f"train.py: {words}", file=sys.stderr)
        return 2
    words, code = "", 0
    try:
        with warnings.catch_warnings():  # a full disk also ends the run, and is said once
            warnings.filterwarnings("ignore", ".*but not in the file", UserWarning)
            code = conduct(run) if isinstance(run, Run) else conduct_deep(run, args, logdir)
    except KeyboardInterrupt:
        words, code = "stopped", stopping.exit_code()
    except OSError as error:
        words, code = f"train.py: {error}", 2
    finally:
        try:
            run.close()
        except OSError as error:  # episodes that never fitted
            words, code = words or f"train.py: {error}", code or 2
    if words:
        print(f"\n{words}; {kept(logdir)}", file=sys.stderr)
    return code


def kept(logdir: Path) -> str:
    """Say where the episodes of a run are that did not come to its end."""
    recorded = logdir / "episodes.ope"
    with contextlib.suppress(OSError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tail that does not fit into its file
        if len(read_stored(recorded)) or tails_of(str(recorded)):
            return f"the episodes are in {recorded}"
    return "nothing was recorded"


def conduct_deep(agent: deep.DeepAgent, args: Args, logdir: Path) -> int:
    """Train an agent of Stable-Baselines3, which says what its policy is worth; report the rest."""
    with stopping.interrupt_asks(ASKED) as asked:
        agent.learn(asked)
    callback, lines = agent.callback, []
    if args.save:
        callback.trajectories().save(args.save)
    if args.json and callback.report is not None:
        callback.report.to_json(args.json)
    episodes = args.fresh(DEEP_TRUTH)
    if episodes and args.gamma == 1.0 and not asked():
        lines.append(fresh_line(episodes, mean_and_error(agent.fresh_returns(episodes))))
    print("\n".join([*lines, places(args, logdir)]))
    return stopping.exit_code() if asked() else 0


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
        if args.fresh(TRUTH) and not code:
            try:
                truth = fresh_rollouts(run)
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
    print(coloured(report(run, evaluation, truth)))
    return code


def save(run: Run) -> None:
    """Save what was recorded, with the policy that is evaluated."""
    run.env.follow(run.agent.policy)
    if run.args.save:
        run.env.buffer.save(run.args.save)


def _silent(args: Args) -> bool | None:
    """Return whether to hide progress bars; None: only where there is no terminal."""
    return True if args.quiet else None


def _say_once(args: threading.ExceptHookArgs) -> None:
    """Leave a full disk, which TensorBoard's thread hits first, to the line that `main` prints."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


if __name__ == "__main__":
    threading.excepthook = _say_once
    stopping.run(main)
