"""A GGUF file as a model directory: unpacked once, kept, and read from there ever after.

In: a .gguf file, quantized in any way that transformers unpacks. Out: a model directory in Hugging Face layout with
dense fp32 weights, and the tokenizer and chat template of the same file. It lies in the user's cache folder
($XDG_CACHE_HOME or ~/.cache, onecard/gguf) under the content of the file, so that a run which goes on reads the very
same weights wherever the file lies by then. It writes no GGUF.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.errors import ArtifactError, MissingExtra

MAGIC = b"GGUF"
_COPY_AGAIN = "Copy or download the file again; it is incomplete, damaged or something else."


def is_gguf(path: Path) -> bool:
    """Whether a path means a GGUF file, by its name; it need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def unpacked(path: Path) -> Path:
    """The model directory that a GGUF file unpacks to; made at the first time.

    ArtifactError if there is no such file, or it cannot be read; MissingExtra if the package that reads it is missing.
    """
    if not path.is_file():
        raise ArtifactError(f"There is no file {path}.", "Check the path.")
    with artifact.disk_faults(path), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ArtifactError(f"{path} is no GGUF file, whatever its name says.", _COPY_AGAIN)
    status = path.stat()
    folder = _cache() / _hash(path.resolve(), status.st_size, status.st_mtime_ns)
    found = [made for made in sorted(folder.glob("*")) if (made / artifact.MANIFEST).is_file()]
    return found[0] if found else _unpack(path, folder / path.stem)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onecard" / "gguf"


@lru_cache
def _hash(path: Path, size: int, changed: int) -> str:
    """The content hash of a file, once for each state of it: a verb asks several times, and files are large."""
    return artifact.hash_file(path)


def _unpack(path: Path, target: Path) -> Path:
    parameters, kinds = _survey(path)
    console.note(
        f"  unpacking {path.name} ({parameters / 1e6:.0f}M parameters, {', '.join(kinds)}) once, to "
        f"{console.format_bytes(4 * parameters)} in {console.short_path(target)}"
    )
    with artifact.disk_faults(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with artifact.new_directory(target, replace=True) as temporary:
        try:
            _convert(path, temporary)
        # Whatever is wrong with a file that somebody else made, the library says it in its own ways.
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            RuntimeError,
            AttributeError,
            NotImplementedError,
        ) as fault:
            reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0].rstrip(".")
            raise ArtifactError(
                f"transformers cannot unpack {path}: {reason}.",
                "Use the model's own directory with safetensors instead, or a GGUF of an architecture it knows.",
            ) from fault
        artifact.write_manifest(
            temporary, "model", settings={"parameters": parameters, "gguf": path.name}, parents=[path]
        )
    return target


def _survey(path: Path) -> tuple[int, list[str]]:
    """How many weights are in a file, and in which formats, the most frequent first; ArtifactError if it is cut off."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise MissingExtra("gguf", f"Reading {path}", install='"onecard[gguf]"') from None
    try:
        tensors = gguf.GGUFReader(str(path)).tensors
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as fault:
        raise ArtifactError(f"{path} is damaged ({fault}).", _COPY_AGAIN) from fault
    if not tensors:
        raise ArtifactError(f"{path} holds no weights.", "Give the file of a whole model, not of a vocabulary alone.")
    weights: dict[str, int] = {}
    for tensor in tensors:
        name = tensor.tensor_type.name
        weights[name] = weights.get(name, 0) + int(tensor.n_elements)
    return sum(weights.values()), sorted(weights, key=lambda name: -weights[name])


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with its chat template, as transformers reads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(path.resolve().parent), **_place(path))


def read_model(path: Path) -> Any:
    """The model of a GGUF file with dense fp32 weights, as transformers reads it."""
    import torch
    import transformers

    from onecard.model.load import silence_transformers

    silence_transformers()
    place = _place(path)
    # Since 5.24 weights stay packed unless they are asked for dense; before that they never did.
    if hasattr(transformers, "GgufConfig"):
        place["quantization_config"] = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
    kind: Any = transformers.AutoModelForCausalLM
    # What the library says of its progress is not for the user.
    with contextlib.redirect_stderr(io.StringIO()):
        return kind.from_pretrained(str(path.resolve().parent), dtype=torch.float32, **place)


def _place(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}


def _convert(path: Path, directory: Path) -> None:
    import transformers

    from onecard.tokenizer.template import stop_token_ids
    from onecard.tokenizer.train import save_tokenizer

    tokenizer, model = read_tokenizer(path), read_model(path)
    stops = stop_token_ids(tokenizer)
    if stops:
        model.config.eos_token_id = stops[0] if len(stops) == 1 else stops
    generation: Any = transformers.GenerationConfig
    model.generation_config = generation(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=model.config.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(str(directory))
    save_tokenizer(tokenizer, directory)
    for file in directory.glob("*.safetensors"):  # written for the owner alone; the other files are for whom umask says
        file.chmod((directory / "config.json").stat().st_mode)
