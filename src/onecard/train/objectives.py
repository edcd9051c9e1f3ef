"""What is learned: an objective turns a micro-batch into a loss; the loop does the rest."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onecard.data.packing import RowBatch
from onecard.model.attention import PACKED
from onecard.model.loss import IGNORED, chunked_cross_entropy, head_of, plain_logits_agree
from onecard.train.compilation import uncompiled

# Padded batches are cut to a multiple of this, so that there are few shapes.
WIDTH_STEP = 64


class Objective:
    """What an update learns from its rows, as a mean over what it counts in all of them."""

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`scale` x the sum of losses of a micro-batch, ready for backward."""
        raise NotImplementedError

    def count(self, batch: RowBatch) -> int:
        """What the mean is taken over: labelled tokens where nothing else is said."""
        return batch.labelled

    def begin(self, model: torch.nn.Module, batches: Iterable[RowBatch], *, device: str, row_tokens: int) -> None:
        """Before the losses of an update (or an evaluation): what has to be known of all its micro-batches at once."""

    def measures(self) -> dict[str, float]:
        """What there is to tell beside the loss of the batches since the last call, by name."""
        return {}


class NextToken(Objective):
    """Cross-entropy of each labelled next token (pretraining, and fine-tuning with labels on answers).

    Packed: the model attends through `attention.PACKED`, rows hold any documents. Padded: rows of one document each
    (`PaddedRows`) and the model's own attention; for models that `attention.switch` leaves as they are.
    """

    padded = False
    # Whether `head_of` gives the logits of the model; found out at the first padded batch (packing is proof of it).
    _head_known: bool | None = None

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`row_tokens` bounds the length of a document (constant, for compiled layers); without `learn` no gradient."""
        causal: Any = model  # transformers' types do not know its parts
        if self.padded:
            inputs, labels_N = _padded(batch, row_tokens, device)
            if self._head_known is None:
                self._head_known = _head_is_known(causal)
            if not self._head_known:
                return _loss_of_logits(causal, inputs, labels_N, scale, learn=learn)
        else:
            assert causal.config._attn_implementation == PACKED, "attention.switch comes before packed rows"
            inputs, labels_N = packed_inputs(batch, row_tokens, device)
        decoder = causal.get_decoder()
        hidden_ND = decoder(**accepted(decoder, inputs)).last_hidden_state.flatten(0, 1)
        head = head_of(causal)
        assert head is not None, "proven before"
        if not learn:
            hidden_ND, head = hidden_ND.detach(), head._replace(weight=head.weight.detach(), bias=_detached(head.bias))
        return chunked_cross_entropy(
            hidden_ND,
            head.weight,
            labels_N,
            scale,
            bias=head.bias,
            softcap=head.softcap,
            multiplier=head.multiplier,
        )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def packed_inputs(batch: RowBatch, row_tokens: int, device: str) -> tuple[dict[str, Any], Tensor]:
    """All rows as one, with the boundaries of the documents; and the labels."""
    inputs = {
        "input_ids": torch.from_numpy(batch.input_ids).to(device, non_blocking=True).unsqueeze(0),
        "position_ids": torch.from_numpy(batch.position_ids).to(device, non_blocking=True).unsqueeze(0),
        "use_cache": False,
        "cu_seq_lens_q": torch.from_numpy(batch.boundaries).to(device, non_blocking=True),
        "max_length_q": row_tokens,
    }
    return inputs, torch.from_numpy(batch.labels).to(device, non_blocking=True)


def _padded(batch: RowBatch, row_tokens: int, device: str) -> tuple[dict[str, Any], Tensor]:
    """Rows that hold a document, padded on the right to the longest of them (to a multiple of WIDTH_STEP); labels.

    Rows without any token are left out: nothing could be attended there.
    """
    lengths_B = torch.from_numpy(batch.row_lengths)
    used_B = lengths_B > 0
    width = min(row_tokens, -(-int(lengths_B.max()) // WIDTH_STEP) * WIDTH_STEP)
    ids_BT, labels_BT = (
        torch.from_numpy(values).view(-1, row_tokens)[used_B, :width] for values in (batch.input_ids, batch.labels)
    )
    positions_T = torch.arange(width)
    inputs = {
        "input_ids": ids_BT.to(device, non_blocking=True),
        "position_ids": positions_T.expand_as(ids_BT).to(device, non_blocking=True),
        "attention_mask": (positions_T < lengths_B[used_B, None]).long().to(device, non_blocking=True),
        "use_cache": False,
    }
    return inputs, labels_BT.flatten().to(device, non_blocking=True)


def accepted(module: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that a model has a name for: those that carry state from token to token know no positions."""
    known = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in known}


def _head_is_known(model: Any) -> bool:
    """Whether the loss can be made from hidden states; tried without chance, compilation or autocast."""
    was_training, device = model.training, model.device.type
    model.eval()
    try:
        with uncompiled(), torch.autocast(device, enabled=False):
            return plain_logits_agree(model)
    finally:
        model.train(was_training)


def _loss_of_logits(model: Any, inputs: dict[str, Any], labels_N: Tensor, scale: float, *, learn: bool) -> Tensor:
    """The same loss from the logits that the model itself makes, of which there are then positions x vocabulary."""
    logits_NV = model(**accepted(model, inputs)).logits.flatten(0, 1)
    kept_N = labels_N != IGNORED
    loss = scale * F.cross_entropy(logits_NV[kept_N].float(), labels_N[kept_N], reduction="sum")
    return loss if learn else loss.detach()
