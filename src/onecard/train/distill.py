"""The verb `distill`: a small model learns what a larger one would say, token by token, or from answers it wrote.

In: a student and a teacher (model directories with the same tokenizer), and chats. Out: a run directory, as from
`finetune`, whose rows, splits and settings these are. What the student learns is a mixture of the teacher's predictions
and the tokens that stand in the rows.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import DistillConfig
from onecard.data.chats import Chat, read_chats
from onecard.data.records import Rejection, refuse
from onecard.data.rows import RejectionWriter
from onecard.errors import ConfigError, DataError
from onecard.model.divergence import Mixture
from onecard.model.load import load_model, load_tokenizer, model_directory, vocabulary_rows, weights_hash
from onecard.settings import Source
from onecard.train import text_mix
from onecard.train.base import open_run
from onecard.train.directory import RunDirectory
from onecard.train.distillation import Distill, Teacher
from onecard.train.finetune import USUAL_LENGTH, evaluation_inputs, task_of
from onecard.train.session import train
from onecard.train.task import Task

ANSWERS = "teacher_answers.jsonl"
"""What the teacher wrote, in the run directory: one chat a line."""
UNASKED = "unasked.jsonl"
"""The rows that it was not asked about, each with its reason."""
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
    config, base = opened.config, opened.base
    mixture = Mixture(config.distillation_weight, config.distillation_temperature)
    teacher = Teacher(config.teacher, opened.precision) if mixture.weight else None
    if teacher is not None:
        teacher.check_tokenizer(base.tokenizer, config.model)
    rows_config = config
    if config.answers == "teacher":
        answered = Source(path=str(_answered(config, opened.run, opened.precision.device)))
        rows_config = config.model_copy(update={"sources": [answered]})
    task = task_of("distill", opened, rows_config)
    task.parents.append(config.teacher)
    task.facts["teacher"] = str(config.teacher)
    if teacher is None:
        return task
    learner = task.build_model

    def build() -> Any:
        teacher.model  # noqa: B018 - what is wrong with it is found before the first update
        return learner()

    return replace(
        task,
        build_model=build,
        beside=teacher.beside,
        objective=lambda padded: Distill(teacher, mixture, padded),
    )


def _answered(config: DistillConfig, run: RunDirectory, device: str) -> Path:
    """The chats with the teacher's answers in place of the last ones: written once for a run."""
    from onecard.model.generation import decode, generate
    from onecard.tokenizer.template import stop_token_ids

    path = run.path / ANSWERS
    if path.is_file():
        return path
    tokenizer = load_tokenizer(config.teacher)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The teacher in {config.teacher} has no chat template: it cannot be asked.",
            "Take a teacher made for chat, or set answers = rows.",
        )
    chats, prompts = _questions(config, run, tokenizer)
    model = load_model(config.teacher, device=device)
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
        _answered_row(chat, decode(tokenizer, made.ids))
        for chat, made in zip(chats, written)
        if made.finish_reason == "stop" and made.ids
    ]
    console.note(
        f"  the teacher answered {len(chats):,} questions; {len(whole):,} answers ended by themselves and are kept"
    )
    if not whole:
        raise DataError("No answer of the teacher ended by itself.", "Raise answer_tokens, or take another teacher.")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in whole)
    artifact.write_text_atomically(path, text)
    return path


def _questions(config: DistillConfig, run: RunDirectory, tokenizer: Any) -> tuple[list[Chat], list[list[int]]]:
    """The chats without their last answer, and the ids that ask for it; what cannot be asked is set aside and said."""
    from onecard.tokenizer.template import encode_chat

    rejected: Counter[str] = Counter()
    chats, prompts = [], []
    path = run.path / UNASKED
    with artifact.disk_faults(path), RejectionWriter(path) as writer:

        def reject(rejection: Rejection) -> None:
            rejected[rejection.reason] += 1
            writer.add(asdict(rejection))

        for chat in read_chats(config.sources, strict=config.strict, reject=reject):
            asked = replace(chat, messages=chat.messages[:-1])
            try:
                encoded = encode_chat(tokenizer, asked.messages, tools=asked.tools, add_generation_prompt=True)
            except DataError as fault:  # such as a role that the teacher's template does not know
                text = json.dumps(asked.messages, ensure_ascii=False)
                found = Rejection("refused_by_template", chat.file, chat.line, f"{fault.what} | {text}")
                refuse(found, strict=config.strict, reject=reject)
                continue
            chats.append(asked)
            prompts.append(encoded.ids)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.most_common())
    if not chats:
        raise DataError(f"There is no question for the teacher ({reasons}).", f"Mend the rows; they are in {path}.")
    if rejected:
        console.warn(f"{rejected.total():,} rows are not asked ({reasons}): they are in {console.short_path(path)}.")
    return chats, prompts


def _answered_row(asked: Chat, answer: str) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": [*asked.messages, {"role": "assistant", "content": answer}]}
    return row if asked.tools is None else {**row, "tools": asked.tools}
