"""What is known of the cards people own, from cards.toml beside this file, which says where each number comes from.

A card is found by its name as the driver tells it. One that is not in the table works: its guards are the common ones,
and its speed is measured. What the machine itself tells or measures always counts more than the table.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Guards:
    """Temperatures in Celsius at which to warn and to pause, of the core and of the junction of the memory."""

    core_warn_celsius: float
    core_pause_celsius: float
    junction_warn_celsius: float
    junction_pause_celsius: float


@dataclass(frozen=True)
class Card:
    """One kind of card; `memory_gib` is nominal, `visible_gib` what PyTorch sees. Rates are dense, in TFLOPS.

    `derived` and `unconfirmed` name the fields that were computed from others, or remembered and not yet looked up.
    """

    name: str
    names: tuple[str, ...]
    capability: tuple[int, int]
    memory: str
    memory_gib: float
    bandwidth_gb_per_second: float
    tensor_generation: int
    fp32_tflops: float
    tf32_tflops: float
    fp16_tflops: float  # also bf16; sums in FP32
    fp16_accumulated_tflops: float  # sums in FP16
    tdp_watts: float
    nvlink: bool
    pcie_generation: int
    guards: Guards
    visible_gib: float | None = None
    gemm_tflops: tuple[float, float] | None = None  # as measured by others in PyTorch, lowest and highest
    core_limit_celsius: float | None = None
    derived: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()

    def source(self, field: str) -> str:
        """How sure a number is: "source", "derived" or "unconfirmed"."""
        if field in self.unconfirmed:
            return "unconfirmed"
        return "derived" if field in self.derived else "source"


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "cards.toml").read_text(encoding="utf-8"))


@functools.cache
def known_cards() -> tuple[Card, ...]:
    """Every card of the table."""
    return tuple(_card(entry) for entry in _table()["card"])


def _card(entry: dict[str, Any]) -> Card:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Card(**values | {"guards": Guards(**_table()["guards"] | entry.get("guards", {}))})


def guards_of(name: str | None) -> Guards:
    """Guard temperatures of the card of that name; the common ones if it is not in the table."""
    card = find_card(name) if name is not None else None
    return card.guards if card is not None else Guards(**_table()["guards"])


def find_card(name: str) -> Card | None:
    """The card of that name, with or without "NVIDIA" and "GeForce" ("NVIDIA GeForce RTX 4090", "rtx 4090").

    None for one that is not in the table. A name must fit whole: "RTX 4090 Laptop GPU" and "RTX 4090 D" are others.
    """
    wanted = _plain(name)
    return next((card for card in known_cards() if wanted in map(_plain, (card.name, *card.names))), None)


def _plain(name: str) -> str:
    return "".join(re.sub(r"nvidia|geforce", "", name.lower()).split())
