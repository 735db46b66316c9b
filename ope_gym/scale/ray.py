"""Compute items as tasks of a Ray cluster, which itself repeats those whose worker or node is lost.

Every node needs the same ope_gym: a worker with another version refuses.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

import ope_gym

_RETRIES = 5  # of an item whose worker or node is lost
_AHEAD = 2  # items for each core that are sent before the oldest one is done


class WorkerError(RuntimeError):
    """Raised if a worker of a cluster is lost for good, or runs other code."""


def in_order(
    address: bool | str, function: Callable[[Any], Any], items: Sequence[Any]
) -> Generator[Any, None, None]:
    """Yield the results of a function in the order of the items.

    Args:
        address: "auto", "local", "host:port" or "ray://host:port". True leaves it to Ray: the
            environment variable RAY_ADDRESS, else a cluster that `ray start` began on this machine,
            else a new one that ends with this process.
        function: What is computed of an item.
        items: Arguments of the tasks.
    """
    ray = connect(address)
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_compute)
    shared, versions = ray.put(function), _versions()
    most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    sent: deque[Any] = deque()
    try:
        for item in items:
            sent.append(task.remote(shared, item, versions))
            if len(sent) >= most:
                yield _result(ray, sent)
        while sent:
            yield _result(ray, sent)
    finally:
        if sent:
            # Ray 2.60 may abort this process if a task is cancelled that has just finished
            _, unfinished = ray.wait(list(sent), num_returns=len(sent), timeout=0)
            for handle in unfinished:
                ray.cancel(handle, force=True)


def _compute(function: Callable[[Any], Any], item: Any, versions: tuple[str, str]) -> bytes:
    if versions != _versions():
        raise WorkerError(
            f"a Ray worker on {platform.node()} has ope_gym and numpy {_versions()} instead of "
            f"{versions}: install the same on all nodes, and restart their Ray if they changed"
        )
    import cloudpickle

    # as bytes: what Ray unpacks itself cannot be written to
    return bytes(cloudpickle.dumps(function(item)))


def _versions() -> tuple[str, str]:
    return ope_gym.__version__, np.__version__


def _result(ray: Any, sent: deque[Any]) -> Any:
    """Wait for the oldest of the items that were sent, and return its result."""
    import cloudpickle

    try:
        return cloudpickle.loads(ray.get(sent.popleft()))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"Ray could not compute a part of the work, after {_RETRIES} retries where its worker "
            f"or node was lost; the same ope_gym must be installed on every node: {error}"
        ) from error


def connect(address: bool | str) -> Any:
    """Return Ray, connected to a cluster until this process ends; an old connection is kept."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            'Ray is not installed: pip install -e ".[ray]" -c constraints.txt, or leave it out: '
            "workers on this machine need none"
        ) from error
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library reports nothing by itself
    named = os.environ.get("RAY_ADDRESS") if address in (True, "auto") else None
    address = named or address  # as Ray has it
    before = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address)
        ray.init(
            address=address if isinstance(address, str) else None,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise ConnectionError(
                "no Ray cluster at auto: none runs on this machine; give HOST:PORT, or local for a "
                "new one, or begin one with `ray start --head`"
            ) from error
        where = "on this machine" if address is True else f"at {address}"
        where += " (of the environment variable RAY_ADDRESS)" if named else ""
        raise ConnectionError(f"no Ray cluster {where}: {error}") from error
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own handler aborts the process
    return ray


def _check_reachable(address: bool | str) -> None:
    """Raise OSError if nobody answers at HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
