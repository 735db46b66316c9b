"""The study of adaptive data: its exact biases and its claims."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.adaptive.exact import EXACT, stopped_estimates, two_round_bias
from studies.adaptive.study import LEARNED, Adaptive
from studies.harness.claims import FAILS, HOLDS, UNDECIDED
from studies.harness.seeds import seeds_of


def test_stopping_at_the_first_zero_biases_the_average() -> None:
    for ones in (0, 1, 5):
        np.testing.assert_allclose(stopped_estimates(ones), ones / (ones + 1))


def test_exact_biases_of_the_two_round_example() -> None:
    fixed = dict(zip(EXACT, two_round_bias(adaptive=False), strict=True))
    learned = dict(zip(EXACT, two_round_bias(adaptive=True), strict=True))
    assert [fixed[name] for name in ("BIS", "FIS", "OUIS")] == pytest.approx([0, 0, 0], abs=1e-15)
    assert learned["BIS"] == pytest.approx(0.0, abs=1e-15)
    assert learned["FIS"] == pytest.approx(-5 / 42)  # (5/14 + 17/42) / 2 − 1/2
    assert learned["OUIS"] == pytest.approx(-1 / 5)
    assert learned["NFIS"] == pytest.approx(-1 / 20)


def test_claims_of_adaptive_data() -> None:
    study = Adaptive(stopped=50)
    summary = study.summarise(study.run(seeds_of(0, (0, 40))))
    verdicts = [claim.verdict for claim in study.claims(summary)]
    assert verdicts[0] in (HOLDS, UNDECIDED)  # its series is exact, its simulation short
    assert verdicts[1:6] == [FAILS, FAILS, HOLDS, FAILS, HOLDS]
    assert FAILS not in verdicts[6:]
    assert summary["stopped"]["series"][0] == pytest.approx(1 - math.log(2), abs=1e-15)
    for name, in_sample, held_out in zip(
        LEARNED,
        *(summary["learned"][key][0] for key in ("in_sample", "held_out")),
        strict=True,
    ):
        assert in_sample > held_out, name
