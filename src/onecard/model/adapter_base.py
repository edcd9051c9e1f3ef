"""An adapter directory of PEFT as a model directory: added to its base once, kept, and read from there ever after.

In: a directory with adapter_config.json, whose base lies on this machine. Out: a model directory in Hugging Face layout
in fp32, with the tokenizer that lies beside the adapter, else that of the base. It lies in the user's cache folder
($XDG_CACHE_HOME or ~/.cache, onecard/adapters) under the content of adapter and base. An adapter that was made for
other weights, or does not find its layers, is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

from onecard import artifact, console
from onecard.errors import ArtifactError

SETTINGS = "adapter_config.json"
_BESIDE = (".json", ".jinja", ".model", ".txt")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", artifact.MANIFEST)
TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files of a chat template: they stand before one inside tokenizer_config.json."""
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter and no model of its own."""
    return (path / SETTINGS).is_file() and not (path / "config.json").is_file()


def base_of(path: Path) -> Path:
    """The model directory that an adapter was trained beside, as the adapter names it.

    ArtifactError if it is not there, such as one that is named by a hub's name.
    """
    from onecard.model.adapter_files import open_adapter
    from onecard.model.load import model_directory

    named = str(open_adapter(path).settings.get("base_model_name_or_path") or "")
    for place in (Path(named).expanduser(), path / named):
        if named and place.exists():
            return model_directory(place)
    raise ArtifactError(
        f"The adapter in {path} was trained beside {named or 'a base that it does not name'}, which is not there.",
        f"Put the base's folder into {SETTINGS} as base_model_name_or_path.",
    )


def merged(path: Path) -> Path:
    """The model directory of an adapter and its base; made at the first time.

    ArtifactError or ConfigError for an adapter without its base, for another one, or that cannot be added.
    """
    from onecard.model.adapter_files import open_adapter

    base = base_of(path)
    adapter = open_adapter(path)
    quantized = json.loads((base / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if quantized and quantized.get("quant_method") != "compressed-tensors":  # which is opened as what it stands for
        raise ArtifactError(
            f"The base of {path}, {base}, is rounded to few bits: what an adapter adds would be rounded away.",
            f"Name the whole base in {SETTINGS} (base_model_name_or_path).",
        )
    own = _weights_mark(base, tuple((file.name, *_state(file)) for file in sorted(base.glob("*.safetensors"))))
    if adapter.base_weights is not None and adapter.base_weights != own:
        raise ArtifactError(
            f"The adapter in {path} was trained beside other weights than those in {base} now.",
            f"Name the base that it was trained beside in {SETTINGS} (base_model_name_or_path).",
        )
    files = [item for item in sorted(path.iterdir()) if item.is_file() and item.name != artifact.MANIFEST]
    beside = [[item.name, artifact.hash_file(item)] for item in [*_copied(path, base), base / "config.json"]]
    mark = artifact.hash_json([own, [[item.name, artifact.hash_file(item)] for item in files], beside])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onecard" / "adapters"
    target = cache / mark / path.resolve().name
    made = [folder for folder in sorted(target.parent.glob("*")) if (folder / artifact.MANIFEST).is_file()]
    if not made:
        _make(path, base, target)
    return made[0] if made else target


def _state(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache
def _weights_mark(base: Path, _: tuple[tuple[str, int, int], ...]) -> str:
    """The hash of a base's weights, once for each state of its files: a verb asks several times, and they are large."""
    from onecard.model.load import weights_hash

    return weights_hash(base)


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer that lie beside an adapter, as many programs leave them there."""
    return [path / name for name in _TOKENIZER if (path / name).is_file()]


def _copied(path: Path, base: Path) -> list[Path]:
    """The files beside the weights: those of the base, then those of a tokenizer beside the adapter.

    A chat template in a file of the base would stand before one inside the adapter's tokenizer_config.json.
    """
    own = tokenizer_files(path)
    speaks = any(item.name == "tokenizer_config.json" for item in own)
    left = (*_NOT_COPIED, *(TEMPLATES if speaks else ()))
    found = [item for item in sorted(base.iterdir()) if item.is_file() and item.suffix in _BESIDE]
    return [*(item for item in found if item.name not in left), *own]


def _make(path: Path, base: Path, target: Path) -> None:
    from onecard.model import lora
    from onecard.model.adapter_files import open_adapter, put_beside
    from onecard.model.load import load_model

    adapter = open_adapter(path)
    model = load_model(base)
    put_beside(model, adapter, "default")
    covered = lora.coverage([name for name, _ in lora.adapted_layers(model)])
    console.note(f"  adding the adapter in {console.short_path(path)} to {console.short_path(base)}: {covered}")
    if adapter.quantization != "none":
        console.note(
            f"  it was trained beside these weights in {adapter.quantization}; it is added to the weights before that"
        )
    lora.merge(model)
    with artifact.disk_faults(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with artifact.new_directory(target, replace=True) as temporary:
        model.save_pretrained(str(temporary))
        for item in _copied(path, base):
            shutil.copyfile(item, temporary / item.name)
        artifact.write_manifest(temporary, "model", settings={"adapter": str(path)}, parents=[path, base])
