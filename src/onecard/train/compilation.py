"""Compiling the layers of a model, and doing without where no compiler is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from onecard import console


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers: the longest ModuleList of the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def compile_layers(model: torch.nn.Module, device: str) -> bool:
    """Compile each layer in place; False (with a note) where no compiler is here. The cache is kept between runs."""
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        console.note("  no C++ compiler found: layers run uncompiled (install g++ for more speed)")
        return False
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onecard" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)
    return True


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled layers plainly, for shapes that are met only once (such as while a sample is written)."""
    with torch.compiler.set_stance("force_eager"):
        yield
