"""Compiled layers: code that is kept between runs; on a card, gradients of recorded ones with memory of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import pretrain_settings, write_corpus
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


# What `onecard pretrain` does in a process of its own, and what the compiler found in its cache then.
_RUN = """
import json, sys
import tiny_runs
from onecard import cli
tiny_runs.add_tiny_size()
status = cli.main(sys.argv[1:] + ["--quiet"])
from torch._dynamo.utils import counters
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
print(json.dumps(found | {"status": status}))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler here")
def test_compiled_code_is_kept_between_runs(tmp_path: Path, tiny_tokenizer_directory: Path) -> None:
    write_corpus(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parent)}

    def run(output: str) -> dict[str, int]:
        settings = pretrain_settings(tmp_path, tiny_tokenizer_directory, output, max_steps=1, start="random")
        words = [settings.pop("corpus")]
        for name, value in (settings | {"compile": True}).items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        done = subprocess.run(
            [sys.executable, "-c", _RUN, "pretrain", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        assert found["status"] == 0, done.stderr
        return found

    first, second = run("a"), run("b")
    assert first["miss"] > 0
    assert (second["miss"], second["hit"]) == (0, first["miss"] + first["hit"])
    assert any((tmp_path / "cache" / "onecard" / "inductor").rglob("*.so"))
