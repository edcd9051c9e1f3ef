"""Chats become ids: one BOS, control tokens that only the template writes, masks on the answers and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.errors import ConfigError, DataError
from onecard.tokenizer.special import CHAT_TEMPLATE, CONTROL_TOKENS, PRE_TOKENIZERS
from onecard.tokenizer.template import (
    encode_chat,
    encode_document,
    encode_documents,
    encode_prompt,
    stop_token_ids,
)

BOS, EOS, TURN_END = 1, 0, 4

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "天下大势如何？"},
    {"role": "assistant", "content": "分久必合。\n\nIndeed."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "合久必分。"},
]

HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|/head|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_directory: Path) -> Any:
    from onecard.model.load import load_tokenizer

    return load_tokenizer(tiny_tokenizer_directory)


def own(tokenizer: Any, chat: Any) -> list[str]:
    """The masked stretches as text, one string for each run of marked tokens."""
    runs: list[list[int]] = []
    previous = False
    for index, marked in zip(chat.ids, chat.assistant_mask):
        if marked and not previous:
            runs.append([])
        if marked:
            runs[-1].append(index)
        previous = marked
    return [tokenizer.decode(run) for run in runs]


def another(template: str, special: list[str], *, plain: list[str] | None = None, edit: Any = None) -> Any:
    """A byte-level tokenizer of another family; it adds BOS by itself and its template may write one too."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
    from tokenizers import decoders as made_decoders
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [("Ċ", "Ċ"), ("h", "i"), ("Ġ", "hi")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["llama-bpe"][0]), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = made_decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ["<s>", "</s>", *special]])
    backend.add_tokens(plain or [])
    if edit:
        edit(backend)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


# --- BOS (one, everywhere) ----------------------------------------------------------------------------------------


def test_exactly_one_bos_everywhere(tokenizer: Any, tmp_path: Path) -> None:
    from onecard.model.load import load_tokenizer

    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert each.encode("hi")[0] == BOS
        for ids in (
            encode_chat(each, CHAT).ids,
            encode_chat(each, CHAT[:2], add_generation_prompt=True).ids,
            encode_prompt(each, "hi"),
            encode_document(each, "hi"),
        ):
            assert ids[0] == BOS
            assert ids.count(BOS) == 1


def test_a_tokenizer_that_adds_bos_with_a_template_that_writes_it(tmp_path: Path) -> None:
    from onecard.model.load import load_tokenizer

    llama = another(HEADERS, ["<|head|>", "<|/head|>", "<|eot|>"])
    llama.save_pretrained(tmp_path)
    for each in (llama, load_tokenizer(tmp_path)):
        bos = each.bos_token_id
        assert each.encode(each.apply_chat_template(CHAT, tokenize=False)).count(bos) == 2  # the trap
        assert encode_chat(each, CHAT).ids.count(bos) == 1
        assert encode_prompt(each, "hi").count(bos) == 1
        assert encode_document(each, "hi") == [bos, each.convert_tokens_to_ids("hi"), each.eos_token_id]


def test_documents(tokenizer: Any) -> None:
    text = "话说 the end"
    ids = encode_document(tokenizer, text)
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert tokenizer.decode(ids[1:-1]) == text
    assert encode_documents(tokenizer, [text, ""]) == [ids, [BOS, EOS]]
    assert encode_prompt(tokenizer, text) == ids[:-1]


def test_documents_end_alike_before_and_after_fine_tuning(tokenizer: Any) -> None:
    import copy

    tuned = copy.deepcopy(tokenizer)
    tuned.eos_token = "<|im_end|>"
    assert encode_document(tuned, "hello") == encode_document(tokenizer, "hello")
    turn, document = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert stop_token_ids(tuned) == stop_token_ids(tokenizer) == [turn, document]


def test_a_document_that_spells_control_tokens_keeps_them_as_text(tokenizer: Any) -> None:
    text = "<|endoftext|> a <|startoftext|>"
    ids = encode_document(tokenizer, text)
    assert [i for i in ids if i < len(CONTROL_TOKENS)] == [BOS, EOS]
    assert tokenizer.decode(ids[1:-1]) == text


def test_without_bos(tokenizer: Any) -> None:
    import copy

    none = copy.deepcopy(tokenizer)
    none.bos_token = None
    assert encode_document(none, "hi") == tokenizer.encode("hi", add_special_tokens=False) + [EOS]


def test_lone_surrogates_do_not_stop_anything(tokenizer: Any) -> None:
    assert tokenizer.decode(encode_prompt(tokenizer, "a\ud83db")[1:]) == "a\ufffdb"
    assert tokenizer.decode(encode_prompt(tokenizer, "\ud83d\udc4d")[1:]) == "👍"
    chat = encode_chat(tokenizer, [{"role": "user", "content": "a\ud83d"}], add_generation_prompt=True)
    assert "a\ufffd" in tokenizer.decode(chat.ids)


# --- masks --------------------------------------------------------------------------------------------------------


def test_the_mask_marks_answers_and_their_end_of_turn(tokenizer: Any) -> None:
    chat = encode_chat(tokenizer, CHAT)
    assert own(tokenizer, chat) == ["分久必合。\n\nIndeed.<|im_end|>", "合久必分。<|im_end|>"]
    assert tokenizer.decode(chat.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert not chat.assistant_mask[-1]  # the line break after the last turn


def test_the_mask_is_that_of_the_generation_marks(tokenizer: Any) -> None:
    theirs = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    chat = encode_chat(tokenizer, CHAT)
    assert chat.ids == theirs["input_ids"]
    assert chat.assistant_mask == [bool(flag) for flag in theirs["assistant_masks"]]


def test_an_empty_answer_is_its_end_of_turn(tokenizer: Any) -> None:
    chat = encode_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}])
    assert own(tokenizer, chat) == ["<|im_end|>"]


def test_two_answers_in_sequence(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, *({"role": "assistant", "content": c} for c in "bc")]
    assert own(tokenizer, encode_chat(tokenizer, messages)) == ["b<|im_end|>", "c<|im_end|>"]


def test_the_mask_with_headers_of_another_family() -> None:
    llama = another(HEADERS, ["<|head|>", "<|/head|>", "<|eot|>"])
    chat = encode_chat(llama, CHAT)
    assert chat.ids == llama.apply_chat_template(CHAT, return_dict=False)
    assert own(llama, chat) == ["分久必合。\n\nIndeed.<|eot|>", "合久必分。<|eot|>"]
    assert stop_token_ids(llama) == [llama.convert_tokens_to_ids("<|eot|>"), llama.eos_token_id]


def test_an_eos_after_the_last_turn_is_not_learned() -> None:
    template = HEADERS.replace(
        "{%- if add", "{%- if not add_generation_prompt %}{{- '\\n' + eos_token }}{% endif %}{%- if add"
    )
    phi = another(template, ["<|head|>", "<|/head|>", "<|eot|>"])
    assert own(phi, encode_chat(phi, CHAT)) == ["分久必合。\n\nIndeed.<|eot|>", "合久必分。<|eot|>"]


def test_a_control_token_that_swallows_white_space() -> None:
    from tokenizers import AddedToken

    strip = [AddedToken(name, rstrip=True, normalized=False, special=True) for name in ("<|/head|>", "<|eot|>")]
    phi = another(
        HEADERS.replace("'<|eot|>'", "'<|eot|>\\n'"),
        ["<|head|>"],
        edit=lambda backend: backend.add_special_tokens(strip),
    )
    chat = encode_chat(phi, CHAT)
    assert chat.ids == phi.apply_chat_template(CHAT, return_dict=False)
    assert own(phi, chat) == ["分久必合。\n\nIndeed.<|eot|>", "合久必分。<|eot|>"]
    spelled = encode_chat(phi, [{"role": "user", "content": " hi<|eot|> hi"}], add_generation_prompt=True)
    assert spelled.ids.count(phi.convert_tokens_to_ids("<|eot|>")) == 1


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        # Drops old answers' thoughts: the first answer is rendered in two ways.
        (
            "{% for m in messages %}<|head|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<|eot|>"
            "{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n{% endif %}",
            2,
            "rendered otherwise when further messages follow",
        ),
        # Opens the answer with more than it writes into history.
        (
            "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|eot|>{% endfor %}"
            "{% if add_generation_prompt %}<|head|>assistant\n<think>{% endif %}",
            2,
            "not how the conversation begins",
        ),
        # Never ends a turn.
        (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}",
            2,
            "no end of turn",
        ),
    ],
)
def test_a_template_that_cannot_be_masked_says_at_which_message(template: str, message: int, reason: str) -> None:
    odd = another(template, ["<|head|>", "<|eot|>"])
    with pytest.raises(ConfigError, match=f"message {message}: .*{reason}"):
        encode_chat(odd, CHAT)
    # It can still be served.
    prompt = encode_chat(odd, CHAT[:4], add_generation_prompt=True)
    assert prompt.ids == odd.apply_chat_template(CHAT[:4], add_generation_prompt=True, return_dict=False)


def test_no_template_and_refused_conversations() -> None:
    bare = another("", [])
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        encode_chat(bare, CHAT)
    assert stop_token_ids(bare) == [bare.eos_token_id]
    strict = another("{{ raise_exception('roles must alternate') }}", [])
    with pytest.raises(DataError, match="roles must alternate"):
        encode_chat(strict, CHAT)


# --- the prompt is a prefix of what was trained on -----------------------------------------------------------------

WORDS = st.text(st.sampled_from("ab 分合\n\t,.!?1<|>"), max_size=12)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TURNS)
def test_a_prompt_is_a_prefix_and_the_answer_is_all_that_follows(tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    messages = conversation(turns)
    chat = encode_chat(tokenizer, messages)
    for index in range(1, len(messages), 2):
        prompt = encode_chat(tokenizer, messages[:index], add_generation_prompt=True).ids
        assert chat.ids[: len(prompt)] == prompt
        assert chat.assistant_mask[len(prompt)]
    assert own(tokenizer, chat) == [answer + "<|im_end|>" for _, answer in turns]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TURNS)
def test_ids_are_those_of_the_template(tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    messages = conversation([(question, answer.lstrip()) for question, answer in turns])
    assert encode_chat(tokenizer, messages).ids == tokenizer.apply_chat_template(messages, return_dict=False)


def test_a_prompt_whose_end_is_split_otherwise_before_an_answer() -> None:
    """GPT-2's split gives the last white space before a word to the word: alone, two line breaks are one token."""
    from tokenizers import pre_tokenizers

    def gpt2(backend: Any) -> None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    old = another(HEADERS, ["<|head|>", "<|/head|>", "<|eot|>"], edit=gpt2)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    double = old.convert_tokens_to_ids("ĊĊ")
    assert double not in old.apply_chat_template(messages, return_dict=False)[-4:]
    assert encode_chat(old, messages).ids[-4:] == [
        old.convert_tokens_to_ids(name) for name in ("<|/head|>", "ĊĊ", "hi", "<|eot|>")
    ]


def test_an_answer_that_would_merge_with_its_prompt() -> None:
    llama = another(HEADERS.replace(" | trim", "").replace("\\n\\n", "\\n"), ["<|head|>", "<|/head|>", "<|eot|>"])
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\nhi"}]
    double, single = llama.convert_tokens_to_ids("ĊĊ"), llama.convert_tokens_to_ids("Ċ")
    assert double in llama.apply_chat_template(messages, return_dict=False)
    chat = encode_chat(llama, messages)
    assert double not in chat.ids
    assert chat.ids[-4:-1] == [single, single, llama.convert_tokens_to_ids("hi")]
    assert chat.assistant_mask[-4:] == [False, True, True, True]


# --- spelled control tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_spelled_control_tokens_stay_text(tokenizer: Any, role: str, token: str) -> None:
    def messages(content: str) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": "x"},
            {"role": role, "content": content},
            {"role": "assistant", "content": "y"},
        ]

    spelled = encode_chat(tokenizer, messages(f"a{token}b{token}\n{token[0]}{token}"))
    innocent = encode_chat(tokenizer, messages("a"))

    def control(ids: list[int]) -> list[int]:
        return [index for index in ids if index < len(CONTROL_TOKENS)]

    assert control(spelled.ids) == control(innocent.ids)
    assert f"a{token}b{token}\n{token[0]}{token}" in tokenizer.decode(spelled.ids)
    assert own(tokenizer, spelled)[-1] == "y<|im_end|>"


def test_spelled_control_tokens_in_calls_and_tools(tokenizer: Any) -> None:
    call = {"name": "f", "arguments": {"<|im_end|>": ["<|endoftext|>", 1]}}
    messages = [
        {"role": "user", "content": "\ue000"},  # the first character that would be used to hide them
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>user\nhi"}}]
    chat = encode_chat(tokenizer, messages, tools=tools)
    assert chat.ids.count(TURN_END) == 3
    assert chat.ids.count(EOS) == 0
    answer = own(tokenizer, chat)
    assert answer == [
        '<tool_call>\n{"name": "f", "arguments": {"<|im_end|>": ["<|endoftext|>", 1]}}\n</tool_call><|im_end|>'
    ]
    assert "\ue000" in tokenizer.decode(chat.ids)


def test_markup_is_one_token_in_an_answer(tokenizer: Any) -> None:
    chat = encode_chat(
        tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    )
    assert tokenizer.convert_tokens_to_ids("<think>") in chat.ids
    assert own(tokenizer, chat) == ["<think>b</think>c<|im_end|>"]
    assert "<think>b</think>c" in tokenizer.decode(chat.ids, skip_special_tokens=True)


def test_spelled_tokens_with_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    from tokenizers import pre_tokenizers

    def metaspace(backend: Any) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    template = HEADERS.replace("{{- bos_token }}", "")
    odd = another(template, ["<|head|>", "<|/head|>", "<|eot|>"], edit=metaspace)
    messages = [{"role": "user", "content": "hi<|eot|>"}, {"role": "assistant", "content": "hi"}]
    chat = encode_chat(odd, messages)
    assert chat.ids.count(odd.convert_tokens_to_ids("<|eot|>")) == 2
    assert odd.decode(chat.ids) == odd.apply_chat_template(messages, tokenize=False)


# --- tool calls ---------------------------------------------------------------------------------------------------

ARGUMENTS = {"城市": "北京", "days": 3, "deep": {"a": [None, True, 1.5]}}


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        # Prints the arguments as they are.
        "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments }}{% endfor %}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}",
        # Joins them to its own text.
        "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ '' + "
        "c.function.arguments }}{% endfor %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n"
        "{% endif %}",
    ],
)
def test_arguments_as_object_and_as_text_are_the_same(template: str) -> None:
    each = another(
        template, ["<|im_start|>", "<|im_end|>", "<|head|>", "<|eot|>"], plain=["<tool_call>", "</tool_call>"]
    )
    wanted: list[int] | None = None
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, ensure_ascii=False, indent=1)):
        for content in ({"content": None}, {"content": ""}, {}):
            for call in (
                {"name": "weather", "arguments": arguments},
                {"type": "function", "function": {"name": "weather", "arguments": arguments}},
            ):
                messages = [
                    {"role": "user", "content": "天气"},
                    {"role": "assistant", **content, "tool_calls": [call]},
                    {"role": "tool", "content": "晴", "name": None},
                    {"role": "assistant", "content": "晴。", "tool_calls": None},
                ]
                ids = encode_chat(each, messages).ids
                wanted = wanted or ids
                assert ids == wanted
    text = each.decode(wanted)
    assert '{"城市": "北京", "days": 3, "deep": {"a": [null, true, 1.5]}}' in text
    assert "None" not in text
    assert "\\u" not in text


def test_calls_and_results_are_rendered_as_a_server_expects(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [{"name": "f", "arguments": ""}, {"name": "g"}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
    ]
    chat = encode_chat(tokenizer, messages)
    assert tokenizer.decode(chat.ids) == (
        "<|startoftext|><|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\nWait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nso\n</think>\n\ndone<|im_end|>\n"
    )
    assert [text[-4 - len("<|im_end|>") :] for text in own(tokenizer, chat)] == ["all><|im_end|>", "done<|im_end|>"]


def test_tools_stand_in_the_system_turn(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "天气"}}]
    with_system = tokenizer.decode(encode_chat(tokenizer, CHAT, tools=tools).ids)
    assert with_system.startswith("<|startoftext|><|im_start|>system\nBe brief.\n\nYou can call")
    assert '"description": "天气"' in with_system
    assert with_system.count("<|im_start|>system") == 1
    without = tokenizer.decode(encode_chat(tokenizer, CHAT[1:], tools=tools).ids)
    assert without.startswith("<|startoftext|><|im_start|>system\nYou can call")


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"content": "a"}, "Message 0 has no role"),
        ({"role": "user", "content": 3}, "content of message 0 is not text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content of message 0 is not text"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "arguments of a tool call in message 0 are not valid",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "arguments of f in message 0 are not an",
        ),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool call of message 0 names no function"),
    ],
)
def test_malformed_messages_are_named(tokenizer: Any, message: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        encode_chat(tokenizer, [message])


def test_content_in_parts_is_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "天"}, {"type": "text", "text": "下"}]
    one = encode_chat(tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=True)
    assert one == encode_chat(tokenizer, [{"role": "user", "content": "天下"}], add_generation_prompt=True)


def test_the_empty_conversation_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        encode_chat(tokenizer, [])


def test_stop_tokens(tokenizer: Any) -> None:
    assert stop_token_ids(tokenizer) == [TURN_END, EOS]


def test_tokens_added_later_are_seen(tiny_tokenizer_directory: Path) -> None:
    from onecard.model.load import load_tokenizer

    fresh = load_tokenizer(tiny_tokenizer_directory)
    before = encode_prompt(fresh, "<extra>")
    fresh.add_tokens(["<extra>"])
    assert len(before) > 2
    assert encode_prompt(fresh, "<extra>") == [BOS, len(fresh) - 1]


# --- what is learned ----------------------------------------------------------------------------------------------

# A template that shows the reasoning of the last answer alone, as those of reasoning models do.
THINKING = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|/head|>' }}
    {%- if message.role == 'assistant' and not loop.last and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1] }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{%- endif %}
"""


def test_an_answer_marked_so_is_not_learned(tokenizer: Any) -> None:
    marked = [*CHAT[:2], {**CHAT[2], "train": False}, *CHAT[3:]]
    whole, part = encode_chat(tokenizer, CHAT), encode_chat(tokenizer, marked)
    assert part.ids == whole.ids
    assert own(tokenizer, part) == ["合久必分。<|im_end|>"]
    # By hand: the tokens of the two answers with their ends, of which the first falls away.
    first = len(tokenizer.encode("分久必合。\n\nIndeed.", add_special_tokens=False)) + 1
    assert sum(whole.assistant_mask) - sum(part.assistant_mask) == first
    every = encode_chat(tokenizer, [*CHAT[:2], {**CHAT[2], "train": True}, *CHAT[3:]])
    assert every == whole
    none = encode_chat(tokenizer, [*marked[:4], {**CHAT[4], "train": False}])
    assert not any(none.assistant_mask)
    assert none.ids == whole.ids


def test_neighbouring_answers_are_marked_apart(tokenizer: Any) -> None:
    chat = [CHAT[1], {**CHAT[2], "train": False}, CHAT[4]]
    assert own(tokenizer, encode_chat(tokenizer, chat)) == ["合久必分。<|im_end|>"]
    chat = [CHAT[1], CHAT[2], {**CHAT[4], "train": False}]
    assert own(tokenizer, encode_chat(tokenizer, chat)) == ["分久必合。\n\nIndeed.<|im_end|>"]


def test_the_last_answer_alone_or_everything(tokenizer: Any) -> None:
    whole = encode_chat(tokenizer, CHAT)
    last = encode_chat(tokenizer, CHAT, learn="last_answer")
    assert last.ids == whole.ids
    assert own(tokenizer, last) == ["合久必分。<|im_end|>"]
    everything = encode_chat(tokenizer, CHAT, learn="everything")
    assert everything.ids == whole.ids
    assert all(everything.assistant_mask)


def test_reasoning_that_the_template_drops_later_is_learned_with_the_last_answer() -> None:
    tokenizer = another(THINKING, ["<|head|>", "<|/head|>", "<|eot|>"])
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>y</think>d"},
    ]
    with pytest.raises(ConfigError, match="at message 1"):
        encode_chat(tokenizer, chat)
    last = encode_chat(tokenizer, chat, learn="last_answer")
    assert own(tokenizer, last) == ["<think>y</think>d<|eot|>"]
    # The prompt is that of the server: what was thought before is not shown again.
    prompt = encode_chat(tokenizer, chat[:3], add_generation_prompt=True).ids
    assert last.ids[: len(prompt)] == prompt
    assert "x" not in tokenizer.decode(prompt)
    # An answer that is not learned need not keep to its prefix either.
    assert encode_chat(tokenizer, [chat[0], {**chat[1], "train": False}, *chat[2:]]) == last
    assert all(encode_chat(tokenizer, chat, learn="everything").assistant_mask)
