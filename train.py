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
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
from gymnasium.envs.registration import find_highest_version, parse_env_id

from agents import Agent, deep, make_agent
from agents.small import Plan, SmallRun
from ope_gym.cli import coloured
from ope_gym.commands.inputs import Choices, Name, Output, folder
from ope_gym.commands.signature import Command, as_options, described
from ope_gym.data.stored import read_stored
from ope_gym.data.tail import tails_of
from ope_gym.estimators.table import estimator_names
from ope_gym.inference.intervals import KINDS
from ope_gym.options import Q_MODELS, Options
from ope_gym.report.training import fresh_value

LIMIT = 1000  # steps of an episode where nothing else ends it: the usual limit of Gymnasium's own
ENDS = ("Blackjack-v1",)  # by itself, after a few steps
OPTIONS = ("gamma", "interval", "level", "seed", "q_model")  # of `ope_gym.evaluate`
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
            1,000, or fewer where they are long; 100 of an agent of Stable-Baselines3).
        vector_envs: Environments stepped side by side (default: one per episode, at most 64; of
            Stable-Baselines3 8, or 1 for dqn, sac and td3).
        logdir: Folder of TensorBoard runs.
        save: File for all recorded episodes.
        json: File for the evaluation.
        quiet: Print the result alone: no progress bars, and no line of each evaluation.
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
        """Complete the environment's id; raise for values that cannot be meant."""
        object.__setattr__(self, "env", with_version(self.env))
        Options(gamma=self.gamma, level=self.level, seed=self.seed)
        estimator_names(self.estimators)
        least = {"policies": 1, "rollouts": 1, "iterations": 1, "vector_envs": 1, "timesteps": 1}
        for name, low in {**least, "truth_episodes": 0}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}; give at least {low}")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"held_out is {self.held_out}; give a share within [0, 1)")


def parse(words: list[str] | None = None) -> Args:
    """Read the command line as `Args`; raise ValueError with a message for wrong values."""
    command = Command(Args, "python train.py", described(Options, Choices), __doc__)
    values = command.parse(sys.argv[1:] if words is None else words)
    try:
        return command.call(values)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(as_options(str(error), values)) from error


def with_version(name: str) -> str:
    """Return an environment's id with its latest version if it has none, as `gym.make` does."""
    namespace, plain, version = parse_env_id(name)
    latest = find_highest_version(namespace, plain)
    return name if version is not None or latest is None else f"{name}-v{latest}"


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


def make_run(args: Args, logdir: Path) -> SmallRun | deep.DeepRun:
    """Make what trains and is evaluated, with a small agent or one of Stable-Baselines3."""
    try:
        made = gym.make(args.env, **time_limit(args.env))
    except Exception as error:  # whatever an environment's own code raises
        raise ValueError(f"{args.env} cannot be made: {error}") from error
    with made as env:
        agent = small_agent(env, args)
        logdir.mkdir(parents=True, exist_ok=True)
        if agent is not None:
            return SmallRun(
                agent,
                env,
                partial(make_envs, args),
                Plan(
                    updates=args.iterations or args.policies,
                    policies=args.policies,
                    recorded=max(round(args.rollouts / (1.0 - args.held_out)), args.rollouts),
                    held_out=args.held_out,
                    seed=args.seed,
                    quiet=args.quiet,
                ),
                logdir,
                args.estimators,
                {name: getattr(args, name) for name in OPTIONS},
            )
    return deep.DeepRun(
        args.agent or "ppo",
        partial(gym.make, args.env, **time_limit(args.env)),
        folder=logdir,
        timesteps=args.timesteps,
        vector_envs=args.vector_envs,
        seed=args.seed,
        gamma=args.gamma,
        level=args.level,
        estimators=args.estimators or (("auto", "NFIS") if args.json else None),
        quiet=args.quiet,
    )


def conduct(run: SmallRun | deep.DeepRun, args: Args, logdir: Path) -> int:
    """Train, evaluate and print; return the exit code.

    The first Ctrl-C ends the training, and what was recorded is evaluated. A second one ends the
    command, and so does SIGTERM.
    """
    code, truth = 0, None
    try:
        with stopping.interrupt_asks(ASKED) as asked:
            run.train(asked)
    except KeyboardInterrupt:
        print(f"\nstopped after {run.progress}", file=sys.stderr)
        run.save(args.save)
        return stopping.exit_code()
    if asked():
        code = stopping.exit_code()
        print(f"stopped after {run.progress}", file=sys.stderr)
    run.save(args.save)
    evaluation = run.evaluate()
    if args.truth_episodes != 0 and not code:
        try:
            truth = fresh_value(run.fresh_returns(args.truth_episodes or run.fresh_episodes))
        except KeyboardInterrupt:
            code = stopping.exit_code()
            print("\nstopped during the fresh rollouts", file=sys.stderr)
    words = run.report(truth, dataclasses.asdict(args))
    if args.json and evaluation is not None:
        evaluation.to_json(args.json)
    print(coloured(f"{words}{places(logdir)}"))
    return code


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
            code = conduct(run, args, logdir)
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


def places(logdir: Path) -> str:
    """Say where things are."""
    episodes = logdir / "episodes.ope"
    again = f"evaluate again: ope-gym evaluate {episodes} --target last\n"
    return f"{again if episodes.exists() else ''}dashboard: tensorboard --logdir {logdir.parent}"


def kept(logdir: Path) -> str:
    """Say where the episodes of a run are that did not come to its end."""
    recorded = logdir / "episodes.ope"
    with contextlib.suppress(OSError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tail that does not fit into its file
        if len(read_stored(recorded)) or tails_of(str(recorded)):
            return f"the episodes are in {recorded}"
    return "nothing was recorded"


def _say_once(args: threading.ExceptHookArgs) -> None:
    """Leave a full disk, which TensorBoard's thread hits first, to the line that `main` prints."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


if __name__ == "__main__":
    threading.excepthook = _say_once
    stopping.run(main)
