"""The page at the end of a compression: its numbers and its words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onecard.compress.comparison import Comparison, Measured, Prompt, compare, gather
from onecard.config import ComparedConfig
from onecard.errors import DataError
from onecard.evaluate.answers import Generated
from onecard.evaluate.perplexity import Score
from onecard.model.load import load_tokenizer
from onecard.tokenizer.template import encode_chat


def example() -> Comparison:
    """Three answers: the same, another third token, and another end."""
    prompts = [Prompt(f"q{i}", [1], "a b c") for i in range(3)]
    same = Generated([5, 6, 7], "stop")
    original = Measured(1000, 250, 2000, 10.0, {"en": Score(100, 10, 100, 1), "all": Score(100, 10, 100, 1)})
    original.answers, original.texts = [same, same, same], ["a b c"] * 3
    made = Measured(300, 250, 1000, 15.0, {"en": Score(105, 10, 100, 1), "all": Score(105, 10, 100, 1)})
    made.answers = [same, Generated([5, 6, 8], "stop"), Generated([5, 6, 7], "length")]
    made.texts = ["a b c", "a b d", "a b c"]
    return Comparison("The 4-bit form", "answers", prompts, original, made)


def test_answers_are_compared_token_by_token() -> None:
    found = example()
    assert found.different() == [1, 2]
    assert found.first_difference(1) == 2
    assert found.first_difference(2) == 3
    assert found.worst() == [1, 2]


def test_the_verdict_is_plain() -> None:
    assert example().verdict() == [
        "The 4-bit form answers 2 of 3 differently (half of those from token 4 on or later).",
        "Its weights take 30.0% of the bytes (300 B for 1000 B).",
        "Bits per byte of held-out text: en +5.00%.",
    ]
    found = example()
    found.made.answers = found.original.answers
    assert found.verdict()[0] == "The 4-bit form answers all 3 as the original does."


def test_accuracy_has_an_interval_and_says_too_few_rows() -> None:
    found = example().accuracy()["exact_match"]
    assert (found["base"], found["verdict"]) == (1.0, "too_few_rows")
    assert found["model"] == pytest.approx(2 / 3)
    assert found["low"] <= found["difference"] <= found["high"]


def test_the_page_shows_what_differs_most(tmp_path: Path) -> None:
    example().write(tmp_path, "Quantized", ["a note"])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a note" in page
    assert "q1  (token 3 is the first that differs)" in page
    assert "<mark>d</mark>" in page
    assert "300 B" in page
    written = json.loads((tmp_path / "report.json").read_text())
    assert [row["same"] for row in written["answers"]] == [True, False, False]
    assert written["made"]["bits_per_byte"]["en"] == pytest.approx(105 / 100 / 0.693147, rel=1e-5)


def measured(model: Path, config: ComparedConfig) -> Comparison:
    """A model beside itself."""
    return compare(model, model, gather(config, model), config, "The copy")


def test_a_model_is_the_same_as_itself(tiny_model_directory: Path, tiny_corpus: Path) -> None:
    config = ComparedConfig(corpus=tiny_corpus, question_count=4, max_new_tokens=6, text_kilobytes=1)
    found = measured(tiny_model_directory, config)
    assert found.different() == []
    assert len(found.prompts) == 2
    assert found.original.languages == found.made.languages
    # Two held-out documents a language have more than 1,000 bytes together: one of each is measured.
    assert {key: score.documents for key, score in found.original.languages.items()} == {"en": 1, "zh": 1, "all": 2}
    assert found.original.tokens_per_second > 0
    assert found.accuracy() == {}


def test_without_text_and_questions_beginnings_are_continued(tiny_model_directory: Path) -> None:
    found = measured(tiny_model_directory, ComparedConfig(max_new_tokens=2))
    assert found.asked == "continues"
    assert len(found.prompts) == 10
    assert found.original.languages == {}


def test_questions_are_answered_and_judged(tiny_model_directory: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q {i}", "completion": f"a {i}"}) + "\n" for i in range(30)))
    config = ComparedConfig.model_validate({"questions": [str(rows)], "question_count": 5, "max_new_tokens": 3})
    found = measured(tiny_model_directory, config)
    assert found.asked == "answers"
    places = [int(prompt.text.split()[1]) for prompt in found.prompts]
    assert places == sorted(places)
    assert [prompt.reference for prompt in found.prompts] == [f"a {i}" for i in places]
    assert set(found.accuracy()) == {"exact_match", "f1"}
    other = ComparedConfig.model_validate({"questions": [str(rows)], "question_count": 5, "seed": 1})
    assert [p.text for p in gather(other, tiny_model_directory).prompts] != [p.text for p in found.prompts]


def test_what_the_template_refuses_is_left_out_before_long_work(
    tiny_model_directory: Path, tmp_path: Path, capfd: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_directory, model)
    template = model / "chat_template.jinja"
    refusing = "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{%- endif %}"
    template.write_text(refusing + template.read_text(encoding="utf-8"), encoding="utf-8")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rows = [
        {"messages": [{"role": "system", "content": "s"}, *chat]},
        {"messages": chat},
        {"messages": chat, "tools": tools},
    ]
    places = [tmp_path / "all.jsonl", tmp_path / "refused.jsonl"]
    for place, some in zip(places, (rows, rows[:1])):
        place.write_text("".join(json.dumps(row) + "\n" for row in some))
    config = ComparedConfig.model_validate({"questions": [str(places[0])]})
    found = gather(config, model).prompts
    tokenizer = load_tokenizer(model)
    assert [prompt.ids for prompt in found] == [
        encode_chat(tokenizer, chat[:1], tools=given, add_generation_prompt=True).ids for given in (None, tools)
    ]
    assert found[0].ids != found[1].ids
    assert "1 questions are left out" in capfd.readouterr().err
    with pytest.raises(DataError, match="refuses every question"):
        gather(ComparedConfig.model_validate({"questions": [str(places[1])]}), model)
