"""The verb `export`: a model directory in; GGUF files for llama.cpp and Ollama, or Hugging Face directories, out.

Each is read back and compared, and a model card is written beside it.

Nothing is put in place before another reader (transformers, of GGUF its own) has loaded it, made the same ids of 200
Chinese and English strings and of chats, and, in fp32, the same logits to 1e-3. In formats of fewer bits the difference
is measured and said: how far probabilities have moved, and how often the likeliest next token stays the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress import card
from onecard.compress.card_words import WORDS
from onecard.compress.directories import (
    check_room,
    copy_companions,
    stored_tensors,
    weight_bytes,
    write_model,
    written_settings,
)
from onecard.compress.gguf_writer import Writer
from onecard.compress.reading_back import check_ids, documents, logits, moved, strings
from onecard.config import ExportConfig
from onecard.errors import ConfigError
from onecard.model.load import load_model, load_tokenizer, model_directory
from onecard.tokenizer.special import CHAT_TEMPLATE
from onecard.tokenizer.template import stop_token_ids

if TYPE_CHECKING:
    from torch import Tensor

_DIRECTORIES = ("safetensors", "safetensors_f32")


def export(config: ExportConfig) -> dict[str, Any]:
    """Write, read back, compare. ConfigError before anything is written for a model that llama.cpp would misread."""
    directory = model_directory(config.model)
    if "quantization_config" in written_settings(directory):
        raise ConfigError(
            f"The weights in {config.model} are quantized already: what is written of them would be rounded twice.",
            "Give the model that it was made of.",
        )
    tokenizer = load_tokenizer(directory)
    name = config.name or card.name_of(config.model)
    asked = list(dict.fromkeys(config.formats))
    files = [chosen for chosen in asked if chosen not in _DIRECTORIES]
    writer = Writer(directory, tokenizer) if files else None
    plans = {chosen: writer.plan(chosen) for chosen in files} if writer is not None else {}
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.model])
    # Weights of 16 bits become twice as large in fp32.
    whole = sum(
        (2 if chosen == "safetensors_f32" else 1) * weight_bytes(directory)
        for chosen in asked
        if chosen in _DIRECTORIES
    )
    check_room(config.output, sum(plan.bytes for plan in plans.values()) + whole)
    reference = logits(load_model(directory), documents(tokenizer))
    rows: list[dict[str, Any]] = []
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.model]) as folder:
        for chosen in asked:
            if writer is not None and chosen in plans:
                path = folder / f"{name}-{chosen}.gguf"
                with artifact.disk_faults(path):
                    writer.write(path, plans[chosen], chosen, name)
            else:
                path = folder / (name if chosen == "safetensors" else f"{name}-f32")
                _write_directory(directory, path, half=chosen == "safetensors")
            size = weight_bytes(path) if path.is_dir() else path.stat().st_size
            console.note(f"  {path.name}: {console.format_bytes(size)}; reading it back")
            exact = chosen.endswith("f32")
            rope = writer.rope if writer is not None else {}
            rows.append({"file": path.name, "format": chosen, "bytes": size})
            rows[-1] |= _compare(path, tokenizer, reference, rope, exact=exact)
        if files:
            first = next(row["file"] for row in rows if row["format"] in files)
            artifact.write_text_atomically(folder / "Modelfile", modelfile(first, directory, tokenizer))
        told = card.card_text(config.model, name=name, words=WORDS[config.card])
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            artifact.write_text_atomically(place / card.FILE, told)
        result = {"name": name, "split": writer.split_rule if writer is not None else None, "files": rows}
        artifact.write_json_atomically(folder / "report.json", result)
        artifact.write_manifest(folder, "export", settings=config.plain(), parents=[config.model], result=result)
    _show(config, rows)
    return {**result, "output": str(config.output)}


def _write_directory(directory: Path, target: Path, *, half: bool) -> None:
    """Weights in 16 bits (those of the directory, else bf16) or 32, in Hugging Face layout."""
    import torch

    settings = written_settings(directory)
    kept = torch.float16 if (settings.get("dtype") or settings.get("torch_dtype")) == "float16" else torch.bfloat16
    wanted = kept if half else torch.float32
    with artifact.disk_faults(target):
        target.mkdir()
    copy_companions(directory, target)
    tensors = {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor
        for name, tensor in stored_tensors(directory).items()
    }
    settings["dtype"] = settings["torch_dtype"] = str(wanted).removeprefix("torch.")
    write_model(target, tensors, settings)


def _compare(
    path: Path, tokenizer: Any, reference: list[Tensor], rope: dict[str, Any], *, exact: bool
) -> dict[str, Any]:
    """What another reader makes of the file or directory; NotTheSame if that is another model.

    The one of GGUF takes no notice of stretched positions (`rope`), which are given to it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from onecard.model.gguf_file import read_model, read_tokenizer

    model: Any
    if path.is_dir():
        theirs: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    else:
        theirs = read_tokenizer(path)
    chats = check_ids(path.name, tokenizer, theirs)
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype="float32", local_files_only=True)
        model.eval()
    else:
        model = read_model(path)
        if rope["rope_type"] != "default":
            model.config.rope_parameters = rope
            stretched = type(model)(model.config)
            stretched.load_state_dict(model.state_dict())
            model = stretched.eval()
    found = moved(path.name, logits(model, documents(tokenizer)), reference, exact=exact)
    return {**found, "strings_with_the_same_ids": len(strings()), "chats_with_the_same_ids": chats}


# --- Ollama -------------------------------------------------------------------------------------------------------


def modelfile(file: str, directory: Path, tokenizer: Any) -> str:
    """What `ollama create` reads: the file, how a chat is written (for ChatML), where answers end, how to sample."""
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template == CHAT_TEMPLATE:
        lines += [
            'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}',
            "{{ .Content }}<|im_end|>",
            "{{ end }}<|im_start|>assistant",
            '"""',
        ]
    names = [tokenizer.convert_ids_to_tokens(index) for index in stop_token_ids(tokenizer)]
    lines += [f'PARAMETER stop "{name}"' for name in names]
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if settings.get("do_sample"):
        lines += [f"PARAMETER {key} {settings[key]}" for key in ("temperature", "top_p", "top_k") if key in settings]
    else:
        lines.append("PARAMETER temperature 0")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    lines.append(f"PARAMETER num_ctx {config['max_position_embeddings']}")
    return "\n".join(lines) + "\n"


def _show(config: ExportConfig, rows: list[dict[str, Any]]) -> None:
    console.table(
        f"Export {config.output}",
        ["file", "size", "largest logit difference", "divergence (nats)", "same next token"],
        [
            [
                row["file"],
                console.format_bytes(row["bytes"]),
                f"{row['largest_logit_difference']:.2g}",
                f"{row['divergence']:.2g}",
                f"{row['same_next_token']:.1%}",
            ]
            for row in rows
        ],
    )
    chats = rows[0]["chats_with_the_same_ids"]
    console.result(f"Read back by another reader, with the same ids of {len(strings())} strings and {chats} chats.")
    files = [row["file"] for row in rows if row["format"] not in _DIRECTORIES]
    if files:
        console.result(f"llama.cpp:  llama-cli -m {config.output}/{files[0]}")
        console.result(f"Ollama:     cd {config.output} && ollama create {files[0].rpartition('-')[0]} -f Modelfile")
    if len(files) < len(rows):
        folder = next(row["file"] for row in rows if row["format"] in _DIRECTORIES)
        console.result(f"vLLM:       vllm serve {config.output}/{folder}")
