"""Who may import whom: data flows one way, and importing the library loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ope_gym", "wrappers", "agents")
OURS = {*PACKAGES, "studies", "examples", "benchmarks", "docs", "tests", "train"}
HEAVY = {"torch", "scipy", "numba", "llvmlite", "tensorboard", "matplotlib", "pandas", "tqdm"}

# The sums know arrays only: no environment, no recording, no policy.
ARRAYS_ONLY = (
    "kernels",
    "weights",
    "estimators",
    "intervals",
    "diagnostics",
    "validation",
    "results",
    "methods",
    "magic",
    "control_variates",
    "shard_sums",
    "poisson",
)
HOSTS = {"sb3"}  # callbacks of training loops: they record and evaluate
RECORDING = {
    "ope_gym.buffer",
    "ope_gym.trajectories",
    "ope_gym.columns",
    "ope_gym.schedules",
    "ope_gym.storage",
    "ope_gym.episode_files",
    "ope_gym.spaces",
    "ope_gym.space_json",
    "ope_gym.policies",
    "ope_gym.likelihood",
    "ope_gym.evaluation",
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, late: bool = True) -> Iterator[str]:
    """Full names that a file imports, but for type checkers; `late` ones are in functions."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from walk(other)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def tops(path: Path, *, late: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imported(path, late=late)}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("ope_gym", {"ope_gym"}),
        ("wrappers", {"ope_gym", "wrappers"}),
        ("agents", {"ope_gym", "agents"}),
    ],
)
def test_packages_import_only_what_they_may(package: str, allowed: set[str]) -> None:
    found = sources(package)
    assert found
    for path in found:
        assert tops(path) & OURS <= allowed, path


@pytest.mark.parametrize("name", ARRAYS_ONLY)
def test_the_sums_see_no_environment_no_recording_and_no_policy(name: str) -> None:
    names = set(imported(ROOT / "ope_gym" / f"{name}.py"))
    assert not {full for full in names if full.split(".")[0] == "gymnasium"}
    assert not names & RECORDING


def test_recording_knows_no_estimator() -> None:
    estimating = {f"ope_gym.{name}" for name in (*ARRAYS_ONLY, "likelihood", "evaluation")}
    paths = [ROOT / f"{name.replace('.', '/')}.py" for name in RECORDING - estimating]
    recorders = [path for path in sources("wrappers") if path.stem not in HOSTS]
    for path in (*paths, *recorders):
        assert not set(imported(path)) & estimating, path


def test_writers_do_not_compute() -> None:
    for name in ("tensorboard", "figures"):
        path = ROOT / "ope_gym" / f"{name}.py"
        computing = {"ope_gym.kernels", "ope_gym.likelihood", "ope_gym.evaluation"}
        if path.exists():
            assert not set(imported(path)) & computing, path


def test_no_module_imports_itself_by_way_of_others() -> None:
    files = {module_of(path): path for package in PACKAGES for path in sources(package)}
    graph = {
        module: {name for name in imported(path) if name in files and name not in PACKAGES}
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
    allowed = {"kernels", "torch_policy", "tensorboard"}
    for path in sources("ope_gym"):
        if path.stem not in allowed:
            assert not tops(path, late=False) & HEAVY, path


@pytest.mark.parametrize("module", ["ope_gym", "ope_gym.__main__"])
def test_importing_the_library_loads_nothing_heavy(module: str) -> None:
    """Nor the help of its commands; in a process of its own, for the tests loaded everything."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert {"ope_gym", "numpy"} <= loaded
    assert not loaded & (HEAVY | {"agents", "wrappers"})


def test_modules_are_there_without_their_import() -> None:
    """In a process of its own: nobody has imported them."""
    names = ["baselines.LinearQ", "oracle", "overlap.overlap", "sharded.evaluate_shards", "minari"]
    names += ["tensorboard.EvaluationWriter", "torch_policy.TorchPolicy"]
    code = f"import ope_gym; {'; '.join(f'ope_gym.{name}' for name in names)}; ope_gym.missing"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr.endswith("AttributeError: module 'ope_gym' has no attribute 'missing'\n")


def test_everything_public_can_be_imported() -> None:
    import ope_gym

    assert len(set(ope_gym.__all__)) == len(ope_gym.__all__)
    for name in ope_gym.__all__:
        assert hasattr(ope_gym, name), name


def test_no_source_uses_the_global_random_state_or_pickle() -> None:
    for package in PACKAGES:
        for path in sources(package):
            names = set(imported(path))
            assert not names & {"pickle", "random", "marshal", "shelve"}, path
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random":
                    allowed = {"Generator", "default_rng", "SeedSequence", "PCG64", "BitGenerator"}
                    assert node.attr in allowed, f"{path}: np.random.{node.attr}"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec"}, path
