"""The least memory an update can take, whatever program computes it: to find figures that cannot be right.

In: a `Job`. Out: bytes of weights, of what the optimizer remembers, and of gradients or of the few activations that no
way of saving avoids. A published figure below that was measured otherwise than it says (another optimizer, another
format, states elsewhere). Everything here is counted, nothing is estimated; it does not say what an update does take.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.plan.job import Job
from onecard.plan.shape import Shape, shape_of

# NF4 (Dettmers et al. 2023): 4 bits a weight and an fp32 scale for each block of 64; with double quantization the scale
# has 8 bits, and each 256 of them share an fp32 one.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
NF4_PLAIN_BITS = 4 + 32 / 64
# 8-bit states: a byte for each of two numbers, and an fp32 scale of each for a block of 256.
EIGHT_BIT_STATE_BYTES = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class Floor:
    """The least that each part takes, in bytes. `together` says whether gradients are there during forward passes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    together: bool

    @property
    def total_bytes(self) -> int:
        """The least peak: activations go as gradients come, unless gradients of an earlier pass are kept."""
        moving = self.gradients + self.activations if self.together else max(self.gradients, self.activations)
        return self.weights + self.optimizer + moving


def floor(job: Job, shape: Shape | None = None) -> Floor:
    """The least memory of an update of `job`, whose model has this shape."""
    shape = shape or shape_of(job.model)
    trained = trained_parameters(job, shape)
    kept = 0 if job.optimizer_in_backward else trained * _gradient_bytes(job)
    return Floor(
        weights=weight_bytes(job, shape),
        gradients=kept,
        optimizer=int(trained * _state_bytes(job)),
        activations=_activation_bytes(job, shape),
        together=job.engine.keeps_gradients or job.gradient_accumulation_steps > 1,
    )


def impossible(job: Job, measured_bytes: int) -> str | None:
    """Why a figure cannot be the peak of `job`; None if it can."""
    least = floor(job)
    if measured_bytes >= least.total_bytes:
        return None
    return (
        f"{measured_bytes / 1e9:.2f} GB is below the {least.total_bytes / 1e9:.2f} GB that weights "
        f"({least.weights / 1e9:.2f}), optimizer ({least.optimizer / 1e9:.2f}), gradients "
        f"({least.gradients / 1e9:.2f}) and the inputs of the layers ({least.activations / 1e9:.2f}) take at least."
    )


def trained_parameters(job: Job, shape: Shape) -> int:
    """Parameters that get a gradient."""
    return shape.parameters if job.method == "full" else adapter_parameters(job, shape)


def adapter_parameters(job: Job, shape: Shape) -> int:
    """Parameters of adapters: A (rank x inputs) and B (outputs x rank) beside each chosen map; DoRA's magnitudes."""
    chosen = [one for one in shape.maps if not job.target_modules or _aimed_at(one.name, job.target_modules)]
    magnitudes = sum(one.count * one.outputs for one in chosen) if job.dora else 0
    return sum(one.count * job.lora_rank * (one.inputs + one.outputs) for one in chosen) + magnitudes


def weight_bytes(job: Job, shape: Shape) -> int:
    """Weights as stored: 4 bits for the layers' maps in QLoRA, where the rest has 16; adapters besides."""
    if job.method == "qlora":
        rest = shape.parameters - shape.matrix_parameters
        base = shape.matrix_parameters * NF4_BITS / 8 + rest * 2
    else:
        base = shape.parameters * _stored_bytes(job)
    adapters = 0 if job.method == "full" else adapter_parameters(job, shape) * _adapter_bytes(job)
    return int(base) + adapters


def _aimed_at(name: str, targets: tuple[str, ...]) -> bool:
    return any(name == target.rpartition(".")[2] for target in targets)


def _stored_bytes(job: Job) -> int:
    if job.weights is not None:
        return 4 if job.weights == "fp32" else 2
    return 2 if job.precision == "pure_bf16" else 4


def _adapter_bytes(job: Job) -> int:
    return 4 if job.engine.adapters == "fp32" else 2


def _gradient_bytes(job: Job) -> int:
    if job.method != "full":
        return _adapter_bytes(job)
    return 2 if job.gradients == "bf16" or _stored_bytes(job) == 2 else 4


def _state_bytes(job: Job) -> float:
    """Bytes of optimizer states for each trained parameter, at least."""
    if job.optimizer in ("adafactor", "sgd") or job.optimizer_states == "host":
        return 0
    if job.optimizer_states == "8bit":
        return EIGHT_BIT_STATE_BYTES / (2 if job.optimizer == "muon" else 1)
    of_weights = job.engine.states_like_weights
    width = (_stored_bytes(job) if job.method == "full" else _adapter_bytes(job)) if of_weights else 4
    # Muon remembers one number a parameter of a matrix, AdamW two.
    return width * (1 if job.optimizer == "muon" else 2)


def _activation_bytes(job: Job, shape: Shape) -> int:
    """The inputs of all layers but the first: what recomputing every layer keeps; none where they leave the card."""
    if job.activation_offload:
        return 0
    tokens = job.batch_size * (job.max_length if job.packed else job.longest_tokens or job.max_length)
    width = 1 if job.activation_compression == "8bit" else 4 if job.precision == "fp32" else 2
    return (shape.layers - 1) * tokens * shape.width * width
