"""The compiled step computes what the model's own modules do, alone or beside others, in floats and in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from onecard import console
from onecard.compress.quantize import quantize
from onecard.config import QuantizeConfig
from onecard.errors import ConfigError
from onecard.model.load import load_model, load_tokenizer
from onecard.serve import native, opening
from onecard.serve.engine import Engine
from onecard.serve.opening import open_engine
from onecard.serve.requests import GenerationParameters, TokenEvent
from onecard.serve.sampling import SamplingParameters
from onecard.settings import build as build_settings

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")

SIZES = {
    "vocab_size": 112, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def build(config: Any) -> Any:
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            # Norms and biases too, so that leaving one out shows.
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return made


FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
    "llama, long context": LlamaConfig(
        **SIZES, rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64, "rope_theta": 1000.0}),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_in_any_company(family: str) -> None:
    model = build(FAMILIES[family])
    assert native.supports(model)
    texts = [torch.randint(0, 112, (length,)).tolist() for length in (11, 7, 1)]
    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0] for ids in texts]
    made = native.NativeModel(model, 4, 256)
    # Three prompts in one step, cut at different places; then what is left of them.
    cuts = [5, 7, 0]
    first = [(slot, place) for slot, cut in enumerate(cuts) for place in range(cut)]
    rest = [(slot, place) for slot, ids in enumerate(texts) for place in range(cuts[slot], len(ids))]
    for part in (first, rest):
        slots, places = [slot for slot, _ in part], [place for _, place in part]
        found = made.step([texts[slot][place] for slot, place in part], slots, places, range(len(part)))
        for row, (slot, place) in enumerate(part):
            torch.testing.assert_close(found[row], wanted[slot][place], rtol=1e-4, atol=1e-4)
    # To the last bit the same alone, in pieces.
    alone = [made.step([token], [3], [place], [0])[0] for place, token in enumerate(texts[0])]
    assert torch.equal(alone[-1], found[rest.index((0, 10))])


@pytest.mark.parametrize(("kind", "bytes_a_weight"), [("bf16", 2), ("int8", 1), ("int4", 0.5)])
def test_rounded_weights_are_computed_as_what_they_mean(kind: str, bytes_a_weight: float) -> None:
    model = build(FAMILIES["qwen3"])
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    integers = native.round_weights(model, kind)
    after = model.model.layers[0].mlp.up_proj.weight.detach()
    assert 0 < float((after - before).abs().max()) <= {"bf16": 2e-3, "int8": 5e-3, "int4": 6e-2}[kind]
    ids = list(range(20))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    made = native.NativeModel(model, 1, 256, integers)
    torch.testing.assert_close(made.step(ids, [0] * 20, ids, ids), wanted, rtol=1e-3, atol=1e-3)
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0  # given up
    structure = made._structures[0].up
    assert (structure.rows, structure.columns) == (96, 64)
    layers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
    head, norms = 112 * 64 * 2, 4 * (64 + 2 * (64 * 2 + 16 * 2))
    groups = {"bf16": 0, "int8": 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64), "int4": layers / 32}[kind]
    assert made.weight_bytes == layers * bytes_a_weight + head + norms + 4 * groups


def test_what_it_does_not_know_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = LlamaConfig(**{**SIZES, "intermediate_size": 90})
    assert not native.supports(build(odd))
    assert not native.supports(build(LlamaConfig(**SIZES, hidden_act="gelu")))
    # Its angles follow the longest request of a step.
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    assert not native.supports(build(LlamaConfig(**SIZES, rope_scaling=dynamic)))
    build(odd).save_pretrained(tmp_path)
    _, decoder_of = opening.open_model(tmp_path, "auto")
    assert not decoder_of(1, 64).mixes
    with pytest.raises(ConfigError, match="int8") as caught:
        opening.open_model(tmp_path, "int8")
    assert "precision" in caught.value.remedy
    # Compiled code that computes something else is found out, and not used.
    build(FAMILIES["llama"]).save_pretrained(tmp_path / "other")
    vector = native.NativeModel._vector
    monkeypatch.setattr(native.NativeModel, "_vector", lambda self, t: vector(self, None if t is None else t * 1.1))
    said: list[str] = []
    monkeypatch.setattr(console, "warn", said.append)
    _, decoder_of = opening.open_model(tmp_path / "other", "auto")
    assert not decoder_of(1, 64).mixes
    assert "compiled step" in said[0]


def test_compiled_code_that_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(console, "note", said.append)

    def refuse(path: str) -> None:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    assert "cannot be loaded (failed to map" in said[-1]


def test_integers_that_are_stored_are_served_as_they_are(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(
        build_settings(
            QuantizeConfig,
            {
                "model": str(tiny_model_directory),
                "output": str(tmp_path / "made"),
                "format": "int4",
                "max_new_tokens": 1,
            },
        )
    )
    made = tmp_path / "made"
    ids = list(range(20, 40))

    def logits(precision: str) -> torch.Tensor:
        _, decoder_of = opening.open_model(made, precision)
        return decoder_of(1, 64).step(ids, [0] * 20, range(20), range(20))

    wanted = logits("auto")
    for precision in ("int4", "bf16"):
        assert torch.equal(logits(precision), wanted)
    with pytest.raises(ConfigError, match="int4 already"):
        opening.open_model(made, "int8")


def answers(engine: Engine, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    parameters = GenerationParameters(max_tokens=count, sampling=SamplingParameters(temperature=0), ignore_eos=True)
    handles = [engine.submit(ids, parameters) for ids in prompts]
    return [[event.token_id for event in handle if isinstance(event, TokenEvent)] for handle in handles]


def test_served_answers_are_those_of_generate_and_beginnings_are_read_once(tiny_model_directory: Path) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(10, 300, (length,), generator=generator).tolist() for length in (40, 3, 57, 20, 9)]
    wanted = []
    for ids in prompts:
        with torch.inference_mode():
            grown = list(ids)
            for _ in range(12):
                logits = model(torch.tensor([grown])).logits[0, -1, : len(tokenizer)]
                grown.append(int(logits.argmax()))
        wanted.append(grown[len(ids) :])
    engine, _ = open_engine(tiny_model_directory, max_concurrent=3, prefix_bytes=1 << 24)
    try:
        assert engine._decoder.mixes, "the tiny model is one that the compiled step knows"
        assert answers(engine, prompts) == wanted
        computed = engine.computed_tokens
        # The longest prompt and its answer again, and one more: 57 + 11 tokens stand in 4 whole pages of 16.
        longer = [*prompts[2], *wanted[2], 17]
        [again] = answers(engine, [longer], 1)
        assert engine.computed_tokens - computed == len(longer) - 64
        with torch.inference_mode():
            assert again == [int(model(torch.tensor([longer])).logits[0, -1, : len(tokenizer)].argmax())]
    finally:
        engine.close()
