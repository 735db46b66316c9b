"""Who may import whom: data flows one way, and importing the library loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ope_gym", "wrappers", "agents")
OURS = {*PACKAGES, "studies", "examples", "benchmarks", "docs", "tests", "train"}
HEAVY = {"torch", "scipy", "numba", "llvmlite", "tensorboard", "matplotlib", "pandas", "tqdm"}
HEAVY |= {"pyarrow", "polars"}

# Room by room: what a file there may import of ope_gym, beside its own room.
FLOOR = {"arguments", "arrays", "kernels", "batches", "files", "verdict"}
STORED = FLOOR | {"policies", "data"}
SUMS = {
    "arguments",
    "arrays",
    "kernels",
    "options",
    "results",
    "estimators",
    "inference",
    "verdict",
}
WEIGHED = STORED | {"options", "weights", "models"}
MAY_IMPORT = {
    "arguments": set(),
    "arrays": {"arguments", "kernels"},
    "kernels": set(),
    "batches": set(),
    "files": {"arguments"},
    "verdict": set(),
    "policies": FLOOR,
    "data": FLOOR | {"policies"},
    "options": {"arguments", "arrays", "inference"},
    "weights": STORED | {"options"},
    "models": STORED | {"options", "weights"},
    "results": SUMS | {"report"},
    "inference": SUMS,
    "estimators": SUMS,
    "scale": STORED,
    "preparing": WEIGHED | SUMS | {"scale"},
    "estimation": SUMS,
    "evaluation": WEIGHED | SUMS | {"scale", "preparing", "estimation"},
    "log_probs": WEIGHED | SUMS | {"estimation"},
    "analysis": WEIGHED | SUMS | {"scale", "evaluation", "report"},
    "online": WEIGHED | {"inference"},
    "report": SUMS | {"analysis", "files", "online"},
    "stopping": set(),
}
EVERYTHING = {"__init__", "__main__", "cli", "commands"}

# Folder by folder: what the packages around ope_gym may import of it.
RECORDS = {"arguments", "arrays", "batches", "data", "files", "policies", "verdict"}
AROUND = {
    "agents": RECORDS | {"analysis", "online", "report", "results"},
    "wrappers": RECORDS | {"online"},
    "wrappers/loops": RECORDS | {"online", "report"},
    "wrappers/recording": RECORDS | {"stopping"},
    "wrappers/sb3": RECORDS
    | {"analysis", "estimators", "evaluation", "online", "options", "report", "results"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path, *, late: bool = True) -> frozenset[str]:
    """Return the full names that a file imports; `late` ones are inside functions."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not late:
            for other in node.orelse:
                yield from walk(other)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    return frozenset(walk(parsed(path)))


def tops(path: Path, *, late: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imported(path, late=late)}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("ope_gym", {"ope_gym"}),
        ("wrappers", {"ope_gym", "wrappers"}),
        ("agents", {"ope_gym", "agents", "wrappers"}),
    ],
)
def test_packages_import_only_what_they_may(package: str, allowed: set[str]) -> None:
    found = sources(package)
    assert found
    for path in found:
        assert tops(path) & OURS <= allowed, path


def room_of(module: str) -> str:
    """Return the room of a module of ope_gym, or its own name where it stands beside the rooms."""
    return module.split(".")[1] if "." in module else "__init__"


def trespasses() -> Iterator[str]:
    """Yield the imports that the table does not allow."""
    files = {module_of(path): path for path in sources("ope_gym")}
    for module, path in files.items():
        room = room_of(module)
        if room in EVERYTHING:
            continue
        for name in sorted(imported(path) & (files.keys() - {"ope_gym"})):
            if room_of(name) not in MAY_IMPORT[room] | {room}:
                yield f"{module} imports {name}"


def test_rooms_import_only_what_the_table_allows() -> None:
    assert list(trespasses()) == []


def test_no_module_imports_more_than_twenty_of_ours() -> None:
    """Commands and the list of public names aside: else nobody can hold it in mind."""
    files = {module_of(path): path for path in sources("ope_gym")}
    for module, path in files.items():
        names = imported(path) & (files.keys() - {"ope_gym"})
        inner = {x for x in names if not any(y.startswith(f"{x}.") for y in names)}
        assert len(inner) <= 20 or room_of(module) in EVERYTHING, (module, sorted(inner))


def test_recorders_and_agents_import_only_what_the_table_allows() -> None:
    """No recorder computes estimates, except in loops of agents and of others, which show them."""
    for path in (*sources("agents"), *sources("wrappers")):
        rooms = {room_of(name) for name in imported(path) if name.startswith("ope_gym.")}
        assert rooms <= AROUND[path.parent.relative_to(ROOT).as_posix()], path


@pytest.mark.parametrize("room", ["estimators", "inference", "report"])
def test_sums_and_reports_see_no_environment(room: str) -> None:
    for path in sources(f"ope_gym/{room}"):
        assert "gymnasium" not in tops(path), path


def test_no_module_imports_itself_by_way_of_others() -> None:
    packages = (*PACKAGES, "studies", "examples")
    files = {module_of(path): path for package in packages for path in sources(package)}
    graph = {
        module: {name for name in imported(path) if name in files and name not in packages}
        - {module}
        for module, path in files.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_heavy_libraries_are_imported_by_those_that_need_them() -> None:
    """At the top of a module only where `import ope_gym` does not reach it."""
    allowed = {"kernels", "torch", "tensorboard", "events", "plugin", "reader"}
    for path in sources("ope_gym"):
        if path.stem not in allowed:
            assert not tops(path, late=False) & HEAVY, path


def test_importing_the_library_loads_nothing_heavy() -> None:
    """Nor do its commands, policies and models; in a new process, for the tests loaded everything.

    A network without weights does not need torch yet.
    """
    parts = [
        "import ope_gym; ope_gym.evaluate; ope_gym.rank",
        "from ope_gym import __main__, cli; [cli.load(name) for name in cli.COMMANDS]",
    ]
    parts += ["import ope_gym.policies"]
    parts += ["import ope_gym.models; ope_gym.models.NetworkQ()"]
    code = "import sys\n" + "\n".join(f"{part}; print(*sys.modules)" for part in parts)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = [set(line.split()) for line in run.stdout.splitlines()]
    assert len(loaded) == len(parts)
    for part, names in zip(parts, loaded, strict=True):
        assert {"ope_gym", "numpy"} <= names
        assert not names & (HEAVY | {"agents", "wrappers"}), part
    assert "ope_gym.report.figures" not in loaded[0]


def test_modules_are_there_without_their_import() -> None:
    """In a process of its own: nobody has imported them."""
    names = ["models.LinearQ", "overlap", "minari", "tables.scan_parquet"]
    names += ["tensorboard.EvaluationWriter"]
    code = f"import ope_gym; {'; '.join(f'ope_gym.{name}' for name in names)}; ope_gym.missing"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr.endswith("AttributeError: module 'ope_gym' has no attribute 'missing'\n")


def test_everything_public_can_be_imported() -> None:
    import ope_gym

    assert len(set(ope_gym.__all__)) == len(ope_gym.__all__)
    assert set(ope_gym.__all__) <= set(dir(ope_gym))
    for name in ope_gym.__all__:
        assert hasattr(ope_gym, name), name


def test_no_source_uses_the_global_random_state_or_pickle() -> None:
    for package in PACKAGES:
        for path in sources(package):
            assert not imported(path) & {"pickle", "random", "marshal", "shelve"}, path
            for node in ast.walk(parsed(path)):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Attribute)
                    and ast.unparse(node.value) == "np.random"
                ):
                    allowed = {"Generator", "default_rng", "SeedSequence", "PCG64", "BitGenerator"}
                    assert node.attr in allowed, f"{path}: np.random.{node.attr}"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec"}, path


def test_scripts_of_benchmarks_start() -> None:
    """Their own folder comes first on the path: nothing in it may have the name of a package."""
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert "studies" in packages
    assert not packages & {path.stem for path in (ROOT / "benchmarks").iterdir()}
