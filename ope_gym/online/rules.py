"""From what each way says of a policy to one value, with an error that follows from tests.

Three ways lead to the value of a policy, and each has an error e:

    near    life table of the latest steps, moved by advantages (`ope_gym.online.advantages`)
    last    mean of the last five whole episodes; settled, of five before and five after
    sim     mean return of episodes played in a learned environment (`ope_gym.online.simulation`)

near and last have seen episodes of the policies that acted. A return's variance s² is the sum of
its squared advantages, so by Cauchy and Schwarz these policies' values are at most √(s² X) away,
where X is the χ² of an episode between the policy and those that acted. *seen* is the blend of
both, with κ s² X as a part of its squared error.

No way knows its own bias b. It is inferred from tests: a difference g that would be 0 but for the
bias and for noise of variance a², so g ~ N(0, b² + a²), with a prior that falls with b.

    near, last, seen   what they said at once, less what near said once the policy was settled
    sim                its correction on recorded steps; and what it is less in an environment of
                       one degree less, which betrays a wrong one

The correction is a test and not a value: it ruins good simulations. The greedy policy's simulation
is tested on the policy that acts, too.

The value is the mean by weights w = 1 / e², its error Σ w e: the ways rest on the same steps, and
err together. A simulation with a larger e than what was seen has no say, nor one that plays where
nothing was recorded. Nothing else is refused: a refusal strikes where the policy jumps and the
value is needed most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

EPISODES = 5  # of `last`: what EvalCallback plays, and few enough to be of about one policy
SHARE_OF_SHIFT = 0.1  # κ: what advantages leave of the distance; .05 to .2 do as well
UNSEEN = 0.1  # share of played states where nothing was recorded; .02 is usual, .6 where it failed
_HALF_LIFE = 2.0  # evaluations after which a test counts half; 1 to 4 do as well
_SCALES = np.geomspace(0.01, 1.0, 40)  # of b, in ranges of the returns: no test is finer than this
_PRIOR = 3.0  # power of b with which the prior density falls; 2 gives wider bands


class Value(NamedTuple):
    """A mean return and its squared error."""

    mean: float
    square: float


class Comparison(NamedTuple):
    """A difference that would be 0 without bias, its noise variance, and what it counts."""

    difference: float
    noise: float
    weight: float


@dataclass(frozen=True)
class Simulated:
    """The value of a policy in a learned environment, and tests of it.

    Args:
        raw: Mean return of the played episodes.
        spread: Standard deviation of a played return.
        unseen: Share of the played states that lie outside of what was recorded.
        reach: Lowest and highest played return.
        rough: Mean return in the environment of one degree less; None if it was not tested.
        corrected: The value corrected by what the environment gets wrong on recorded steps; None
            if it was not tested.
    """

    raw: Value
    spread: float
    unseen: float
    reach: tuple[float, float]
    rough: Value | None = None
    corrected: Value | None = None


@dataclass(frozen=True)
class Evidence:
    """Values of one policy by each way, before any bias.

    Args:
        near: Value by the steps around the policy.
        last: Value by whole episodes; None if there are none.
        distance: X, the χ² of an episode.
        spread: s, the standard deviation of a return.
        low: Lowest return so far.
        high: Highest return so far.
        limits: Lowest and highest mean that returns so far allow.
        simulated: Value in a learned environment; None without one.
    """

    near: Value
    last: Value | None
    distance: float
    spread: float
    low: float
    high: float
    limits: tuple[float, float]
    simulated: Simulated | None = None

    @property
    def scale(self) -> float:
        """Range of the returns."""
        return max(self.high - self.low, 1e-9)

    @property
    def shift(self) -> float:
        """Squared error for the distance from the policies that acted.

        The policy's own returns may vary more than those that were seen.
        """
        played = 0.0 if self.simulated is None else self.simulated.spread
        spread = max(self.spread, played)
        return min(SHARE_OF_SHIFT * spread**2 * self.distance, self.scale**2)

    def possible(self, value: Value) -> Value:
        """Return a value within the limits of a mean; what is cut off counts as error."""
        low, high = self.limits
        mean = min(max(value.mean, low), high) if low <= high else value.mean
        return Value(mean, value.square + (value.mean - mean) ** 2)


@dataclass
class Entry:
    """One evaluation: evidence of the policy that acts, and of the greedy one if it was asked for.

    Args:
        early: Evidence at once, by policy: "acting" and "greedy".
        late: Evidence once settled.
    """

    early: dict[str, Evidence] = field(default_factory=dict)
    late: dict[str, Evidence] = field(default_factory=dict)


def blend(values: Mapping[str, Value]) -> tuple[Value, dict[str, float]]:
    """Return the mean by weights 1 / e², its squared error (Σ w e)², and the weights.

    >>> blend({"a": Value(1.0, 1.0), "b": Value(4.0, 2.0)})[0].mean
    2.0
    """
    squares = np.array([value.square for value in values.values()])
    weights = 1.0 / squares / np.sum(1.0 / squares)
    mean = float(weights @ [value.mean for value in values.values()])
    return Value(mean, float(weights @ np.sqrt(squares)) ** 2), dict(
        zip(values, weights.tolist(), strict=True)
    )


def bias_of(tests: Iterable[Comparison], scale: float) -> float:
    """Return the expected b² after some tests.

    Args:
        tests: Differences that tell.
        scale: Range of the returns.
    """
    squares = (scale * _SCALES) ** 2
    log_density = (1.0 - _PRIOR) * np.log(_SCALES)  # on a grid of equal steps of log b
    for difference, noise, weight in tests:
        variance = squares + noise
        log_density -= 0.5 * weight * (np.log(variance) + difference**2 / variance)
    density = np.exp(log_density - log_density.max())
    return float(density @ squares / density.sum())


class Valued(NamedTuple):
    """The value of a policy, and what it was made of.

    Args:
        value: Blend of the ways.
        shares: Weight of each way.
        spread: Standard deviation of a return.
        limits: Lowest and highest value that were allowed.
    """

    value: Value
    shares: dict[str, float]
    spread: float
    limits: tuple[float, float]


class TrackRecord:
    """The evaluations of a run, and what they tell of the biases of the ways."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def value(self, index: int, policy: str, *, settled: bool = False) -> Valued:
        """Return the value of a policy of an evaluation.

        Args:
            index: Number of the evaluation.
            policy: "acting" or "greedy".
            settled: Whether from the evidence once settled.
        """
        entry = self.entries[index]
        evidence = (entry.late if settled else entry.early)[policy]
        if settled:  # what remains is about as large as the finest test
            least = float(_SCALES[0] * evidence.scale) ** 2
            seen = _seen(evidence, dict.fromkeys(("near", "last", "seen"), least))
        else:
            seen = _seen(evidence, self._biases(index, evidence.scale))
        values = {"seen": evidence.possible(seen)}
        spread, limits, simulated = evidence.spread, evidence.limits, evidence.simulated
        if simulated is not None and simulated.unseen <= UNSEEN:
            bias = bias_of(_tests(entry.early, policy), evidence.scale)
            played = Value(simulated.raw.mean, simulated.raw.square + bias)
            if played.square <= seen.square:  # it may lie beyond all returns so far
                values["simulation"] = played
                low, high = simulated.reach
                limits = min(limits[0], low), max(limits[1], high)
        value, shares = blend(values)
        if simulated is not None:
            spread += shares.get("simulation", 0.0) * (simulated.spread - spread)
        return Valued(value, shares, spread, limits)

    def _biases(self, index: int, scale: float) -> dict[str, float]:
        """Return b² of near, last and seen, from evaluations whose policies are settled."""
        known = []
        for age, entry in enumerate(self.entries[index::-1]):
            if "acting" in entry.late:
                early, late = entry.early["acting"], entry.late["acting"]
                truth = Value(late.near.mean, late.near.square + late.shift)
                known.append((early, truth, 0.5 ** (age / _HALF_LIFE)))
        biases: dict[str, float] = {}
        for name in ("near", "last", "seen"):
            tests = []
            for early, truth, weight in known:
                value = _seen(early, biases) if name == "seen" else getattr(early, name)
                if value is not None:
                    apart, noise = value.mean - truth.mean, value.square + truth.square
                    tests.append(Comparison(apart, noise, weight))
            biases[name] = bias_of(tests, scale)
        return biases


def _tests(evidence: Mapping[str, Evidence], policy: str) -> Iterator[Comparison]:
    """Yield the tests of a simulation, of the policy and of the one that acts."""
    for name in dict.fromkeys((policy, "acting")):
        simulated = evidence[name].simulated
        if simulated is None or simulated.unseen > UNSEEN:
            continue
        raw, rough, corrected = simulated.raw, simulated.rough, simulated.corrected
        if corrected is not None and np.isfinite(corrected.square):
            yield Comparison(corrected.mean - raw.mean, corrected.square, 1.0)
        if rough is not None:
            yield Comparison(rough.mean - raw.mean, rough.square + raw.square, 1.0)


def _seen(evidence: Evidence, biases: Mapping[str, float]) -> Value:
    """Return the blend of near and last; without biases, as of a settled policy."""
    ways = {"near": evidence.near} | ({} if evidence.last is None else {"last": evidence.last})
    value, _ = blend(
        {name: Value(way.mean, way.square + biases.get(name, 0.0)) for name, way in ways.items()}
    )
    return Value(value.mean, value.square + evidence.shift + biases.get("seen", 0.0))
