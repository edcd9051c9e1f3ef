"""What is in this machine, as facts without a judgement: the operating system, memory, disk, torch, cards.

Out: a `Machine`, which goes through JSON and back, so that a recorded one can stand in for a real one. None means that
nobody could tell. Nothing here raises because something is missing. What the facts mean is doctor's to say.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
# Libraries whose absence or age decides what works.
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "torchao", "bitsandbytes", "triton", "numpy", "safetensors")
# Variables that change what programs see of a card or of the network.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "HF_HUB_OFFLINE",
)


@dataclass(frozen=True)
class Holder:
    """A program that holds memory of a card."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class FoundCard:
    """One card as driver and torch tell it."""

    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    holders: tuple[Holder, ...] = ()
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_possible: int | None = None
    pcie_width: int | None = None
    pcie_width_possible: int | None = None
    bar1_bytes: int | None = None
    nvlink: bool | None = None
    persistence: bool | None = None
    ecc_uncorrected: int | None = None
    # FLOP a second of a matrix product by number format; what went wrong with the first one.
    products: dict[str, float] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Machine:
    """Everything that decides a run. Sizes in bytes."""

    system: str
    kernel: str
    python: str
    wsl: bool = False
    processor: str | None = None
    cores: int | None = None
    cores_allowed: float | None = None
    governor: str | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_allowed_bytes: int | None = None
    swap_bytes: int | None = None
    shared_memory_bytes: int | None = None
    directory: str = ""
    disk_free_bytes: int | None = None
    card_device_there: bool = False
    driver: str | None = None
    torch: str | None = None
    torch_fault: str | None = None
    torch_cuda: str | None = None
    torch_architectures: tuple[str, ...] = ()
    cards: tuple[FoundCard, ...] = ()
    # Pairs of cards (by number) that can, or cannot, copy to each other directly.
    peers: dict[str, bool] = field(default_factory=dict)
    compiler: str | None = None
    python_headers: bool | None = None
    packages: dict[str, str | None] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Machine:
        """The inverse of `plain`."""
        cards = []
        for card in values.get("cards", ()):
            given = dict(card)
            for name in ("capability", "throttle_reasons"):
                given[name] = None if given.get(name) is None else tuple(given[name])
            given["holders"] = tuple(Holder(**holder) for holder in given.get("holders", ()))
            cards.append(FoundCard(**given))
        made: dict[str, Any] = values | {"cards": tuple(cards)}
        made |= {name: tuple(values[name]) for name in ("torch_architectures", "unmet") if name in values}
        return cls(**made)


def probe(directory: Path = Path(), *, products: bool = True) -> Machine:
    """Look at this machine; `directory` is where data and checkpoints would lie. Imports torch. Under 5 s."""
    import psutil

    memory, swap = _tried(psutil.virtual_memory), _tried(psutil.swap_memory)
    place = next((path for path in (directory.resolve(), *directory.resolve().parents) if path.is_dir()), Path("/"))
    torch = _torch(products)
    cards, driver = _with_driver(torch.pop("cards"))
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        wsl="microsoft" in platform.release().lower(),
        processor=_processor(),
        cores=os.cpu_count(),
        cores_allowed=_cores_allowed(),
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        memory_bytes=memory.total if memory else None,
        memory_available_bytes=memory.available if memory else None,
        memory_allowed_bytes=memory_allowed(),
        swap_bytes=swap.total if swap else None,
        shared_memory_bytes=_tried(lambda: shutil.disk_usage("/dev/shm").total),
        directory=str(place),
        disk_free_bytes=_tried(lambda: shutil.disk_usage(place).free),
        card_device_there=any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")),
        driver=driver,
        cards=cards,
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None),
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        packages={name: _version(name) for name in PACKAGES},
        unmet=_unmet(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        **torch,
    )


def _tried(read: Callable[[], Value]) -> Value | None:
    try:
        return read()
    except Exception:  # noqa: BLE001 (whatever a machine answers, the others are still asked)
        return None


def _text(path: str) -> str | None:
    return _tried(lambda: Path(path).read_text(encoding="utf-8").strip())


def _version(name: str) -> str | None:
    return _tried(lambda: importlib.metadata.version(name))


def _processor() -> str | None:
    lines = (_text("/proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None) or (
        platform.processor() or None
    )


def memory_allowed() -> int | None:
    """What a container may use at most."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(path)
        if text and text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _cores_allowed() -> float | None:
    """Cores of time that a container gets, or that this process may run on."""
    quota = (_text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit():
        return int(quota[0]) / int(quota[1])
    affinity = getattr(os, "sched_getaffinity", None)
    return None if affinity is None else float(len(affinity(0)))


def _unmet() -> tuple[str, ...]:
    """What onecard needs of other packages and does not find, such as transformers<5.25 (found 5.30)."""

    def look() -> tuple[str, ...]:
        from packaging.requirements import Requirement

        found = []
        for line in importlib.metadata.requires("onecard") or []:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = _version(requirement.name)
            if version is None:
                found.append(f"{requirement.name}{requirement.specifier} (not installed)")
            elif not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{requirement.name}{requirement.specifier} (found {version})")
        return tuple(found)

    return _tried(look) or ()


# --- torch --------------------------------------------------------------------------------------------------------


def _torch(products: bool) -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as fault:
        return {"torch_fault": str(fault).splitlines()[0], "cards": []}
    cuda = torch.version.cuda
    made: dict[str, Any] = {"torch": torch.__version__, "torch_cuda": cuda, "cards": []}
    if cuda is None or not torch.cuda.is_available():
        from onecard.machine.calibrate import matrix_rate

        formats = {"fp32": torch.float32, "bf16": torch.bfloat16} if products else {}
        return made | {"products": {name: matrix_rate(dtype, "cpu") for name, dtype in formats.items()}}
    made["torch_architectures"] = tuple(torch.cuda.get_arch_list())
    count = torch.cuda.device_count()
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        measured: tuple[dict[str, float], str | None] = _card_products(number) if products else ({}, None)
        made["cards"].append(
            {
                "name": properties.name,
                "capability": (properties.major, properties.minor),
                "memory_bytes": properties.total_memory,
                "products": measured[0],
                "fault": measured[1],
                "identity": str(getattr(properties, "uuid", "")),
            }
        )
    made["peers"] = {
        f"{a}-{b}": bool(torch.cuda.can_device_access_peer(a, b)) for a in range(count) for b in range(a + 1, count)
    }
    return made


def _card_products(number: int) -> tuple[dict[str, float], str | None]:
    """A real matrix product in each format: what cannot run says so here and not after an hour."""
    import torch

    from onecard.machine.calibrate import matrix_rate

    rates: dict[str, float] = {}
    try:
        with torch.cuda.device(number):
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
                rates[name] = matrix_rate(dtype, "cuda")
    except RuntimeError as broken:
        return rates, str(broken).splitlines()[0]
    return rates, None


# --- driver -------------------------------------------------------------------------------------------------------


def _with_driver(cards: list[dict[str, Any]], library: Any = None) -> tuple[tuple[FoundCard, ...], str | None]:
    """The cards that torch found, with what the driver knows of them; or what it knows, where torch finds none."""
    nvml: Any = library
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 (no driver, or one that is broken)
        return tuple(FoundCard(**{k: v for k, v in card.items() if k != "identity"}) for card in cards), None
    driver = _tried(lambda: str(nvml.nvmlSystemGetDriverVersion()))
    by_identity = {_identity(nvml, handle): handle for handle in handles}
    made = []
    for number, card in enumerate(cards or [{} for _ in handles]):
        identity = card.pop("identity", "")
        handle = next((h for key, h in by_identity.items() if identity and key and identity in key), None)
        handle = handle if handle is not None else handles[min(number, len(handles) - 1)]
        made.append(FoundCard(**_driver_facts(nvml, handle) | card))
    return tuple(made), driver


def _identity(nvml: Any, handle: Any) -> str | None:
    return _tried(lambda: str(nvml.nvmlDeviceGetUUID(handle)))


def _driver_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    from onecard.machine.sensors import NvmlSensors

    def ask(function: str, *arguments: Any) -> Any:
        return _tried(lambda: getattr(nvml, function)(handle, *arguments))

    def of(value: Any, name: str) -> Any:
        return None if value is None else getattr(value, name, None)

    memory, bar1 = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetBAR1MemoryInfo")
    limit, default = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    persistence, link = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetNvLinkState", 0)
    identity = ask("nvmlDeviceGetUUID")
    sample = NvmlSensors(None if identity is None else str(identity), nvml).sample()
    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    processes = [process for kind in kinds for process in ask(kind) or []]
    return {
        "name": str(ask("nvmlDeviceGetName") or "unknown card"),
        "capability": _tried(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "memory_bytes": of(memory, "total"),
        "free_bytes": of(memory, "free"),
        "holders": tuple(
            Holder(process.pid, _program(process.pid), process.usedGpuMemory)
            for process in processes
            if process.pid != os.getpid()
        ),
        "power_limit_watts": None if limit is None else limit / 1000,
        "power_default_watts": None if default is None else default / 1000,
        "celsius": sample.card_celsius,
        "throttle_reasons": sample.throttle_reasons,
        "ecc_uncorrected": sample.ecc_uncorrected,
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_possible": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_possible": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "bar1_bytes": of(bar1, "bar1Total"),
        "nvlink": None if link is None else bool(link),
        "persistence": None if persistence is None else bool(persistence),
    }


def _program(pid: int) -> str:
    import psutil

    return _tried(lambda: psutil.Process(pid).name()) or "another user's program"
