"""What tokens cost a model: the sum of their cross-entropy in nats, for any choice of tokens in any passages.

In: a causal language model, passages of tokens, a mark on those whose cost is asked. Out: a sum for each passage.
Logits exist for a bounded number of positions at a time, and only for positions that are scored: memory does not grow
with the vocabulary times the length. Sums are fp64, so the order of adding does not show.

It does not know what the tokens mean, nor what is divided by what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from onecard.errors import ArtifactError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# One block of logits: 2^24 fp32 values are 64 MiB, whatever the vocabulary.
LOGITS_PER_BLOCK = 1 << 24


class Passage(NamedTuple):
    """Tokens, and for each whether its cost given those before it is asked; the first never is."""

    ids: Sequence[int]
    scored: Sequence[bool]


class HasIds(Protocol):
    """Anything with tokens."""

    @property
    def ids(self) -> Sequence[int]: ...


Item = TypeVar("Item", bound=HasIds)


def batches(items: Sequence[Item], budget_tokens: int) -> Iterator[list[Item]]:
    """Items, longest first, as batches of at most `budget_tokens` with the padding (and at least one item)."""
    remaining = iter(items)
    while (first := next(remaining, None)) is not None:
        yield [first, *islice(remaining, max(0, budget_tokens // len(first.ids) - 1))]


def costs(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    budget_tokens: int,
    *,
    advance: Callable[[float], None] | None = None,
) -> list[float]:
    """The cost in nats of the marked tokens of each passage, in their order.

    `advance` is called with the number of passages done. ArtifactError if the model's numbers are not finite.
    """
    return [nats for nats, _ in _costs(Scorer(model), passages, budget_tokens, advance)]


def costs_and_greedy(
    model: PreTrainedModel, passages: Sequence[Passage], budget_tokens: int
) -> list[tuple[float, bool]]:
    """`costs`, and of each passage whether every marked token is the likeliest at its place."""
    return _costs(Scorer(model, greedy=True), passages, budget_tokens, None)


def _costs(
    scorer: Scorer, passages: Sequence[Passage], budget_tokens: int, advance: Callable[[float], None] | None
) -> list[tuple[float, bool]]:
    found = [(0.0, False)] * len(passages)
    # Longest first: if memory does not suffice, that shows at once and not at the end.
    order = sorted(range(len(passages)), key=lambda index: len(passages[index].ids), reverse=True)
    done = 0
    for batch in batches([passages[index] for index in order], budget_tokens):
        for index, nats, missed in zip(order[done:], scorer.nats(batch), scorer.missed):
            found[index] = (nats, missed == 0)
        done += len(batch)
        if advance is not None:
            advance(len(batch))
    check_finite([nats for nats, _ in found])
    return found


def check_finite(nats: Sequence[float]) -> None:
    """ArtifactError if one of them is no number."""
    if not all(map(math.isfinite, nats)):
        raise ArtifactError(
            "The model gives numbers that are not finite on this text.",
            "Its weights are damaged, or its training diverged: take an earlier checkpoint or train again.",
        )


class Scorer:
    """Runs a model over batches of passages and sums the cost of each passage's marked tokens.

    `missed` counts, of each passage of the last batch, the marked tokens that are not the likeliest (with `greedy`; it
    costs a look through all logits).
    """

    def __init__(self, model: PreTrainedModel, *, greedy: bool = False) -> None:
        self._model: Any = model  # its types are incomplete
        self._head_is_plain: bool | None = None
        self._greedy = greedy
        self.missed: list[int] = []

    def nats(self, batch: Sequence[Passage]) -> list[float]:
        """The cost of the marked tokens of each passage; the longest passage stands first."""
        import torch

        self.missed = []
        with torch.inference_mode():
            if self._head_is_plain is None:
                self._head_is_plain = self._compare_heads(batch[0].ids[:16])
            if not self._head_is_plain:
                return [cost for passage in batch for cost in self._nats([passage])]
            return self._nats(batch)

    def _compare_heads(self, ids: Sequence[int]) -> bool:
        """Whether the model's logits are just its output layer over its hidden states.

        Some architectures scale or cap them afterwards; those are asked for whole windows, one at a time.
        """
        import torch

        ids_BT = torch.tensor([list(ids)], device=self._model.device)
        logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        return torch.allclose(self._head(self._hidden(ids_BT)), logits_BTV, rtol=1e-3, atol=1e-4)

    def _hidden(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD: torch.Tensor = self._model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return hidden_BTD

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def _nats(self, batch: Sequence[Passage]) -> list[float]:
        import torch
        from torch.nn.functional import cross_entropy

        length = len(batch[0].ids)
        # Padding stands to the right of every target, where a causal model cannot see it: no mask is needed.
        spare = [length - len(passage.ids) for passage in batch]
        ids_BT = torch.tensor([[*passage.ids, *[0] * pad] for passage, pad in zip(batch, spare)])
        scored_BT = torch.tensor([[*passage.scored[1:], *[False] * pad] for passage, pad in zip(batch, spare)])
        row_N = scored_BT.nonzero()[:, 0]  # on the host, as the sums
        targets_N = ids_BT[:, 1:][scored_BT].to(self._model.device)
        ids_BT, scored_BT = ids_BT.to(self._model.device), scored_BT.to(self._model.device)
        if self._head_is_plain:
            states_NX = self._hidden(ids_BT)[:, :-1][scored_BT]
        else:
            states_NX = self._model(input_ids=ids_BT, use_cache=False).logits[:, :-1][scored_BT]
        block = max(1, LOGITS_PER_BLOCK // self._model.get_output_embeddings().weight.shape[0])
        costs_N: list[torch.Tensor] = []
        missed_N: list[torch.Tensor] = []
        for states, targets in zip(torch.split(states_NX, block), torch.split(targets_N, block)):
            logits = self._head(states) if self._head_is_plain else states
            costs_N.append(cross_entropy(logits.float(), targets, reduction="none"))
            missed_N.append(logits.argmax(-1) != targets if self._greedy else torch.zeros_like(targets))
        sums_B = torch.zeros(len(batch), dtype=torch.float64)
        sums_B.index_add_(0, row_N, torch.cat(costs_N).double().cpu())
        missed_B = torch.zeros(len(batch), dtype=torch.long)
        self.missed += missed_B.index_add_(0, row_N, torch.cat(missed_N).long().cpu()).tolist()
        sums: list[float] = sums_B.tolist()
        return sums
