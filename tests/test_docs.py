"""The documentation: its Python runs, its commands exist, nothing is missing, the site builds."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ope_gym
from ope_gym.cli import load
from ope_gym.inference import estimate, intervals, judging
from ope_gym.policies import POLICY_KINDS
from ope_gym.report.scalars import scalars

ROOT = Path(__file__).parents[1]


def _load_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "docs" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_pages"] = module
    spec.loader.exec_module(module)
    return module


pages = _load_pages()
PAGES = {page.stem: page for page in pages.pages()}


def text_of(name: str) -> str:
    return str(PAGES[name].read_text(encoding="utf-8"))


# Python ------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    """What a page may change for good: the threads of torch, the registered policies."""
    import torch

    threads, kinds = torch.get_num_threads(), dict(POLICY_KINDS)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    ours = {k: c for k, c in POLICY_KINDS.items() if c.__module__ != "__main__"}  # just imported
    POLICY_KINDS.clear()
    POLICY_KINDS.update(ours | kinds)


@pytest.mark.usefixtures("as_before")
@pytest.mark.filterwarnings("default")  # of other packages; examples show what is printed
@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_runs_and_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    with pages.workplace(tmp_path):
        outputs = pages.run(PAGES[name])
    for block, printed in outputs:
        assert pages.agrees(block, printed), (
            f"{name}.md, line {block.line}, shows something else than is printed; "
            f"`python docs/pages.py {name} --write` writes it anew:\n{printed}"
        )


def test_few_blocks_are_not_run() -> None:
    marks = [
        block.mark.partition(":")[0]
        for page in PAGES.values()
        for block in pages.blocks(page)
        if block.language == "python"
    ]
    assert set(marks) <= {"", "needs", "excerpt", "not run"}
    assert marks.count("not run") <= 2
    assert marks.count("") >= 20


def test_output_is_compared_word_by_word_and_number_by_number() -> None:
    assert pages.alike("value 12.0  green\n-----", "value  12.1 green")
    assert not pages.alike("value 12.0 green", "value 12.9 green")
    assert not pages.alike("value 12.0 green", "value 12.0 amber")
    assert not pages.alike("1 2", "1 2 3")


def test_excerpt_must_be_in_the_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for lines, fine in (
        ("import ope_gym\n...\nenv.follow(policy)", False),
        ("import ope_gym", True),
    ):
        page.write_text(
            f"<!-- excerpt: examples/hand_written_loop.py -->\n```python\n{lines}\n```\n"
        )
        if fine:
            assert pages.run(page) == []
        else:
            with pytest.raises(ValueError, match=r"no line 'env.follow"):
                pages.run(page)


# Commands ----------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of the console blocks, with the page it is on."""
    for name, page in PAGES.items():
        for block in pages.blocks(page):
            if block.language == "console":
                for line in block.text.replace("\\\n", " ").splitlines():
                    assert line.startswith("$ "), f"{name}.md: {line!r} does not begin with '$ '"
                    yield name, shlex.split(line[2:])


def options_of(script: Path) -> set[str]:
    """The options that a script defines, read from its source: no import, no help to parse."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


def check_script(script: str, arguments: list[str]) -> None:
    path = ROOT / script
    assert path.is_file(), f"there is no {script}"
    if script == "train.py":
        import train

        train.parse(arguments)
        return
    known = options_of(path)
    wrong = [word for word in arguments if word.startswith("--") and word not in known]
    assert not wrong, f"{script} has no {wrong[0]}; it has {', '.join(sorted(known))}"


def check_install(arguments: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\[project\.optional-dependencies\]$(.*?)^\[", project, re.M | re.S)
    extras = re.findall(r"^(\w+) = ", table, re.M)
    for extra in re.findall(r"\[(.*?)\]", " ".join(arguments)):
        assert set(extra.split(",")) <= set(extras), f"pyproject.toml has no extra {extra}"
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()


def test_commands_exist() -> None:
    seen = 0
    for page, words in commands():
        seen += 1
        program, arguments = Path(words[0]).name, words[1:]
        try:
            if program == "python" and arguments[:2] == ["-m", "ope_gym"]:
                load(arguments[2]).parse(arguments[3:])
            elif program == "ope-gym":
                load(arguments[0]).parse(arguments[1:])
            elif program == "python" and arguments[0] != "-m":
                check_script(arguments[0], arguments[1:])
            elif program == "pip":
                check_install(arguments)
            elif program == "sqlite3":  # not a command of ours, and not on every machine
                assert arguments[0].endswith(".ope")
            else:
                known = (
                    ["python", "-m", "venv"],
                    ["python", "-m", "studies"],
                    ["python", "-m", "rl_zoo3.train"],
                    ["tensorboard", "--logdir", "runs"],
                )
                assert [program, *arguments][:3] in known
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{page}.md: `{shlex.join(words)}`: {error}")
    assert seen >= 15


def test_commands_in_the_text_exist() -> None:
    for name, page in PAGES.items():
        if name == "benchmarks":
            continue  # written by commands
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for path in re.findall(r"`(?:python )?((?:examples|docs|benchmarks|tests)/[\w./]+)", text):
            assert (ROOT / path).exists(), f"{name}.md names {path}"


def test_unknown_option_of_a_script_is_found() -> None:
    with pytest.raises(AssertionError, match="has no --epoch"):
        check_script("examples/tianshou_ppo.py", ["--epoch", "3"])


# Completeness ------------------------------------------------------------------------------


def headings(name: str) -> set[str]:
    return set(re.findall(r"^#+ (.*)$", text_of(name), re.M))


def test_every_estimator_has_a_section_with_use_cost_and_weakness() -> None:
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", text_of("estimators"), re.M | re.S))
    assert set(sections) == set(ope_gym.ESTIMATORS)
    for name, section in sections.items():
        for word in ("**Use it**", "**Cost**", "**Weakness**"):
            assert word in section, f"{name} lacks {word}"


def test_every_q_model_has_a_section() -> None:
    kinds = {"Critic", "DynamicsQ", "LinearQ", "NetworkQ", "TabularQ"}
    assert kinds <= headings("q_models")
    assert kinds == {x for x in ope_gym.models.__all__ if x.endswith("Q")} | {"Critic"}


def test_thresholds_regimes_and_intervals_are_those_of_the_code() -> None:
    text = text_of("trust")
    for regime in estimate.REGIMES:
        assert re.search(rf"^\| {regime} \|", text, re.M), regime
    for method in intervals.KINDS:
        assert re.search(rf"^\| `?{method}`? ", text, re.M), method
    few, enough = judging.AMBER_ESS, judging.GREEN_ESS
    low, lost_mean, factor = judging.LOW_MEAN, judging.LOST_MEAN, 2 * judging.HEAVY
    noted, lost = 100 * judging.NOTED_LOSS, 100 * judging.RED_LOSS
    for words in (
        f"| effective episodes | below {few:g}, or 0 from some step on | below {enough:g} |",
        f"more than {factor:g} ln n / n of the squared error, and more than "
        f"{judging.INFLUENCE:g} of it |",
        f"| mean weight | below {lost_mean:g} by more than {judging.ERRORS:g} standard errors |",
        f"| below {low:g} |",
        f"in more than {lost:g} % of its episodes",
        f"| in more than {noted:g} %; a note below |",
        f"the weights, with an ESS below {few:g}, can hardly confirm it",
    ):
        assert words in text, words


def test_tags_are_those_that_are_written() -> None:
    source = (ROOT / "ope_gym" / "report" / "tensorboard.py").read_text(encoding="utf-8")
    text = text_of("tensorboard")
    for tag in re.findall(r'"((?:ope|ranking|rollout)/\w+)"', source):
        assert f"`{tag}`" in text, tag
    evaluation = ope_gym.evaluate_log_probs(
        [-0.7] * 30, [[-0.7] * 30], [0] * 30, range(30), range(31), estimators="FCIS"
    )
    assert len(scalars(evaluation)) >= 7
    for tag in scalars(evaluation):
        if not tag.endswith(("/low", "/high")):  # named beside /value
            assert f"`{tag.replace('FCIS', '<estimator>')}`" in text, tag


def test_file_format_names_every_registered_policy_and_the_magic() -> None:
    text = text_of("file_format")
    ours = {
        kind for kind, cls in POLICY_KINDS.items() if cls.__module__.startswith(("ope_gym", "wrap"))
    }
    assert len(ours) >= 6
    for kind in ours:
        assert f"`{kind}`" in text, kind


# The site ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_strictly_with_every_page(site: Path) -> None:
    for name in PAGES:
        page = site / ("index.html" if name == "index" else f"{name}/index.html")
        assert page.is_file(), name
    assert not list(site.rglob("*.py"))


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loading = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
        r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    for page in site.rglob("*.html"):
        found = loading.findall(page.read_text(encoding="utf-8"))
        assert not found, f"{page.relative_to(site)}: {found[0]}"
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?https?://", style.read_text(encoding="utf-8"))


def test_pictures_of_the_pages_exist() -> None:
    for name, page in PAGES.items():
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / "docs" / path).is_file(), f"{name}.md: {path}"


# Figures ------------------------------------------------------------------------------------


def rows(text: str, head: str) -> list[list[str]]:
    """Return the cells of the table below a head."""
    body = text[text.index(head) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def test_the_readme_says_what_the_training_loops_measured() -> None:
    """The ranges of W over the loops with the policy that acts: at once, and of the last five."""
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    table = rows(text_of("when_it_pays"), "| loop, runs / evaluations ")
    counts = [[float(row[i].split()[0]) for row in table if row[1] == "acting"] for i in (3, 4)]
    (least, most), (low, high) = ((min(some), max(some)) for some in counts)
    assert f"as accurate as {low:.2g} to {high:.4g} fresh episodes right after a rollout" in said
    assert f"the last five training episodes was as accurate as {least:.2g} to {most:.2g}." in said


@pytest.mark.usefixtures("as_before")
def test_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    with pages.workplace(tmp_path):
        ((block, printed),) = pages.run(ROOT / "README.md")
    assert pages.agrees(block, printed), f"`python docs/pages.py README --write`:\n{printed}"


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).is_file(), link


def test_the_api_page_has_every_public_name() -> None:
    named = {line.split(".")[-1] for line in re.findall(r"^::: (.*)$", text_of("api"), re.M)}
    rooms = {name for name in ope_gym.__all__ if isinstance(getattr(ope_gym, name), ModuleType)}
    assert set(ope_gym.__all__) - rooms - {"ESTIMATORS", "Options"} <= named


def test_the_figures_of_the_pages_are_those_of_the_study() -> None:
    """The ratios of auto by group, in the same order."""
    estimators, page = (text_of(name) for name in ("estimators", "outside"))
    measured = rows(page, "| group | state ")
    shown = rows(estimators, "| problems | auto / best ")
    assert [row[1:] for row in shown] == [[row[4], row[11]] for row in measured]
    worst = max(float(row[12]) for row in measured)
    assert f"In the worst single case the error is {worst:.2f} times that of NFIS" in estimators
