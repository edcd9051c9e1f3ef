"""The machine that a plan is made for: a named card from the table, or this machine with its own measured rates.

In: a name, or nothing. Out: a `Target`, and for a person `notes` on what of it nobody has measured. A card that is not
in the table works where it is built in: capacity from the driver, rates from a measurement of a second.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from onecard.errors import ConfigError, MachineError
from onecard.machine.cards import Card, find_card, known_cards
from onecard.machine.probe import FoundCard, Machine, probe
from onecard.plan.job import Target

GIB = 2**30
# Of the nominal memory PyTorch sees 98.0 to 99.1 % (five cards of the table): the lowest for those never looked at.
VISIBLE_SHARE = 0.98
# Matrix products in PyTorch against the datasheet, where nobody published a measurement: the median of ten others.
PRODUCT_SHARE = 0.875
# The most that a large copy reaches of a card's nominal bandwidth; and a copy from pinned memory of that of PCIe.
COPY_SHARE = 0.9
PCIE_SHARE = 0.8
PCIE_BYTES_PER_SECOND = {3: 15.75e9, 4: 31.5e9, 5: 63e9}  # 16 lanes, one way
# Tensor cores multiply 8 bits at twice the rate of 16, from this capability on.
FLOAT8_FROM = (8, 9)
FLOAT8_OVER_16_BITS = 2.0


def target(
    card: str | None = None,
    *,
    directory: Path = Path(),
    machine: Machine | None = None,
    rates: dict[str, float] | None = None,
) -> Target:
    """The card of that name, or this machine (None).

    `machine` and `rates` stand in for a look at this machine and for its kept or fresh measurement. ConfigError for a
    card that is not in the table.
    """
    if card is not None:
        return _of_table(card)
    found = machine or probe(directory, products=False)
    if rates is None:
        rates = _rates()
    return _of_card(found, rates) if found.cards and found.torch_architectures else _of_processor(found, rates)


def _rates() -> dict[str, float]:
    from onecard.machine.rates import known, measure

    return known() or measure()


def _of_table(name: str) -> Target:
    card = find_card(name)
    if card is None:
        names = {known.name.lower(): known.name for known in known_cards()}
        close = [names[match] for match in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)]
        raise ConfigError(
            f"There is no card {name} in the table.",
            f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join(names.values())}.",
        )
    return Target(
        name=card.name,
        device="cuda",
        capacity_bytes=int((card.visible_gib or card.memory_gib * VISIBLE_SHARE) * GIB),
        capability=card.capability,
        flops_per_second=_products(card),
        memory_bytes_per_second=card.bandwidth_gb_per_second * 1e9 * COPY_SHARE,
        host_bytes_per_second=PCIE_BYTES_PER_SECOND[card.pcie_generation] * PCIE_SHARE,
        host_memory_bytes=None,
        watts=card.tdp_watts,
        measured=False,
    )


def _products(card: Card) -> dict[str, float]:
    """FLOP a second by format: as others measured 16 bits, and the other formats in the same proportion."""
    sixteen = sum(card.gemm_tflops) / 2 if card.gemm_tflops else card.fp16_tflops * PRODUCT_SHARE
    share = sixteen / card.fp16_tflops
    return _with_float8(
        {"fp32": card.tf32_tflops * share * 1e12, "bf16": sixteen * 1e12, "fp16": sixteen * 1e12}, card.capability
    )


def _with_float8(rates: dict[str, float], capability: tuple[int, int] | None) -> dict[str, float]:
    if capability is None or capability < FLOAT8_FROM:
        return rates
    return rates | {"float8": rates["bf16"] * FLOAT8_OVER_16_BITS}


def _of_card(machine: Machine, rates: dict[str, float]) -> Target:
    found = machine.cards[0]
    if found.memory_bytes is None:
        raise MachineError(
            f"The driver does not tell how much memory {found.name} has.", "Run `onecard doctor`, which says why."
        )
    known = find_card(found.name)
    return Target(
        name=known.name if known is not None else found.name,
        device="cuda",
        capacity_bytes=found.memory_bytes - _held_by_others(found),
        capability=found.capability,
        flops_per_second=_with_float8(_formats(rates), found.capability),
        memory_bytes_per_second=rates["memory_bytes_per_second"],
        host_bytes_per_second=min(rates["host_to_card_bytes_per_second"], rates["card_to_host_bytes_per_second"]),
        host_memory_bytes=_host_memory(machine),
        watts=found.power_limit_watts or found.power_default_watts or (known.tdp_watts if known else None),
        measured=True,
    )


def _held_by_others(card: FoundCard) -> int:
    """What other programs hold; where the driver does not say of one how much (WSL), all that is not free."""
    if card.memory_bytes is not None and card.free_bytes is not None and any(h.bytes is None for h in card.holders):
        return max(0, card.memory_bytes - card.free_bytes)
    return sum(holder.bytes or 0 for holder in card.holders)


def _of_processor(machine: Machine, rates: dict[str, float]) -> Target:
    memory = _host_memory(machine)
    if memory is None:
        raise MachineError("Nobody can tell how much memory this machine has.", "Name a card: --card NAME.")
    return Target(
        name=machine.processor or "processor",
        device="cpu",
        capacity_bytes=memory,
        capability=None,
        flops_per_second=_formats(rates),
        memory_bytes_per_second=rates["memory_bytes_per_second"],
        host_bytes_per_second=None,
        host_memory_bytes=memory,
        watts=None,
        measured=True,
    )


def _host_memory(machine: Machine) -> int | None:
    """What may be taken of the memory of the host: free now, and no more than a container may use."""
    known = [size for size in (machine.memory_available_bytes, machine.memory_allowed_bytes) if size is not None]
    return min(known, default=machine.memory_bytes)


def _formats(rates: dict[str, float]) -> dict[str, float]:
    end = "_flops_per_second"
    return {name.removesuffix(end): rate for name, rate in rates.items() if name.endswith(end)}


def notes(planned: Target) -> list[str]:
    """What of a target is not a measured fact, in sentences for a person."""
    if planned.measured:
        return []
    card = find_card(planned.name)
    assert card is not None, "what is not measured comes from the table"
    said = []
    if card.gemm_tflops is None:
        said.append(f"Nobody's measurement of matrix products is known: {PRODUCT_SHARE:.0%} of the datasheet is taken.")
    if card.visible_gib is None:
        said.append(f"Memory is the nominal {card.memory_gib:g} GiB less {1 - VISIBLE_SHARE:.0%}.")
    words = {
        "bandwidth_gb_per_second": "memory bandwidth",
        "tf32_tflops": "rate of fp32 (TF32) products",
        "fp16_tflops": "rate of 16-bit products",
        "tdp_watts": "power",
    }
    for source, text in (("derived", "computed from other figures"), ("unconfirmed", "not confirmed")):
        names = [word for field, word in words.items() if card.source(field) == source]
        if names:
            said.append(f"The card's {', '.join(names)} {'is' if len(names) == 1 else 'are'} {text}.")
    return said
