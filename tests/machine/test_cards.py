"""The table of cards: found by name, honest about sources, and without the false claims that go round."""

from __future__ import annotations

import pytest

from onecard.machine import cards
from onecard.machine.cards import Guards, find_card, guards_of, known_cards


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB SXM"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Radeon", None),
    ],
)
def test_a_card_is_found_by_its_whole_name(name: str, found: str | None) -> None:
    card = find_card(name)
    assert (card and card.name) == found


def test_the_5090_is_what_it_is() -> None:
    card = find_card("NVIDIA GeForce RTX 5090")
    assert card is not None
    assert (card.memory_gib, card.memory, card.tensor_generation, card.capability) == (32, "GDDR7", 5, (12, 0))
    assert (card.bandwidth_gb_per_second, card.fp16_tflops, card.tdp_watts) == (1792, 209.5, 575)


def test_no_40_or_50_has_nvlink() -> None:
    assert {card.name for card in known_cards() if card.nvlink} == {
        "RTX 3090",
        "RTX 3090 Ti",
        "A100 80 GB SXM",
        "H100 SXM",
        "H200",
    }


def test_sources_name_fields_that_are_there() -> None:
    for card in known_cards():
        for field in (*card.derived, *card.unconfirmed):
            assert getattr(card, field) is not None
    card = find_card("RTX 4070 Ti Super")
    assert card is not None
    assert [card.source(name) for name in ("fp32_tflops", "fp16_tflops", "memory_gib")] == [
        "unconfirmed",
        "derived",
        "source",
    ]


def test_sixteen_bit_rates_of_geforce_are_two_and_four_times_fp32() -> None:
    for card in known_cards():
        if card.names[0].startswith("GeForce"):
            assert card.fp16_tflops == pytest.approx(2 * card.fp32_tflops, rel=0.01)
            assert card.fp16_accumulated_tflops == pytest.approx(4 * card.fp32_tflops, rel=0.01)


def test_a_card_that_is_not_in_the_table_has_the_common_guards() -> None:
    common = Guards(83, 88, 100, 105)
    assert guards_of("Some card of 2031") == guards_of(None) == guards_of("NVIDIA GeForce RTX 3090") == common


def test_an_entry_can_have_its_own_guards() -> None:
    entry = dict(cards._table()["card"][0]) | {"guards": {"core_pause_celsius": 80}}
    assert cards._card(entry).guards == Guards(83, 80, 100, 105)
