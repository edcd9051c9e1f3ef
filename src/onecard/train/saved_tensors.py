"""What autograd keeps for the backward pass, kept smaller or elsewhere: in 8 bits, or in the memory of the host.

Works through the saved-tensor hooks of PyTorch, which see what plain and compiled layers keep alike. Weights are kept
anyway and stay as they are; so do small tensors (statistics of norms and of softmax, angles of positions), whose error
would cost more than they weigh. A tensor that several operations keep is packed once.
It does not know of layers or models: the caller says which storages are weights and what counts as small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Values that share one scale: few enough that one outlier spoils little, many enough that scales weigh 3 %.
BLOCK_VALUES = 128
# Values quantized at a time: temporaries stay small beside what is saved.
PIECE_VALUES = 1 << 22


class Packed(Protocol):
    """Values kept in another form; `unpack` gives the flat tensor back, as often as it is asked."""

    def unpack(self) -> Tensor: ...

    def again(self) -> None:
        """One more operation keeps the same values and will ask for them."""


class Packer(Protocol):
    """Turns a flat tensor into a Packed."""

    def pack(self, flat: Tensor) -> Packed: ...


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values (blocks x BLOCK_VALUES, the last filled with zeros) and the fp32 scale of each block (blocks x 1).

    A value is off by at most 1/254 of the largest of its block.
    """
    whole, rest = divmod(flat.numel(), BLOCK_VALUES)
    rows = whole + (rest > 0)
    values = torch.empty(rows, BLOCK_VALUES, dtype=torch.int8, device=flat.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=flat.device)

    def fill(blocks: Tensor, where: slice) -> None:
        largest = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1, keepdim=True, dtype=torch.float32)
        scales[where] = largest.mul_(1 / 127)
        # A block of zeros has the scale 0 and stays zero. Rounding of the inverse may lead above 127.
        inverse = largest.reciprocal_().nan_to_num_(posinf=0.0)
        values[where] = (blocks * inverse).round_().clamp_(-127, 127)

    for begin, end in _pieces(whole):
        fill(flat[begin * BLOCK_VALUES : end * BLOCK_VALUES].view(-1, BLOCK_VALUES), slice(begin, end))
    if rest:
        last = torch.zeros(1, BLOCK_VALUES, dtype=flat.dtype, device=flat.device)
        last[0, :rest] = flat[whole * BLOCK_VALUES :]
        fill(last, slice(whole, rows))
    return values, scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The first `count` values of `quantize`, flat."""
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    for begin, end in _pieces(len(made)):
        torch.mul(values[begin:end], scales[begin:end], out=made[begin:end])
    return made.view(-1)[:count]


def _pieces(rows: int) -> list[tuple[int, int]]:
    step = PIECE_VALUES // BLOCK_VALUES
    return [(begin, min(rows, begin + step)) for begin in range(0, rows, step)]


class EightBit:
    """A flat float tensor in 8 bits; its values lie where `where` puts them (nowhere else, by default)."""

    def __init__(self, flat: Tensor, where: Packer | None = None) -> None:
        self._dtype, self._count = flat.dtype, flat.numel()
        values, self._scales = quantize(flat)
        self._values: Packed = _Here(values.view(-1)) if where is None else where.pack(values.view(-1))

    def unpack(self) -> Tensor:
        """The values in the format they came in."""
        values = self._values.unpack().view(-1, BLOCK_VALUES)
        return dequantize(values, self._scales, self._dtype, self._count)

    def again(self) -> None:
        """Counted by the place of the values."""
        self._values.again()


class _Here:
    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def unpack(self) -> Tensor:
        return self._flat

    def again(self) -> None:
        pass


class EightBitPacker:
    """Packs into 8 bits, and these into `where`."""

    def __init__(self, where: Packer | None = None) -> None:
        self._where = where

    def pack(self, flat: Tensor) -> EightBit:
        """Quantize."""
        return EightBit(flat, self._where)


@dataclass(slots=True)
class _View:
    """A packed tensor as one operation saw it."""

    packed: Packed
    size: torch.Size
    stride: tuple[int, ...]
    dense: bool

    def tensor(self) -> Tensor:
        flat = self.packed.unpack()
        if self.dense:
            return flat.as_strided(self.size, self.stride)
        # Compiled code expects the very strides that it saved, gaps included.
        made = torch.empty_strided(self.size, self.stride, dtype=flat.dtype, device=flat.device)
        return made.copy_(flat.view(self.size))


class SavedTensors:
    """The pair of hooks. `floats_only`: integers stay as they are (for what is not exact)."""

    def __init__(self, packer: Packer, *, smallest_values: int, floats_only: bool) -> None:
        self._packer, self._smallest, self._floats_only = packer, smallest_values, floats_only
        self._weights: set[int] = set()
        self._weight_shapes: dict[tuple[int, ...], torch.dtype] = {}
        self._seen: dict[tuple[object, ...], tuple[StorageWeakRef, Packed]] = {}
        self._nested = threading.local()
        self.packed_bytes = 0

    def begin(self, weights: Iterable[Tensor], *, smallest_values: int) -> None:
        """A new forward pass: forget what the last one packed, and take note of where the weights lie now."""
        self._seen.clear()
        self._smallest, self.packed_bytes = smallest_values, 0
        self._weights, self._weight_shapes = set(), {}
        for weight in weights:
            self._weights.add(weight.untyped_storage()._cdata)
            if weight.ndim == 2:
                self._weight_shapes[tuple(weight.shape)] = weight.dtype
                self._weight_shapes[tuple(weight.shape)[::-1]] = weight.dtype

    def end(self) -> None:
        """The forward pass is over: what was packed lives as long as autograd needs it."""
        self._seen.clear()

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """The hook that autograd calls with what it wants to keep."""
        if getattr(self._nested, "on", False) or not self._wanted(tensor):
            return tensor
        dense = _is_dense(tensor)
        if not dense and 0 in tensor.stride():
            return tensor  # an expanded tensor weighs less than its values
        self._nested.on = True
        try:
            with torch.no_grad():
                return _View(self._once(tensor, dense), tensor.size(), tensor.stride(), dense)
        finally:
            self._nested.on = False

    def unpack(self, kept: Tensor | _View) -> Tensor:
        """The hook that autograd calls when it needs the tensor again."""
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept.tensor()

    def _wanted(self, tensor: Tensor) -> bool:
        if tensor.numel() < self._smallest or tensor.layout != torch.strided:
            return False
        if self._floats_only and not tensor.is_floating_point():
            return False
        if tensor.untyped_storage()._cdata in self._weights:
            return False
        # Under autocast the 16-bit copy of a weight is kept: another storage, the shape of the weight.
        return self._weight_shapes.get(tuple(tensor.shape), tensor.dtype) == tensor.dtype

    def _once(self, tensor: Tensor, dense: bool) -> Packed:
        """Pack a tensor, or find it packed: the same values in the same storage, whatever shape they are seen in."""
        storage = tensor.untyped_storage()
        geometry = tensor.numel() if dense else (tensor.size(), tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), geometry, tensor.dtype, tensor._version)
        known = self._seen.get(key)
        # While the weak reference is held the address of the storage belongs to no other.
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            known[1].again()
            return known[1]
        flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous().view(-1)
        packed = self._packer.pack(flat.detach())
        self.packed_bytes += flat.numel() * flat.element_size()
        self._seen[key] = (StorageWeakRef(storage), packed)  # type: ignore[no-untyped-call]
        return packed


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill one piece of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride()) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
