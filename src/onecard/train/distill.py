"""The verb `distill`: a small model learns what a larger one would say, token by token, or from answers it wrote.

In: a student and a teacher (model directories with the same tokenizer), and chats. Out: a run directory, as from
`finetune`, whose rows, splits and settings these are. What the student learns is a mixture of the teacher's predictions
and the tokens that stand in the rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import DistillConfig
from onecard.data.chats import Chat, read_chats
from onecard.data.packing import PackedRows
from onecard.errors import ConfigError, DataError
from onecard.model.divergence import Mixture
from onecard.model.load import load_model, load_tokenizer, model_directory, vocabulary_rows, weights_hash
from onecard.plan.job import Job
from onecard.settings import Source
from onecard.train import text_mix
from onecard.train.base import open_run
from onecard.train.directory import RunDirectory
from onecard.train.distillation import Distill, Teacher
from onecard.train.finetune import USUAL_LENGTH, defaults_of, evaluation_inputs, prompts_of, stores_of
from onecard.train.session import train
from onecard.train.task import Task

ANSWERS = "teacher_answers.jsonl"
"""What the teacher wrote, in the run directory: one chat a line."""
_ANSWERS_AT_ONCE = 8


def distill(config: DistillConfig) -> dict[str, Any]:
    """Train the student. Resumes an unfinished run with the same settings and inputs."""
    return train(prepare(config))


def prepare(config: DistillConfig) -> Task:
    """Everything that is decided before the run: inputs, rows, models, what auto becomes."""
    if config.distillation_weight == 0 and config.answers == "rows":
        raise ConfigError(
            "distillation_weight is 0 and the answers are those of the rows: nothing is learned from the teacher.",
            "Raise distillation_weight, or set answers = teacher; or use `onecard finetune`.",
        )
    inputs = [*text_mix.inputs(config), *evaluation_inputs(config), weights_hash(model_directory(config.teacher))]
    opened = open_run(config, USUAL_LENGTH, inputs=inputs)
    config, base, run, precision = opened.config, opened.base, opened.run, opened.precision
    mixture = Mixture(config.distillation_weight, config.distillation_temperature)
    teacher = Teacher(config.teacher, precision) if mixture.weight else None
    if teacher is not None:
        teacher.check_tokenizer(base.tokenizer, config.model)
    rows_config = config
    if config.answers == "teacher":
        rows_config = config.model_copy(
            update={"sources": [Source(path=str(_answered(config, run, precision.device)))]}
        )
    found, stores = stores_of(rows_config, run, base.tokenizer)
    rows, held_out = PackedRows(stores["train"], config.row_tokens), stores["held_out"]

    def build() -> Any:
        if teacher is not None:
            teacher.model  # noqa: B018 - what is wrong with it is found before the first update
        return base.build(config, precision)

    task = Task(
        verb="distill",
        config=config,
        run=run,
        precision=precision,
        tokenizer=base.tokenizer,
        architecture=base.architecture,
        build_model=build,
        beside=None if teacher is None else lambda job: _beside(teacher, job),
        rows=rows,
        held_out=PackedRows(held_out, config.row_tokens) if held_out.count else None,
        weights=text_mix.weights(rows.store.sources, rows.per_source, config.text_share),
        packing=config.packing,
        defaults=defaults_of(base.width, adapters=config.lora_rank > 0),
        parents=[*opened.parents, config.teacher],
        sample_prompts=prompts_of(run, base.tokenizer),
        facts={"rows": found, "teacher": str(config.teacher)},
        complete=base.completion(config, run),
    )
    if teacher is not None:
        task.objective = lambda padded: Distill(teacher, mixture, padded)
    return task


def _beside(teacher: Teacher, job: Job) -> dict[str, int]:
    """The teacher's weights, and the last hidden states of a micro-batch in the format of products, in bytes."""
    states = job.batch_size * job.max_length * teacher.width() * teacher.itemsize
    return {"teacher": teacher.weight_bytes() + states}


def _answered(config: DistillConfig, run: RunDirectory, device: str) -> Path:
    """The chats with the teacher's answers in place of the last ones: written once for a run."""
    from onecard.model.generation import decode, generate
    from onecard.tokenizer.template import encode_chat, stop_token_ids

    path = run.path / ANSWERS
    if path.is_file():
        return path
    chats: list[Chat] = []
    for chat in read_chats(config.sources, strict=config.strict, reject=lambda _: None):
        if len(chat.messages) > 1:
            chats.append(chat)
    if not chats:
        raise DataError("There is no question for the teacher.", "Give chats with at least one answered question.")
    tokenizer = load_tokenizer(config.teacher)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The teacher in {config.teacher} has no chat template: it cannot be asked.",
            "Take a teacher made for chat, or set answers = rows.",
        )
    model = load_model(config.teacher, device=device)
    prompts = [
        encode_chat(tokenizer, chat.messages[:-1], tools=chat.tools, add_generation_prompt=True).ids for chat in chats
    ]
    with console.progress("the teacher answers", len(prompts), "questions") as bar:
        written = generate(
            model,
            prompts,
            stop_ids=stop_token_ids(tokenizer),
            vocabulary_size=vocabulary_rows(tokenizer),
            limit=config.answer_tokens,
            batch_size=_ANSWERS_AT_ONCE,
            advance=bar.advance,
        )
    # An answer that was cut off would teach not to end.
    whole = [
        {"messages": [*chat.messages[:-1], {"role": "assistant", "content": decode(tokenizer, made.ids)}]}
        for chat, made in zip(chats, written)
        if made.finish_reason == "stop" and made.ids
    ]
    console.note(
        f"  the teacher answered {len(chats)} questions; {len(whole)} answers ended by themselves and are kept"
    )
    if not whole:
        raise DataError("No answer of the teacher ended by itself.", "Raise answer_tokens, or take another teacher.")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in whole)
    artifact.write_text_atomically(path, text)
    return path
