"""A tiny corpus for calibration and measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.data.corpus import Document, write_corpus

ENGLISH = "In the beginning God created the heaven and the earth. The quick brown fox jumps over the lazy dog {0}. "
CHINESE = "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。机器学习模型需要大量数据{0}。"


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents to calibrate with, two of each language held out."""
    directory = tmp_path_factory.mktemp("compress") / "corpus"
    documents = [
        Document(f"{language}{i}", text.format(i) * 5, "sample", language, "held_out" if i < 2 else "train")
        for language, text in (("en", ENGLISH), ("zh", CHINESE))
        for i in range(12)
    ]
    write_corpus(directory, documents)
    return directory
