"""Test in a real browser what TensorBoard shows of a training: the OPE tab and standard pages."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import train
from docs import screenshot
from ope_gym import evaluate, rank
from ope_gym.analysis.overlap import overlap
from ope_gym.online import FreeEstimate
from ope_gym.report import events
from ope_gym.report.free_values import FreeWriter
from ope_gym.report.page import report_page
from ope_gym.report.tensorboard import EvaluationWriter
from tests import builders

RUN = "CartPole-v1__train__0__"
ESTIMATORS = ("auto", "NFIS", "FIS")
SIZE = 1400, 1000

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None and shutil.which("chromium-browser") is None,
    reason="no chromium on this machine (Debian: apt-get install chromium)",
)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log directory of `python train.py` with four policies."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    words = ["--policies", "4", "--rollouts", "10", "--truth-episodes", "20", "--quiet"]
    words += ["--level", "0.995"]
    assert train.main([*words, "--logdir", str(folder), "--estimators", *ESTIMATORS]) == 0
    return folder


@pytest.fixture(scope="module")
def board(logdir: Path) -> Iterator[tuple[screenshot.Browser, str]]:
    """Yield a browser and the address of a TensorBoard."""
    with screenshot.chromium(SIZE) as browser, screenshot.tensorboard(logdir, 120.0) as address:
        yield browser, address


@pytest.fixture(scope="module")
def tab(board: tuple[screenshot.Browser, str], logdir: Path) -> dict[str, Any]:
    """Return what the OPE tab shows at first."""
    (shown,) = take(board, "ope", logdir.parent)
    return {**shown, "picture": logdir.parent / "ope.png"}


def take(board: tuple[screenshot.Browser, str], page: str, folder: Path, **more: Any) -> Any:
    browser, address = board
    path = folder / f"{page}.png"
    return screenshot.capture(
        browser, address, page, path, tags="^(ope|rollout)/", timeout=120.0, **more
    )


def document(board: tuple[screenshot.Browser, str], logdir: Path, step: int) -> dict[str, Any]:
    """Return the details of a step, as the page gets them."""
    (run,) = (path.name for path in logdir.iterdir())
    browser, address = board
    ask = f"fetch('{address}data/plugin/ope/details?run={run}&step={step}').then(a => a.json())"
    found: dict[str, Any] = browser.evaluate(ask)["evaluation"]
    assert found["step"] == step
    return found


def click_step(browser: screenshot.Browser, step: int) -> dict[str, Any]:
    """Click the dot of a step; return what the tab shows then."""
    place = browser.evaluate(
        "(() => { const frame = document.querySelector('iframe'); "
        "const page = frame.getBoundingClientRect(); "
        f"const dot = frame.contentDocument.querySelector('.dot[data-step=\"{step}\"]'); "
        "const box = dot.getBoundingClientRect(); "
        "return [page.left + box.left + box.width / 2, page.top + box.top + box.height / 2]; })()"
    )
    browser.click(*place)
    (after,) = screenshot.settled(browser, "ope", 60.0)
    return dict(after)


def test_the_tab_answers_first(tab: dict[str, Any]) -> None:
    assert "Policy 4 is worth " in tab["title"]
    assert "fresh episodes would make you" in tab["title"]
    assert tab["title"].startswith(("green", "amber", "red"))
    assert f"{RUN}" in tab["where"]
    assert "step 4" in tab["where"]


def test_the_tab_draws_the_recommended_estimate_with_its_band(tab: dict[str, Any]) -> None:
    assert [name.split(": ")[1] for name in tab["series"]] == ["auto", "rollout/return"]
    assert [name.split(": ")[1] for name in tab["banded"]] == ["auto"]
    assert tab["points"] == 4  # a verdict for each evaluation
    assert tab["fresh"] == 1
    assert tab["ticks"] == [*ESTIMATORS, "fresh", "rollout/return"]
    assert tab["ticked"] == ["auto", "fresh", "rollout/return"]


def test_the_tab_shows_what_the_last_evaluation_rests_on(tab: dict[str, Any]) -> None:
    assert [row.split(":")[0] for row in tab["forest"]] == list(ESTIMATORS)
    assert tab["cards"] == ["forest", "ess", "behaviours", "reasons", "concentration", "overlap"]
    assert tab["theme"] == "light"
    image = pytest.importorskip("PIL.Image")
    with image.open(tab["picture"]) as picture:
        assert picture.size == SIZE
        pixels = np.asarray(picture.convert("RGB"))
    assert len(np.unique(pixels @ np.array([1, 256, 65536]))) > 200


def test_a_click_on_a_step_shows_its_forest(
    board: tuple[screenshot.Browser, str], tab: dict[str, Any], logdir: Path
) -> None:
    browser, _ = board
    take(board, "ope", logdir.parent)
    after = click_step(browser, 2)
    assert "Policy 2 is worth " in after["title"]
    assert "step 2" in after["where"]
    assert "show the latest" in after["where"]
    assert after["forest"] != tab["forest"]
    assert "99.5 % intervals" in said_in(browser, "forest")
    best = document(board, logdir, 2)["estimates"][0]
    assert after["forest"][0].startswith(f"auto: {best['value']:.4g}")


def said_in(browser: screenshot.Browser, card: str) -> str:
    page = "document.querySelector('iframe').contentDocument"
    return str(browser.evaluate(f"{page}.querySelector('#card-{card}').innerText"))


def test_ticking_an_estimator_draws_its_line(
    board: tuple[screenshot.Browser, str], logdir: Path
) -> None:
    browser, _ = board
    take(board, "ope", logdir.parent)
    browser.evaluate(
        "document.querySelector('iframe').contentDocument"
        ".querySelector('[data-name=\"FIS\"] input').click()"
    )
    (after,) = screenshot.settled(browser, "ope", 60.0)
    names = [name.split(": ")[1] for name in after["series"]]
    assert sorted(names) == ["FIS", "auto", "rollout/return"]
    assert len(after["banded"]) == 2


def test_the_tab_follows_the_dark_mode_of_tensorboard(
    board: tuple[screenshot.Browser, str], logdir: Path
) -> None:
    (shown,) = take(board, "ope", logdir.parent, dark=True)
    assert shown["theme"] == "dark"
    assert shown["lines"] == 2


def test_custom_scalars_show_the_recommended_estimate_first(
    board: tuple[screenshot.Browser, str], logdir: Path
) -> None:
    first, beside, everyone, sure = take(board, "custom_scalars", logdir.parent)
    assert (first["title"], first["lines"], first["bands"]) == ("auto with its interval", 1, 1)
    assert beside["lines"] + beside["points"] >= 2  # the estimate and the return
    assert everyone["lines"] == len(ESTIMATORS)
    assert sure["lines"] == 1


def test_runs_have_labels_that_tell_them_apart(
    board: tuple[screenshot.Browser, str], logdir: Path
) -> None:
    """Cut at folders, never down to a bare number; of long names what differs is kept."""
    browser, address = board
    take(board, "ope", logdir.parent)
    code = f"{address}data/plugin/ope/labels.js"
    for names, wanted in (
        (["PPO_1", "PPO_2"], ["PPO_1", "PPO_2"]),
        (["a/b/PPO_1", "a/b/PPO_2"], ["PPO_1", "PPO_2"]),
        (["a/cart/1", "a/cart/2"], ["cart/1", "cart/2"]),
        (["x/cart/1", "x/pole/1"], ["cart/1", "pole/1"]),
        (["a/b"], ["a/b"]),
        (
            [f"CartPole-v1__train__{seed}__1763457000" for seed in (0, 1)],
            ["CartPole-v…0__1763457000", "CartPole-v…1__1763457000"],
        ),
        (["q" * 20 + end + "q" * 20 for end in "12"], ["q" * 20 + end + "q" * 20 for end in "12"]),
    ):
        found = browser.evaluate(f"import('{code}').then((m) => [...m.labels({names!r}).values()])")
        assert found == wanted


# Values of a training loop ----------------------------------------------------------------


def free_value(step: int, value: float, error: float, *, settled: bool = False) -> FreeEstimate:
    ends = value - 2 * error, value + 2 * error
    return FreeEstimate(step, value, error, *ends, settled, 80.0, 31, {"advantages": 1.0})


def test_the_tab_follows_a_training_while_it_goes_on(
    board: tuple[screenshot.Browser, str], tmp_path: Path
) -> None:
    """As OPECallback writes it: provisional values, and settled ones of earlier policies."""
    with (
        SummaryWriter(str(tmp_path / "runs" / "PPO_1")) as writer,
        FreeWriter(writer, level=0.995) as free,
    ):
        for k in (1, 2, 3):
            free.add(free_value(2048 * k, 100.0 * k, 10.0))
            writer.add_scalar("rollout/ep_rew_mean", 60.0 * k, 2048 * k)
        free.add(free_value(2048, 104.0, 5.0, settled=True))
        writer.flush()
        with screenshot.tensorboard(tmp_path / "runs", 120.0) as address:
            browser, _ = board
            (first,) = take((browser, address), "ope", tmp_path)
            assert "after 6,144 timesteps is worth 300 (99.5 %: 280 to 320)" in first["title"]
            assert "as sure as about 64 fresh episodes" in first["title"]
            assert first["title"].startswith("green")
            assert "99.5 % intervals" in said_in(browser, "free")
            assert first["cards"] == ["free", "ways", "trust", "best"]
            assert first["forest"] == ["provisional: 300 (280 to 320), green"]
            assert (first["lines"], first["bands"], first["points"]) == (3, 1, 3)
            before = click_step(browser, 2048)
            assert "after 2,048 timesteps is worth 104.0 (99.5 %: 94.0 to 114.0)" in before["title"]
            assert before["forest"] == [
                "settled: 104 (94 to 114), green",
                "provisional: 100 (80 to 120), green",
            ]
            browser.evaluate(
                "document.querySelector('iframe').contentDocument"
                ".querySelector('.where button').click()"
            )
            free.add(free_value(8192, 400.0, 30.0))  # and the page is not touched
            writer.flush()
            deadline = time.monotonic() + 60.0
            while time.monotonic() < deadline:
                (after,) = screenshot.settled(browser, "ope", 60.0)
                if "8,192" in after["title"]:
                    break
            assert "after 8,192 timesteps is worth 400 (99.5 %: 340 to 460)" in after["title"]
            assert after["title"].startswith("amber")
            assert after["points"] == 4
            many_runs(browser, tmp_path / "runs")


def test_fresh_episodes_alone_are_shown_once(
    board: tuple[screenshot.Browser, str], tmp_path: Path
) -> None:
    """As OPECallback writes those of DQN; the axis has two marks wherever the interval lies."""
    with FreeWriter(tmp_path / "runs" / "DQN_1") as free:
        for step, value in ((100, 0.7), (200, 0.93)):
            found = FreeEstimate(step, value, 0.2, 0.51, 1.35, False, 0.4, 5, {"fresh": 1.0})
            free.add(found, "fresh")
    with screenshot.tensorboard(tmp_path / "runs", 120.0) as address:
        browser, _ = board
        (shown,) = take((browser, address), "ope", tmp_path)
        assert shown["where"].endswith("step 200 · 5 fresh episodes")
        assert "from 5 fresh episodes" in shown["title"]
        assert shown["cards"] == ["free", "best", "trust"]
        assert [row.split(":")[0] for row in shown["forest"]] == ["fresh episodes"]
        assert (shown["lines"], shown["fresh"], shown["ticks"]) == (1, 2, ["fresh"])
        inside = "document.querySelector('iframe').contentDocument"
        assert browser.evaluate(f"{inside}.querySelectorAll('#card-free .grid').length") >= 2
        trust = browser.evaluate(f"{inside}.querySelector('#card-trust').innerText")
        assert "settle" not in trust
        assert "eval_env" not in trust


def test_an_evaluation_beside_a_free_value_has_titles_of_its_own(
    board: tuple[screenshot.Browser, str], tmp_path: Path
) -> None:
    made = builders.recorded(1, (30, 30, 30))
    evaluation = evaluate(made.trajectories, made.target, ["NFIS", "FIS"])
    with SummaryWriter(str(tmp_path / "runs" / "PPO_1")) as writer:
        with FreeWriter(writer) as free:
            free.add(free_value(2048, 100.0, 10.0))
        with EvaluationWriter(writer, layout=False) as report:
            report.add_evaluation(evaluation, 2048)
    with screenshot.tensorboard(tmp_path / "runs", 120.0) as address:
        browser, _ = board
        take((browser, address), "ope", tmp_path)
        inside = "document.querySelector('iframe').contentDocument"
        titles = f"[...{inside}.querySelectorAll('.card h3')].map(e => e.innerText)"
        found = browser.evaluate(titles)
        assert len(set(found)) == len(found)
        assert "From recorded episodes, with importance weights" in found
        note = browser.evaluate(f"{inside}.querySelector('#card-forest .quiet').innerText")
        assert "usually far less sure than the value above" in note


HOSTILE = ("toString", "__proto__", "constructor", "<img src=x onerror=alert(1)>", "a\"b&amp;'c")


def test_names_of_strangers_and_a_damaged_run_leave_the_tab_working(
    board: tuple[screenshot.Browser, str], tmp_path: Path
) -> None:
    logdir = tmp_path / "runs"
    for run in ("toString", "__proto__"):
        log = events.EventLog(logdir / run)
        for step in (1, 2, 3):
            numbers = {f"ope/{name}/value": float(step + k) for k, name in enumerate(HOSTILE)}
            log.add(events.scalars({**numbers, "ope/verdict": 7.0}), step)
        log.close()
    damaged = events.EventLog(logdir / "damaged")
    damaged.add(events.scalars({f"ope/e{k}/value": 1.0 for k in range(3000)}), 1)
    damaged.add(events.document("ope/details/0", b'{"kind": "evaluation"', "ope"), 1)
    damaged.close()
    with screenshot.tensorboard(logdir, 120.0) as address:
        browser, _ = board
        (shown,) = take((browser, address), "ope", tmp_path)
        inside = "document.querySelector('iframe').contentDocument"
        listed = f"[...{inside}.querySelectorAll('.run .name')].map(e => e.title)"
        assert sorted(browser.evaluate(listed)) == ["__proto__", "damaged", "toString"]
        assert len(shown["ticks"]) <= 40

        def text(selector: str) -> str:
            return str(browser.evaluate(f"{inside}.querySelector('{selector}')?.innerText ?? ''"))

        def click(run: str) -> None:
            browser.evaluate(f"{inside}.querySelector('[data-run=\"{run}\"] .name').click()")
            wait_until(lambda: run in text(".where"))

        click("damaged")
        wait_until(lambda: "cannot be read" in text("#card-problem"))
        browser.evaluate(f"{inside}.querySelector('#more summary').click()")
        search = f"{inside}.querySelector('#more input')"
        browser.evaluate(f"{search}.value = '2999'")
        browser.evaluate(f"{search}.dispatchEvent(new Event('input'))")
        wait_until(lambda: text("#more div").strip() == "e2999")
        for run in ("__proto__", "toString"):
            click(run)
            wait_until(lambda: text("h1").startswith("The policy is worth "))
        for name in HOSTILE:
            label = f"[...{inside}.querySelectorAll('#series label')].find(e => e.dataset.name === "
            box = f"{label}{json.dumps(name)}).querySelector('input')"
            browser.evaluate(f"{box}.checked || {box}.click()")
        lines = f"[...{inside}.querySelectorAll('#chart path.line')]"
        drawn = f"{lines}.filter(e => e.dataset.run === '__proto__').map(e => e.dataset.series)"
        wait_until(lambda: set(browser.evaluate(drawn)) == set(HOSTILE))
        assert not browser.evaluate(f"{inside}.querySelectorAll('img').length")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_steps_are_chosen_by_keyboard(
    board: tuple[screenshot.Browser, str], tab: dict[str, Any], logdir: Path
) -> None:
    browser, _ = board
    take(board, "ope", logdir.parent)
    chart = "document.querySelector('iframe').contentDocument.querySelector('#chart svg')"
    browser.evaluate(f"{chart}.focus()")
    for key in ("Home", "ArrowRight", "Enter"):
        browser.evaluate(f"{chart}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
    (after,) = screenshot.settled(browser, "ope", 60.0)
    assert "step 2" in after["where"]
    assert after["forest"] != tab["forest"]
    focused = "document.querySelector('iframe').contentDocument.activeElement === "
    assert browser.evaluate(f"{focused}{chart}")


def test_the_page_of_a_report_draws_what_the_tab_draws(
    board: tuple[screenshot.Browser, str], tmp_path: Path
) -> None:
    made = builders.recorded(1, (30, 30, 30))
    evaluation = evaluate(made.trajectories, made.target, ["NFIS", "BIS"])
    ranking = rank(made.trajectories, {name: k for k, name in enumerate(HOSTILE[:3])}, "NFIS")
    path = tmp_path / "report.html"
    shares = overlap(made.trajectories, made.target)
    page = report_page(evaluation, ranking=ranking, overlap=shares, title=HOSTILE[3])
    path.write_text(page, encoding="utf-8")
    browser, _ = board
    browser.open(path.as_uri())
    shown = "[...document.querySelectorAll('#details .card')].map(e => e.id)"
    wait_until(lambda: bool(browser.evaluate(shown)))
    cards = browser.evaluate(shown)
    named = ["forest", "ess", "behaviours", "ranking", "reasons", "concentration", "overlap"]
    assert cards == [f"card-{name}" for name in named]
    rows = "[...document.querySelectorAll('#card-ranking .row')].map(e => e.dataset.estimator)"
    assert set(browser.evaluate(rows)) == set(HOSTILE[:3])
    assert browser.evaluate("document.querySelectorAll('#card-overlap .cell').length") == 12
    assert not browser.evaluate("document.querySelectorAll('img').length")


def many_runs(browser: screenshot.Browser, logdir: Path) -> None:
    """Of more than eight runs, the one in focus and the chosen ones have a colour."""
    for k in range(9):
        with FreeWriter(logdir / f"more_{k}") as free:
            free.add(free_value(2048, 50.0 + k, 10.0))
            free.add(free_value(4096, 90.0 + k, 10.0))
    inside = "document.querySelector('iframe').contentDocument"
    strokes = f"[...{inside}.querySelectorAll('#chart path.provisional')].map(e => e.dataset.run "
    deadline = time.monotonic() + 60.0
    seen: list[str] = []
    while len(seen) < 10 and time.monotonic() < deadline:
        time.sleep(0.5)
        seen = browser.evaluate(f"{strokes} + ' ' + e.getAttribute('stroke'))")
    assert sum(line.endswith("var(--faint)") for line in seen) == 9
    assert "PPO_1 var(--s0)" in seen
    row = f"{inside}.querySelector('[data-run=\"more_3\"]')"
    browser.evaluate(f"{row}.dispatchEvent(new Event('mouseenter'))")
    lit = f"[...{inside}.querySelectorAll('.line.lit')].map(e => e.dataset.run)"
    assert browser.evaluate(lit) == ["more_3"]
    browser.evaluate(f"{row}.querySelector('.swatch').click()")
    seen = browser.evaluate(f"{strokes} + ' ' + e.getAttribute('stroke'))")
    assert "more_3 var(--s1)" in seen
    assert sum(line.endswith("var(--faint)") for line in seen) == 8
    shown = f"[...{inside}.querySelectorAll('.run .name')].map(e => [e.title, e.innerText])"
    assert ["more_3", "more_3"] in browser.evaluate(shown)
