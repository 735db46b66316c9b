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
bias and for noise of variance a², so g ~ N(0, b² + a²), with the prior 1 / b.

    near, last, seen   what they said at once, less what near said once the policy was settled
    sim                its correction on recorded steps; what it is less in an environment of one
                       degree less, which betrays a wrong one; what was seen, less what it said

The correction is a test and not a value: it ruins good simulations. The greedy policy's simulation
is tested on the policy that acts, too.

The value is the mean by weights w = 1 / e², its error Σ w e: the ways rest on the same steps, and
err together. Nothing is refused, because a refusal strikes where the policy jumps and the value is
needed most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ope_gym.arrays import FloatArray

EPISODES = 5  # of `last`: at one evaluation every few episodes, the policy changes over more
SHARE_OF_SHIFT = 0.1  # κ: what advantages leave of the distance; .05 to .2 do as well
_HALF_LIFE = 2.0  # evaluations after which a test counts half; 1 to 4 do as well
_SCALES = np.geomspace(0.003, 1.0, 40)  # of b, in ranges of the returns: from nothing to all
_TRUSTED = 0.05  # b in ranges, below which a simulation may lie beyond all returns seen so far
_FLOOR = 0.01  # least error of a way, in ranges: no test is finer


class Value(NamedTuple):
    """A mean return and its squared error."""

    mean: float
    square: float


class Test(NamedTuple):
    """A difference that would be 0 without bias, its noise variance, and what it counts."""

    difference: float
    noise: float
    weight: float


@dataclass(frozen=True)
class Simulated:
    """The value of a policy in a learned environment, and tests of it.

    Args:
        raw: Mean return of the played episodes.
        rough: The same in the environment of one degree less; None if it could not be learned.
        corrected: The value corrected by what the environment gets wrong on recorded steps.
        spread: Standard deviation of a played return.
        unseen: Share of the played states that lie outside of what was recorded.
    """

    raw: Value
    rough: Value | None
    corrected: Value
    spread: float
    unseen: float


@dataclass(frozen=True)
class Evidence:
    """What the ways say of one policy, before any bias.

    Args:
        near: By the steps around the policy.
        last: By whole episodes; None if there are none.
        distance: X, the χ² of an episode.
        spread: s, the standard deviation of a return.
        low: Lowest return so far.
        high: Highest return so far.
        limits: Lowest and highest mean that returns so far allow.
        simulated: In a learned environment; None without one.
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
        """Squared error for the distance from the policies that acted."""
        return min(SHARE_OF_SHIFT * self.spread**2 * self.distance, self.scale**2)


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


def infer_bias(tests: Iterable[Test], scale: float) -> tuple[FloatArray, FloatArray]:
    """Return values of b and their probabilities after some tests.

    Args:
        tests: Differences that tell.
        scale: Range of the returns.
    """
    squares = (scale * _SCALES) ** 2
    log_likelihood = np.zeros(squares.size)
    for difference, noise, weight in tests:
        variance = squares + noise
        log_likelihood -= 0.5 * weight * (np.log(variance) + difference**2 / variance)
    probs = np.exp(log_likelihood - log_likelihood.max())
    return np.sqrt(squares), probs / probs.sum()


def bias_of(tests: Iterable[Test], scale: float) -> float:
    """Return the expected b² after some tests."""
    biases, probs = infer_bias(tests, scale)
    return float(probs @ biases**2)


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
        biases = self._biases(index, evidence.scale)
        seen = _seen(evidence, {} if settled else biases)
        values, limits = {"seen": seen}, evidence.limits
        if evidence.simulated is not None:
            bias = bias_of(self._tests(index, policy, biases), evidence.scale)
            raw = evidence.simulated.raw
            if raw.square + bias <= seen.square:
                values["simulation"] = Value(raw.mean, raw.square + bias)
                if bias < (_TRUSTED * evidence.scale) ** 2:
                    limits = min(limits[0], raw.mean), max(limits[1], raw.mean)
        possible = {name: _possible(value, limits, evidence) for name, value in values.items()}
        value, shares = blend(possible)
        spread = evidence.spread
        if evidence.simulated is not None and "simulation" in shares:
            spread += shares["simulation"] * (evidence.simulated.spread - spread)
        return Valued(value, shares, spread, limits)

    def _weighted(self, index: int) -> Iterator[tuple[Entry, float]]:
        """Yield an evaluation and those before it, with what their tests count."""
        for age in range(index + 1):
            yield self.entries[index - age], 0.5 ** (age / _HALF_LIFE)

    def _biases(self, index: int, scale: float) -> dict[str, float]:
        """Return b² of near, last and seen, from evaluations whose policies are settled."""
        known = []
        for entry, weight in self._weighted(index):
            if "acting" in entry.late:
                early, late = entry.early["acting"], entry.late["acting"]
                known.append((early, late.near, late.near.square + late.shift, weight))
        biases = {}
        for name in ("near", "last"):
            tests = [
                Test(value.mean - truth.mean, value.square + noise, weight)
                for early, truth, noise, weight in known
                if (value := getattr(early, name)) is not None
            ]
            biases[name] = bias_of(tests, scale)
        tests = []
        for early, truth, noise, weight in known:
            value = _seen(early, biases)
            tests.append(Test(value.mean - truth.mean, value.square + noise, weight))
        return biases | {"seen": bias_of(tests, scale)}

    def _tests(self, index: int, policy: str, biases: dict[str, float]) -> Iterator[Test]:
        """Yield the tests of simulations, of the policy and of the one that acts."""
        for entry, weight in self._weighted(index):
            for name in dict.fromkeys((policy, "acting")):
                early, late = entry.early.get(name), entry.late.get(name)
                if early is None or early.simulated is None:
                    continue
                raw, rough = early.simulated.raw, early.simulated.rough
                corrected = early.simulated.corrected
                if late is not None and late.simulated is not None:
                    corrected = late.simulated.corrected
                if np.isfinite(corrected.square):
                    yield Test(corrected.mean - raw.mean, corrected.square, weight)
                if rough is not None:
                    yield Test(raw.mean - rough.mean, raw.square + rough.square, weight)
                if name == "acting":
                    seen = _seen(early, biases) if late is None else _seen(late, {})
                    yield Test(seen.mean - raw.mean, seen.square + raw.square, weight)


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


def _seen(evidence: Evidence, biases: Mapping[str, float]) -> Value:
    """Return the blend of near and last; without biases, as of a settled policy."""
    ways = {"near": evidence.near} | ({} if evidence.last is None else {"last": evidence.last})
    value, _ = blend(
        {name: Value(way.mean, way.square + biases.get(name, 0.0)) for name, way in ways.items()}
    )
    return Value(value.mean, value.square + evidence.shift + biases.get("seen", 0.0))


def _possible(value: Value, limits: tuple[float, float], evidence: Evidence) -> Value:
    """Return a value within limits; what is cut off counts as error."""
    mean = min(max(value.mean, limits[0]), limits[1]) if limits[0] <= limits[1] else value.mean
    floor = (_FLOOR * evidence.scale) ** 2
    return Value(mean, value.square + (value.mean - mean) ** 2 + floor)
