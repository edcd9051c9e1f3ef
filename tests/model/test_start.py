"""The start from token statistics: counts by hand, gradients against autograd, the model is exactly the fitted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onecard.data.tokens import Encoded, write_store
from onecard.model import start
from onecard.model.presets import Preset, llama_config


def test_counts_stay_inside_documents_and_follow_the_weights(tmp_path: Path) -> None:
    documents = [Encoded("a", [1, 2, 2]), Encoded("b", [2, 1]), Encoded("a", [2, 1, 2])]
    store = write_store(tmp_path / "tokens", documents, vocabulary=3, tokenizer_hash="")
    counts = start.bigram_counts(store, [1.0, 0.5], vocabulary=3)
    # a: 1-2, 2-2, 2-1, 1-2; b: 2-1 at half weight; nothing across the ends of documents.
    assert counts.tolist() == [[0, 0, 0], [0, 0, 2], [0, 1.5, 1]]
    assert start.bigram_counts(store, [0.0, 1.0], vocabulary=3).sum() == 1


def test_gradients_are_those_of_autograd_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, epsilon = 50, 8, 1e-5
    counts = torch.randint(1, 5, (vocabulary, vocabulary), generator=generator).double()
    share = counts.sum(1, keepdim=True) / counts.sum()
    target = counts / counts.sum()
    embedding, head = (torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) for _ in range(2))
    plain = [tensor.clone().requires_grad_() for tensor in (embedding, head)]
    normalised = plain[0] * torch.rsqrt(plain[0].pow(2).mean(1, keepdim=True) + epsilon)
    wanted = -(torch.log_softmax(normalised @ plain[1].T, dim=1) * target).sum()
    wanted.backward()
    monkeypatch.setattr(start, "CHUNK_CONTEXTS", 7)
    loss = start._set_gradients(embedding, head, target, share, epsilon)
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for made, exact in zip((embedding, head), plain):
        assert made.grad is not None and exact.grad is not None
        torch.testing.assert_close(made.grad, exact.grad, rtol=1e-10, atol=1e-14)


def test_the_new_model_is_exactly_the_fitted_statistics() -> None:
    from transformers import LlamaForCausalLM

    vocabulary = 40
    following = torch.arange(vocabulary).roll(-3)
    counts = torch.full((vocabulary, vocabulary), 0.01)
    counts[torch.arange(vocabulary), following] = 100.0
    shape = Preset("tiny", layers=2, width=64, heads=1, key_value_heads=1, tied=False)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = llama_config(shape, vocabulary=vocabulary, max_positions=32, token_ids=ids)
    model = LlamaForCausalLM(config).eval()
    fitted = start.fit_bigram(counts, shape.width, seed=0, epsilon=config.rms_norm_eps)
    start.apply_start(model, fitted)
    row = torch.arange(vocabulary)[:20].unsqueeze(0)
    with torch.no_grad():
        logits = model(row, use_cache=False).logits[0]
    normalised = torch.nn.functional.rms_norm(fitted.embedding_VD[row[0]], (shape.width,), eps=config.rms_norm_eps)
    torch.testing.assert_close(logits, normalised @ fitted.head_VD.T, rtol=1e-4, atol=1e-4)
    # It has learned what follows: chance would be ln 40 = 3.7 nats.
    assert torch.nn.functional.cross_entropy(logits, following[row[0]]).item() < 1.0
    again = start.fit_bigram(counts, shape.width, seed=0, epsilon=config.rms_norm_eps)
    assert torch.equal(again.embedding_VD, fitted.embedding_VD)
