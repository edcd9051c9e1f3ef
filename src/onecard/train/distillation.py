"""Learning what another model would say: a frozen teacher, and the objective that follows it token by token.

In: a model directory for the teacher; rows, as for fine-tuning or pretraining. Out: the loss of a micro-batch. The
teacher goes over the same packed rows first, without gradients; of what it makes only the last hidden states are there
while the student learns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard import console
from onecard.data.packing import RowBatch
from onecard.errors import ConfigError
from onecard.model import attention
from onecard.model.divergence import Mixture, chunked_distillation
from onecard.model.load import check_finite, load_architecture, load_model, load_tokenizer
from onecard.model.loss import Head, head_of
from onecard.plan.job import Job
from onecard.tokenizer.difference import first_difference
from onecard.train.objectives import Objective, _head_is_known, _padded, accepted, packed_inputs
from onecard.train.precision import Precision


class Teacher:
    """A model that is asked and never changed. Its weights are loaded when first needed, in the format of products."""

    def __init__(self, directory: Path, precision: Precision) -> None:
        self.directory, self._precision = directory, precision
        self._model: Any = None
        self.packs = False

    @property
    def model(self) -> Any:
        """The frozen model, in evaluation mode, on the device."""
        if self._model is None:
            made: Any = load_model(self.directory, dtype=self._precision.dtype)
            check_finite(made, self.directory)
            made.requires_grad_(False)
            made.to(self._precision.device)
            self.packs = attention.switch(made)
            if not self.packs and not _head_is_known(made):
                raise ConfigError(
                    f"The logits of the model in {self.directory} are made in a way that is not known here.",
                    "Set answers = teacher and distillation_weight = 0: the student then learns what it writes.",
                )
            self._model = made
        return self._model

    def weight_bytes(self) -> int:
        """What its weights take, without loading them."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                load_architecture(self.directory)
            )
        return int(sum(p.numel() for p in empty.parameters()) * self.itemsize)

    @property
    def itemsize(self) -> int:
        """Bytes of one of its numbers."""
        return int(self._precision.dtype.itemsize)

    def width(self) -> int:
        """Of its hidden states."""
        return int(load_architecture(self.directory).get_text_config().hidden_size)

    def beside(self, job: Job) -> dict[str, int]:
        """What it adds to an update: its weights, and the last hidden states of a micro-batch, in bytes."""
        states = job.batch_size * job.max_length * self.width() * self.itemsize
        return {"teacher": self.weight_bytes() + states}

    def check_tokenizer(self, tokenizer: Any, student: Path) -> None:
        """ConfigError, naming the first entry that differs, unless the teacher reads the same ids as the student."""
        own: Any = load_tokenizer(self.directory)
        difference = first_difference(tokenizer, own)
        if difference is not None:
            raise ConfigError(
                f"The tokenizers of {student} and of the teacher in {self.directory} are not the same: {difference}.",
                "Take a teacher of the same family; or set answers = teacher and distillation_weight = 0, which "
                "teaches by text and not by tokens.",
            )
        if own.chat_template and own.chat_template != tokenizer.chat_template:
            console.warn("The teacher was made for another chat template: it reads the student's here.")

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Its last hidden states, positions x width; without a gradient."""
        decoder = self.model.get_decoder()
        with torch.no_grad():
            found: Tensor = decoder(**accepted(decoder, inputs)).last_hidden_state.flatten(0, 1)
        return found

    @property
    def head(self) -> Head:
        """How it makes logits of them."""
        found = head_of(self.model)
        assert found is not None, "proven when it was loaded"
        return found


class Distill(Objective):
    """The divergence of a student's predictions from the teacher's at each labelled token, and the cross-entropy."""

    def __init__(self, teacher: Teacher, mixture: Mixture, padded: bool = False) -> None:
        self._teacher, self._mixture, self.padded = teacher, mixture, padded
        if padded:
            attention.use_own(teacher.model)
        elif teacher.model is not None and not teacher.packs:
            raise ConfigError(
                f"The teacher in {teacher.directory} cannot keep the documents of a packed row apart.",
                "Set packing = false.",
            )
        self._proven = not padded
        self._divergence = self._cross_entropy = 0.0
        self._sums: list[Tensor] = []
        self._tokens = 0

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """`scale` x the sum over labelled tokens."""
        causal: Any = model
        if not self._proven:
            if not _head_is_known(causal):
                raise ConfigError(
                    f"The logits of a {causal.config.model_type} model are made in a way that is not known here.",
                    "Set answers = teacher and use `onecard finetune` on what the teacher wrote.",
                )
            self._proven = True
        inputs, labels_N = (_padded if self.padded else packed_inputs)(batch, row_tokens, device)
        guide_NE = self._teacher.hidden(inputs)
        decoder = causal.get_decoder()
        hidden_ND = decoder(**accepted(decoder, inputs)).last_hidden_state.flatten(0, 1)
        head = head_of(causal)
        assert head is not None, "proven before"
        if not learn:
            bias = None if head.bias is None else head.bias.detach()
            hidden_ND, head = hidden_ND.detach(), head._replace(weight=head.weight.detach(), bias=bias)
        made, parts = chunked_distillation(
            hidden_ND, head, guide_NE, self._teacher.head, labels_N, self._mixture, scale
        )
        self._sums.append(torch.stack([parts.divergence, parts.cross_entropy]))
        self._tokens += batch.labelled
        return made

    def measures(self) -> dict[str, float]:
        """Divergence and cross-entropy of a token in the mean, in nats, since the last call."""
        sums, tokens, self._sums, self._tokens = self._sums, self._tokens, [], 0
        if not tokens:
            return {}
        divergence, cross_entropy = torch.stack(sums).double().sum(0).tolist()
        return {"divergence": divergence / tokens, "cross_entropy": cross_entropy / tokens}
