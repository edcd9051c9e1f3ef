"""The fixed entries of every tokenizer that onecard trains, how text is split before merging, and the chat template.

These are facts that other modules and other programs build on: the order of the entries is the order of their ids. The
module knows nothing of corpora, of training, or of tokenizers made elsewhere.
"""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
START_OF_TEXT = "<|startoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# Control tokens: they exist in ids only. A text that spells one is not parsed into it, and decoding for a reader
# leaves them out. Id 0 ends documents, id 1 begins every sequence, padding has an entry of its own so that it can never
# be mistaken for the end.
CONTROL_TOKENS = (END_OF_TEXT, START_OF_TEXT, PAD, TURN_START, TURN_END)

# Markup that a model writes inside an answer. One id each, so that it costs one token and is learned quickly; but not
# "special": servers find reasoning and tool calls by looking for these marks in the decoded text, and decoding drops
# special tokens.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

FIXED_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
# After them come the single bytes, then what was learned.
BYTES = 256

# The regular expressions that split text before merging, applied one after another to the pieces of the one before, by
# the name under which llama.cpp has the same split built in (`tokenizer.ggml.pre`). A tokenizer with any other split
# could not be served from GGUF.
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "smollm": (r"\p{N}", _GPT_2),
    "gpt-2": (_GPT_2,),
}

# What becomes of a number, and the split that is taken where only this is asked for: each digit a token, which small
# models count best with; groups of up to three, shorter; or whatever occurs often enough.
DIGITS = {
    "one": ("qwen2", "smollm"),
    "three": ("llama-bpe", "deepseek-v3"),
    "any": ("gpt-2",),
}

# llama.cpp looks a whole piece up before merging under this name, so the tokenizer must do so too.
WHOLE_PIECES_FIRST = frozenset({"llama-bpe"})

# ChatML: one BOS, then `<|im_start|>role\ncontent<|im_end|>\n` for each message. A system message is optional and
# nothing is put in its place. Tools stand in the system turn; calls and their results are marked as JSON between
# <tool_call> and in <tool_response>. The generation marks tell transformers which tokens are the model's own.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' and messages[0].content %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these functions, each described by its JSON Schema:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, answer with its name and arguments as JSON:\\n' }}
    {{- '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if message.reasoning_content %}
                {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
            {%- endif %}
            {%- if message.content %}
                {{- message.content }}
            {%- endif %}
            {%- for call in message.tool_calls or [] %}
                {%- if call.function %}
                    {%- set call = call.function %}
                {%- endif %}
                {%- if message.content or not loop.first %}
                    {{- '\\n' }}
                {%- endif %}
                {{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
