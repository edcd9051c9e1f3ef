"""The verb from models to page: what is measured on the same rows, what is left out, and what is claimed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard import artifact, cli
from onecard.config import CompareConfig
from onecard.data.corpus import Document, write_corpus
from onecard.data.split import question_is_held_out
from onecard.errors import ConfigError, DataError
from onecard.evaluate import comparison
from onecard.evaluate.compare import compare
from onecard.evaluate.measuring import answer_costs
from onecard.evaluate.questions import Question
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import Source
from onecard.tokenizer.template import encode_chat


@pytest.fixture(scope="module")
def uniform(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that expects every token alike: each costs ln(vocabulary) nats, each choice as much as its tokens."""
    directory = tmp_path_factory.mktemp("uniform") / "model"
    model = load_model(tiny_model_directory)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(directory)
    load_tokenizer(tiny_model_directory).save_pretrained(directory)
    return directory


def chat(number: int) -> dict[str, str]:
    return {"question": f"问题{number}？", "answer": f"答案{'是' * (number % 5)}{number}。"}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def compared(
    uniform: Path, tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("compare")
    rows: list[Any] = [chat(number) for number in range(14)]
    rows.append({"question": "长？", "answer": "很" * 300})  # longer than the 256 positions
    rows += [{"question": "1 + 1?", "choices": ["2", "three and a half"], "answer": "A"}] * 11
    rows += [{"prompt": "Say 好.", "checks": {"contains": "好", "max_words": 100}}]
    rows += [{"prompt": "x", "checks": {"colour": "red"}}, {"nothing": 1}]
    documents = [Document(str(i), f"In the beginning {i}.", "s", "en", "held_out") for i in range(12)]
    write_corpus(folder / "corpus", documents)
    config = CompareConfig(
        base=uniform,
        model=tiny_model_directory,
        sources=[{"path": write(folder / "rows.jsonl", rows)}],
        text=[{"path": str(folder / "corpus")}],
        question_count=12,
        max_new_tokens=4,
        output=folder / "out",
    )
    return compare(config), folder / "out"


def test_the_loss_is_that_of_the_trained_tokens_by_token(
    compared: tuple[dict[str, Any], Path], tiny_model_directory: Path
) -> None:
    result, output = compared
    tokenizer, model = load_tokenizer(tiny_model_directory), load_model(tiny_model_directory)
    nats, tokens = [], []
    for number in range(14):
        row = chat(number)
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        encoded = encode_chat(tokenizer, messages)
        labels = [i if own else -100 for i, own in zip(encoded.ids, encoded.assistant_mask)]
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([encoded.ids]), labels=torch.tensor([labels])).loss
        tokens.append(sum(encoded.assistant_mask))
        nats.append(float(mean) * tokens[-1])
    loss = result["measures"]["loss"]
    assert loss["unit"] == "nats a token"
    assert loss["rows"] == 14
    assert loss["base"] == pytest.approx(math.log(len(tokenizer)), rel=1e-5)
    assert loss["model"] == pytest.approx(sum(nats) / sum(tokens), rel=1e-4)
    assert loss["low"] <= loss["difference"] <= loss["high"]
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert [row["model"] for row in report["rows"]] == pytest.approx([n / t for n, t in zip(nats, tokens)], rel=1e-4)
    assert [row["line"] for row in report["rows"]] == list(range(1, 15))


def test_choices_checks_and_text_are_measured_on_both(compared: tuple[dict[str, Any], Path]) -> None:
    result, output = compared
    measures = result["measures"]
    # To the indifferent model each token costs the same: the shorter choice is likelier as a whole, and it is right.
    assert measures["choices_sum"]["base"] == 1.0
    # By token all are alike, and the first is taken; by byte the long choice, whose bytes share the end of the turn.
    assert measures["choices_token"]["base"] == 1.0
    assert measures["choices_byte"]["base"] == measures["choices_character"]["base"] == 0.0
    assert measures["choices_sum"]["rows"] == 11
    # It says nothing, so it holds no 好, and not too many words.
    assert measures["checks"]["base"] == 0.5
    assert measures["checks"]["verdict"] == "too_few_rows"
    assert measures["exact_match"]["rows"] == 12
    assert measures["stopped"]["base"] == 1.0
    assert measures["text_en"]["rows"] == 12
    assert "text_all" not in measures
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["models"]["base"]["choices"]["sum"] == 1.0
    assert len(report["answers"]) == 13
    assert report["answers"][-1]["answers"]["base"]["checks"] == {"contains": False, "max_words": True}


def test_the_verdict_is_said_on_the_page(compared: tuple[dict[str, Any], Path]) -> None:
    result, output = compared
    page = (output / "report.html").read_text(encoding="utf-8")
    assert artifact.verify(output).kind == "comparison"
    for sentence in result["verdict"]:
        assert sentence[1:].replace("'", "&#x27;").replace(">", "&gt;") in page
    assert page.count("<svg") == 3
    assert "问题3？" in page


def test_sentences() -> None:
    def found(unit: str, base: float, model: float, low: float, high: float, verdict: str) -> dict[str, Any]:
        return {"unit": unit, "base": base, "model": model, "difference": model - base, "low": low, "high": high,
                "rows": 60, "verdict": verdict}  # fmt: skip

    assert comparison.verdict(
        {
            "loss": found("nats a token", 2.41, 2.10, -0.35, -0.27, "better"),
            "exact_match": found("share", 0.0, 1 / 60, 0.0, 0.05, "undecided"),
            "f1": found("share", 0.5, 0.4, -0.152, -0.05, "worse"),
            "rouge_l": found("share", 0.5, 0.5, 0.0, 0.0, "undecided"),
            "checks": found("share", 0.5, 0.6, 0.0, 0.2, "too_few_rows"),
            "text_en": found("bits a byte", 1.0, 1.5, 0.4, 0.6, "worse"),
        },
        learned_before=False,
    ) == [
        "better on answers' loss by 0.31 [0.27, 0.35] nats a token (2.410 -> 2.100; 60 rows).",
        "worse on F1 (ROUGE-1) by 10.0 [5.0, 15.2] points (50.0 % -> 40.0 %; 60 rows).",
        "worse on general text, en by 0.50 [0.40, 0.60] bits per byte (1.000 -> 1.500; 60 pieces of text): so much was "
        "forgotten.",
        "exact match, ROUGE-L: no difference can be told from 60 rows.",
        "checks of form passed: 60 rows are too few to tell.",
    ]


def test_a_model_compared_with_itself_is_not_better(tiny_model_directory: Path, tmp_path: Path) -> None:
    config = CompareConfig(
        base=tiny_model_directory,
        model=tiny_model_directory,
        sources=[{"path": write(tmp_path / "rows.jsonl", [chat(n) for n in range(12)])}],
        max_new_tokens=2,
        output=tmp_path / "out",
    )
    measures = compare(config)["measures"]
    assert {found["verdict"] for found in measures.values()} == {"undecided"}
    assert {found["difference"] for found in measures.values()} == {0.0}


def trained(directory: Path, model: Path, rows: Path, held_out: float) -> Path:
    """A run directory that says it learned from the rows."""
    shutil.copytree(model if (model / "config.json").is_file() else model / "model", directory / "model")
    asked = {"seed": 3, "held_out": held_out}
    artifact.write_manifest(directory, "run", settings={"asked": asked}, parents=[model, rows])
    return directory


def test_rows_that_the_model_learned_are_left_out(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Path(write(tmp_path / "rows.jsonl", [chat(number) for number in range(60)]))
    run = trained(tmp_path / "run", tiny_model_directory, rows, 0.25)
    others = Path(write(tmp_path / "others.jsonl", [chat(0)]))
    again = trained(tmp_path / "again", run, others, 0.5)  # of other rows, on top of the first
    for model in (run, run / "model", again):
        config = CompareConfig(
            base=tiny_model_directory,
            model=model,
            sources=[{"path": str(rows)}],
            max_new_tokens=1,
            question_count=1,
            output=tmp_path / "out",
            overwrite=True,
        )
        result = compare(config)
        report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
        expected = [
            f"问题{n}？"
            for n in range(60)
            if question_is_held_out(3, 0.25, [{"role": "user", "content": f"问题{n}？"}])
        ]
        assert [row["question"] for row in report["rows"]] == expected
        assert 0 < len(expected) < 60
        assert not result["learned_before"]
        assert result["left_out"] == 60 - len(expected)
        assert (
            f"{60 - len(expected)} rows of the sources are left out" in (tmp_path / "out" / "report.html").read_text()
        )
        assert f"{60 - len(expected)} rows are left out" in capsys.readouterr().err
    everything = trained(tmp_path / "everything", tiny_model_directory, rows, 0.0)
    result = compare(config.model_copy(update={"model": everything}))
    assert result["learned_before"]
    assert result["left_out"] == 0
    assert "by heart" in result["verdict"][0]


def test_a_base_without_a_template_is_read_through_that_of_the_model(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    (base / "chat_template.jinja").unlink()
    config = CompareConfig(
        base=base,
        model=tiny_model_directory,
        sources=[{"path": write(tmp_path / "rows.jsonl", [chat(n) for n in range(12)])}],
        max_new_tokens=1,
        output=tmp_path / "out",
    )
    loss = compare(config)["measures"]["loss"]
    assert loss["base"] == loss["model"]
    assert "read through that of" in capsys.readouterr().err


def test_rows_that_a_template_refuses_are_left_out_for_both(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(tiny_model_directory, strict)
    template = (strict / "chat_template.jinja").read_text(encoding="utf-8")
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refusal + template, encoding="utf-8")
    rows = [{**chat(number), **({"system": "Be brief."} if number % 3 == 0 else {})} for number in range(15)]
    config = CompareConfig(
        base=strict,
        model=tiny_model_directory,
        sources=[{"path": write(tmp_path / "rows.jsonl", rows)}],
        question_count=3,
        max_new_tokens=1,
        output=tmp_path / "out",
    )
    assert compare(config)["measures"]["loss"]["rows"] == 10
    assert "no system here" in capsys.readouterr().err
    only = [row for row in rows if "system" in row]
    with pytest.raises(DataError, match="No row is left to compare on"):
        compare(config.model_copy(update={"sources": [Source(path=write(tmp_path / "only.jsonl", only))]}))


def test_the_loss_is_that_of_what_is_learned(tiny_model_directory: Path) -> None:
    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    turns = [
        {"role": "user", "content": "一"},
        {"role": "assistant", "content": "二三", "train": False},
        {"role": "user", "content": "四"},
        {"role": "assistant", "content": "五"},
        {"role": "user", "content": "六"},
    ]
    chat_of_three = Question(turns, "", 0, answer={"role": "assistant", "content": "seven"})
    [every] = answer_costs(model, tokenizer, [chat_of_three], 512)
    [last] = answer_costs(model, tokenizer, [chat_of_three], 512, "last_answer")
    assert every is not None
    assert last is not None
    assert (every.bytes, last.bytes) == (3 + 5, 5)
    ends = 1  # of a turn
    assert last.tokens == len(tokenizer.encode("seven", add_special_tokens=False)) + ends
    assert every.tokens == last.tokens + len(tokenizer.encode("五", add_special_tokens=False)) + ends
    assert every.nats > last.nats
    nothing = Question(turns[:1], "", 0, answer=turns[1])
    assert answer_costs(model, tokenizer, [nothing, chat_of_three], 512) == [None, every]


def test_files_of_text_are_cut_into_pieces(tiny_model_directory: Path, tmp_path: Path) -> None:
    sentences = [f"It was sentence number {number} of the text and not the last. " for number in range(400)]
    (tmp_path / "text.txt").write_text("".join(sentences), encoding="utf-8")
    arguments = [str(tiny_model_directory), str(tiny_model_directory), "--text", str(tmp_path / "text.txt")]
    assert cli.main(["compare", *arguments, "--text-characters", "8000", "--output", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    # 22,690 characters in 12 pieces that end with a sentence, of which a third is taken: too few for a language alone.
    assert sum(map(len, sentences)) == 22_690
    assert report["result"]["measures"].keys() == {"text_all"}
    assert report["result"]["measures"]["text_all"]["rows"] == 4


def test_languages_share_the_text_equally(tiny_model_directory: Path, tmp_path: Path) -> None:
    english = [Document(f"e{n}", "It was the first of the days. " * 40, "s", "en", "held_out") for n in range(90)]
    chinese = [Document(f"z{n}", "天下大势，分久必合。" * 12, "s", "zh", "held_out") for n in range(100)]
    other = [Document("o", "Das ist nur ein Satz. ", "s", "de", "held_out")]
    write_corpus(tmp_path / "corpus", [*english, *chinese, *other, Document("t", "never", "s", "en", "train")])
    config = CompareConfig(
        base=tiny_model_directory,
        model=tiny_model_directory,
        text=[{"path": str(tmp_path / "corpus")}],
        text_characters=24_000,
        output=tmp_path / "out",
    )
    measures = compare(config)["measures"]
    # 12,000 characters of each: 10 documents of 1,200, 100 of 120; and the one sentence of the third.
    assert {name: found["rows"] for name, found in measures.items()} == {
        "text_en": 10, "text_zh": 100, "text_all": 111
    }  # fmt: skip


def test_what_cannot_be_compared_is_refused(tiny_model_directory: Path, tmp_path: Path) -> None:
    both = {"base": tiny_model_directory, "model": tiny_model_directory, "output": tmp_path / "out"}
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(CompareConfig(**both))
    rows = write(tmp_path / "rows.jsonl", [{"nothing": 1}])
    with pytest.raises(DataError, match="No question is left: missing_fields 1"):
        compare(CompareConfig(**both, sources=[{"path": rows}]))
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        compare(CompareConfig(**both, text=[{"path": str(tmp_path / "empty.txt")}]))
    assert not (tmp_path / "out").exists()
