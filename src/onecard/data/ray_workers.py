"""The same calls as `Workers`, run as tasks of Ray: on this machine, or on a cluster that somebody named.

In: a function of a module and argument tuples. Out: its answers in the order of the arguments, as from `Workers`. A Ray
that is started here listens on 127.0.0.1 alone, reports to nobody and ends with its parent. A cluster is one's own: its
nodes need this version of onecard, and the output's folder at the same path (shared storage).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import onecard
from onecard.data.workers import AHEAD, ONE_THREAD, Workers, available_cores
from onecard.errors import ConfigError, MachineError, MissingExtra

# Batches are some megabytes; without a limit Ray would reserve a third of the memory.
_STORE_BYTES = 256 << 20
_PATIENCE_SECONDS = 10


class RayWorkers(Workers):
    """`count` tasks at once (None: one a core) on Ray, which is reached at the first call.

    `address`: of a cluster, as `ray start` names it; None: a Ray is started on this machine.

    MissingExtra without Ray. At the first call: MachineError if the cluster is not reached, ConfigError if one of its
    nodes lacks `folder` or has another version of onecard.
    """

    def __init__(self, count: int | None, address: str | None, folder: Path) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("ray", "engine = ray", install="'onecard[ray]'")
        super().__init__(1)
        self._asked = count
        self._address = address
        self._folder = folder
        self._ray: Any = None
        self._logs: Path | None = None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        if self._ray is not None:
            self._ray.shutdown()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def map(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """As `Workers.map`; a task whose process or node is lost is run again elsewhere (three times)."""
        if self._ray is None:
            self._start()
        waiting: deque[Any] = deque()
        for call in calls:
            waiting.append(self._task.remote(function, call))
            while waiting and (len(waiting) >= self.count * AHEAD or self._ray.wait([waiting[0]], timeout=0)[0]):
                yield self._answer(waiting.popleft())
        while waiting:
            yield self._answer(waiting.popleft())

    def _start(self) -> None:
        if self._address is None:
            self._logs = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp" if Path("/tmp").is_dir() else None))
            self._ray = _started(self._asked or available_cores(), self._logs)
        else:
            self._ray = _reached(self._address)
        self.count = self._asked or max(int(self._ray.cluster_resources().get("CPU", 1)), 1)
        self._task = self._ray.remote(_call)
        if self._address is not None:
            self._check_nodes(self._address)

    def _answer(self, reference: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(reference)
        except RayTaskError as fault:
            fault.cause.add_note(str(fault))
            raise fault.cause from None
        except RayError as fault:
            raise MachineError(
                f"Ray lost a task: {str(fault).strip().splitlines()[0]}",
                "Run the same command again, with fewer --workers if memory ran out; what was finished is kept.",
            ) from fault

    def _check_nodes(self, address: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in self._ray.nodes():
            if not node["Alive"] or not node["Resources"].get("CPU"):
                continue
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            found = self._answer(self._task.options(scheduling_strategy=there).remote(sight_of, (str(self._folder),)))
            name = node["NodeManagerAddress"]
            if not found["folder"]:
                raise ConfigError(
                    f"The node {name} of the cluster {address} does not see {self._folder.parent}.",
                    "Give an --output on storage that all nodes share under the same path.",
                )
            if found["version"] != onecard.__version__:
                raise ConfigError(
                    f"The node {name} of the cluster {address} has onecard {found['version']}, here it is "
                    f"{onecard.__version__}.",
                    "Install the same version on all nodes.",
                )


def sight_of(folder: str) -> dict[str, Any]:
    """What a node knows: whether the folder is there, and which onecard."""
    return {"folder": Path(folder).is_dir(), "version": onecard.__version__}


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


@functools.cache
def _private() -> dict[str, str]:
    """Settings that Ray reads when it is first imported, and keeps: the same for the whole life of this process."""
    # The second is Ray's switch between the machine's address and that of the loopback; on Linux too, whatever its
    # name says. The token keeps out other users of this machine.
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _started(count: int, logs: Path) -> Any:
    """Ray with a node of its own on this machine; an address in the environment is not followed."""
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_TOKEN") != _private()["RAY_AUTH_TOKEN"]:
        raise MachineError(
            "Ray was imported before, and would listen to other machines.",
            "Clean in a process of its own, or name a cluster (ray_address).",
        )
    os.environ.update(_private())
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        import ray

        ray.init(
            address="local",
            num_cpus=count,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(logs),
        )
    except RuntimeError as fault:
        raise MachineError(
            f"Ray does not start on this machine: {str(fault).strip().splitlines()[0]}",
            "Try again when less is running, or leave out --engine ray.",
        ) from fault
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return ray


def _reached(address: str) -> Any:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"ray_address = {address} is no host and port.", "Write it as in ray_address = '10.0.0.5:6379'."
        )
    try:  # Ray itself would try for many minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_SECONDS).close()
    except OSError as fault:
        raise MachineError(
            f"No Ray cluster answers at {address} ({fault.strerror or fault}).",
            "Give the address that `ray start --head` printed, or leave ray_address out to use this machine alone.",
        ) from fault
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": ONE_THREAD},
        )
    except (ConnectionError, RuntimeError) as fault:
        raise MachineError(
            f"The Ray cluster at {address} does not take this program: {str(fault).strip().splitlines()[0]}",
            "Use the cluster's versions of Ray and Python, and its token (RAY_AUTH_MODE=token) where it asks for one.",
        ) from fault
    return ray
