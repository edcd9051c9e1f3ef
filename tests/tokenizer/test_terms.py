"""Terms become one token by merges: in every context, exactly, and at a cost that is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.config import TokenizerTrainConfig
from onecard.data.corpus import Document, write_corpus
from onecard.errors import ConfigError, DataError
from onecard.tokenizer.special import PRE_TOKENIZERS
from onecard.tokenizer.terms import (
    Finder,
    Term,
    apply_merges,
    joining_merges,
    read_terms,
    to_symbols,
    within_a_character,
)
from onecard.tokenizer.train import train, train_model, train_with_terms

MEDICAL = [
    "患者因冠状动脉狭窄入院，冠状动脉造影提示冠状动脉前降支狭窄。",
    "冠状动脉粥样硬化性心脏病简称冠心病，冠状动脉的血流减少。",
    "医生的冠军奖杯在皇冠状态下展出，运动员的冠军梦。",
    "体检发现血小板减少，thrombocytopenia was seen, and thrombocytopenia persists.",
    "The stent stayed consistent. A stent is placed; consistent results.",
]
TERMS = ["冠状动脉", "血小板减少", "thrombocytopenia", "stent"]


def symbols(text: str) -> str:
    return "".join(to_symbols(text))


# --- finding ------------------------------------------------------------------------------------------------------


def test_the_file_of_terms(tmp_path: Path) -> None:
    path = tmp_path / "terms.txt"
    path.write_bytes("\ufeff冠状动脉\r\n# a remark\n\n  stent \n冠状动脉\n".encode())
    assert read_terms(path) == ["冠状动脉", "stent"]
    path.write_bytes("冠状动脉".encode("gb18030"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_terms(path)
    path.write_text("# nothing\n")
    with pytest.raises(DataError, match="holds none"):
        read_terms(path)
    with pytest.raises(ConfigError, match="no file of terms"):
        read_terms(tmp_path / "none")


def test_terms_are_found_longest_first_and_words_only_whole() -> None:
    finder = Finder(["动脉", "冠状动脉", "stent"])
    assert list(finder.split(["查冠状动脉和动脉", "a stent, consistent", ""])) == [
        [("查", False), ("冠状动脉", True), ("和", False), ("动脉", True)],
        [("a ", False), ("stent", True), (", consistent", False)],
        [],
    ]
    assert finder.count(["冠状动脉动脉", "stent stents"]) == {"冠状动脉": 1, "动脉": 1, "stent": 1}


# --- merges -------------------------------------------------------------------------------------------------------


def test_merges_within_a_character() -> None:
    assert within_a_character(symbols("冠")[:2])
    assert within_a_character(symbols("冠"))
    assert within_a_character(symbols("冠")[1:])
    assert within_a_character(symbols("é"))
    assert not within_a_character(symbols("冠状"))
    assert not within_a_character(symbols("的冠")[2:5])  # the end of one and the beginning of the next
    assert not within_a_character("ab")


def test_merges_are_applied_lowest_rank_first() -> None:
    ranks = {("b", "c"): 0, ("a", "b"): 1, ("bc", "bc"): 2}
    assert apply_merges(list("abcbc"), ranks) == ["a", "bcbc"]
    assert apply_merges(list("abab"), ranks) == ["ab", "ab"]
    assert apply_merges(["x"], ranks) == ["x"]


def test_joining_takes_what_is_known_then_what_is_heavy_then_what_is_long() -> None:
    # b d is the heaviest pair, c d is known.
    assert joining_merges([(list("abcd"), 1), (list("bd"), 9)], {"cd"}) == [
        ("c", "d"),
        ("b", "d"),
        ("b", "cd"),  # longer than a b
        ("a", "bcd"),
    ]


def test_joining_respects_the_merges_before() -> None:
    """(ab, c) exists: once a and b are joined it takes c, whatever would be joined next."""
    before = [("ab", "c")]
    found = joining_merges([(list("abcd"), 1)], {"ab", "abc", "cd"}, before)
    ranks = {merge: rank for rank, merge in enumerate([*before, *found])}
    assert apply_merges(list("abcd"), ranks) == ["abcd"]
    assert not set(before) & set(found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abcd", min_size=2, max_size=8), min_size=1, max_size=8, unique=True))
def test_every_word_is_joined_to_one(words: list[str]) -> None:
    merges = joining_merges([(list(word), 1) for word in words], set())
    assert len(merges) == len(set(merges))
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    assert [apply_merges(list(word), ranks) for word in words] == [[word] for word in words]


# --- tokenizers ---------------------------------------------------------------------------------------------------


def with_base(terms: list[Term], **changes: Any) -> tuple[Any, dict[str, str]]:
    shape = {"pre_tokenizer": "qwen2", "maximum_token_characters": 20, **changes}
    base = train_model(MEDICAL * 3, **shape)
    return train_with_terms(MEDICAL * 3, terms, base, **shape)


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def with_terms(request: pytest.FixtureRequest) -> Any:
    terms = [Term(text, 5) for text in TERMS]
    made, left_out = with_base(terms, vocabulary_size=420, pre_tokenizer=request.param)
    assert left_out == {}
    return made


@pytest.mark.parametrize(
    "context",
    [
        "冠状动脉",
        "患者冠状动脉狭窄",
        "的冠状动脉的",
        "冠状动脉，冠状动脉",
        "皇冠状动脉x",
        "冠状动脉冠状动脉",
        "\n冠状动脉 ",
    ],
)
def test_a_chinese_term_is_one_token_in_every_context(with_terms: Any, context: str) -> None:
    tokens = with_terms.encode(context, add_special_tokens=False).tokens
    assert tokens.count(symbols("冠状动脉")) == context.count("冠状动脉")
    assert with_terms.decode(with_terms.encode(context, add_special_tokens=False).ids) == context


def test_a_spaced_term_is_one_token_with_its_space_and_words_around_it_stay_whole(with_terms: Any) -> None:
    assert with_terms.encode(" thrombocytopenia", add_special_tokens=False).tokens == [symbols(" thrombocytopenia")]
    assert with_terms.encode("thrombocytopenia", add_special_tokens=False).tokens == ["thrombocytopenia"]
    assert "stent" not in with_terms.encode(" consistent", add_special_tokens=False).tokens


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*TERMS, "的", "冠", "状态", " ", "st", "x", "1", "，", "\n", "é", "👍"]), max_size=12))
def test_round_trip_with_terms(with_terms: Any, parts: list[str]) -> None:
    text = "".join(parts)
    assert with_terms.decode(with_terms.encode(text, add_special_tokens=False).ids) == text


def test_the_vocabulary_has_its_size_and_only_entries_that_merges_make(with_terms: Any) -> None:
    described = json.loads(with_terms.to_str())["model"]
    assert with_terms.get_vocab_size() <= 420
    made = {left + right for left, right in described["merges"]}
    plain = {token for token in described["vocab"] if len(token) == 1} | {
        token for token in described["vocab"] if token.startswith("<") and token.endswith(">")
    }
    assert set(described["vocab"]) == made | plain
    assert len(described["merges"]) == len({tuple(merge) for merge in described["merges"]})


def test_a_small_vocabulary_keeps_its_size_and_its_terms() -> None:
    terms = [Term(text, 5) for text in TERMS]
    settings = {"pre_tokenizer": "qwen2", "maximum_token_characters": 20}
    full = train_model(MEDICAL * 3, vocabulary_size=340, **settings)  # type: ignore[arg-type]
    made, _ = with_base(terms, vocabulary_size=340)
    assert full.get_vocab_size() == 340
    assert 335 <= made.get_vocab_size() <= 340
    assert symbols("血小板减少") in made.get_vocab()


def test_too_many_terms_are_refused() -> None:
    with pytest.raises(ConfigError, match="need more entries than the vocabulary has"):
        with_base([Term(text, 1) for text in TERMS], vocabulary_size=275)


def test_what_cannot_be_one_token_says_why() -> None:
    terms = [Term("myocardial infarction"), Term("HER2阳性"), Term("冠状动脉粥样硬化")]
    _, left_out = with_base(terms, vocabulary_size=400, maximum_token_characters=7)
    assert left_out == {
        "myocardial infarction": "longer than 7 characters",
        "HER2阳性": "the split rule cuts it",
        "冠状动脉粥样硬化": "longer than 7 characters",
    }


# --- the verb -----------------------------------------------------------------------------------------------------


def test_the_verb_reports_what_each_term_costs_and_saves(tmp_path: Path) -> None:
    from onecard.model.load import load_tokenizer

    texts = ["冠状动脉造影，冠状动脉狭窄，心绞痛。" * 2, "动脉血气分析。" * 3, "HER2阳性。"]
    write_corpus(tmp_path / "corpus", [Document(str(n), text, "s", "zh") for n, text in enumerate(texts)])
    terms = tmp_path / "terms.txt"
    terms.write_text("冠状动脉\n心绞痛\nHER2阳性\n", encoding="utf-8")
    result = train(
        TokenizerTrainConfig(corpus=tmp_path / "corpus", output=tmp_path / "t", vocabulary_size=300, terms=terms)
    )
    tokenizer = load_tokenizer(tmp_path / "t")
    found = {row["term"]: row for row in result["terms"]}
    assert tokenizer.tokenize("的冠状动脉的").count(symbols("冠状动脉")) == 1
    assert found["冠状动脉"]["count"] == 4
    assert found["冠状动脉"]["tokens"] == 1
    before = found["冠状动脉"]["tokens_before"]
    assert found["冠状动脉"]["saved_tokens"] == 4 * (before - 1)
    assert found["冠状动脉"]["whole_share"] == 1.0
    assert found["HER2阳性"]["left_out"] == "the split rule cuts it"
    assert any(note == "HER2阳性 is not one token: the split rule cuts it." for note in result["notes"])
    assert "心绞痛" in (tmp_path / "t" / "report.html").read_text(encoding="utf-8")
