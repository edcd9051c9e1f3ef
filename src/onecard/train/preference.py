"""Learning from preferences: of two answers to a question the better one shall become likelier than the worse one.

DPO (Rafailov et al. 2023), IPO (Azar et al. 2023), SimPO (Meng et al. 2024), ORPO (Hong et al. 2024) on pairs, and KTO
(Ethayarajh et al. 2024) on answers that were judged one by one. In: batches of `PairRows`, whose documents carry two
values: the log-probability that the model gave to their answer before it was trained (the reference; NaN where none is
needed), and 1 or 0 for a single answer that was judged good or bad. Every loss is a mean over pairs, whatever the
micro-batches they stand in. For KTO the second document of a pair is the same question with another one's answer: the
mean of what those gained over the whole update is the reference point, computed before any gradient.

Shapes: N positions of a micro-batch, K of them learned, S pieces (documents and padding), P pairs, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from onecard.data.packing import RowBatch
from onecard.model.log_probabilities import log_probabilities
from onecard.model.loss import IGNORED, head_of
from onecard.train.objectives import WIDTH_STEP, Objective, accepted, packed_inputs

Kind = Literal["dpo", "ipo", "simpo", "orpo", "kto"]
# Columns of the values of a document.
REFERENCE, GOOD = 0, 1
# The temperature that each paper takes; for ORPO the weight of its odds beside the likelihood of the chosen answer.
USUAL_BETA: dict[str, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
NEEDS_REFERENCE = ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class PreferenceSettings:
    """`margin`: of SimPO. `likelihood_weight`: of the mean cross-entropy of the chosen answer, added to the loss."""

    kind: Kind
    beta: float
    label_smoothing: float = 0.0
    length_normalised: bool = False
    margin: float = 0.0
    likelihood_weight: float = 0.0


class Preference(Objective):
    """The loss of pairs. `padded`: for models that cannot keep the documents of a packed row apart."""

    def __init__(self, settings: PreferenceSettings, *, padded: bool = False) -> None:
        self.settings, self.padded = settings, padded
        self._reference_point = 0.0
        self._seen: list[dict[str, Tensor]] = []

    def count(self, batch: RowBatch) -> int:
        """Pairs of a micro-batch."""
        return len(_documents(batch)) // 2

    def begin(self, model: torch.nn.Module, batches: Iterable[RowBatch], *, device: str, row_tokens: int) -> None:
        """KTO: what answers to other questions gained over the reference, in the mean and never below 0."""
        if self.settings.kind != "kto":
            return
        gained = pairs = 0.0
        for batch in batches:
            if not self.count(batch):
                continue
            sums_2P, _ = self._answers(model, batch, device=device, row_tokens=row_tokens, learn=False)
            reference_2P = _values(batch, REFERENCE, sums_2P)
            gained += float((sums_2P - reference_2P).detach()[1::2].sum())
            pairs += self.count(batch)
        self._reference_point = max(0.0, gained / max(1.0, pairs))

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`scale` x the sum over pairs."""
        sums_2P, lengths_2P = self._answers(model, batch, device=device, row_tokens=row_tokens, learn=learn)
        settings = self.settings
        # Without a pair (rows that only fill up) the loss is 0, and a part of the graph all the same.
        if settings.kind == "kto":
            losses_P, rewards_2P = self._judged(sums_2P, batch)
        elif settings.kind in ("dpo", "ipo"):
            gains_2P = sums_2P - _values(batch, REFERENCE, sums_2P)
            if settings.length_normalised or settings.kind == "ipo":
                gains_2P = gains_2P / lengths_2P
            rewards_2P = settings.beta * gains_2P
            losses_P = self._compared(rewards_2P[::2] - rewards_2P[1::2])
        else:
            means_2P = sums_2P / lengths_2P
            rewards_2P = settings.beta * means_2P
            if settings.kind == "simpo":
                losses_P = -F.logsigmoid(rewards_2P[::2] - rewards_2P[1::2] - settings.margin)
            else:
                odds_2P = means_2P - torch.log(-torch.expm1(means_2P.clamp(max=-1e-6)))
                losses_P = -settings.beta * F.logsigmoid(odds_2P[::2] - odds_2P[1::2]) - means_2P[::2]
        if settings.likelihood_weight and settings.kind != "kto":
            losses_P = losses_P - settings.likelihood_weight * (sums_2P / lengths_2P)[::2]
        self._tell(rewards_2P, sums_2P, lengths_2P, batch)
        return scale * losses_P.sum()

    def _compared(self, margins_P: Tensor) -> Tensor:
        """DPO and IPO: the loss of the differences between rewards."""
        if self.settings.kind == "ipo":
            # A squared distance of the difference of log-ratios from 1 / (2 beta).
            beta = self.settings.beta
            return (margins_P / beta - 1 / (2 * beta)) ** 2
        flipped = self.settings.label_smoothing
        return -(1 - flipped) * F.logsigmoid(margins_P) - flipped * F.logsigmoid(-margins_P)

    def _judged(self, sums_2P: Tensor, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """KTO: losses of the judged answers, and the rewards of both documents of each pair."""
        beta = self.settings.beta
        rewards_2P = beta * (sums_2P - _values(batch, REFERENCE, sums_2P))
        sign_P = 2 * _values(batch, GOOD, sums_2P)[::2] - 1
        losses_P = 1 - torch.sigmoid(sign_P * (rewards_2P[::2] - beta * self._reference_point))
        return losses_P, rewards_2P

    # --- log-probabilities ----------------------------------------------------------------------------------------

    def answers(self, model: torch.nn.Module, batch: RowBatch, *, device: str, row_tokens: int) -> Tensor:
        """2 P sums of the log-probabilities of each document's learned tokens, without a gradient."""
        return self._answers(model, batch, device=device, row_tokens=row_tokens, learn=False)[0].detach()

    def _answers(
        self, model: torch.nn.Module, batch: RowBatch, *, device: str, row_tokens: int, learn: bool
    ) -> tuple[Tensor, Tensor]:
        """Sums of the log-probabilities of the learned tokens of each document, and how many those are: 2 P each."""
        causal: Any = model
        documents = _documents(batch)
        labels_N = torch.from_numpy(batch.labels)
        learned_K = (labels_N != IGNORED).nonzero().squeeze(1)
        place_N = np.full(len(batch.labels), -1, dtype=np.int64)
        for number, (begin, end) in enumerate(documents):
            place_N[begin:end] = number
        place_K = torch.from_numpy(place_N)[learned_K].to(device)
        if self.padded:
            hidden_KD = _padded_hidden(causal, batch, documents, learned_K, device)
        else:
            decoder = causal.get_decoder()
            inputs, _ = packed_inputs(batch, row_tokens, device)
            hidden_KD = decoder(**accepted(decoder, inputs)).last_hidden_state.flatten(0, 1)[learned_K.to(device)]
        head = head_of(causal)
        assert head is not None, "checked before the run"
        if not learn:
            bias = None if head.bias is None else head.bias.detach()
            hidden_KD, head = hidden_KD.detach(), head._replace(weight=head.weight.detach(), bias=bias)
        found_K = log_probabilities(hidden_KD, head, labels_N[learned_K].to(device))
        sums_2P = torch.zeros(len(documents), dtype=found_K.dtype, device=found_K.device)
        lengths_2P = torch.zeros_like(sums_2P).index_add(0, place_K, torch.ones_like(found_K))
        return sums_2P.index_add(0, place_K, found_K), lengths_2P.clamp(min=1)

    # --- what there is to tell ------------------------------------------------------------------------------------

    def _tell(self, rewards_2P: Tensor, sums_2P: Tensor, lengths_2P: Tensor, batch: RowBatch) -> None:
        rewards_2P, sums_2P = rewards_2P.detach(), sums_2P.detach()
        if self.settings.kind == "kto":
            good_P = _values(batch, GOOD, sums_2P)[::2]
            self._seen.append(
                {"good": good_P, "reward": rewards_2P[::2], "logp": sums_2P[::2], "length": lengths_2P[::2]}
            )
            return
        self._seen.append(
            {
                "reward_chosen": rewards_2P[::2],
                "reward_rejected": rewards_2P[1::2],
                "logp_chosen": sums_2P[::2],
                "logp_rejected": sums_2P[1::2],
                "length_chosen": lengths_2P[::2],
                "length_rejected": lengths_2P[1::2],
            }
        )

    def measures(self) -> dict[str, float]:
        """Means over the pairs since the last call: rewards, their margin, how often the chosen one is ahead, ..."""
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        found = {name: torch.cat([part[name] for part in seen]).double().cpu() for name in seen[0]}
        if self.settings.kind == "kto":
            good = found["good"] == 1
            made = {}
            for name in ("reward", "logp", "length"):
                for word, chosen in (("chosen", good), ("rejected", ~good)):
                    if bool(chosen.any()):
                        made[f"{name}_{word}"] = float(found[name][chosen].mean())
            if "reward_chosen" in made and "reward_rejected" in made:
                made["margin"] = made["reward_chosen"] - made["reward_rejected"]
            return made | {"reference_point": self._reference_point}
        ahead = found["reward_chosen"] - found["reward_rejected"]
        if not len(ahead):
            return {}
        # Equal ones, as before the first update, are right half of the time.
        right = (ahead > 0).double() + 0.5 * (ahead == 0).double()
        return {name: float(values.mean()) for name, values in found.items()} | {
            "margin": float(ahead.mean()),
            "accuracy": float(right.mean()),
        }


def _documents(batch: RowBatch) -> list[tuple[int, int]]:
    """Where each document begins and ends among the positions: padding is left out."""
    assert batch.values is not None, "pairs carry values"
    edges = batch.boundaries
    real = ~np.isnan(batch.values[:, GOOD])
    return [(int(edges[at]), int(edges[at + 1])) for at in np.flatnonzero(real).tolist()]


def _values(batch: RowBatch, column: int, like: Tensor) -> Tensor:
    """A value of each document, 2 P."""
    assert batch.values is not None
    found = batch.values[~np.isnan(batch.values[:, GOOD]), column]
    return torch.from_numpy(np.ascontiguousarray(found)).to(like.device, like.dtype)


def _padded_hidden(
    model: Any, batch: RowBatch, documents: list[tuple[int, int]], learned_K: Tensor, device: str
) -> Tensor:
    """Hidden states of the learned positions, each document attended in a row of its own."""
    width = -(-max((end - begin for begin, end in documents), default=1) // WIDTH_STEP) * WIDTH_STEP
    count = max(1, len(documents))
    ids_ST, mask_ST = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, width, dtype=torch.int64)
    mask_ST[:, 0] = 1  # also where there is no document
    place_N = torch.zeros(len(batch.labels), dtype=torch.int64)
    for number, (begin, end) in enumerate(documents):
        ids_ST[number, : end - begin] = torch.from_numpy(batch.input_ids[begin:end])
        mask_ST[number, : end - begin] = 1
        place_N[begin:end] = number * width + torch.arange(end - begin)
    decoder = model.get_decoder()
    inputs = {
        "input_ids": ids_ST.to(device),
        "position_ids": torch.arange(width, device=device).expand(count, width),
        "attention_mask": mask_ST.to(device),
        "use_cache": False,
    }
    hidden_STD = decoder(**accepted(decoder, inputs)).last_hidden_state
    found: Tensor = hidden_STD.flatten(0, 1)[place_N[learned_K].to(device)]
    return found
