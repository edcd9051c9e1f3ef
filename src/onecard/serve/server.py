"""`onecard serve`: the OpenAI-compatible server as a process, or in a thread of one.

In: model directories. Out: a server on this machine only, unless told otherwise. What a request leaves open of sampling
comes from the model's generation_config.json (`do_sample` false is greedy), else from OpenAI's defaults (temperature 1,
top_p 1). SIGINT and SIGTERM let running answers finish. It knows ports and signals, not the protocol.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from onecard import console
from onecard.config import ServeConfig
from onecard.errors import ConfigError, MachineError
from onecard.model.adapter_files import is_adapter
from onecard.model.load import model_directory
from onecard.serve.access import api_key, is_loopback
from onecard.serve.application import Service, make_app
from onecard.serve.served import Served, open_served

SHUTDOWN_SECONDS = 30


class _Uvicorn(uvicorn.Server):
    """uvicorn without its handling of signals, which would end the process by the signal after the shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class RunningServer:
    """A server in a thread of this process. `url` ends in /v1; `stop` lets running answers finish."""

    url: str
    model_name: str
    service: Service
    _server: _Uvicorn
    _thread: threading.Thread

    def stop(self) -> None:
        """Stop accepting, let running answers finish (bounded), free the model."""
        self._server.should_exit = True
        self._thread.join()
        self.service.close()


def start_server(config: ServeConfig) -> RunningServer:
    """Serve in a thread, with the process's signals untouched; returns once it answers. Port 0 takes a free one.

    ArtifactError if the model cannot be read, MachineError if the port is taken.
    """
    listener = _bind(config)
    service, server = _prepare(config, listener)
    thread = threading.Thread(target=server.run, args=([listener],), name="onecard-server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            service.close()
            raise MachineError("The server did not start.", "Look at the messages above.")
        time.sleep(0.01)
    return RunningServer(_url(listener), service.name, service, server, thread)


def serve(config: ServeConfig) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM: then accept no more, let running answers finish (up to 30 s), return a summary.

    A second signal ends at once. Raises as `start_server`.
    """
    listener = _bind(config)
    if config.engine == "vllm":
        return _serve_with_vllm(config, listener)
    service, server = _prepare(config, listener)
    if not (service.local_only or service.key):
        console.warn(
            f"the model listens on {config.host}: everybody who can reach this machine can use it, without a key "
            "(--api-key-file)."
        )
    # Clients that leave amid a stream are no fault.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    started = time.monotonic()

    def leave(_: int, __: FrameType | None) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    url = _url(listener)
    try:
        console.result(f"Serving {', '.join(model.name for model in service.models)} at {url}")
        for engine in service.engines:
            console.note(f"{engine.max_concurrent} answers at once, {engine.max_length} tokens of context.")
        console.note("Ctrl-C stops; running answers finish.")
        if service.engines:
            console.note(f"Chat in a browser: {url.removesuffix('/v1')}/")
        server.run([listener])
    finally:
        service.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    seconds = time.monotonic() - started
    console.note(f"Stopped after {console.format_duration(seconds)}; {service.answered} requests.")
    return {"model": service.name, "url": url, "requests": service.answered, "seconds": round(seconds, 3)}


def _serve_with_vllm(config: ServeConfig, listener: socket.socket) -> dict[str, Any]:
    """vLLM takes the port itself, a moment after it was seen to be free."""
    from onecard.serve.vllm import serve_with_vllm

    port = listener.getsockname()[1]
    listener.close()
    return serve_with_vllm(config, name=config.name or _default_name(config.model), port=port)


def _prepare(config: ServeConfig, listener: socket.socket) -> tuple[Service, _Uvicorn]:
    try:
        key = api_key(config.api_key_file)
        models = _open_all(config)
    except BaseException:
        listener.close()
        raise
    service = Service(
        models,
        is_loopback(config.host),
        key=key,
        time_limit_seconds=config.time_limit_seconds,
        max_queue=config.max_queue,
    )
    return service, _Uvicorn(
        uvicorn.Config(
            make_app(service),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )


def _open_all(config: ServeConfig) -> list[Served]:
    """Every model that is to be served, each under a name of its own; all are closed if one cannot be opened."""
    places = {config.name or _default_name(config.model): config.model}
    for name, path in [*((_default_name(path), path) for path in config.more), *_adapters(config)]:
        if name in places:
            raise ConfigError(
                f"{path} and {places[name]} would both be named {name}.", "Give one of them another name or folder."
            )
        places[name] = path
    opened: list[Served] = []
    try:
        for name, path in places.items():
            one = open_served(
                path,
                name,
                embeddings=config.embeddings,
                max_concurrent=config.max_concurrent,
                max_length=config.max_length,
                max_queue=config.max_queue,
                precision=config.precision,
                prefix_bytes=config.prefix_megabytes << 20,
            )
            opened.append(one)
    except BaseException:
        for model in opened:
            model.close()
        raise
    return opened


def _adapters(config: ServeConfig) -> list[tuple[str, Path]]:
    found = []
    for spelled in config.adapter:
        name, mark, path = spelled.partition("=")
        if not (name and mark and path):
            raise ConfigError(f"adapter: {spelled!r} is not NAME=DIRECTORY.", "Such as --adapter law=run/adapter.")
        if not is_adapter(Path(path)):
            raise ConfigError(f"{path} holds no adapter (adapter_config.json).", "Give the adapter/ of a run.")
        found.append((name, Path(path)))
    return found


def _default_name(path: Path) -> str:
    """The name of the directory that the user knows: a run's, not that of the model/ inside it."""
    directory = model_directory(path).resolve()
    return directory.parent.name if directory.name == "model" else directory.name


def _bind(config: ServeConfig) -> socket.socket:
    """Take the port before the model is loaded: a taken one is found at once."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as fault:
        raise MachineError(
            f"{config.host} is not an address of this machine ({fault}).", "Choose another --host."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as fault:
        listener.close()
        raise MachineError(
            f"{config.host}:{config.port} cannot be listened on ({fault.strerror}).",
            "Choose another --port (0 takes a free one), or stop what uses it.",
        ) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
