"""Inputs of several commands: recorded episodes, policies by name, choices, files to write."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from ope_gym.arguments import shortened
from ope_gym.files import is_uri
from ope_gym.inference.intervals import KINDS, Betting, Bootstrap, IntervalKind
from ope_gym.options import Q_MODELS, Compute, Options, OptionValues, Weighting
from ope_gym.policies import Target, UnavailablePolicy
from ope_gym.policies.base import is_saved

if TYPE_CHECKING:
    from ope_gym.scale.sources import Source

_DEFAULTS = Options()
_HELD_OUT = {"auto": None, "held-out": True, "all": False}
_POLICY = (
    "its number, as `info` lists them, or last; a saved model of Stable-Baselines3 (.zip), which "
    "can run code of whoever wrote it; or package.module:function that returns a policy"
)
_PICTURES = (".png", ".svg", ".pdf")
# Parameters of several commands; those of an evaluation are described in ope_gym.options.
SHARED = {
    "files": "Files of recorded episodes, Parquet or CSV files with a row for each step, or "
    "folders of these; also s3://... and gs://...",
    "column": "Names of the columns of a table that has others than ours, such as episode=user "
    "observation=x,y (a vector of two columns) step=none (there is no such column).",
    "target": f"The policy to evaluate: {_POLICY}.",
    "policies": "Numbers as `info` lists them, ranges such as 5-8, last, or all; or saved models "
    "(.zip), which can run code of whoever wrote them.",
    "estimator": "A name that `ope-gym estimators` lists.",
    "estimators": "Names that `ope-gym estimators` lists, or the groups paper and all (default: "
    "auto and NFIS, as far as the data allow).",
    "origin": "Whether the policy learned from episodes that are not held out, or was fixed "
    "independently of them (default: judged from the recorded policies).",
    "verbose": "Also show notes, the advice for each row and internals of the estimators.",
    "json": "Also write the result to this file.",
    "figure": f"Also draw the result to this file ({', '.join(_PICTURES)}).",
}


Writes: TypeAlias = Sequence[tuple[Path | None, Callable[[Path], object]]]


class CommandResult(NamedTuple):
    """The outcome of a command.

    Args:
        text: Words to print.
        writes: Files to write after that, each with the function that writes it; None for none.
        code: Exit code.
    """

    text: str
    writes: Writes = ()
    code: int = 0


def _writable(word: str) -> Path:
    """Return the path of a file to write, or raise before the work is done."""
    path = Path(word)
    place = path if path.exists() and not path.is_file() else path.parent
    if word == "-" or path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise ArgumentTypeError(
            f"{word} cannot be written; give a file in a folder that exists and can be written"
        )
    return path


def _drawable(word: str) -> Path:
    """Return the path of a picture to write, or raise before the work is done."""
    path = _writable(word)
    if path.suffix.lower() not in _PICTURES:
        raise ArgumentTypeError(f"{word} has none of the endings {', '.join(_PICTURES)}")
    return path


def folder(word: str) -> Path:
    """Return the path of a folder, which need not exist yet."""
    path = Path(word)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"{word} is a file; give a folder")
    return path


def _located(word: str) -> Path | str:
    """Return a path, or a URI as it is."""
    return word if is_uri(word) else Path(word)


def column_names(words: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the names of columns that --column gives, as `Trajectories.from_frame` takes them."""
    from ope_gym.data.tables.layout import NAMING, did_you_mean  # loads gymnasium

    names: dict[str, Any] = {}
    for name, word in (words or {}).items():
        if name not in NAMING:
            known = ", ".join(NAMING)
            raise ValueError(f"--column {name}=: {did_you_mean(name, NAMING)}give one of {known}")
        several = "," in word and name in ("observation", "action")
        names[name] = word.split(",") if several else None if word == "none" else word
    return names


def episodes_of(files: Sequence[Path], column: Mapping[str, str] | None) -> Any:
    """Return files, or the table that they are if its columns have names."""
    if not column:
        return files
    from ope_gym.data.database import SeenFile
    from ope_gym.data.tables.layout import scan_parquet
    from ope_gym.data.tables.rows import is_table

    for file in files:
        if not is_table(SeenFile.unread(file)):
            raise ValueError(f"--column names columns of tables, but {file} is none: leave it out")
    return scan_parquet(files, **column_names(column))


File = Annotated[Path, _located]
Output = Annotated[Path, _writable]
Picture = Annotated[Path, _drawable]
Origin = Annotated[str, ("learned", "fixed")]
Policy = Annotated[str, "K"]
Name = Annotated[str, "NAME"]


# Episodes and policies --------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """Recorded episodes.

    Args:
        data: Episodes to use: the held-out ones if there are any (auto), only held-out ones, or
            all.
        policy: For files recorded with torch policies: a function that returns a module of their
            architecture, or (module, forward); the stored numbers are put into it.
    """

    files: list[File]
    column: dict[str, str] | None = None
    data: Annotated[str, tuple(_HELD_OUT)] = "auto"
    policy: Annotated[str, "PACKAGE:FACTORY"] | None = None

    @property
    def held_out(self) -> bool | None:
        """The Python option that `data` stands for."""
        return _HELD_OUT[self.data]

    @property
    def episodes(self) -> Any:
        """The files, or the table that they are."""
        return episodes_of(self.files, self.column)

    def load(self) -> Source:
        """Read all episodes into memory."""
        from ope_gym.scale.sources import load_source

        return self._restored(load_source(self.episodes, self.held_out))

    def open(self, compute: Compute) -> Source:
        """Open the files, which need not fit into memory."""
        from ope_gym.scale.sources import open_source
        from ope_gym.scale.workers import Workers

        workers = Workers(compute.workers, compute.ray)
        return self._restored(
            open_source(self.episodes, self.held_out, compute.block_steps, workers)
        )

    def _restored(self, source: Source) -> Source:
        """Put the module of --policy into stored torch policies."""
        if self.policy is None:
            return source
        stored = {
            k: policy
            for k, policy in enumerate(source.policies)
            if isinstance(policy, UnavailablePolicy) and policy.kind == "torch"
        }
        if not stored:
            raise ValueError(
                f"--policy {self.policy}: the files hold no torch policy to put into it"
            )
        from ope_gym.policies.torch import TorchPolicy

        made = imported(self.policy)()
        module, forward = made if isinstance(made, tuple) else (made, None)
        policies = list(source.policies)
        for k, policy in stored.items():
            policies[k] = TorchPolicy.restore(policy, module, forward=forward)
        return source.with_policies(tuple(policies))


def imported(place: str) -> Any:
    """Return the function that "package.module:name" names; the current folder is searched too."""
    module, _, name = place.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), name)
        if callable(function):
            return function
        raise ValueError(f"{name} is {shortened(function)}, not a function")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{place}: give package.module:function, which can be imported here ({error})"
        ) from error


def target_named(word: str, source: Source | None = None, option: str = "target") -> Target:
    """Return the number of a policy, "last", the path of a saved model, or an imported policy.

    Args:
        word: Word that was typed.
        source: Recorded episodes, where the number must be that of one of their policies.
        option: Name of the option.
    """
    if ":" in word and not is_saved(word):
        return imported(word)()
    target: Target = int(word) if word.isdecimal() else word
    if source is not None:
        source.number(target, option)  # raises
    return target


def targets_named(words: Sequence[str], source: Source) -> list[int | str]:
    """Return the policies that words name: 3, 5-8, last, x.zip, or all that can be evaluated."""
    targets: list[Any] = []
    for word in words:
        first, dash, last = word.partition("-")
        if word == "all":
            known = enumerate(source.policies)
            targets += [k for k, policy in known if not isinstance(policy, UnavailablePolicy)]
        elif dash and first.isdecimal() and last.isdecimal():
            low, high = sorted((int(first), int(last)))
            source.number(high, "policies")  # raises, before so many numbers are made
            targets += range(low, high + 1)
        elif is_saved(word):
            targets.append(word)
        else:
            targets.append(source.number(int(word) if word.isdecimal() else word, "policies"))
    for target in targets:
        source.number(target, "policies")  # raises
    return list(dict.fromkeys(targets))


# Choices of the estimate ------------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """The estimate.

    Args:
        q_model: Model of the action values for auto, DM and the doubly robust estimators: default
            (tabular or linear, depending on the observations), dynamics (learns a model of the
            environment; slow), network (needs torch) or none.
        interval: Kind of confidence interval: ess-t is Student's t with the effective sample size
            in place of n, percentile and bca are bootstraps, betting holds for every distribution
            of bounded rewards, none gives the values alone.
        resamples: Number of bootstrap replicates, for --interval percentile and bca.
        return_range: Lowest and highest return that an episode can have: intervals then allow for
            any of them that may not have been seen yet.
        reward_range: Lowest and highest possible reward, needed by --interval betting.
        horizon: Steps of the longest possible episode, for --interval betting (default: the
            recorded time limit).
    """

    weighting: Weighting
    q_model: Annotated[str, ("default", *Q_MODELS, "none")] | None = "default"
    gamma: float = _DEFAULTS.gamma
    level: float = _DEFAULTS.level
    return_range: tuple[float, float] | None = None
    interval: Annotated[str, (*KINDS, "none")] | None = _DEFAULTS.kind.name
    resamples: int = Bootstrap().resamples
    reward_range: tuple[float, float] | None = None
    horizon: int | None = None
    seed: int = _DEFAULTS.seed

    def options(self, recorded: Recorded, compute: Compute = _DEFAULTS.compute) -> OptionValues:
        """Return the options of an evaluation; raise before any episode is read."""
        values = OptionValues(
            held_out=recorded.held_out,
            q_model=self.q_model,
            gamma=self.gamma,
            interval=self._kind(),
            level=self.level,
            return_range=self.return_range,
            weighting=self.weighting,
            compute=compute,
            seed=self.seed,
        )
        Options(**values)
        return values

    def _kind(self) -> str | IntervalKind | None:
        if self.interval == "betting":
            if self.reward_range is None:
                raise ValueError("--interval betting: give --reward-range LOW HIGH, too")
            return Betting(self.reward_range, self.horizon)
        for name in ("reward-range", "horizon"):
            if getattr(self, name.replace("-", "_")) is not None:
                raise ValueError(f"--{name} has an effect only with --interval betting")
        if self.interval in ("percentile", "bca"):
            return Bootstrap(self.resamples, self.interval)
        return self.interval
