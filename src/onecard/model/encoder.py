"""Models that turn a text into numbers: opened, and read as the mean of their last hidden states.

In: a model directory of any kind that transformers opens as a plain model, and encoded texts. Out: a vector of length 1
for each text. Encoders whose directory says so (1_Pooling of sentence-transformers) are read at their first token.

Shapes: S texts, T tokens, D size of a vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.errors import ArtifactError
from onecard.model.load import COPY_AGAIN, first_line, model_directory, silence_transformers

if TYPE_CHECKING:
    from torch import Tensor


def load_encoder(path: Path) -> Any:
    """The model in `path` without its head, in fp32, for use. ArtifactError if it cannot be read or lacks weights."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModel

    silence_transformers()
    directory = model_directory(path)
    try:
        model, found = AutoModel.from_pretrained(
            str(directory),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as fault:
        raise ArtifactError(f"The model in {directory} cannot be read: {first_line(fault)}.", COPY_AGAIN) from fault
    # A pooler is a head of its own, which is not asked.
    absent = sorted(str(key) for key in found["missing_keys"] if "pooler" not in str(key).split("."))
    if absent:
        raise ArtifactError(f"The files in {directory} lack {len(absent)} weights, such as {absent[0]}.", COPY_AGAIN)
    return model.eval()


def reads_the_first_token(path: Path) -> bool:
    """Whether the directory says that a text is read at its first token rather than as the mean of all.

    ArtifactError for one that says it is read in another way, which would give other vectors than it was trained for.
    """
    directory = model_directory(path)
    pooling, modules = _said(directory / "1_Pooling" / "config.json"), _said(directory / "modules.json")
    pooling = pooling if isinstance(pooling, dict) else {}
    known = ("pooling_mode_cls_token", "pooling_mode_mean_tokens")
    odd = [
        key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True and key not in known
    ]
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        if kind and not kind.endswith(("Transformer", "Pooling", "Normalize")):
            odd.append(kind)
    if odd:
        raise ArtifactError(
            f"The vectors of {path} are made by {odd[0]}, which is not known here.",
            "Give a model that is read as the mean of its tokens, or at the first.",
        )
    return bool(pooling.get("pooling_mode_cls_token"))


def _said(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def readable_tokens(model: Any, most: int) -> int:
    """`most` tokens, or as many as there are positions for: RoBERTa kinds begin to count after their padding."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            return min(most, int(part.num_embeddings) - int(part.padding_idx) - 1)
    return most


def vectors(
    model: Any, documents: Sequence[Sequence[int]], *, first_token: bool = False, batch_tokens: int = 8192
) -> Tensor:
    """A vector of length 1 for each encoded text (S x D, fp32, on the CPU), in their order.

    Texts of like length are computed together, as many as `batch_tokens` hold; padding is not looked at.
    """
    import torch

    device = next(model.parameters()).device
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number]))
    found: list[Tensor] = [torch.empty(0)] * len(documents)
    at = 0
    with torch.inference_mode():
        while at < len(order):
            width = len(documents[order[at]])
            chosen = order[at : at + max(1, batch_tokens // width)]
            ids_ST = torch.zeros(len(chosen), width, dtype=torch.int64)
            mask_ST = torch.zeros(len(chosen), width, dtype=torch.int64)
            for row, number in enumerate(chosen):
                length = len(documents[number])
                ids_ST[row, :length] = torch.tensor(documents[number], dtype=torch.int64)
                mask_ST[row, :length] = 1
            hidden_STD = (
                model(input_ids=ids_ST.to(device), attention_mask=mask_ST.to(device)).last_hidden_state.float().cpu()
            )
            if first_token:
                read_SD = hidden_STD[:, 0]
            else:
                read_SD = (hidden_STD * mask_ST[..., None]).sum(1) / mask_ST.sum(1, keepdim=True)
            for number, vector in zip(chosen, torch.nn.functional.normalize(read_SD, dim=-1)):
                found[number] = vector
            at += len(chosen)
    return torch.stack(found)
