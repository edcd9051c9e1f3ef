"""The verb `card`: what a model is, from what is written down about how it was made; nothing is invented.

In: a model directory, and by choice evaluations of it and licences of its sources. Out: README.md in the form of a
model card (Markdown, with the metadata that model hubs read), in English or Chinese. What nobody wrote down is said to
be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.artifact import Manifest
from onecard.compress.card_words import WORDS, Words
from onecard.config import CardConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.evaluate.ancestry import runs
from onecard.model.load import model_directory

FILE = "README.md"
_MARK = "<!-- onecard -->"
"""Stands in every card that onecard wrote: only such a file is written over."""


@dataclass(frozen=True)
class Generation:
    """One training of a model: its verb, its manifest, and where it lies."""

    verb: str
    run: Path
    manifest: Manifest


def card(config: CardConfig) -> dict[str, Any]:
    """Write the card. ConfigError if a README.md that onecard did not write would be lost."""
    directory = model_directory(config.model)
    target = (config.output or directory) / FILE
    if target.is_file() and _MARK not in target.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{target} was not written by onecard.", "Move it away, or give another --output.")
    text = card_text(
        config.model,
        name=config.name or name_of(config.model),
        words=WORDS[config.language],
        evaluations=config.evaluations,
        licences=config.licences,
    )
    with artifact.disk_faults(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    artifact.write_text_atomically(target, text)
    console.result(f"Model card: {console.short_path(target)}")
    return {"output": str(target), "words": len(text.split())}


def name_of(model: Path) -> str:
    """What a model is called where nobody says: its directory's name, or that of its run."""
    path = model.resolve()
    return path.parent.name if path.name == "model" else path.stem if path.is_file() else path.name


def card_text(
    model: Path,
    *,
    name: str,
    words: Words,
    evaluations: Sequence[Path] = (),
    licences: Mapping[str, str] | None = None,
) -> str:
    """The card of a model directory as Markdown."""
    directory = model_directory(model)
    made = generations(model)
    written: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    corpora = _corpora(made)
    unused = set(licences or {}) - {label for label, _ in _labels(made, corpora)}
    if unused:
        known = ", ".join(label for label, _ in _labels(made, corpora)) or "none"
        raise ConfigError(f"There is no source {', '.join(sorted(unused))}.", f"Sources of this model: {known}.")
    parts = [
        _metadata(made, corpora),
        f"# {name}\n\n{_MARK}",
        _what(written, directory, made, words),
        _data(made, corpora, words, licences or {}),
        _training(made, words),
        _evaluation(evaluations, words),
        _limits(made, corpora, words),
        _use(name, directory, written, words),
        _provenance(made, words),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def generations(model: Path) -> list[Generation]:
    """The trainings of a model, the first first, as far back as their directories lie where they were."""
    # Of a merged model several began with the same one: by the time at which each was finished.
    known = runs(model)[::-1]
    known.sort(key=lambda found: found[1].created)
    return [
        Generation(str(manifest.settings.get("plan", {}).get("verb", "")), run, manifest) for run, manifest in known
    ]


def _corpora(made: Sequence[Generation]) -> list[Manifest]:
    """The corpora that the trainings read, where they still lie."""
    found: dict[str, Manifest] = {}
    for one in made:
        for parent in one.manifest.parents:
            path = Path(parent["path"])
            if (path / artifact.MANIFEST).is_file() and (manifest := artifact.read_manifest(path)).kind == "corpus":
                found[manifest.content_hash] = manifest
    return list(found.values())


def _labels(made: Sequence[Generation], corpora: Sequence[Manifest]) -> list[tuple[str, dict[str, Any]]]:
    """The sources by the names that people gave them: those of corpora with their counts, those of chats without."""
    found = [(name, counts) for corpus in corpora for name, counts in corpus.result.get("by_source", {}).items()]
    known = {name for name, _ in found}
    for one in made:
        for source in one.manifest.settings.get("asked", {}).get("sources", []):
            label = source.get("name") or Path(source["path"]).stem
            if label not in known:
                known.add(label)
                found.append((label, {}))
    return found


# --- the parts ----------------------------------------------------------------------------------------------------


def _metadata(made: Sequence[Generation], corpora: Sequence[Manifest]) -> str:
    languages = sorted({name for corpus in corpora for name in corpus.result.get("by_language", {}) if len(name) == 2})
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if languages:
        lines += ["language:", *(f"- {name}" for name in languages)]
    lines += ["tags:", "- onecard", *(f"- {verb}" for verb in dict.fromkeys(one.verb for one in made) if verb), "---"]
    return "\n".join(lines)


def _what(written: Mapping[str, Any], directory: Path, made: Sequence[Generation], words: Words) -> str:
    text = written.get("text_config") or written
    parameters = next((one.manifest.result["parameters"] for one in reversed(made) if one.manifest.result), None)
    shape = [
        (words.parameters, f"{parameters:,}" if parameters else words.unknown),
        (words.architecture, ", ".join(written.get("architectures") or [str(written.get("model_type"))])),
        (words.layers, text.get("num_hidden_layers") or text.get("n_layer")),
        (words.width, text.get("hidden_size") or text.get("n_embd")),
        (words.context, text.get("max_position_embeddings") or text.get("n_positions")),
        (words.vocabulary, text.get("vocab_size")),
        (words.number_format, written.get("dtype") or written.get("torch_dtype")),
        (words.weights, console.format_bytes(sum(path.stat().st_size for path in directory.glob("*.safetensors")))),
    ]
    way = " → ".join(one.verb for one in made if one.verb)
    lead = words.made_by.format(way=way) if way else words.not_made_here
    base = made[0].manifest.settings.get("asked", {}).get("model") if made else None
    if base:  # the first training known began with a model of others
        lead += f" {words.begun_with.format(base=name_of(Path(base)))}"
    return f"{lead}\n\n{_table(['', ''], [[label, value] for label, value in shape if value])}"


def _data(made: Sequence[Generation], corpora: Sequence[Manifest], words: Words, licences: Mapping[str, str]) -> str:
    lines = [f"## {words.data}"]
    sources = _labels(made, corpora)
    if not sources:
        return f"{lines[0]}\n\n{words.data_unknown}"
    rows = [
        [
            label,
            f"{counts['kept']:,}" if counts else "",
            f"{counts['characters']:,}" if counts else "",
            console.format_bytes(counts["bytes"]) if counts else "",
            licences.get(label, words.not_given),
        ]
        for label, counts in sources
    ]
    lines.append(_table([words.source, words.documents, words.characters, words.size, words.licence], rows))
    for corpus in corpora:
        found, settings = corpus.result, corpus.settings
        dropped = ", ".join(f"{name} {count:,}" for name, count in found.get("rejected", {}).items()) or words.none
        lines.append(
            words.cleaned.format(
                read=f"{found['read']:,}", kept=f"{found['kept']:,}", dropped=dropped, held_out=f"{found['held_out']:,}"
            )
        )
        if settings.get("personal_data") in ("mask", "drop"):
            lines.append(words.personal.format(kinds=", ".join(settings.get("personal_data_kinds", []))))
    for one in made:
        facts = one.manifest.result.get("rows")
        if isinstance(facts, dict) and "read" in facts:
            lines.append(
                words.rows.format(
                    verb=one.verb,
                    read=f"{facts['read']:,}",
                    kept=f"{facts['kept']:,}",
                    held_out=f"{facts.get('held_out', 0):,}",
                )
            )
    return "\n\n".join(lines)


def _training(made: Sequence[Generation], words: Words) -> str:
    if not made:
        return ""
    rows = []
    for one in made:
        plan, result = one.manifest.settings.get("plan", {}), one.manifest.result
        energy, held_out = result.get("energy_kwh"), result.get("held_out_loss")
        asked = one.manifest.settings.get("asked", {})
        method = one.verb + (f" (LoRA, {words.rank} {asked['lora_rank']})" if asked.get("lora_rank") else "")
        rows.append(
            [
                method,
                f"{result.get('updates', 0):,}",
                f"{result.get('tokens', 0):,}",
                f"{plan.get('optimizer', '')}, {plan.get('learning_rate', 0):.3g}",
                plan.get("precision", ""),
                plan.get("device", ""),
                console.format_duration(result.get("seconds", 0)),
                "" if energy is None else f"{energy:.2f} kWh",
                "" if held_out is None else f"{held_out:.3f}",
            ]
        )
    columns = [
        words.stage, words.updates, words.tokens, words.optimizer, words.precision, words.device, words.time,
        words.energy, words.held_out_loss,
    ]  # fmt: skip
    filled = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    shown = [[row[place] for place in filled] for row in rows]
    return f"## {words.training}\n\n{_table([columns[place] for place in filled], shown)}"


def _evaluation(evaluations: Sequence[Path], words: Words) -> str:
    lines = [f"## {words.evaluation}"]
    for path in evaluations:
        manifest = artifact.read_manifest(path)
        found = manifest.result
        if not found:
            raise ArtifactError(f"{path} holds no result.", "Give directories of evaluate, compare, classify.")
        said = found.get("verdict", [])
        lines += [said] if isinstance(said, str) else list(said)
        rows = [[key.replace("_", " "), _number(value)] for key, value in _flat(found) if key != "verdict"]
        if rows:
            lines.append(_table([path.name, ""], rows[:30]))
    return "\n\n".join(lines if evaluations else [*lines, words.not_evaluated])


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, float]]:
    """Numbers of a result by their path."""
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{key}, ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((before + key, value))
    return found


def _limits(made: Sequence[Generation], corpora: Sequence[Manifest], words: Words) -> str:
    lines = []
    languages = sorted({name for corpus in corpora for name in corpus.result.get("by_language", {})})
    if languages and made[0].verb == "pretrain":
        lines.append(words.only_languages.format(languages=", ".join(languages)))
    tokens = sum(int(one.manifest.result.get("tokens", 0)) for one in made if one.verb == "pretrain")
    parameters = next((one.manifest.result.get("parameters") for one in made), None)
    if tokens and parameters and tokens < 20 * parameters:
        lines.append(words.few_tokens.format(tokens=f"{tokens:,}", each=f"{tokens / parameters:.1f}"))
    lines += [words.may_be_wrong, words.no_safety]
    return f"## {words.limits}\n\n" + "\n".join(f"- {line}" for line in lines)


def _use(name: str, directory: Path, written: Mapping[str, Any], words: Words) -> str:
    chat = (directory / "chat_template.jinja").is_file()
    question = '[{"role": "user", "content": "你好"}]'
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
    ]
    if chat:
        lines += [
            f"inputs = tokenizer.apply_chat_template({question}, add_generation_prompt=True,",
            '                                       return_dict=True, return_tensors="pt")',
        ]
    else:
        lines.append('inputs = tokenizer("话说", return_tensors="pt")')
    lines += [
        "ids = model.generate(**inputs, max_new_tokens=100)",
        'print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
    ]
    python = "\n".join(lines)
    served = f"onecard serve {name}" + (f"\nonecard chat {name}" if chat else "")
    return f"## {words.use}\n\n```sh\n{served}\n```\n\n```python\n{python}\n```"


def _provenance(made: Sequence[Generation], words: Words) -> str:
    if not made:
        return ""
    last = made[-1].manifest
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    return f"## {words.provenance}\n\n" + words.made_with.format(
        created=last.created, versions=versions, content=last.content_hash
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(columns), "| " + " | ".join("---" for _ in columns) + " |", *map(line, rows)])
