"""onecard and its peers, each as one function: a model and rows in, seconds and content tokens of every update out.

onecard's is what its verbs run: the same loop, packed rows, compiled layers, optimizers and activations. The peers run
as people start them, with their own defaults, unless a table names what was changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measurement import Updates
from onecard.data.batches import RowOrder
from onecard.data.packing import Rows
from onecard.model import attention
from onecard.train import optimizers
from onecard.train.activations import Activations
from onecard.train.compilation import compile_layers
from onecard.train.loop import Loop, LoopSettings
from onecard.train.objectives import NextToken
from onecard.train.precision import Precision, convert
from onecard.train.schedule import Schedule


def onecard(
    model: Any,
    rows: Rows,
    folder: Path,
    *,
    precision: Precision,
    batch: int,
    accumulation: int,
    updates: int,
    learning_rate: float,
    weight_decay: float,
    states: str = "fp32",
    checkpointing: Any = "none",
    compiled: bool = True,
    pad_id: int = 0,
) -> Updates:
    """AdamW, in micro-batches of `batch` rows, `accumulation` of them an update."""
    device = precision.device
    model.to(device).train()
    assert attention.switch(model), "the models measured here can be packed"
    convert(model, precision)
    activations = Activations(checkpointing=checkpointing)
    activations.apply(model)
    if compiled:
        compile_layers(model, device)
    loop = Loop(
        run=folder,
        model=model,
        objective=NextToken(),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0] * len(rows.per_source), seed=0, rows_per_update=batch * accumulation),
        held_out=None,
        optimizers=optimizers.build(
            model,
            "adamw",
            learning_rate=learning_rate,
            muon_learning_rate=0.0,
            weight_decay=weight_decay,
            states=states,
        ),
        schedule=Schedule("cosine", updates, 0.0, 0.0, 0.0),
        precision=precision,
        settings=LoopSettings(updates, batch, 1.0, 10**9, 10**9, 1, 1, pad_id),
        saving=activations.saving,
    )
    made = Updates()
    for number in range(updates):
        with made.timed(device):
            result = loop.update(number)
        made.tokens.append(result.tokens)
        made.waited.append(result.waited_seconds)
    loop.close()
    return made


def trainer(
    model: Any,
    rows: list[dict[str, Any]],
    folder: Path,
    *,
    precision: Precision,
    batch: int,
    updates: int,
    learning_rate: float,
    weight_decay: float,
) -> Updates:
    """transformers.Trainer with its defaults: one micro-batch of rows of one length an update, not compiled."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    made = Updates()
    tokens = batch * len(rows[0]["input_ids"])
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=updates,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        bf16=precision.name == "bf16",
        use_cpu=precision.device == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    clock = _clock(TrainerCallback, made, precision.device)
    trainer_class: Any = Trainer
    trained = trainer_class(model, settings, train_dataset=rows, callbacks=[clock])
    trained.train()
    made.tokens = [tokens] * len(made.seconds)
    return made


def sft_trainer(
    model: Any,
    tokenizer: Any,
    chats: list[list[dict[str, str]]],
    folder: Path,
    *,
    precision: Precision,
    batch: int,
    updates: int,
    learning_rate: float,
    max_length: int,
    packing: bool,
    adapters: dict[str, Any] | None,
    checkpointing: bool | None = None,
) -> Updates:
    """TRL's SFTTrainer as people start it, padded, or with its packing; `adapters`: rank, alpha and target_modules.

    Chats of one question and one answer go in as prompt and completion, of which TRL learns the completion, as onecard
    does. Content tokens are those of the rows, without padding. `checkpointing` None leaves TRL's default.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    made = Updates()

    class Counting(SFTTrainer):  # type: ignore[misc, valid-type]
        """Takes note of the tokens of each batch."""

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **others: Any) -> Any:
            mask = inputs.get("attention_mask")
            found = inputs["input_ids"] if mask is None else mask
            made.tokens.append(int(found.numel() if mask is None else found.sum()))
            return super().training_step(model, inputs, *rest, **others)

    changes: dict[str, Any] = {} if checkpointing is None else {"gradient_checkpointing": checkpointing}
    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=updates,
        learning_rate=learning_rate,
        max_length=max_length,
        packing=packing,
        bf16=precision.name == "bf16",
        use_cpu=precision.device == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **changes,
    )
    peft_config = None
    if adapters is not None:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=adapters["rank"],
            lora_alpha=adapters["alpha"],
            lora_dropout=0.0,
            target_modules=adapters["target_modules"],
            task_type="CAUSAL_LM",
        )
    trained: Any = Counting(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[_clock(TrainerCallback, made, precision.device)],
    )
    trained.train()
    return made


def _clock(base: Any, made: Updates, device: str) -> Any:
    class Clock(base):  # type: ignore[misc]
        """Notes the seconds of each update, the making of its batch left out as Trainer leaves it out."""

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.inside = made.timed(device)
            self.inside.__enter__()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.inside.__exit__(None, None, None)

    return Clock()
