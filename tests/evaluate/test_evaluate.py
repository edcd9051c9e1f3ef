"""The verb from directories to report: what it measures, writes and says, and how it refuses."""

from __future__ import annotations

import json
import lzma
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard import artifact, cli
from onecard.config import EvaluateConfig
from onecard.data.corpus import Document, write_corpus
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.evaluate.evaluate import evaluate
from onecard.evaluate.findings import verdict
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import Source

ZH = ["天下大势，分久必合，合久必分。", "机器学习模型需要大量高质量的数据。", "周末七国分争，并入于秦。"]
EN = ["The quick brown fox was not amused.", "In the beginning God created the earth.", "It said so <b>at length</b>."]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate") / "corpus"
    documents = [
        Document(f"{language}{i}", text, f"book {language}", language, "train" if i == 0 else "held_out")
        for language, texts in (("zh", ZH), ("en", EN))
        for i, text in enumerate(texts)
    ]
    write_corpus(directory, documents)
    return directory


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows: list[dict[str, str]] = [{"instruction": f"问题{i}？", "input": "", "output": f"答案{i}。"} for i in range(6)]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"bad": "1"}]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def uniform_model(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that expects every token alike: each costs ln(vocabulary) nats."""
    directory = tmp_path_factory.mktemp("uniform") / "run"
    model = load_model(tiny_model_directory)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(directory / "model")
    load_tokenizer(tiny_model_directory).save_pretrained(directory / "model")
    return directory


@pytest.fixture(scope="module")
def evaluated(
    corpus: Path,
    questions: Path,
    uniform_model: Path,
    tiny_model_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], Path]:
    output = tmp_path_factory.mktemp("evaluated") / "evaluation"
    config = EvaluateConfig(
        model=tiny_model_directory,
        base=uniform_model,
        corpus=corpus,
        questions=[Source(path=str(questions))],
        question_count=4,
        max_new_tokens=5,
        output=output,
    )
    return evaluate(config), output


def test_bits_per_byte_of_an_indifferent_model_are_known(
    evaluated: tuple[dict[str, Any], Path], uniform_model: Path
) -> None:
    from onecard.tokenizer.template import encode_document

    result, _ = evaluated
    tokenizer = load_tokenizer(uniform_model)
    bits_per_token = math.log2(len(tokenizer))
    for language, texts in (("zh", ZH[1:]), ("en", EN[1:]), ("all", ZH[1:] + EN[1:])):
        tokens = sum(len(encode_document(tokenizer, text)) - 1 for text in texts)
        expected = tokens * bits_per_token / sum(len(text.encode()) for text in texts)
        assert result["bits_per_byte"]["base"][language] == pytest.approx(expected, rel=1e-5)
    assert set(result["bits_per_byte"]) == {"base", "model"}
    assert result["bits_per_byte"]["model"]["all"] != pytest.approx(result["bits_per_byte"]["base"]["all"], rel=1e-5)


def test_xz_numbers_are_those_of_an_independent_call(evaluated: tuple[dict[str, Any], Path]) -> None:
    def size(*texts: str) -> int:
        return len(lzma.compress("".join(f"{text}\n" for text in texts).encode(), preset=9 | lzma.PRESET_EXTREME))

    result, _ = evaluated
    for language, texts in (("zh", ZH), ("en", EN)):
        expected = (size(*texts) - size(texts[0])) * 8 / sum(len(text.encode()) for text in texts[1:])
        assert result["xz"][language] == pytest.approx(expected)


def test_questions_are_asked_of_both_models(evaluated: tuple[dict[str, Any], Path]) -> None:
    result, output = evaluated
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert result["asked"] == result["base"]["asked"] == len(report["answers"]) == 4
    assert [item["reference"] for item in report["answers"]] == sorted(item["reference"] for item in report["answers"])
    for name in ("base", "model"):
        answers = [item["answers"][name] for item in report["answers"]]
        stopped = sum(answer["finish_reason"] == "stop" for answer in answers)
        assert stopped == report["models"][name]["stopped"]
        assert all(answer["tokens"] == 5 or answer["finish_reason"] == "stop" for answer in answers)
        assert report["models"][name]["f1"] == pytest.approx(sum(answer["f1"] for answer in answers) / 4)
    # Where all tokens are alike the likeliest is the first: the end of the text. So it always stops at once.
    assert result["base"]["stopped"] == 4
    assert result["base"]["f1"] == result["base"]["repetition"] == 0.0


def test_the_directory_is_whole_and_the_page_shows_what_was_found(evaluated: tuple[dict[str, Any], Path]) -> None:
    result, output = evaluated
    manifest = artifact.verify(output)
    assert manifest.kind == "evaluation"
    assert len(manifest.parents) == 3
    assert manifest.result["bits_per_byte"] == result["bits_per_byte"]
    page = (output / "report.html").read_text(encoding="utf-8")
    for sentence in result["verdict"]:
        assert sentence in page
    for expected in ("问题", "机器学习模型", "xz -9e", f"{result['bits_per_byte']['model']['all']:.4g}", "<svg"):
        assert expected in page
    assert "<b>at" not in page  # text is text, never markup
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["models"]["model"]["sources"].keys() == {"book zh", "book en"}
    assert report["held_out"] == {"documents": 4, "bytes": sum(len(text.encode()) for text in ZH[1:] + EN[1:])}
    for item in report["continuations"]:
        assert any((item["text"] + item["truth"]) in text for text in ZH[1:] + EN[1:])
        assert item["continuations"].keys() == {"base", "model"}
    assert {item["language"] for item in report["continuations"]} == {"zh", "en"}


def test_json_on_stdout_is_the_result(
    corpus: Path, tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(tiny_model_directory), "--corpus", str(corpus), "--no-compare-xz", "--json"]
    assert cli.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_byte"].keys() == {"model"}
    assert found["xz"] == {}
    assert found["asked"] == 0
    assert found["exact_match"] is None
    assert found["window_tokens"] == 256
    assert cli.main(arguments[:-1] + ["--output", str(tmp_path / "out2")]) == 0
    shown = capsys.readouterr().out
    assert "Bits per byte" in shown
    assert "zh" in shown


def test_without_a_corpus_only_questions_are_asked(tiny_model_directory: Path, questions: Path, tmp_path: Path) -> None:
    config = EvaluateConfig(
        model=tiny_model_directory,
        corpus=None,
        questions=[Source(path=str(questions))],
        max_new_tokens=2,
        output=tmp_path / "out",
    )
    result = evaluate(config)
    assert result["asked"] == 6
    assert result["bits_per_byte"] == result["xz"] == {}
    assert result["verdict"] == []
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_same_questions_are_chosen_for_the_same_seed(
    tiny_model_directory: Path, questions: Path, tmp_path: Path
) -> None:
    def asked(seed: int, name: str) -> list[str]:
        config = EvaluateConfig(
            model=tiny_model_directory,
            corpus=None,
            questions=[Source(path=str(questions))],
            question_count=2,
            max_new_tokens=1,
            seed=seed,
            output=tmp_path / name,
        )
        evaluate(config)
        report = json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8"))
        return [item["question"] for item in report["answers"]]

    assert asked(1, "a") == asked(1, "b")
    assert len({tuple(asked(seed, f"c{seed}")) for seed in range(2, 6)}) > 1


def test_a_base_without_a_chat_template_is_measured_but_not_asked(
    tiny_model_directory: Path, corpus: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    (base / "chat_template.jinja").unlink()
    config = EvaluateConfig(
        model=tiny_model_directory,
        base=base,
        corpus=corpus,
        compare_xz=False,
        questions=[Source(path=str(questions))],
        max_new_tokens=1,
        output=tmp_path / "out",
    )
    result = evaluate(config)
    assert result["asked"] == 6
    assert result["base"]["asked"] == 0
    assert result["bits_per_byte"]["base"] == result["bits_per_byte"]["model"]
    assert "no chat template" in capsys.readouterr().err
    assert result["verdict"] == ["Against the base: en is unchanged; zh is unchanged."]


def test_choices_and_checks_are_measured_with_the_questions(
    tiny_model_directory: Path, uniform_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": "1 + 1?", "choices": ["2", "three and a half"], "answer": "A"},
        {"question": "首都？", "choices": ["其他城市", "北"], "answer": 1},
        {"question": "q", "answer": "a"},
        {"prompt": "Say 好.", "checks": {"contains": "好", "max_words": 100}},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = EvaluateConfig(
        model=uniform_model,
        corpus=None,
        questions=[Source(path=str(tmp_path / "rows.jsonl"))],
        max_new_tokens=1,
        output=tmp_path / "out",
    )
    result = evaluate(config)
    # All tokens cost the same: as a whole the shorter choice is likeliest, by byte the longer one.
    assert result["choices"] == {"sum": 1.0, "token": 0.5, "character": 0.0, "byte": 0.0}
    assert result["checks"] == 0.5
    assert result["asked"] == 2
    assert (result["exact_match"], result["f1"], result["bleu"], result["rouge_l"]) == (0.0, 0.0, 0.0, 0.0)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Multiple choice" in page
    assert "by character" in page
    assert "checks passed" in page
    assert "Multiple choice" in capsys.readouterr().out


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(kind: type[Exception], match: str, tmp_path: Path, **settings: Any) -> None:
    with pytest.raises(kind, match=match) as caught:
        evaluate(EvaluateConfig(output=tmp_path / "out", **settings))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_corpus_without_held_out_text_is_refused(tiny_model_directory: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [Document("1", ZH[0], "s", "zh"), Document("2", "", "s", "zh", "held_out")])
    refused(ArtifactError, "no held-out text", tmp_path, model=tiny_model_directory, corpus=tmp_path / "corpus")


def test_without_held_out_text_the_questions_are_still_asked(tiny_model_directory: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [Document("1", ZH[0], "s", "zh")])
    (tmp_path / "chats.jsonl").write_text('{"question": "a", "answer": "b"}\n', encoding="utf-8")
    config = EvaluateConfig(
        model=tiny_model_directory,
        corpus=tmp_path / "corpus",
        questions=[{"path": str(tmp_path / "chats.jsonl")}],
        max_new_tokens=2,
        output=tmp_path / "out",
    )
    result = evaluate(config)
    assert result["asked"] == 1
    assert result["xz"] == {}


def test_missing_inputs_are_refused(tiny_model_directory: Path, corpus: Path, tmp_path: Path) -> None:
    refused(ArtifactError, "no model at", tmp_path, model=tmp_path / "nothing", corpus=corpus)
    refused(
        ArtifactError, "no model at", tmp_path, model=tiny_model_directory, base=tmp_path / "nothing", corpus=corpus
    )
    refused(ArtifactError, "not a directory", tmp_path, model=tiny_model_directory, corpus=tmp_path / "nothing")
    refused(ConfigError, "nothing to measure", tmp_path, model=tiny_model_directory, corpus=None)
    nowhere = [Source(path=str(tmp_path / "nothing.jsonl"))]
    refused(DataError, "nothing.jsonl", tmp_path, model=tiny_model_directory, corpus=None, questions=nowhere)


@pytest.mark.parametrize("window", [1, 257])
def test_a_window_that_the_model_cannot_read_is_refused(
    tiny_model_directory: Path, corpus: Path, tmp_path: Path, window: int
) -> None:
    refused(ConfigError, "window_tokens", tmp_path, model=tiny_model_directory, corpus=corpus, window_tokens=window)


def test_a_tokenizer_of_another_model_is_refused(tiny_model_directory: Path, corpus: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=2,
    )
    LlamaForCausalLM(small).save_pretrained(tmp_path / "other")
    load_tokenizer(tiny_model_directory).save_pretrained(tmp_path / "other")
    refused(ArtifactError, "do not belong together", tmp_path, model=tmp_path / "other", corpus=corpus)


# --- sentences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "xz", "expected"),
    [
        ({"zh": 2.0, "en": 1.5, "all": 1.7}, {"zh": 2.5, "en": 2.0, "all": 2.2}, "better than xz in both languages"),
        ({"zh": 2.6, "en": 2.5, "all": 2.5}, {"zh": 2.5, "en": 2.0, "all": 2.2}, "worse than xz in both languages"),
        ({"zh": 2.6, "en": 1.5, "all": 2}, {"zh": 2.5, "en": 2.0}, "better than xz in en, but worse in zh"),
        ({"zh": 2.0, "all": 2.0}, {"zh": 2.5, "all": 2.5}, "better than xz in zh"),
        ({"zh": 1, "en": 1, "de": 1, "all": 1}, {"zh": 2, "en": 2, "de": 2}, "better than xz in all 3 languages"),
    ],
)
def test_the_verdict_on_xz(model: dict[str, float], xz: dict[str, float], expected: str) -> None:
    assert verdict({"model": model}, xz) == [f"The model is {expected}."]


def test_the_verdict_names_the_base_beside_xz_too() -> None:
    bits = {"base": {"zh": 2.1, "all": 2.1}, "model": {"zh": 2.6, "all": 2.6}}
    assert verdict(bits, {"zh": 2.5})[:2] == ["The base is better than xz in zh.", "The model is worse than xz in zh."]


def test_the_verdict_on_the_base() -> None:
    bits = {"base": {"zh": 2.0, "en": 2.0, "all": 2.0}, "model": {"zh": 1.5, "en": 2.1, "all": 1.8}}
    expected = "Against the base: zh is 25.0% better; en is 5.0% worse (so much was forgotten)."
    assert verdict(bits, {}) == [expected]
    assert verdict({}, {}) == []
