"""Opening model directories: Hugging Face layout, safetensors only, no remote code, no network.

A path may be a model directory, a run directory (its model/ is taken), a GGUF file (what it unpacks to is taken) or an
adapter directory of PEFT (its base with the adapter added is taken).
"""

from __future__ import annotations

import sys
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact
from onecard.errors import ArtifactError
from onecard.model import adapter_base, gguf_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def model_directory(path: Path) -> Path:
    """The directory with config.json: `path` itself, its model/, or what is made of a GGUF file or an adapter.

    ArtifactError says what is missing.
    """
    if gguf_file.is_gguf(path):
        return gguf_file.unpacked(path)
    if not path.exists():
        raise ArtifactError(f"There is no model at {path}.", "Check the path; train one with `onecard pretrain`.")
    if adapter_base.is_adapter(path):
        return adapter_base.merged(path)
    for candidate in (path, path / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    if (path / "checkpoints").is_dir():
        raise ArtifactError(
            f"The run in {path} is not finished: it has checkpoints but no model yet.",
            "Run the command that started it again; it resumes.",
        )
    raise ArtifactError(f"{path} holds no model (no config.json).", "Give a model directory or a finished run.")


def tokenizer_file(path: Path) -> Path:
    """tokenizer.json of a tokenizer or model directory, the model of a run, or a GGUF file; it need not exist."""
    if gguf_file.is_gguf(path):
        path = gguf_file.unpacked(path)
    elif adapter_base.is_adapter(path):
        path = adapter_base.merged(path)
    own = path / "tokenizer.json"
    return own if own.is_file() else path / "model" / "tokenizer.json"


def tokenizer_hash(path: Path) -> str:
    """Hash of everything that decides the ids that a tokenizer gives, its settings and chat template included."""
    directory = tokenizer_file(path).parent
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    files = [directory / name for name in (*names, "chat_template.jinja", "chat_template.json")]
    return artifact.hash_json([[file.name, artifact.hash_file(file)] for file in files if file.is_file()])


def weights_hash(directory: Path) -> str:
    """Hash of the weights in a model directory alone: the same wherever it lies and whatever stands beside them."""
    return artifact.hash_json(
        [[file.name, artifact.hash_file(file)] for file in sorted(directory.glob("*.safetensors"))]
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a tokenizer, model or run directory, or of a GGUF file."""
    directory = tokenizer_file(path).parent
    if not (directory / "tokenizer.json").is_file():
        raise ArtifactError(
            f"{path} holds no tokenizer (no tokenizer.json).",
            "Give a directory written by `onecard tokenizer train`, or a complete model directory.",
        )
    silence_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as fault:
        raise ArtifactError(f"The tokenizer in {directory} cannot be read: {first_line(fault)}.", COPY_AGAIN) from fault
    return tokenizer  # type: ignore[no-any-return]


def load_architecture(path: Path) -> Any:
    """The transformers configuration of a model directory: what it is, without its weights."""
    from transformers import AutoConfig

    silence_transformers()
    directory = model_directory(path)
    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as fault:
        raise ArtifactError(f"{directory}/config.json cannot be read: {first_line(fault)}.", COPY_AGAIN) from fault


def load_model(
    path: Path, *, dtype: torch.dtype | None = None, attention: str | None = None, device: str = "cpu"
) -> PreTrainedModel:
    """The causal language model of a directory in evaluation mode; `dtype` None is fp32 (the form it is trained in)."""
    import torch
    from safetensors import SafetensorError

    silence_transformers()
    from onecard.model import compressed_files

    directory = model_directory(path)
    if not any(directory.glob("*.safetensors")):
        raise ArtifactError(f"{directory} has no *.safetensors file with the weights.", COPY_AGAIN)
    try:
        kind, place, further = compressed_files.opening(directory, dtype or torch.float32)
        loaded: Any = kind.from_pretrained(
            place,
            dtype=dtype or torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **further,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as fault:
        raise ArtifactError(f"The model in {directory} cannot be read: {first_line(fault)}.", COPY_AGAIN) from fault
    model, found = loaded
    # The library would fill what is missing with random numbers.
    absent = sorted({str(key) for kind in ("missing_keys", "mismatched_keys") for key in found[kind]})
    if absent:
        raise ArtifactError(f"The files in {directory} lack {len(absent)} weights, such as {absent[0]}.", COPY_AGAIN)
    return model.to(device).eval()  # type: ignore[no-any-return]


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, path: Path) -> None:
    """ArtifactError if the tokenizer has an id that the model has no row for."""
    largest = vocabulary_rows(tokenizer) - 1
    embeddings: Any = model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    if largest >= rows:
        raise ArtifactError(
            f"The tokenizer in {path} has ids up to {largest}, the model has {rows} rows: they do not belong together.",
            "Use the tokenizer that the model was trained with.",
        )


def check_finite(model: torch.nn.Module, path: Path) -> None:
    """ArtifactError if a weight is not a number, or infinite: everything that the model computes would be."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise ArtifactError(
                f"The model in {path} is broken: {name} holds numbers that are none (NaN or infinite).",
                "Take an earlier checkpoint, or copy the model again from where it came.",
            )


def vocabulary_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """How many rows an embedding needs for every id of a tokenizer: its largest id + 1 (ids may have gaps)."""
    return int(max(tokenizer.get_vocab().values())) + 1


def rows_without_token(tokenizer: PreTrainedTokenizerFast, rows: int) -> list[int]:
    """Which of `rows` rows of an embedding no token has (padding, gaps): ids that must never be generated."""
    return sorted(set(range(rows)) - set(tokenizer.get_vocab().values()))


def silence_transformers() -> None:
    """Turn off transformers' own progress bars and notes; its errors stay. Only `console` speaks to the user.

    So with torchao, which says what does not fit this Python. To be called before a model class is imported: then
    transformers would import torchao too, where it is installed, a second or two for weights that are not read here.
    """
    from transformers.utils import logging as theirs

    _spare_torchao()
    logging: Any = theirs
    for name in ("torchao", "torch.utils._pytree"):
        getLogger(name).setLevel(ERROR)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


COPY_AGAIN = "Copy or make the directory again; it is incomplete or damaged."


def _spare_torchao() -> None:
    """Let transformers believe that torchao is not installed, unless it has been imported already."""
    from transformers.utils import import_utils

    if "torchao" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment]
    try:
        import_utils.is_torchao_available()  # which remembers its answer
    finally:
        del sys.modules["torchao"]


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0].rstrip(".")
