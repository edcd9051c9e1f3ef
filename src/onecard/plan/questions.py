"""The questions the other way round: the largest model, the longest rows, and the size that a time is worth.

In: a target and what is fixed. Out: an `Answer`, with the sentence that explains it. Memory is told by a function, as
in a search, and asked a few times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onecard.errors import ConfigError
from onecard.plan import architectures
from onecard.plan.candidates import Candidate, words
from onecard.plan.job import Job, Method, Target
from onecard.plan.search import MARGIN, Asked, MemoryOf
from onecard.plan.shape import shape_of

# The search for the largest model begins where weights and what belongs to them take so much of the memory.
USUAL_SHARE = 0.85
# Of a size that does not fit, so many larger ones are still tried: a small vocabulary can outweigh a few layers.
TRIED_ABOVE = 2
# Lengths are tried in such steps up to the longest, until one needs this share of what it may.
STEP_TOKENS, LONGEST_TOKENS, FULL_SHARE = 256, 1 << 20, 0.97
# Tokens a parameter at which a given amount of computing ends with the lowest loss (Hoffmann et al. 2022), and the
# constants of their formula for the loss of N parameters and D tokens, E + A / N^a + B / D^b, in nats on their text.
TOKENS_PER_PARAMETER = 20.0
_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28


@dataclass(frozen=True)
class Answer:
    """What was found: its name or number, its planned update (None: nothing fits), and a sentence."""

    value: str | int | None
    candidate: Candidate | None
    text: str


@dataclass(frozen=True)
class Size:
    """A model and what training it takes: parameters, tokens, seconds, and the loss that the formula expects."""

    parameters: float
    tokens: float
    seconds: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        """How often each parameter's worth of text is seen."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Optimal:
    """The size for a number of tokens or a time, smaller and larger ones that take the same computing, a sentence."""

    best: Size
    others: tuple[Size, ...]
    text: str


def largest_model(
    target: Target,
    memory: MemoryOf,
    *,
    method: Method,
    context_tokens: int,
    exact: bool = False,
    lora_rank: int = 16,
    names: Sequence[str] | None = None,
    config_of: Callable[[str], Any] = architectures.architecture,
    parameters_of: Callable[[str], int] = architectures.published_parameters,
    margin: float = MARGIN,
) -> Answer:
    """The largest named model of which a row of `context_tokens` fits, with all measures or (`exact`) the exact ones.

    `names` are looked up by `config_of` and `parameters_of`: the built-in architectures, unless others are given.
    """
    asked = Asked(memory, target, margin)
    order = sorted(names or architectures.names(), key=parameters_of)

    def tried(number: int) -> Candidate:
        job = smallest_job(config_of(order[number]), target, method, context_tokens, exact=exact, lora_rank=lora_rank)
        return asked.of(job)

    each = _bytes_a_parameter(target, method, exact=exact)
    low, high = -1, len(order)  # low fits, high does not
    at = max(0, sum(parameters_of(name) * each < USUAL_SHARE * asked.limit_bytes for name in order) - 1)
    step, found = 1, None
    while high - low > 1:
        candidate = tried(at)
        if candidate.fits:
            low, found = at, candidate
        else:
            high = at
        if high == len(order):
            at = min(low + step, high - 1)
        elif low == -1:
            at = max(high - step, 0)
        else:
            at = (low + high) // 2
        step *= 2
    for number in range(high + 1, min(high + 1 + TRIED_ABOVE, len(order))):
        candidate = tried(number)
        if candidate.fits:
            low, found = number, candidate
    how = {"full": "all weights trained", "lora": f"LoRA of rank {lora_rank}", "qlora": f"QLoRA of rank {lora_rank}"}
    if found is None:
        return Answer(
            None, None, f"No named model fits on {target.name} with {how[method]} at {context_tokens:,} tokens."
        )
    name = order[low]
    above = f"; {order[low + 1]} does not" if low + 1 < len(order) else ""
    return Answer(
        name,
        found,
        f"{name} ({parameters_of(name) / 1e9:.2f}B) fits on {target.name} with {how[method]} at {context_tokens:,} "
        f"tokens, {', '.join(words(found.job)) or 'plainly'}{above}.",
    )


def smallest_job(
    config: Any, target: Target, method: Method, context_tokens: int, *, exact: bool, lora_rank: int
) -> Job:
    """The update of one row that holds the least, or the least of those that are exact."""
    job = Job(config, 1, context_tokens, device=target.device, activation_checkpointing="full")
    if "bf16" not in target.flops_per_second or target.flops_per_second["bf16"] < target.flops_per_second["fp32"]:
        job = replace(job, precision="fp32")
    if method != "full":
        half = job.precision == "bf16"  # in QLoRA that of the embeddings
        return replace(job, method=method, lora_rank=lora_rank, precision="pure_bf16" if half else job.precision)
    if exact:
        return replace(job, optimizer_in_backward=True)
    half = job.precision == "bf16"
    return replace(
        job, optimizer_in_backward=True, optimizer_states="8bit", precision="pure_bf16" if half else job.precision
    )


def _bytes_a_parameter(target: Target, method: Method, *, exact: bool) -> float:
    """About what `smallest_job` keeps: weights, and the states of those that are trained."""
    small = 4.0 if target.device == "cpu" else 2.0
    if method == "full":
        return 12.0 if exact else small + 2.06
    return 0.7 if method == "qlora" else small


def longest_context(job: Job, target: Target, memory: MemoryOf, *, margin: float = MARGIN) -> Answer:
    """The longest row of which one fits at a time with the job's settings, in steps of 256, to a sixteenth or 3 %."""
    asked = Asked(memory, target, margin)
    positions = getattr(job.model.get_text_config(), "max_position_embeddings", None)
    needed: dict[int, int] = {}
    low, high, at, found = 0, LONGEST_TOKENS + STEP_TOKENS, 4 * STEP_TOKENS, None
    while high - low > max(STEP_TOKENS, low // 16):
        made = replace(job, batch_size=1, max_length=at, longest_tokens=None, device=target.device)
        candidate = asked.of(made)
        needed[at] = candidate.memory.needed_bytes
        if candidate.fits:
            low, found = at, candidate
        else:
            high = at
        if found is not None and found.memory.needed_bytes > FULL_SHARE * asked.limit_bytes:
            break
        at = min(max(_next_length(needed, asked.limit_bytes, low, high), low + STEP_TOKENS), high - STEP_TOKENS)
    if found is None:
        return Answer(None, None, f"Not even rows of 256 tokens fit on {target.name} with these settings.")
    beyond = ""
    if positions is not None and low > positions:
        beyond = f" The model itself was made for {positions:,} tokens."
    return Answer(low, found, f"Rows of {low:,} tokens fit on {target.name}, one at a time.{beyond}")


def _next_length(needed: dict[int, int], limit: float, low: int, high: int) -> int:
    """Where a straight line through the two answers nearest to the limit meets it; halfway, where that did not help."""
    if len(needed) == 1:
        return 4 * low or STEP_TOKENS
    (length, size), (other, other_size) = sorted(needed.items(), key=lambda pair: abs(pair[1] - limit))[:2]
    if len(needed) > 4 or size == other_size:
        return (low + high) // 2 // STEP_TOKENS * STEP_TOKENS
    meets = length + (limit - size) * (other - length) / (other_size - size)
    return int(meets) // STEP_TOKENS * STEP_TOKENS


def compute_optimal(target: Target, *, tokens: float | None = None, seconds: float | None = None) -> Optimal:
    """The size that `tokens` of text, or `seconds` of this target, are worth: 20 tokens a parameter."""
    if (tokens is None) == (seconds is None):
        raise ConfigError("Tokens or a time decide the size, not both.", "Give one of them.")
    if tokens is not None:
        parameters = tokens / TOKENS_PER_PARAMETER
    else:
        assert seconds is not None
        parameters = _parameters_for(target, seconds)
        tokens = parameters * TOKENS_PER_PARAMETER
    best = _size(target, parameters, tokens)
    # The same computing: parameters x tokens.
    others = tuple(_size(target, parameters * factor, tokens / factor) for factor in (0.25, 0.5, 2.0))
    half = others[1]
    text = (
        f"{best.tokens / 1e9:.3g}B tokens are worth a model of {best.parameters / 1e6:.3g}M parameters "
        f"({TOKENS_PER_PARAMETER:.0f} tokens each, Hoffmann et al. 2022), about {best.seconds / 3600:.3g} hours on "
        f"{target.name}. That is the best loss for the computing, not the best model for its size: "
        f"{half.parameters / 1e6:.3g}M parameters on {half.tokens / 1e9:.3g}B tokens need as much computing, end "
        f"{abs(half.loss - best.loss):.3f} nats {'higher' if half.loss > best.loss else 'lower'} by the same paper's "
        "formula, and are half as large to serve. Text repeated more than about four times counts less."
    )
    return Optimal(best, others, text)


def _size(target: Target, parameters: float, tokens: float) -> Size:
    loss = _E + _A / parameters**_ALPHA + _B / tokens**_BETA
    return Size(parameters, tokens, tokens / _tokens_per_second(target, parameters), loss)


def _parameters_for(target: Target, seconds: float) -> float:
    """The size whose 20 tokens a parameter take so long."""
    low, high = math.log(1e5), math.log(1e12)
    for _ in range(24):
        middle = (low + high) / 2
        parameters = math.exp(middle)
        taken = parameters * TOKENS_PER_PARAMETER / _tokens_per_second(target, parameters)
        low, high = (middle, high) if taken < seconds else (low, middle)
    return math.exp(low)


def _tokens_per_second(target: Target, parameters: float) -> float:
    """Of the preset of about that size; beyond the presets, in proportion."""
    from onecard.model.presets import LARGEST, SMALLEST, by_rule, llama_config
    from onecard.plan.speed import speed

    within = min(max(parameters, SMALLEST), LARGEST)
    shape = by_rule(within, "")
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = llama_config(shape, vocabulary=shape.vocabulary, max_positions=shape.context_tokens, token_ids=ids)
    rows = max(1, (4096 if target.device == "cpu" else 16384) // shape.context_tokens)
    rates = target.flops_per_second
    fast = "bf16" if rates.get("bf16", 0.0) >= rates["fp32"] else "fp32"
    steps = max(1, shape.update_tokens // (rows * shape.context_tokens))
    job = Job(config, rows, shape.context_tokens, steps, precision="bf16" if fast == "bf16" else "fp32")
    made = speed(job, target).tokens_per_second
    return made * shape_of(config).parameters / parameters
