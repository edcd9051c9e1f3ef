"""Many requests at once: each gets what it would get alone, and slots come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard.errors import ConfigError
from onecard.model.load import load_model, load_tokenizer
from onecard.serve.engine import Engine
from onecard.serve.opening import context_length
from onecard.serve.requests import (
    EngineClosedError,
    FinishEvent,
    GenerationParameters,
    Handle,
    PromptRefusedError,
    QueueFullError,
    TokenEvent,
)
from onecard.serve.sampling import SamplingParameters, sampling_defaults

GREEDY = SamplingParameters(temperature=0)


class ScriptedModel:
    """Says the given ids one after another; `gate` holds every step until it is opened.

    It counts from the end of the last prompt: requests at the same time must have prompts of the same length.
    """

    def __init__(self, script: list[int], vocabulary: int, *, rows: int | None = None) -> None:
        self.script, self.vocabulary = script, rows or vocabulary
        self.device, self.dtype = torch.device("cpu"), torch.float32
        text_config = SimpleNamespace(_attn_implementation="sdpa", max_position_embeddings=64)
        self.config = SimpleNamespace(get_text_config=lambda: text_config)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.gate = threading.Event()
        self.gate.set()
        self._prompt = 0

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.zeros(self.vocabulary, 1))

    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> None:
        """For its signature only."""

    def __call__(self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        self.gate.wait(10)
        if input_ids.shape[1] > 1 or position_ids[0, 0] == 0:  # a piece of a prompt (of more than one token)
            self._prompt = int(position_ids[0, -1]) + 1
        logits = torch.zeros(input_ids.shape[0], 1, self.vocabulary)
        for row in range(input_ids.shape[0]):
            logits[row, 0, self.script[(int(position_ids[row, -1]) - self._prompt + 1) % len(self.script)]] = 9.0
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_directory: Path) -> Any:
    return load_tokenizer(tiny_model_directory)


@pytest.fixture(scope="module")
def model(tiny_model_directory: Path) -> Any:
    """The tiny model with larger weights, so that likelihoods differ clearly and answers vary."""
    torch.set_num_threads(1)
    made = load_model(tiny_model_directory)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    return made


@pytest.fixture
def start(tokenizer: Any) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def begin(model: Any, slots: int = 4, length: int = 64, queue: int = 64) -> Engine:
        made.append(Engine(model, tokenizer, slots, length, queue))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def prompts_of(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(10, 380, (length,), generator=generator).tolist() for length in lengths]


def said(handle: Handle) -> list[int]:
    return [event.token_id for event in handle if isinstance(event, TokenEvent)]


def finish(handle: Handle) -> FinishEvent:
    event = list(handle)[-1]
    assert isinstance(event, FinishEvent)
    return event


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers itself generates, greedily."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return list(answer[0, len(prompt) :].tolist())


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


def test_sixteen_prompts_at_once_are_as_one_at_a_time(model: Any, start: Callable[..., Engine]) -> None:
    engine = start(model, slots=5, length=256)
    prompts = [*prompts_of(15), list(range(10, 210))]
    wanted = [alone(model, prompt, 10) for prompt in prompts]
    assert len({tuple(answer) for answer in wanted}) > 10
    parameters = GenerationParameters(max_tokens=10, sampling=GREEDY, ignore_eos=True)
    handles = [engine.submit(prompt, parameters) for prompt in prompts]
    assert [said(handle) for handle in handles] == wanted
    wait_until(lambda: engine.active == engine.waiting == 0)


def test_a_long_prompt_in_chunks_and_a_growing_cache(
    model: Any, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onecard.serve.engine.PREFILL_CHUNK_TOKENS", 16)
    monkeypatch.setattr("onecard.serve.cache._FIRST_CAPACITY", 8)
    engine = start(model, slots=2, length=256)
    prompts = [list(range(20, 130)), list(range(100, 20, -1))]
    parameters = GenerationParameters(max_tokens=6, sampling=GREEDY, ignore_eos=True)
    handles = [engine.submit(prompt, parameters) for prompt in prompts]
    assert [said(handle) for handle in handles] == [alone(model, prompt, 6) for prompt in prompts]


def test_models_with_windows_of_attention(start: Callable[..., Engine]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    small = MistralForCausalLM(
        MistralConfig(
            vocab_size=384, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8, max_position_embeddings=64, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    engine = start(small)
    prompts = prompts_of(4, longest=30)
    parameters = GenerationParameters(max_tokens=8, sampling=GREEDY, ignore_eos=True)
    handles = [engine.submit(prompt, parameters) for prompt in prompts]
    answers = [said(handle) for handle in handles]
    for prompt, answer in zip(prompts, answers):
        ids = list(prompt)
        for token in answer:
            with torch.inference_mode():
                assert token == int(small(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)


def test_layers_that_the_cache_cannot_hold_are_refused(model: Any, tokenizer: Any) -> None:
    strange = SimpleNamespace(_attn_implementation="sdpa", layer_types=["full_attention", "linear_attention"])
    scripted = ScriptedModel([5], 384)
    scripted.config = SimpleNamespace(get_text_config=lambda: strange)
    with pytest.raises(ConfigError, match="linear_attention"):
        Engine(scripted, tokenizer, 1, 8)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_answer_beside_any_neighbours(model: Any, start: Callable[..., Engine]) -> None:
    engine = start(model, slots=4, length=128)
    seeded = GenerationParameters(max_tokens=12, sampling=SamplingParameters(seed=11), ignore_eos=True)
    other = GenerationParameters(max_tokens=20, ignore_eos=True)
    prompt = [20, 30, 40]
    lonely = said(engine.submit(prompt, seeded))
    neighbours = [engine.submit(ids, other) for ids in prompts_of(6)]
    crowded = [said(engine.submit(prompt, seeded)) for _ in range(2)]
    assert crowded == [lonely, lonely]
    for neighbour in neighbours:
        finish(neighbour)


def test_a_client_that_leaves_frees_its_slot(model: Any, start: Callable[..., Engine]) -> None:
    engine = start(model, slots=1, length=256)
    endless = GenerationParameters(ignore_eos=True)
    leaving, queued = engine.submit([20], endless), engine.submit([21], endless)
    events = iter(leaving)
    next(events)
    queued.cancel()
    leaving.cancel()
    last = list(events)[-1]
    assert isinstance(last, FinishEvent)
    assert last.reason == "abort"
    assert last.completion_tokens < 200
    assert finish(queued).reason == "abort"
    after = engine.submit([30, 31], GenerationParameters(max_tokens=5, sampling=GREEDY, ignore_eos=True))
    assert said(after) == alone(model, [30, 31], 5)


def test_rows_stay_right_when_the_middle_one_leaves(model: Any, start: Callable[..., Engine]) -> None:
    engine = start(model, slots=4, length=128)
    prompts = prompts_of(4)
    long = GenerationParameters(max_tokens=30, sampling=GREEDY, ignore_eos=True)
    short = GenerationParameters(max_tokens=3, sampling=GREEDY, ignore_eos=True)
    handles = [engine.submit(prompt, short if i == 1 else long) for i, prompt in enumerate(prompts)]
    for i, (prompt, handle) in enumerate(zip(prompts, handles)):
        assert said(handle) == alone(model, prompt, 3 if i == 1 else 30)


def test_a_prompt_that_gives_nan_ends_alone_and_leaves_no_trace(
    tiny_model_directory: Path, start: Callable[..., Engine]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(tiny_model_directory)
    config.tie_word_embeddings = False
    damaged = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        damaged.model.embed_tokens.weight[50] = float("nan")
    engine = start(damaged, slots=2, length=64)
    parameters = GenerationParameters(max_tokens=8, sampling=GREEDY, ignore_eos=True)
    neighbour = engine.submit([30, 31, 32], parameters)
    broken = finish(engine.submit([30] * 20 + [50], parameters))
    assert (broken.reason, broken.completion_tokens) == ("error", 0)
    assert "NaN" in broken.error
    wanted = alone(damaged, [30, 31, 32], 8)
    assert said(neighbour) == wanted
    # Both slots are used again: what the broken request stored must not reach its successors.
    again = [engine.submit([30, 31, 32], parameters) for _ in range(2)]
    assert [said(handle) for handle in again] == [wanted, wanted]


def test_a_model_that_raises_ends_the_requests_and_not_the_engine(start: Callable[..., Engine]) -> None:
    scripted = ScriptedModel([40], 384)
    engine = start(scripted)
    scripted.script = []  # a division by zero inside
    assert finish(engine.submit([20])).reason == "error"
    scripted.script = [41]
    assert said(engine.submit([20], GenerationParameters(max_tokens=2, sampling=GREEDY))) == [41, 41]


def test_padded_rows_are_never_sampled(tokenizer: Any, start: Callable[..., Engine]) -> None:
    size = len(tokenizer)
    engine = start(ScriptedModel([size + 3], size, rows=size + 16))
    found = said(engine.submit([20], GenerationParameters(max_tokens=40, sampling=SamplingParameters(seed=0))))
    assert len(found) > 5
    assert max(found) < size
    with pytest.raises(PromptRefusedError, match=f"{size + 3}"):
        engine.submit([size + 3])


def test_every_end_of_turn_token_stops_and_is_not_counted(tokenizer: Any, start: Callable[..., Engine]) -> None:
    for name in ("<|im_end|>", "<|endoftext|>"):
        stop = tokenizer.convert_tokens_to_ids(name)
        word = tokenizer.encode("a", add_special_tokens=False)[0]
        last = finish(start(ScriptedModel([word, word, stop], 384)).submit([20], GenerationParameters(sampling=GREEDY)))
        assert (last.reason, last.completion_tokens) == ("stop", 2)


def test_a_stop_string_ends_at_once_and_a_limit_cuts_a_character(tokenizer: Any, start: Callable[..., Engine]) -> None:
    ids = tokenizer.encode("Hello World Foo", add_special_tokens=False)
    engine = start(ScriptedModel(ids, 384))
    stopped = list(engine.submit([20], GenerationParameters(sampling=GREEDY, stop=("Wor", "zzz"))))
    assert "".join(event.text for event in stopped) == "Hello "
    assert stopped[-1].reason == "stop"  # type: ignore[union-attr]
    assert len(stopped) - 1 < len(ids)

    from onecard.serve.detokenize import _byte_alphabet

    letters = {byte: character for character, byte in _byte_alphabet().items()}
    pieces = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in "👍".encode()]
    cut = list(start(ScriptedModel(pieces, 384)).submit([20], GenerationParameters(max_tokens=3, sampling=GREEDY)))
    assert [event.text for event in cut] == ["", "", "", "\ufffd"]
    assert cut[-1].reason == "length"  # type: ignore[union-attr]


def test_what_does_not_fit_is_refused_with_the_numbers(start: Callable[..., Engine]) -> None:
    engine = start(ScriptedModel([40], 384), length=64)
    with pytest.raises(PromptRefusedError, match="64 tokens; the context holds 64"):
        engine.submit([20] * 64)
    with pytest.raises(PromptRefusedError, match="60 tokens and max_tokens is 5: together 65"):
        engine.submit([20] * 60, GenerationParameters(max_tokens=5))
    with pytest.raises(PromptRefusedError, match="empty"):
        engine.submit([])
    assert finish(engine.submit([20] * 60, GenerationParameters(sampling=GREEDY))).completion_tokens == 4


def test_a_full_queue_and_a_closed_engine_refuse(start: Callable[..., Engine]) -> None:
    scripted = ScriptedModel([40], 384)
    scripted.gate.clear()
    engine = start(scripted, slots=1, queue=1)
    waiting = [engine.submit([20]), engine.submit([21])]
    with pytest.raises(QueueFullError):
        engine.submit([22])
    scripted.gate.set()
    for handle in waiting:
        finish(handle)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit([20])


def test_closing_ends_what_runs_and_what_waits(start: Callable[..., Engine]) -> None:
    scripted = ScriptedModel([40], 384)
    scripted.gate.clear()
    engine = start(scripted, slots=1)
    handles = [engine.submit([20]) for _ in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    scripted.gate.set()
    assert {finish(handle).reason for handle in handles} <= {"abort", "length"}
    closing.join(5)
    assert not closing.is_alive()


def test_choices_that_depend_on_the_model(model: Any) -> None:
    assert context_length(model.config, "auto") == 256
    assert context_length(model.config, 100) == 100
    with pytest.raises(ConfigError, match="256"):
        context_length(model.config, 300)
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_k=20, top_p=None)
    chosen = sampling_defaults(SimpleNamespace(generation_config=config))  # type: ignore[arg-type]
    assert chosen == SamplingParameters(temperature=0.6, top_k=20)
    config.do_sample = False
    assert sampling_defaults(SimpleNamespace(generation_config=config)).is_greedy  # type: ignore[arg-type]
