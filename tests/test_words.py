"""Docstrings begin with plain words, and no folder or line is too long to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("ope_gym", "wrappers", "agents", "studies", "train.py")
NOT_FIRST = ("Of", "That", "What", "Who", "Those", "The same")
NOT_FIRST_IN_FUNCTIONS = (*NOT_FIRST, "A", "An", "The", "Out:", "(")
MOST_FILES = 15


def files(*names: str) -> list[Path]:
    found = [path for name in names for path in (ROOT / name).rglob("*.py")]
    return sorted([*found, *(ROOT / name for name in names if name.endswith(".py"))])


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield where each docstring of the sources is, its node, and its first line."""
    for path in files(*SOURCES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield place, node, text.splitlines()[0]


def begins(line: str, words: tuple[str, ...]) -> bool:
    return any(line.startswith(word if word in "(" else f"{word} ") for word in words)


def is_property(node: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    """A sentence with a verb and an object for functions; properties and classes may be nouns."""
    found = list(docstrings())
    assert len(found) > 1000
    for place, node, line in found:
        function = isinstance(node, ast.FunctionDef) and not is_property(node)
        assert not begins(line, NOT_FIRST_IN_FUNCTIONS if function else NOT_FIRST), (place, line)


def test_the_formatter_is_never_switched_off() -> None:
    switch = "fmt: " + "skip"
    for path in files(*SOURCES, "tests", "examples", "benchmarks"):
        assert switch not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("name", [*(name for name in SOURCES if "." not in name), "examples"])
def test_folders_have_few_files(name: str) -> None:
    for folder in {path.parent for path in files(name)}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder
