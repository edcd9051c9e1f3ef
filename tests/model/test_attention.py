"""Packed documents are computed as if each were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from onecard.data.packing import IGNORED, PackedRows, gather
from onecard.data.tokens import Encoded, write_store
from onecard.errors import ConfigError
from onecard.model import attention
from onecard.train.objectives import NextToken

VOCABULARY = 50
PAD = 0


def make_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Two layers, grouped-query attention (4 heads, 2 for keys), tied."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        # Large weights: attention must matter for a leak to show.
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).to(dtype)


def documents(lengths: list[int], seed: int = 0) -> list[Encoded]:
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        ids = generator.integers(1, VOCABULARY, length).tolist()
        made.append(Encoded("chats", ids, (generator.random(length) < 0.7).tolist()))
    return made


def packed_rows(folder: Path, texts: list[Encoded], max_length: int = 16) -> PackedRows:
    store = write_store(folder / "store", texts, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)
    return PackedRows(store, max_length)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    made = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_loss_outputs_and_gradients_are_those_of_each_document_alone(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    texts = documents([11, 7, 5, 3, 2, 9, 1])
    rows = packed_rows(tmp_path, texts)
    assert sum(rows.per_source) == 3  # 11 + 5, 9 + 7, 3 + 2 + 1: the last row has padding
    batch = gather(rows, [0, 1, 2], pad_id=PAD)
    model = make_model(dtype)
    model.set_attn_implementation("sdpa")
    alone_loss, alone_hidden = torch.zeros((), dtype=dtype), {}
    for text in texts:
        ids = torch.tensor([text.ids])
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]
        alone_hidden[tuple(text.ids)] = hidden.detach()
        assert text.learned is not None
        for position in range(len(text.ids) - 1):
            if text.learned[position + 1]:
                logits = hidden[position] @ model.lm_head.weight.T
                alone_loss = alone_loss - logits.log_softmax(0)[text.ids[position + 1]]
    alone_loss.backward()
    meant = gradients(model)

    attention.switch(model)
    loss = NextToken().loss(model, batch, scale=1.0, device="cpu", row_tokens=16)
    loss.backward()
    made = gradients(model)
    assert loss.item() == pytest.approx(alone_loss.item(), rel=tolerance)
    for name, gradient in meant.items():
        torch.testing.assert_close(made[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))
    hidden_1ND = model.model(
        input_ids=torch.from_numpy(batch.input_ids)[None],
        position_ids=torch.from_numpy(batch.position_ids)[None],
        use_cache=False,
        cu_seq_lens_q=torch.from_numpy(batch.boundaries),
        max_length_q=16,
    ).last_hidden_state
    edges = sorted(set(batch.boundaries.tolist()))
    seen = 0
    for begin, end in zip(edges, edges[1:]):
        meant_hidden = alone_hidden.get(tuple(batch.input_ids[begin:end].tolist()))
        if meant_hidden is not None:
            seen += 1
            torch.testing.assert_close(hidden_1ND[0, begin:end], meant_hidden, rtol=tolerance, atol=tolerance)
    assert seen == len(texts)


def test_the_gradient_of_the_operator_is_right() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    edges = torch.tensor([0, 4, 5, 9, 9], dtype=torch.int32)
    torch.library.opcheck(
        attention.document_attention,
        (query.float().detach().requires_grad_(), key.float().detach(), value.float().detach(), edges, 0.3),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention.document_attention(q, k, v, edges, 0.3)[0], (query, key, value)
    )


def test_positions_restart_and_nothing_is_predicted_across_a_boundary(tmp_path: Path) -> None:
    texts = [Encoded("chats", [5, 6, 7], [True] * 3), Encoded("chats", [8, 9], [True] * 2)]
    batch = gather(packed_rows(tmp_path, texts, 8), [0], pad_id=PAD, row_count=2)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0] + [0] * 8
    assert batch.labels.tolist() == [6, 7, IGNORED, 9, IGNORED] + [IGNORED] * 11
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2] + list(range(8))
    # Five edges are more than the usual 16 // 8 + 2: room for the most there can be.
    assert batch.boundaries.tolist() == [0, 3, 5, 8] + [16] * 13


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_attention_dropout_is_honoured(tmp_path: Path, probability: float) -> None:
    model = make_model(attention_dropout=probability)
    attention.switch(model)
    model.train()
    batch = gather(packed_rows(tmp_path, documents([9, 7, 12])), [0, 1], pad_id=PAD)
    losses = {
        float(NextToken().loss(model, batch, scale=1.0, device="cpu", row_tokens=16, learn=False)) for _ in range(4)
    }
    assert len(losses) == (1 if probability == 0 else 4)


def test_bf16_autocast_runs_and_is_near(tmp_path: Path) -> None:
    model = make_model()
    attention.switch(model)
    batch = gather(packed_rows(tmp_path, documents([9, 7, 12])), [0, 1], pad_id=PAD)
    plain = NextToken().loss(model, batch, scale=1 / batch.labelled, device="cpu", row_tokens=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = NextToken().loss(model, batch, scale=1 / batch.labelled, device="cpu", row_tokens=16)
    half.backward()
    assert float(half.detach()) == pytest.approx(float(plain.detach()), rel=0.02)
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_sliding_window_shorter_than_a_document_is_refused() -> None:
    query = torch.randn(1, 2, 8, 4)
    edges = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ConfigError, match="sliding window of 4"):
        attention.packed_attention(
            torch.nn.Identity(), query, query, query, None, cu_seq_lens_q=edges, max_length_q=8, sliding_window=4
        )


@pytest.mark.parametrize("extra", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_attention_of_another_kind_is_refused(extra: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 8, 4)
    edges = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ConfigError, match="packed attention does not do yet"):
        attention.packed_attention(
            torch.nn.Identity(), query, query, query, None, cu_seq_lens_q=edges, max_length_q=8, **extra
        )


class _Leaky(torch.nn.Module):
    """Adds the token before to each, whatever document it is of."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, **settings: Any) -> torch.Tensor:
        made = self.inner(hidden, **settings)
        assert isinstance(made, torch.Tensor)
        return made + torch.nn.functional.pad(made, (0, 0, 1, 0))[:, :-1]


def test_switch_refuses_a_model_that_carries_state_across_documents() -> None:
    model = make_model()
    model.model.layers[0] = _Leaky(model.model.layers[0])
    with pytest.raises(ConfigError, match="computes something else"):
        attention.switch(model)


def test_switch_refuses_logits_that_are_more_than_a_product() -> None:
    model = make_model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    with pytest.raises(ConfigError, match="computes something else"):
        attention.switch(model)


def test_switch_takes_learned_positions_and_keeps_the_mode() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.train()
    attention.switch(model)
    assert model.training


def test_another_number_of_documents_keeps_the_shapes(tmp_path: Path) -> None:
    """Fixed shapes are what keeps compiled layers from being made again."""
    rows = packed_rows(tmp_path, documents([16, 9, 7, 3, 3, 3, 3]))
    shapes = {gather(rows, [number], pad_id=PAD, row_count=4).boundaries.shape for number in range(3)}
    assert shapes == {(64 // 8 + 2,)}
    edges = gather(rows, [0], pad_id=PAD, row_count=4).boundaries
    assert edges.tolist() == [0, 16, 32, 48, 64, 64, 64, 64, 64, 64]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of torch reading torch
def test_compiled_layers_give_the_gradients_of_plain_ones_and_are_made_once(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    rows = packed_rows(tmp_path, documents([16, 9, 7, 3, 3, 3, 3, 8, 8, 5, 5]), 16)
    plain, compiled = make_model(num_hidden_layers=1), make_model(num_hidden_layers=1)
    for model in (plain, compiled):
        attention.switch(model)
        model.train()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    for layer in compiled.model.layers:
        layer.compile(dynamic=False, backend=counter)
    frames = []
    for number in range(sum(rows.per_source)):
        batch = gather(rows, [number], pad_id=PAD, row_count=2)
        made = []
        for model in (plain, compiled):
            NextToken().loss(model, batch, scale=1 / batch.labelled, device="cpu", row_tokens=16).backward()
            made.append(gradients(model))
        for name, gradient in made[0].items():
            torch.testing.assert_close(made[1][name], gradient, rtol=1e-6, atol=1e-6)
        frames.append(counter.frame_count)
    assert len(frames) > 2
    assert len(set(frames)) == 1
