"""What the backward pass needs of the forward pass: kept, computed again, kept on the host, or kept in 8 bits.

`Activations(...).apply(model)` decides which layers compute again; `saving()` stands around each forward pass and sees
what is kept. Both work on plain and on compiled layers, and together: what is not computed again is packed. Recomputed
and offloaded runs give the gradients of the plain one; 8 bits do not, by about a percent.
It does not know of optimizers, and nothing of the loss: only what the decoder keeps is packed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils import checkpoint

from onecard import console
from onecard.config import TrainingConfig
from onecard.errors import ConfigError
from onecard.train.compilation import decoder_layers
from onecard.train.offload import CudaMover, HostMemory, Mover
from onecard.train.saved_tensors import EightBitPacker, Packer, SavedTensors

# Operations whose results `selective` keeps: all that cost more to compute again than to keep.
_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
_KEPT_NAMESPACE = "onecard::"


def check(config: TrainingConfig) -> None:
    """ConfigError, naming both, where two settings about activations cannot be combined."""
    packed = [
        f"{name} = {console_value}"
        for name, console_value, chosen in (
            ("activation_offload", "true", config.activation_offload),
            ("activation_compression", "8bit", config.activation_compression != "none"),
        )
        if chosen
    ]
    if config.cuda_graphs and not config.compile:
        raise ConfigError(
            "cuda_graphs = true records compiled layers, and compile = false leaves none.",
            "Turn one of them off or on.",
        )
    if config.cuda_graphs and config.optimizer_in_backward:
        raise ConfigError(
            "cuda_graphs = true keeps every gradient in its place, so optimizer_in_backward = true saves nothing.",
            "Take one of them.",
        )
    if config.cuda_graphs and packed:
        raise ConfigError(
            f"cuda_graphs = true and {packed[0]} do not go together: a recorded layer keeps its memory for itself.",
            "Take one of them.",
        )
    if packed and config.activation_checkpointing == "selective" and not config.compile:
        raise ConfigError(
            f"activation_checkpointing = selective with compile = false leaves nothing for {packed[0]} to pack.",
            "Let layers be compiled (compile = true), or take activation_checkpointing = full or a number.",
        )


class Activations:
    """The chosen way for one model. `mover` replaces the copies between card and host (for tests)."""

    def __init__(
        self,
        *,
        checkpointing: Literal["none", "selective", "full"] | int = "none",
        offload: bool = False,
        compression: Literal["none", "8bit"] = "none",
        mover: Mover | None = None,
    ) -> None:
        self._checkpointing, self._offload, self._compression = checkpointing, offload, compression
        self._mover = mover
        self._decoder: torch.nn.Module | None = None
        self._layers: list[torch.nn.Module] = []
        self._smallest_features = 0
        self._host: HostMemory | None = None
        self.saved: SavedTensors | None = None

    def apply(self, model: torch.nn.Module) -> None:
        """Decide which layers compute again, and how what is kept is packed. Before the layers are compiled."""
        self._layers = decoder_layers(model)
        for index, layer in enumerate(self._layers):
            _recompute(layer, self._function(index))
        self._decoder = model.get_decoder()  # type: ignore[operator]
        self._smallest_features = _smallest_features(model)
        packer: Packer | None = None
        if self._offload:
            if self._mover is None and next(model.parameters()).device.type != "cuda":
                console.note("  activation_offload changes nothing here: on a CPU activations are on the host already")
            else:
                packer = self._host = HostMemory(self._mover or CudaMover())
        if self._compression == "8bit":
            packer = EightBitPacker(packer)
        if packer is not None:
            self.saved = SavedTensors(packer, smallest_values=0, floats_only=self._compression == "8bit")

    def _function(self, index: int) -> Any:
        """What runs layer `index` so that it is computed again, or None."""
        way = self._checkpointing
        if way == "none" or (isinstance(way, int) and index % way):
            return None
        if way == "selective":
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # warns of what no layer does
            return functools.partial(checkpoint.checkpoint, use_reentrant=False, context_fn=_selective_contexts)
        return functools.partial(checkpoint.checkpoint, use_reentrant=False)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the forward pass of each micro-batch that is learned from."""
        if self.saved is None:
            yield
            return
        assert self._decoder is not None, "apply comes first"
        active: list[Any] = []
        before = self._decoder.register_forward_pre_hook(functools.partial(self._enter, active), with_kwargs=True)
        after = self._decoder.register_forward_hook(functools.partial(self._leave, active), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, active: list[Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.saved is not None
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if self._host is not None:
            self._host.begin(len(self._layers))
        self.saved.begin(
            [*module.parameters(), *module.buffers()], smallest_values=ids.numel() * self._smallest_features
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack)
        hooks.__enter__()
        active.append(hooks)

    def _leave(self, active: list[Any], *_: Any) -> None:
        assert self.saved is not None
        if active:
            active.pop().__exit__(None, None, None)
            self.saved.end()


def _recompute(layer: torch.nn.Module, function: Any) -> None:
    """Let transformers' own switch run the forward of a layer through `function`; None: plainly."""
    if function is not None and not hasattr(layer, "gradient_checkpointing"):
        raise ConfigError(
            f"Layers of the kind {type(layer).__name__} cannot be computed again.",
            "Set activation_checkpointing = none.",
        )
    if function is not None:
        layer._gradient_checkpointing_func = function
    if hasattr(layer, "gradient_checkpointing"):
        layer.gradient_checkpointing = function is not None  # type: ignore[assignment]


def _policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> checkpoint.CheckpointPolicy:
    name = operation._schema.name if hasattr(operation, "_schema") else ""
    kept = name in _KEPT or (name.startswith(_KEPT_NAMESPACE) and "backward" not in name)
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _smallest_features(model: torch.nn.Module) -> int:
    """Values a token from which on a tensor is packed: above one number a head (softmax) and one head (positions)."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    width = int(getattr(text, "hidden_size", None) or 128 * heads)
    head_width = int(getattr(text, "head_dim", None) or width // heads)
    return max(heads, head_width) + 1
