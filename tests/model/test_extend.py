"""New rows for new tokens: a sensible start, a multiple of rows, tied heads, and settings that agree."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard import artifact
from onecard.config import TokenizerExtendConfig
from onecard.errors import ConfigError
from onecard.model import lora
from onecard.model.extend import extend
from onecard.model.load import load_model, load_tokenizer, rows_without_token, vocabulary_rows
from onecard.tokenizer.template import encode_chat, stop_token_ids

TERMS = ["冠状动脉", "stentgraft"]


def terms_file(folder: Path, terms: list[str]) -> Path:
    path = folder / "terms.txt"
    path.write_text("\n".join(terms), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, tiny_model_directory: Path) -> Path:
    """The tiny model with a head of its own, in bf16 as large models are stored."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    config = LlamaConfig.from_pretrained(str(tiny_model_directory), tie_word_embeddings=False)
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(tiny_model_directory).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, tiny_model_directory: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("extended")
    config = TokenizerExtendConfig(model=tiny_model_directory, output=folder / "model", terms=terms_file(folder, TERMS))
    return folder / "model", extend(config)


def test_terms_are_one_token_and_other_text_is_as_before(
    extended: tuple[Path, dict[str, Any]], tiny_model_directory: Path
) -> None:
    old, new = load_tokenizer(tiny_model_directory), load_tokenizer(extended[0])
    for text in ("冠状动脉", "stentgraft", " stentgraft"):
        assert len(new.encode(text, add_special_tokens=False)) == 1
    for text in (
        "话说天下大势，分久必合",
        "The quick brown fox",
        "1234 👍\n  <|im_end|> <think>",
        "graft of, 心",
    ):
        assert new.encode(text) == old.encode(text)
    text = "患者冠状动脉狭窄 a stentgraft。"
    assert new.decode(new.encode(text, add_special_tokens=False)) == text
    assert len(new.encode(text)) < len(old.encode(text))
    # Ids that there were keep their tokens.
    assert {token: new.get_vocab()[token] for token in old.get_vocab()} == old.get_vocab()
    assert new.all_special_tokens == old.all_special_tokens


def test_rows_are_a_multiple_and_new_ones_are_means(
    extended: tuple[Path, dict[str, Any]], tiny_model_directory: Path
) -> None:
    directory, result = extended
    old, new = load_tokenizer(tiny_model_directory), load_tokenizer(directory)
    before, after = load_model(tiny_model_directory), load_model(directory)
    old_rows: Any = before.get_input_embeddings().weight  # type: ignore[union-attr]
    rows: Any = after.get_input_embeddings().weight  # type: ignore[union-attr]
    assert (result["rows_before"], result["rows"]) == (384, 448)
    assert rows.shape[0] == after.config.vocab_size == 448
    assert result["entries"] == vocabulary_rows(new) == 384 + result["new_entries"]
    assert torch.equal(rows[:384], old_rows)
    for term in TERMS:
        parts = old.encode(term, add_special_tokens=False)
        expected = old_rows[parts].mean(0)
        assert torch.allclose(rows[new.encode(term, add_special_tokens=False)[0]], expected, atol=1e-6)
    assert torch.allclose(rows[-1], old_rows.mean(0), atol=1e-6)


def test_a_tied_head_stays_tied_and_is_stored_once(extended: tuple[Path, dict[str, Any]]) -> None:
    from safetensors import safe_open

    model: Any = load_model(extended[0])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    with safe_open(extended[0] / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_a_head_of_its_own_gets_rows_too_and_the_number_format_stays(untied: Path, tmp_path: Path) -> None:
    result = extend(TokenizerExtendConfig(model=untied, output=tmp_path / "m", terms=terms_file(tmp_path, ["冠状"])))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    model: Any = load_model(tmp_path / "m", dtype=torch.bfloat16)
    before: Any = load_model(untied, dtype=torch.bfloat16)
    new, old = load_tokenizer(tmp_path / "m"), load_tokenizer(untied)
    row, parts = new.encode("冠状", add_special_tokens=False)[0], old.encode("冠状", add_special_tokens=False)
    for name in ("lm_head", "model.embed_tokens"):
        expected = before.get_submodule(name).weight[parts].float().mean(0).bfloat16()
        assert torch.equal(model.get_submodule(name).weight[row], expected)
    assert result["rows"] == 448


def test_rows_without_a_token_are_never_generated(extended: tuple[Path, dict[str, Any]]) -> None:
    from onecard.evaluate.answers import generate
    from onecard.serve.engine import Engine
    from onecard.serve.requests import GenerationParameters, TokenEvent

    directory, result = extended
    tokenizer = load_tokenizer(directory)
    model: Any = load_model(directory)
    spare = rows_without_token(tokenizer, 448)
    assert len(spare) == result["rows_without_token"] == 448 - result["entries"] > 0
    assert model.generation_config.suppress_tokens == spare
    # Make a spare row the likeliest answer to everything.
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head = torch.nn.Linear(64, 448)
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
        model.lm_head.bias[spare] = 100.0
        model.lm_head.bias[50] = 1.0
    prompt = tokenizer.encode("hi", return_tensors="pt")
    with torch.inference_mode():
        assert int(model(prompt).logits[0, -1].argmax()) in spare
        assert model.generate(prompt, max_new_tokens=3, do_sample=True)[0, prompt.shape[1] :].max() < spare[0]
    written = generate(
        model, [prompt[0].tolist()], stop_ids=[], vocabulary_size=vocabulary_rows(tokenizer), limit=3, batch_size=1
    )
    assert written[0].ids == [50, 50, 50]
    engine = Engine(model, tokenizer, max_concurrent=1, max_length=32)
    try:
        handle = engine.submit(prompt[0].tolist(), GenerationParameters(max_tokens=3, ignore_eos=True))
        said = [event.token_id for event in handle if isinstance(event, TokenEvent)]
    finally:
        engine.close()
    assert len(said) == 3
    assert max(said) < spare[0]


def test_adapters_on_an_extended_model_reload_and_merge_alike(
    extended: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    from peft import PeftModel

    directory, _ = extended
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("患者冠状动脉狭窄 a stentgraft。", return_tensors="pt")
    model: Any = load_model(directory)
    lora.add(model, rank=4, alpha=8)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.inference_mode():
        trained = model(ids).logits
        assert not torch.allclose(trained, load_model(directory)(ids).logits, atol=1e-3)
        lora.save(model, tmp_path / "adapter", directory)
        base: Any = load_model(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what that library calls of transformers is deprecated there
            reloaded: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        assert torch.allclose(reloaded(ids).logits, trained, atol=1e-5)
        lora.merge(model)
        assert torch.allclose(model(ids).logits, trained, atol=1e-5)
        model.save_pretrained(tmp_path / "merged")
        assert torch.allclose(load_model(tmp_path / "merged")(ids).logits, trained, atol=1e-5)


def test_a_chat_template_brings_its_control_tokens(tiny_model_directory: Path, tmp_path: Path) -> None:
    result = extend(TokenizerExtendConfig(model=tiny_model_directory, output=tmp_path / "m", chat_template="llama-3"))
    tokenizer, model = load_tokenizer(tmp_path / "m"), load_model(tmp_path / "m")
    assert result["new_entries"] == 3
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    chat = encode_chat(
        tokenizer, [{"role": "user", "content": "hi <|eot_id|>"}, {"role": "assistant", "content": "yo"}]
    )
    assert chat.ids.count(end) == 2  # the one that the user spells is text
    assert stop_token_ids(tokenizer) == [end, tokenizer.eos_token_id]
    generation: Any = model.generation_config
    assert generation.eos_token_id == model.config.eos_token_id == [end, tokenizer.eos_token_id]
    rows: Any = model.get_input_embeddings().weight  # type: ignore[union-attr]
    assert torch.equal(rows[end], rows[tokenizer.eos_token_id])
    manifest = artifact.verify(tmp_path / "m")
    assert manifest.kind == "model"
    assert "never generated" in (tmp_path / "m" / "report.html").read_text(encoding="utf-8")


def test_a_template_whose_tokens_are_there_adds_no_row(tiny_model_directory: Path, tmp_path: Path) -> None:
    result = extend(TokenizerExtendConfig(model=tiny_model_directory, output=tmp_path / "m", chat_template="qwen"))
    assert (result["new_entries"], result["rows"]) == (0, 384)
    assert not str(load_tokenizer(tmp_path / "m").chat_template).startswith("{{- bos_token }}")


def test_faults(tiny_model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to add"):
        extend(TokenizerExtendConfig(model=tiny_model_directory, output=tmp_path / "m"))
    with pytest.raises(ConfigError, match="one token already, or cannot be one") as fault:
        extend(
            TokenizerExtendConfig(
                model=tiny_model_directory, output=tmp_path / "m", terms=terms_file(tmp_path, ["two words"])
            )
        )
    assert "two words: the split rule cuts it" in fault.value.remedy
    assert not (tmp_path / "m").exists()


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    from onecard.tokenizer.extension import extended as extend_tokenizer
    from onecard.tokenizer.train import train_unigram, wrap

    unigram = wrap(train_unigram(["ab " * 50], vocabulary_size=300, pre_tokenizer="qwen2", maximum_token_characters=4))
    with pytest.raises(ConfigError, match="is a Unigram"):
        extend_tokenizer(unigram, ["ab"])
