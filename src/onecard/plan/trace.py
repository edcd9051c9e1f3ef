"""What a step allocates and frees, found by running it on tensors without content.

In: a step under `Recorder` (inside PyTorch's FakeTensorMode, or on real tensors). Out: a `Trace`, every storage with
its bytes, kind, name, and the moments of its life, in order: for the peak, what it is made of, the picture over the
step, and for an allocator that replays it. A storage lives from the operation that makes it to its last reference, so
what autograd, hooks or caches keep is seen whoever keeps it; what a kernel takes and gives back inside is not.

A trace of few layers is made one of many by `deepened`: the segments of a layer are repeated, each copy with storages
of its own. That is exact where layers are alike, and refused where they are not.
It does not know what is trained, nor how: who runs the step says which part and which layer it is in.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from onecard.plan.job import KINDS, Moment

# What a number read from a tensor without content is taken for, and a truth value.
ANY_NUMBER, ANY_TRUTH = 1, False
MOST_REAL_VALUES = 1 << 22
MOST_MOMENTS, MOST_NAMED = 300, 12
# Bytes of single numbers: made within a step, such as counters, they weigh nothing and follow no pattern.
SCALAR = 8


@dataclass(frozen=True)
class Segment:
    """A stretch of the step: its part ("forward"), the layer it is in (None: outside of them), how many parts began."""

    part: str
    layer: int | None = None
    round: int = 0

    @property
    def place(self) -> str:
        """For a person: "backward, layer 7"."""
        return self.part if self.layer is None else f"{self.part}, layer {self.layer}"


@dataclass
class Record:
    """One storage. `layer`: whose weight, gradient or state it is, where it was made outside of the layers."""

    bytes: int
    name: str
    segment: int
    kind: str | None = None
    layer: int | None = None
    again: bool = False  # made by a computation that autograd watches: forward, or computed again in backward
    ended: int | None = None  # the segment


class NotPeriodic(Exception):
    """The layers of a trace are not alike enough to be repeated."""


# --- a finished trace ---------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Records and what happened to them: `(segment, number)` for the beginning of record `number`, `(segment, ~number)`
    for its end."""

    records: list[Record]
    happenings: list[tuple[int, int]]
    segments: list[Segment]

    def events(self) -> list[tuple[int, int]]:
        """`(id, bytes)` for each allocation, `(id, 0)` for each release, as an allocator sees them."""
        return [(n, self.records[n].bytes) if n >= 0 else (~n, 0) for _, n in self.happenings]

    def peak(self) -> Peak:
        """The moment at which most is held."""
        most = total = 0
        at = 0
        for index, (_, number) in enumerate(self.happenings):
            total += self.records[number].bytes if number >= 0 else -self.records[~number].bytes
            if total > most:
                most, at = total, index
        living = self._living(at)
        breakdown = dict.fromkeys(KINDS, 0)
        for record in living:
            breakdown[record.kind or "workspace"] += record.bytes
        place = self.segments[self.happenings[at][0]].place if self.happenings else ""
        return Peak(most, breakdown, place, self._largest(living))

    def _living(self, at: int) -> list[Record]:
        numbers: dict[int, None] = {}
        for _, number in self.happenings[: at + 1]:
            if number >= 0:
                numbers[number] = None
            else:
                del numbers[~number]
        return [self.records[number] for number in numbers]

    def _largest(self, living: list[Record]) -> tuple[tuple[str, int], ...]:
        """Tensors of one name and size, such as the same one of every layer, are told as one."""
        counts: Counter[tuple[str, int]] = Counter((record.name, record.bytes) for record in living)
        rows = [(name if n == 1 else f"{name} ({n} of them)", n * size) for (name, size), n in counts.items()]
        return tuple(sorted(rows, key=lambda row: -row[1])[:MOST_NAMED])

    def moments(self) -> tuple[Moment, ...]:
        """The fullest moment of each segment, in order; of too many, every so manieth and the peak."""
        held = dict.fromkeys(KINDS, 0)
        total, found, here, most = 0, list[Moment](), -1, -1
        for segment, number in self.happenings:
            record = self.records[number if number >= 0 else ~number]
            change = record.bytes if number >= 0 else -record.bytes
            held[record.kind or "workspace"] += change
            total += change
            if segment != here:
                here, most = segment, -1
                found.append(Moment(self.segments[segment].place, dict(held)))
            if total > most:
                most = total
                found[-1] = Moment(self.segments[segment].place, dict(held))
        if len(found) <= MOST_MOMENTS:
            return tuple(found)
        step = -(-len(found) // MOST_MOMENTS)
        peak = max(range(len(found)), key=lambda index: found[index].total_bytes)
        return tuple(moment for index, moment in enumerate(found) if index % step == 0 or index == peak)

    def deepened(self, *, first: int, period: int, copies: int) -> Trace:
        """The trace of the same step with `copies` more of the layers `first` to `first + period - 1` after them.

        NotPeriodic where what passes between them and their neighbours is not alike; that the layers themselves are of
        kinds that come again after `period` is for the caller to know.
        """
        if not copies:
            return self
        try:
            return _Deepening(self, first, period, copies).made()
        except NotPeriodic:
            return _Deepening(self._without_scalars(), first, period, copies).made()

    def _without_scalars(self) -> Trace:
        """The trace without the single numbers that are made within the step."""
        kept = [n for n, record in enumerate(self.records) if record.bytes > SCALAR or record.segment == 0]
        new = {old: number for number, old in enumerate(kept)}
        happenings = [
            (segment, new[n] if n >= 0 else ~new[~n]) for segment, n in self.happenings if (n if n >= 0 else ~n) in new
        ]
        return Trace([self.records[n] for n in kept], happenings, self.segments)


@dataclass(frozen=True)
class Peak:
    """The most that is held at once: bytes, by kind, where in the step, and the largest tensors."""

    bytes: int
    breakdown: dict[str, int]
    place: str
    largest: tuple[tuple[str, int], ...] = ()


class _Deepening:
    """Repeats a block of layers. New layer i follows the pattern of traced layer `_pattern(i)`."""

    def __init__(self, trace: Trace, first: int, period: int, copies: int) -> None:
        self._old, self._first, self._period, self._copies = trace, first, period, copies
        self._new = Trace([], [], [])
        self._layers = 1 + max((s.layer for s in trace.segments if s.layer is not None), default=-1)
        # Where each record of a layer was made: round, layer, and how manieth there; and back.
        self._origin: dict[int, tuple[int, int, int]] = {}
        self._made: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._by_segment: dict[int, list[int]] = defaultdict(list)
        for segment, number in trace.happenings:
            self._by_segment[segment].append(number)
            where = trace.segments[segment]
            if number >= 0 and where.layer is not None:
                made = self._made[where.round, where.layer]
                self._origin[number] = (where.round, where.layer, len(made))
                made.append(number)
        # New numbers: of the records of layers by origin and new layer, of all others by old number.
        self._instance: dict[tuple[int, int, int], int] = {}
        self._others: dict[int, list[int]] = {}

    def made(self) -> Trace:
        """The longer trace."""
        for segment, layer in self._order():
            where = self._old.segments[segment]
            self._new.segments.append(replace(where, layer=layer))
            for number in self._by_segment[segment]:
                if number >= 0:
                    self._begin(number, layer)
                else:
                    self._end(~number, where.layer, layer)
        for number, record in enumerate(self._old.records):
            copies = self._copies_of(number)
            if any((self._new.records[copy].ended is None) != (record.ended is None) for copy in copies):
                raise NotPeriodic(record.name)
        return self._new

    def _pattern(self, layer: int) -> int:
        end = self._first + self._period
        if layer < end:
            return layer
        if layer < end + self._period * self._copies:
            return self._first + (layer - self._first) % self._period
        return layer - self._period * self._copies

    def _followers(self, pattern: int) -> list[int]:
        """The new layers that follow a traced one."""
        block = range(self._first, self._first + self._period)
        if pattern in block:
            return [pattern + self._period * copy for copy in range(self._copies + 1)]
        return [pattern if pattern < self._first else pattern + self._period * self._copies]

    def _order(self) -> Iterator[tuple[int, int | None]]:
        """The old segments in their new order, each with its new layer."""
        index, old = 0, self._old.segments
        while index < len(old):
            if old[index].layer is None:
                yield index, None
                index += 1
                continue
            run: dict[int, int] = {}
            begin = index
            while index < len(old) and old[index].layer is not None and old[index].round == old[begin].round:
                layer = old[index].layer
                assert layer is not None
                if layer in run:
                    raise NotPeriodic(f"layer {layer} is met twice")
                run[layer] = index
                index += 1
            if sorted(run) != list(range(self._layers)) or list(run) not in (sorted(run), sorted(run)[::-1]):
                raise NotPeriodic("layers do not follow one another")
            new = range(self._layers + self._period * self._copies)
            for layer in new if list(run) == sorted(run) else reversed(new):
                yield run[self._pattern(layer)], layer

    def _begin(self, number: int, layer: int | None) -> None:
        record = self._old.records[number]
        if layer is not None:
            round_, _, count = self._origin[number]
            self._instance[round_, count, layer] = self._add(record, layer)
        elif record.layer is not None and self._first <= record.layer < self._first + self._period:
            self._others[number] = [self._add(record, layer) for layer in self._followers(record.layer)]
        else:
            self._others[number] = [self._add(record, record.layer)]

    def _add(self, record: Record, layer: int | None) -> int:
        segment = len(self._new.segments) - 1
        whose = layer if record.layer is not None else None
        made = Record(record.bytes, record.name, segment, record.kind, whose, record.again)
        self._new.records.append(made)
        self._new.happenings.append((segment, len(self._new.records) - 1))
        return len(self._new.records) - 1

    def _end(self, number: int, pattern: int | None, layer: int | None) -> None:
        for copy in self._copies_of(number) if pattern is None else [self._meant(number, pattern, layer)]:
            if self._new.records[copy].ended is not None:
                raise NotPeriodic(self._new.records[copy].name)
            segment = len(self._new.segments) - 1
            self._new.records[copy].ended = segment
            self._new.happenings.append((segment, ~copy))

    def _meant(self, number: int, pattern: int, layer: int | None) -> int:
        """Which new record a traced layer's segment ends, when it is repeated for a new layer."""
        assert layer is not None
        record = self._old.records[number]
        if number not in self._origin:
            if record.layer is None:
                return self._others[number][0]
            meant = layer + record.layer - pattern
            followers = self._followers(record.layer)
            if meant not in followers:
                raise NotPeriodic(record.name)
            return self._others[number][min(followers.index(meant), len(self._others[number]) - 1)]
        round_, made_in, count = self._origin[number]
        meant = layer + made_in - pattern
        like = self._made.get((round_, self._pattern(meant)), [])
        if count >= len(like) or self._old.records[like[count]].bytes != record.bytes:
            raise NotPeriodic(record.name)
        if (round_, count, meant) not in self._instance:
            raise NotPeriodic(record.name)
        return self._instance[round_, count, meant]

    def _copies_of(self, number: int) -> list[int]:
        if number not in self._origin:
            return self._others[number]
        round_, made_in, count = self._origin[number]
        return [self._instance[round_, count, layer] for layer in self._followers(made_in)]


# --- recording ----------------------------------------------------------------------------------------------------


@dataclass
class _Living:
    number: int
    reference: Any = field(repr=False)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation inside its `with`, which stands inside that of a FakeTensorMode (allow_non_fake_inputs).

    Operations on real tensors alone (batches of ids, whose content decides shapes) are run really. A number read from
    a tensor without content is 1, a truth value False; a mask without content selects everything.
    `logits`: what counts as those, by shape. `bodies`: what operators of Python do, to be seen instead of them.
    `casts`: element by element over several types, a CPU first copies into the common one, which a card need not.
    """

    def __init__(
        self,
        *,
        logits: Callable[[Tensor], bool] = lambda _: False,
        bodies: dict[Any, Callable[..., Any]] | None = None,
        casts: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._logits, self._bodies, self._casts = logits, bodies or {}, casts
        self._segments = [Segment("setup")]
        self._records: list[Record] = []
        self._happenings: list[tuple[int, int]] = []
        self._living: dict[int, _Living] = {}
        self._rounds = 0
        self._elsewhere = 0
        self._passive = False
        self._modules: list[str] = []

    # --- what the caller says -------------------------------------------------------------------------------------

    def begin(self, part: str) -> None:
        """A new part of the step begins, outside of the layers."""
        self._rounds += 1
        self._segments.append(Segment(part, None, self._rounds))

    def enter(self, layer: int | None) -> None:
        """From here on the present part is in this layer."""
        here = self._segments[-1]
        if here.layer != layer:
            self._segments.append(replace(here, layer=layer))

    @property
    def part(self) -> str:
        """The present part."""
        return self._segments[-1].part

    def claim(self, tensor: Tensor, kind: str, name: str, layer: int | None = None) -> None:
        """Say what a tensor is, from its beginning on, and whose layer's it is."""
        number = self._number(tensor, name)
        if number is not None:
            record = self._records[number]
            record.kind, record.name, record.layer = kind, name, layer

    def enter_module(self, name: str) -> None:
        """What is made from here on is named after it, until `leave_module`."""
        self._modules.append(name)

    def leave_module(self) -> None:
        """The inverse of `enter_module`."""
        self._modules.pop()

    def settle(self) -> None:
        """Forget how what lives now came about: the trace begins with it."""
        kept = sorted(self._living.values(), key=lambda living: living.number)
        records = [self._records[living.number] for living in kept]
        for number, (living, record) in enumerate(zip(kept, records)):
            living.number, record.segment = number, 0
        self._records = records
        self._happenings = [(0, number) for number in range(len(records))]
        self._segments = [Segment("setup"), replace(self._segments[-1])]

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside lies in another memory and is not counted."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    @contextmanager
    def passive(self, on: bool = True) -> Iterator[None]:
        """Inside, operations go by unseen and as they are, such as those that a compiler traces."""
        before, self._passive = self._passive, on
        try:
            yield
        finally:
            self._passive = before

    def active(self) -> AbstractContextManager[None]:
        """The inverse of `passive`, inside of it."""
        return self.passive(False)

    def finish(self) -> Trace:
        """The trace; what has no kind yet gets one by its life.

        Activations outlive the forward part that made them (in an evaluation: their layer), or are computed again in
        backward; all else is workspace.
        """
        for record in self._records:
            record.kind = record.kind or self._kind(record)
        self._living.clear()
        self._untag_passing()
        return Trace(self._records, self._happenings, self._segments)

    def _untag_passing(self) -> None:
        """Leave a layer to those records of the optimizer only that live beside those of all other layers.

        A step on lists of tensors holds something for each tensor of a list at once; one that goes from tensor to
        tensor does not.
        """
        last = max((record.layer for record in self._records if record.layer is not None), default=0)
        alive: dict[int, None] = {}
        beside: dict[str, set[int]] = defaultdict(set)
        together: set[str] = set()
        for _, number in self._happenings:
            record = self._records[number if number >= 0 else ~number]
            if record.layer is None or self._segments[record.segment].part != "optimizer":
                continue
            if number < 0:
                del alive[~number]
                beside[record.name].discard(record.layer)
                continue
            alive[number] = None
            beside[record.name].add(record.layer)
            if {0, last} <= beside[record.name]:
                together.add(record.name)
        for record in self._records:
            if self._segments[record.segment].part == "optimizer" and record.name not in together:
                record.layer = None

    def _kind(self, record: Record) -> str:
        began = self._segments[record.segment]
        if began.part == "backward":
            return "activations" if record.again else "workspace"
        if began.part == "forward":
            passes = record.ended is not None and self._segments[record.ended].round == began.round
            return "workspace" if passes else "activations"
        passes = record.ended == record.segment or began.part == "optimizer"
        return "workspace" if passes else "activations"

    # --- what happens ---------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and telling the compiler so costs more than what is done."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than all else together
        kwargs = kwargs or {}
        if self._passive:
            return func(*args, **kwargs)
        found = list(_tensors(args)) + list(_tensors(kwargs.values()))
        if func in self._bodies:
            with self:
                return self._bodies[func](*args, **kwargs)
        copies = self._copies(func, found) if self._casts else None
        if _is_real(func, found):
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            return _content(args[0])
        elif func is torch.ops.aten.nonzero.default:
            out = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif func is torch.ops.aten.equal.default:
            return ANY_TRUTH
        else:
            if func is torch.ops.aten.index.Tensor:
                args = (args[0], _numbers(args[1]), *args[2:])
            out = func(*args, **kwargs)
        if not self._elsewhere:
            layers = self._layers_of(args) if self.part == "optimizer" else []
            for index, tensor in enumerate(_tensors((out,))):
                number = self._number(tensor, func)
                if number is not None and index < len(layers) and self._records[number].kind is None:
                    self._records[number].layer = layers[index]
        del copies
        return out

    def _copies(self, func: Any, tensors: list[Tensor]) -> list[Tensor] | None:
        """Copies of what is not in the common type of an operation on single values."""
        tensors = [tensor for tensor in tensors if tensor.dim() and tensor.is_floating_point()]
        if len({tensor.dtype for tensor in tensors}) < 2 or torch.Tag.pointwise not in getattr(func, "tags", ()):
            return None
        common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        with self:
            return [torch.empty_like(tensor, dtype=common) for tensor in tensors if tensor.dtype != common]

    def _layers_of(self, args: Any) -> list[int | None]:
        """Whose layers' the first tensors of an operation are: its results belong there too, in the same order."""
        first = next((value for value in args if isinstance(value, Tensor | list | tuple)), None)
        layers: list[int | None] = []
        for tensor in _tensors((first,)):
            living = self._living.get(tensor.untyped_storage()._cdata)
            layers.append(None if living is None else self._records[living.number].layer)
        return layers

    def _number(self, tensor: Tensor, made_by: Any) -> int | None:
        """The record of a tensor's storage, a new one where it is met for the first time; None for an empty one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        living = self._living.get(key)
        if living is not None:
            return living.number
        size = storage.nbytes()
        if not size:
            return None
        number = len(self._records)
        record = Record(size, self._name(tensor, made_by), len(self._segments) - 1, again=torch.is_grad_enabled())
        if self._logits(tensor):
            record.kind = "logits"
        self._records.append(record)
        self._happenings.append((record.segment, number))

        def gone(_: Any) -> None:
            living = self._living.pop(key, None)
            if living is not None:
                record.ended = len(self._segments) - 1
                self._happenings.append((record.ended, ~living.number))

        self._living[key] = _Living(number, weakref.ref(storage, gone))
        return number

    def _name(self, tensor: Tensor, made_by: Any) -> str:
        if isinstance(made_by, str):
            return made_by
        name = made_by._schema.name.rpartition("::")[2]
        shape = " x ".join(str(size) for size in tensor.shape)
        where = f"{self._modules[-1]}: " if self._modules else ""
        return f"{where}{name} {shape} {str(tensor.dtype).removeprefix('torch.')}, {self.part}"


def present_recorder() -> Recorder:
    """The innermost one that operations now go through."""
    return next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Recorder))


def _is_real(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an operation is run really: on real tensors that are small, whose content may decide something."""
    if not tensors:
        return bool(getattr(func, "overloadpacket", None) is torch.ops.aten.arange)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    rank = max(tensor.dim() for tensor in tensors)
    sizes = [[1] * (rank - tensor.dim()) + list(tensor.shape) for tensor in tensors]
    count = 1
    for column in zip(*sizes):
        count *= max(column)
    return count <= MOST_REAL_VALUES


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _content(tensor: Tensor) -> float | int | bool:
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        with unset_fake_temporarily():
            return constant.item()  # type: ignore[no-any-return]
    if tensor.dtype == torch.bool:
        return ANY_TRUTH
    return float(ANY_NUMBER) if tensor.is_floating_point() else ANY_NUMBER


def _numbers(indices: Any) -> list[Tensor | None]:
    """Masks among indices as the numbers of what they select."""
    made: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            made.append(index)
        elif isinstance(index, FakeTensor):
            made += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            with unset_fake_temporarily():
                made += index.nonzero(as_tuple=True)
    return made
