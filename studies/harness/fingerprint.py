"""Tell which code made the runs of a study: finished runs are reused only with equal code.

The fingerprint covers the library, and of `studies` every definition that `run` can reach: names
are followed through imports, docstrings and comments are ignored. Tables, claims and pictures do
not count, so that a better sentence costs no new run.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Definition: TypeAlias = tuple[Path, str]  # a file and a name in it; * is all of them

_ROOT = Path(__file__).parents[2]
_LIBRARY = ("ope_gym", "agents", "wrappers")
_AFTER = {"summarise", "claims", "table", "picture"}  # methods that use finished runs
_IGNORED = {"studies.harness.study"}  # the base class and type aliases compute nothing


def fingerprint(study: Any, seed: int) -> str:
    """Return a hash that is equal for equal settings, seed and code."""
    known = hashlib.sha256()
    settings = {"seed": seed, "numpy": np.__version__, **dataclasses.asdict(study)}
    known.update(json.dumps(settings, sort_keys=True, default=str).encode())
    known.update(_library().encode())
    kind = type(study)
    known.update(code_of(Path(inspect.getfile(kind)), kind.__name__).encode())
    return known.hexdigest()[:16]


@cache
def _library() -> str:
    """Return a hash of all source files of the library."""
    known = hashlib.sha256()
    for path in (path for part in _LIBRARY for path in sorted((_ROOT / part).rglob("*.py"))):
        known.update(path.read_bytes())
    return known.hexdigest()


@cache
def code_of(module: Path, kind: str) -> str:
    """Return all definitions that the runs of a study can reach, given its file and class name."""
    todo: list[Definition] = [(module, kind), (Path(__file__).with_name("seeds.py"), "*")]
    seen: set[Definition] = set()
    text: dict[Definition, str] = {}
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
            text[path, name] = text.get((path, name), "") + ast.dump(bare)
            for part in ast.walk(bare):
                if isinstance(part, ast.Name):
                    todo.append((path, part.id))
                elif isinstance(part, ast.ImportFrom):
                    todo += list(_imports(part).values())
    return "\n".join(text[key] for key in sorted(text))


@cache
def _module(path: Path) -> tuple[dict[str, list[ast.stmt]], dict[str, Definition]]:
    """Return the statements that define each name of a module, and its imports from studies."""
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, Definition] = {}
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


def _imports(node: ast.ImportFrom) -> dict[str, Definition]:
    """Map the local names of `from studies… import …` to their definitions."""
    found: dict[str, Definition] = {}
    if (node.module or "").partition(".")[0] != "studies" or node.module in _IGNORED:
        return found
    base = _ROOT.joinpath(*str(node.module).split("."))
    for alias in node.names:
        whole = base / f"{alias.name}.py"
        place = (whole, "*") if whole.exists() else (base.with_suffix(".py"), alias.name)
        if place[0].exists():
            found[alias.asname or alias.name] = place
    return found


def _stripped(node: ast.stmt) -> ast.stmt:
    """Return a copy without docstrings and, if it is a study, without all that follows its runs."""
    copy: ast.stmt = ast.parse(ast.unparse(node)).body[0]
    if isinstance(copy, ast.ClassDef) and "Study" in map(ast.unparse, copy.bases):
        copy.body = [part for part in copy.body if getattr(part, "name", "") not in _AFTER]
    for part in ast.walk(copy):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return copy
