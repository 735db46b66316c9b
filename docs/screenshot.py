"""Take pictures of a TensorBoard run: `python docs/screenshot.py runs --out docs/images`.

Starts TensorBoard on the loopback interface, opens the OPE tab in a headless Chromium, or other
pages, waits until the charts are drawn, saves each page as a PNG file and prints as JSON what the
charts show. Exits with 1 if a chart stays empty. It needs the system's `chromium` and no Python
package but TensorBoard: the browser is driven by the DevTools protocol over a pipe.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

CHARTS = ("ope", "scalars", "custom_scalars")  # pages of which the charts are checked
OTHERS = ("text", "images", "histograms", "hparams")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root cannot have one; all it opens is our own page
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",  # commands on descriptor 3, answers on 4
)
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
# TensorBoard with the OPE tab, also where the package is not installed but only on the path
_SERVE = """
import sys
from tensorboard import default, main_lib, program
from ope_gym.report.tab.plugin import OPEPlugin
main_lib.global_init()
board = program.TensorBoard(list({p: 0 for p in [*default.get_plugins(), OPEPlugin]}))
board.configure(sys.argv)
sys.exit(board.main())
"""
_SETTINGS = "localStorage.setItem('_ignoreYOutliers', 'false')"
# The charts live in shadow roots, which a dump of the page would leave out.
_PROBE = """
(() => {
  const find = (root, names, into = []) => {
    for (const element of root.querySelectorAll('*')) {
      if (names.includes(element.localName)) into.push(element);
      if (element.shadowRoot) find(element.shadowRoot, names, into);
    }
    return into;
  };
  const cards = find(document, ['tf-scalar-card', 'tf-custom-scalar-margin-chart-card',
                                'tf-custom-scalar-multi-line-chart-card']);
  return cards.map(card => {
    const paths = find(card.shadowRoot, ['path']).filter(p => p.getBoundingClientRect().width > 0);
    const count = selector => paths.filter(p => p.matches(selector)).length;
    return {
      title: card.tag || card.title,
      lines: count('.line-plot:not(.area-plot):not(.ghost) path.line'),
      bands: count('.area-plot path.area'),
      points: count('.scatter-plot path.symbol'),
    };
  });
})()
"""
# The OPE tab is a frame of its own: lines and bands of its chart by series, rows of the forest.
_TAB = """
(() => {
  const page = document.querySelector('iframe')?.contentDocument;
  const find = (selector) => [...page?.querySelectorAll(selector) ?? []];
  const series = (selector) => find(selector).map((e) => `${e.dataset.run}: ${e.dataset.series}`);
  if (!find('#details .card, #empty h1').length) return [];
  return [{
    title: find('h1').map((e) => e.innerText).join(' '),
    where: find('.where').map((e) => e.innerText).join(' '),
    lines: find('#chart path.line').length,
    bands: find('#chart path.band').length,
    points: find('#chart .dot').length,
    series: series('#chart path.line'),
    banded: series('#chart path.band'),
    fresh: find('#chart path.fresh:not(.line)').length,
    ticked: find('#series label').filter((e) => e.querySelector('input').checked)
      .map((e) => e.dataset.name),
    ticks: find('#series label').map((e) => e.dataset.name),
    forest: find('#card-forest .row, #card-free .row')
      .map((e) => e.querySelector('title').textContent),
    cards: find('#details .card').map((e) => e.id.replace('card-', '')),
    theme: page.documentElement.dataset.theme,
  }];
})()
"""


class Browser:
    """Drive a headless Chromium.

    Args:
        executable: path of Chromium.
        profile: an empty folder.
        size: width and height of the page.
    """

    def __init__(self, executable: str, profile: str, size: tuple[int, int]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        launch = [sys.executable, "-c", _LAUNCH, str(commands), str(answers), executable]
        self._process = subprocess.Popen(
            [*launch, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._size = size
        self._received, self._number, self._session = b"", 0, ""

    def open(self, url: str) -> None:
        """Open a new page."""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        width, height = self._size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        # bands reach beyond the values: scaling that ignores outliers would cut them off
        self._call("Page.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=_SETTINGS)
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"the page raised {result['exceptionDetails']}")
        return result["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Press the left button of the mouse at a place of the page."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write the page as a PNG file."""
        picture = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self._call("Browser.close", timeout=10.0)
            self._process.wait(10.0)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _call(self, method: str, *, timeout: float = 60.0, **parameters: object) -> dict[str, Any]:
        """Return the result of one command, ignoring events that come in between."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"Chromium refused {method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\0" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"Chromium did not answer {method} in time")
                chunk = os.read(self._answers, 1 << 20)
                if not chunk:
                    raise RuntimeError(f"Chromium ended at {method}")
                self._received += chunk
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def chromium(size: tuple[int, int]) -> Iterator[Browser]:
    """Start a browser with a fresh profile."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        sys.exit("chromium is not installed: apt-get install chromium, or the like of it")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(executable, profile, size)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tensorboard(logdir: Path, timeout: float) -> Iterator[str]:
    """Yield the address of a TensorBoard that has read the runs below `logdir`."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _SERVE,
        "--load_fast=false",
        "--reload_interval=1",
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, f"--logdir={logdir}", "--host=127.0.0.1", "--port=0"],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            deadline = time.monotonic() + timeout
            while True:
                log.seek(0)
                said = log.read()
                address = re.search(r"http://127\.0\.0\.1:\d+/", said)
                if address and _has_runs(address.group()):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"TensorBoard shows no run with charts in {logdir}:\n{said}")
                time.sleep(0.2)
            yield address.group()
        finally:
            process.terminate()
            process.wait()


def _has_runs(address: str) -> bool:
    """Tell whether TensorBoard has read a run to the end of its first file."""
    with urllib.request.urlopen(f"{address}data/plugin/ope/runs") as answer:
        return bool(json.load(answer)["runs"])


def capture(
    browser: Browser,
    address: str,
    page: str,
    path: Path,
    *,
    tags: str,
    timeout: float,
    dark: bool = False,
) -> list[dict[str, Any]]:
    """Save one page once its charts are drawn, and say what they show: title, lines, bands."""
    options = f"&_smoothingWeight=0&tagFilter={quote(tags, safe='')}" if page in CHARTS else ""
    browser.open(f"{address}?darkMode={'true' if dark else 'false'}#{page}{options}")
    cards = settled(browser, page, timeout if page in CHARTS else 4.0)
    browser.screenshot(path)
    return cards


def settled(browser: Browser, page: str, timeout: float) -> list[dict[str, Any]]:
    """Return what the charts of a page show as soon as that does not change any more."""
    cards: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        time.sleep(0.7)
        before, cards = cards, browser.evaluate(_TAB if page == "ope" else _PROBE)
        if cards and cards == before and all(map(drawn, cards)):
            break
    return cards


def drawn(card: dict[str, Any]) -> bool:
    """Tell whether a chart shows anything."""
    return bool(card["lines"] or card["points"])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logdir", type=Path, help="folder of TensorBoard runs")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for PAGE.png")
    parser.add_argument("--pages", nargs="+", choices=CHARTS + OTHERS, default=["ope"])
    parser.add_argument("--tags", default="^(ope|rollout)/", help="regular expression for Scalars")
    parser.add_argument("--dark", action="store_true", help="light on dark")
    parser.add_argument("--size", default="1400x1000", help="of the picture")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a page may take")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    shown = {}
    with (
        chromium((width, height)) as browser,
        tensorboard(arguments.logdir, arguments.timeout) as address,
    ):
        for page in arguments.pages:
            shown[page] = capture(
                browser,
                address,
                page,
                arguments.out / f"{page}.png",
                tags=arguments.tags,
                timeout=arguments.timeout,
                dark=arguments.dark,
            )
    print(json.dumps(shown, indent=2))
    checked = [shown[page] for page in arguments.pages if page in CHARTS]
    return 0 if all(cards and all(map(drawn, cards)) for cards in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
