"""Optimizers over named parameter groups: AdamW, and Muon for the matrices with AdamW for the rest.

Decay touches matrices only: norms, biases and every other vector are left alone; a tied matrix stands in one group
once.
Own code for Muon because torch.optim.Muon orthogonalises in bf16 whatever the machine, which processors without bf16
units do hundreds of times slower than fp32, and one matrix at a time; here matrices of one shape go through together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Quintic coefficients of the Newton-Schulz iteration that Keller Jordan published with Muon (2024): they drive all
# singular values to about 1 in five steps.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices_KMN: Tensor, *, steps: int = 5) -> Tensor:
    """The nearest matrices with singular values near 1 (0.7 to 1.2), for a stack K x M x N, in its dtype."""
    a, b, c = _NEWTON_SCHULZ
    made = matrices_KMN
    transposed = made.shape[-2] > made.shape[-1]
    if transposed:
        made = made.mT
    made = made / (made.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = made @ made.mT
        made = a * made + torch.baddbmm(square, square, square, beta=b, alpha=c) @ made
    result: Tensor = made.mT if transposed else made
    return result


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), with decoupled weight decay.

    The step of an M x N matrix is scaled by 0.2 sqrt(max(M, N)), so that its size matches AdamW's (Liu et al. 2025,
    "Muon is scalable for LLM training") and one learning rate serves both.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._compute_dtype = compute_dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients in `.grad`."""
        assert closure is None, "the loop computes gradients"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_stack(group, shape, parameters)

    def _step_stack(self, group: dict[str, Any], shape: torch.Size, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
        # Nesterov: look ahead by one more momentum step.
        ahead = torch.stack(
            [p.grad.lerp(self.state[p]["momentum_buffer"], group["momentum"]) for p in parameters]  # type: ignore[union-attr]
        )
        steps = orthogonalise(ahead.to(self._compute_dtype)).to(parameters[0].dtype)
        size = group["lr"] * 0.2 * max(shape) ** 0.5
        for parameter, step in zip(parameters, steps):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(step, alpha=-size)


class Optimizers:
    """One or two optimizers that step as one; state by parameter name, so that it survives a change of order."""

    def __init__(self, parts: list[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.parts = parts
        self._names = names
        self._peaks = [[group["lr"] for group in part.param_groups] for part in parts]

    @property
    def peak_learning_rate(self) -> float:
        """The peak of the first group: what metrics call lr."""
        return float(self._peaks[0][0])

    def set_factor(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for part, peaks in zip(self.parts, self._peaks):
            for group, peak in zip(part.param_groups, peaks):
                group["lr"] = peak * factor

    def step(self) -> None:
        """Step every part."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor of state as `parameter name` + `/` + `key`."""
        return {
            f"{self._names[id(parameter)]}/{key}": value
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in tensors.items():
            parameter_name, key = name.rsplit("/", 1)
            by_name[parameter_name][key] = value
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    part.state[parameter] = by_name.get(self._names[id(parameter)], {})


def parameter_kinds(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Trainable parameters, each exactly once (tied ones by their first name), as matrices, embeddings and vectors.

    matrices: two-dimensional weights inside the layers; embeddings: input and output embeddings; vectors: all else.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        embeddings.add(id(head.weight))
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {"matrices": [], "embeddings": [], "vectors": []}
    for name, parameter in model.named_parameters():  # named_parameters yields a tied tensor once
        if not parameter.requires_grad:
            continue
        kind = "embeddings" if id(parameter) in embeddings else "matrices" if parameter.ndim == 2 else "vectors"
        kinds[kind].append((name, parameter))
    return kinds


def build(
    model: nn.Module,
    optimizer: str,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    muon_dtype: torch.dtype = torch.float32,
) -> Optimizers:
    """`adamw`, or `muon` (matrices by Muon, embeddings and vectors by AdamW)."""
    kinds = parameter_kinds(model)
    names = {id(parameter): name for group in kinds.values() for name, parameter in group}
    decayed = [p for _, p in kinds["embeddings"]]
    vectors = [p for _, p in kinds["vectors"]]
    matrices = [p for _, p in kinds["matrices"]]
    parts: list[torch.optim.Optimizer] = []
    if optimizer == "muon" and matrices:
        parts.append(Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, compute_dtype=muon_dtype))
    else:
        decayed = matrices + decayed
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if groups:
        parts.append(torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True))
    return Optimizers(parts, names)
