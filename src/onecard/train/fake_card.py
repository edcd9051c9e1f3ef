"""What a CUDA card keeps and takes where it differs from a CPU, for steps on tensors without content.

PyTorch's backward pass runs on fake CPU tensors on every machine, on fake CUDA tensors only where a card is. So a step
for a card is traced on fake CPU tensors inside `FakeCard`, which puts the card's operators in the place of the CPU's:
fused attention (kept: query, key, value, output, log-sum-exp; taken in backward: an fp32 sum for the query, and the
keys' and values' gradients for each head where heads share them), dropout that keeps a mask of one byte, sizes of
chunks, and states and activations on the host. Flash and memory-efficient attention are told apart by nothing here.
None of this has been compared with a card yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onecard.model import attention, loss
from onecard.plan.trace import Recorder
from onecard.train import eight_bit, optimizers


@torch.library.custom_op("onecard::card_attention", mutates_args=())
def card_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fused attention of a card, ... x T x D (or T x H x D); there is no kernel behind it, only its shapes."""
    raise NotImplementedError("for tensors without content")


@card_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if query.dim() == 4:  # B H T D, laid out as B T H D
        output = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    else:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("onecard::card_attention_backward", mutates_args=())
def card_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, bias: Tensor | None
) -> list[Tensor]:
    """The gradients of query, key and value; and after them what the kernel takes for itself meanwhile."""
    raise NotImplementedError("for tensors without content")


@card_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, bias: Tensor | None
) -> list[Tensor]:
    made = [torch.empty_like(tensor) for tensor in (query, key, value)]
    made += [query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(logsumexp)]
    if key.numel() < query.numel():
        made += [query.new_empty(query.shape), query.new_empty(query.shape)]
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bias, output, logsumexp = ctx.saved_tensors
    grads = card_attention_backward(grad, query, key, value, output, logsumexp, bias)
    return (*grads[:3], None)


card_attention.register_autograd(_backward, setup_context=_keep)


class _Kept(torch.autograd.Function):
    """Passes a tensor on and keeps it for backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _CardFunctions(TorchFunctionMode):
    """Calls that a card answers with other operators. `keeps_softmax_inputs`: as torch did before 1.11."""

    def __init__(self, *, keeps_softmax_inputs: bool = False) -> None:
        super().__init__()
        self._keeps_softmax_inputs = keeps_softmax_inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is Tensor.backward:
            return self._backward(args[0])
        if func in _EXACT and torch.is_autocast_enabled("cpu"):
            args, kwargs = _widened(args), dict(zip(kwargs, _widened(kwargs.values())))
        if self._keeps_softmax_inputs and func in (torch.softmax, Tensor.softmax, F.softmax):
            args = (_Kept.apply(args[0]), *args[1:])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        """Backward with this mode on, for what is computed again there; PyTorch's own turns it off before it begins."""
        engine: Any = torch.autograd.Variable._execution_engine
        first = torch.ones_like(loss)
        with self:
            engine.run_backward((loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# What autocast computes in fp32 on a card, and in the format of its input on a CPU (as far as models use it).
_EXACT = {
    torch.softmax,
    Tensor.softmax,
    F.softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    F.log_softmax,
    F.layer_norm,
    F.group_norm,
    F.cross_entropy,
    F.nll_loss,
    torch.pow,
    Tensor.pow,
    torch.rsqrt,
    Tensor.rsqrt,
    torch.exp,
    Tensor.exp,
    torch.sum,
    Tensor.sum,
    F.softplus,
}


def _widened(values: Iterable[Any]) -> tuple[Any, ...]:
    low = (torch.float16, torch.bfloat16)
    return tuple(value.float() if isinstance(value, Tensor) and value.dtype in low else value for value in values)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.to(query.dtype)
    output: Tensor = card_attention(query, key, value, attn_mask)[0]
    return output


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn."""
    output: Tensor = card_attention(query, key, value, None)[0]
    return output


def packed_on_card(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """`attention.packed_attention` as it goes on a card; it asks the device, and the device here is a CPU's."""
    if softcap and not dropout:
        return attention.packed_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            cu_seq_lens_q=cu_seq_lens_q,
            max_length_q=max_length_q,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    longest = int(max_length_q)
    window, cap = (sliding_window if sliding_window and sliding_window < longest else 0), softcap or 0.0
    query, key = query.to(value.dtype), key.to(value.dtype)
    made = None
    if not dropout and value.dtype in (torch.float16, torch.bfloat16):
        made = attention._variable_length(query, key, value, cu_seq_lens_q, longest, scale, window)
    if made is None:
        made = attention._by_document(query, key, value, cu_seq_lens_q, scale, window, cap, dropout)
    return made, None


class HostMover:
    """Copies to the host and back: memory of the card is only what comes back."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]:
        """A copy that is not counted."""
        with self._recorder.elsewhere():
            return torch.empty_like(flat), None

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """One that is."""
        return torch.empty_like(host), None

    def wait(self, ticket: Any) -> None:
        """Nothing is on its way."""


@contextmanager
def fake_card(recorder: Recorder, *, keeps_softmax_inputs: bool = False) -> Iterator[None]:
    """Inside, fake CPU tensors are treated as those of a card are."""
    from torch.nn.attention import varlen
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    keep_on_host = optimizers._Unit._keep_on_host

    def keep(unit: Any, key: str, value: Tensor, *, pinned: bool) -> None:
        with recorder.elsewhere():
            keep_on_host(unit, key, value, pinned=False)

    def fetch(unit: Any) -> None:
        if unit._host:
            state = unit.part.state[unit.targets[0]]
            state |= {key: torch.empty_like(value) for key, value in unit._host.items()}

    with ExitStack() as stack:
        for owner, name, value in (
            (loss, "CHUNK_BYTES", dict.fromkeys(("cpu", "cuda"), loss.CHUNK_BYTES["cuda"])),
            (eight_bit, "CHUNK", dict.fromkeys(("cpu", "cuda"), eight_bit.CHUNK["cuda"])),
            (optimizers, "_host_already", lambda _: False),
            (optimizers._Unit, "_keep_on_host", keep),
            (optimizers._Unit, "_fetch", fetch),
            (varlen, "varlen_attn", _varlen),
        ):
            stack.enter_context(replaced(owner, name, value))
        ALL_ATTENTION_FUNCTIONS.register(attention.PACKED, packed_on_card)
        stack.callback(attention.register)
        stack.enter_context(_CardFunctions(keeps_softmax_inputs=keeps_softmax_inputs))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
