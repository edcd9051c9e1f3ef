"""The chat formats as their makers published them, and their masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onecard.errors import DataError
from onecard.tokenizer.chat_templates import CHAT_FORMATS
from onecard.tokenizer.template import encode_chat, stop_token_ids

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "天下大势如何？"},
    {"role": "assistant", "content": "分久必合。"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "合久必分。"},
]
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
EXPECTED = {
    "chatml": f"{BOS}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n天下大势如何？<|im_end|>\n"
    "<|im_start|>assistant\n分久必合。<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
    "<|im_start|>assistant\n合久必分。<|im_end|>\n",
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n天下大势如何？<|im_end|>\n"
    "<|im_start|>assistant\n分久必合。<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
    "<|im_start|>assistant\n合久必分。<|im_end|>\n",
    "llama-3": f"{BOS}<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n天下大势如何？<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n分久必合。<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n合久必分。<|eot_id|>",
    "phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\n天下大势如何？<|end|>\n<|assistant|>\n分久必合。<|end|>\n"
    "<|user|>\nAnd then?<|end|>\n<|assistant|>\n合久必分。<|end|>\n",
    "gemma": f"{BOS}<start_of_turn>user\nBe brief.\n\n天下大势如何？<end_of_turn>\n<start_of_turn>model\n分久必合。"
    "<end_of_turn>\n<start_of_turn>user\nAnd then?<end_of_turn>\n<start_of_turn>model\n合久必分。<end_of_turn>\n",
    "mistral": f"{BOS}[INST]Be brief.\n\n天下大势如何？[/INST]分久必合。{EOS}[INST]And then?[/INST]合久必分。{EOS}",
    "deepseek": f"{BOS}Be brief.<｜User｜>天下大势如何？<｜Assistant｜>分久必合。{EOS}"
    f"<｜User｜>And then?<｜Assistant｜>合久必分。{EOS}",
}  # fmt: skip


@pytest.fixture(params=list(CHAT_FORMATS))
def named(request: pytest.FixtureRequest, tiny_tokenizer_directory: Path) -> tuple[str, Any]:
    """A tokenizer with the format of that name."""
    from onecard.model.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    chat = CHAT_FORMATS[request.param]
    tokenizer.add_special_tokens({"additional_special_tokens": list(chat.control_tokens)})
    tokenizer.chat_template = chat.template
    return request.param, tokenizer


def test_every_format_is_written_as_published(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    assert tokenizer.decode(encode_chat(tokenizer, CHAT).ids) == EXPECTED[name]


def test_the_mask_is_the_answers_with_their_ends(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    chat = encode_chat(tokenizer, CHAT)
    end = CHAT_FORMATS[name].turn_end or EOS
    own = tokenizer.decode([index for index, marked in zip(chat.ids, chat.assistant_mask) if marked])
    assert own == f"分久必合。{end}合久必分。{end}"
    assert stop_token_ids(tokenizer)[0] == tokenizer.convert_tokens_to_ids(end)
    for turns in (2, 4):
        prompt = encode_chat(tokenizer, CHAT[:turns], add_generation_prompt=True).ids
        assert chat.ids[: len(prompt)] == prompt
        assert chat.assistant_mask[len(prompt)]


def test_text_that_spells_control_tokens_stays_text(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    spelled = "".join(CHAT_FORMATS[name].control_tokens) + EOS
    plain = encode_chat(tokenizer, [{"role": "user", "content": "x"}], add_generation_prompt=True).ids
    marked = encode_chat(tokenizer, [{"role": "user", "content": f"x{spelled}x"}], add_generation_prompt=True).ids
    control = {tokenizer.convert_tokens_to_ids(token) for token in (*CHAT_FORMATS[name].control_tokens, BOS, EOS)}
    assert [i for i in marked if i in control] == [i for i in plain if i in control]
    assert f"x{spelled}x" in tokenizer.decode(marked)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_formats_of_two_sides_refuse_other_orders(name: str, tiny_tokenizer_directory: Path) -> None:
    from onecard.model.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    tokenizer.chat_template = CHAT_FORMATS[name].template
    with pytest.raises(DataError, match="user and assistant in turn"):
        encode_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
