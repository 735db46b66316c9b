"""Run the Python of the pages, and compare or write what it prints.

    python docs/pages.py                  every page: run its blocks, compare their output
    python docs/pages.py trust --write    one page, and write its output anew

Blocks of one page share a namespace and a temporary folder, as if typed one after the other. An
HTML comment above a block says what is special about it:

    <!-- output -->              of ```text: what the blocks since the last such one print
    <!-- output varies -->       the same, but not compared: it depends on the machine
    <!-- needs: minari -->       of ```python: left out where that module is not installed
    <!-- excerpt: FILE -->       of ```python: lines of a file of the repository, in order; not run
    <!-- not run: WHY -->        of ```python: compiled only
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_NUMBER = re.compile(r"(?<![A-Za-z_])[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the mark above it, its text, where that begins and ends."""

    language: str
    mark: str
    text: str
    start: int
    stop: int
    line: int


def pages() -> list[Path]:
    """The Markdown files of the site."""
    return sorted(DOCS.glob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["language"],
            found["mark"] or "",
            found["text"],
            *found.span("text"),
            text.count("\n", 0, found.start("text")),
        )
        for found in _FENCE.finditer(text)
    ]


def run(page: Path) -> list[tuple[Block, str]]:
    """Run a page in the current folder: each block marked as output, and what was printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    said, found, skipped = io.StringIO(), [], False
    for block in blocks(page):
        if block.language == "python":
            kind, _, rest = block.mark.partition(": ")
            if kind == "excerpt":
                check_excerpt(block, rest)
                continue
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            if kind == "needs" and importlib.util.find_spec(rest) is None:
                skipped = True
            elif kind != "not run":
                with contextlib.redirect_stdout(said):
                    exec(code, namespace)
        elif block.mark in ("output", "output varies"):
            if not skipped:
                found.append((block, said.getvalue()))
            said, skipped = io.StringIO(), False
    return found


def check_excerpt(block: Block, name: str) -> None:
    """Raise unless the lines of a block are lines of the file, in the same order."""
    lines = iter([line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()])
    for line in filter(None, map(str.strip, block.text.splitlines())):
        if line != "..." and line not in lines:  # `in` goes on from where the last was found
            raise ValueError(f"{name} has no line {line!r} after those before it in the excerpt")


def agrees(block: Block, printed: str) -> bool:
    """Whether a block of output shows what was printed, if it is to be compared at all."""
    return block.mark == "output varies" or alike(block.text, printed)


def alike(shown: str, printed: str, tolerance: float = 0.02) -> bool:
    """Whether two texts have the same words, and numbers that agree but for rounding."""
    words = [" ".join(re.sub(r"-{3,}", "", _NUMBER.sub("#", t)).split()) for t in (shown, printed)]
    numbers = [
        [float(n.replace(",", "").replace("−", "-")) for n in _NUMBER.findall(t)]
        for t in (shown, printed)
    ]
    return words[0] == words[1] and all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) + 1e-12 for a, b in zip(*numbers, strict=True)
    )


def write(page: Path, outputs: list[tuple[Block, str]]) -> None:
    """Put what was printed in the place of what is shown."""
    text = page.read_text(encoding="utf-8")
    for block, printed in reversed(outputs):
        lines = [line.rstrip() for line in printed.rstrip("\n").splitlines()]
        text = text[: block.start] + "\n".join(lines) + "\n" + text[block.stop :]
    page.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def workplace(folder: Path) -> Any:
    """Be in a folder, with Minari's datasets below it."""
    before, home = Path.cwd(), os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        del os.environ["MINARI_DATASETS_PATH"]
        if home is not None:
            os.environ["MINARI_DATASETS_PATH"] = home


def main() -> int:
    """The command; 1 if a page shows something else than its blocks print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pages", nargs="*", help="names without .md (default: all of the site); README"
    )
    parser.add_argument("--write", action="store_true", help="write the output into the pages")
    arguments = parser.parse_args()
    folders = {"README": ROOT}
    chosen = [folders.get(name, DOCS) / f"{name}.md" for name in arguments.pages] or pages()
    wrong = 0
    for page in chosen:
        with tempfile.TemporaryDirectory() as folder, workplace(Path(folder)):
            outputs = run(page)
        if arguments.write:
            write(page, outputs)
            continue
        for block, printed in outputs:
            if not agrees(block, printed):
                wrong += 1
                print(f"{page.name}, line {block.line}: the block prints\n{printed}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
