"""How much memory an update will take, found by running it: the engine's own step on tensors without content.

In: a `Job`. Out: a `Memory`. The model, its attention, what backward keeps, optimizer, loss and loop are those of a
run; `plan.trace` takes note of every allocation. A deep model is traced with a few layers, which are then repeated
where that is exact. Nothing of the model's size is allocated. Steps for a card are traced inside `fake_card`.
What is told is an update after the first one, when the states of the optimizer are there, and an evaluation after it;
loading a model, samples and checkpoints are not looked at.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator
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
from onecard.data.packing import RowBatch, Segment
from onecard.model import attention
from onecard.model import document_attention as documents
from onecard.model.load import silence_transformers
from onecard.model.lora import linear_layers
from onecard.model.loss import head_of
from onecard.plan import allocator
from onecard.plan.job import Job, Memory
from onecard.plan.trace import NotPeriodic, Recorder, Trace
from onecard.train import eight_bit, fake_compiled, four_bit, muon, optimizers, other_tools
from onecard.train.activations import Activations
from onecard.train.compilation import decoder_layers
from onecard.train.fake_card import HostMover, fake_card, replaced
from onecard.train.loop import Loop, LoopSettings
from onecard.train.metrics import RunLog
from onecard.train.objectives import NextToken, Objective, _padded, accepted, packed_inputs
from onecard.train.precision import Precision, convert
from onecard.train.schedule import Schedule

# Traced around the block of layers that is repeated: so many before it, and after it. The first that is exact is taken.
_MARGINS = (1, 2, 3)
_LONGEST_PERIOD = 8
# What libraries keep is about the same on all cards before Hopper.
_CAPABILITY = (8, 6)
_ALL_BLOCKS = documents.blocks
# More micro-batches than this hold no more: the second finds the gradients of the first.
_MICRO_BATCHES = 2


def memory(job: Job) -> Memory:
    """What the update holds at its peak and over its course, in bytes."""
    trace = trace_of(job)
    peak = trace.peak()
    allocated = reserved = peak.bytes
    context = 0
    if job.device == "cuda":
        usage = allocator.simulate(_from_the_beginning(trace))
        allocated, reserved = usage.peak_allocated_bytes, usage.peak_reserved_bytes
        context = allocator.context_bytes(_CAPABILITY)
    return Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        context_bytes=context,
        breakdown=peak.breakdown,
        moments=trace.moments(),
        largest=peak.largest,
    )


def _from_the_beginning(trace: Trace) -> Iterator[tuple[int, int]]:
    """What an allocator sees of the first two updates and an evaluation.

    States come into being at the end of the first update, in the holes that its activations left; those of the second
    one do not fit there any more. That is most of what is reserved and not used.
    """
    records = trace.records
    there = {number for number, record in enumerate(records) if record.segment == 0}
    states = [number for number in sorted(there) if records[number].kind == "optimizer"]
    yield from ((-1 - index, size) for index, size in enumerate(allocator.workspace_bytes(_CAPABILITY)))
    yield from ((number, records[number].bytes) for number in sorted(there - set(states)))
    made = False
    for update in range(2):
        for segment, number in trace.happenings:
            where, record = trace.segments[segment], number if number >= 0 else ~number
            if record in there or (where.part == "evaluation" and not update):
                continue
            if where.part == "optimizer" and where.round > 1 and not made:
                yield from ((state, records[state].bytes) for state in states)
                made = True
            id_ = record + update * len(records)
            yield (id_, records[record].bytes) if number >= 0 else (id_, 0)


def trace_of(job: Job, *, traced_layers: int | None = None) -> Trace:
    """The trace of the update. `traced_layers`: how many layers are run (for tests); None: as few as are exact.

    Models that have no place for the boundaries of packed documents are padded, as they are in a run.
    """
    if not _packs(job):
        return _trace(job, traced_layers)
    try:
        return _trace(job, traced_layers)
    except (AssertionError, TypeError, NotImplementedError):
        return _trace(replace(job, packed=False, longest_tokens=None), traced_layers)


def _trace(job: Job, traced_layers: int | None) -> Trace:
    layers = int(_text(job.model).num_hidden_layers)
    if traced_layers is not None:
        return _step(job, traced_layers)
    period = _period(job)
    for margin in _MARGINS if period is not None else ():
        assert period is not None
        fewest = max(2 * margin + period, _layers_that_fill_a_stack(job))
        traced = fewest + (layers - fewest) % period
        if traced >= layers:
            break
        try:
            trace = _step(job, traced)
            return trace.deepened(first=margin, period=period, copies=(layers - traced) // period)
        except NotPeriodic:
            continue
    return _step(job, layers)


def held_bytes(job: Job, run: Path) -> tuple[Loop, int]:
    """The same loop on real tensors, for who measures a small model; and the bytes of its weights and states.

    `run` is a directory for its record.
    """
    recorder = Recorder()
    with _quiet():
        loop, handles = _loop(job, job.model, _Rows(job), recorder, fake=False)
    for handle in handles:
        handle.remove()
    assert isinstance(loop.objective, _Watched)
    loop.objective, loop.log = loop.objective.inner, RunLog(run)
    found: list[Tensor] = [*loop.model.parameters(), *loop.model.buffers()]
    for unit in loop.optimizers.units:
        for state in unit.part.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}
    return loop, sum(storages.values())


# --- which layers are alike ---------------------------------------------------------------------------------------


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """The settings of a configuration that stand there once a layer."""
    layers = int(config.num_hidden_layers)
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers and layers > 1
    }


def _period(job: Job) -> int | None:
    """After so many layers the same kinds of layers come again; None if they never do."""
    config = _text(job.model)
    every = job.activation_checkpointing if isinstance(job.activation_checkpointing, int) else 1
    for period in range(1, _LONGEST_PERIOD + 1):
        kinds = _per_layer(config).values()
        if period % every == 0 and all(kind[period:] == kind[: len(kind) - period] for kind in kinds):
            return period
    return None


def _layers_that_fill_a_stack(job: Job) -> int:
    """Muon takes matrices of one shape in stacks: with so many layers the stacks are as high as they get."""
    if job.optimizer != "muon" or job.method != "full":
        return 1
    width = int(_text(job.model).hidden_size)
    return -(-muon.STACK // (width * width))


def _shortened(config: Any, layers: int) -> Any:
    """The configuration of the same model with fewer layers."""
    made = copy.deepcopy(config)
    text = _text(made)
    for name, value in _per_layer(text).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return made


# --- the step -----------------------------------------------------------------------------------------------------


def _step(job: Job, layers: int) -> Trace:
    """Run one update and one evaluation of a model of so many layers, and take note."""
    config = _shortened(job.model, layers)
    vocabulary = int(_text(config).vocab_size)
    rows = _Rows(job)

    def is_logits(tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.shape[-1] == vocabulary and tensor.is_floating_point()

    bodies = {
        torch.ops.onecard.document_attention.default: documents.document_attention._init_fn,
        torch.ops.onecard.document_attention_backward.default: documents.document_attention_backward._init_fn,
    }
    recorder = Recorder(logits=is_logits, bodies=bodies, casts=job.device == "cpu")
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        if job.device == "cuda":
            stack.enter_context(fake_card(recorder, keeps_softmax_inputs=job.engine.keeps_softmax_inputs))
        stack.enter_context(replaced(eight_bit, "ranges", _few_ranges))
        stack.enter_context(replaced(documents, "blocks", _few_blocks))
        loop, handles = _loop(job, config, rows, recorder, fake=True)
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
def _quiet() -> Iterator[None]:
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


class _Rows:
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


def _loop(job: Job, config: Any, rows: _Rows, recorder: Recorder, *, fake: bool) -> tuple[Loop, list[Any]]:
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
    handles = _watch(model, recorder)
    if fake and job.engine.compiled and job.packed:  # padded rows differ in width and are not compiled
        fake_compiled.imitate(model, recorder)
    chosen = _optimizers(job, model)
    _take_a_step(chosen, model, recorder, keep_gradients=job.engine.keeps_gradients)
    loop = Loop(
        run=Path("a run that is not there"),
        model=model,
        objective=_Watched(_objective(job, model), recorder),
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
    if _packs(job):
        model.set_attn_implementation(attention.PACKED)
    frozen: list[str] = []
    if job.method != "full":
        frozen = linear_layers(model)
        _add_adapters(job, model)
        if job.engine.adapters == "bf16":
            other_tools.adapters_in(model, torch.bfloat16)
    convert(model, format_, emulate=True)
    if job.weights is not None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.weights]
        frozen_only = job.method != "full"
        for parameter in model.parameters():
            converted = parameter.ndim >= 2 or not job.engine.autocast
            if converted and not (frozen_only and parameter.requires_grad):
                parameter.data = parameter.data.to(dtype)
    if job.method == "qlora":
        engine = job.engine
        four_bit.quantize(model, frozen, double=engine.double_quantization, keeps_inputs=engine.keeps_quantized_inputs)
    return model


def _kind_of(config: Any) -> Any:
    """What builds the model: a language model, or for encoders a classifier."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return AutoModelForSequenceClassification if encoder else AutoModelForCausalLM


def _packs(job: Job) -> bool:
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
            layer, short = _place(names[id(parameter)])
            for key, value in unit.part.state.get(target, {}).items():
                if isinstance(value, Tensor):
                    recorder.claim(value, "optimizer", f"{key} of {short}", layer)
    if keep_gradients:
        other_tools.keep_gradients(chosen)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layer, short = _place(name)
        recorder.claim(tensor, "parameters", short, layer)
        if tensor.grad is not None:
            recorder.claim(tensor.grad, "gradients", f"gradient of {short}", layer)


def _place(name: str) -> tuple[int | None, str]:
    """The layer that a parameter or module belongs to, and its name there."""
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    if found is None:
        return None, name
    return int(found[1]), name[found.end() :] or "layer"


# --- objectives ---------------------------------------------------------------------------------------------------


def _objective(job: Job, model: Any) -> Objective:
    if job.engine.keeps_logits and _is_language_model(job.model):
        head = head_of(model)
        assert head is not None
        return other_tools.KeptLogits(head, packed=_packs(job), compiled=job.engine.compiled)
    if job.engine.chunked_loss and _is_language_model(job.model):
        made = NextToken(padded=not _packs(job))
        made._head_known = head_of(model) is not None  # the proof needs numbers
        return made
    return _WholeLogits(packed=_packs(job), classes=not _is_language_model(job.model))


class _WholeLogits(Objective):
    """The loss that a model of transformers computes itself, from all logits at once; or that of a classifier."""

    def __init__(self, *, packed: bool, classes: bool) -> None:
        self._packed, self._classes = packed, classes

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """As `Objective.loss`."""
        inputs, labels_N = (packed_inputs if self._packed else _padded)(batch, row_tokens, device)
        ids_BT: Tensor = inputs["input_ids"]
        labels = torch.zeros(len(ids_BT), dtype=torch.int64) if self._classes else labels_N.view(ids_BT.shape)
        with nullcontext() if learn else torch.no_grad():
            made: Tensor = model(**accepted(model, inputs), labels=labels).loss * scale
        return made if learn else made.detach()


class _Watched(Objective):
    """Tells a recorder which part of the step it is in."""

    def __init__(self, inner: Objective, recorder: Recorder) -> None:
        self.inner, self._recorder = inner, recorder

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """That of the inner one."""
        recorder = self._recorder
        recorder.begin("forward" if learn else "evaluation")
        made = self.inner.loss(model, batch, scale=scale, device=device, row_tokens=row_tokens, learn=learn)

        def backward(_: Tensor) -> None:
            recorder.begin("backward")
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: recorder.begin("optimizer"))

        if learn:
            made.register_hook(backward)  # type: ignore[no-untyped-call]
        return made

    def begin(self, model: torch.nn.Module, batches: Iterable[RowBatch], *, device: str, row_tokens: int) -> None:
        """That of the inner one."""
        self.inner.begin(model, batches, device=device, row_tokens=row_tokens)


def _watch(model: Any, recorder: Recorder) -> list[Any]:
    """Hooks that tell the recorder in which layer and module a pass is, and what gradients are."""
    handles: list[Any] = []
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        handles += _watch_layer(layer, number, recorder, is_last=number == len(layers) - 1)
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            short = _place(name)[1]
            handles.append(module.register_forward_pre_hook(lambda *_, short=short: recorder.enter_module(short)))
            handles.append(module.register_forward_hook(lambda *_: recorder.leave_module(), always_call=True))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer_number, short = _place(name)

            def claim(tensor: Tensor, layer: int | None = layer_number, short: str = short) -> None:
                assert tensor.grad is not None
                recorder.claim(tensor.grad, "gradients", f"gradient of {short}", layer)

            handles.append(parameter.register_post_accumulate_grad_hook(claim))
    return handles


def _watch_layer(layer: torch.nn.Module, number: int, recorder: Recorder, *, is_last: bool) -> list[Any]:
    def back_in(_: Tensor) -> None:
        recorder.enter(number)

    def back_out(_: Tensor) -> None:
        recorder.enter(None)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(number)
        entering = args[0] if args else kwargs.get("hidden_states")
        if number == 0 and isinstance(entering, Tensor) and entering.requires_grad:
            entering.register_hook(back_out)  # type: ignore[no-untyped-call]

    def after(_: Any, __: Any, output: Any) -> None:
        if is_last:
            recorder.enter(None)
        leaving = output[0] if isinstance(output, tuple) else output
        if leaving.requires_grad:
            leaving.register_hook(back_in)

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]
