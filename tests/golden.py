"""Golden results: what every public function returns on fixed episodes, to compare after a change.

    python -m tests.golden --check            within tolerances, as the test suite does
    python -m tests.golden --check --exact    to the bit, on the machine and versions that wrote
    python -m tests.golden --write            store the results of this code in tests/golden.json
    ... --only PREFIX ... --skip PREFIX ...   keys to write or check; --ray adds a Ray cluster

Keys begin with the data set, or with

    bootstrap/  percentile and BCa intervals, which depend on how draws are made
    files/      episodes read from one file in one chunk; must equal the data set's within 1e-12,
                1e-9 with a q model
    chunks/     the same from three files in many chunks; must equal files/ as closely
    draws/      shares of random draws, counted: a rounding error can move one of them
    float32/    q models and policies in single precision
    text/       what people read

`golden_data` makes the episodes, `golden_cases` says what is asked of them, and `golden_library`
holds every call of ope_gym: after a change of the interface edit only that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests import golden_cases
from tests.golden_library import Results

FILE = Path(__file__).with_name("golden.json")
TOLERANCES = {"float32/models/network": 0.1, "float32/": 1e-4, "draws/": 1e-3, "": 1e-9}
TWINS = {  # by prefix: which results they must equal, and how closely, within one run
    "loaded/": ("", 0.0),
    "files/": ("", 1e-12),
    "chunks/": ("files/", 1e-12),
    "workers/": ("chunks/", 1e-12),
    "ray/": ("chunks/", 1e-12),
    "bootstrap/chunks/": ("bootstrap/files/", 1e-12),
    "bootstrap/ray/": ("bootstrap/chunks/", 1e-12),
}
USES_Q = {"DM", "DR", "WDR", "FDR", "FWDR", "auto"}
LINEAR = 1e-9  # for these instead of 1e-12: solving normal equations multiplies rounding errors
NOT_STORED = ("loaded/", "workers/", "ray/", "bootstrap/ray/")


def compute(*, ray: bool = False) -> Results:
    """Return all results by name."""
    return {key: _plain(value) for key, value in golden_cases.compute(ray=ray).items()}


def _plain(value: Any) -> Any:
    """Return lists, strings and Python's numbers only, as JSON will give them back."""
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value.item() if isinstance(value, np.generic) else value


def relative(key: str, one: Any, other: Any) -> float:
    """Return the largest relative difference; infinite if kinds, lengths or words differ.

    Entries of a list are each compared by their own size, with two exceptions. Influence values
    are compared by the size of the largest, because their sum may be 0 but for rounding. Numbers
    about weights, the reports of "auto" and shares of draws are compared as if they were at least
    1, because some of them may be any number near 0.
    """
    a, b = (x if isinstance(x, list) else [x] for x in (one, other))
    if len(a) != len(b):
        return math.inf
    least = 0.0
    if key.endswith("/influence"):
        least = max((abs(x) for x in a if _number(x)), default=0.0)
    elif key.endswith(("/weights", "/report")) or key.startswith("draws/"):
        least = 1.0
    return max((_entry(x, y, least) for x, y in zip(a, b, strict=True)), default=0.0)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entry(a: Any, b: Any, least: float) -> float:
    if not (_number(a) and _number(b)):
        return 0.0 if a == b else math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return float(abs(a - b) / max(abs(a), abs(b), least))


def tolerance(key: str) -> float:
    return next(found for prefix, found in TOLERANCES.items() if key.startswith(prefix))


def differences(stored: Results, found: Results, *, exact: bool = False) -> list[str]:
    """Describe every result that is not as stored."""
    lines = [f"{key}: is not stored" for key in found if key not in stored]
    for key, value in stored.items():
        if key not in found:
            lines.append(f"{key}: was not computed")
            continue
        off = relative(key, value, found[key])
        if off > (0.0 if exact else tolerance(key)):
            lines.append(f"{key}: off by {off:.2g}: {value!r} is now {found[key]!r}")
    return lines


def twin_differences(found: Results) -> list[str]:
    """Describe results that differ between memory, files, chunks and workers."""
    lines = []
    for prefix, (reference, allowed) in TWINS.items():
        for key in [key for key in found if key.startswith(prefix)]:
            twin = reference + key[len(prefix) :]
            if twin not in found:  # not all data sets are evaluated in all ways
                continue
            off = relative(key, found[twin], found[key])
            if off > (LINEAR if allowed and USES_Q.intersection(key.split("/")) else allowed):
                lines.append(f"{key}: off {twin} by {off:.2g}: {found[twin]!r}, {found[key]!r}")
    return lines


def read() -> Results:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def storable(found: Results) -> Results:
    return {key: value for key, value in found.items() if not key.startswith(NOT_STORED)}


def main(arguments: list[str] | None = None) -> int:
    """Write or check the golden results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PREFIX")
    args = parser.parse_args(arguments)

    def chosen(results: Results) -> Results:
        return {
            key: value
            for key, value in results.items()
            if key.startswith(tuple(args.only)) and not key.startswith(tuple(args.skip))
        }

    found = compute(ray=args.ray)
    lines = twin_differences(found)
    if args.write:
        stored = read() if FILE.exists() else {}
        kept = {key: value for key, value in stored.items() if key not in chosen(stored)}
        rows = sorted((kept | chosen(storable(found))).items())
        text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rows)
        FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        print(f"{len(rows):,} results, {FILE.stat().st_size:,} bytes in {FILE.name}")
    else:
        lines += differences(chosen(read()), chosen(storable(found)), exact=args.exact)
        print(f"{len(chosen(read())):,} results compared, {len(lines):,} differ")
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
