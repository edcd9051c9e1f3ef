"""Learning the class of a text: cross-entropy of the classes, or of each class alone where a text may have several.

In: batches whose documents carry their classes as values: one number, or a 0 or 1 for every class. A loss is a mean
over texts, weighted by class if asked. Decoders read packed rows, each text at its last token; other models get each
text in a row of its own.

Shapes: S texts of a micro-batch, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from onecard.data.packing import RowBatch
from onecard.model.classifier import padded_logits
from onecard.train.objectives import WIDTH_STEP, Objective, accepted, packed_inputs


class Classify(Objective):
    """`weights`: one for each class, 1 in the mean over the training texts; None: every text counts alike."""

    def __init__(self, *, several: bool, weights: list[float] | None, padded: bool = False) -> None:
        self.several, self.padded = several, padded
        self._weights = None if weights is None else torch.tensor(weights)
        self._right: list[Tensor] = []

    def count(self, batch: RowBatch) -> int:
        """Texts of a micro-batch."""
        return len(_texts(batch))

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`scale` x the sum over texts; where classes are several, a text's loss is the mean over the classes."""
        logits_SC = self._logits(model, batch, device, row_tokens).float()
        if not learn:
            logits_SC = logits_SC.detach()
        assert batch.values is not None
        classes = torch.from_numpy(batch.values[~np.isnan(batch.values[:, 0])]).to(device)
        weights_C = None if self._weights is None else self._weights.to(device)
        if self.several:
            wanted_SC = classes.float()
            losses_SC = F.binary_cross_entropy_with_logits(logits_SC, wanted_SC, pos_weight=weights_C, reduction="none")
            losses_S = losses_SC.mean(-1)
            self._right.append(((logits_SC.detach() > 0) == (wanted_SC > 0.5)).all(-1))
        else:
            wanted_S = classes[:, 0].long()
            losses_S = F.cross_entropy(logits_SC, wanted_S, reduction="none")
            if weights_C is not None:
                losses_S = losses_S * weights_C[wanted_S]
            self._right.append(logits_SC.detach().argmax(-1) == wanted_S)
        return scale * losses_S.sum()

    def _logits(self, model: Any, batch: RowBatch, device: str, row_tokens: int) -> Tensor:
        texts = _texts(batch)
        if not self.padded:
            inputs, _ = packed_inputs(batch, row_tokens, device)
            hidden_ND = model.base_model(**accepted(model.base_model, inputs)).last_hidden_state.flatten(0, 1)
            last = torch.tensor([end - 1 for _, end in texts], dtype=torch.int64, device=device)
            scores: Tensor = model.score(hidden_ND[last])
            return scores
        width = -(-max((end - begin for begin, end in texts), default=1) // WIDTH_STEP) * WIDTH_STEP
        width = min(width, row_tokens)
        ids_ST = torch.zeros(max(1, len(texts)), width, dtype=torch.int64)
        lengths = [end - begin for begin, end in texts] or [1]
        for number, (begin, end) in enumerate(texts):
            ids_ST[number, : end - begin] = torch.from_numpy(batch.input_ids[begin:end])
        return padded_logits(model, ids_ST.to(device), torch.tensor(lengths, device=device))[: len(texts)]

    def measures(self) -> dict[str, float]:
        """The share of texts whose classes were all right."""
        right, self._right = self._right, []
        found = torch.cat(right) if right else torch.zeros(0)
        return {"accuracy": float(found.float().mean())} if len(found) else {}


def _texts(batch: RowBatch) -> list[tuple[int, int]]:
    """Where each text begins and ends among the positions: padding is left out."""
    assert batch.values is not None, "texts carry their classes"
    edges = batch.boundaries
    return [(int(edges[at]), int(edges[at + 1])) for at in np.flatnonzero(~np.isnan(batch.values[:, 0])).tolist()]
