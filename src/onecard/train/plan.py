"""The verb `plan`: what fits, how long it takes and what it costs, before anything runs.

In: a recipe or a model, and a card or this machine. Out: for each update the predicted memory by kind, time and energy,
the best settings with alternatives; or the largest model, the longest rows, the size that a text is worth.
Exit status 3 if it does not fit. Nothing is downloaded, and no model is built.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import PlanConfig
from onecard.console import format_bytes
from onecard.errors import ConfigError, DoesNotFit, OnecardError
from onecard.plan import questions
from onecard.plan.candidates import Candidate
from onecard.plan.job import Job, Memory, Target
from onecard.plan.targets import target
from onecard.settings import build, read_toml, relative_to
from onecard.train import foresight, plan_report, relief
from onecard.train.planned import MemoryOf, Planned, document, planned
from onecard.train.recipe_subjects import Recipe, of_recipe
from onecard.train.subjects import Subject, of_model

QUESTIONS = ("largest", "longest_context", "compute_optimal")


def plan(config: PlanConfig, memory: MemoryOf | None = None, on: Target | None = None) -> dict[str, Any]:
    """Answer what was asked, as tables and as the JSON document. DoesNotFit, with the document, where it does not.

    `memory` and `on` stand in for the forecast and for the machine.
    """
    recipe = None if config.recipe is None else Recipe(config.recipe, read_toml(config.recipe))
    if recipe is not None and "plan" in recipe.tables:
        config = with_table(config, recipe)
    _check(config, recipe)
    if config.output is not None:
        artifact.check_output(config.output, overwrite=config.overwrite, inputs=[])
    memory = _or_say_why(memory or foresight.forecast())
    on = on or target(config.card)
    if config.compute_optimal:
        return _compute_optimal(config, on)
    if config.largest:
        return _largest(config, on, memory)
    base = Path() if config.recipe is None else config.recipe.parent
    if recipe is not None and not config.model:
        subjects = of_recipe(recipe, config, on)
    else:
        subjects = [of_model(config, on, base)]
    if config.longest_context:
        return _longest_context(config, subjects[0], on, memory)
    # Of several stages only what a run takes: each alternative is another trace.
    ways = {"alternatives": len(subjects) == 1, "explain": config.output is not None}
    return _plan(config, [planned(subject, on, memory, **ways) for subject in subjects])


def _or_say_why(memory: MemoryOf) -> MemoryOf:
    """A kind of model whose step cannot be traced is no reason for a traceback."""

    def of(job: Job) -> Memory:
        try:
            return memory(job)
        except OnecardError:
            raise
        except Exception as fault:
            reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
            raise ConfigError(
                f"The memory of a {job.model.model_type} model cannot be predicted here ({reason[:160]}).",
                "Other settings, such as packing = false, may be predictable; a run says what it can and goes on.",
            ) from fault

    return of


def with_table(config: PlanConfig, recipe: Recipe) -> PlanConfig:
    """What the recipe's table [plan] says, where the command did not say otherwise."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    values = relative_to(recipe.path.parent, PlanConfig, recipe.tables["plan"])
    return build(PlanConfig, {**values, **given}, where=f"[plan] of {recipe.path}")


def _check(config: PlanConfig, recipe: Recipe | None) -> None:
    asked = [name for name in QUESTIONS if getattr(config, name)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are two questions.", "Ask one at a time.")
    if recipe is None and not config.model and asked not in (["largest"], ["compute_optimal"]):
        raise ConfigError(
            "There is nothing to plan.",
            "Give a recipe (onecard plan recipe.toml), or a model (onecard plan --model llama-3.1-8b --method lora).",
        )
    if config.compute_optimal and (config.tokens is None) == (config.time_limit_minutes is None):
        raise ConfigError(
            "compute_optimal needs to know either how much text there is or how much time.",
            "Give --tokens, such as 2e9, or --time-limit-minutes.",
        )


# --- a plan -------------------------------------------------------------------------------------------------------


def _plan(config: PlanConfig, plans: list[Planned]) -> dict[str, Any]:
    for made in plans:
        plan_report.show(made, config.electricity_price, config.currency)
    answer = _together([document(made, electricity_price=config.electricity_price) for made in plans])
    if config.output is not None:
        _write(config, config.output, answer, plan_report.page(plans, config.electricity_price, config.currency))
        answer["output"] = str(config.output)
    lacking = next((made for made in plans if not made.fits), None)
    if lacking is not None:
        fault = DoesNotFit(_why(lacking), _what_would(lacking))
        fault.document = answer
        raise fault
    return answer


def _together(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of the update that needs the most; time and energy are those of all."""
    most: dict[str, Any] = dict(max(documents, key=lambda one: one["needed_bytes"]))
    if len(documents) > 1:
        for name in ("seconds", "energy_kwh", "cost"):
            values = [one[name] for one in documents]
            most[name] = None if None in values else sum(values)
        most["fits"] = all(one["fits"] for one in documents)
        most["stages"] = documents
    return most


def _write(config: PlanConfig, output: Path, answer: dict[str, Any], page: Any) -> None:
    with artifact.new_output(output, overwrite=config.overwrite, inputs=[]) as directory:
        artifact.write_json_atomically(directory / "plan.json", answer)
        page.save(directory / "report.html")
        artifact.write_manifest(directory, "plan", settings=config.plain())
    console.result(f"Report: {output}/report.html")


def _why(made: Planned) -> str:
    memory = made.chosen.memory
    kind, size = max(memory.breakdown.items(), key=lambda item: item[1])
    return (
        f"{made.subject.name} needs {format_bytes(memory.needed_bytes)} (most of it {kind}, {format_bytes(size)}), and "
        f"{made.target.name} has {format_bytes(made.target.capacity_bytes)}."
    )


def _what_would(made: Planned) -> str:
    if made.would_fit is None:
        return "No setting makes it fit: take a smaller model (onecard plan --largest names one) or a larger card."
    changes = plan_report.in_words(relief.differing(made.chosen.job, made.would_fit.job))
    return f"This would fit, with {format_bytes(made.would_fit.margin_bytes)} free: {changes}."


# --- the questions the other way round ----------------------------------------------------------------------------


def _largest(config: PlanConfig, on: Target, memory: MemoryOf) -> dict[str, Any]:
    answer = questions.largest_model(
        on,
        memory,
        method=config.method,
        context_tokens=1024 if config.max_length == "auto" else config.max_length,
        lora_rank=config.lora_rank,
    )
    return _answered("largest", answer, on)


def _longest_context(config: PlanConfig, subject: Subject, on: Target, memory: MemoryOf) -> dict[str, Any]:
    return _answered("longest_context", questions.longest_context(of_longest(subject), on, memory), on)


def of_longest(subject: Subject) -> Job:
    """With whatever keeps the least and changes nothing, where the settings leave it open."""
    if "activation_checkpointing" in subject.fixed:
        return subject.job
    return replace(subject.job, activation_checkpointing="full")


def _answered(question: str, answer: questions.Answer, on: Target) -> dict[str, Any]:
    made: dict[str, Any] = {"question": question, "card": on.name, "fits": answer.value is not None}
    made |= {"value": answer.value, "text": answer.text}
    if answer.value is None:
        fault = DoesNotFit(answer.text, "Another method (--method qlora), shorter rows or a larger card may do.")
        fault.document = made
        raise fault
    console.result(answer.text)
    if answer.candidate is not None:
        made |= _of_candidate(question, answer.candidate, on)
        console.result()
        plan_report.show(_as_planned(question, answer.candidate, on), None, "")
    return made


def _as_planned(name: str, candidate: Candidate, on: Target) -> Planned:
    rows = candidate.job.batch_size * candidate.job.gradient_accumulation_steps
    return Planned(Subject(name, candidate.job, frozenset(), rows), on, candidate)


def _of_candidate(name: str, candidate: Candidate, on: Target) -> dict[str, Any]:
    return {"plan": document(_as_planned(name, candidate, on))}


def _compute_optimal(config: PlanConfig, on: Target) -> dict[str, Any]:
    seconds = None if config.time_limit_minutes is None else 60 * config.time_limit_minutes
    found = questions.compute_optimal(on, tokens=config.tokens, seconds=seconds)
    console.result(found.text)
    console.result()
    sizes = sorted([found.best, *found.others], key=lambda size: size.parameters)
    console.table(
        f"The same computing on {on.name}",
        ["parameters", "tokens", "tokens a parameter", "time", "loss by the formula"],
        [
            [
                f"{size.parameters / 1e6:,.0f}M",
                f"{size.tokens / 1e9:,.2f}B",
                f"{size.tokens_per_parameter:,.1f}",
                console.format_duration(size.seconds),
                f"{size.loss:.3f}",
            ]
            for size in sizes
        ],
    )
    return {
        "question": "compute_optimal",
        "card": on.name,
        "text": found.text,
        "best": asdict(found.best),
        "others": [asdict(size) for size in found.others],
    }
