"""The yardstick: what xz makes of the held-out text after the training text."""

from __future__ import annotations

import lzma
import random
import shutil
import subprocess

import pytest

from onecard.data.corpus import Document
from onecard.evaluate.compression import Compressed, compress_documents, compressed_bytes

WORDS = ["fox", "dog", "lazy", "quick", "brown", "jumps", "over", "the", "and", "not", "amused", "earth", "heaven"]


def english(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def chinese(seed: int, characters: int = 80) -> str:
    return "".join(
        random.Random(seed).choices("话说天下大势分久必合七国争并入于秦机器学习模型需要大量高质数据", k=characters)
    )


@pytest.fixture
def documents() -> list[Document]:
    made = [Document(f"e{i}", english(i), "s", "en", "held_out" if i % 5 == 0 else "train") for i in range(20)]
    made += [Document(f"z{i}", chinese(i), "s", "zh", "held_out" if i % 4 == 0 else "train") for i in range(12)]
    random.Random(0).shuffle(made)
    return made


def size(text: str) -> int:
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def test_numbers_equal_an_independent_computation(documents: list[Document]) -> None:
    found = compress_documents(documents)
    assert list(found) == ["en", "zh", "all"]
    added, count = 0, 0
    for language in ("en", "zh"):
        train = "".join(d.text + "\n" for d in documents if d.language == language and d.split == "train")
        held = "".join(d.text + "\n" for d in documents if d.language == language and d.split == "held_out")
        text_bytes = sum(len(d.text.encode()) for d in documents if d.language == language and d.split == "held_out")
        mine = size(train + held) - size(train)
        assert found[language].added_bytes == mine
        assert found[language].bytes == text_bytes
        assert found[language].training_bytes == len(train.encode())
        assert found[language].bits_per_byte == pytest.approx(mine * 8 / text_bytes)
        added, count = added + mine, count + text_bytes
    assert found["all"].bits_per_byte == pytest.approx(added * 8 / count)


def test_the_training_text_helps() -> None:
    text = english(1, words=400)
    known = compress_documents([Document("1", text, "s", "en"), Document("2", text, "s", "en", "held_out")])
    unknown = compress_documents([Document("2", text, "s", "en", "held_out")])
    assert known["en"].bits_per_byte < 0.1 < unknown["en"].bits_per_byte


def test_the_prefix_is_reached_over_its_whole_length() -> None:
    # Random bytes as text: only the copy at the very beginning can shorten the held-out document.
    noise = random.Random(3)
    first = "".join(chr(noise.randrange(0x4E00, 0x9FA5)) for _ in range(2000))
    filler = "".join(chr(noise.randrange(0x4E00, 0x9FA5)) for _ in range(400_000))
    made = [
        Document("1", first, "s", "zh"),
        Document("2", filler, "s", "zh"),
        Document("3", first, "s", "zh", "held_out"),
    ]
    assert compress_documents(made)["zh"].bits_per_byte < 0.2


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz program is not installed")
def test_the_size_is_that_of_the_xz_program() -> None:
    data = (english(5, 500) + chinese(5, 500)).encode()
    written = subprocess.run(["xz", "-9e", "--threads=1", "--stdout"], input=data, capture_output=True, check=True)
    assert compressed_bytes(data) == len(written.stdout)


def test_a_language_without_held_out_text_is_left_out() -> None:
    made = [Document("1", english(1), "s", "en"), Document("2", chinese(1), "s", "zh", "held_out")]
    assert list(compress_documents(made)) == ["zh", "all"]


def test_a_training_text_that_is_too_long_is_cut_and_that_is_said(documents: list[Document]) -> None:
    found = compress_documents(documents, maximum_training_bytes=500)
    assert found["en"].training_was_cut
    assert found["en"].training_bytes <= 500
    assert found["all"].training_was_cut


def test_no_bytes_is_zero_and_not_a_fault() -> None:
    assert Compressed().bits_per_byte == 0.0
    assert compress_documents([]) == {"all": Compressed()}
