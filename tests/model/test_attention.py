"""Packed documents are computed as if each were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from families import WINDOW, make_family
from onecard.data.packing import IGNORED, PackedRows, gather
from onecard.data.tokens import Encoded, write_store
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

    assert attention.switch(model)
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
    query, key, value = (torch.randn(1, heads, 9, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    edges = torch.tensor([0, 4, 5, 9, 9], dtype=torch.int32)
    for kind in ((0.3,), (0.3, 2, 1.5)):  # scale, window, cap
        torch.library.opcheck(
            attention.document_attention,
            (query.float().detach().requires_grad_(), key.float().detach(), value.float().detach(), edges, *kind),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
        assert torch.autograd.gradcheck(
            lambda *tensors, kind=kind: attention.document_attention(*tensors, edges, *kind)[0], (query, key, value)
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


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_bf16_autocast_runs_and_is_near(tmp_path: Path, name: str) -> None:
    """Plain, windowed and capped attention."""
    model = make_family(name)
    assert attention.switch(model)
    batch = gather(packed_rows(tmp_path, documents([9, 7, 12])), [0, 1], pad_id=PAD)
    plain = NextToken().loss(model, batch, scale=1 / batch.labelled, device="cpu", row_tokens=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = NextToken().loss(model, batch, scale=1 / batch.labelled, device="cpu", row_tokens=16)
    half.backward()
    assert float(half.detach()) == pytest.approx(float(plain.detach()), rel=0.02)
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float, window: int, cap: float
) -> torch.Tensor:
    """The definition: one matrix of scores over the whole row."""
    groups = query.shape[1] // key.shape[1]
    place = torch.arange(query.shape[2])
    document = torch.bucketize(place, torch.tensor(ends), right=True)
    back = place[:, None] - place
    visible = (document[:, None] == document) & (back >= 0) & ((back < window) if window else torch.tensor(True))
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize("way", ["operator", "by document"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 3, 40, 300])
def test_windows_and_caps_equal_the_definition(window: int, cap: float, way: str) -> None:
    """Documents shorter and longer than windows and blocks; both ways, in value and gradients, in fp64."""
    torch.manual_seed(0)
    ends = [7, 8, 560, 600]
    edges = torch.tensor([0, *ends, 600], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 600, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    if way == "operator":
        made = attention.document_attention(query, key, value, edges, 0.5, window, cap)[0]
    else:
        made = attention._by_document(query, key, value, edges, 0.5, window, cap, 0.0).transpose(1, 2)
    meant = plain_attention(query, key, value, ends, 0.5, window, cap)
    torch.testing.assert_close(made, meant, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(made)
    for mine, exact in zip(*(torch.autograd.grad(output, (query, key, value), grad) for output in (made, meant))):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


def test_a_window_is_used_only_where_a_document_can_be_longer() -> None:
    """Alone it would show in the result: 8 tokens, of which each sees itself and one before it."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind()
    edges = torch.tensor([0, 8], dtype=torch.int32)
    for longest, window in ((8, 2), (2, 0)):
        made, _ = attention.packed_attention(
            torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=edges, max_length_q=longest, sliding_window=2
        )
        meant = plain_attention(query, key, value, [8], 0.5, window, 0.0)
        torch.testing.assert_close(made.transpose(1, 2), meant, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_blocks_of_a_long_document_never_hold_all_scores(cap: float) -> None:
    """1024 tokens with a window of 64: the largest tensor made is below a sixteenth of 1024 x 1024 by head."""
    query, key, value = torch.randn(3, 1, 2, 1024, 4).unbind()
    edges = torch.tensor([0, 1024], dtype=torch.int32)
    shapes = [(b.queries, b.keys) for b in attention.blocks(edges, 64)]
    assert shapes[0] == (slice(0, 32), slice(0, 32))
    assert shapes[-1] == (slice(992, 1024), slice(929, 1024))
    largest = _LargestTensor()
    with largest:
        attention.document_attention(query, key, value, edges, 0.5, 64, cap)
    assert largest.numel <= max(1024 * 2 * 4, 2 * 256 * (256 + 63))


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


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
    assert not attention.switch(model)
    assert model.config._attn_implementation == "sdpa"


class _Squared(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square()


def test_switch_refuses_logits_that_are_not_those_of_the_head() -> None:
    model = make_model()
    model.lm_head = _Squared(32, VOCABULARY, bias=False)
    assert not attention.switch(model)


@pytest.mark.parametrize("mode", [True, False])
def test_switch_draws_no_random_number_and_keeps_the_mode_and_the_windows(mode: bool) -> None:
    model = make_family("gemma2", attention_dropout=0.5).train(mode)
    state = torch.get_rng_state()
    assert attention.switch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training == mode for module in model.modules())
    assert model.config.sliding_window == WINDOW
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [WINDOW, None]


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
