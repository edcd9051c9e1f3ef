from __future__ import annotations

from typing import Any

import pytest

from onecard.errors import ConfigError
from onecard.plan.job import Job, Memory, Target
from onecard.plan.questions import compute_optimal, largest_model, longest_context
from onecard.plan.shape import shape_of

GB = 10**9
CARD = Target("RTX 3090", "cuda", 10 * GB, (8, 6), {"fp32": 3e13, "bf16": 7e13}, 8e11, 2e10, None, 350.0, False)


def llama(layers: int = 1, width: int = 64) -> Any:
    from transformers import LlamaConfig

    made: Any = LlamaConfig
    return made(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )


# "model-3" has three layers, and is said to have three billion parameters.
NAMES = [f"model-{number}" for number in range(1, 10)]


def by_layers(asked: list[Job]) -> Any:
    """Two GB a layer of weights kept as they are, one in 16 bits."""

    def memory(job: Job) -> Memory:
        asked.append(job)
        needed = job.model.num_hidden_layers * (1 if job.precision == "pure_bf16" else 2) * GB
        return Memory(needed, needed, 0, {})

    return memory


def largest(memory: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "method": "full",
        "context_tokens": 64,
        "names": NAMES,
        "config_of": lambda name: llama(int(name[6:])),
        "parameters_of": lambda name: int(name[6:]) * GB,
    }
    return largest_model(CARD, memory, **settings | changes)


def test_the_largest_model_by_hand() -> None:
    """9.5 GB may be taken: nine layers in 16 bits, four in 32."""
    asked: list[Job] = []
    found = largest(by_layers(asked))
    assert found.value == "model-9"
    assert found.candidate.job.optimizer_states == "8bit" and found.candidate.fits
    exact = largest(by_layers(asked), exact=True)
    assert exact.value == "model-4"
    assert exact.candidate.job.optimizer_states == "fp32"
    assert exact.text == (
        "model-4 (4.00B) fits on RTX 3090 with all weights trained at 64 tokens, full checkpointing, optimizer in "
        "backward; model-5 does not."
    )
    assert len(asked) <= 12


def test_adapters_stand_beside_weights_in_16_bits() -> None:
    found = largest(by_layers([]), method="lora", lora_rank=8)
    assert found.value == "model-9"
    assert (found.candidate.job.method, found.candidate.job.lora_rank) == ("lora", 8)
    assert largest(by_layers([]), method="qlora").candidate.job.precision == "pure_bf16"  # the embeddings


def test_a_larger_model_that_holds_less_is_found() -> None:
    """Eight layers would need 20 GB, nine need 9."""

    def memory(job: Job) -> Memory:
        needed = {8: 20, 7: 11}.get(job.model.num_hidden_layers, job.model.num_hidden_layers) * GB
        return Memory(needed, needed, 0, {})

    assert largest(memory).value == "model-9"


def test_no_model_fits() -> None:
    found = largest(lambda job: Memory(11 * GB, 11 * GB, 0, {}))
    assert (found.value, found.candidate) == (None, None)
    assert found.text.startswith("No named model fits on RTX 3090 with all weights trained")


@pytest.mark.parametrize(("token_bytes", "expected"), [(1_000_000, 9472), (4_750_000, 1792), (30_000_000, 256)])
def test_the_longest_rows_by_hand(token_bytes: int, expected: int) -> None:
    """9.5 GB: at a MB a token 9,500 tokens, 2,000 and 316 at more; lengths go by 256."""
    asked: list[Job] = []

    def memory(job: Job) -> Memory:
        asked.append(job)
        return Memory(job.max_length * token_bytes, job.max_length * token_bytes, 0, {})

    found = longest_context(Job(llama(), 4, 512), CARD, memory)
    assert found.value == expected
    assert found.candidate is not None and found.candidate.job.batch_size == 1
    assert len(asked) <= 4
    assert ("made for 4,096 tokens" in found.text) == (expected > 4096)


def test_rows_whose_memory_grows_faster_than_they_do() -> None:
    """Two hundred bytes for each pair of positions: 6,892 tokens; found to a sixteenth, in a few questions."""
    asked: list[Job] = []

    def memory(job: Job) -> Memory:
        asked.append(job)
        return Memory(200 * job.max_length**2, 200 * job.max_length**2, 0, {})

    found = longest_context(Job(llama(), 4, 512), CARD, memory).value
    assert isinstance(found, int) and 6892 * 15 / 16 - 256 < found <= 6892
    assert len(asked) <= 9


def test_not_even_short_rows_fit() -> None:
    found = longest_context(Job(llama(), 4, 512), CARD, lambda job: Memory(11 * GB, 11 * GB, 0, {}))
    assert (found.value, found.candidate) == (None, None)


def test_the_size_for_tokens_by_hand() -> None:
    """2B tokens: 100M parameters. Half of them see 80 each, for the same computing."""
    found = compute_optimal(CARD, tokens=2e9)
    assert found.best.parameters == 1e8
    assert found.best.loss == pytest.approx(1.69 + 406.4 / 1e8**0.34 + 410.7 / 2e9**0.28)
    half = found.others[1]
    assert (half.parameters, half.tokens, half.tokens_per_parameter) == (5e7, 4e9, 80)
    assert "2B tokens are worth a model of 100M parameters" in found.text
    assert f"{abs(half.loss - found.best.loss):.3f} nats" in found.text


def test_the_size_for_a_time_takes_that_time() -> None:
    hour, day = compute_optimal(CARD, seconds=3600), compute_optimal(CARD, seconds=86400)
    assert hour.best.tokens == pytest.approx(20 * hour.best.parameters)
    assert hour.best.seconds == pytest.approx(3600, rel=0.15)  # sizes come in steps
    # Computing grows with the square of the size.
    assert day.best.parameters / hour.best.parameters == pytest.approx(24**0.5, rel=0.25)


def test_tokens_or_a_time() -> None:
    with pytest.raises(ConfigError):
        compute_optimal(CARD)
    with pytest.raises(ConfigError):
        compute_optimal(CARD, tokens=1, seconds=1)


def test_models_of_other_names_are_told_apart() -> None:
    """Two models in one search have two memories, although their settings are alike."""
    assert shape_of(llama(1)) != shape_of(llama(2))
