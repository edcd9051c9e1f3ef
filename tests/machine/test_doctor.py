"""What doctor says of recorded machines, by the facts that their owners sent, and of this one."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onecard import cli
from onecard.machine import doctor, probe
from onecard.machine.doctor import Finding, Level, diagnose, runs_on
from onecard.machine.probe import FoundCard, Holder, Machine

GIB = 1 << 30
CUDA_128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
PACKAGES = {"torch": "2.12.0", "transformers": "5.20.0", "triton": "3.6.0"}

PLAIN = Machine(
    system="Linux",
    kernel="6.8.0-40-generic",
    python="3.12.3",
    processor="AMD Ryzen 7 5800X",
    cores=16,
    cores_allowed=16.0,
    memory_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    swap_bytes=8 * GIB,
    shared_memory_bytes=32 * GIB,
    directory="/home/someone",
    disk_free_bytes=500 * GIB,
    torch="2.12.0+cpu",
    compiler="/usr/bin/g++",
    python_headers=True,
    packages={**PACKAGES, "triton": None},
)
CARD_3090 = FoundCard(
    name="NVIDIA GeForce RTX 3090",
    capability=(8, 6),
    memory_bytes=24 * GIB,
    free_bytes=int(23.5 * GIB),
    power_limit_watts=350.0,
    power_default_watts=350.0,
    celsius=41.0,
    throttle_reasons=(),
    pcie_generation=4,
    pcie_generation_possible=4,
    pcie_width=16,
    pcie_width_possible=16,
    bar1_bytes=32 * GIB,
    nvlink=False,
    persistence=True,
    ecc_uncorrected=None,
    products={"fp32": 34e12, "bf16": 75e12, "fp16": 75e12},
)
ON_3090 = replace(
    PLAIN,
    card_device_there=True,
    driver="560.35.03",
    torch="2.12.0+cu128",
    torch_cuda="12.8",
    torch_architectures=CUDA_128,
    cards=(CARD_3090,),
    packages=PACKAGES,
)
CARD_4090 = replace(
    CARD_3090, name="NVIDIA GeForce RTX 4090", capability=(8, 9), products={"fp32": 80e12, "bf16": 165e12}
)
ON_4090_WSL = replace(
    ON_3090,
    kernel="5.15.153.1-microsoft-standard-WSL2",
    wsl=True,
    driver="522.25",  # that of Windows
    memory_bytes=16 * GIB,
    directory="/mnt/c/models",
    cards=(replace(CARD_4090, persistence=None),),
)
CARD_5090 = replace(
    CARD_3090,
    name="NVIDIA GeForce RTX 5090",
    capability=(12, 0),
    memory_bytes=32 * GIB,
    free_bytes=31 * GIB,
    pcie_generation_possible=5,
    products={},
    fault="CUDA error: no kernel image is available for execution on the device",
)
ON_5090_CU126 = replace(
    ON_3090,
    torch="2.8.0+cu126",
    torch_cuda="12.6",
    torch_architectures=CUDA_126,
    driver="575.51",
    cards=(CARD_5090,),
)
TWO_4090 = replace(
    ON_3090, cards=(CARD_4090, CARD_4090), peers={"0-1": False}, shared_memory_bytes=64 << 20, memory_bytes=128 * GIB
)
LAPTOP_5090 = replace(
    ON_3090,
    driver="576.02",
    cards=(
        replace(
            CARD_5090,
            name="NVIDIA GeForce RTX 5090 Laptop GPU",
            memory_bytes=24 * GIB,
            free_bytes=int(16 * GIB),
            holders=(Holder(812, "Xorg", 900 << 20), Holder(4100, "firefox", None)),
            power_limit_watts=80.0,
            power_default_watts=150.0,
            celsius=86.0,
            throttle_reasons=("power limit",),
            fault=None,
            products={"bf16": 110e12},
        ),
    ),
)


def said(machine: Machine, level: Level) -> list[Finding]:
    return [finding for finding in diagnose(machine) if finding.level is level]


def one(machine: Machine, level: Level, text: str) -> Finding:
    [found] = [finding for finding in said(machine, level) if text in finding.what]
    return found


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80", "sm_86"), (8, 9), True),  # same major, lower minor
        (("sm_86",), (8, 0), False),
        (("sm_90",), (8, 9), False),
        (CUDA_126, (12, 0), False),
        (CUDA_128, (12, 0), True),
        ((*CUDA_126, "compute_90"), (12, 0), True),  # PTX is compiled for newer cards
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_120a",), (12, 1), False),  # a: that card alone
        ((), (8, 6), False),
    ],
)
def test_which_build_runs_on_which_card(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architectures, capability) is runs


def test_a_machine_in_order_has_nothing_to_mend() -> None:
    for machine in (PLAIN, ON_3090):
        findings = diagnose(machine)
        assert {finding.level for finding in findings} == {Level.FINE}
        assert not any(finding.remedy for finding in findings)
    assert "small models train on the processor" in one(PLAIN, Level.FINE, "no NVIDIA card").what
    assert "Capability 8.6: bf16." in one(ON_3090, Level.FINE, "Capability").what


def test_a_4090_in_wsl() -> None:
    assert not said(ON_4090_WSL, Level.BLOCKS)  # its driver's number is that of Windows
    assert "Windows disk" in one(ON_4090_WSL, Level.WARNS, "/mnt/c").what
    assert "less than the card has" in one(ON_4090_WSL, Level.WARNS, "16.0 GiB").what
    assert "float8" in one(ON_4090_WSL, Level.FINE, "Capability 8.9").what
    assert ".wslconfig" in one(ON_4090_WSL, Level.NOTE, "WSL").remedy


def test_a_5090_with_a_build_that_has_no_kernels_for_it() -> None:
    [found] = said(ON_5090_CU126, Level.BLOCKS)
    assert found.subject == "NVIDIA GeForce RTX 5090"
    assert "capability 12.0" in found.what and "no kernel image" in found.what and "sm_90" in found.what
    assert "CUDA 12.8" in found.remedy and "570" in found.remedy
    right = replace(ON_5090_CU126, torch_cuda="12.8", torch_architectures=CUDA_128)
    assert "matrix product fails" in said(right, Level.BLOCKS)[0].what  # kernels, and still it fails
    old = replace(right, driver="550.54", cards=(replace(CARD_5090, fault=None),))
    assert "older than the card" in said(old, Level.BLOCKS)[0].what


def test_two_cards_without_direct_copies_and_little_shared_memory() -> None:
    warned = said(TWO_4090, Level.WARNS)
    assert {finding.subject for finding in warned} == {"cards", "shared memory"}
    assert "NCCL_P2P_DISABLE=1" in one(TWO_4090, Level.WARNS, "0-1").remedy
    assert "--shm-size" in one(TWO_4090, Level.WARNS, "64.0 MiB").remedy
    assert any(finding.subject.endswith("(1)") for finding in diagnose(TWO_4090))
    alone = replace(TWO_4090, cards=TWO_4090.cards[:1], peers={})
    assert one(alone, Level.NOTE, "64.0 MiB").remedy == ""


def test_a_laptop_that_is_held_back() -> None:
    assert "Xorg (812, 900.0 MiB), firefox (4100)" in one(LAPTOP_5090, Level.WARNS, "are free").what
    assert "80 W of 150 W" in one(LAPTOP_5090, Level.WARNS, "power limit is").what
    assert one(LAPTOP_5090, Level.WARNS, "86 degrees")
    assert one(LAPTOP_5090, Level.WARNS, "held down: power limit")
    assert one(LAPTOP_5090, Level.NOTE, "laptop's card")


def test_a_limit_that_is_only_a_little_lower_is_no_fault() -> None:
    quiet = replace(ON_3090, cards=(replace(CARD_3090, power_limit_watts=280.0),))
    assert not said(quiet, Level.WARNS)
    assert "280 W of 350 W: quieter" in one(quiet, Level.NOTE, "power limit").what


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"torch": None, "torch_fault": "libcudart.so.12: cannot open"}, Level.BLOCKS, "libcudart.so.12"),
        ({"torch_cuda": None, "cards": (), "driver": "560.1"}, Level.BLOCKS, "built for CPUs only"),
        ({"driver": None, "cards": ()}, Level.BLOCKS, "no NVIDIA driver answers"),
        ({"cards": (FoundCard("NVIDIA GeForce RTX 3090"),)}, Level.BLOCKS, "cannot use"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}, "cards": ()}, Level.WARNS, "hides every card"),
        ({"disk_free_bytes": GIB}, Level.BLOCKS, "would fill it"),
        ({"disk_free_bytes": 10 * GIB}, Level.WARNS, "small models"),
        ({"compiler": None}, Level.WARNS, "no C++ compiler"),
        ({"python_headers": False}, Level.WARNS, "headers are missing"),
        ({"packages": {"triton": None}}, Level.WARNS, "Without triton"),
        ({"unmet": ("transformers<5.25 (found 5.30)",)}, Level.BLOCKS, "found 5.30"),
        ({"memory_allowed_bytes": 4 * GIB}, Level.WARNS, "little, even for small models"),
        ({"cores_allowed": 2.0}, Level.NOTE, "2 of 16 cores"),
        ({"system": "Darwin"}, Level.WARNS, "not tested on Darwin"),
        ({"variables": {"LD_LIBRARY_PATH": "/usr/local/cuda-12.1/lib64"}}, Level.NOTE, "shadow"),
    ],
)
def test_single_faults(changes: dict[str, Any], level: Level, text: str) -> None:
    assert one(replace(ON_3090, **changes), level, text)


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"pcie_width": 4}, Level.WARNS, "x4 of x16"),
        ({"pcie_width": 8}, Level.NOTE, "x8 of x16"),
        ({"pcie_generation": 1}, Level.NOTE, "generation 1 of 4"),
        ({"bar1_bytes": 256 << 20}, Level.NOTE, "Resizable BAR is off"),
        ({"persistence": False}, Level.NOTE, "Persistence mode"),
        ({"ecc_uncorrected": 3}, Level.WARNS, "3 memory errors"),
        ({"products": {"bf16": 40e12}}, Level.WARNS, "75 to 77"),
        ({"capability": (6, 1)}, Level.BLOCKS, "no kernels for the card (capability 6.1"),
    ],
)
def test_single_faults_of_a_card(changes: dict[str, Any], level: Level, text: str) -> None:
    assert one(replace(ON_3090, cards=(replace(CARD_3090, **changes),)), level, text)


def test_what_nobody_can_tell_is_not_judged() -> None:
    bare = Machine(
        system="Linux", kernel="", python="3.12", cards=(FoundCard("A card of next year"),), torch_cuda="13.4"
    )
    whole = replace(bare, torch="2.13", cards=(FoundCard("A card of next year", capability=(13, 0)),), compiler="c++")
    assert {finding.level for finding in diagnose(whole)} <= {Level.FINE, Level.WARNS}
    assert [finding.subject for finding in said(whole, Level.WARNS)] == ["triton"]


def test_a_recorded_machine_goes_through_json() -> None:
    for machine in (PLAIN, TWO_4090, LAPTOP_5090):
        assert Machine.from_plain(json.loads(json.dumps(machine.plain()))) == machine


# --- this machine -------------------------------------------------------------------------------------------------


def test_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecard.machine.calibrate.matrix_rate", lambda *_: 1e11)
    status = cli.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if document["fit"] else 3)
    found = Machine.from_plain(document["machine"])
    assert found.memory_bytes and found.cores and found.torch and found.packages["transformers"]


def test_a_machine_that_blocks_ends_with_3_and_still_one_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: ON_5090_CU126)
    assert cli.main(["doctor", "--json"]) == 3
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert document["fit"] is False and document["findings"][0]["level"] == "blocks"
    assert "CUDA 12.8" in out.err
    assert cli.main(["doctor"]) == 3
    assert "blocks" in capsys.readouterr().out


class _Driver:
    """Stands in for NVML: one card, of which it tells little."""

    NVMLError = RuntimeError
    NVML_ERROR_GPU_IS_LOST = 15

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlSystemGetDriverVersion(self) -> str:
        return "560.35.03"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1234"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=24 * GIB, free=20 * GIB, used=4 * GIB)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return 280_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=1, usedGpuMemory=GIB)]


def test_what_driver_and_torch_know_of_a_card_comes_together() -> None:
    from_torch = {"name": "RTX", "capability": (8, 6), "memory_bytes": 23 * GIB, "products": {}, "identity": "1234"}
    cards, driver = probe._with_driver([from_torch], _Driver())
    assert driver == "560.35.03" and len(cards) == 1
    card = cards[0]
    assert (card.name, card.memory_bytes, card.free_bytes) == ("RTX", 23 * GIB, 20 * GIB)
    assert card.power_limit_watts == 280.0 and card.power_default_watts is None
    assert card.holders[0].pid == 1 and card.holders[0].bytes == GIB
    alone, _ = probe._with_driver([], _Driver())
    assert alone[0].name == "NVIDIA GeForce RTX 3090" and alone[0].capability is None
