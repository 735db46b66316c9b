"""Compute items as tasks of a Ray cluster.

Ray itself computes an item again elsewhere if its worker or node is lost. Every node needs the same
ope_gym: a worker with other code refuses.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ope_gym.scale.tasks import (
    Outcome,
    Pool,
    WorkerError,
    compute,
    ignoring_interrupts,
    packed,
)

_RETRIES = 5  # of an item whose worker or node is lost
RAY_HELP = (
    "compute on a Ray cluster: auto, local (a new one here), HOST:PORT or ray://HOST:PORT; alone, "
    "the one of RAY_ADDRESS, else one that runs on this machine, else a new one here"
)


class RayTasks(Pool):
    """Compute on the Ray cluster that this process is connected to."""

    remote = True

    def __init__(self) -> None:
        import ray

        self._ray, self._sent = ray, set[Any]()
        self._compute = ray.remote(num_cpus=1, max_retries=_RETRIES)(_compute_on_node)

    def share(self, function: Callable[[Any], Any]) -> Any:
        """Store the function in the cluster, once for all items."""
        return self._ray.put(packed(function))

    def size(self) -> int:
        """Return the number of cores that the cluster has at present."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def send(self, function: Any, item: Any, name: str) -> Any:
        """Submit a task to Ray; return its handle."""
        handle = self._compute.remote(function, packed(item, name), code_mark())
        self._sent.add(handle)
        return handle

    def receive(self, handle: Any, name: str) -> Outcome:
        """Return the outcome of a Ray task; wait for it if need be."""
        import cloudpickle

        try:
            found: Outcome = cloudpickle.loads(self._ray.get(handle))
        except self._ray.exceptions.RayError as error:
            self._sent.discard(handle)
            if isinstance(error, self._ray.exceptions.RayTaskError):
                raise error.cause from error
            raise WorkerError(
                f"Ray could not compute {name}, after {_RETRIES} retries where its worker or node "
                f"was lost; the same ope_gym must be installed on every node: {error}"
            ) from error
        self._sent.discard(handle)
        return found

    def stop(self, at_once: bool) -> None:
        """Cancel the tasks that are still running; the cluster stays."""
        if self._sent:
            # Ray 2.60 may abort this process if a task is cancelled that has just finished.
            sent = list(self._sent)
            _, unfinished = self._ray.wait(sent, num_returns=len(sent), timeout=0)
            for handle in unfinished:
                self._ray.cancel(handle, force=True)


def _compute_on_node(function: bytes, item: bytes, mark: str) -> bytes:
    """Return the outcome of an item if this node runs the same code."""
    if mark != code_mark():
        raise WorkerError(
            f"a Ray worker on {platform.node()} runs another ope_gym or numpy ({code_mark()} "
            f"instead of {mark}): install the same on all nodes, and restart their Ray if they "
            "changed"
        )
    return compute(function, item, f"a Ray worker on {platform.node()}")


@cache
def code_mark() -> str:
    """Return a hash of this library and of numpy: other versions need not give equal bits."""
    known = hashlib.sha256(np.__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


@contextmanager
def connected(address: bool | str) -> Iterator[None]:
    """Connect to Ray for the block; a connection that is there already is used, and kept.

    Args:
        address: "auto", "local", "host:port" or "ray://host:port". True leaves it to Ray: the
            environment variable RAY_ADDRESS, else a cluster that `ray start` began on this machine,
            else a new one that ends with the block.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            'Ray is not installed: pip install -e ".[ray]" -c constraints.txt, or leave it out: '
            "workers on this machine need none"
        ) from error
    if ray.is_initialized():
        yield
        return
    try:
        _connect(ray, address)
        yield
    finally:
        with ignoring_interrupts():
            ray.shutdown()  # leaves a cluster that was there before


def _connect(ray: Any, address: bool | str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library reports nothing by itself
    named = os.environ.get("RAY_ADDRESS") if address in (True, "auto") else None
    address = named or address  # as Ray has it
    try:
        _check_reachable(address)
        with _keeping_sigterm():
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


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Put back the program's own handler of SIGTERM, if it has one: Ray's aborts the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _check_reachable(address: bool | str) -> None:
    """Raise OSError if nobody answers at HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def ray_address(text: str) -> str:
    """Return the address of a cluster as --ray takes it."""
    if text not in ("auto", "local") and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address of a Ray cluster: give auto, local, HOST:PORT or "
            "ray://HOST:PORT, or --ray alone, after all files"
        )
    return text
