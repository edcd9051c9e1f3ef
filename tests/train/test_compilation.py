"""Recorded layers without a card: what is said, and that gradients have memory of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onecard.train import compilation
from onecard.train.compilation import begin_pass, compile_layers, undo


def model() -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    made.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return made


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of torch reading torch
def test_on_a_cpu_layers_are_compiled_and_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: modes.append(settings["mode"]))
    monkeypatch.setattr(compilation.shutil, "which", lambda _: "/usr/bin/g++")
    made = model()
    assert compile_layers(made, "cpu", cuda_graphs=True)
    assert "cuda_graphs changes nothing here" in capsys.readouterr().err
    begin_pass(made)
    assert modes == [None] * 3 and all(p.grad is None for p in made.parameters())
    assert compile_layers(made, "cuda", cuda_graphs=True)
    assert modes[3:] == ["reduce-overhead"] * 3 and not capsys.readouterr().err


def test_gradients_of_recorded_layers_are_added_up_in_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    made = model()
    compile_layers(made, "cuda", cuda_graphs=True)
    layer = made.layers[0]
    places = []
    for _ in range(2):  # two micro-batches
        begin_pass(made)
        places.append(layer.weight.grad.data_ptr())
        layer(torch.ones(1, 4)).sum().backward()
    assert len(marks) == 2 and places[0] == places[1] == layer.weight.grad.data_ptr()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))
    assert made.frozen.grad is None
    undo(made)
    made.zero_grad()
    begin_pass(made)
    assert len(marks) == 2 and layer.weight.grad is None
