"""Fixtures shared by all tests: one tiny tokenizer and model, made once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# A test makes its own token stores, and leaves none in the home of whoever runs it.
os.environ["ONECARD_TOKEN_CACHE"] = "none"
# The tensors of the tests are tiny: threads would only wait for each other (many times slower on a busy machine).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from onecard import console

SAMPLE_TEXT = [
    "The quick brown fox jumps over the lazy dog. It was not amused, and said so at length.",
    "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。",
    "In the beginning God created the heaven and the earth.",
    "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。",
    "1234567890 + 42 = ?  Emoji: 👍👨‍👩‍👧 and tabs\tand\nnew lines.",
]


@pytest.fixture(autouse=True)
def plain_console() -> Iterator[None]:
    """A test that runs a verb with --json or --quiet leaves no trace in the next."""
    yield
    console.configure()


@pytest.fixture(scope="session")
def tiny_tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory as `onecard tokenizer train` writes it."""
    from onecard.config import TokenizerTrainConfig
    from onecard.data.corpus import Document, write_corpus
    from onecard.tokenizer.train import train

    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    documents = [
        Document(id=str(i), text=text * 4, source="sample", language="en") for i, text in enumerate(SAMPLE_TEXT)
    ]
    write_corpus(folder / "corpus", documents)
    train(TokenizerTrainConfig(corpus=folder / "corpus", output=folder / "tokenizer", vocabulary_size=384))
    return folder / "tokenizer"


@pytest.fixture(scope="session")
def tiny_model_directory(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    """A Llama of two layers with random weights and the tiny tokenizer, in Hugging Face layout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from onecard.model.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    directory = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
