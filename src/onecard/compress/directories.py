"""Model directories that a compression writes: weights, a config.json that both generations of readers know, and what
stands beside the weights of the model that it was made of.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress.reading_back import NotTheSame
from onecard.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

_SPARE_BYTES = 256 << 20
# Logits of a written model beside those of what it stands for, as a share of their spread: the order of sums.
SAME = 1e-4
# Written anew for each directory, or told of the other one.
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "report.json", artifact.MANIFEST)


def read_by_others(folder: Path) -> Any:
    """The model in a directory as transformers reads it, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from onecard.model.lora import quiet

    console.note("  reading it back with transformers")
    # The libraries draw bars of their own.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    return model.eval()


def check_same(off: float, most: float = SAME) -> float:
    """`off`, the distance of what was read back from what was meant, as a share; NotTheSame if it is no rounding."""
    if not off < most:
        raise NotTheSame(f"transformers reads another model ({off:.2g} away).", "Please report this model.")
    return off


def check_room(output: Path, wanted: int) -> None:
    """ArtifactError if the disk has no room for what is planned; nothing has been written by then."""
    place = output.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < wanted + _SPARE_BYTES:
        raise ArtifactError(
            f"{output} takes {console.format_bytes(wanted)}, and {place} has {console.format_bytes(free)} free.",
            "Free some space, choose another --output, or a format of fewer bits.",
        )


def copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation settings: everything beside the weights of `source`."""
    for path in sorted(source.iterdir()):
        kept = path.suffix in (".json", ".jinja", ".model", ".txt") and path.name not in _NOT_COPIED
        if path.is_file() and kept:
            shutil.copyfile(path, folder / path.name)


def write_model(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Weights as model.safetensors, and config.json of `settings` for readers of both generations."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    with artifact.disk_faults(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    artifact.write_json_atomically(folder / "config.json", for_both_generations(settings))
    # Written for the owner alone; the other files are for whom umask says.
    path.chmod((folder / "config.json").stat().st_mode)


def for_both_generations(settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 5 writes it, with the fields that transformers 4 and older vLLM read in their place.

    `dtype` stands beside `torch_dtype`, `rope_parameters` beside `rope_theta` and, where positions are stretched,
    `rope_scaling`.
    """
    made = dict(settings)
    made["dtype"] = made["torch_dtype"] = made.get("dtype") or made.get("torch_dtype") or "float32"
    rope = made.get("rope_parameters")
    if not rope and "rope_theta" in made:
        rope = {"rope_type": "default", **(made.get("rope_scaling") or {}), "rope_theta": made["rope_theta"]}
        made["rope_parameters"] = rope
    # Of models whose layers have several kinds of positions, each kind has its own settings, which only 5 knows.
    if rope and "rope_theta" in rope:
        made["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        made["rope_scaling"] = scaling if rope.get("rope_type", "default") != "default" else None
    return made


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors as they lie in a directory, by name; without a head that is the embedding."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    if written_settings(directory).get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found


def written_settings(directory: Path) -> dict[str, Any]:
    """config.json of a model directory."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found


def weight_bytes(directory: Path) -> int:
    """What the weights take on disk."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
