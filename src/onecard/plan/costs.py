"""What an update costs any machine: products with their sizes, attention, bytes read and written, launches.

In: a `Job` and the `Shape` of its model. Out: `Costs`, counted and not measured. It knows nothing of a machine's rates.

Passes of a linear map of a micro-batch: forward, gradient of its input and, where its weights learn, of those; and
forward once more in layers that compute again. Attention needs two products of T x T a head forward and five backward
(Dao et al. 2022, who compute the scores again); half of them where it is causal.
Traffic is what is left between products when each layer is compiled: its norms, positions, activation and residual sums
each read and written once. Values in the stream between layers have the format of the embeddings, the others that of
the products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onecard.plan.job import Job
from onecard.plan.shape import Map, Shape

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "pure_bf16": 2, "float8": 2}
# What layers that are not compiled move more: every operation of a norm or an activation reads and writes by itself.
UNCOMPILED_TRAFFIC = 2.5
# Bytes of each logit that are read or written on the way to its gradient, without the products: 16-bit logits are
# widened, read for the maximum and the sum, turned into gradients and narrowed; as a whole they are also copied.
LOSS_BYTES = {("chunked", 2): 26, ("chunked", 4): 20, ("whole", 2): 34, ("whole", 4): 24}
# Bytes of an adamw state a parameter, read and written; 8 bits have a scale for each block beside them.
STATE_BYTES = {"fp32": 16.0, "host": 16.0, "8bit": 4.1}
# Kernels of a layer, forward and backward.
KERNELS = {True: 40, False: 90}
NEWTON_SCHULZ_STEPS = 5
# A 4-bit weight, read and written as 16 bits: each time it is needed.
DEQUANTIZED_BYTES = 2.5
# The norm of a weight with its adapter, in every forward pass (DoRA): both are added, written and read.
DORA_BYTES = 10.0
# Scores of plain attention are written, capped or masked, normalised in fp32 and read, and so again backward.
EAGER_SCORE_BYTES = 40


@dataclass(frozen=True)
class Work:
    """A product of `rows` x `inner` with `inner` x `columns` in a format, `times` times."""

    rows: float
    inner: float
    columns: float
    times: float
    format: str

    @property
    def flops(self) -> float:
        """Floating-point operations, a multiplication and an addition as two."""
        return 2 * self.rows * self.inner * self.columns * self.times


@dataclass(frozen=True)
class Costs:
    """Of a whole update: products, FLOP of attention, and bytes by what they are moved for.

    `host_bytes` go over the bus while nothing else can happen, `hidden_bytes` beside the computation.
    """

    products: list[Work] = field(default_factory=list)
    attention_flops: float = 0.0
    attention_format: str = "bf16"
    traffic_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    optimizer_products: list[Work] = field(default_factory=list)
    host_bytes: float = 0.0
    hidden_bytes: float = 0.0
    launches: float = 0.0


def row_tokens(job: Job) -> int:
    """Tokens of a row as it is computed, padding included."""
    return job.max_length if job.packed else min(job.max_length, job.longest_tokens or job.max_length)


def update_tokens(job: Job) -> int:
    """Tokens of an update as they are computed, padding included."""
    return job.batch_size * job.gradient_accumulation_steps * row_tokens(job)


def again(job: Job, layers: int) -> float:
    """Share of the layers whose forward pass is computed twice, products included."""
    way = job.activation_checkpointing
    if isinstance(way, int):
        return math.ceil(layers / way) / layers
    return 1.0 if way == "full" else 0.0


def kept_values(job: Job, shape: Shape) -> float:
    """Values a token that the layers keep for the backward pass, without what is computed again (about).

    Of a compiled layer: input and norm of both halves, queries, keys, values, attention, feed-forward.
    """
    layer = 4 * shape.width + 2 * shape.query_width + shape.key_value_width + shape.feed_forward_values
    if job.activation_checkpointing == "selective":  # the results of products and attention, and the input
        layer = 3 * shape.width + 2 * shape.query_width + shape.key_value_width + shape.feed_forward_values * 2 / 3
    share = again(job, shape.layers)
    return shape.layers * (layer * (1 - share) + shape.width * share)


def trained_parameters(job: Job, shape: Shape) -> int:
    """Parameters that learn."""
    if job.method == "full":
        return shape.parameters
    return sum(one.count * job.lora_rank * (one.inputs + one.outputs) for one in adapted(job, shape))


def adapted(job: Job, shape: Shape) -> list[Map]:
    """The maps that have an adapter: every one, or those named; never experts, which are no modules of their own."""
    names = {name.rpartition(".")[2] for name in job.target_modules}
    return [one for one in shape.maps if one.share == 1.0 and (not names or one.name in names)]


def costs_of(job: Job, shape: Shape, *, learned_share: float = 1.0, document_tokens: float | None = None) -> Costs:
    """Everything that an update of this job does. For the keywords see `speed`."""
    steps, tokens = job.gradient_accumulation_steps, job.batch_size * row_tokens(job)
    element = BYTES[job.precision]
    logits = tokens * learned_share if job.engine.chunked_loss else tokens
    together = document_tokens if job.engine.attention == "packed" else None
    return Costs(
        products=_products(job, shape, tokens, steps, logits),
        attention_flops=_attention(job, shape, together) * job.batch_size * steps,
        attention_format=_format(job),
        traffic_bytes=steps * (_traffic(job, shape, tokens, element, logits) + _weights(job, shape))
        + _sums(job, shape),
        optimizer_bytes=_optimizer(job, shape),
        optimizer_products=_orthogonalised(job, shape),
        host_bytes=_on_host(job, shape),
        hidden_bytes=steps * _hidden(job, shape, tokens, element),
        launches=steps * shape.layers * KERNELS[job.engine.compiled] * (1 + again(job, shape.layers) / 3),
    )


def _format(job: Job) -> str:
    return {"pure_bf16": "bf16", "float8": "bf16"}.get(job.precision, job.precision)


def _products(job: Job, shape: Shape, tokens: int, steps: int, logits: float) -> list[Work]:
    made: list[Work] = []
    trained, plain = job.method == "full", _format(job)
    layers = "float8" if job.precision == "float8" else plain
    for one in shape.maps:
        forward = steps * one.count * (1 + again(job, shape.layers))
        made += _passes(one, tokens * one.share, forward, steps * one.count, trained=trained, form=layers)
    if not trained:
        for one in adapted(job, shape):
            for part in (Map("", one.inputs, job.lora_rank, 1), Map("", job.lora_rank, one.outputs, 1)):
                forward = steps * one.count * (1 + again(job, shape.layers))
                made += _passes(part, tokens, forward, steps * one.count, trained=True, form=plain)
    if shape.head is not None:
        made += _passes(shape.head, logits, steps, steps, trained=trained, form=plain)
    return made


def _passes(one: Map, rows: float, forward: float, backward: float, *, trained: bool, form: str) -> list[Work]:
    made = [
        Work(rows, one.inputs, one.outputs, forward, form),
        Work(rows, one.outputs, one.inputs, backward, form),
    ]
    return [*made, Work(one.inputs, rows, one.outputs, backward, form)] if trained else made


def _attention(job: Job, shape: Shape, document_tokens: float | None) -> float:
    """FLOP of a row, all passes."""
    length = row_tokens(job)
    passes = 2 * (1 + again(job, shape.layers)) + 5
    pairs = sum(_pairs(job, shape, length, window, document_tokens) for window in shape.windows)
    return 2 * shape.query_width * passes * pairs


def _pairs(job: Job, shape: Shape, length: int, window: int | None, document_tokens: float | None) -> float:
    """Pairs of positions of a row that are multiplied. Plain attention multiplies those it masks too."""
    if job.engine.attention == "eager":
        return float(length * length)
    document = min(length, document_tokens or length)
    reach = min(document, window or document)
    if shape.causal:
        return length / document * (document * reach - reach * reach / 2)
    return length * (min(document, 2 * reach) if window else document)


def _traffic(job: Job, shape: Shape, tokens: int, element: int, logits: float) -> float:
    """Bytes between the products of a micro-batch."""
    stream = 4 if job.precision in ("fp32", "bf16", "fp16", "float8") and job.weights != "bf16" else 2
    inner = shape.feed_forward_values + 2 * shape.query_width + shape.key_value_width
    layer = tokens * (8 * shape.width * stream + inner * element)
    if not job.engine.compiled:
        layer *= UNCOMPILED_TRAFFIC
    if job.engine.attention == "eager":
        layer += EAGER_SCORE_BYTES * shape.heads * job.batch_size * row_tokens(job) ** 2
    repeated = 1.0 if job.activation_checkpointing == "selective" else again(job, shape.layers)
    # The backward of an operation reads its input and the gradient, and writes a gradient: twice the forward.
    made = shape.layers * layer * (3 + repeated)
    if job.precision == "float8":  # both operands of every product are read, and written in 8 bits
        made += 3 * 1.5 * element * tokens * sum(one.count * (one.inputs + one.outputs) for one in shape.maps)
    if job.activation_compression == "8bit":
        made += 2 * (element + 1) * tokens * kept_values(job, shape)
    if shape.head is not None:
        width = 4 if element == 4 else 2
        made += logits * shape.head.outputs * LOSS_BYTES["chunked" if job.engine.chunked_loss else "whole", width]
    return made


def _weights(job: Job, shape: Shape) -> float:
    """Bytes of weights that a micro-batch moves: fp32 ones narrowed for the products, 4-bit ones widened."""
    forward = 1 + again(job, shape.layers)
    normed = DORA_BYTES * shape.matrix_parameters * forward if job.dora and job.method != "full" else 0.0
    if job.method == "qlora":
        return shape.matrix_parameters * DEQUANTIZED_BYTES * (1 + forward) + normed
    narrowed = job.precision in ("bf16", "fp16") and job.weights != "bf16" and job.engine.autocast
    return normed + (6.0 * shape.matrix_parameters if narrowed else 0.0)


def _gradient_bytes(job: Job) -> int:
    return 2 if job.gradients == "bf16" else 4


def _sums(job: Job, shape: Shape) -> float:
    """Bytes of summing gradients: written in their format after the first micro-batch, added to after the others."""
    parameters, size = trained_parameters(job, shape), _gradient_bytes(job)
    first = 0 if BYTES[job.precision] == size else 2 + size
    return parameters * (first + (job.gradient_accumulation_steps - 1) * (first + 3.0 * size))


def _optimizer(job: Job, shape: Shape) -> float:
    parameters, gradient = trained_parameters(job, shape), _gradient_bytes(job)
    weight = 2 if job.method == "full" and (job.precision == "pure_bf16" or job.weights == "bf16") else 4
    states = {
        "adamw": STATE_BYTES[job.optimizer_states],
        "muon": STATE_BYTES[job.optimizer_states] / 2,
        "adafactor": 2.0 * gradient + 8,  # its square summed by rows and columns; the step written and read
        "sgd": 0.0,
    }[job.optimizer]
    widened = 8 if weight == 2 else 0  # the step is taken on fp32 copies
    if job.engine.states_like_weights and weight == 2:
        states, widened = states / 2, 0
    norm = 0 if job.optimizer_in_backward else gradient
    fused = 1.0 if job.engine.fused_optimizer else UNCOMPILED_TRAFFIC
    return parameters * (norm + (2 * weight + gradient + states + widened) * fused)


def _orthogonalised(job: Job, shape: Shape) -> list[Work]:
    """Products of Muon's Newton-Schulz steps: with its transpose, with itself, with the matrix."""
    if job.optimizer != "muon" or job.method != "full":
        return []
    made, form = [], "fp32" if job.precision == "fp32" else "bf16"
    for one in shape.maps:
        small, large = sorted((one.inputs, one.outputs))
        times = NEWTON_SCHULZ_STEPS * one.count
        made += [Work(small, large, small, times, form), Work(small, small, small, times, form)]
        made += [Work(small, small, large, times, form)]
    return made


def _on_host(job: Job, shape: Shape) -> float:
    """Optimizer states on the host come to the card for the step, and go back."""
    if job.optimizer_states != "host" or job.device == "cpu":
        return 0.0
    values = {"adamw": 2.0, "muon": 1.0}.get(job.optimizer, 0.0)
    return trained_parameters(job, shape) * values * 4 * 2


def _hidden(job: Job, shape: Shape, tokens: int, element: int) -> float:
    """Bytes that kept activations move to the host and back."""
    if not job.activation_offload or job.device == "cpu":
        return 0.0
    size = 1 if job.activation_compression == "8bit" else element
    return 2.0 * size * tokens * kept_values(job, shape)
