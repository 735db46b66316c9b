"""Which code makes the runs of a study: then finished runs can be used again, or not.

The code is the library, and what `run` reaches in `studies`: followed by name, through imports, and
without docstrings and comments. What only words, tables, claims or pictures are made of does not
count, so that a better sentence costs no run.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).parent.parent
_LIBRARY = ("ope_gym", "agents", "wrappers")
_AFTER = {"summarise", "claims", "table", "picture"}  # methods of a study that follow its runs
_WORDS = {"title", "takes", "runs", "chunk"}  # fields that do not change a run
_FRAME = {"studies.frame"}  # how runs are kept, not what is in them


def fingerprint(study: Any, seed: int) -> str:
    """Equal for equal settings, seed and code."""
    known = hashlib.sha256()
    settings = {"seed": seed, "numpy": np.__version__, **dataclasses.asdict(study)}
    known.update(json.dumps(settings, sort_keys=True, default=str).encode())
    known.update(_library().encode())
    kind = type(study)
    known.update(code_of(Path(inspect.getfile(kind)), kind.__name__).encode())
    return known.hexdigest()[:16]


@cache
def _library() -> str:
    known = hashlib.sha256()
    for path in (path for part in _LIBRARY for path in sorted((_ROOT / part).rglob("*.py"))):
        known.update(path.read_bytes())
    return known.hexdigest()


@cache
def code_of(module: Path, kind: str) -> str:
    """All definitions that the runs of the study of that class can reach."""
    todo: list[tuple[Path, str]] = [(module, kind), (_ROOT / "studies/seeds.py", "*")]
    seen: set[tuple[Path, str]] = set()
    text: dict[tuple[str, str], str] = {}
    while todo:
        path, name = todo.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        defined, imported = _module(path)
        if name == "*":
            todo += [(path, each) for each in defined]
        elif name in imported:
            todo.append(imported[name])
        for node in defined.get(name, ()):
            bare = _stripped(node)
            text[path.name, name] = text.get((path.name, name), "") + ast.dump(bare)
            for part in ast.walk(bare):
                if isinstance(part, ast.Name):
                    todo.append((path, part.id))
                elif isinstance(part, ast.ImportFrom):
                    todo += list(_imports(part).values())
    return "\n".join(text[key] for key in sorted(text))


@cache
def _module(path: Path) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[Path, str]]]:
    """The statements that define each name of a module, and what it imports of the studies."""
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, tuple[Path, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            imported.update(_imports(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    defined.setdefault(part.id, []).append(node)
    return defined, imported


def _imports(node: ast.ImportFrom) -> dict[str, tuple[Path, str]]:
    """Local names of a `from studies… import …`: the file and the name there, * for a module."""
    found: dict[str, tuple[Path, str]] = {}
    if (node.module or "").partition(".")[0] != "studies" or node.module in _FRAME:
        return found
    base = _ROOT.joinpath(*str(node.module).split("."))
    for alias in node.names:
        whole = base / f"{alias.name}.py"
        place = (whole, "*") if whole.exists() else (base.with_suffix(".py"), alias.name)
        if place[0].exists():
            found[alias.asname or alias.name] = place
    return found


def _stripped(node: ast.stmt) -> ast.stmt:
    """Without docstrings and, of a study, without what follows its runs."""
    copy: ast.stmt = ast.parse(ast.unparse(node)).body[0]
    if isinstance(copy, ast.ClassDef) and "Study" in map(ast.unparse, copy.bases):
        copy.body = [part for part in copy.body if _name(part) not in _AFTER | _WORDS]
    for part in ast.walk(copy):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return copy


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", "")
