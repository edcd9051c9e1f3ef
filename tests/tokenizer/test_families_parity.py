"""What is trained on is what is served, for the chat formats of nine model families and random conversations."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.errors import ConfigError
from onecard.tokenizer.template import encode_chat

_LOOP = "{%- for m in messages %}"
_CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
    + _LOOP
    + "{{- '<|im_start|>' + m.role + '\\n' + CONTENT }}{%- for c in m.tool_calls or [] %}"
    "{{- '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_FOLDED = (
    "{%- set ns = namespace(s='') %}" + _LOOP + "{%- if m.role == 'system' %}{%- set ns.s = m.content + '\\n\\n' %}"
)
_END = "{%- endif %}{%- endfor %}"

# Name: the template, its control tokens, and how the turn of an answer ends.
FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "qwen2.5": (_CHATML.replace("CONTENT", "m.content"), ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "qwen3": (
        _CHATML.replace(
            "CONTENT", "(m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content)"
        ),
        ["<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
    ),
    "smollm2": (_CHATML.replace("CONTENT", "m.content"), ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (
        "{{- bos_token }}" + _LOOP + "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'"
        " + m.content | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "mistral": (
        "{{- bos_token }}" + _FOLDED + "{%- elif m.role == 'user' %}{{- '[INST] ' + ns.s + m.content + '[/INST]' }}"
        "{%- set ns.s = '' %}{%- else %}{{- m.content + eos_token }}" + _END,
        ["[INST]", "[/INST]"],
        "</s>",
    ),
    "gemma": (
        "{{- bos_token }}"
        + _FOLDED
        + "{%- else %}{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
        " + '\\n' + ns.s + m.content | trim + '<end_of_turn>\\n' }}{%- set ns.s = '' %}"
        + _END
        + "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}",
        ["<start_of_turn>", "<end_of_turn>"],
        "<end_of_turn>",
    ),
    "phi3": (
        _LOOP + "{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}",
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "<|end|>",
    ),
    "phi4": (
        _LOOP + "{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}",
        ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
        "<|im_end|>",
    ),
    "deepseek": (
        "{{- bos_token }}" + _LOOP + "{%- if m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + eos_token }}"
        "{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- else %}{{- m.content }}"
        + _END
        + "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}",
        ["<｜User｜>", "<｜Assistant｜>"],
        "</s>",
    ),
}


@cache
def family(name: str) -> Any:
    """A tokenizer of single bytes with the control tokens and the template of the family."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, control, _ = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ["<s>", "</s>", *control]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


SPELLED = sorted({token for _, control, _ in FAMILIES.values() for token in control} | {"<s>", "</s>"})
PIECES = st.one_of(st.sampled_from([*SPELLED, "👩‍👩‍👧", "🏳️‍🌈", "龙", "a", " ", "\n"]), st.text(max_size=4))
TEXT = st.lists(PIECES, max_size=4).map(lambda pieces: "".join(pieces).strip())


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(system=st.none() | TEXT, turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_trained_served_and_put_back_are_the_same_ids(
    name: str, system: str | None, turns: list[tuple[str, str]]
) -> None:
    tokenizer, end = family(name), FAMILIES[name][2]
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    chat = encode_chat(tokenizer, messages)
    learned = [index for index, own in zip(chat.ids, chat.assistant_mask) if own]
    assert tokenizer.decode(learned) == "".join(answer + end for _, answer in turns)
    for place in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = encode_chat(tokenizer, messages[:place], add_generation_prompt=True).ids
        assert chat.ids[: len(prompt)] == prompt
        stop = chat.ids.index(tokenizer.convert_tokens_to_ids(end), len(prompt)) + 1
        assert all(chat.assistant_mask[len(prompt) : stop])
        assert tokenizer.decode(chat.ids[len(prompt) : stop]) == messages[place]["content"] + end


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "smollm2"])
@settings(max_examples=10, deadline=None)
@given(question=TEXT, argument=TEXT, result=TEXT)
def test_calls_of_tools_are_served_as_trained(name: str, question: str, argument: str, result: str) -> None:
    tokenizer = family(name)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": argument}}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "done"},
    ]
    chat = encode_chat(tokenizer, messages, tools=tools)
    for place in (1, 3):
        prompt = encode_chat(tokenizer, messages[:place], tools=tools, add_generation_prompt=True).ids
        assert chat.ids[: len(prompt)] == prompt
        assert chat.assistant_mask[len(prompt)]
    assert chat.ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 5


def test_a_template_that_parts_says_where() -> None:
    from transformers import PreTrainedTokenizerFast

    template = (
        _LOOP + "{{- m.role + ':' + m.content + '</s>' }}{%- endfor %}{%- if add_generation_prompt %}bot:{% endif %}"
    )
    parting = PreTrainedTokenizerFast(
        tokenizer_object=family("qwen2.5").backend_tokenizer, eos_token="</s>", chat_template=template
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(ConfigError) as fault:
        encode_chat(parting, messages)
    # "user:hi</s>" are the eleven characters that both begin with.
    assert fault.value.what.endswith(
        'from character 11 on, the server writes "user:hi</s>bot:", the conversation "user:hi</s>assistant:yes</s>".'
    )
    with pytest.raises(ConfigError, match=r'"user:<\|im_end\|></s>bot:"'):
        encode_chat(parting, [{"role": "user", "content": "<|im_end|>"}, messages[1]])
