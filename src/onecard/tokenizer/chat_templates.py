"""Chat templates for base models that come without one, written from the formats that their makers published.

A name, the template (Jinja), and the control tokens that it writes. Each adds only to what it wrote before, so that the
answers of a conversation can be masked (template.py finds the mask, and refuses a template that does not keep to its
own prefix). A system message goes where the format has a place for it, else in front of the first question. Tools are
described by ChatML alone. The module knows no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.tokenizer.special import CHAT_TEMPLATE, TURN_END, TURN_START


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, the control tokens it writes, and the one of them that ends an answer ("": the EOS)."""

    template: str
    control_tokens: tuple[str, ...]
    turn_end: str


# One turn after another, each between a header and an end.
_TURNS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- 'BEFORE' + message.role + 'HEAD' + (message.content or '') | trim + 'AFTER' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'BEFOREassistantHEAD' }}
{%- endif %}
"""


def _turns(before: str, head: str, after: str) -> str:
    return _TURNS.replace("BEFORE", before).replace("HEAD", head).replace("AFTER", after)


# Formats that know two sides only: the system message stands before the first question, with an empty line between.
_TWO_SIDES = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system = (messages[0].content or '') | trim + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('this format has user and assistant in turn, and one system message before them') }}
    {%- endif %}
    {%- set content = (message.content or '') | trim %}
    {%- if message.role == 'user' %}
        {{- 'ASK' + (system if loop.first else '') + content + 'ASKED' }}
    {%- else %}
        {{- 'ANSWER' + content + 'ANSWERED' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ANSWER' }}
{%- endif %}
"""


def _two_sides(ask: str, asked: str, answer: str, answered: str) -> str:
    made = _TWO_SIDES.replace("'ANSWERED'", answered).replace("'ASKED'", f"'{asked}'")
    return made.replace("'ANSWER'", f"'{answer}'").replace("'ASK'", f"'{ask}'")


CHAT_FORMATS: dict[str, ChatFormat] = {
    "chatml": ChatFormat(CHAT_TEMPLATE, (TURN_START, TURN_END), TURN_END),
    # ChatML without a BOS, which these models do not have.
    "qwen": ChatFormat(CHAT_TEMPLATE.replace("{{- bos_token }}\n", "", 1), (TURN_START, TURN_END), TURN_END),
    "llama-3": ChatFormat(
        _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>"),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "phi-3": ChatFormat(
        _turns("<|", "|>\\n", "<|end|>\\n").replace("{{- bos_token }}\n", "", 1),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
    "gemma": ChatFormat(
        _two_sides("<start_of_turn>user\\n", "<end_of_turn>\\n", "<start_of_turn>model\\n", "'<end_of_turn>\\n'"),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "mistral": ChatFormat(_two_sides("[INST]", "[/INST]", "", "eos_token"), ("[INST]", "[/INST]"), ""),
    "deepseek": ChatFormat(
        """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content or '' }}
    {%- elif message.role == 'user' %}
        {{- '<｜User｜>' + (message.content or '') }}
    {%- else %}
        {{- '<｜Assistant｜>' + (message.content or '') + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' }}
{%- endif %}
""",
        ("<｜User｜>", "<｜Assistant｜>"),
        "",
    ),
}
