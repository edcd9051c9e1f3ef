"""Scores of text: each token once, sums and not means of means, the same for any batch."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from families import make_family
from onecard.data.corpus import Document
from onecard.errors import ArtifactError
from onecard.evaluate import perplexity, scoring
from onecard.evaluate.perplexity import Group, Row, Score, by_language, by_source, score_rows, windows


class UnigramModel(nn.Module):
    """A language model that expects each token with the same fixed probability everywhere, and counts its work."""

    def __init__(self, log_probabilities: list[float], scale: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(log_probabilities), 1)
        self.head = nn.Linear(1, len(log_probabilities), bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(log_probabilities)[:, None])
        self.scale = scale
        self.largest_batch_tokens = 0
        self.largest_logits = 0
        self.head.register_forward_hook(self._watch)

    device = torch.device("cpu")

    def _watch(self, module: nn.Module, inputs: object, logits: torch.Tensor) -> None:
        self.largest_logits = max(self.largest_logits, logits.numel())

    def base_model(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.largest_batch_tokens = max(self.largest_batch_tokens, input_ids.numel())
        return SimpleNamespace(last_hidden_state=torch.ones(*input_ids.shape, 1))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.base_model(input_ids, use_cache).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden) * self.scale)


# Token 0 costs 1 nat, token 1 costs 3 nats; the rest of the probability lies on tokens 2 and 3.
REST = math.log((1 - math.exp(-1) - math.exp(-3)) / 2)
COSTS = [-1.0, -3.0, REST, REST]
ZH, EN = Group("zh", "a"), Group("en", "b")


def score(model: Any, rows: list[Row], window: int = 10, stride: int = 5, batch: int = 8) -> dict[Group, Score]:
    return score_rows(model, rows, window_tokens=window, stride_tokens=stride, batch_windows=batch)


def test_twenty_tokens_are_nineteen_positions_scored_once_each() -> None:
    found = list(windows(20, 10, 5))
    assert found == [(0, 10, 1), (5, 15, 10), (10, 20, 15)]
    scored = [position for window in found for position in range(window.first_scored, window.end)]
    assert scored == list(range(1, 20))


@pytest.mark.parametrize("length", [0, 1, 2, 9, 10, 11, 23, 57])
@pytest.mark.parametrize(("window", "stride"), [(10, 5), (10, 9), (10, 1), (2, 1), (16, 8)])
def test_every_position_is_scored_once_with_enough_context(length: int, window: int, stride: int) -> None:
    found = list(windows(length, window, stride))
    scored = [position for item in found for position in range(item.first_scored, item.end)]
    assert scored == list(range(1, length))
    for item in found:
        assert 0 <= item.start < item.first_scored < item.end <= length
        assert item.end - item.start <= window
        # Enough context: the whole of what stands before, or at least window - stride tokens.
        assert item.start == 0 or item.first_scored - item.start >= window - stride
    for before, after in pairwise(found):
        assert after.first_scored == before.end


def test_the_last_window_reaches_back_for_the_most_context() -> None:
    assert list(windows(13, 10, 5)) == [(0, 10, 1), (3, 13, 10)]


@pytest.mark.parametrize("stride", [0, 10, 11])
def test_a_stride_that_would_leave_tokens_without_context_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="stride"):
        list(windows(20, 10, stride))


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_the_mean_is_weighted_by_tokens_whatever_the_batch(batch: int) -> None:
    # 4 tokens at 1 nat and 60 at 3 nats: (4 + 180) / 64 = 2.875, not (1 + 3) / 2.
    rows = [Row(ZH, [2] + [0] * 4, 4), Row(EN, [2] + [1] * 60, 60)]
    total = by_language(score(UnigramModel(COSTS), rows, batch=batch))
    assert total["all"].tokens == 64
    assert total["all"].loss == pytest.approx(2.875, abs=1e-6)
    assert total["all"].perplexity == pytest.approx(17.725, abs=1e-3)
    assert total["zh"].loss == pytest.approx(1.0, abs=1e-6)
    assert total["en"].loss == pytest.approx(3.0, abs=1e-6)


def test_bits_per_byte_is_nats_over_ln_2_and_bytes() -> None:
    # 16 ln 2 nats are 16 bits; over 8 bytes that is 2 bits a byte.
    assert Score(nats=16 * math.log(2), tokens=5, bytes=8).bits_per_byte == pytest.approx(2.0)


def test_nothing_scored_is_zero_and_not_a_fault() -> None:
    assert Score().loss == Score().bits_per_byte == 0.0
    assert score(UnigramModel(COSTS), [Row(ZH, [2], 0)]) == {ZH: Score(documents=1)}


def test_sums_by_language_and_by_source() -> None:
    groups = {
        Group("zh", "wiki"): Score(1.0, 2, 3, 1),
        Group("en", "wiki"): Score(10.0, 20, 30, 2),
        Group("zh", "law"): Score(100.0, 200, 300, 3),
    }
    assert by_language(groups) == {
        "en": Score(10.0, 20, 30, 2),
        "zh": Score(101.0, 202, 303, 4),
        "all": Score(111.0, 222, 333, 6),
    }
    assert by_source(groups) == {"law": Score(100.0, 200, 300, 3), "wiki": Score(11.0, 22, 33, 3)}


def test_batches_hold_no_more_tokens_than_asked_for_and_logits_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LOGITS_PER_BLOCK", 20)  # five positions of four entries
    model = UnigramModel(COSTS)
    rows = [Row(ZH, [2] + [0] * (1 + i % 30), 1) for i in range(200)]
    total = score(model, rows, window=10, stride=5, batch=3)[ZH]
    assert model.largest_batch_tokens <= 30
    # The look at the output layer sees one short window whole; apart from it a block has 20.
    assert model.largest_logits <= 16 * 4
    assert total.tokens == sum(1 + i % 30 for i in range(200))
    assert total.loss == pytest.approx(1.0, abs=1e-6)


def test_rows_are_read_as_a_stream() -> None:
    seen: list[int] = []

    def rows() -> Any:
        for i in range(5000):
            seen.append(i)
            yield Row(ZH, [2, 0, 0, 0], 3)

    done: list[float] = []
    read_when_first_done: list[int] = []

    def advance(amount: float) -> None:
        done.append(amount)
        read_when_first_done.append(len(seen))

    score_rows(UnigramModel(COSTS), rows(), window_tokens=10, stride_tokens=5, batch_windows=1, advance=advance)
    assert read_when_first_done[0] < 200
    assert sum(done) == pytest.approx(15_000)


def test_logits_that_are_scaled_after_the_output_layer_are_honoured() -> None:
    model = UnigramModel(COSTS, scale=0.5)
    expected = torch.tensor(COSTS).mul(0.5).log_softmax(0)
    total = score(model, [Row(ZH, [2] + [0] * 12 + [1] * 7, 1), Row(ZH, [2, 0], 1)])[ZH]
    assert total.nats == pytest.approx(-(13 * expected[0] + 7 * expected[1]).item(), abs=1e-4)


def test_numbers_that_are_not_finite_are_said() -> None:
    model = UnigramModel([0.0, math.nan, 0.0, 0.0])
    with pytest.raises(ArtifactError, match="not finite"):
        score(model, [Row(ZH, [2, 0, 1], 1)])


@pytest.fixture(scope="module")
def random_model() -> Any:
    """Two Llama layers with random weights that are large enough to tell contexts apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def random_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    lengths = [2, 40, 7, 64, 13, 31, 5, 20, 55, 3]
    rows = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
    return [Row(ZH if i % 2 else EN, ids, 3 * len(ids)) for i, ids in enumerate(rows)]


def naive(model: Any, ids: list[int], window: int, stride: int) -> float:
    """The cost of one document in double precision, one window at a time, from the definition."""
    total = 0.0
    for start, end, first in windows(len(ids), window, stride):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[start:end]]), use_cache=False).logits[0]
        table = logits.log_softmax(-1)
        total -= sum(table[position - start - 1, ids[position]].item() for position in range(first, end))
    return total


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(("window", "stride"), [(64, 32), (16, 8), (10, 3)])
def test_scores_equal_a_plain_computation_in_double_precision(
    random_model: Any, random_rows: list[Row], window: int, stride: int, batch: int
) -> None:
    exact = copy.deepcopy(random_model).double()
    found = score(random_model, random_rows, window, stride, batch)
    for group in (ZH, EN):
        mine = [row for row in random_rows if row.group == group]
        assert found[group].nats == pytest.approx(sum(naive(exact, row.ids, window, stride) for row in mine), rel=1e-5)
        assert found[group].tokens == sum(len(row.ids) - 1 for row in mine)
        assert found[group].bytes == sum(row.bytes for row in mine)


def test_capped_logits_and_windows_in_the_attention_are_honoured(random_rows: list[Row]) -> None:
    """Gemma 2 has both, and no fused attention."""
    model = make_family("gemma2").eval()
    exact = copy.deepcopy(model).double()
    found = score(model, random_rows, 16, 8, 4)
    for group in (ZH, EN):
        mine = [row for row in random_rows if row.group == group]
        assert found[group].nats == pytest.approx(sum(naive(exact, row.ids, 16, 8) for row in mine), rel=1e-5)


def test_documents_are_scored_by_language_with_their_ends(tiny_model_directory: Path) -> None:
    from onecard.model.load import load_model, load_tokenizer
    from onecard.tokenizer.template import encode_document

    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    documents = [
        Document("1", "天下大势，分久必合。", "a", "zh"),
        Document("2", "In the beginning", "b", "en"),
        Document("3", "the earth", "a", "en"),
    ]
    groups = perplexity.score_groups(model, tokenizer, documents, window_tokens=64, stride_tokens=32)
    found = perplexity.by_language(groups)
    assert list(found) == ["en", "zh", "all"]
    assert found["zh"].bytes == 30  # ten characters of three bytes; bos and eos have none
    assert found["zh"].tokens == len(encode_document(tokenizer, "天下大势，分久必合。")) - 1
    assert found["en"].bytes == 25
    ids = encode_document(tokenizer, "天下大势，分久必合。")
    assert ids[-1] == tokenizer.eos_token_id
    assert found["zh"].nats == pytest.approx(naive(model.double(), ids, 64, 32), rel=1e-5)
