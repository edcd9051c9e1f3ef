"""The verb `doctor`: what in this machine decides a run, what is right, what is wrong, and what mends it.

In: a `Machine` (probed, or recorded for tests). Out: findings, worst first. Exit status 3 if something blocks.
Rules of CUDA are facts of its documentation: a build of torch runs on a card if it has kernels of the card's major
version and a minor not above the card's, or PTX not above it; so sm_86 kernels run on an 8.9 card.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from onecard import console
from onecard.config import DoctorConfig
from onecard.errors import MachineError
from onecard.machine.cards import find_card, guards_of
from onecard.machine.probe import FoundCard, Machine, probe

GIB = 1 << 30
# The first CUDA whose tools make kernels for a capability, and the first Linux driver of that CUDA.
FIRST_CUDA: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {
    (8, 0): ((11, 0), (450, 36)),
    (8, 6): ((11, 1), (455, 23)),
    (8, 9): ((11, 8), (520, 61)),
    (9, 0): ((11, 8), (520, 61)),
    (12, 0): ((12, 8), (570, 0)),
}
LEAST_DISK_BYTES, GOOD_DISK_BYTES = 2 * GIB, 20 * GIB
LEAST_SHARED_BYTES = GIB


class Level(IntEnum):
    """How bad it is."""

    BLOCKS = 0
    WARNS = 1
    NOTE = 2
    FINE = 3


@dataclass(frozen=True)
class Finding:
    """One thing about the machine, in a sentence, and what to do about it (empty: nothing)."""

    level: Level
    subject: str
    what: str
    remedy: str = ""


class NotFit(MachineError):
    """The machine has something that blocks every run on it."""


def doctor(config: DoctorConfig) -> dict[str, Any]:
    """Look, say it, and raise MachineError (exit status 3) if something blocks."""
    machine = probe(config.directory)
    findings = diagnose(machine)
    document = {
        "fit": all(finding.level is not Level.BLOCKS for finding in findings),
        "findings": [asdict(finding) | {"level": finding.level.name.lower()} for finding in findings],
        "machine": machine.plain(),
    }
    if config.calibrate:
        from onecard.machine.rates import calibrate

        document["rates"] = calibrate(config.directory)
    _show(machine, findings, document)
    blocking = [finding for finding in findings if finding.level is Level.BLOCKS]
    if blocking:
        fault = NotFit(f"{blocking[0].subject}: {blocking[0].what}", blocking[0].remedy)
        fault.document = document
        raise fault
    return document


def _show(machine: Machine, findings: list[Finding], document: dict[str, Any]) -> None:
    words = {Level.BLOCKS: "blocks", Level.WARNS: "warns", Level.NOTE: "note", Level.FINE: "fine"}
    console.table(
        f"{machine.processor or machine.system}, {len(machine.cards)} cards",
        ["", "subject", "what"],
        [[words[finding.level], finding.subject, finding.what] for finding in findings],
    )
    for finding in findings:
        if finding.remedy:
            console.result(f"{finding.subject}: {finding.remedy}")
    for name, value in document.get("rates", {}).items():
        what = name.partition("_flops" if "_flops" in name else "_bytes")[0]
        shown = f"{value / 1e9:,.1f} G{'FLOP' if '_flops' in name else 'B'}/s"
        console.result(f"{what.replace('_', ' ')}: {shown}")


def diagnose(machine: Machine) -> list[Finding]:
    """Everything worth saying, worst first."""
    found: list[Finding] = []
    for rule in (_torch, _devices, _peers, _host, _disk, _compilers, _packages, _surroundings):
        found += rule(machine)
    for number, card in enumerate(machine.cards):
        name = card.name if len(machine.cards) == 1 else f"{card.name} ({number})"
        for card_rule in CARD_RULES:
            found += [Finding(level, name, what, remedy) for level, what, remedy in card_rule(machine, card)]
    return sorted(found, key=lambda finding: finding.level)


# --- torch and devices --------------------------------------------------------------------------------------------


def _torch(machine: Machine) -> Iterator[Finding]:
    if machine.torch is None:
        yield Finding(
            Level.BLOCKS,
            "torch",
            f"PyTorch cannot be imported ({machine.torch_fault or 'it is not installed'}).",
            "Install onecard again: pip install --force-reinstall onecard",
        )
        return
    kind = "for CPUs only" if machine.torch_cuda is None else f"for CUDA {machine.torch_cuda}"
    yield Finding(Level.FINE, "torch", f"PyTorch {machine.torch}, {kind}, on Python {machine.python}.")


def _devices(machine: Machine) -> Iterator[Finding]:
    hidden = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        yield Finding(
            Level.WARNS,
            "card",
            f"CUDA_VISIBLE_DEVICES = {hidden!r} hides every card from programs.",
            "Unset it: unset CUDA_VISIBLE_DEVICES",
        )
        return
    if not (machine.card_device_there or machine.cards or machine.driver):
        yield Finding(Level.FINE, "card", "There is no NVIDIA card: small models train on the processor.")
        return
    if machine.torch is not None and machine.torch_cuda is None:
        yield Finding(
            Level.BLOCKS,
            "card",
            f"There is a card, and PyTorch {machine.torch} was built for CPUs only.",
            "Install a CUDA build: on Linux, pip install --force-reinstall torch brings one.",
        )
    elif machine.driver is None and not machine.cards:
        yield Finding(
            Level.BLOCKS,
            "driver",
            "There is a card, and no NVIDIA driver answers.",
            "Install the driver (Ubuntu: sudo ubuntu-drivers install), restart, and look with: nvidia-smi",
        )
    elif machine.torch_cuda is not None and not any(card.capability for card in machine.cards):
        yield Finding(
            Level.BLOCKS,
            "card",
            f"The driver {machine.driver or ''} knows a card that PyTorch cannot use.",
            "Restart after a driver update; in a container, start it with access to the card (--gpus all).",
        )
    elif machine.driver is not None:
        yield Finding(Level.FINE, "driver", f"NVIDIA driver {machine.driver}.")


def _peers(machine: Machine) -> Iterator[Finding]:
    without = [pair for pair, works in machine.peers.items() if not works]
    if without:
        yield Finding(
            Level.WARNS,
            "cards",
            f"Cards {', '.join(without)} cannot copy to each other directly (P2P): they go through host memory.",
            "That works, and is slower. If a run on several cards hangs at its start: NCCL_P2P_DISABLE=1",
        )
    elif machine.peers:
        yield Finding(Level.FINE, "cards", "The cards say they can copy to each other directly (P2P).")
    if len(machine.cards) > 1 and any(card.nvlink for card in machine.cards):
        yield Finding(Level.FINE, "cards", "NVLink is active.")


# --- each card ----------------------------------------------------------------------------------------------------

CardFinding = tuple[Level, str, str]


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a build with these (sm_86, compute_90, sm_120a ...) has code for a card of that capability."""
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        made_for, exact = (int(match[2]), int(match[3])), match[4] == "a"
        if exact:
            fits = made_for == capability
        elif match[1] == "sm":
            fits = made_for[0] == capability[0] and made_for[1] <= capability[1]
        else:
            fits = made_for <= capability
        if fits:
            return True
    return False


def _kernels(machine: Machine, card: FoundCard) -> Iterator[CardFinding]:
    if card.capability is None:
        return
    version = f"{card.capability[0]}.{card.capability[1]}"
    if machine.torch_architectures and not runs_on(machine.torch_architectures, card.capability):
        cuda, driver = FIRST_CUDA.get(card.capability, ((0, 0), (0, 0)))
        needs = f" It needs a build for CUDA {cuda[0]}.{cuda[1]} or newer and driver {driver[0]}." if cuda[0] else ""
        yield (
            Level.BLOCKS,
            f"This PyTorch has no kernels for the card (capability {version}; it has "
            f"{', '.join(machine.torch_architectures)}): programs end with 'no kernel image is available'.",
            f"Install a newer build: pip install --upgrade torch.{needs}",
        )
        return
    if card.fault is not None:
        yield Level.BLOCKS, f"A matrix product fails: {card.fault}.", "Update the driver, restart, and look again."
        return
    formats = ["bf16" if card.capability >= (8, 0) else "fp16", *(["float8"] if card.capability >= (8, 9) else [])]
    rates = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in card.products.items())
    yield Level.FINE, f"Capability {version}: {', '.join(formats)}. Matrix products: {rates or 'not measured'}.", ""
    known = find_card(card.name)
    measured = max(card.products.get("bf16", 0.0), card.products.get("fp16", 0.0)) / 1e12
    if known is not None and known.gemm_tflops and measured and measured < 0.7 * known.gemm_tflops[0]:
        yield (
            Level.WARNS,
            f"Products in 16 bits reach {measured:.0f} TFLOP/s; others measured {known.gemm_tflops[0]:g} to "
            f"{known.gemm_tflops[1]:g} on a {known.name}.",
            "Look for another program on the card, a low power limit, or heat.",
        )
    if card.capability < (7, 0):
        yield Level.WARNS, "Too old for flash attention and compiled layers.", "Set compile = false."


def _driver_age(machine: Machine, card: FoundCard) -> Iterator[CardFinding]:
    match = re.match(r"(\d+)\.(\d+)", machine.driver or "")
    if card.capability not in FIRST_CUDA or match is None or machine.wsl:  # in WSL the number is that of Windows
        return
    cuda, least = FIRST_CUDA[card.capability]
    if (int(match[1]), int(match[2])) < least:
        yield (
            Level.BLOCKS,
            f"The driver {machine.driver} is older than the card: it needs {least[0]} (CUDA {cuda[0]}.{cuda[1]}).",
            "Update the driver (Ubuntu: sudo ubuntu-drivers install) and restart.",
        )


def _card_memory(machine: Machine, card: FoundCard) -> Iterator[CardFinding]:
    if card.memory_bytes is None:
        return
    total = console.format_bytes(card.memory_bytes)
    if card.free_bytes is None or card.free_bytes > 0.9 * card.memory_bytes:
        yield Level.FINE, f"{total} of memory, free.", ""
        return
    holders = ", ".join(
        f"{holder.name} ({holder.pid}{'' if holder.bytes is None else ', ' + console.format_bytes(holder.bytes)})"
        for holder in card.holders
    )
    yield (
        Level.WARNS if card.free_bytes < 0.75 * card.memory_bytes else Level.NOTE,
        f"{console.format_bytes(card.free_bytes)} of {total} are free; the rest is held by {holders or 'others'}.",
        "Close what you do not need; a desktop can use the processor's own graphics.",
    )


def _power(machine: Machine, card: FoundCard) -> Iterator[CardFinding]:
    limit, default = card.power_limit_watts, card.power_default_watts
    if limit is not None and default is not None and limit < 0.98 * default:
        low = limit < 0.6 * default
        yield (
            Level.WARNS if low else Level.NOTE,
            f"The power limit is {limit:.0f} W of {default:.0f} W"
            + (": that costs much speed." if low else ": quieter, and little slower."),
            f"sudo nvidia-smi -pl {default:.0f} sets it back." if low else "",
        )
    guards = guards_of(card.name)
    if card.celsius is not None and card.celsius >= guards.core_warn_celsius:
        yield (
            Level.WARNS,
            f"{card.celsius:.0f} degrees already before a run.",
            "Check fans, dust and the air of the case; a lower power limit helps (sudo nvidia-smi -pl WATTS).",
        )
    if card.throttle_reasons:
        yield (
            Level.WARNS,
            f"Its clock is held down: {', '.join(card.throttle_reasons)}.",
            "Check cooling, power limit and the power cables.",
        )
    if card.ecc_uncorrected:
        yield (
            Level.WARNS,
            f"{card.ecc_uncorrected} memory errors that could not be corrected since the driver was loaded.",
            "Restart; if they come again, the card's memory is failing.",
        )
    if card.persistence is False and machine.system == "Linux" and not machine.wsl:
        yield Level.NOTE, "Persistence mode is off: the first use after a pause is slower.", "sudo nvidia-smi -pm 1"


def _slot(machine: Machine, card: FoundCard) -> Iterator[CardFinding]:
    width, possible = card.pcie_width, card.pcie_width_possible
    if width is not None and possible is not None and width < possible:
        yield (
            Level.WARNS if width <= 4 else Level.NOTE,
            f"PCIe runs at x{width} of x{possible}: offloading to the host is slower.",
            "Seat the card again, or put it into the slot next to the processor." if width <= 4 else "",
        )
    generation, best = card.pcie_generation, card.pcie_generation_possible
    if generation is not None and best is not None and generation < best:
        yield Level.NOTE, f"PCIe generation {generation} of {best} now; at rest that is usual.", ""
    if card.bar1_bytes is not None and card.memory_bytes is not None and card.bar1_bytes < card.memory_bytes / 2:
        yield Level.NOTE, "Resizable BAR is off (BIOS): copies from the host are a little slower.", ""
    if "laptop" in card.name.lower():
        yield Level.NOTE, "A laptop's card: slower than the desktop card of that name, and sooner hot.", ""


CARD_RULES: tuple[Callable[[Machine, FoundCard], Iterator[CardFinding]], ...] = (
    _kernels,
    _driver_age,
    _card_memory,
    _power,
    _slot,
)


# --- the host -----------------------------------------------------------------------------------------------------


def _host(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory_bytes
    allowed = machine.memory_allowed_bytes
    if memory is not None and allowed is not None and allowed < 0.95 * memory:
        yield Finding(
            Level.NOTE,
            "memory",
            f"This container may use {console.format_bytes(allowed)} of {console.format_bytes(memory)}.",
            "",
        )
        memory = allowed
    if memory is not None:
        largest = max((card.memory_bytes or 0 for card in machine.cards), default=0)
        if memory < 8 * GIB * 0.9:
            yield Finding(
                Level.WARNS, "memory", f"{console.format_bytes(memory)}: little, even for small models.", "Add memory."
            )
        elif memory < largest:
            yield Finding(
                Level.WARNS,
                "memory",
                f"{console.format_bytes(memory)}, less than the card has: loading and saving large models is tight.",
                "Add memory, or swap.",
            )
        else:
            yield Finding(Level.FINE, "memory", f"{console.format_bytes(memory)}.")
    shared = machine.shared_memory_bytes
    if shared is not None and shared < LEAST_SHARED_BYTES:
        yield Finding(
            Level.WARNS if len(machine.cards) > 1 else Level.NOTE,
            "shared memory",
            f"/dev/shm has {console.format_bytes(shared)}: several cards, and other tools' data workers, need more. "
            "onecard's own loading does not use it.",
            "Docker: start the container with --shm-size 8g (or --ipc host)." if len(machine.cards) > 1 else "",
        )
    allowed_cores = machine.cores_allowed
    if allowed_cores is not None and machine.cores is not None and allowed_cores < machine.cores:
        yield Finding(Level.NOTE, "processor", f"{allowed_cores:g} of {machine.cores} cores may be used.")
    if machine.governor == "powersave" and not machine.cards:
        yield Finding(
            Level.NOTE, "processor", "The clock is governed for saving.", "sudo cpupower frequency-set -g performance"
        )
    if machine.products:
        rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in machine.products.items())
        yield Finding(Level.FINE, "processor", f"Matrix products: {rates}.")


def _disk(machine: Machine) -> Iterator[Finding]:
    free = machine.disk_free_bytes
    if free is None:
        return
    text = f"{console.format_bytes(free)} free in {machine.directory}"
    if free < LEAST_DISK_BYTES:
        yield Finding(
            Level.BLOCKS, "disk", f"{text}: a run would fill it.", "Free some space, or choose another folder."
        )
    elif free < GOOD_DISK_BYTES:
        yield Finding(
            Level.WARNS,
            "disk",
            f"{text}: enough for small models (a checkpoint takes 12 bytes a parameter, and three are kept).",
            "Free some space before you train a large one.",
        )
    else:
        yield Finding(Level.FINE, "disk", f"{text}.")


def _compilers(machine: Machine) -> Iterator[Finding]:
    with_cards = any(card.capability for card in machine.cards)
    if with_cards and machine.packages.get("triton") is None:
        yield Finding(Level.WARNS, "triton", "Without triton, layers on a card run uncompiled.", "pip install triton")
    if machine.compiler is None:
        yield Finding(
            Level.WARNS,
            "compiler",
            "There is no C++ compiler: layers run uncompiled, and training takes longer.",
            "Debian, Ubuntu: sudo apt install g++",
        )
    elif machine.python_headers is False:
        yield Finding(
            Level.WARNS,
            "compiler",
            "Python's headers are missing: layers run uncompiled, and training takes longer.",
            "Debian, Ubuntu: sudo apt install python3-dev",
        )
    else:
        yield Finding(Level.FINE, "compiler", f"{machine.compiler}, with Python's headers.")


def _packages(machine: Machine) -> Iterator[Finding]:
    if machine.unmet:
        yield Finding(
            Level.BLOCKS,
            "packages",
            f"These do not fit: {'; '.join(machine.unmet)}.",
            "pip install --upgrade onecard (best in a virtual environment of its own)",
        )
        return
    there = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    yield Finding(Level.FINE, "packages", f"{there}.")


def _surroundings(machine: Machine) -> Iterator[Finding]:
    if machine.wsl:
        yield Finding(
            Level.NOTE,
            "WSL",
            "Windows gives WSL about half of the memory, and decides what the card does beside.",
            "More memory: [wsl2] memory=... in .wslconfig of your Windows home.",
        )
        if machine.directory.startswith("/mnt/"):
            yield Finding(
                Level.WARNS,
                "disk",
                f"{machine.directory} lies on a Windows disk, which WSL reads slowly.",
                "Keep data and runs below your Linux home.",
            )
    elif machine.system != "Linux":
        yield Finding(Level.WARNS, "system", f"onecard is not tested on {machine.system}.", "Linux, or WSL, is.")
    paths = machine.variables.get("LD_LIBRARY_PATH", "")
    if "cuda" in paths.lower() and machine.cards:
        yield Finding(
            Level.NOTE,
            "libraries",
            "LD_LIBRARY_PATH names a CUDA of the system, which can shadow the one that PyTorch brings.",
            "If PyTorch cannot load a library: unset LD_LIBRARY_PATH",
        )
    yield Finding(Level.FINE, "network", "onecard opens no connection; nothing has to be set for that.")
