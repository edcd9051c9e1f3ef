"""Storages of a step, from their first operation to their last reference; and few layers made many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onecard.plan.trace import MOST_MOMENTS, NotPeriodic, Recorder, Trace

ROWS, WIDTH = 8, 32


def test_a_storage_lives_from_its_operation_to_its_last_reference() -> None:
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        first = torch.empty(100)
        second = first + 1
        seen = second.view(10, 10)
        del first
        second.mul_(2)
        del second
        third = seen.transpose(0, 1).contiguous()
        del seen
    trace = recorder.finish()
    assert trace.events() == [(0, 400), (1, 400), (0, 0), (2, 400), (1, 0)]
    assert trace.peak().bytes == 800
    assert third.shape == (10, 10)


def test_what_has_no_content_selects_all_and_what_is_real_decides() -> None:
    recorder = Recorder()
    real = torch.tensor([3, 1, 2])
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        made = torch.empty(6, 4)
        assert made[made[:, 0] > 0].shape == (6, 4)
        assert made[real > 1].shape == (2, 4)  # the mask is real
        assert int(real.max()) == 3 and float(made.sum()) == 1.0 and not bool((made > 0).all())
        assert made.nonzero().shape == (24, 2)


def test_kinds_of_a_linear_layer() -> None:
    """y = x W: weight and gradient of 32 x 32 x 4 bytes each, input and output of 8 x 32 x 4."""
    recorder = Recorder()
    weight_bytes, row_bytes = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    with FakeTensorMode(), recorder:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        recorder.claim(layer.weight, "parameters", "weight")
        layer.weight.register_post_accumulate_grad_hook(lambda w: recorder.claim(w.grad, "gradients", "its gradient"))
        recorder.begin("forward")
        recorder.settle()
        inputs = torch.empty(ROWS, WIDTH)
        output = layer(inputs)
        loss = output.sum()
        recorder.begin("backward")
        loss.backward()
        del inputs, output, loss
        recorder.begin("optimizer")
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad
        layer.weight.grad = None
    trace = recorder.finish()
    peak = trace.peak()
    # In the step: weight, gradient, and a tenth of it.
    assert (peak.bytes, peak.place) == (3 * weight_bytes, "optimizer")
    assert (peak.breakdown["parameters"], peak.breakdown["gradients"], peak.breakdown["workspace"]) == (
        weight_bytes,
        weight_bytes,
        weight_bytes,
    )
    by_place = {moment.place: moment for moment in trace.moments()}
    assert by_place["forward"].bytes["activations"] == 2 * row_bytes + 4  # input, output and their sum outlive it
    assert by_place["backward"].bytes["gradients"] == weight_bytes
    assert [name for name, _ in peak.largest[:2]] == ["weight", "its gradient"]


def test_memory_elsewhere_is_not_counted_and_what_came_before_is_forgotten() -> None:
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        kept = torch.empty(10)
        for _ in range(3):
            torch.empty(1000)
        with recorder.elsewhere():
            away = torch.empty(5000)
        recorder.settle()
        back = away + 1
    trace = recorder.finish()
    assert trace.events() == [(0, 40), (1, 20000)]
    assert (kept.numel(), back.numel()) == (10, 5000)


def test_copies_into_a_common_type_are_seen_where_they_are_made() -> None:
    for casts, expected in ((False, 400), (True, 400 + 400)):
        recorder = Recorder(casts=casts)
        with FakeTensorMode(), recorder:
            total, part = torch.empty(100), torch.empty(100, dtype=torch.bfloat16)
            recorder.settle()
            total += part
        assert recorder.finish().peak().bytes == 200 + expected


def test_operators_of_python_are_seen_through() -> None:
    recorder = Recorder(bodies={torch.ops.aten.sin.default: lambda x: (x + 1) * 2})
    with FakeTensorMode(), recorder:
        made = torch.empty(100).sin()
    assert [size for _, size in recorder.finish().events()] == [400, 400, 400, 0, 0]
    assert made.shape == (100,)


# --- few layers made many -----------------------------------------------------------------------------------------


def step(layers: int, *, widths: list[int] | None = None, lists: bool = False) -> Trace:
    """Forward, backward and a step of stacked layers. `lists`: the step holds something for all weights at once."""
    recorder = Recorder()
    widths = widths or [WIDTH] * layers
    with FakeTensorMode(), recorder:
        model = [nn.Sequential(nn.Linear(WIDTH, w), nn.GELU(), nn.Linear(w, WIDTH)) for w in widths]
        parameters = [p for layer in model for p in layer.parameters()]
        for number, layer in enumerate(model):
            for parameter in layer.parameters():
                recorder.claim(parameter, "parameters", "weight", number)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, number=number: recorder.claim(p.grad, "gradients", "gradient", number)
                )
        recorder.begin("forward")
        recorder.settle()
        hidden = torch.empty(ROWS, WIDTH) * 2
        for number, layer in enumerate(model):
            recorder.enter(number)
            hidden = hidden + layer(hidden)
            hidden.register_hook(lambda _, number=number: recorder.enter(number))
        recorder.enter(None)
        loss = hidden.sum()
        recorder.begin("backward")
        del hidden
        loss.backward()
        recorder.begin("optimizer")
        with torch.no_grad():
            gradients = [p.grad for p in parameters]
            squares: list[Tensor] = list(torch._foreach_mul(gradients, gradients)) if lists else []
            for parameter, gradient in zip(parameters, gradients):
                parameter -= gradient * gradient
            del squares, gradients, gradient
        for parameter in parameters:
            parameter.grad = None
    return recorder.finish()


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("layers", [4, 5, 9])
def test_three_layers_made_many_are_the_trace_of_many(layers: int, lists: bool) -> None:
    made = step(3, lists=lists).deepened(first=1, period=1, copies=layers - 3)
    whole = step(layers, lists=lists)
    assert made.peak() == whole.peak()
    assert made.moments() == whole.moments()
    begun = {segment: 0 for segment, _ in made.happenings}
    assert len(begun) == len({segment for segment, _ in whole.happenings})
    # Outside of the optimizer, whose tensors follow one another without layers, all is the same in the same order.
    assert [s.place for s in made.segments] == [s.place for s in whole.segments]
    for trace in (made, whole):
        assert len(trace.records) >= 12 * layers
    assert sizes(made) == sizes(whole)


def sizes(trace: Trace) -> list[tuple[str, int]]:
    """What happens in forward and backward: place, and bytes that come or go."""
    return [
        (trace.segments[segment].place, trace.records[n].bytes if n >= 0 else -trace.records[~n].bytes)
        for segment, n in trace.happenings
        if trace.segments[segment].part in ("forward", "backward")
    ]


def test_layers_of_two_kinds_are_repeated_as_a_pair() -> None:
    narrow, wide = WIDTH, 3 * WIDTH
    made = step(6, widths=[narrow, wide] * 3).deepened(first=2, period=2, copies=2)
    whole = step(10, widths=[narrow, wide] * 5)
    assert sizes(made) == sizes(whole)
    assert made.peak() == whole.peak()


def handed_on(order: list[int], sizes: list[int]) -> Trace:
    """Layers that each hand one tensor to the next."""
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        recorder.begin("forward")
        held = torch.empty(1)
        for layer in order:
            recorder.enter(layer)
            held = torch.empty(sizes[layer])
        recorder.enter(None)
        held = held[:0].clone()
    assert held.numel() == 0
    return recorder.finish()


def test_layers_that_differ_are_not_repeated() -> None:
    assert handed_on([0, 1, 2], [8, 8, 8]).deepened(first=1, period=1, copies=2).peak().bytes == 64
    with pytest.raises(NotPeriodic):
        handed_on([0, 1, 2], [8, 16, 32]).deepened(first=1, period=1, copies=2)
    with pytest.raises(NotPeriodic):
        handed_on([0, 2, 1], [8, 8, 8]).deepened(first=1, period=1, copies=2)


def test_a_long_picture_is_thinned_and_keeps_its_peak() -> None:
    trace = step(3).deepened(first=1, period=1, copies=397)
    moments = trace.moments()
    assert len(moments) <= MOST_MOMENTS + 1
    assert max(moment.total_bytes for moment in moments) == trace.peak().bytes
