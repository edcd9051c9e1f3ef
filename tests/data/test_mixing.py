"""Shares of the tokens become passes over the sources."""

from __future__ import annotations

import pytest

from onecard.data.mixing import passes
from onecard.errors import ConfigError

TOKENS = {"law": 600, "news": 300, "poems": 100}


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # Half of 1,000 tokens are 5 passes over 100; the rest keeps 2 to 1 over 900: 500 / 900 of a pass each.
        ({"poems": 0.5}, {"law": 500 / 900, "news": 500 / 900, "poems": 5.0}),
        ({"law": 0.6, "news": 0.3, "poems": 0.1}, {"law": 1.0, "news": 1.0, "poems": 1.0}),
        ({"law": 1.0}, {"law": 1000 / 600, "news": 0.0, "poems": 0.0}),
        ({"news": 0.0}, {"law": 1000 / 700, "news": 0.0, "poems": 1000 / 700}),
        ({}, {"law": 1.0, "news": 1.0, "poems": 1.0}),
    ],
)
def test_passes_by_hand(shares: dict[str, float], expected: dict[str, float]) -> None:
    found = passes(shares, TOKENS)
    assert found == pytest.approx(expected)
    assert sum(found[name] * count for name, count in TOKENS.items()) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"law": 0.7, "news": 0.4}, "come to 1.1"),
        ({"law": 0.2, "news": 0.2, "poems": 0.2}, "no other source"),
        ({"none": 0.5}, "no tokens"),
    ],
)
def test_shares_that_cannot_be(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        passes(shares, {**TOKENS, "none": 0})
