"""The optimizers of a run: which parameter is stepped by what, where its state lies, and when the step is taken.

Decay touches matrices only: norms, biases and every other vector are left alone; a tied matrix stands in one group
once. Steps are taken after all gradients are there, or inside backward, each as soon as its gradient is. Weights and
gradients may be bf16; every step is computed in fp32. States go in and out as plain tensors under parameter names.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onecard.config import TrainingConfig
from onecard.errors import ConfigError
from onecard.train.eight_bit import AdamW8bit
from onecard.train.muon import Muon
from onecard.train.rounding import write

_ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
# Adafactor's steps are relative to the size of a matrix, but to this at least: with 1 they are those of AdamW, so that
# one learning rate serves both, and a matrix that begins at 0 (as adapters do) can leave it.
_WHOLE_STEPS = 1.0
Group = dict[str, Any]
Maker = Callable[[list[Group]], torch.optim.Optimizer]


def check(config: TrainingConfig, precision: str | None = None) -> None:
    """ConfigError for settings that cannot be combined; `precision` is what auto became."""
    precision = precision or config.precision
    accumulation = config.gradient_accumulation_steps
    conflicts = [
        (
            config.optimizer_in_backward and config.max_grad_norm > 0,
            "optimizer_in_backward steps each weight before the norm of all gradients is known, "
            f"so max_grad_norm = {config.max_grad_norm:g} cannot clip by it.",
            "Set max_grad_norm = 0, or optimizer_in_backward = false.",
        ),
        (
            config.optimizer_in_backward and accumulation != "auto" and accumulation > 1,
            "optimizer_in_backward keeps no gradient, "
            f"so gradient_accumulation_steps = {accumulation} has nothing to add up.",
            "Set gradient_accumulation_steps = 1 (and a larger batch_size), or optimizer_in_backward = false.",
        ),
        (
            config.optimizer_in_backward and precision == "fp16",
            "optimizer_in_backward steps weights before an overflow can be seen, so precision = fp16 cannot try again.",
            "Set precision = bf16 or fp32, or optimizer_in_backward = false.",
        ),
        (
            config.optimizer_in_backward and config.gradients == "bf16",
            "optimizer_in_backward keeps no gradient, so gradients = bf16 saves nothing.",
            "Set gradients = fp32, or optimizer_in_backward = false.",
        ),
        (
            config.optimizer == "adafactor" and config.optimizer_states not in ("auto", "fp32"),
            "optimizer = adafactor keeps next to nothing, "
            f"so optimizer_states = {config.optimizer_states} saves nothing.",
            "Set optimizer_states = fp32, or optimizer = adamw.",
        ),
    ]
    for conflict, what, remedy in conflicts:
        if conflict:
            raise ConfigError(what, remedy)


class _Unit:
    """An optimizer and its parameters: all of a kind, or a single one where its step needs room of its own.

    `widened`: the step is taken on fp32 copies, which last as long as the step. `on_host`: so do states on the device.
    """

    def __init__(self, group: Group, make: Maker, *, widened: bool, on_host: bool) -> None:
        self.parameters: list[nn.Parameter] = group["params"]
        self._widened, self._on_host = widened, on_host
        assert len(self.parameters) == 1 or not (widened or on_host)
        # What the optimizer knows: the parameters, or a stand-in that has no content between steps.
        self.targets = (
            [nn.Parameter(torch.empty(0, device=p.device)) for p in self.parameters] if widened else self.parameters
        )
        self.part = make([{**group, "params": self.targets}])
        self._host: dict[str, Tensor] = {}

    def step(self) -> None:
        """Step those parameters that have a gradient."""
        if self._widened:
            self._step_widened()
            return
        self._fetch()
        self.part.step()
        self._put_back()

    def _step_widened(self) -> None:
        (parameter,), (target,) = self.parameters, self.targets
        if parameter.grad is None:
            return
        target.data = parameter.detach().float()  # the weight itself where it is fp32
        target.grad = parameter.grad.float()
        self._fetch()
        self.part.step()
        self._put_back()
        if parameter.dtype != torch.float32:
            with torch.no_grad():
                write(parameter.detach(), target.detach())
        target.grad = None
        target.data = torch.empty(0, device=parameter.device)

    def _fetch(self) -> None:
        if self._host:
            state = self.part.state[self.targets[0]]
            state |= {key: value.to(self.targets[0].device, non_blocking=True) for key, value in self._host.items()}

    def _put_back(self) -> None:
        """Copies queue behind the step on the device's own stream: what follows there finds them done."""
        if not self._on_host or not self.part.state:
            return
        state = self.part.state[self.targets[0]]
        for key in [key for key, value in state.items() if value.ndim]:
            value = state.pop(key)
            self._keep_on_host(key, value, pinned=value.device.type == "cuda")

    def states(self) -> list[tuple[nn.Parameter, dict[str, Tensor]]]:
        """The state of each parameter that has one, wherever it lies."""
        return [
            (parameter, self.part.state[target] | self._host)
            for parameter, target in zip(self.parameters, self.targets)
            if target in self.part.state or self._host
        ]

    def load(self, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """The inverse of `states`, from wherever they lie; parameters without a state begin anew."""
        self._host = {}
        for parameter, target in zip(self.parameters, self.targets):
            self.part.state.pop(target, None)
            if parameter not in states:
                continue
            for key, value in states[parameter].items():
                if self._on_host and value.ndim:
                    self._keep_on_host(key, value, pinned=parameter.device.type == "cuda")
                else:
                    # Counters too: fused kernels want them where the weights are.
                    self.part.state[target][key] = value.to(parameter.device)

    def _keep_on_host(self, key: str, value: Tensor, *, pinned: bool) -> None:
        if key not in self._host:
            self._host[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        self._host[key].copy_(value, non_blocking=True)


class Optimizers:
    """Optimizers that step as one; state by parameter name, so that it survives a change of order."""

    def __init__(self, units: list[_Unit], names: dict[int, str], *, in_backward: bool = False) -> None:
        self.units = units
        self.in_backward = in_backward
        self._names = names
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]
        self._squares = 0.0
        self._hooks = [self._hook(unit) for unit in units] if in_backward else []
        # A hook left behind would be called for nothing at every gradient.
        self._end = weakref.finalize(self, _remove, self._hooks)

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimizers themselves."""
        return [unit.part for unit in self.units]

    def kinds(self) -> list[str]:
        """What kinds of state there are: two runs with the same kinds can read each other's."""
        return sorted(
            {type(part).__name__ + ("8bit" if getattr(part, "eight_bit", False) else "") for part in self.parts}
        )

    @property
    def peak_learning_rate(self) -> float:
        """The peak of the first group: what metrics call lr."""
        return float(self._peaks[0][0])

    def set_factor(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for part, peaks in zip(self.parts, self._peaks):
            for group, peak in zip(part.param_groups, peaks):
                group["lr"] = peak * factor

    def peaks(self) -> dict[str, float]:
        """The peak learning rates by the name of their setting."""
        return {
            "muon_learning_rate" if isinstance(part, Muon) else "learning_rate": peaks[0]
            / part.param_groups[0]["ratio"]
            for part, peaks in zip(self.parts, self._peaks)
        }

    def change(self, name: str, value: float) -> None:
        """Set the peak `learning_rate` or `muon_learning_rate`, or the `weight_decay` of what decays, from now on."""
        for part, peaks in zip(self.parts, self._peaks):
            for index, group in enumerate(part.param_groups):
                if name == "weight_decay" and group["decays"]:
                    group["weight_decay"] = value
                elif name == ("muon_learning_rate" if isinstance(part, Muon) else "learning_rate"):
                    peaks[index] = value * group["ratio"]

    def step(self) -> None:
        """Step every parameter that has a gradient; nothing is left to do where backward has done it."""
        if not self.in_backward:
            for unit in self.units:
                unit.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    # --- inside backward ------------------------------------------------------------------------------------------

    def _hook(self, unit: _Unit) -> Any:
        (parameter,) = unit.parameters
        # Weak: what was built for a few timed updates must not go on stepping beside what was built for the run.
        owner, what = weakref.ref(self), weakref.ref(unit)

        def take(_: Tensor) -> None:
            found, taken = owner(), what()
            if found is not None and taken is not None:
                found._take(taken)

        return parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, unit: _Unit) -> None:
        """Step a parameter whose gradient has just become whole, and free the gradient.

        From the first gradient that is not finite on no parameter is stepped any more: weights stay finite.
        """
        (parameter,) = unit.parameters
        assert parameter.grad is not None
        self._squares += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)) ** 2
        if math.isfinite(self._squares):
            unit.step()
        parameter.grad = None

    def taken_norm(self) -> float:
        """The norm of the gradients that backward has taken since the last call (not finite: some were not applied)."""
        norm, self._squares = math.sqrt(self._squares), 0.0
        return norm

    def close(self) -> None:
        """Take the hooks off the parameters; happens by itself when nobody holds this object any more."""
        self._end()

    # --- state ----------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor of state as `parameter name` + `/` + `key`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to the host may be on their way
        return {
            f"{self._names[id(parameter)]}/{key}": value
            for unit in self.units
            for parameter, state in unit.states()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in tensors.items():
            parameter_name, key = name.rsplit("/", 1)
            by_name[parameter_name][key] = value
        for unit in self.units:
            named = {parameter: self._names[id(parameter)] for parameter in unit.parameters}
            unit.load({parameter: by_name[name] for parameter, name in named.items() if name in by_name})


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


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
    states: str = "fp32",
    in_backward: bool = False,
    gradients: str = "fp32",
    lora_plus_ratio: float = 1.0,
) -> Optimizers:
    """`adamw`, `adafactor`, or `muon` (matrices by Muon, embeddings and vectors by AdamW).

    `states`: fp32, 8bit or host (nothing changes where training runs on the host). bf16 weights are rounded
    stochastically at every step. `gradients`: fp32 or bf16, the format in which they are kept; sums over micro-batches
    are rounded to bf16 each time, which puts them off by 0.2 % for 1, 0.3 % for 4, 0.5 % for 16, 1 % for 64 of them.
    `lora_plus_ratio`: so much faster the output matrices of adapters go than all else (LoRA+, Hayou et al. 2024).
    """
    kinds = parameter_kinds(model)
    names = {id(parameter): name for group in kinds.values() for name, parameter in group}
    matrices, embeddings, vectors = ([p for _, p in kinds[kind]] for kind in ("matrices", "embeddings", "vectors"))
    kept = torch.bfloat16 if gradients == "bf16" else torch.float32
    for parameter in (*matrices, *embeddings, *vectors):
        if parameter.grad_dtype != kept:
            parameter.grad = None
            parameter.grad_dtype = kept
    on_host = states == "host" and not _host_already((*matrices, *embeddings, *vectors))
    eight_bit = states == "8bit"

    def muon(groups: list[Group]) -> torch.optim.Optimizer:
        return Muon(groups, lr=muon_learning_rate, compute_dtype=muon_dtype, eight_bit=eight_bit)

    def rest(groups: list[Group]) -> torch.optim.Optimizer:
        if optimizer == "adafactor":
            return torch.optim.Adafactor(groups, lr=learning_rate, eps=(None, _WHOLE_STEPS))
        if eight_bit:
            return AdamW8bit(groups, lr=learning_rate, **_ADAM)
        return torch.optim.AdamW(groups, lr=learning_rate, fused=True, **_ADAM)

    decaying: Group = {"weight_decay": weight_decay, "decays": True, "ratio": 1.0}
    faster: list[nn.Parameter] = []
    if lora_plus_ratio != 1:
        faster = [p for p in matrices if ".lora_B." in names[id(p)]]
        matrices = [p for p in matrices if ".lora_B." not in names[id(p)]]
    plans: list[tuple[Maker, list[Group]]] = []
    takes_matrices, peak = (muon, muon_learning_rate) if optimizer == "muon" and matrices else (rest, learning_rate)
    if takes_matrices is muon:
        plans.append((muon, [{**decaying, "params": matrices}]))
        matrices = []
    plans.append(
        (
            rest,
            [
                {**decaying, "params": matrices + embeddings},
                {"params": vectors, "weight_decay": 0.0, "decays": False, "ratio": 1.0},
            ],
        )
    )
    if faster:
        quick = {**decaying, "params": faster, "lr": peak * lora_plus_ratio, "ratio": lora_plus_ratio}
        plans.append((takes_matrices, [quick]))
    units: list[_Unit] = []
    for make, groups in plans:
        for group in groups:
            units += _units(group, make, native=make is muon or eight_bit, alone=in_backward, on_host=on_host)
    return Optimizers(units, names, in_backward=in_backward)


def _host_already(parameters: Iterable[nn.Parameter]) -> bool:
    return all(parameter.device.type == "cpu" for parameter in parameters)


def _units(group: Group, make: Maker, *, native: bool, alone: bool, on_host: bool) -> list[_Unit]:
    """The units of a group; `native` optimizers take weights and gradients of any type."""
    together: list[nn.Parameter] = []
    made: list[_Unit] = []
    for parameter in group["params"]:
        widened = not native and (parameter.dtype != torch.float32 or parameter.grad_dtype != torch.float32)
        if alone or widened or on_host:
            made.append(_Unit({**group, "params": [parameter]}, make, widened=widened, on_host=on_host))
        else:
            together.append(parameter)
    return ([_Unit({**group, "params": together}, make, widened=False, on_host=False)] if together else []) + made
