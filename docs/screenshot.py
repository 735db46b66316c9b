"""Pictures of a TensorBoard run: `python docs/screenshot.py runs/NAME --out docs/images`.

Starts TensorBoard on the loopback interface, opens its pages in a headless Chromium, waits until
the charts are drawn, saves a PNG of each page and prints, as JSON, what the pages show. Exits with
1 if a chart stays empty. Needs the package `chromium` of the system, and nothing else.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PAGES = ("scalars", "custom_scalars")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # of no use to root; the only page it opens is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
# Elements of TensorBoard live in shadow roots, which a dump of the page leaves out.
_PROBE = """
(() => {
  const cards = [], found = (root, names, into) => {
    for (const e of root.querySelectorAll('*')) {
      if (names.includes(e.localName)) into.push(e);
      if (e.shadowRoot) found(e.shadowRoot, names, into);
    }
    return into;
  };
  const names = ['tf-scalar-card', 'tf-custom-scalar-margin-chart-card',
                 'tf-custom-scalar-multi-line-chart-card'];
  for (const card of found(document, names, [])) {
    const root = card.shadowRoot;
    const paths = found(root, ['path'], []).filter(p => p.getBoundingClientRect().width > 5);
    const of = name => paths.filter(p => p.closest(name)).length;
    const title = card.title || card.tag;
    cards.push({
      title: String(title ?? ''),
      lines: paths.filter(p => getComputedStyle(p).fill === 'none').length,
      areas: paths.filter(p => getComputedStyle(p).fill !== 'none').length,
    });
  }
  return JSON.stringify(cards);
})()
"""


class Browser:
    """A headless Chromium, driven by the DevTools protocol over a pipe."""

    def __init__(self, executable: str, profile: str, width: int, height: int) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        os.set_blocking(self._answers, False)
        self._process = subprocess.Popen(
            # Chromium reads commands from descriptor 3 and answers on 4
            ["/bin/sh", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "sh", executable]
            + [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._number, self._session = b"", 0, ""

    def call(self, method: str, timeout: float = 60.0, **params: object) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                while b"\0" in self._buffer:
                    line, _, self._buffer = self._buffer.partition(b"\0")
                    answer: dict[str, Any] = json.loads(line)
                    if answer.get("id") == self._number:
                        if "error" in answer:
                            raise RuntimeError(f"{method}: {answer['error']}")
                        result: dict[str, Any] = answer["result"]
                        return result
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"Chromium did not answer {method} in {timeout:g} s")
                chunk = os.read(self._answers, 1 << 20)
                if not chunk:
                    raise RuntimeError(f"Chromium ended during {method}")
                self._buffer += chunk

    def open(self, url: str) -> None:
        """A new page."""
        self._session = ""
        target = self.call("Target.createTarget", url=url)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"the page: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The window as a PNG file."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
