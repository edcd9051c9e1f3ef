"""What one update of training is: everything that decides its memory and its time, and nothing else.

A `Job` is made from a recipe's settings, from a named architecture, or for a run of another tool that published what it
took. The planner predicts it; it never holds a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["full", "lora", "qlora"]
Format = Literal["fp32", "bf16", "fp16", "pure_bf16", "float8"]


@dataclass(frozen=True)
class Engine:
    """How the update is computed. The defaults are onecard's own loop; other tools differ in these."""

    chunked_loss: bool = True  # False: whole logits, in fp32 for the loss
    attention: Literal["packed", "sdpa", "eager"] = "packed"
    compiled: bool = True
    fused_optimizer: bool = True  # False: a copy for each list of tensors (foreach)
    # What only other tools do.
    autocast: bool = True  # False: every parameter has the format of `weights`, and products that of their inputs
    keeps_logits: bool = False  # with chunked_loss: every chunk's logits wait for backward, in the products' format
    states_like_weights: bool = False  # the optimizer's states have the format of the weights, such as bf16
    adapters: Literal["fp32", "bf16"] = "fp32"
    keeps_gradients: bool = False  # set to zero after an update, not freed
    keeps_softmax_inputs: bool = False  # softmax keeps what went in beside what came out (torch < 1.11)
    tensor_by_tensor: bool = False  # Adafactor goes from tensor to tensor, where PyTorch's takes lists of them
    double_quantization: bool = True  # QLoRA: the scales of blocks are in 8 bits
    keeps_quantized_inputs: bool = False  # QLoRA: inputs of frozen products wait for backward (bitsandbytes <= 0.41)


@dataclass(frozen=True)
class Job:
    """One update: a micro-batch is `batch_size` rows of `max_length` tokens.

    `model` is a transformers configuration. With `packed` rows are full; else `longest_tokens` (None: max_length) is
    what the longest row of a micro-batch is padded to. `weights` is the format of frozen or trained weights as stored;
    None: what `precision` keeps (fp32 for fp32, bf16 and fp16 autocast; bf16 for pure_bf16), 4 bits in QLoRA.
    """

    model: Any
    batch_size: int
    max_length: int
    gradient_accumulation_steps: int = 1
    method: Method = "full"
    lora_rank: int = 0
    target_modules: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    dora: bool = False
    packed: bool = True
    longest_tokens: int | None = None
    precision: Format = "bf16"
    weights: Literal["fp32", "bf16"] | None = None
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    optimizer_states: Literal["fp32", "8bit", "host"] = "fp32"
    optimizer_in_backward: bool = False
    gradients: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: Literal["none", "selective", "full"] | int = "none"
    activation_offload: bool = False
    activation_compression: Literal["none", "8bit"] = "none"
    evaluation: bool = True
    device: Literal["cuda", "cpu"] = "cuda"
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True)
class Moment:
    """A point of the update, in its order: what is held, by kind, in bytes; `place` names it ("backward, layer 7")."""

    place: str
    bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum over the kinds."""
        return sum(self.bytes.values())


# The kinds of `breakdown` and of a Moment.
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "workspace")


@dataclass(frozen=True)
class Memory:
    """What an update is predicted to hold on its device, in bytes.

    `peak_allocated_bytes` is the most that tensors take at once, `peak_reserved_bytes` what the allocator then holds,
    `context_bytes` what the device loses to the driver and libraries. `breakdown` has every kind at the peak;
    `moments` is the picture over the step, thinned to a few hundred points. `largest` names the largest tensors that
    live at the peak, with their bytes.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    breakdown: dict[str, int]
    moments: tuple[Moment, ...] = ()
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def needed_bytes(self) -> int:
        """What the device must have free."""
        return self.peak_reserved_bytes + self.context_bytes


@dataclass(frozen=True)
class Speed:
    """Time and energy of an update. `uncertainty` is a factor: the truth is expected within seconds / u to seconds * u.

    `measured` says whether the rates were measured on this machine, else they come from the table of cards.
    """

    seconds_per_update: float
    tokens_per_second: float
    uncertainty: float
    watts: float | None
    measured: bool
    parts: dict[str, float]  # seconds by cause: products, attention, memory traffic, optimizer, transfers


@dataclass(frozen=True)
class Target:
    """The machine that is planned for. Rates are of the machine itself where it was calibrated."""

    name: str
    device: Literal["cuda", "cpu"]
    capacity_bytes: int  # what programs may take of it
    capability: tuple[int, int] | None
    flops_per_second: dict[str, float]  # by format: fp32, bf16, fp16, float8
    memory_bytes_per_second: float
    host_bytes_per_second: float | None
    host_memory_bytes: int | None
    watts: float | None
    measured: bool
