"""What is learned: an objective turns a micro-batch into a loss; the loop does the rest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onecard.data.packing import RowBatch
from onecard.model.loss import chunked_cross_entropy


class Objective(Protocol):
    """`loss` returns `scale` x the sum of losses of a micro-batch, ready for backward."""

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor: ...


class NextToken:
    """Cross-entropy of each labelled next token (pretraining, and fine-tuning with labels on answers)."""

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`row_tokens` bounds the length of a document (constant, for compiled layers); without `learn` no gradient."""
        hidden_1ND = model.get_decoder()(  # type: ignore[operator]
            input_ids=torch.from_numpy(batch.input_ids).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(batch.position_ids).to(device).unsqueeze(0),
            use_cache=False,
            cu_seq_lens_q=torch.from_numpy(batch.boundaries).to(device),
            max_length_q=row_tokens,
        ).last_hidden_state
        head_VD = model.get_output_embeddings().weight  # type: ignore[operator]
        labels_N = torch.from_numpy(batch.labels).to(device)
        if not learn:
            hidden_1ND, head_VD = hidden_1ND.detach(), head_VD.detach()
        return chunked_cross_entropy(hidden_1ND[0], head_VD, labels_N, scale)
