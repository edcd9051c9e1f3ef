"""Published models by name, counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from onecard.errors import ConfigError
from onecard.plan import architectures
from onecard.plan.architectures import architecture, known, names, published_parameters


def parameters(config: Any) -> int:
    """Counted on a model without memory; of encoders without a head on top."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    kind: Any = AutoModel if config.model_type in ("bert", "roberta") else AutoModelForCausalLM
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind.from_config(config).parameters())


# One of each table of shapes; the rest is in the slow test.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-4b", 4_022_468_096),
        ("mistral-7b", 7_241_732_096),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("phi-1.5", 1_418_270_720),
        ("phi-3-mini", 3_821_079_552),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("bert-large", 335_141_888),
        ("bert-base-chinese", 102_267_648),
        ("roberta-base", 124_645_632),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_those_published(name: str, count: int) -> None:
    assert published_parameters(name) == count
    assert parameters(architecture(name)) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_table_counts_what_it_says(name: str) -> None:
    assert parameters(architecture(name)) == published_parameters(name)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("GPT2-XL", "gpt2-xl"),
        ("bert-large-uncased", "bert-large"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_the_hubs_spellings_are_understood(spelling: str, name: str) -> None:
    assert known(spelling)
    assert architecture(spelling).to_dict() == architecture(name).to_dict()


def test_every_spelling_means_one_table() -> None:
    for name in names():
        assert architectures._canonical(name) == name


def test_each_call_makes_a_configuration_of_its_own() -> None:
    architecture("gpt2").n_layer = 1
    assert architecture("gpt2").n_layer == 12


def test_an_unknown_name_is_told_the_nearest() -> None:
    assert not known("lama-3.1-8b")
    with pytest.raises(ConfigError, match=r"No model lama-3\.1-8b.*") as fault:
        architecture("lama-3.1-8b")
    assert fault.value.remedy == "Did you mean llama-3.1-8b?"
    with pytest.raises(ConfigError) as far:
        architecture("§§§")
    assert "gpt2-xl" in far.value.remedy
