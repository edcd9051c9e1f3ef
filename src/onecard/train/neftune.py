"""Noise on the embeddings while a model learns (NEFTune, Jain et al. 2024), so that it learns less by heart.

In: a model, in place. Its embeddings give each position of a document of L tokens noise between -1 and 1, times
alpha / sqrt(L x width), in training mode only; padding gets none. Packed documents have each their own L. The noise is
drawn once a forward pass, before the layers, so what backward computes again sees the same; from the generator whose
state a checkpoint holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MARK = "embedding_noise_alpha"


def add_noise(model: Any, alpha: float) -> None:
    """Let `model` add the noise from now on, whenever it is in training mode."""
    decoder, embeddings = model.get_decoder(), model.get_input_embeddings()
    lengths: list[Tensor] = []

    def before(_: Any, __: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        lengths[:] = [_lengths(inputs)] if model.training else []

    def noisy(_: Any, __: tuple[Any, ...], made_BTD: Tensor) -> Tensor:
        if not lengths:
            return made_BTD
        length_BT = lengths.pop()
        reach_BT = torch.where(length_BT > 0, alpha / (length_BT.clamp(min=1) * made_BTD.shape[-1]).sqrt(), 0.0)
        noise_BTD = torch.rand(made_BTD.shape, dtype=torch.float32, device=made_BTD.device) * 2 - 1
        return made_BTD + (noise_BTD * reach_BT.unsqueeze(-1)).to(made_BTD.dtype)

    decoder.register_forward_pre_hook(before, with_kwargs=True)
    embeddings.register_forward_hook(noisy)
    setattr(model, _MARK, alpha)


def is_noisy(model: Any) -> bool:
    """Whether `add_noise` was done to a model: training mode then computes what evaluation mode does not."""
    return hasattr(model, _MARK)


def _lengths(inputs: dict[str, Any]) -> Tensor:
    """Of each position (rows x positions, fp32): how long its document is; 0 for padding."""
    ids_BT: Tensor = inputs["input_ids"]
    edges = inputs.get("cu_seq_lens_q")
    if edges is not None:
        places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        document_T = torch.searchsorted(edges[1:], places_T.to(edges.dtype), right=True)
        length_T: Tensor = edges.diff()[document_T].float()
        return length_T.unsqueeze(0)
    mask_BT = inputs.get("attention_mask")
    if mask_BT is None:
        return torch.full(ids_BT.shape, float(ids_BT.shape[1]), device=ids_BT.device)
    length_BT: Tensor = (mask_BT * mask_BT.sum(1, keepdim=True)).float()
    return length_BT
