"""Packed documents in each architecture: what one computes is what it computes alone, and nothing of its neighbours."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from families import FAMILIES, STATEFUL, VOCABULARY, WINDOW, make_family, make_stateful
from onecard.model import attention
from onecard.model.load import load_model
from onecard.model.loss import IGNORED, chunked_cross_entropy, head_of, plain_logits_agree

LENGTHS = [9, 1, 17, 4, 24]
EDGES = [0, 9, 10, 27, 31, 55]


def packed(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """The hidden states of documents of LENGTHS in one row."""
    hidden_TD: torch.Tensor = model.get_decoder()(
        input_ids=ids_T[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        use_cache=False,
        cu_seq_lens_q=torch.tensor(EDGES, dtype=torch.int32),
        max_length_q=max(LENGTHS),
    ).last_hidden_state[0]
    return hidden_TD


def some_ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_loss_are_those_of_each_document_alone(name: str) -> None:
    model = make_family(name)
    exact = copy.deepcopy(model).double()
    assert attention.switch(model)
    ids_T = some_ids()
    hidden_TD = packed(model, ids_T)
    head = head_of(model)
    assert head is not None
    for begin, end in zip(EDGES, EDGES[1:]):
        alone_1TD = exact.get_decoder()(input_ids=ids_T[None, begin:end], use_cache=False).last_hidden_state
        torch.testing.assert_close(hidden_TD[begin:end].double(), alone_1TD[0], rtol=1e-5, atol=1e-5)
        labels_T = F.pad(ids_T[begin + 1 : end], (0, 1), value=IGNORED)
        made = chunked_cross_entropy(
            hidden_TD[begin:end], head.weight, labels_T, 1.0, bias=head.bias, softcap=head.softcap
        )
        logits = exact(input_ids=ids_T[None, begin:end], use_cache=False).logits[0]
        meant = F.cross_entropy(logits, labels_T, ignore_index=IGNORED, reduction="sum")
        assert made.item() == pytest.approx(meant.item(), rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_is_bit_for_bit_the_same_beside_others(name: str) -> None:
    """Forward and gradients: the last document changes, the others see nothing of it."""
    model = make_family(name)
    assert attention.switch(model)
    ids_T = some_ids()
    found = []
    for last in (ids_T[31:], ids_T[31:].flip(0)):
        hidden_TD = packed(model, torch.cat([ids_T[:31], last]))[:31]
        model.zero_grad()
        hidden_TD.square().sum().backward()
        layers = [p.grad.clone() for name, p in model.named_parameters() if ".layers.1." in name or ".h.1." in name]
        found.append((hidden_TD.detach(), layers))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1]
    for one, other in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_the_window_of_a_model_is_honoured(name: str) -> None:
    """With a window too wide to matter the same weights compute something else."""
    hidden = []
    for window in (WINDOW, 100):
        model = make_family(name, sliding_window=window)
        assert attention.switch(model)
        hidden.append(packed(model, some_ids()))
    assert not torch.allclose(hidden[0][10 + WINDOW + 1 :], hidden[1][10 + WINDOW + 1 :], atol=1e-2)
    assert torch.allclose(hidden[0][:WINDOW], hidden[1][:WINDOW], atol=1e-6)


def other_model(kind: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config"
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**settings | changes)).eval()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.4}),
        ("Mixtral", {"num_local_experts": 2}),
        ("Phi", {}),  # a bias at the output layer
    ],
)
def test_logits_are_those_of_the_head(kind: str, changes: dict[str, Any]) -> None:
    model = other_model(kind, **changes)
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    assert plain_logits_agree(model)
    head = head_of(model)
    assert head is not None
    ids_1T = torch.randint(3, VOCABULARY, (1, 12))
    labels_T = torch.randint(3, VOCABULARY, (12,))
    hidden_TD = model.get_decoder()(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
    made = chunked_cross_entropy(
        hidden_TD, head.weight, labels_T, 1.0, bias=head.bias, softcap=head.softcap, multiplier=head.multiplier
    )
    meant = F.cross_entropy(model(input_ids=ids_1T, use_cache=False).logits[0], labels_T, reduction="sum")
    assert made.item() == pytest.approx(meant.item(), rel=1e-5)
    assert attention.switch(model)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: other_model("Llama4", head_dim=8), id="no decoder by itself"),
        pytest.param(
            lambda: other_model("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1), id="attention sinks"
        ),
        pytest.param(lambda: other_model("Lfm2", layer_types=["conv", "full_attention"]), id="convolutions"),
        *(pytest.param(partial(make_stateful, name), id=name) for name in STATEFUL),
    ],
)
def test_architectures_that_cannot_keep_documents_apart_are_left_as_they_are(make: Any) -> None:
    model = make()
    own = model.config._attn_implementation
    assert not attention.switch(model)
    assert model.config._attn_implementation == own


def test_gemma_2_is_loaded_and_attends_in_its_own_way_again(tmp_path: Any) -> None:
    """It has no fused kernel for its capped logits: asking for one is an error of transformers."""
    make_family("gemma2").save_pretrained(tmp_path / "gemma2")
    model: Any = load_model(tmp_path / "gemma2")
    ids_1T = some_ids()[None]
    before = model(input_ids=ids_1T).logits
    assert attention.switch(model)
    attention.use_own(model)
    assert torch.equal(model(input_ids=ids_1T).logits, before)
