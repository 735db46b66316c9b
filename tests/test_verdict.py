"""Test reasons and verdicts as data: codes, facts, words, and that names never decide."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ope_gym import evaluate
from ope_gym.analysis.behaviour import fit_behaviour
from ope_gym.verdict import COLOURS, EFFECT, WORDS, Fact, Reason, Verdict
from tests.builders import recorded

ROOT = Path(__file__).parents[1]
FACTS: dict[str, Fact] = {  # those that are no numbers
    "policies": (3, 4),
    "drawn": ("FIS",),
    "fixed": (),
    "model": "logit",
    "behaviour": "policy 3",
    "policy": "last",
    "remedy": "register it",
    "unknown": ("a", "b"),
}


def reasons_made() -> Iterator[tuple[Path, list[str], set[str]]]:
    """Yield the codes and the facts of every `Reason(...)` in the product."""
    for package in ("ope_gym", "wrappers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Reason":
                    parts = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
                    codes = [code for code in parts if isinstance(code, str)]
                    yield path, codes, {str(word.arg) for word in node.keywords}


def test_every_reason_has_words_for_its_facts_and_every_code_is_used() -> None:
    used: set[str] = set()
    for path, codes, names in reasons_made():
        facts = {name: FACTS.get(name, 2.0) for name in names}
        for code in codes:
            assert code in EFFECT, (path, code)
            assert str(Reason(code, **facts)), (path, code)
        used |= set(codes)
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "ope_gym").rglob("*.py")
        if path.name != "verdict.py"
    )
    assert {code for code in WORDS if f'"{code}"' not in text} == set()


def test_a_reason_is_its_code_and_facts() -> None:
    reason = Reason("ess_low", ess=39.96, trajectories=1234, step=6, enough=40.0)
    assert (reason.effect, reason["step"]) == ("amber", 6)
    assert str(reason) == (
        "the effective sample size falls to 39.9 of 1,234 episodes at step 6; 40 would be enough"
    )
    assert len({reason, pickle.loads(pickle.dumps(reason))}) == 1
    assert json.loads(json.dumps(reason.to_dict()))["code"] == "ess_low"
    named = Reason("collect_from", episodes=np.float64(2.0), behaviour="50% {off}")
    assert str(named) == "collect about 2.0 more episodes of 50% {off}"
    assert "float64" not in repr(named)
    assert Reason("mean_weight_very_low", mean=np.inf).to_dict()["mean"] is None
    with pytest.raises(ValueError, match="code 'few' is not in the tables"):
        Reason("few")


def test_the_worst_reason_gives_the_colour_and_comes_first() -> None:
    mild, bad, good = Reason("adaptive"), Reason("guess"), Reason("sure", fresh=50.0)
    verdict = Verdict.of([good, mild, Reason("explore"), Reason("no_past"), bad, mild])
    assert (verdict.colour, verdict.reasons) == ("red", (bad, mild))
    assert (verdict.advice, verdict.notes) == ((Reason("explore"),), (Reason("no_past"),))
    assert (Verdict.of([good]).colour, Verdict.of([good]).against) == ("green", ())
    assert set(EFFECT.values()) == {*COLOURS, "basis", "note", "advice"}


def test_names_of_groups_change_nothing_but_the_words() -> None:
    """Commas, folds, "then", "policy" and "propensities" in a name are only a name."""
    data = recorded(3, (40, 40), held_out=True)
    first_policies = data.trajectories.policy_ids[data.trajectories.offsets[:-1]]
    found = []
    for first, second in (
        ("Ward A, East", "policy 7, then 8 from step 2"),
        ("estimated propensities (fold 2)", "in-sample"),
        ("a", "b"),
    ):
        by = [first if k == 0 else second for k in first_policies]
        fit = fit_behaviour(data.trajectories, by=by, model="logit")
        names = {first: "FIRST", second: "SECOND"}
        result = evaluate(fit.trajectories, data.target, ["auto", "NFIS"])
        facts = []
        for estimate in result.values():
            for reason in (*estimate.verdict.reasons, *estimate.verdict.advice):
                facts.append((reason.code, [names.get(str(x), x) for _, x in reason.facts]))
        found.append((facts, "2 loggers" in result.table(), result.best.value))
    assert found[0] == found[1] == found[2]
    assert found[0][1]
