"""A trained tokenizer: exact round trips, bounded tokens, bounded memory, the size that was asked for, one BOS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard import artifact
from onecard.config import TokenizerTrainConfig
from onecard.data.corpus import Document, write_corpus
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.tokenizer.chunks import chunks
from onecard.tokenizer.sample import Sample
from onecard.tokenizer.special import BYTES, CONTROL_TOKENS, DIGITS, FIXED_TOKENS, PRE_TOKENIZERS
from onecard.tokenizer.train import check, train, train_model, train_unigram

TEXTS = [
    "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。" * 3,
    "In the beginning God created the heaven and the earth. " * 3,
    "1234567890 + 42 = 52\n\n\tand\ttabs  and   spaces\r\n" * 3,
]
ODD_TEXTS = [
    "hello !",
    " .",
    "\n  ",
    "  leading",
    "\ttab\t\ttab",
    "trailing  ",
    "👨\u200d👩\u200d👧 👍🏽",
    "，？：；（）ＡＢＣ１２３㎏︰",
    "e\u0301 é \ufb01 \u00a0 \u3000 \u2028",
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
    "don't I'LL 'S",
    "\r\n\r\r\n \n",
    "",
]


def corpus(folder: Path, texts: list[str], *, language: str = "zh", split: Any = "train") -> Path:
    write_corpus(folder, [Document(str(n), text, "s", language, split) for n, text in enumerate(texts)])
    return folder


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from onecard.model.load import load_tokenizer

    folder = tmp_path_factory.mktemp("trained")
    source = corpus(folder / "corpus", TEXTS)
    train(
        TokenizerTrainConfig(
            corpus=source, output=folder / "tokenizer", vocabulary_size=320, pre_tokenizer=request.param
        )
    )
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.made_with = request.param
    return tokenizer


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_round_trip(trained: Any, text: str) -> None:
    assert trained.decode(trained.encode(text), skip_special_tokens=True) == text
    assert trained.decode(trained.encode(text, add_special_tokens=False)) == text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(trained: Any, text: str) -> None:
    assert trained.decode(trained.encode(text, add_special_tokens=False)) == text


def test_entries_and_their_order(trained: Any) -> None:
    assert len(trained) == trained.vocab_size == 320
    assert sorted(trained.get_vocab().values()) == list(range(320))
    assert trained.convert_ids_to_tokens(list(range(len(FIXED_TOKENS)))) == list(FIXED_TOKENS)
    assert (trained.eos_token_id, trained.bos_token_id, trained.pad_token_id) == (0, 1, 2)
    assert set(trained.all_special_tokens) == set(CONTROL_TOKENS)
    assert trained.clean_up_tokenization_spaces is False
    # Every byte is an entry by itself, so nothing is ever unknown.
    from tokenizers import pre_tokenizers

    assert set(pre_tokenizers.ByteLevel.alphabet()) <= trained.get_vocab().keys()


def test_bos_stands_in_front_by_itself(trained: Any) -> None:
    ids = trained.encode("hi")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert trained.decode(ids, skip_special_tokens=True) == "hi"


def test_what_it_returns_goes_into_a_decoder_as_it_is(trained: Any) -> None:
    assert set(trained("hi")) == {"input_ids", "attention_mask"}


def test_digits(trained: Any) -> None:
    pieces = [text for text, _ in trained.backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234567890")]
    expected = {
        "one": list("1234567890"),
        "three": ["123", "456", "789", "0"],
        "any": ["1234567890"],
    }
    made_with = trained.made_with
    assert pieces == next(expected[name] for name, rules in DIGITS.items() if made_with in rules)
    ids = trained.encode("1234567890", add_special_tokens=False)
    # One digit a token, however often the number occurs.
    assert len(ids) == 10 if made_with in DIGITS["one"] else len(ids) < 10


def test_the_files_can_be_read_by_older_readers(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus", TEXTS)
    result = train(TokenizerTrainConfig(corpus=source, output=tmp_path / "t", vocabulary_size=300))
    written = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in written
    assert (tmp_path / "t" / "chat_template.jinja").is_file()
    manifest = artifact.verify(tmp_path / "t")
    assert manifest.kind == "tokenizer"
    assert manifest.result == result
    assert [parent["path"] for parent in manifest.parents] == [str(source)]
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("limit", [1, 3, 16])
@pytest.mark.parametrize(
    "text", ["天下大势分久必合" * 200, "internationalization" * 50, "-" * 500, " " * 500, "\n" * 500]
)
def test_no_token_is_longer_than_the_limit(text: str, limit: int) -> None:
    model = train_model([text] * 2, vocabulary_size=600, pre_tokenizer="qwen2", maximum_token_characters=limit)
    learned = [model.decode([index]) for index in range(len(FIXED_TOKENS) + BYTES, model.get_vocab_size())]
    # What decodes to U+FFFD is part of one character.
    longest = max((len(text) for text in learned if "\ufffd" not in text), default=0)
    # The limit is in characters for every script, and it is used.
    assert longest <= limit
    if limit > 1 or not text.isascii():
        assert longest == min(limit, 16)


def test_a_corpus_that_gives_no_more_entries_says_so(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus", ["abab abab"])
    result = train(TokenizerTrainConfig(corpus=source, output=tmp_path / "t", vocabulary_size=1000))
    assert result["vocabulary_size"] < 1000
    assert any("instead of 1,000" in note for note in result["notes"])


def test_texts_that_spell_special_tokens_do_not_teach_them(tmp_path: Path) -> None:
    model = train_model(
        ["<|im_end|> <|im_end|>" * 50], vocabulary_size=300, pre_tokenizer="qwen2", maximum_token_characters=16
    )
    assert model.get_vocab()["<|im_end|>"] == 4
    assert model.get_vocab_size() > len(FIXED_TOKENS) + BYTES  # pieces of the spelling were merged as ordinary text


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a directory"):
        train(TokenizerTrainConfig(corpus=tmp_path / "none", output=tmp_path / "t"))
    held = corpus(tmp_path / "held", ["only held-out text"], split="held_out")
    with pytest.raises(DataError, match="no text to train on"):
        train(TokenizerTrainConfig(corpus=held, output=tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    source = corpus(tmp_path / "corpus", TEXTS)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("x")
    with pytest.raises(ArtifactError, match="already exists"):
        train(TokenizerTrainConfig(corpus=source, output=tmp_path / "t", vocabulary_size=300))
    assert (tmp_path / "t" / "mine.txt").exists()


def test_the_smallest_vocabulary(tmp_path: Path) -> None:
    fixed = len(FIXED_TOKENS) + BYTES
    assert fixed == 265
    with pytest.raises(ConfigError, match="vocabulary_size"):
        # The configuration refuses less than 300; the verb holds its own bound.
        train(TokenizerTrainConfig.model_construct(corpus=tmp_path, output=tmp_path / "t", vocabulary_size=fixed - 1))


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus", TEXTS)
    hashes = set()
    for name in "ab":
        train(TokenizerTrainConfig(corpus=source, output=tmp_path / name, vocabulary_size=320))
        hashes.add(artifact.hash_file(tmp_path / name / "tokenizer.json"))
    assert len(hashes) == 1


def test_chunks_lose_nothing_and_prefer_white_space() -> None:
    text = "word " * 100 + "字" * 300
    parts = list(chunks([text, "", "short"], characters=50))
    assert "".join(parts) == text + "short"
    assert max(map(len, parts)) == 50
    assert parts[0] == ("word " * 10)[:-1]
    assert parts[1].startswith(" word")


def test_the_split_rule_follows_the_digits() -> None:
    def rule(**settings: Any) -> str:
        return check(TokenizerTrainConfig(**settings))

    assert rule() == "qwen2"
    assert (rule(digits="one"), rule(digits="three"), rule(digits="any")) == ("qwen2", "llama-bpe", "gpt-2")
    assert rule(pre_tokenizer="deepseek-v3") == "deepseek-v3"
    assert rule(pre_tokenizer="smollm", digits="one") == "smollm"
    with pytest.raises(ConfigError, match="gpt-2 does not split numbers as digits = one says") as fault:
        rule(pre_tokenizer="gpt-2", digits="one")
    assert "qwen2 or smollm" in fault.value.remedy


def test_every_split_rule_is_as_its_makers_have_it() -> None:
    """By hand: Chinese and Latin letters run together but for deepseek-v3; a mark may lead what follows."""
    from onecard.tokenizer.train import splitter

    def pieces(name: str, text: str) -> list[str]:
        found = splitter(name).pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in found]

    text = "CT检查2026年，it's  ok"
    assert pieces("qwen2", text) == ["CT检查", "2", "0", "2", "6", "年", "，it", "'s", " ", " ok"]
    assert pieces("llama-bpe", text) == ["CT检查", "202", "6", "年", "，it", "'s", " ", " ok"]
    assert pieces("gpt-2", text) == ["CT检查", "2026", "年", "，", "it", "'s", " ", " ok"]
    assert pieces("smollm", text) == ["CT检查", "2", "0", "2", "6", "年", "，", "it", "'s", " ", " ok"]
    assert pieces("deepseek-v3", text) == ["CT", "检查", "202", "6", "年", "，", "it", "'s", " ", " ok"]


# --- unigram ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from onecard.model.load import load_tokenizer

    folder = tmp_path_factory.mktemp("unigram")
    source = corpus(folder / "corpus", TEXTS)
    result = train(TokenizerTrainConfig(corpus=source, output=folder / "t", vocabulary_size=320, kind="unigram"))
    assert result["kind"] == "unigram"
    return load_tokenizer(folder / "t")


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_unigram_round_trip(unigram: Any, text: str) -> None:
    assert unigram.decode(unigram.encode(text, add_special_tokens=False)) == text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_unigram_round_trip_of_any_text(unigram: Any, text: str) -> None:
    ids = unigram.encode(text, add_special_tokens=False)
    assert unigram.decode(ids) == text
    assert min(ids, default=len(FIXED_TOKENS)) >= len(FIXED_TOKENS)  # text never becomes a fixed token


def test_unigram_learns_and_is_bounded() -> None:
    model = train_unigram(
        ["天下大势分久必合" * 20] * 3, vocabulary_size=600, pre_tokenizer="qwen2", maximum_token_characters=3
    )
    learned = [model.decode([index]) for index in range(len(FIXED_TOKENS), model.get_vocab_size())]
    assert max(len(text) for text in learned if "\ufffd" not in text) <= 3
    assert len(model.encode("天下大势分久必合", add_special_tokens=False).ids) < 8
    assert model.token_to_id("<|endoftext|>") == 0


def test_unigram_takes_no_terms(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="merges, which a unigram tokenizer does not have"):
        check(TokenizerTrainConfig(kind="unigram", mine_terms=5))


# --- bounded memory -----------------------------------------------------------------------------------------------


def test_a_large_corpus_is_sampled_evenly_and_always_alike(tmp_path: Path) -> None:
    texts = [f"{number:04d} " + "字" * 95 for number in range(400)]
    source = corpus(tmp_path / "corpus", texts)
    whole = Sample(source, 40_000)
    assert (whole.documents, whole.characters, whole.share) == (400, 40_000, 1.0)
    assert list(whole) == texts
    part = Sample(source, 10_000)
    assert part.share == 0.25
    taken = list(part)
    assert taken == list(Sample(source, 10_000))
    assert set(taken) < set(texts)
    assert 70 < len(taken) < 130  # a quarter of 400, give or take
    assert sum(int(text[:4]) < 200 for text in taken) > 30  # from the beginning as from the end
    assert "".join(part.first(150)) == (taken[0] + taken[1])[:150]


def test_a_sampled_corpus_is_said(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus", ["天下大势，分久必合。" * 10] * 40)
    result = train(
        TokenizerTrainConfig(corpus=source, output=tmp_path / "t", vocabulary_size=300, maximum_characters=1000)
    )
    assert any("Learned from 25% of the text" in note for note in result["notes"])


MEMORY = """
import random, sys
from pathlib import Path
from onecard.config import TokenizerTrainConfig
from onecard.data.corpus import Document, write_corpus
from onecard.tokenizer.train import train

folder, count = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(0)
characters = [chr(0x4E00 + index) for index in range(3000)]
text = "".join(draw.choices(characters, [1 / (1 + index) for index in range(3000)], k=count))
write_corpus(folder / "corpus", [Document("one", text, "s", "zh")])
result = train(TokenizerTrainConfig(corpus=folder / "corpus", output=folder / "t", vocabulary_size=1024))
# Not getrusage: what it tells begins with the memory of the process that started this one.
status = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print("FOUND", status, result["vocabulary_size"], result["longest_token_characters"])
"""


@pytest.mark.slow
def test_one_line_of_five_megabytes_of_chinese(tmp_path: Path) -> None:
    """1,666,666 characters of 3 bytes without a space or a line break; the whole verb stays below 1 GB resident."""
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), "1666666"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    kibibytes, entries, longest = map(int, ran.stdout.split("FOUND")[1].split())
    assert kibibytes * 1024 < 1e9
    assert entries == 1024
    assert longest <= 16
