"""Compiling the layers of a model, and doing without where no compiler is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import TorchDynamoException

from onecard import console

# What a layer raises at its first use when it cannot be compiled.
FAILURES = (TorchDynamoException,)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers: the longest ModuleList of the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def compile_layers(model: torch.nn.Module, device: str) -> bool:
    """Compile each layer in place at its first use; False (with a note) where no compiler is here.

    A compiler that is here and does not work (no Python.h, say) is found at that first use: FAILURES, then `undo`.
    """
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        console.note("  no C++ compiler found: layers run uncompiled (install g++ for more speed)")
        return False
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)
    return True


def undo(model: torch.nn.Module) -> None:
    """Make the layers run plainly again."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled layers plainly, for shapes that are met only once (such as while a sample is written)."""
    with torch.compiler.set_stance("force_eager"):
        yield
