"""Compiling the layers of a model, and doing without where no compiler is.

Each layer is compiled by itself: layers of one form share their code, so a deep model compiles as fast as one layer.
Compiled code is kept between runs in TORCHINDUCTOR_CACHE_DIR, which `cli` lays into the user's cache directory.
On a card each compiled layer can be recorded as CUDA graphs (not run on a card yet).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from onecard import console

# What a layer raises at its first use when it cannot be compiled.
FAILURES = (TorchDynamoException,)
# Set on a model whose layers are recorded as CUDA graphs.
_RECORDED = "_onecard_recorded"
# The hook through which gradients begin before the layers of a model whose embeddings are frozen.
_BEGINS = "_onecard_begins"


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers: the longest ModuleList of the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def compile_layers(model: torch.nn.Module, device: str, *, cuda_graphs: bool = False) -> bool:
    """Compile each layer in place at its first use; False (with a note) where no compiler is here.

    A compiler that is here and does not work (no Python.h, say) is found at that first use: FAILURES, then `undo`.
    With `cuda_graphs`, `begin_pass` has to be called before each forward pass.
    """
    graphs = cuda_graphs and device == "cuda"
    if cuda_graphs and not graphs:
        console.note("  cuda_graphs changes nothing here: there is no card to record for")
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        console.note("  no C++ compiler found: layers run uncompiled (install g++ for more speed)")
        return False
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
    let_gradients_begin_before(model)
    setattr(model, _RECORDED, graphs)
    return True


def let_gradients_begin_before(model: torch.nn.Module) -> None:
    """Beside frozen embeddings, give the first layer an input with a gradient, as all the others have.

    It would be compiled for itself otherwise. The price is that gradient, of one layer among all, which nobody reads.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None or any(parameter.requires_grad for parameter in embeddings.parameters()):
        return
    if any(parameter.requires_grad for parameter in model.parameters()):
        handle = embeddings.register_forward_hook(_with_gradient)
        setattr(model, _BEGINS, handle)


def _with_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def undo(model: torch.nn.Module) -> None:
    """Make the layers run plainly again."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None
    setattr(model, _RECORDED, False)
    handle = getattr(model, _BEGINS, None)
    if handle is not None:
        handle.remove()
        delattr(model, _BEGINS)


def begin_pass(model: torch.nn.Module) -> None:
    """Before each forward pass, learned from or not: what recorded layers gave out last time may be written over.

    Gradients must outlive that, so they get memory of their own, into which a recorded layer's are added.
    """
    if not getattr(model, _RECORDED, False):
        return
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled layers plainly, for shapes that are met only once (such as while a sample is written)."""
    with torch.compiler.set_stance("force_eager"):
        yield
