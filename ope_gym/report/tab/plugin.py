"""Serve the OPE tab: its page, and the numbers that the page asks for.

TensorBoard loads this class by the entry point `tensorboard_plugins`. It imports as little as
possible, because an error here would keep TensorBoard from starting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from ope_gym.report.tab.reader import PLUGIN, Listing, Reader

_STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_MOST = 5_000  # runs or names in one request

Answer = Callable[[wrappers.Request], wrappers.Response]


class OPEPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard has no types
    """The tab.

    Args:
        context: Context of TensorBoard.
    """

    plugin_name = PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = context.data_provider
        self._listings: dict[str, Listing] = {}

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return what answers each address."""
        pages = {f"/{path.name}": _static(path) for path in sorted(_STATIC.iterdir())}
        data = {
            "/runs": self._runs,
            "/names": self._names,
            "/series": self._series,
            "/details": self._details,
        }
        return {
            path: wrappers.Request.application(answer) for path, answer in (pages | data).items()
        }

    def is_active(self) -> bool:
        """Tell whether there is anything to show."""
        return bool(self._reader_of(RequestContext(), "").runs()["runs"])

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Name the page."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="OPE")

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        return _json(request, self._reader(request).runs())

    def _names(self, request: wrappers.Request) -> wrappers.Response:
        run, part = request.args.get("run", "."), request.args.get("part", "")
        return _json(request, self._reader(request).names(run, part))

    def _series(self, request: wrappers.Request) -> wrappers.Response:
        try:
            runs, names = (_words(request.form[key]) for key in ("runs", "names"))
        except (KeyError, ValueError, RecursionError):
            error = f"post runs and names as JSON lists of at most {_MOST:,} names"
            return _json(request, {"error": error}, 400)
        return _json(request, self._reader(request).series(runs, names))

    def _details(self, request: wrappers.Request) -> wrappers.Response:
        step = request.args.get("step")
        try:
            number = None if step is None else int(step)
        except ValueError:
            return _json(request, {"error": f"step is {step!r}: give a whole number"}, 400)
        return _json(request, self._reader(request).details(request.args.get("run", "."), number))

    def _reader(self, request: wrappers.Request) -> Reader:
        context = plugin_util.context(request.environ)
        return self._reader_of(context, plugin_util.experiment_id(request.environ))

    def _reader_of(self, context: RequestContext, experiment: str) -> Reader:
        return Reader(self._provider, context, experiment, self._listings)


def _words(text: str) -> list[str]:
    """Return the words in a JSON list, each once; raise ValueError if it is none."""
    words = json.loads(text)
    if not isinstance(words, list) or len(words) > _MOST:
        raise ValueError("no list, or too long a one")
    if not all(isinstance(word, str) for word in words):
        raise ValueError("no words")
    return list(dict.fromkeys(words))


def _static(path: Path) -> Answer:
    def answer(request: wrappers.Request) -> wrappers.Response:
        return _respond(request, path.read_bytes(), _TYPES[path.suffix])

    return answer


def _json(request: wrappers.Request, content: Any, code: int = 200) -> wrappers.Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return _respond(request, text, "application/json", code=code)


def _respond(
    request: wrappers.Request, content: str | bytes, kind: str, code: int = 200
) -> wrappers.Response:
    """Answer; TensorBoard adds what browsers want, as `X-Content-Type-Options: nosniff`."""
    response: wrappers.Response = http_util.Respond(request, content, kind, code=code)
    return response
