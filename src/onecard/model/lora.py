"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021), by the library PEFT: its files load elsewhere too.

A model goes in and is changed in place: `add` puts adapters beside its linear layers, `save` writes them as a PEFT
adapter directory, `merge` adds them to the weights that they stand beside and takes them out again. The head gets no
adapter, because the loss multiplies with its weight directly; nor do experts that a model keeps in one stacked tensor.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact
from onecard.errors import ConfigError, MissingExtra
from onecard.model import attention
from onecard.settings import nearest

if TYPE_CHECKING:
    from torch import Tensor

_ADAPTER = "default"
# Where adapters begin: default (A random, B zero), gaussian (the same, A normally distributed), orthogonal (both
# random, their product zero); the others with a part of the weights themselves: their largest singular directions
# (PiSSA, Meng et al. 2024; niter: found by 16 rounds of iteration) or the first of a QR decomposition (OLoRA).
CHANGES_WEIGHTS = ("pissa", "pissa_niter_16", "olora")
STARTS = ("default", "gaussian", "orthogonal", *CHANGES_WEIGHTS)
# What adapters began with, where that was taken out of the weights: an attribute of the model.
_BEGUN = "adapters_begun"


def add(
    model: Any,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: list[str] | None = None,
    seed: int = 0,
    besides: Sequence[str] = (),
    *,
    rank_stabilised: bool = False,
    decomposed: bool = False,
    start: str = "default",
) -> list[str]:
    """Freeze `model` and put adapters beside its linear layers; returns the full names of those, in order.

    The output of a layer becomes W x + alpha / rank * B A x, with A random from `seed` and B zero, both fp32: the model
    still computes what it did. `target_modules` are the ends of layer names, such as q_proj or mlp.up_proj; none means
    every linear layer inside the repeated layers. ConfigError names one that the model lacks. `besides` are modules at
    the top of the model that are learned whole. `rank_stabilised` divides alpha by the root of the rank instead
    (Kalajdzievski 2023); `decomposed` learns the length of each row of the adapted weight as well (DoRA, Liu et al.
    2024). Layers in 4 bits stay so. `start` is one of STARTS; with those of CHANGES_WEIGHTS the frozen weights lose
    what the adapters begin with, so that the model still computes the same up to rounding.
    """
    import torch

    names = linear_layers(model)
    chosen = _chosen(names, target_modules or [])
    transposed = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in chosen)
    _check_start(start, rank, decomposed=decomposed, transposed=transposed, model=model, names=chosen)
    ends = target_modules or {_end(name) for name in chosen}
    scale: Any = int(alpha) if alpha == int(alpha) else alpha  # other readers of the file expect an integer
    with quiet(), torch.random.fork_rng(devices=[]):
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        settings = LoraConfig(
            r=rank,
            lora_alpha=scale,
            lora_dropout=dropout,
            target_modules=sorted(ends),
            bias="none",
            use_rslora=rank_stabilised,
            use_dora=decomposed,
            task_type="SEQ_CLS" if besides else "CAUSAL_LM",
            fan_in_fan_out=transposed,
            init_lora_weights=True if start == "default" else start,  # type: ignore[arg-type]
        )
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    assert adapted == chosen, "the library adapts the layers that were chosen"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.partition(".")[0] in besides)
        if is_adapter(name):
            # Whatever the weights are in: small steps would be lost in 16 bits.
            parameter.data = parameter.data.float()
    if start in CHANGES_WEIGHTS:
        begun = {name: p.detach().clone() for name, p in model.named_parameters() if is_adapter(name)}
        setattr(model, _BEGUN, begun)
    return chosen


def _check_start(
    start: str, rank: int, *, decomposed: bool, transposed: bool, model: Any, names: Sequence[str]
) -> None:
    """ConfigError where a start cannot be had."""
    refused = None
    if start == "orthogonal" and rank % 2:
        refused = f"needs an even rank, and lora_rank = {rank}"
    elif start == "olora" and transposed:
        refused = "is not for layers with transposed weights, as GPT-2 has them"
    elif start in CHANGES_WEIGHTS and decomposed:
        refused = "takes a part out of the frozen weights, of which decomposed = true learns the lengths"
    elif start not in ("default", "gaussian") and any(
        not model.get_submodule(name).weight.is_floating_point() for name in names
    ):
        refused = "begins with the weights themselves, which quantization = nf4 has rounded"
    elif start in CHANGES_WEIGHTS:
        small = [name for name in names if rank > min(model.get_submodule(name).weight.shape)]
        if small:
            refused = f"needs a rank of at most {min(model.get_submodule(small[0]).weight.shape)} ({small[0]})"
    if refused is not None:
        raise ConfigError(f"lora_start = {start} {refused}.", "Set lora_start = default.")


def linear_layers(model: Any) -> list[str]:
    """Full names of the linear layers inside the repeated layers (those with a number in their name), in order."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and any(part.isdigit() for part in name.split("."))
    ]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(part in name for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


def coverage(names: list[str]) -> str:
    """How many layers of each kind got an adapter, for a person: "q_proj 30, v_proj 30"."""
    return ", ".join(f"{end} {count}" for end, count in Counter(map(_end, names)).items())


def save(
    model: Any, directory: Path, base: Path, besides: Sequence[str] = (), facts: Mapping[str, Any] | None = None
) -> None:
    """Write the adapters as a directory that `peft.PeftModel.from_pretrained` loads over the model in `base`.

    Where they began with a part of the weights, that part is written as a second half of negative sign, so that the
    file fits the weights as they are in `base`. `facts` go into the manifest.
    """
    from safetensors.torch import save_file

    settings = copy.copy(model.peft_config[_ADAPTER])
    settings.base_model_name_or_path = str(base.resolve())
    settings.inference_mode = True
    settings.target_modules = sorted(settings.target_modules)
    with quiet():
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    if hasattr(model, _BEGUN):
        found = _for_the_whole_weights(found, getattr(model, _BEGUN), settings)
    # The names are those inside a PeftModel, which wraps the model twice.
    for name in besides:
        found |= {f"{name}.{key}": value for key, value in model.get_submodule(name).state_dict().items()}
    settings.modules_to_save = list(besides) or None
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    with artifact.new_directory(directory, replace=True) as temporary:
        settings.save_pretrained(str(temporary))
        weights = temporary / "adapter_model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        # Written for the owner alone; the other files are for whom umask says.
        weights.chmod((temporary / "adapter_config.json").stat().st_mode)
        written = {"rank": settings.r, "alpha": settings.lora_alpha, "target_modules": settings.target_modules}
        artifact.write_manifest(temporary, "adapter", settings=written, result=dict(facts or {}))


def _for_the_whole_weights(found: dict[str, Any], begun: dict[str, Any], settings: Any) -> dict[str, Any]:
    """W - B0 A0 + B A = W + [B, -B0] [A; A0]: adapters of twice the rank at the same scale, and their settings."""
    import torch

    made = {}
    for name, tensor in found.items():
        stem, _, end = name.rpartition(".")
        first = begun[f"{stem}.{_ADAPTER}.{end}"].to(tensor.device)
        made[name] = torch.cat([tensor, first], dim=0) if ".lora_A." in name else torch.cat([tensor, -first], dim=1)
    settings.r *= 2
    settings.lora_alpha *= 2**0.5 if settings.use_rslora else 2
    settings.init_lora_weights = True
    return made


def merge(model: Any) -> None:
    """Add every adapter to the weight that it stands beside and remove it: `model` is of its own kind again."""
    for name, module in adapted_layers(model):
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config
    if hasattr(model, _BEGUN):
        delattr(model, _BEGUN)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def adapted_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers that have adapters beside them, by full name."""
    with quiet():
        from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def merge_into(model: Any, adapted: Any, besides: Sequence[str] = ()) -> None:
    """Add the adapters of `adapted`, and its modules `besides`, to the weights of `model`, which has none itself."""
    import torch

    with quiet():
        from peft import inject_adapter_in_model

        inject_adapter_in_model(copy.deepcopy(adapted.peft_config[_ADAPTER]), model, adapter_name=_ADAPTER)
    trained = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) or name.partition(".")[0] in besides:
                parameter.data = trained[name].detach().to("cpu", torch.float32)
    merge(model)


def deviation(one: Any, other: Any) -> float:
    """How far the logits of two models are apart on a short arbitrary text: see `apart`."""
    return apart(logits(one), logits(other))


def apart(one: Tensor, other: Tensor) -> float:
    """Mean distance of two sets of logits, over the spread of those of `other`."""
    return float((one - other).abs().mean() / other.std())


def logits(model: Any, text_ids: Sequence[int] | None = None) -> Tensor:
    """What a model says to these ids, 1 x tokens x rows, fp32 on the host; none given: a short arbitrary text."""
    import torch

    was_training = model.training
    attention.use_own(model)
    model.eval()
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (7 * torch.arange(48) + 1).remainder(rows) if text_ids is None else torch.tensor(text_ids)
    ids = ids.unsqueeze(0).to(next(model.parameters()).device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found: Tensor = model(input_ids=ids).logits.float().cpu()
    model.train(was_training)
    return found


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _chosen(names: list[str], targets: list[str]) -> list[str]:
    """The layers whose name ends in one of `targets`; ConfigError names a target without any."""
    if not names:
        raise ConfigError("The model has no linear layers that could get adapters.", "Set lora_rank = 0.")
    for target in targets:
        if not any(_matches(name, target) for name in names):
            known = sorted({_end(name) for name in names})
            hint = nearest(target, known).strip()
            raise ConfigError(
                f"target_modules: the model has no linear layer {target} that could get an adapter.",
                f"{hint} It has: {', '.join(known)}.".strip(),
            )
    return [name for name in names if not targets or any(_matches(name, target) for target in targets)]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


@contextmanager
def quiet() -> Iterator[None]:
    """Use PEFT without what it and torchao say about parts that are not for this machine; MissingExtra without it."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as fault:
        if fault.name != "peft":
            raise
        raise MissingExtra("peft", "Training adapters (lora_rank)") from fault
    finally:
        logging.disable(before)
