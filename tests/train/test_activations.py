"""Recomputed, offloaded and packed activations: the same gradients as the plain run, and fewer bytes kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from onecard.config import PretrainConfig
from onecard.errors import ConfigError
from onecard.model import attention
from onecard.model.loss import chunked_cross_entropy
from onecard.train.activations import Activations, check
from onecard.train.compilation import compile_layers, decoder_layers

TOKENS, VOCABULARY, WIDTH, LAYERS = 512, 128, 128, 3


class Copies:
    """A mover for a machine without a card: copies at once, and takes note of what was asked for."""

    def __init__(self) -> None:
        self.out = self.back = 0
        self.waited: set[int] = set()
        self.tickets = 0

    def to_host(self, flat: Tensor) -> tuple[Tensor, int]:
        self.out += flat.numel() * flat.element_size()
        return flat.clone(), self._ticket()

    def to_device(self, host: Tensor) -> tuple[Tensor, int]:
        self.back += host.numel() * host.element_size()
        return host.clone(), self._ticket()

    def wait(self, ticket: int) -> None:
        self.waited.add(ticket)

    def _ticket(self) -> int:
        self.tickets += 1
        return self.tickets


def llama(*, dropout: float = 0.0, attention_dropout: float = 0.0, adapters: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=attention_dropout,
    )
    model: Any = LlamaForCausalLM(config)
    assert attention.switch(model)
    if dropout:
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(dropout))
    if adapters:
        from peft import LoraConfig, inject_adapter_in_model

        adapter = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
        model = inject_adapter_in_model(adapter, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
    return model.train()


def loss_of(model: Any, activations: Activations | None, *, tokens: int = TOKENS) -> Tensor:
    """Two documents in one row; random ids that are the same at every call."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (tokens + 1,), generator=generator)
    first = tokens // 5
    with activations.saving() if activations is not None else nothing():
        hidden = model.get_decoder()(
            input_ids=ids[None, :-1],
            position_ids=torch.cat([torch.arange(first), torch.arange(tokens - first)])[None],
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, first, tokens], dtype=torch.int32),
            max_length_q=tokens,
        ).last_hidden_state
        return chunked_cross_entropy(hidden[0], model.get_output_embeddings().weight, ids[1:], 1 / tokens)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def gradients(model: Any, activations: Activations | None = None, *, seed: int = 5) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss_of(model, activations).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def relative_errors(made: dict[str, Tensor], meant: dict[str, Tensor]) -> list[float]:
    assert made.keys() == meant.keys()
    return [float((made[name] - meant[name]).norm() / meant[name].norm()) for name in meant]


def prepared(model: Any, **ways: Any) -> Activations:
    made = Activations(**ways)
    made.apply(model)
    return made


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes in what autograd saves inside the context: each storage once, weights left out by who calls."""
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
    total.append(sum(seen.values()))


WAYS: list[dict[str, Any]] = [
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"checkpointing": 2},
    {"offload": True},
    {"offload": True, "checkpointing": 2},
    {"offload": True, "checkpointing": "full"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "form",
    [{}, {"dropout": 0.1}, {"attention_dropout": 0.2}, {"adapters": True}, {"adapters": True, "dropout": 0.1}],
    ids=str,
)
def test_gradients_are_those_of_the_plain_run(way: dict[str, Any], form: dict[str, Any]) -> None:
    plain = gradients(llama(**form))
    model = llama(**form)
    activations = prepared(model, **way, mover=Copies())
    assert max(relative_errors(gradients(model, activations), plain)) < 1e-6
    if form.get("dropout"):
        other = gradients(model, activations, seed=6)
        assert max(relative_errors(other, plain)) > 1e-2  # the masks are random


def compile_without_code(model: Any) -> None:
    """What compiling decides (what is kept, what is computed again), without making machine code: in a second."""
    torch._dynamo.reset()
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of torch reading torch
def test_compiled_layers_take_part() -> None:
    form: dict[str, Any] = {"adapters": True, "dropout": 0.1}
    plain = llama(**form)
    compile_without_code(plain)
    meant = gradients(plain)
    for way in ({"checkpointing": "full"}, {"checkpointing": "selective", "offload": True}):
        model = llama(**form)
        activations = prepared(model, **way, mover=Copies())
        compile_without_code(model)
        assert max(relative_errors(gradients(model, activations), meant)) < 1e-6, way
        if activations.saved is not None:
            assert activations.saved.packed_bytes > TOKENS * 4 * WIDTH * 4  # more than the inputs of layers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_compiled_to_machine_code_take_part() -> None:
    torch._dynamo.reset()
    meant = gradients(llama())
    model = llama()
    activations = prepared(model, checkpointing="selective", offload=True, mover=Copies())
    assert compile_layers(model, "cpu")
    # The compiler sums in another order, so the bound is a little wider than between two runs of one kind.
    assert max(relative_errors(gradients(model, activations), meant)) < 5e-6
    assert activations.saved is not None
    assert activations.saved.packed_bytes > TOKENS * 4 * WIDTH * LAYERS * 6


def test_every_adapter_over_frozen_weights_learns_after_an_evaluation() -> None:
    """B begins at zero: after one step each has moved, though nothing that enters the layers has a gradient."""
    model = llama(adapters=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    activations = prepared(model, checkpointing="full")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.eval()
    with torch.no_grad():
        before = loss_of(model, activations)
    model.train()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    gradients(model, activations)
    optimizer.step()
    moved = {name: bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name}
    assert len(moved) == 2 * LAYERS and all(moved.values())
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    model.eval()
    with torch.no_grad():
        assert float(loss_of(model, activations)) < float(before)


def test_what_is_kept_shrinks_as_promised() -> None:
    """Bytes a token of fp32: a layer computed again keeps its input; by operation, the results of its products."""
    kept = {}
    for name, way in {"none": "none", "full": "full", "every second": 2}.items():
        model = llama()
        prepared(model, checkpointing=way)
        with kept_bytes() as total:
            loss_of(model, None)
        kept[name] = total[0] / TOKENS
    weights = sum(p.nbytes for p in llama().parameters()) / TOKENS
    ends = 4 * (4 * WIDTH) + weights  # embedding, last norm, gradient of the loss, and weights seen on the way
    assert kept["full"] < LAYERS * 4 * WIDTH + ends
    layer = (kept["none"] - kept["full"]) / LAYERS
    assert layer > 4 * WIDTH * 12  # two norms, q, k, v, attention, gate, up and their product
    assert kept["every second"] == pytest.approx(kept["none"] - 2 * layer, rel=0.02)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of torch reading torch
def test_selective_keeps_products_and_attention_of_a_compiled_layer() -> None:
    kept = {}
    for way in ("none", "selective"):
        model = llama()
        prepared(model, checkpointing=way)
        compile_without_code(model)
        gradients(model)
        with kept_bytes() as total:
            loss_of(model, None)
        kept[way] = (total[0] - sum(p.nbytes for p in model.parameters() if p.ndim == 2)) / TOKENS / LAYERS
    # Its input (1), q (1), k and v (1/2 each), attention (1), o (1), gate and up (2 each); at the ends of the model the
    # last norm (2) and the gradient of the loss (1), a third of which falls on each layer; and a few numbers a head.
    assert kept["selective"] == pytest.approx(4 * WIDTH * 10, rel=0.06)
    # Beside them the plain one keeps two normed inputs (1 each) and the product of gate and up (2).
    assert kept["none"] - kept["selective"] >= 4 * WIDTH * 3


def test_eight_bits_cost_little_exactness_and_a_quarter_of_the_bytes() -> None:
    plain = gradients(llama())
    model = llama()
    activations = prepared(model, compression="8bit")
    made = gradients(model, activations)
    errors = relative_errors(made, plain)
    assert 1e-4 < max(errors) < 0.05
    norm = sum(float(plain[name].norm()) ** 2 for name in plain) ** 0.5
    whole = sum(float((made[name] - plain[name]).norm()) ** 2 for name in plain) ** 0.5 / norm
    assert whole < 0.01
    # The forward pass is not touched.
    assert torch.equal(loss_of(model, activations), loss_of(llama(), None))


def test_eight_bits_of_offloaded_inputs_of_recomputed_layers() -> None:
    plain = gradients(llama())
    model, copies = llama(), Copies()
    activations = prepared(model, checkpointing="full", offload=True, compression="8bit", mover=copies)
    errors = relative_errors(gradients(model, activations), plain)
    assert 0 < max(errors) < 0.05
    # The input of each layer, the embeddings' sum at the last norm twice: a byte a value.
    assert LAYERS * TOKENS * WIDTH <= copies.out <= (LAYERS + 3) * TOKENS * WIDTH


def test_offload_brings_everything_back_once_and_waits_for_every_copy() -> None:
    model, copies = llama(), Copies()
    activations = prepared(model, offload=True, mover=copies)
    gradients(model, activations)
    first = copies.out
    assert activations.saved is not None
    assert first == activations.saved.packed_bytes > 0
    assert copies.back == 0  # the first window is larger than all of this model: nothing had to leave
    gradients(model, activations)
    # From then on a window is a layer's worth: all but the last of it went out and came back, once.
    assert copies.out == 2 * first
    assert 0.5 * first < copies.back < first
    assert len(copies.waited) >= copies.tickets - first / LAYERS / (TOKENS * WIDTH)


def test_a_mover_is_not_needed_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    activations = prepared(llama(), offload=True)
    assert "on the host already" in capsys.readouterr().err
    assert activations.saved is None


def test_only_the_decoder_is_packed() -> None:
    """What the loss keeps are gradients, and an error inside the decoder leaves no hooks behind."""
    model = llama()
    activations = prepared(model, compression="8bit")
    with activations.saving():
        outside = torch.rand(TOKENS, WIDTH, requires_grad=True)
        (outside * outside).sum().backward()
        assert torch.equal(outside.grad, 2 * outside)  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            model.get_decoder()(input_ids=torch.full((1, 8), VOCABULARY))
        assert torch.equal(outside.grad, 2 * outside)  # type: ignore[arg-type]
        other = torch.rand(TOKENS, WIDTH, requires_grad=True)
        (other * other).sum().backward()
        assert torch.equal(other.grad, 2 * other)  # type: ignore[arg-type]


def settings(**changes: Any) -> PretrainConfig:
    return PretrainConfig(size="4M", **changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cuda_graphs": True, "compile": False}, ("cuda_graphs", "compile")),
        ({"cuda_graphs": True, "activation_offload": True}, ("cuda_graphs", "activation_offload")),
        ({"cuda_graphs": True, "activation_compression": "8bit"}, ("cuda_graphs", "activation_compression")),
        ({"cuda_graphs": True, "optimizer_in_backward": True}, ("cuda_graphs", "optimizer_in_backward")),
        (
            {"activation_checkpointing": "selective", "activation_compression": "8bit", "compile": False},
            ("activation_checkpointing = selective", "activation_compression"),
        ),
    ],
)
def test_settings_that_exclude_each_other_are_named(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        check(settings(**changes))
    assert all(name in raised.value.what for name in names)


def test_settings_that_combine_are_let_through() -> None:
    check(settings(activation_checkpointing="selective", activation_compression="8bit", activation_offload=True))
    check(settings(activation_checkpointing=3, activation_compression="8bit", compile=False))
    check(settings(cuda_graphs=True, activation_checkpointing="full"))
