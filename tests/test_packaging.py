"""What people install: sdist and wheel are built and used outside of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_ALONE = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # nothing of the checkout
_BUILD = "import sys; from setuptools import build_meta as b; print(b.{}(sys.argv[1]))"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=_ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a distribution as pip would, but with the setuptools that is installed."""
    said = run(sys.executable, "-c", _BUILD.format(f"build_{kind}"), folder, cwd=source)
    return folder / said.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist of a copy of the checkout, and the wheel that is built from the sdist."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copy(ROOT / "CITATION.cff", copy)
    for name in ("ope_gym", "wrappers", "agents", "studies", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build("sdist", copy, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def test_the_wheel_holds_the_two_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ope_gym", "wrappers"}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("ope_gym", "wrappers")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(names)
    assert {"ope_gym/py.typed", "wrappers/py.typed"} <= set(names)


def test_the_sdist_has_no_tests_that_cannot_be_run_from_it(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names if "." not in name.split("/")[0]}
    assert tops - {"", "LICENSE", "PKG-INFO"} == {"ope_gym", "wrappers"}
    assert {"CHANGELOG.md", "CITATION.cff"} <= set(names)


def test_the_installed_wheel_works_outside_of_the_checkout(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its dependencies are those of this environment; only the package itself is installed."""
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    python = home / "bin" / "python"
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    own = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=home)[:-1]
    )
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q"]
    run(*pip, "--no-index", built[1], cwd=tmp_path)
    (own / "dependencies.pth").write_text("\n".join(libraries) + "\n")  # after its own folder
    code = "import ope_gym, wrappers; print(ope_gym.__file__, wrappers.__file__)"
    found = run(python, "-P", "-c", code, cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(own) for file in found)
    script = home / "bin" / "ope-gym"
    assert "usage: ope-gym" in run(script, "--help", cwd=tmp_path)
    done = subprocess.run([script, "info", "none.ope"], capture_output=True, text=True, env=_ALONE)
    assert done.returncode == 2
    assert done.stderr.startswith("ope-gym: ")


def test_versions_agree() -> None:
    import ope_gym

    assert ope_gym.__version__ == PROJECT["version"]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", cited, re.MULTILINE)[1] == PROJECT["version"]  # type: ignore[index]


def test_the_constraints_allow_what_is_promised() -> None:
    """Each dependency has a lower bound, and the tested version is not below it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line)
    for wanted in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", wanted).groups()  # type: ignore[union-attr]
        tested = [int(part) for part in pinned[name].split(".")]
        assert tested >= [int(part) for part in bound.split(".")], wanted


def test_continuous_integration_runs_what_contributors_run() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "bash .ci/run" in workflow
    assert (ROOT / ".ci" / "run").exists()
    lowest = re.search(r">=3\.(\d+)", PROJECT["requires-python"])
    assert lowest is not None
    assert f'python-version: "3.{lowest[1]}"' in workflow
