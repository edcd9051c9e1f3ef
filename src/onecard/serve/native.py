"""Decoding on a CPU in one call of compiled C++ a step, for models built as Llama is (Mistral, Qwen2, Qwen3 too).

In: a loaded model in fp32, and those of its weights that are integers with scales. A weight whose numbers are all ones
of bf16 stands as such, which loses nothing and is read in half the time; others stand as fp32. Out: an object that
turns some tokens of some requests into logits, and keeps keys and values. What makes small models slow otherwise is not
arithmetic: it is the interpreter between hundreds of small operations, and memory that is read once more for every
request. `decoder.cpp` is compiled at the first use and kept in the user's cache. It does not know requests, sampling or
text.

Shape legend: M tokens of a step, S slots, H key heads, K positions, D size of a head, V rows of the head.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from onecard import console
from onecard.model.integer_weights import Scheme, codes, restored, scales

_MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Rotary angles that depend on the longest request of a step: one would change the answers of the others.
_OF_LENGTH = ("dynamic", "longrope")
_KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_FIRST_CAPACITY = 256


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in _PROJECTIONS),
        ("norm_before", ctypes.c_void_p),
        ("norm_after", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "key_heads", "head_size", "inner")),
        ("capacity", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("final_norm", ctypes.c_void_p),
        ("head", _Matrix),
        ("layer", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class IntegerWeight:
    """A weight as codes (int8, outputs x inputs) and their steps (fp32, outputs x groups)."""

    codes: torch.Tensor
    steps: torch.Tensor
    scheme: Scheme


def supports(model: Any) -> bool:
    """Whether the compiled step computes this model: its kind, its parts and its sizes are those it was written for."""
    config = model.config
    if type(model).__name__ not in _MODELS or model.device.type != "cpu":
        return False
    layers = model.model.layers
    if getattr(config, "hidden_act", "") != "silu" or not len(layers):
        return False
    if getattr(model.model.rotary_emb, "rope_type", "default") in _OF_LENGTH:
        return False
    linear = [layer.get_submodule(name) for layer in layers for name in _PROJECTIONS.values()]
    if any(type(module) is not torch.nn.Linear for module in [*linear, model.lm_head]):
        return False  # an adapter, or a quantized layer of a library
    sizes = [size for module in linear for size in module.weight.shape]
    return layers[0].self_attn.head_dim % 16 == 0 and all(size % 16 == 0 for size in sizes)


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled step; None (with a note) where no compiler is, or where it fails."""
    source = Path(__file__).with_name("decoder.cpp")
    compiler = next(
        (found for name in (os.environ.get("CXX", "g++"), "g++", "clang++") if (found := shutil.which(name))), None
    )
    if compiler is None:
        console.note("  no C++ compiler found: answers take longer (install g++ for more speed)")
        return None
    text = source.read_bytes()
    runtime = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    known = hashlib.sha256(
        b"\0".join([text, " ".join((compiler, *_FLAGS)).encode(), _processor(), os.fsencode(runtime)])
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onecard" / "native"
    made = folder / f"decoder-{known.hexdigest()[:16]}.so"
    if not made.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            console.note("  compiling the steps of answers for this processor, once")
            _compile(compiler, source, runtime, made)
        except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as fault:
            reason = (getattr(fault, "stderr", None) or str(fault)).strip().splitlines()
            console.note(f"  answers take longer: the C++ compiler failed ({reason[0] if reason else fault})")
            return None
    try:
        loaded = ctypes.CDLL(str(made))
    except OSError as fault:  # such as a cache on a file system where nothing may be run
        console.note(f"  answers take longer: the compiled step cannot be loaded ({fault})")
        return None
    loaded.onecard_step.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.onecard_step.argtypes = [pointer, number, *[pointer] * 5, number, *[pointer] * 3, number]
    return loaded


def _compile(compiler: str, source: Path, runtime: Path, target: Path) -> None:
    """Beside its place, then renamed: two processes at once do no harm."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        # With the threads of torch: a second crew would wait in a circle for the same cores.
        own = [str(runtime)] if runtime.exists() else []
        subprocess.run(  # noqa: S603 - our own source, and the compiler that the user's environment names
            [compiler, *_FLAGS, str(source), "-o", str(fresh), *own],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        fresh.replace(target)


def _processor() -> bytes:
    """What this processor can do: code compiled for it may not run on another that shares a home."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


class NativeModel:
    """A model with its keys and values. Slots are numbers from 0; a slot holds what was computed for it in order.

    `integers` gives weights by module name that stand as codes; the model holds what they mean. The layers' own weights
    are given up where they were replaced.
    """

    mixes = True
    """Whether prompts and answers may go into one step."""

    def __init__(
        self,
        model: Any,
        slots: int,
        max_length: int,
        integers: Mapping[str, IntegerWeight] | None = None,
    ) -> None:
        found = library()
        assert found is not None and supports(model), "asked before"
        self._library, self._model = found, model
        self._held: list[Any] = []  # what the structures point at
        self.slots, self.max_length, self._integers = slots, max_length, integers or {}
        attention = model.model.layers[0].self_attn
        config = model.config
        self._embedding, self._rotary = model.model.embed_tokens, model.model.rotary_emb
        self._structures = (_Layer * len(model.model.layers))()
        self._core = _Model(
            layers=len(model.model.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            inner=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            scaling=attention.scaling,
            final_norm=self._vector(model.model.norm.weight),
            layer=ctypes.addressof(self._structures),
        )
        for number, (layer, place) in enumerate(zip(model.model.layers, self._structures)):
            self._fill(layer, place, f"model.layers.{number}.")
        self._core.head = self._matrix(model.lm_head, "lm_head")
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._scratch = torch.empty(0)
        self._reserve(1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads, the table of embeddings left out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held)

    def step(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], wanted: Sequence[int]
    ) -> torch.Tensor:
        """Compute M tokens, each at its position of its slot; logits after the `wanted` ones (indices): [W, V] fp32.

        The tokens of one slot stand in order, and follow those that the slot holds.
        """
        count, core = len(tokens), self._core
        self._reserve(max(positions) + 1)
        x = self._embedding(torch.tensor(tokens)).float().contiguous()
        places = torch.tensor(positions)
        cosines, sines = (angle[0].float().contiguous() for angle in self._rotary(x, places[None]))
        rows, last = torch.tensor(slots), torch.tensor(wanted, dtype=torch.long)
        logits = torch.empty(len(wanted), core.head.rows)
        threads = torch.get_num_threads()
        wide = 2 * core.hidden + 2 * (core.heads + core.key_heads) * core.head_size + 2 * core.inner
        needed = count * wide + threads * core.capacity
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        self._library.onecard_step(
            ctypes.addressof(core), count, x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), rows.data_ptr(),
            places.data_ptr(), len(wanted), last.data_ptr(), logits.data_ptr(), self._scratch.data_ptr(), threads,
        )  # fmt: skip
        return logits

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        for block in (*self.keys, *self.values):
            block[target, :, :length] = block[source, :, :length]

    def clear(self, slot: int) -> None:
        """Nothing to do: a step reads no position that was not written for the same request."""

    def forget(self) -> None:
        """Drop the keys and values of all slots."""
        self.keys, self.values = [], []
        self._core.capacity = 0
        self._reserve(1)

    def read(self, slot: int, first: int, last: int) -> torch.Tensor:
        """A copy of the keys and values of positions first..last - 1: [2 x layers, H, last - first, D]."""
        return torch.stack([block[slot, :, first:last] for block in (*self.keys, *self.values)])

    def write(self, slot: int, first: int, stored: torch.Tensor) -> None:
        """Put what `read` gave to a slot, from position `first` on."""
        last = first + stored.shape[2]
        self._reserve(last)
        for block, part in zip((*self.keys, *self.values), stored):
            block[slot, :, first:last] = part

    def _reserve(self, longest: int) -> None:
        """Have room for `longest` positions in every slot, doubling up to the longest context."""
        core = self._core
        if longest <= core.capacity:
            return
        capacity = max(core.capacity, _FIRST_CAPACITY)
        while capacity < longest:
            capacity *= 2
        capacity = min(capacity, self.max_length)
        assert longest <= capacity, "longer than the context"
        shape = (self.slots, core.key_heads, capacity, core.head_size)
        for number, place in enumerate(self._structures):
            for blocks, name in ((self.keys, "keys"), (self.values, "values")):
                larger = torch.empty(shape)
                if core.capacity:
                    larger[:, :, : core.capacity] = blocks[number]
                    blocks[number] = larger
                else:
                    blocks.append(larger)
                setattr(place, name, larger.data_ptr())
        core.capacity = capacity

    def _fill(self, layer: Any, place: _Layer, prefix: str) -> None:
        for name, path in _PROJECTIONS.items():
            setattr(place, name, self._matrix(layer.get_submodule(path), prefix + path))
        place.norm_before = self._vector(layer.input_layernorm.weight)
        place.norm_after = self._vector(layer.post_attention_layernorm.weight)
        for name, field in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            norm = getattr(layer.self_attn, name, None)
            if norm is not None:
                setattr(place, field, self._vector(norm.weight))
        # Where layers differ they say themselves what they see; Mistral's are all alike.
        attention, config = layer.self_attn, self._model.config
        own = hasattr(attention, "sliding_window")
        place.window = (attention.sliding_window if own else getattr(config, "sliding_window", None)) or 0

    def _vector(self, tensor: torch.Tensor | None) -> int | None:
        """The address of some floats that are kept from now on."""
        return None if tensor is None else self._kept(tensor.detach().float())

    def _kept(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, module: Any, name: str) -> _Matrix:
        weight = module.weight.detach()
        rows, columns = weight.shape
        made = _Matrix(bias=self._vector(module.bias), rows=rows, columns=columns, group=columns)
        whole, half = self._integers.get(name), weight.to(torch.bfloat16)
        if whole is not None:
            made.scales = self._kept(whole.steps.float())
            made.group = whole.scheme.group or columns
            made.kind = _KINDS[f"int{whole.scheme.bits}"]
            made.data = self._kept(whole.codes if whole.scheme.bits == 8 else _nibbles(whole.codes))
        elif bool((half.float() == weight).all()):
            made.kind, made.data = _KINDS["bf16"], self._kept(half)
        else:
            made.kind, made.data = _KINDS["fp32"], self._kept(weight.float())
        if made.kind != _KINDS["fp32"] and weight.data_ptr() != self._embedding.weight.data_ptr():
            module.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        return made


def round_weights(model: Any, kind: str) -> dict[str, IntegerWeight]:
    """Round the layers' weights to `bf16`, `int8` or `int4`, in place; the codes of integers by module name.

    The head decides between tokens directly and is left in 16 bits, as files of quantized weights have it. Four bits
    have a scale for each 32 neighbours: weights that are rounded without looking at data need many.
    """
    made = {}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for path in _PROJECTIONS.values():
                weight = layer.get_submodule(path).weight
                if kind == "bf16":
                    weight.copy_(weight.to(torch.bfloat16))
                    continue
                scheme = Scheme(8) if kind == "int8" else Scheme(4, _group(weight.shape[1]))
                steps = scales(weight, scheme)
                one = IntegerWeight(codes(weight, steps, scheme), steps, scheme)
                weight.copy_(restored(one.codes, steps, scheme))
                made[f"model.layers.{number}.{path}"] = one
        embedding = model.get_input_embeddings().weight
        head = model.lm_head.weight
        for weight in [head] if head.data_ptr() == embedding.data_ptr() else [head, embedding]:
            weight.copy_(weight.to(torch.bfloat16))
    return made


def _group(columns: int) -> int:
    return next(group for group in (32, 16) if columns % group == 0)


def _nibbles(codes_: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits two a byte: of each sixteen neighbours, the first eight low and the last eight high."""
    rows, columns = codes_.shape
    grouped = (codes_.to(torch.int16) + 8).to(torch.uint8).reshape(rows, columns // 16, 2, 8)
    return (grouped[:, :, 0] | (grouped[:, :, 1] << 4)).reshape(rows, columns // 2)
