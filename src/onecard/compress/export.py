"""The verb `export`: a model directory in, GGUF files and an Ollama Modelfile out, each read back and compared.

A file is put in place only after another reader (transformers' own of GGUF) has loaded it, made the same ids of 200
Chinese and English strings, and, in f32, the same logits to 1e-3. In formats of fewer bits the difference is measured
and said: how far probabilities have moved, and how often the likeliest next token stays the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress.gguf_writer import Writer
from onecard.config import ExportConfig
from onecard.errors import ArtifactError, OnecardError
from onecard.model.load import load_model, load_tokenizer, model_directory
from onecard.tokenizer.special import CHAT_TEMPLATE
from onecard.tokenizer.template import encode_chat, stop_token_ids

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 1e-3
_SPARE_BYTES = 256 << 20
_PIECES = (
    "The quick brown fox", "jumps over 12,345 lazy dogs.", " leading space", "it's we've they'll", "e-mail: a@b.cn",
    "冠状动脉粥样硬化", "你好，世界！", "话说天下大势，分久必合。", "３.14　ＡＢＣ（全角）", "混合 mixed 文本 text",
    "\n\n\\t  indented", "def f(x):\n    return x**2", "👍👨‍👩‍👧 emoji", "naïve café Zürich", "1234567890", "…——《》",
    "<b>bold</b>", "https://example.org/?q=1", "Ωμέγα привет", "𠮷野家",
)  # fmt: skip
_TEXTS = ("In the beginning God created the heaven and the earth.", "话说天下大势，分久必合，合久必分。", "1 + 1 = 2")


class NotTheSame(OnecardError):
    """A written file was not read back as the model it was made of."""


def export(config: ExportConfig) -> dict[str, Any]:
    """Write, read back, compare. ConfigError before anything is written for a model that llama.cpp would misread."""
    directory = model_directory(config.model)
    tokenizer = load_tokenizer(directory)
    name = config.name or _name_of(config.model)
    writer = Writer(directory, tokenizer)
    plans = {chosen: writer.plan(chosen) for chosen in dict.fromkeys(config.formats)}
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.model])
    _check_room(config.output, sum(plan.bytes for plan in plans.values()))
    reference = _logits(load_model(directory), _documents(tokenizer))
    rows: list[dict[str, Any]] = []
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.model]) as folder:
        for chosen, plan in plans.items():
            path = folder / f"{name}-{chosen}.gguf"
            with artifact.disk_faults(path):
                writer.write(path, plan, chosen, name)
            console.note(f"  {path.name}: {console.format_bytes(path.stat().st_size)}; reading it back")
            found = _compare(path, tokenizer, reference, writer.rope, exact=chosen == "f32")
            rows.append({"file": path.name, "format": chosen, "bytes": path.stat().st_size, **found})
        first = rows[0]["file"]
        artifact.write_text_atomically(folder / "Modelfile", modelfile(first, directory, tokenizer))
        result = {"name": name, "split": writer.split_rule, "files": rows}
        artifact.write_json_atomically(folder / "report.json", result)
        artifact.write_manifest(folder, "export", settings=config.plain(), parents=[config.model], result=result)
    _show(config, rows)
    return {**result, "output": str(config.output)}


def _name_of(model: Path) -> str:
    path = model.resolve()
    return path.parent.name if path.name == "model" else path.name


def _check_room(output: Path, wanted: int) -> None:
    """ArtifactError if the disk has no room for what is planned; nothing has been written by then."""
    place = output.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < wanted + _SPARE_BYTES:
        raise ArtifactError(
            f"The export takes {console.format_bytes(wanted)}, and {place} has {console.format_bytes(free)} free.",
            "Free some space, choose another --output, or a format of fewer bits.",
        )


# --- reading back -------------------------------------------------------------------------------------------------


def strings() -> list[str]:
    """200 strings in Chinese, English and what stands between them."""
    count = len(_PIECES)
    return [_PIECES[i % count] + " " * (i // count % 2) + _PIECES[(7 * i + i // count) % count] for i in range(200)]


def _documents(tokenizer: Any) -> list[list[int]]:
    made = [tokenizer(text)["input_ids"][:64] for text in _TEXTS]
    if tokenizer.chat_template:
        made.append(encode_chat(tokenizer, [{"role": "user", "content": "你好"}], add_generation_prompt=True).ids[:64])
    return made


def _logits(model: Any, documents: list[list[int]]) -> list[Tensor]:
    import torch

    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0].double() for ids in documents]


def _compare(
    path: Path, tokenizer: Any, reference: list[Tensor], rope: dict[str, Any], *, exact: bool
) -> dict[str, Any]:
    """What another reader makes of the file; NotTheSame if that is another model.

    That reader takes no notice of stretched positions (`rope`), which are given to it.
    """
    import torch

    from onecard.model.gguf_file import read_model, read_tokenizer

    theirs = read_tokenizer(path)
    for text in strings():
        meant, read = (each(text, add_special_tokens=False)["input_ids"] for each in (tokenizer, theirs))
        if meant != read:
            raise NotTheSame(
                f"{path.name} splits {text!r} into {read}, the model was trained on {meant}.",
                "Serve the model's directory instead; and please report this tokenizer.",
            )
    model = read_model(path)
    if rope["rope_type"] != "default":
        model.config.rope_parameters = rope
        stretched = type(model)(model.config)
        stretched.load_state_dict(model.state_dict())
        model = stretched.eval()
    made = _logits(model, _documents(tokenizer))
    off = max(float((one - other).abs().max()) for one, other in zip(made, reference))
    if exact and off > EXACT:
        raise NotTheSame(f"The logits of {path.name} differ by up to {off:.2g}.", "Please report this model.")
    moved = [
        float((other.softmax(-1) * (other.log_softmax(-1) - one.log_softmax(-1))).sum(-1).mean())
        for one, other in zip(made, reference)
    ]
    same = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in zip(made, reference)])
    return {
        "largest_logit_difference": off,
        "divergence": sum(moved) / len(moved),
        "same_next_token": float(same.double().mean()),
        "strings_with_the_same_ids": len(strings()),
    }


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
    console.result(f"Read back by another reader, with the same ids of {len(strings())} strings.")
    console.result(f"llama.cpp:  llama-cli -m {config.output}/{rows[0]['file']}")
    console.result(f"Ollama:     cd {config.output} && ollama create {rows[0]['file'].rpartition('-')[0]} -f Modelfile")
