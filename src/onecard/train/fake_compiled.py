"""Compiled layers as they take memory, without compiling: for steps on tensors without content.

What a compiled layer keeps is decided by AOTAutograd: it traces forward and backward as one graph, and a partitioner
cuts it where least is kept. Both are run here as they are in a run. What the compiler does with the two graphs is
imitated: operations on single values are fused into those that use them and get no memory of their own, unless a matrix
product, an attention or the outside reads them; a fused result takes the place of an input of its size that nobody
needs any more; everything else lives from the operation that makes it to the last that reads it.
A layer that reads the content of tensors (attention document by document) is not compiled as a whole and runs plainly
here.

Approximated are: the order of operations (the compiler may move some), the patterns it recognises (a softmax, a random
mask), reads above which it keeps a value although it could fuse it, and padding of matrices. `checkpointing` is done as
the compiler does it: by marks on the graph. Layers of one kind are traced once in a process.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from onecard.plan.trace import Recorder, present_recorder
from onecard.train.activations import _policy
from onecard.train.compilation import decoder_layers, let_gradients_begin_before

_READS_CONTENT = (DataDependentOutputException, DynamicOutputShapeException)
# Above so many reads a value with several users is kept rather than computed in each of them.
_MOST_READS = 4
_FUSED = {
    *("cat", "clone", "full", "full_like", "scalar_tensor", "iota", "arange", "embedding", "index", "gather"),
    *("constant_pad_nd", "slice_scatter", "select_scatter", "convert_element_type", "_to_copy", "where", "rand"),
    *("inductor_random", "inductor_seeds", "inductor_lookup_seed", "bernoulli", "copy", "fill", "zeros_like", "empty"),
    *("ones_like", "empty_like", "new_zeros", "new_ones", "new_full", "masked_fill", "tril", "triu", "lift_fresh_copy"),
}
_VIEWS = {"view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze"} | {
    *("squeeze", "as_strided", "alias", "detach", "split", "split_with_sizes", "unbind", "diagonal", "unfold"),
}


# A search asks about a few dozen kinds of layers; the one that was not met for longest goes first.
_MOST_KEPT = 64
_kept: OrderedDict[Any, _Compiled | None] = OrderedDict()


@dataclass(frozen=True)
class _Compiled:
    """A layer as one function of its weights and inputs, both flat, and the form of what it returns.

    It holds no tensor of the step in which it was made, so that the next step can take it as well.
    """

    function: Callable[..., Any]
    out_spec: Any


def imitate(model: torch.nn.Module, recorder: Recorder, circumstances: Hashable) -> None:
    """Let the layers of a model run as compiled ones would; their checkpointing goes over to the graph.

    Graphs are kept between steps. `circumstances`: all that decides what a layer does beside its class, its numbers,
    the tensors that it gets and the modes that torch is in; steps of equal ones share their graphs.
    """
    met: dict[Any, Tensor | None] = {}
    for layer in decoder_layers(model):
        layer.forward = _Layer(layer, recorder, circumstances, met)
    let_gradients_begin_before(model)


def forget() -> None:
    """Drop the graphs that are kept (for tests)."""
    _kept.clear()


def _keep(key: Any, made: _Compiled | None) -> None:
    _kept[key] = made
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)


class _Layer:
    """In the place of a layer's `forward`."""

    def __init__(
        self, layer: torch.nn.Module, recorder: Recorder, circumstances: Hashable, met: dict[Any, Tensor | None]
    ) -> None:
        self._layer, self._plain, self._recorder = layer, layer.forward, recorder
        # What entered the first layer of each kind stays to the end of the step: one hidden state on the safe side,
        # whether its graph was made in this step or before.
        self._met = met
        self._kind = (circumstances, type(layer), _numbers_of(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer
        weights = [*layer.named_parameters(), *layer.named_buffers()]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple(_shape(tensor) for tensor in [*(weight for _, weight in weights), *tensors])
        others = str([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        again = layer.training and getattr(layer, "gradient_checkpointing", False)
        way = getattr(layer, "_gradient_checkpointing_func", None) if again else None
        selective = None if way is None else "context_fn" in getattr(way, "keywords", {})
        key = (self._kind, shapes, others, spec, layer.training, selective, _modes())
        flat = [*(weight for _, weight in weights), *tensors]
        if key not in _kept:
            with self._recorder.passive(), self._recorder.elsewhere():
                _keep(key, self._compiled([name for name, _ in weights], leaves, spec, selective, flat))
        compiled = _kept[key]
        if compiled is None:
            return self._plain(*args, **kwargs)
        _kept.move_to_end(key)
        with self._recorder.passive():
            if key not in self._met:
                self._met[key] = tensors[0].detach() if tensors else None
            return pytree.tree_unflatten(list(compiled.function(*flat)), compiled.out_spec)

    def _compiled(
        self, names: list[str], leaves: list[Any], spec: Any, selective: bool | None, flat: list[Tensor]
    ) -> _Compiled | None:
        """The layer as a function; None if it reads content. `selective`: how backward computes it again; None: not."""
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        # Let go once the layer is traced, for it belongs to a step, and the function does not.
        traced: list[tuple[Any, Any]] = [(self._layer, self._plain)]
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        out_spec: list[Any] = []

        def plain(*flat: Tensor) -> tuple[Any, ...]:
            layer, forward = traced[0]
            filled = list(constants)
            for index, tensor in zip(places, flat[len(names) :]):
                filled[index] = tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            before = layer.__dict__.get("gradient_checkpointing")
            layer.gradient_checkpointing = False
            try:
                with _reparametrize_module(layer, dict(zip(names, flat[: len(names)]))):
                    made = forward(*args, **kwargs)
            finally:
                layer.gradient_checkpointing = before
            values, made_spec = pytree.tree_flatten(made)
            out_spec[:] = [made_spec]
            return tuple(values)

        def cut(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
            if selective is not None:
                _mark(joint, selective=selective)
            return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **settings)

        def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:
            return _Graph(gm)

        table: Any = select_decomp_table()
        function: Any = aot_function(
            plain, compiler, compiler, cut, decompositions=table, num_params_buffers=len(names), enable_log=False
        )

        try:
            # Not with the step's own tensors: whoever traces holds on to them for a while. And what packs those that
            # are saved keeps count.
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                function(*(_stand_in(tensor) for tensor in flat))
        except _READS_CONTENT:
            return None
        finally:
            traced.clear()
        return _Compiled(function, out_spec[0])


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _stand_in(tensor: Tensor) -> Tensor:
    """Another tensor without content of the same form; what has content is taken as it is."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _numbers_of(layer: torch.nn.Module) -> str:
    """What may tell layers of one class apart: parts, windows, kinds of attention, rates; not their own number."""
    found = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str) and key not in ("layer_idx", "layer_id", "gradient_checkpointing")
        }
        found.append((name, type(module).__qualname__, sorted(plain.items())))
    return str(found)


def _mark(joint: fx.GraphModule, *, selective: bool) -> None:
    """Say which results of the forward pass backward computes again, as the compiler notes a checkpointed region."""
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        node.meta["ac_graph_id"] = 0
        made_by = node.args[0] if _name(node) == "getitem" else node  # of several results each is kept
        keeps = selective and _policy(None, made_by.target) is CheckpointPolicy.MUST_SAVE
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


# --- one graph ----------------------------------------------------------------------------------------------------


@dataclass
class _Buffer:
    """A piece of memory: its values' shape, strides and type; the place of an older one that it takes."""

    like: Tensor
    instead_of: int | None = None


@dataclass
class _Kernel:
    """What is run at once: the buffers it makes, and the values (inputs and buffers) that nobody needs after it."""

    makes: list[int] = field(default_factory=list)
    frees: list[tuple[str, int]] = field(default_factory=list)


class _Graph:
    """A graph as a list of kernels; called with a list of inputs, which it empties, it makes tensors of its outputs."""

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule) -> None:
        self._buffers: list[_Buffer] = []
        self._kernels: list[_Kernel] = []
        # Where the values of a node lie: ("input", n), ("buffer", n), or those of what it is fused from.
        self._where: dict[fx.Node, list[Any]] = {}
        self._nodes = list(graph.graph.nodes)
        self._output = next(node for node in self._nodes if node.op == "output")
        self._outside = set(self._output.all_input_nodes)
        self._reads_of: dict[int, set[tuple[str, int]]] = {}
        self._plan()
        self._free()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Take and give back memory as the graph would."""
        with present_recorder().active():
            held: dict[tuple[str, int], Any] = {("input", n): value for n, value in enumerate(inputs)}
            inputs.clear()
            for kernel in self._kernels:
                for number in kernel.makes:
                    buffer = self._buffers[number]
                    if buffer.instead_of is not None:
                        held["buffer", number] = held["buffer", buffer.instead_of]
                        continue
                    like = buffer.like
                    held["buffer", number] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                for place in kernel.frees:
                    held.pop(place, None)
            return [self._result(value, held) for value in self._output.args[0]]

    def _result(self, value: Any, held: dict[tuple[str, int], Any]) -> Any:
        if not isinstance(value, fx.Node):
            return value
        where = self._where[value][0]
        found, meant = held[where], value.meta["val"]
        if (
            not isinstance(found, Tensor)
            or not isinstance(meant, Tensor)
            or where[0] == "input"
            and value.op == "placeholder"
        ):
            return found
        same = found.shape == meant.shape and found.stride() == meant.stride()
        return found if same else found.as_strided(meant.shape, meant.stride(), meant.storage_offset())

    # --- its plan -------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        count = 0
        for node in self._nodes:
            if node.op == "placeholder":
                self._where[node] = [("input", count)]
                count += 1
            elif node.op == "call_function":
                self._place(node)
            elif node.op == "get_attr":
                self._where[node] = []

    def _place(self, node: fx.Node) -> None:
        name = _name(node)
        sources = [source for source in node.all_input_nodes if self._where.get(source)]
        if name == "getitem":
            base, index = node.args
            assert isinstance(base, fx.Node)
            places = self._where[base]
            self._where[node] = [places[index]] if len(places) > 1 else places  # type: ignore[index]
        elif name in _VIEWS and sources:
            self._where[node] = self._where[sources[0]]
        elif _is_fused(node) and not self._must_be_kept(node):
            self._where[node] = list(dict.fromkeys(place for source in sources for place in self._where[source]))
        else:
            self._keep(node, sources)

    def _keep(self, node: fx.Node, sources: list[fx.Node]) -> None:
        value = node.meta.get("val")
        tensors = [value] if isinstance(value, Tensor) else [v for v in value or [] if isinstance(v, Tensor)]
        kernel = _Kernel()
        number = len(self._kernels)
        self._kernels.append(kernel)
        self._reads_of[number] = {place for source in sources for place in self._where[source]}
        for tensor in tensors:
            self._buffers.append(_Buffer(tensor))
            kernel.makes.append(len(self._buffers) - 1)
        self._where[node] = [("buffer", n) for n in kernel.makes]
        if not _is_fused(node):
            kernel.frees.append(("never", 0))  # takes no input's place

    def _must_be_kept(self, node: fx.Node) -> bool:
        """Whether the result of a fusable operation gets memory: the outside or a kernel of its own kind reads it."""
        if node in self._outside:
            return True
        reads = {place for source in node.all_input_nodes for place in self._where.get(source, [])}
        if len(node.users) > 1 and len(reads) > _MOST_READS:
            return True
        return any(self._reader_needs(user) for user in node.users)

    def _reader_needs(self, user: fx.Node) -> bool:
        if user.op == "output":
            return True
        if _name(user) in _VIEWS or _name(user) == "getitem":
            return user in self._outside or any(self._reader_needs(further) for further in user.users)
        return not (_is_fused(user) or _is_sum(user))

    def _free(self) -> None:
        """When each value is read for the last time; and which results can take the place of one."""
        last: dict[tuple[str, int], int] = {}
        for number, reads in self._reads_of.items():
            last |= dict.fromkeys(reads, number)
        leaving = {place for node in self._outside for place in self._where.get(node, [])}
        for number, kernel in enumerate(self._kernels):
            alone = ("never", 0) in kernel.frees
            kernel.frees = [
                place for place in sorted(self._reads_of[number]) if last[place] == number and place not in leaving
            ]
            # What nobody reads was room for the kernel itself.
            for made in kernel.makes:
                if ("buffer", made) not in last and ("buffer", made) not in leaving:
                    kernel.frees.append(("buffer", made))
            if alone or len(kernel.makes) != 1:
                continue
            made_like = self._buffers[kernel.makes[0]].like
            for kind, place in kernel.frees:
                if kind != "buffer" or place == kernel.makes[0]:
                    continue
                old = self._buffers[place].like
                if old.dtype == made_like.dtype and _count(old) == _count(made_like):
                    self._buffers[kernel.makes[0]].instead_of = place
                    break


def _count(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    if hasattr(target, "_schema"):
        return str(target._schema.name).rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def _is_fused(node: fx.Node) -> bool:
    target: Any = node.target
    if not hasattr(target, "tags"):
        return False
    return isinstance(node.meta.get("val"), Tensor) and (torch.Tag.pointwise in target.tags or _name(node) in _FUSED)


def _is_sum(node: fx.Node) -> bool:
    return _name(node) in {"sum", "mean", "amax", "amin", "var", "var_mean", "argmax", "any", "all", "prod"}
