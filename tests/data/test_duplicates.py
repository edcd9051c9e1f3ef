"""Duplicates over many shards: equal to comparing every pair, one after another, whatever the workers and blocks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from onecard.config import CleanConfig
from onecard.data import duplicates, shards
from onecard.data.dedup import jaccard, shingles
from onecard.data.duplicates import EXACT, decide, read_table
from onecard.data.workers import Workers


def families(seed: int, count: int) -> list[str]:
    """Texts that were changed a little, much, or not at all, in any order, some in one place."""
    draw = random.Random(seed)

    def some(characters: int) -> str:
        return "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(characters))

    texts: list[str] = []
    for _ in range(count):
        base = some(draw.randrange(30, 120))
        for _ in range(draw.randrange(1, 6)):
            kept = len(base) - draw.randrange(0, len(base) // 2)
            texts.append(base[:kept] + some(len(base) - kept))
        texts.append(base)
    draw.shuffle(texts)
    return [*texts, "短", "短", "也"]


def write_shards(folder: Path, config: CleanConfig, texts: list[str], size: int) -> int:
    numbers = range(-(-len(texts) // size))
    for number in numbers:
        made = shards.Shard(number, 0, "source", None)
        for at, text in enumerate(texts[number * size : (number + 1) * size]):
            made.keep(f"{number * size + at}", text, "file", at, at, "zh", False)
        shards.write(folder, config, made)
    return len(numbers)


def one_by_one(texts: list[str], threshold: float, order: list[int]) -> tuple[dict[int, int], dict[int, float]]:
    """What each text repeats, by comparing it with every kept one before it in the order of preference."""
    kept: list[int] = []
    repeats: dict[int, int] = {}
    alike: dict[int, float] = {}
    first: dict[str, int] = {}
    grams = [shingles(text) for text in texts]
    for at in order:
        if texts[at] in first:
            repeats[at], alike[at] = repeats.get(first[texts[at]], first[texts[at]]), alike.get(first[texts[at]], EXACT)
            continue
        first[texts[at]] = at
        found = [(jaccard(grams[at], grams[other]), -place, other) for place, other in enumerate(kept)]
        similarity, _, other = max(found, default=(0.0, 0, -1))
        if similarity >= threshold:
            repeats[at], alike[at] = other, similarity
        else:
            kept.append(at)
    return repeats, alike


@pytest.mark.parametrize("keep", ["first", "longest"])
@pytest.mark.parametrize("block", [7, 100_000])
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_comparing_every_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, block: int, seed: int
) -> None:
    monkeypatch.setattr(duplicates, "_BLOCK_DOCUMENTS", block)
    monkeypatch.setattr(duplicates, "_PAIRS_AT_ONCE", 5)
    # Far below the threshold of the bands and with a wide margin nothing is missed by chance.
    monkeypatch.setattr(duplicates, "_ESTIMATE_MARGIN", 1.0)
    texts = families(seed, 25)
    config = CleanConfig(sources=["x"], near_duplicate_threshold=0.6, keep=keep)
    count = write_shards(tmp_path, config, texts, 11)
    with Workers(1) as workers:
        found = decide(config, read_table(tmp_path, count), workers)
    order = list(range(len(texts)))
    if keep == "longest":
        order.sort(key=lambda at: -len(texts[at]))
    repeats, alike = one_by_one(texts, 0.6, order)
    assert {at: int(other) for at, other in enumerate(found.repeats) if other >= 0} == repeats
    assert len(repeats) > 20
    for at, similarity in alike.items():
        assert found.similarity[at] == pytest.approx(similarity)


def test_many_alike_below_the_threshold_are_all_kept(tmp_path: Path) -> None:
    """Documents of one template share many groups and repeat none; it ends, and soon."""
    draw = random.Random(0)
    template = "".join(chr(0x5000 + at) for at in range(60))
    texts = [template + "".join(chr(draw.randrange(0x6000, 0x9000)) for _ in range(60)) for _ in range(400)]
    config = CleanConfig(sources=["x"], near_duplicate_threshold=0.7)
    count = write_shards(tmp_path, config, texts, 100)
    with Workers(1) as workers:
        found = decide(config, read_table(tmp_path, count), workers)
    assert (found.repeats == -1).all()


def test_a_chain_keeps_every_second(tmp_path: Path) -> None:
    """Each repeats the one before it alone: with the second gone the third stays."""
    line = "".join(chr(0x5000 + at) for at in range(400))
    texts = [line[at * 12 : at * 12 + 120] for at in range(20)]
    grams = [shingles(text) for text in texts]
    assert jaccard(grams[0], grams[1]) > 0.8  # 106 of 130
    assert jaccard(grams[0], grams[2]) < 0.7  # 94 of 142
    config = CleanConfig(sources=["x"], near_duplicate_threshold=0.7)
    count = write_shards(tmp_path, config, texts, 3)
    with Workers(1) as workers:
        found = decide(config, read_table(tmp_path, count), workers)
    assert found.repeats.tolist() == [-1 if at % 2 == 0 else at - 1 for at in range(20)]
    assert np.allclose(found.similarity[1::2], 106 / 130)


def test_a_block_without_anything_shared(tmp_path: Path) -> None:
    config = CleanConfig(sources=["x"])
    count = write_shards(tmp_path, config, ["短", "也短"], 10)
    with Workers(1) as workers:
        assert decide(config, read_table(tmp_path, count), workers).repeats.tolist() == [-1, -1]
