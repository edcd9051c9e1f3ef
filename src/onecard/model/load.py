"""Opening model directories: Hugging Face layout, safetensors only, no remote code, no network.

A path may be a model directory or a run directory (its model/ is taken).
"""

from __future__ import annotations

from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.errors import ArtifactError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def model_directory(path: Path) -> Path:
    """The directory with config.json: `path` itself or its model/. ArtifactError says what is missing."""
    if not path.exists():
        raise ArtifactError(f"There is no model at {path}.", "Check the path; train one with `onecard pretrain`.")
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
    """tokenizer.json of a tokenizer or model directory, or of the model of a run; it need not exist."""
    own = path / "tokenizer.json"
    return own if own.is_file() else path / "model" / "tokenizer.json"


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a tokenizer, model or run directory."""
    directory = tokenizer_file(path).parent
    if not (directory / "tokenizer.json").is_file():
        raise ArtifactError(
            f"{path} holds no tokenizer (no tokenizer.json).",
            "Give a directory written by `onecard tokenizer train`, or a complete model directory.",
        )
    from transformers import AutoTokenizer

    silence_transformers()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as fault:
        raise ArtifactError(
            f"The tokenizer in {directory} cannot be read: {_first_line(fault)}.", _COPY_AGAIN
        ) from fault
    return tokenizer  # type: ignore[no-any-return]


def load_model(
    path: Path, *, dtype: torch.dtype | None = None, attention: str | None = None, device: str = "cpu"
) -> PreTrainedModel:
    """The causal language model of a directory in evaluation mode; `dtype` None is fp32 (the form it is trained in)."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    silence_transformers()
    directory = model_directory(path)
    if not any(directory.glob("*.safetensors")):
        raise ArtifactError(f"{directory} has no *.safetensors file with the weights.", _COPY_AGAIN)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype or torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as fault:
        raise ArtifactError(f"The model in {directory} cannot be read: {_first_line(fault)}.", _COPY_AGAIN) from fault
    model, found = loaded
    # The library would fill what is missing with random numbers.
    absent = sorted({str(key) for kind in ("missing_keys", "mismatched_keys") for key in found[kind]})
    if absent:
        raise ArtifactError(f"The files in {directory} lack {len(absent)} weights, such as {absent[0]}.", _COPY_AGAIN)
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


def vocabulary_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """How many rows an embedding needs for every id of a tokenizer: its largest id + 1 (ids may have gaps)."""
    return int(max(tokenizer.get_vocab().values())) + 1


def silence_transformers() -> None:
    """Turn off transformers' own progress bars and notes; its errors stay. Only `console` speaks to the user.

    So with torchao, which transformers imports where it is installed and which then says what does not fit this Python.
    """
    from transformers.utils import logging as theirs

    logging: Any = theirs
    for name in ("torchao", "torch.utils._pytree"):
        getLogger(name).setLevel(ERROR)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


_COPY_AGAIN = "Copy or make the directory again; it is incomplete or damaged."


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0].rstrip(".")
