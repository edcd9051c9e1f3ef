"""`make bench-gpu`: packed attention and loss against fp64 on a CUDA card, then tokens a second.

Prints one JSON document and writes benchmarks/gpu.json, so that whoever has a card can send one file. On a machine
without a card it says so and ends with status 3.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from onecard import artifact

HERE = Path(__file__).parent


def attention_error(dtype: torch.dtype) -> float:
    """Largest relative error of packed attention (output and gradients) against fp64, document by document."""
    from onecard.model.attention import packed_attention

    generator = torch.Generator().manual_seed(0)
    edges = [0, 7, 100, 300, 512]
    shape = (1, 4, 512, 64)
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(*(t[:, :, a:b] for t in exact), is_causal=True)
        for a, b in zip(edges, edges[1:])
    ]
    wanted = torch.cat(pieces, dim=2).transpose(1, 2)
    wanted.sum().backward()
    given = [t.detach().to("cuda", dtype).requires_grad_() for t in exact]
    boundaries = torch.tensor(edges, dtype=torch.int32, device="cuda")
    made, _ = packed_attention(torch.nn.Module(), *given, None, cu_seq_lens_q=boundaries, max_length_q=212)
    made.sum().backward()
    pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(given, exact))]
    return max(float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def loss_error(dtype: torch.dtype) -> float:
    """Relative error of the chunked loss's gradients against fp64."""
    from onecard.model.loss import chunked_cross_entropy

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 128, generator=generator, dtype=torch.float64, requires_grad=True)
    head = (0.1 * torch.randn(4096, 128, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 4096, (512,), generator=generator)
    torch.nn.functional.cross_entropy(hidden @ head.T, labels).backward()
    given = [t.detach().to("cuda", torch.float32).requires_grad_() for t in (hidden, head)]
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        chunked_cross_entropy(given[0], given[1], labels.cuda(), 1 / 512).backward()
    pairs = [(given[0].grad, hidden.grad), (given[1].grad, head.grad)]
    return max(float((a.cpu().double() - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None)


def main() -> int:
    """Run everything; 3 without a card, 1 if something is not correct."""
    if not torch.cuda.is_available():
        sys.stderr.write("No CUDA card answers: nothing to measure here.\n")
        return 3
    limits = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "versions": artifact.versions(), "errors": {}}
    correct = True
    for dtype, limit in limits.items():
        errors = {"attention": attention_error(dtype), "loss": loss_error(dtype), "limit": limit}
        found["errors"][str(dtype)] = errors
        correct = correct and max(errors["attention"], errors["loss"]) < limit
    for size, vocabulary, batch, length in (("125M", 32000, 8, 1024), ("1B", 32000, 2, 1024)):
        arguments = ["--size", size, "--vocabulary", vocabulary, "--batch", batch, "--length", length, "--updates", 12]
        for engine in ("onecard", "trainer"):
            command = [sys.executable, "-W", "ignore", str(HERE / "dense.py"), engine, *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
            last = done.stdout.strip().split("\n")[-1] if done.returncode == 0 else json.dumps(done.stderr[-800:])
            found.setdefault("dense", {}).setdefault(size, {})[engine] = json.loads(last)
    found["correct"] = correct
    artifact.write_json_atomically(HERE / "gpu.json", found)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
