"""The character model by which a text is compared with a reference: counts and bits worked out by hand."""

from __future__ import annotations

import math

import pytest

from onecard.data.familiarity import Familiarity


def test_bits_by_hand() -> None:
    model = Familiarity("ababab")
    # Smoothing with a prior of 4 over an alphabet of 8,000: 6 characters, 3 of them a; 3 times ab, twice aba.
    a = (3 + 4 / 8000) / (6 + 4)
    b = a
    ab = (3 + 4 * b) / (3 + 4)
    ba = (2 + 4 * a) / (3 + 4)
    aba = (2 + 4 * ba) / (3 + 4)
    assert model.bits_per_byte("") == 0
    assert model.bits_per_byte("a") == pytest.approx(-math.log2(a), rel=1e-5)
    assert model.bits_per_byte("ab") == pytest.approx(-(math.log2(a) + math.log2(ab)) / 2, rel=1e-5)
    assert model.bits_per_byte("aba") == pytest.approx(-(math.log2(a) + math.log2(ab) + math.log2(aba)) / 3, rel=1e-5)


def test_bytes_are_those_of_utf8() -> None:
    model = Familiarity("天地玄黄")
    one = (1 + 4 / 8000) / (4 + 4)
    assert model.bits_per_byte("天") == pytest.approx(-math.log2(one) / 3, rel=1e-5)
    assert model.bits_per_byte("q") == pytest.approx(-math.log2((4 / 8000) / 8), rel=1e-5)


def test_what_is_alike_costs_less() -> None:
    model = Familiarity("高血压患者要少吃盐，按时服药，多散步。糖尿病患者要少吃糖，定期查血糖。" * 20)
    alike, foreign = "高血压患者要按时服药。", "股市今天大涨，券商领跌。"
    assert model.bits_per_byte(alike) < 0.5 * model.bits_per_byte(foreign)
