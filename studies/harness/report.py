"""Write reproduction.md from the JSON files of the studies: the paper beside their findings."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ope_gym.files import write_file
from studies import STUDIES
from studies.harness.claims import FAILS, HOLDS, OURS, RULES, UNDECIDED
from studies.harness.markdown import claims_table, study_section, tidy

_HEAD = f"""\
# The paper, run again

*A comparative study of counterfactual estimators* (Nedelec, Le Roux, Perchet, 2017), claim by
claim. `python -m studies report` writes this page from the results of `python -m studies all`; the
command above each table computes its numbers again. Differences are signed so that they are
positive, or zero, if the claim is right.

## How claims are judged

{tidy(RULES)}

The margins, the rule for tails and p = 0.99 on the grid of the bandit were chosen after seeing
first results; so were the constants of auto and ess-t, on other seeds and other small MDPs.
Claims with the source {", ".join(f"“{name}”" for name in OURS)} are ours and are not counted with
those of the paper.

## Words

- **J** the value of the *target*, the policy that is evaluated; **π_test** (π_e) its probabilities,
  π_k those of the behaviour policies that recorded the data; **N** draws or episodes, **k** draws
  of an action, **r̄** and **V_r** (V) the mean and variance of an action's reward,
  p = r̄² / (r̄² + V).
- **BIS** basic importance sampling, weights π_test / π_k of the recording policy; **FIS** fused,
  weights against the mixture of all behaviour policies; **OUIS** the paper's “optimal unbiased”
  weights; an **N** before the name: divided by the sum of the weights (NIS is NBIS for one
  behaviour policy); a **C** inside it: weights clipped at a cap.
- **EA** the empirical average: the mean reward of each action, weighted by π_test. **ω\\*** the
  weights of least MSE, which need the unknown r̄ and V.
- A *path* says how often each action was drawn. The variance is **V_int** (of the rewards, given
  the path) plus **V_path** (of the mean given the path). MSE = bias² + V_int + V_path.
- *In-sample*: the data that the learner learned from; *fresh* or *held out*: new rollouts of the
  same policies. **PoWER**: the learner of table 2; θ_0 … θ_10 its policies.
- **ε¹, ε²** the two schedules of exploration of table 3. **ESS** effective sample size
  (Σ w)² / Σ w²."""

_OWN_HEAD = f"""\
# Measured beyond the paper

`python -m studies` wrote this page; the command above each table computes its numbers again.

## How claims are judged

{tidy(RULES)}"""


def write_report(out: Path, path: Path) -> list[str]:
    """Write the page `path` from the results in `out`, and copy their pictures to images/.

    Returns:
        The labels of the results.

    Raises:
        FileNotFoundError: If there is no result in `out`.
    """
    results = read_results(out)
    if not results:
        raise FileNotFoundError(f"{out} holds no result of a study: run `python -m studies all`")
    links = {}
    for result in results:
        name, picture = result["label"], result["picture"]
        if picture and path.parent.resolve() == out.resolve():
            links[name] = picture
        elif picture and (out / picture).exists():
            links[name] = f"images/study-{name}.png"
            (path.parent / "images").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / picture, path.parent / links[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, reproduction(results, links))
    return [result["label"] for result in results]


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return the content of the JSON files in the order of `STUDIES`, default settings first.

    A file that is no result is named on stderr and left out.
    """
    found, order = [], list(STUDIES)
    for path in sorted(out.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["label"] == path.stem and result["study"] in STUDIES:
                found.append(result)
        except (ValueError, KeyError, TypeError):
            print(f"{path} is not the result of a study and is left out", file=sys.stderr)
    return sorted(found, key=lambda r: (order.index(r["study"]), bool(r["changed"]), r["label"]))


def reproduction(results: Sequence[dict[str, Any]], links: dict[str, str]) -> str:
    """Return the page; `links` are paths of the pictures by label."""
    usual = [result for result in results if not result["changed"]]
    tally = _tally(usual)
    parts = [_HEAD if tally else _OWN_HEAD, "## Verdicts", *tally]
    # the first result of each study is shown in full
    full = set({result["study"]: result["label"] for result in reversed(results)}.values())
    for result in results:
        if result["label"] in full:
            table = claims_table(result["claims"], link=result["label"])
            parts.append(f"**[{result['title']}](#{result['label']})**\n\n{table}")
    for result in results:
        brief = result["label"] not in full
        parts.append(study_section(result, links.get(result["label"]), brief=brief))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _tally(results: Sequence[dict[str, Any]]) -> list[str]:
    """Count how many claims of the paper hold."""
    claims = [c for r in results for c in r["claims"] if not c["source"].startswith(OURS)]
    if not claims:
        return []
    verdicts = Counter(claim["verdict"] for claim in claims)
    return [
        f"Of {len(claims)} claims of the paper {verdicts[HOLDS]} hold, {verdicts[FAILS]} do not "
        f"hold, {verdicts[UNDECIDED]} are undecided. A statement counts once in each study that "
        "checks it."
    ]
