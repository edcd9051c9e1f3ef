from __future__ import annotations

from typing import Any

import pytest

from onecard.errors import ConfigError, MachineError
from onecard.machine.probe import FoundCard, Holder, Machine
from onecard.plan.targets import GIB, notes, target

RATES = {
    "fp32_flops_per_second": 60e12,
    "bf16_flops_per_second": 150e12,
    "fp16_flops_per_second": 151e12,
    "memory_bytes_per_second": 900e9,
    "host_to_card_bytes_per_second": 24e9,
    "card_to_host_bytes_per_second": 22e9,
    "disk_write_bytes_per_second": 1e9,
}


def machine(**changes: Any) -> Machine:
    return Machine(system="Linux", kernel="6.8", python="3.11", **changes)


def with_card(**changes: Any) -> Machine:
    settings: dict[str, Any] = {"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "memory_bytes": 25 * 10**9}
    card = FoundCard(**settings | changes)
    return machine(cards=(card,), torch_architectures=("sm_86",), memory_available_bytes=60 * 10**9)


def test_a_card_of_the_table_by_hand() -> None:
    """4090: 23.52 GiB seen; 162 to 173 TFLOPS measured, 165.2 nominal; 1,008 GB/s; PCIe 4; 8 bits twice 16."""
    found = target("rtx 4090")
    assert found.name == "RTX 4090"
    assert found.capacity_bytes == int(23.52 * GIB)
    assert found.flops_per_second["bf16"] == 167.5e12
    assert found.flops_per_second["fp32"] == pytest.approx(82.6e12 * 167.5 / 165.2)
    assert found.flops_per_second["float8"] == 335e12
    assert found.memory_bytes_per_second == pytest.approx(907.2e9)
    assert found.host_bytes_per_second == pytest.approx(25.2e9)
    assert (found.watts, found.measured, notes(found)) == (450, False, [])


def test_float8_only_where_the_card_has_it() -> None:
    assert "float8" not in target("RTX 3090").flops_per_second
    assert "float8" in target("RTX 5090").flops_per_second
    assert "float8" not in target(machine=with_card(capability=(8, 6)), rates=RATES).flops_per_second


def test_what_nobody_measured_is_derived_and_said() -> None:
    found = target("RTX 4080")
    assert found.flops_per_second["bf16"] == pytest.approx(97.5e12 * 0.875)
    assert found.capacity_bytes == int(16 * 0.98 * GIB)
    assert notes(found) == [
        "Nobody's measurement of matrix products is known: 88% of the datasheet is taken.",
        "Memory is the nominal 16 GiB less 2%.",
        "The card's memory bandwidth, rate of fp32 (TF32) products, rate of 16-bit products are computed from other "
        "figures.",
    ]
    assert notes(target("A100 80 GB SXM")) == ["The card's power is not confirmed."]


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        target("RTX 4900")
    assert raised.value.what == "There is no card RTX 4900 in the table."
    assert "RTX 4090" in raised.value.remedy
    with pytest.raises(ConfigError, match="Known are RTX 3090, RTX 3090 Ti"):
        target("qqqq")


def test_this_card_by_its_own_rates_less_what_others_hold() -> None:
    found = target(
        machine=with_card(holders=(Holder(1, "Xorg", 300), Holder(2, "game", 700)), power_limit_watts=350.0),
        rates=RATES,
    )
    assert found.capacity_bytes == 25 * 10**9 - 1000
    assert found.flops_per_second == {"fp32": 60e12, "bf16": 150e12, "fp16": 151e12, "float8": 300e12}
    assert (found.memory_bytes_per_second, found.host_bytes_per_second) == (900e9, 22e9)
    assert (found.watts, found.measured, found.host_memory_bytes) == (350.0, True, 60 * 10**9)


def test_where_no_program_tells_what_it_holds_only_free_memory_counts() -> None:
    held = with_card(holders=(Holder(1, "Xorg", None),), free_bytes=20 * 10**9)
    assert target(machine=held, rates=RATES).capacity_bytes == 20 * 10**9


def test_a_card_that_is_not_in_the_table_works_from_driver_and_measurement() -> None:
    found = target(machine=with_card(name="NVIDIA RTX 7090", capability=(13, 0)), rates=RATES)
    assert (found.name, found.watts, found.capability) == ("NVIDIA RTX 7090", None, (13, 0))
    assert found.flops_per_second["bf16"] == 150e12
    with pytest.raises(MachineError):
        target(machine=with_card(memory_bytes=None), rates=RATES)


@pytest.mark.parametrize(("available", "allowed", "expected"), [(8, 16, 8), (8, 4, 4), (8, None, 8)])
def test_a_processor_has_what_is_free_and_allowed(available: int, allowed: int | None, expected: int) -> None:
    found = target(
        machine=machine(processor="EPYC", memory_available_bytes=available, memory_allowed_bytes=allowed),
        rates={"fp32_flops_per_second": 1e11, "bf16_flops_per_second": 1e9, "memory_bytes_per_second": 2e10},
    )
    assert (found.device, found.name, found.capacity_bytes) == ("cpu", "EPYC", expected)
    assert found.flops_per_second == {"fp32": 1e11, "bf16": 1e9}
    assert found.watts is None


def test_a_card_that_torch_cannot_use_is_no_target() -> None:
    """The driver tells of a card, but this torch was built without CUDA."""
    unusable = machine(cards=(FoundCard("RTX 4090"),), memory_available_bytes=5)
    found = target(machine=unusable, rates={"fp32_flops_per_second": 1.0, "memory_bytes_per_second": 1.0})
    assert found.device == "cpu"
