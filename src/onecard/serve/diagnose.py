"""The verb `diagnose`: measures whether a model's answers go round in circles, and finds out why.

In: a chat model and questions with their right answers (those of its own run, where none are given). Out: a directory
with report.html and report.json: causes, and the sampling that loops least and answers best, which may be written to
generation_config.json.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import DiagnoseConfig
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.evaluate.ancestry import learned_by, runs, trainings
from onecard.evaluate.measuring import without_refused
from onecard.evaluate.questions import Question, choose
from onecard.evaluate.repetition import measure
from onecard.evaluate.similarity import f1
from onecard.model.adapter_base import is_adapter
from onecard.model.gguf_file import is_gguf
from onecard.model.load import load_architecture, load_model, load_tokenizer, model_directory
from onecard.report import Page
from onecard.serve.diagnosis import (
    NOW,
    RARE,
    SETTINGS,
    Answered,
    Measures,
    Setting,
    causes,
    loops,
    recommended,
    rows,
    verdict,
)
from onecard.serve.opening import context_length, open_engine
from onecard.serve.requests import FinishEvent, GenerationParameters, TokenEvent
from onecard.settings import Source
from onecard.tokenizer.template import encode_chat, stop_token_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from onecard.serve.engine import Engine

_GENERATION = "generation_config.json"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Rows of the training data that are read for what it repeats itself.
_LEARNED_ROWS = 20_000
_COLUMNS = ("sampling", "answers that loop", "end by themselves", "repeated n-grams", "F1 with the references")


def diagnose(config: DiagnoseConfig) -> dict[str, Any]:
    """Measure, say why, recommend. ConfigError for a model without a chat template or questions."""
    if config.write and (is_gguf(config.model) or is_adapter(config.model)):
        raise ConfigError(
            f"{config.model} holds no generation_config.json.",
            "Leave --write out, and give the settings to its server.",
        )
    directory = model_directory(config.model)
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.model])
    tokenizer = load_tokenizer(directory)
    if not tokenizer.chat_template:
        raise ConfigError(f"The model in {config.model} has no chat template.", "Give a model made for chat.")
    sources = config.questions or _sources_of(config.model)
    questions, held_out, learned = _questions(config, directory, sources)
    questions = _fitting(config, directory, tokenizer, questions)
    found = Measures(len(questions), held_out)
    _measure_data(found, [question.reference for question in learned])
    found.truncated = _truncated(config.model)
    _measure_end(found, directory, tokenizer, [question for question in questions if question.answer])
    texts: dict[str, list[str]] = {}
    engine, _ = open_engine(directory, max_concurrent=config.max_concurrent, max_length=config.max_length)
    try:
        with console.progress("answers", len(SETTINGS) * len(questions)) as bar:
            for setting in SETTINGS:
                answered = _answer(engine, tokenizer, questions, setting, config, bar.advance)
                texts[setting.name] = [text for text, _ in answered]
                found.settings.append(_summary(setting, questions, answered))
    finally:
        engine.close()
    best = next(one for one in SETTINGS if one.name == recommended(found).setting)
    written = _wanted(directory, best, found.end_token, tokenizer)
    result = {
        "verdict": verdict(found),
        "causes": [asdict(cause) for cause in causes(found)],
        "recommended": best.name,
        "generation_config": written,
        "written": config.write,
        **asdict(found),
    }
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.model]) as folder:
        _page(found, questions, texts[NOW.name], best).save(folder / "report.html")
        rows_ = [
            {"question": question.text, "reference": question.reference, "answer": text, "loops": loops(text)}
            for question, text in zip(questions, texts[NOW.name])
        ]
        artifact.write_json_atomically(folder / "report.json", {**result, "answers": rows_})
        artifact.write_json_atomically(folder / _GENERATION, written)
        artifact.write_manifest(
            folder, "evaluation", settings=config.plain(), parents=[config.model], result=_short(result)
        )
    if config.write:
        path = directory / _GENERATION
        artifact.write_json_atomically(path, written)
        artifact.accept_change(path)
    _show(config, found, best, path=directory / _GENERATION)
    return {**result, "output": str(config.output)}


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("verdict", "recommended", "written")}


# --- questions ----------------------------------------------------------------------------------------------------


def _sources_of(model: Path) -> list[Source]:
    """The rows that the model's run learned from, where they still lie."""
    for _, manifest in runs(model)[:1]:
        asked = manifest.settings.get("asked", {}).get("sources", [])
        found = [Source.model_validate(source) for source in asked]
        if found and all(source.path.startswith("package:") or Path(source.path).exists() for source in found):
            return found
    raise ConfigError(
        f"The rows that {model} learned from are not known or not there any more.",
        "Give --questions: chat rows with the right answers.",
    )


def _questions(
    config: DiagnoseConfig, directory: Path, sources: Sequence[Source]
) -> tuple[list[Question], bool | None, list[Question]]:
    """What is asked, whether it was held out of training, and rows that were learned (all, where that is not known)."""
    known = trainings(config.model)
    learned = learned_by(known)
    wanted = {
        "held_out": (config.question_count, lambda question: bool(question.answer) and not learned(question)),
        "learned": (_LEARNED_ROWS, lambda question: bool(question.answer) and learned(question)),
    }
    chosen = choose(sources, config.seed, wanted)
    held_out = bool(chosen["held_out"]) if known else None
    asked = chosen["held_out"] or chosen["learned"][: config.question_count]
    asked = without_refused({"asked": asked}, [directory])["asked"]
    if not asked:
        raise DataError("No question with an answer is left to ask.", "Give --questions: chat rows with answers.")
    if held_out is False:
        console.warn("No row was held out of training: the questions asked are ones that it learned.")
    return asked, held_out, chosen["learned"] or chosen["held_out"]


def _fitting(config: DiagnoseConfig, directory: Path, tokenizer: Any, questions: list[Question]) -> list[Question]:
    """Those that leave room for an answer; says how many do not."""
    longest = context_length(load_architecture(directory), config.max_length)
    kept = [
        question
        for question in questions
        if len(encode_chat(tokenizer, question.messages, tools=question.tools, add_generation_prompt=True).ids)
        < longest
    ]
    if len(kept) < len(questions):
        console.warn(f"{len(questions) - len(kept)} questions are left out: they fill the context of {longest} tokens.")
    if not kept:
        raise DataError("No question leaves room for an answer.", "Raise max_length, or give shorter questions.")
    return kept


# --- measuring ----------------------------------------------------------------------------------------------------


def _measure_data(found: Measures, answers: Sequence[str]) -> None:
    """Whether the answers that were learned loop themselves, and how many are the same."""
    found.references_looping = sum(map(loops, answers)) / len(answers)
    answer, count = Counter(answers).most_common(1)[0]
    if count > 1:
        found.most_common, found.most_common_answer = count / len(answers), answer


def _truncated(model: Path) -> float:
    """The share of the rows of the model's run that were cut; 0 where that is not known."""
    for _, manifest in runs(model)[:1]:
        facts = manifest.result.get("rows", {})
        if isinstance(facts, dict) and facts.get("kept"):
            return float(facts.get("truncated", 0)) / float(facts["kept"])
    return 0.0


def _measure_end(found: Measures, directory: Path, tokenizer: Any, questions: Sequence[Question]) -> None:
    """What the model thinks of ending its turn after each whole reference answer."""
    import torch

    stops = set(stop_token_ids(tokenizer))
    model: Any = load_model(directory)
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    probabilities, first = [], 0
    ends: Counter[int] = Counter()
    with console.progress("ends of answers", len(questions)) as bar, torch.inference_mode():
        for question in questions:
            bar.advance(1)
            encoded = encode_chat(tokenizer, question.chat, tools=question.tools)
            places = [place for place, learned in enumerate(encoded.assistant_mask) if learned]
            # A template may write a line feed after the end of a turn.
            place = next((place for place in reversed(places) if encoded.ids[place] in stops), None)
            if place is None or place >= limit:
                continue
            logits = model(input_ids=torch.tensor([encoded.ids[:place]])).logits[0, -1].double()
            wanted = encoded.ids[place]
            probabilities.append(float(logits.softmax(-1)[wanted]))
            first += int(logits.argmax()) == wanted
            ends[wanted] += 1
    if not probabilities:
        return
    found.end_probability, found.end_is_first = statistics.median(probabilities), first / len(probabilities)
    token = ends.most_common(1)[0][0]
    found.end_token = str(tokenizer.convert_ids_to_tokens(token))
    named = _generation(directory).get("eos_token_id")
    found.end_is_written = token in (named if isinstance(named, list) else [named])


def _answer(
    engine: Engine,
    tokenizer: Any,
    questions: Sequence[Question],
    setting: Setting,
    config: DiagnoseConfig,
    advance: Callable[[float], None],
) -> list[tuple[str, str]]:
    """The text and the reason of the end of each answer, the same for the same seed."""
    sampling = setting.sampling or engine.sampling_defaults
    answered: list[tuple[str, str]] = []
    for begin in range(0, len(questions), config.max_concurrent):
        handles = []
        for place, question in enumerate(questions[begin : begin + config.max_concurrent], begin):
            ids = encode_chat(tokenizer, question.messages, tools=question.tools, add_generation_prompt=True).ids
            handles.append(
                engine.submit(
                    ids,
                    GenerationParameters(
                        max_tokens=min(config.max_new_tokens, engine.max_length - len(ids)),
                        sampling=replace(sampling, seed=config.seed + place),
                    ),
                )
            )
        for handle in handles:
            text, reason = "", ""
            for event in handle:
                text += event.text if isinstance(event, TokenEvent | FinishEvent) else ""
                if isinstance(event, FinishEvent):
                    reason = event.reason
                    if reason == "error":
                        raise ArtifactError(event.error, "Train again, or take an earlier checkpoint.")
            answered.append((text, reason))
            advance(1)
    return answered


def _summary(setting: Setting, questions: Sequence[Question], answered: Sequence[tuple[str, str]]) -> Answered:
    count = len(questions)
    return Answered(
        setting.name,
        looping=sum(loops(text) for text, _ in answered) / count,
        ended=sum(reason == "stop" for _, reason in answered) / count,
        repeated=sum(measure(text).repeated_share for text, _ in answered) / count,
        likeness=sum(f1(text, question.reference) for question, (text, _) in zip(questions, answered)) / count,
    )


# --- what is written ----------------------------------------------------------------------------------------------


def _generation(directory: Path) -> dict[str, Any]:
    path = directory / _GENERATION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _wanted(directory: Path, best: Setting, end_token: str, tokenizer: Any) -> dict[str, Any]:
    """generation_config.json with the recommended sampling and with the end of a turn among what ends an answer."""
    made = _generation(directory)
    if best.sampling is not None:
        made = {key: value for key, value in made.items() if key not in _KEYS}
        made["do_sample"] = not best.sampling.is_greedy
        plain = type(best.sampling)()
        values = {key: getattr(best.sampling, key) for key in _KEYS}
        made |= {key: value for key, value in values.items() if value != getattr(plain, key) and value}
    if end_token:
        named = made.get("eos_token_id")
        ids = named if isinstance(named, list) else [] if named is None else [named]
        wanted = int(tokenizer.convert_tokens_to_ids(end_token))
        made["eos_token_id"] = ids if wanted in ids else [*ids, wanted]
        if len(made["eos_token_id"]) == 1:
            made["eos_token_id"] = made["eos_token_id"][0]
    return made


def _page(found: Measures, questions: Sequence[Question], texts: Sequence[str], best: Setting) -> Page:
    page = Page("Do the answers go round in circles?", verdict(found))
    page.facts(
        {
            "of the answers loop": f"{found.now.looping:.0%}",
            "end by themselves": f"{found.now.ended:.0%}",
            "of the learned answers loop": f"{found.references_looping:.0%}",
            f"end with {found.end_token or 'a stop token'} after a right answer": f"{found.end_is_first:.0%}",
        }
    )
    for cause in causes(found):
        page.heading(cause.name.capitalize())
        page.paragraph(cause.what)
        page.paragraph(cause.remedy)
    page.heading("The same questions, sampled in other ways")
    page.figure(lambda axes: _draw(axes, found), "The share of the answers that loop, and of those that end.")
    page.table(list(_COLUMNS), rows(found.settings), f"Recommended: {best.name}.")
    circling = [index for index, text in enumerate(texts) if loops(text)]
    page.heading("Answers that loop" if circling else "Answers")
    for index in circling[:8] or range(min(4, len(texts))):
        page.sample(texts[index][:1200], questions[index].text[:200])
    if found.held_out is False:
        page.paragraph("The questions were learned: no row was held out of training.")
    return page


def _draw(axes: Axes, found: Measures) -> None:
    names = [one.setting for one in reversed(found.settings)]
    places = range(len(names))
    looping = [100 * one.looping for one in reversed(found.settings)]
    ended = [100 * one.ended for one in reversed(found.settings)]
    axes.barh([place + 0.2 for place in places], looping, 0.36, color="#b42318", label="loop")
    axes.barh([place - 0.2 for place in places], ended, 0.36, color="#2f5fd0", label="end by themselves")
    axes.set_yticks(list(places), names)
    axes.set_xlabel("% of the answers")
    axes.set_xlim(0, 100)
    axes.legend(loc="lower right", frameon=False)


def _show(config: DiagnoseConfig, found: Measures, best: Setting, path: Path) -> None:
    console.table(f"Repetition of {config.model}", list(_COLUMNS), rows(found.settings))
    console.result(verdict(found))
    for cause in causes(found):
        console.result(f"{cause.name}: {cause.what}")
        console.result(f"  {cause.remedy}")
    if config.write:
        console.result(f"Written to {console.short_path(path)}: {best.name}.")
    elif best is not NOW and found.now.looping >= RARE:
        console.result(f"Recommended: {best.name} (--write puts it into {_GENERATION}).")
    console.result(f"Report: {console.short_path(config.output / 'report.html')}")
