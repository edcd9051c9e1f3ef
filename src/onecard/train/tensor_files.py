"""Tensors in safetensors files, as torch.distributed.checkpoint and every other reader of that format finds them.

Written from where the tensors lie. The library's own writer copies each file twice in memory first, during which other
threads of Python stand still: with it, a card would wait for a checkpoint that is written in the background.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(folder: Path, tensors: dict[str, Tensor], *, file_bytes: int) -> None:
    """Write files of at most `file_bytes` (a larger tensor has one to itself) and the index of what lies where."""
    files = _split(tensors, file_bytes)
    where: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, part)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": size_bytes(tensors)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def size_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _split(tensors: dict[str, Tensor], file_bytes: int) -> list[dict[str, Tensor]]:
    made: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if made[-1] and filled + size > file_bytes:
            made.append({})
            filled = 0
        made[-1][name] = tensor
        filled += size
    return made


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """The length of the head, the head (JSON), and the tensors one after another, the widest types first: aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    head: dict[str, dict[str, object]] = {}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)
