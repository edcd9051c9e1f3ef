"""The engine's own update of a job, put together to be traced: model, adapters, optimizer, loss, loop.

In: a `Job` and a number of layers. Out: the loop of a run with it, as it stands after its first update, on tensors
without content or (for measurements) real ones; and the trace of an update and an evaluation.
Knows nothing of what the trace is for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onecard.data.batches import RowOrder
from onecard.data.packing import Segment
from onecard.model import attention
from onecard.model import document_attention as documents
from onecard.model.load import silence_transformers
from onecard.model.lora import linear_layers
from onecard.model.loss import head_of
from onecard.plan.job import Job
from onecard.plan.trace import Recorder, Trace
from onecard.train import eight_bit, fake_compiled, four_bit, optimizers, other_tools
from onecard.train.activations import Activations
from onecard.train.fake_card import HostMover, fake_card, replaced
from onecard.train.loop import Loop, LoopSettings
from onecard.train.objectives import NextToken, Objective
from onecard.train.precision import Precision, convert
from onecard.train.schedule import Schedule
from onecard.train.watched import Watched, WholeLogits, place, watch

# More micro-batches than this hold no more: the second finds the gradients of the first.
_MICRO_BATCHES = 2
# What a layer knows nothing of. How it is computed again is known of each layer; what is kept is packed outside of it.
_ELSEWHERE = (
    *("optimizer", "optimizer_states", "optimizer_in_backward", "gradients", "gradient_accumulation_steps"),
    *("evaluation", "activation_checkpointing", "activation_offload", "activation_compression"),
)
_ANY = Job(None, 1, 1)
_ALL_BLOCKS = documents.blocks


def text_of(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def per_layer(config: Any) -> dict[str, list[Any]]:
    """The settings of a configuration that stand there once a layer."""
    layers = int(config.num_hidden_layers)
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers and layers > 1
    }


def _shortened(config: Any, layers: int) -> Any:
    """The configuration of the same model with fewer layers."""
    made = copy.deepcopy(config)
    text = text_of(made)
    for name, value in per_layer(text).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return made


def run_step(job: Job, layers: int) -> Trace:
    """Run one update and one evaluation of a model of so many layers, and take note."""
    config = _shortened(job.model, layers)
    vocabulary = int(text_of(config).vocab_size)
    rows = JobRows(job)

    def is_logits(tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.shape[-1] == vocabulary and tensor.is_floating_point()

    bodies = {
        torch.ops.onecard.document_attention.default: documents.document_attention._init_fn,
        torch.ops.onecard.document_attention_backward.default: documents.document_attention_backward._init_fn,
    }
    recorder = Recorder(logits=is_logits, bodies=bodies, casts=job.device == "cpu")
    if job.method != "full":
        import peft  # noqa: F401 (libraries make tables as they are loaded, which are not the step's)
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        if job.device == "cuda":
            stack.enter_context(fake_card(recorder, keeps_softmax_inputs=job.engine.keeps_softmax_inputs))
        stack.enter_context(replaced(eight_bit, "ranges", _few_ranges))
        stack.enter_context(replaced(documents, "blocks", _few_blocks))
        loop, handles = make_loop(job, config, rows, recorder, fake=True)
        try:
            if job.activation_offload:
                loop.update(0)  # only then does the window know how much a layer saves
            recorder.begin("optimizer")
            recorder.settle()
            loop.update(0)
            if job.evaluation:
                loop.evaluate()
        finally:
            loop.close()
        recorder.begin("end")
        trace = recorder.finish()
        for handle in handles:
            handle.remove()
    return trace


@contextmanager
def quiet() -> Iterator[None]:
    silence_transformers()
    attention.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _few_ranges(count: int, chunk: int) -> Iterator[slice]:
    """`eight_bit.ranges` without all but two chunks, for each takes the room of the one before."""
    whole = count - count % eight_bit.BLOCK
    for start in range(0, min(whole, 2 * chunk), chunk):
        yield slice(start, min(start + chunk, whole))
    if whole < count:
        yield slice(whole, count)


def _few_blocks(*args: Any, **settings: Any) -> list[documents.Block]:
    """`document_attention.blocks` without those in the middle, likewise."""
    found = list(_ALL_BLOCKS(*args, **settings))
    return found if len(found) <= 3 else [*found[:2], found[-1]]


class JobRows:
    """Rows of one document each: full ones, or one of the longest and others a token shorter."""

    def __init__(self, job: Job) -> None:
        self.max_length = job.max_length
        count = job.batch_size * min(job.gradient_accumulation_steps, _MICRO_BATCHES)
        longest = job.max_length if job.packed else min(job.max_length, job.longest_tokens or job.max_length)
        self._longest, self._packed = longest, job.packed
        self.per_source = [count]
        self.store: Any = SimpleNamespace(
            tokens=np.zeros(longest + 1, dtype=np.int64),
            starts=np.array([0, longest + 1]),
            learned=None,
            values=None,
            sources=["rows"],
        )

    def segments(self, row: int) -> list[Segment]:
        end = self._longest if self._packed or row == 0 else max(1, self._longest - 1)
        return [Segment(0, end, end + 1)]


def make_loop(job: Job, config: Any, rows: JobRows, recorder: Recorder, *, fake: bool) -> tuple[Loop, list[Any]]:
    """The loop of a run with this job, as after its first update; and the hooks that tell where it is."""
    format_ = Precision(job.precision, "cpu", 1.0)
    model = _model(job, config, format_, fake=fake)
    ways = Activations(
        checkpointing=job.activation_checkpointing,
        offload=job.activation_offload and job.device == "cuda",
        compression=job.activation_compression,
        mover=HostMover(recorder) if job.device == "cuda" else None,
    )
    ways.apply(model)
    handles = watch(model, recorder)
    if fake and job.engine.compiled and job.packed:  # padded rows differ in width and are not compiled
        fake_compiled.imitate(model, recorder, _circumstances(job))
    chosen = _optimizers(job, model)
    _take_a_step(chosen, model, recorder, keep_gradients=job.engine.keeps_gradients)
    loop = Loop(
        run=Path("a run that is not there"),
        model=model,
        objective=Watched(_objective(job, model), recorder),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=rows.per_source[0]),
        held_out=(rows, list(range(job.batch_size))),
        optimizers=chosen,
        saving=ways.saving,
        schedule=Schedule("constant", 4, 0.0, 0.0, 0.0),
        precision=format_ if job.engine.autocast else Precision("fp32", "cpu", 1.0),
        settings=LoopSettings(
            max_steps=4,
            batch_size=job.batch_size,
            max_grad_norm=0.0 if job.optimizer_in_backward else 1.0,
            evaluate_every=1,
            save_every=1,
            keep_last=1,
            log_every=1,
            pad_id=0,
        ),
    )
    return loop, handles


def _circumstances(job: Job) -> tuple[str, Job]:
    """All of a job that can decide what a layer computes: not how deep the model is, and nothing of the optimizer."""
    text = text_of(job.model)
    depth = {text.attribute_map.get("num_hidden_layers", "num_hidden_layers"), *per_layer(text)}
    plain = {name: value for name, value in vars(text).items() if name not in depth}
    same = {name: getattr(_ANY, name) for name in _ELSEWHERE}
    return f"{type(text).__name__} {sorted(plain.items())}", replace(job, model=None, **same)


# --- its parts ----------------------------------------------------------------------------------------------------


def _model(job: Job, config: Any, format_: Precision, *, fake: bool) -> Any:
    """The model, on tensors without content if `fake`, in its format, with adapters, and attending as the job says."""
    from transformers.initialization import no_init_weights

    ways = {"packed": "sdpa", "sdpa": "sdpa", "eager": "eager"}
    kind = _kind_of(config)
    with no_init_weights() if fake else nullcontext():
        try:
            model: Any = kind.from_config(config, dtype=torch.float32, attn_implementation=ways[job.engine.attention])
        except ValueError:  # capped logits: no fused attention
            model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.tie_weights()
    model.train()
    if packs(job):
        model.set_attn_implementation(attention.PACKED)
    frozen: list[str] = []
    if job.method != "full":
        frozen = linear_layers(model)
        if job.method == "qlora" and not fake:
            from onecard.model.quantized import quantize

            quantize(model, format_.dtype, "cpu")
        _add_adapters(job, model)
        if job.engine.adapters == "bf16":
            other_tools.adapters_in(model, torch.bfloat16)
    convert(model, format_, emulate=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}[job.weights]
    if job.method == "qlora" and dtype is None:
        dtype = format_.dtype  # as `precision.convert` does beside weights in 4 bits
    if dtype is not None:
        frozen_only = job.method != "full"
        for parameter in model.parameters():
            converted = parameter.ndim >= 2 or not job.engine.autocast
            if parameter.is_floating_point() and converted and not (frozen_only and parameter.requires_grad):
                parameter.data = parameter.data.to(dtype)
    if job.method == "qlora" and fake:
        engine = job.engine
        four_bit.quantize(model, frozen, double=engine.double_quantization, keeps_inputs=engine.keeps_quantized_inputs)
    return model


def _kind_of(config: Any) -> Any:
    """What builds the model: a language model, or for encoders a classifier."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return AutoModelForSequenceClassification if encoder else AutoModelForCausalLM


def packs(job: Job) -> bool:
    return job.packed and job.engine.attention == "packed" and _is_language_model(job.model)


def _is_language_model(config: Any) -> bool:
    return "Causal" in _kind_of(config).__name__


def _add_adapters(job: Job, model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    from onecard.model import lora

    # Adapters are made where they stay, and parameters without content cannot be moved.
    with replaced(torch.nn.Module, "to", lambda module, *_, **__: module):
        if not job.dora:
            lora.add(model, job.lora_rank, 2.0 * job.lora_rank, job.lora_dropout, list(job.target_modules))
            return
        ends = job.target_modules or {name.rpartition(".")[2] for name in lora.linear_layers(model)}
        settings = LoraConfig(r=job.lora_rank, lora_alpha=2 * job.lora_rank, target_modules=sorted(ends), use_dora=True)
        inject_adapter_in_model(settings, model)


def _optimizers(job: Job, model: Any) -> optimizers.Optimizers:
    made = optimizers.build(
        model,
        "adamw" if job.optimizer == "sgd" else job.optimizer,
        learning_rate=1e-4,
        muon_learning_rate=1e-4,
        weight_decay=0.1,
        muon_dtype=torch.float32 if job.precision in ("fp32", "fp16") else torch.bfloat16,
        states=job.optimizer_states,
        in_backward=job.optimizer_in_backward,
        gradients=job.gradients,
    )
    if other_tools.needs_states_like_weights(job):
        other_tools.states_like_weights(made, fused=job.engine.fused_optimizer)
    for unit in made.units:
        if job.optimizer == "sgd":
            unit.part = torch.optim.SGD([{"params": unit.targets, "lr": 1e-4, "decays": True}])
        for group in unit.part.param_groups:
            if isinstance(unit.part, torch.optim.AdamW) and not job.engine.fused_optimizer:
                group |= {"fused": False, "foreach": True}
            elif isinstance(unit.part, torch.optim.Adafactor):
                group["foreach"] = job.device == "cuda" and not job.engine.tensor_by_tensor
    return made


def _take_a_step(chosen: optimizers.Optimizers, model: Any, recorder: Recorder, *, keep_gradients: bool) -> None:
    """Let states come into being, and say what they and the weights are."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in chosen.units:
        for parameter in unit.parameters:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        with replaced(eight_bit, "ranges", lambda *_: ()):  # states in 8 bits are there before the first chunk
            unit.step()
        for parameter in unit.parameters:
            parameter.grad = None
        for parameter, target in zip(unit.parameters, unit.targets):
            layer, short = place(names[id(parameter)])
            for key, value in unit.part.state.get(target, {}).items():
                if isinstance(value, Tensor):
                    recorder.claim(value, "optimizer", f"{key} of {short}", layer)
    if keep_gradients:
        other_tools.keep_gradients(chosen)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layer, short = place(name)
        recorder.claim(tensor, "parameters", short, layer)
        if tensor.grad is not None:
            recorder.claim(tensor.grad, "gradients", f"gradient of {short}", layer)


def _objective(job: Job, model: Any) -> Objective:
    if job.engine.keeps_logits and _is_language_model(job.model):
        head = head_of(model)
        assert head is not None
        return other_tools.KeptLogits(head, packed=packs(job), compiled=job.engine.compiled)
    if job.engine.chunked_loss and _is_language_model(job.model):
        made = NextToken(padded=not packs(job))
        made._head_known = head_of(model) is not None  # the proof needs numbers
        return made
    return WholeLogits(packed=packs(job), classes=not _is_language_model(job.model))
